"""Ports in public code: the table, what of it can be run here, and the page."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from gradcheck_suite.core.causes import CAUSES
from gradcheck_suite.port.result import PortFinding, PortResult
from studies.ports.public import RELEASES, architectures, lacking, write_row
from studies.ports.scoreboard import Row, label, run
from tests.docs.pages import ROOT

PAGE = ROOT / "studies" / "docs" / "ports-in-public-code.md"
FOUND = architectures()
needs_flax = pytest.mark.skipif(
    lacking("flax-0.12.8") is not None, reason="needs this release of flax"
)


def test_a_fault_has_a_place_causes_of_the_table_and_a_truth_and_an_equal_pair_none():
    for release in RELEASES.values():
        for model in release["model"]:
            given = [key in model for key in ("places", "causes", "truth")]
            assert all(given) or not any(given), model["name"]
            assert set(model.get("causes", ())) <= CAUSES.keys(), model["name"]


def test_the_rows_of_the_page_are_pairs_of_the_table():
    names = {label(one, variant) for one in FOUND.values() for variant in (*one.faults, *one.forms)}
    shown = re.findall(r"^\| (\S+/\S+) \|", PAGE.read_text(), re.MULTILINE)
    assert len(shown) > 30
    assert len(set(shown)) == len(shown)
    assert set(shown) <= names


def test_a_release_of_another_version_is_left_out_by_name(monkeypatch):
    for name, packages in {
        "here": {"numpy": version("numpy")},
        "old": {"numpy": "0.1"},
        "none": {"no-such": "1"},
    }.items():
        monkeypatch.setitem(RELEASES, name, {"packages": packages})
    assert lacking("here") is None
    assert lacking("old") == f"numpy 0.1 is wanted, {version('numpy')} is installed"
    assert lacking("none") == "no-such 1 is wanted, none is installed"


def test_a_row_of_the_page_is_written_over_the_old_one(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("| pair |\n| --- |\n| flax-0.12.8/gru-cell | old |\n\nend\n")
    found = PortFinding.of("load", "model", "missing-bias", "")
    write_row(
        page,
        Row("flax-0.12.8/gru-cell", None, PortResult("x", violations=(found,)), 2.0, usual=False),
    )
    write_row(page, Row("transformers-4.49.0/bert", None, "refused: why", 1.0, usual=True))
    first = (
        "| flax-0.12.8/gru-cell | differs | `missing-bias` at `model`"
        " | no recurrent bias of the new gate | fails | 2 |"
    )
    second = "| transformers-4.49.0/bert | refused: why |  | equal | passes | 1 |"
    assert page.read_text() == f"| pair |\n| --- |\n{first}\n{second}\n\nend\n"


@needs_flax
def test_the_bias_that_flax_has_not_is_found():
    assert run(FOUND["flax-0.12.8"], "gru-cell").named


@needs_flax
@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_that_bias_is_all_that_differs(bias):
    """The truth of the row by numbers alone: both cells are one function exactly where torch's bias
    is zero.
    """
    pair = FOUND["flax-0.12.8"].pair("gru-cell")
    module = pair["module"].double()
    module.model.bias_hh.data[-4:] = bias
    state = {name: value.numpy() for name, value in module.state_dict().items()}
    with jax.enable_x64(True), torch.no_grad():
        inputs = [np.asarray(a, np.float64) for a in pair["inputs"]]
        ours, theirs = (
            module(*map(torch.as_tensor, inputs)),
            pair["apply"](pair["load"](state), *inputs),
        )
    assert (np.abs(ours.numpy() - np.asarray(theirs)).max() < 1e-12) == (bias == 0)


@pytest.mark.parametrize("options", [["--public", "--page", "none.md"], ["--page", "README.md"]])
def test_a_page_is_that_of_the_public_ports(run, options):
    outcome = run("ports", *options)
    assert outcome.status == 2
    assert "expected a file whose table has the rows of --public" in outcome.err
