"""The place of a violation is the line to change, and the loss's line is that of the loss that went
backward.
"""

from __future__ import annotations

import json

import pytest

from gradcheck_suite.__main__ import main
from tests.auditing.running import audited

HEAD = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def data(n):
    return torch.randn(n, 3), torch.randint(0, 2, (n,))


def sound():
    for _ in range(3):
        x, y = data(4)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
MEANS = """
sound()
for window in ((4, 2, 7, 1), (3, 3, 1), (2, 5)):
    for rows in window:
        x, y = data(rows)
        wrong = F.cross_entropy(model(x), y) / len(window)  # change
        wrong.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OF_TWO_LINES = """
sound()
for window in ((4, 2, 7, 1), (3, 3, 1), (2, 5)):
    for rows in window:
        x, y = data(rows)
        wrong = F.cross_entropy(model(x), y)  # loss
        wrong = wrong / len(window)  # change
        wrong.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ONCE = """
sound()
x, y = data(3)
losses = [F.cross_entropy(model(data(n)[0]), data(n)[1]) / 2 for n in (1, 5)]
for loss in losses:
    loss.backward()  # change
optimizer.step()
optimizer.zero_grad()
"""
"""A loss that no stack shows, since it was made before anything new went backward."""
RESET = """
for step in range(3):
    for _ in range(3):
        x, y = data(4)
        optimizer.zero_grad()  # change
        loss = F.cross_entropy(model(x), y) / 3  # loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
EDIT = """
sound()
for step in range(3):
    for _ in range(3):
        x, y = data(4)
        loss = F.cross_entropy(model(x), y) / 3  # loss
        loss.backward()
        for p in model.parameters():
            p.grad.mul_(0.5)  # change
    optimizer.step()
    optimizer.zero_grad()
"""
FAULTS = {
    "means after a sound loss of the same expression": (MEANS, "mean-of-means", None),
    "a division on a line of its own": (OF_TWO_LINES, "mean-of-means", "division"),
    "a loss without a stack": (ONCE, "mean-of-means", None),
    "a reset": (RESET, "reset-inside-window", "reset"),
    "an edit": (EDIT, "rescaled-accumulator", "edit"),
}
"""Name -> a script, its fault, and what is to change at the line marked `change`."""


@pytest.mark.parametrize("name", FAULTS)
def test_the_place_is_the_line_to_change(name, tmp_path):
    text, diagnosis, change = FAULTS[name]
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    result, _ = audited(path)
    lines = path.read_text().splitlines()
    marked = {
        mark: f"{path}:{number}"
        for number, line in enumerate(lines, 1)
        for mark in ("change", "loss")
        if line.endswith(f"# {mark}")
    }
    assert {v.diagnosis for v in result.violations} == {diagnosis}, result
    for violation in result.violations:
        assert (violation.where, violation.change) == (marked["change"], change), result
        assert violation.loss == marked.get("loss")
        assert violation.place == marked["change"]


def test_every_output_has_the_same_place(tmp_path, capfd):
    script, path = tmp_path / "train.py", tmp_path / "r.json"
    script.write_text(HEAD + RESET)
    line = 1 + script.read_text().splitlines().index("        optimizer.zero_grad()  # change")
    assert main(["audit", "--json", str(path), "--output-format", "github", str(script)]) == 1
    out, err = capfd.readouterr()
    assert f"line={line},title=reset-inside-window" in out
    assert f"{script}:{line}: reset-inside-window: " in err
    assert json.loads(path.read_text())["results"][0]["violation"]["where"] == f"{script}:{line}"
    assert main(["audit", "--accept", f"reset-inside-window@train.py:{line}", str(script)]) == 0
    assert main(["audit", "--output-format", "sarif", str(script)]) == 1
    (said,) = json.loads(capfd.readouterr().out)["runs"][0]["results"]
    assert said["locations"][0]["physicalLocation"]["region"]["startLine"] == line


@pytest.mark.parametrize("weight", ["/ len(window)", "* rows / sum(window)"])
def test_a_sound_loss_of_the_same_operations_is_not_blamed(weight, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + MEANS.replace("/ len(window)", weight))
    result, _ = audited(path)
    first = 1 + path.read_text()[: path.read_text().index("F.cross")].count("\n")
    assert all(violation.where != f"{path}:{first}" for violation in result.violations)
    assert result.holds == ("rows" in weight)
