"""No instrument fails on layers, transformations and modes that are hard to watch, and what the
script itself sees of its operations stays the same.
"""

from __future__ import annotations

import pytest
import torch

from tests.auditing.running import audited, trained
from tests.auditing.surroundings import BESIDE, LAYERS, MODES, PARTS, Script

CONTEXT_OF_THE_GRAPH = "saved tensors may change"
"""A context in which a graph must go backward that was made in it."""
SCRIPTS = [
    *(Script(layer, called_first=first) for layer in LAYERS for first in (False, True)),
    *(Script(beside=[name]) for name in BESIDE),
    *(
        Script(modes=[mode], part=part, faulty=part != "step")
        for mode in MODES
        for part in PARTS
        if (mode, part) != (CONTEXT_OF_THE_GRAPH, "forward")
    ),
    Script(modes=["flops", "operations", "functions", "a device"], faulty=True),
    Script("an input of a subclass", modes=["functions", "operations"]),
    Script("lazy", beside=["vmap"], modes=["flops"], faulty=True),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_no_instrument_fails_and_no_mode_sees_the_audit(script, tmp_path):
    assert_judged(script, tmp_path)


def assert_judged(script: Script, folder) -> None:
    """Assert that a script is judged rightly, and that it does what it does without an audit."""
    path = folder / "train.py"
    path.write_text(script.text())
    plain = trained(path)
    result, names = audited(path, quiet=True)
    failed = [one for one in (*result.findings, result.unjudged or "") if "observed" in one]
    assert not failed, failed
    found = [violation.diagnosis for violation in result.violations]
    assert found == (["mean-of-means"] if script.faulty else []), result
    assert result.holds == (not script.faulty), result
    assert names["seen"] == plain["seen"]
    assert all(map(_is_equal, names["trained"], plain["trained"]))


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    plain = (each.to_dense().as_subclass(torch.Tensor) for each in (one, other))
    return torch.equal(*plain)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (Script("lazy"), "a lazy module of the model has made its parameters in a call of it"),
        (Script("a jagged output"), "the model returns a NestedTensor, which computes in Python"),
        (Script(modes=["rounded products"]), "when it is called without Rounds"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_why_a_window_is_not_computed_again_is_said(script, why, tmp_path, monkeypatch):
    monkeypatch.setitem(MODES, "rounded products", "Rounds()")
    path = tmp_path / "train.py"
    path.write_text(script.text())
    result, _ = audited(path, quiet=True)
    assert any(why in finding for finding in result.findings), result
    assert not result.violations


@pytest.mark.parametrize("part", PARTS)
def test_operations_of_the_suite_are_not_counted(part, tmp_path):
    # planted: a script whose counters would show one operation more
    path = tmp_path / "train.py"
    script = Script(modes=["flops", "operations"], part=part)
    path.write_text(script.text())
    counts = trained(path)["seen"]
    path.write_text(
        script.text().replace("opt.step()", "opt.step(); torch.ones(2, 2) @ torch.ones(2, 2)")
    )
    assert (trained(path)["seen"] != counts) == (part in ("all", "step"))
