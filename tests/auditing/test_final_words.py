"""What is printed while a script runs is neither withdrawn nor renamed: text and JSON say the same."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
import torch

import gradcheck_suite
from gradcheck_suite.__main__ import main
from gradcheck_suite.auditing.told import Told
from gradcheck_suite.core.faults import FAULTS
from gradcheck_suite.core.results import Violation
from tests.auditing.reported import REPORTED
from tests.auditing.running import audited
from tests.auditing.scripts import SCRIPTS

HEAD = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Linear(3, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
BY_HAND = """
for step in range(6):
    kept = []
    for n in (5, 3):
        (model(torch.randn(n, 3)).square().mean() * WEIGHT).backward()
        kept.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for p, one, other in zip(model.parameters(), *kept):
        p.grad = one if step == 0 else one + other
    optimizer.step()
    optimizer.zero_grad()
"""
NEGATIVES = """
for step in range(6):
    for i in range(4):
        weight = 2.0 if (step, i) in ((0, 3), (1, 1), (2, 0), (3, 2)) else 1.0
        (F.cross_entropy(model(torch.randn(5, 3)), torch.randint(0, 8, (5,))) * weight / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COEFFICIENT = """
for step in range(6):
    for i in range(3):
        x = torch.randn(5, 3)
        loss = model(x).square().mean() + 0.1 * step * model(x).abs().mean()
        (loss / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SHORT = """
for window in (2, 4, 4, 4, 4):
    for i in range(window):
        (model(torch.randn(5, 3)).square().mean() / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SCRIPTS_OF_MANY_WINDOWS = {
    "by hand": BY_HAND.replace("WEIGHT", "0.5"),
    "by hand, weighted": BY_HAND.replace("WEIGHT", "n / 8"),
    "negatives": NEGATIVES,
    "coefficient": COEFFICIENT,
    "short": SHORT,
}


def told_and_found(path, **options):
    """Return what was printed while a script ran, and the violations of the result."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        result, _ = audited(path, **options)
    while_running = text.getvalue().split(f"\n{path.name}  ")[0]
    told = [line.partition(": ")[2].partition(": ")[0] for line in while_running.splitlines()]
    return [one for one in told if one in FAULTS], result


@pytest.mark.parametrize("name", SCRIPTS_OF_MANY_WINDOWS)
def test_what_is_printed_is_the_verdict(name, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + SCRIPTS_OF_MANY_WINDOWS[name])
    told, result = told_and_found(path)
    assert list(dict.fromkeys(v.diagnosis for v in result.violations)) == list(dict.fromkeys(told))


@pytest.mark.filterwarnings(
    "ignore:optimizer contains a parameter group", "ignore:Detected call of"
)
@pytest.mark.parametrize(
    "name", [name for name, (one, _) in REPORTED.items() if one.verdict != "unjudged"]
)
def test_the_printed_words_of_a_report_are_its_verdict(name, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(REPORTED[name][0].text)
    told, result = told_and_found(path)
    assert {v.diagnosis for v in result.violations} == {*told}, result


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name for name, one in SCRIPTS.items() if one.verdict != "unjudged"]
)
def test_the_printed_words_of_a_script_are_its_verdict(name, scripts):
    told, result = told_and_found(scripts / f"{name}.py")
    assert {v.diagnosis for v in result.violations} == {*told}, result


def violation(diagnosis, step, where="train.py:3", **more):
    """Return a violation of an audited step."""
    return Violation(
        "gradient", diagnosis, "words", command="audit", step=step, where=where, **more
    )


def test_what_was_told_stands_with_the_number_of_its_steps():
    told = Told()
    first = violation("weighted-by-place", 1)
    told.add(first)
    later = violation("weighted-by-place", 0, occurrences=5)
    other = violation("no-gradient", 4)
    assert told.final([later, other]) == [
        violation("weighted-by-place", 1, occurrences=5),
        other,
    ]
    assert told.final([violation("unrecognised-weights", 1), other]) == [first, other]


def test_the_result_so_far_prints_nothing(capfd):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit(quiet=False) as audit:
        for n in (2, 3):
            (model(torch.ones(n, 3)).square().mean() / 2).backward()
        optimizer.step()
        assert [one.diagnosis for one in audit.result.violations] == ["mean-of-means"]
        assert capfd.readouterr().err == ""
    assert "mean-of-means" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["faulty_mean_of_means", "faulty_never_reset"])
def test_a_run_that_stops_prints_its_violation_once(name, scripts, tmp_path, capfd):
    path = tmp_path / "r.json"
    script = str(scripts / f"{name}.py")
    assert main(["audit", "--stop-on-violation", "--json", str(path), script]) == 1
    err = capfd.readouterr().err
    (result,) = json.loads(path.read_text())["results"]
    diagnosis = result["violation"]["diagnosis"]
    assert result["steps"] < 3
    assert f": {diagnosis}: " in err
    assert err.count("fix: ") == 1


SIZED = """
aux = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD([*model.parameters(), *aux.parameters()], lr=0.1)
for window in ((4, 2, 7, 1), (3, 3, 1, 5), (2, 8, 1, 1)):
    for n in window:
        x, y = torch.randn(n, 3), torch.randint(0, 8, (n,))
        LOSS.backward()
    for p in optimizer.param_groups[0]["params"]:
        AFTER
    optimizer.step()
    optimizer.zero_grad()
"""
MAIN = 'F.cross_entropy(model(x), y, reduction="sum") / sum(window)'
BESIDE = f"({MAIN} + 0.1 * F.mse_loss(aux(x), torch.ones(n, 2)) / len(window))"


@pytest.mark.parametrize(
    ("loss", "after", "sized"),
    [
        ("(F.cross_entropy(model(x), y) / len(window))", "pass", True),
        (
            "(4096 * F.cross_entropy(model(x), y) / len(window))",
            "p.grad is None or p.grad.div_(4096)",
            True,
        ),
        (BESIDE, "pass", False),
    ],
)
def test_sizes_are_those_of_the_run_or_not_given(loss, after, sized, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + SIZED.replace("LOSS", loss).replace("AFTER", after))
    result, _ = audited(path)
    (violation,) = result.violations
    assert violation.diagnosis == "mean-of-means"
    assert (violation.gradient_error is not None) == sized
    weight = 0.1 / 2 if not sized else 1.0
    assert violation.weights[0].expected == pytest.approx(weight / 14, rel=1e-4)
    assert violation.weights[0].observed == pytest.approx(weight / 16, rel=1e-4)
