"""Findings and reasons have a name, a place and a row; each is seen where it is planted, and a sound
twin has none.
"""

from __future__ import annotations

import json
import sys

import pytest

import gradcheck_suite
from gradcheck_suite.__main__ import main
from gradcheck_suite.core.findings import FINDINGS, finding
from tests.auditing.reported import REPORTED
from tests.auditing.running import audited

HEAD = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
"""


def of_script(text, tmp_path, **options):
    """Return the result of an audit of a script that begins with `HEAD`."""
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    return audited(path, **options)[0]


def named(result):
    """Return the names of a result's findings and reasons."""
    return [one.name for one in result.named_findings]


NAMES = {
    "finding_detached_body": "parameter-without-gradient",
    "finding_listed_twice": "parameter-listed-twice",
    "finding_overlaid": "overlaid-parameters",
    "finding_schedule": "step-per-micro-batch",
    "finding_average": "step-per-micro-batch",
    "finding_clipped_scaled": "scaled-clipping",
    "finding_warm_up": "gradient-before-loop",
    "finding_always_removed": "removed-gradient",
    "finding_called_with_other_tensors": "not-recomputed",
    "finding_penalty_not_divided": "undivided-term",
    "sound_own_gradient": "own-gradient",
}
"""A script of `reported` -> the finding or the reason that it shows."""


@pytest.mark.filterwarnings(
    "ignore:optimizer contains a parameter group", "ignore:Detected call of"
)
@pytest.mark.parametrize("script", NAMES)
def test_what_a_report_shows_has_its_name(script, tmp_path):
    path = tmp_path / f"{script}.py"
    path.write_text(REPORTED[script][0].text)
    result, _ = audited(path)
    assert NAMES[script] in named(result), result
    assert [str(one) for one in result.named_findings] == [*result.findings]
    assert all(
        one.name in FINDINGS or one.name == "step-per-micro-batch" for one in result.named_findings
    )


def test_a_name_without_a_row_is_refused():
    with pytest.raises(AssertionError, match=r"no row in core/findings.py"):
        finding("new-name", "sentence")


LOOP = """
for step in range(4):
    LOSS.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OF_ALL = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
STRAYS = {
    "scale": (
        "scale = torch.nn.Parameter(torch.ones(()))\n" + OF_ALL + LOOP,
        "(scale * model(torch.randn(5, 3)).square().mean())",
        1,
    ),
    "frozen by mistake": (
        "optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)\n" + LOOP,
        "model(torch.randn(5, 3)).square().mean()",
        2,
    ),
    "made after the optimizer": (
        OF_ALL + "model.append(torch.nn.Linear(2, 1))\n" + LOOP,
        "model(torch.randn(5, 3)).square().mean()",
        2,
    ),
}
"""Name -> a script, its loss, and how many parameters no optimizer has."""


@pytest.mark.parametrize("name", STRAYS)
def test_parameters_that_no_optimizer_has_are_named(name, tmp_path):
    text, loss, number = STRAYS[name]
    result = of_script(text.replace("LOSS", loss), tmp_path)
    (one,) = [one for one in result.named_findings if one.name == "parameter-without-optimizer"]
    assert one.sentence.startswith(f"{number} parameter")
    lines = (tmp_path / "train.py").read_text().splitlines()
    assert "backward()" in lines[int(one.where.rpartition(":")[2]) - 1]
    assert result.verdict == "holds"


OWNED = {
    "of another optimizer, which steps later": """
other = torch.nn.Linear(2, 1)
optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
for step in range(6):
    other(model(torch.randn(5, 3))).square().mean().backward()
    if step < 3 or step % 2:
        optimizers[0].step()
    else:
        optimizers[1].step()
    for one in optimizers:
        one.zero_grad()
""",
    "moved by hand": """
scale = torch.nn.Parameter(torch.ones(()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    (scale * model(torch.randn(5, 3)).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        scale -= 0.1 * scale.grad
    scale.grad = None
""",
    "inputs": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(5, 3, requires_grad=True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}
"""Name -> a script in which something updates each parameter."""


@pytest.mark.parametrize("name", OWNED)
def test_parameters_that_something_updates_are_not_named(name, tmp_path):
    assert "parameter-without-optimizer" not in named(of_script(OWNED[name], tmp_path))


def test_the_command_prints_and_writes_the_name_the_place_and_the_rule(tmp_path, capfd):
    text, loss, _ = STRAYS["scale"]
    script, path = tmp_path / "train.py", tmp_path / "r.json"
    script.write_text(HEAD + text.replace("LOSS", loss))
    assert main(["audit", "--json", str(path), str(script)]) == 0
    err = capfd.readouterr().err
    (result,) = json.loads(path.read_text())["results"]
    (one,) = result["named_findings"]
    assert f"finding: {one['where']}: {one['sentence']}: {one['remedy']} [{one['name']}]" in err
    assert (one["kind"], one["severity"], one["steps"]) == ("finding", "warning", 1)
    assert main(["audit", "--output-format", "sarif", str(script)]) == 0
    (run,) = json.loads(capfd.readouterr().out)["runs"]
    (said,) = run["results"]
    assert (said["ruleId"], said["level"]) == ("parameter-without-optimizer", "warning")
    region = said["locations"][0]["physicalLocation"]["region"]
    assert region["startLine"] == int(one["where"].rpartition(":")[2])


def test_why_nothing_was_judged_has_a_name(tmp_path, capfd):
    script, path = tmp_path / "train.py", tmp_path / "r.json"
    script.write_text("")
    assert main(["audit", "--json", str(path), str(script)]) == 2
    (result,) = json.loads(path.read_text())["results"]
    assert result["unjudged_reason"] == "nothing-trained"


SCALE = HEAD + STRAYS["scale"][0].replace("LOSS", STRAYS["scale"][1])
LINE = 1 + SCALE[: SCALE.index(".backward()")].count("\n")
NAME = "parameter-without-optimizer"


@pytest.mark.parametrize(
    ("options", "table", "status", "said"),
    [
        ([], "", 0, f"finding: train.py:{LINE}: "),
        (["--fail-on", NAME], "", 1, f"finding, which fails: train.py:{LINE}: "),
        (["--fail-on", "findings"], "", 1, "finding, which fails: "),
        (["--fail-on", "zero-gradient", "--fail-on", "no-pass"], "", 0, "finding: "),
        ([], f"fail-on = ['{NAME}']", 1, "finding, which fails: "),
        ([], "fail-on = ['findings']", 1, "finding, which fails: "),
        ([], "[tool.gradcheck-suite.audit]\nfail-on = ['findings']", 1, "which fails: "),
        (["--accept", NAME], "", 0, "accepted: "),
        (["--accept", f"{NAME}@train.py"], "", 0, "accepted: "),
        (["--accept", f"{NAME}@train.py:{LINE}", "--fail-on", "findings"], "", 0, "accepted: "),
        (["--accept", f"{NAME}@train.py:1", "--fail-on", "findings"], "", 1, "which fails: "),
        (["--accept", f"{NAME}@other.py", "--fail-on", NAME], "", 1, "which fails: "),
    ],
)
def test_a_finding_fails_or_is_accepted_as_it_is_asked(
    options, table, status, said, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCALE)
    (tmp_path / "pyproject.toml").write_text(f"[tool.gradcheck-suite]\n{table}\n")
    assert main(["audit", "--json", "r.json", *options, "train.py"]) == status
    assert said in capfd.readouterr().err
    (result,) = json.loads((tmp_path / "r.json").read_text())["results"]
    (one,) = result["named_findings"]
    assert (one["fails"], "reason" in one) == (status == 1, said == "accepted: ")
    assert result["verdict"] == "holds"


def test_a_reason_for_which_nothing_was_judged_is_accepted_or_fails(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["audit", "--accept", "nothing-trained", str(script)]) == 0
    assert main(["audit", "--fail-on", "nothing-trained", str(script)]) == 1
    assert main(["audit", "--fail-on", "findings", str(script)]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fail-on", "zero-gradients"], "(did you mean 'zero-gradient'?)"),
        (["--fail-on", "finding"], "(did you mean 'findings'?)"),
        (["--accept", "zero-gradients@train.py:3"], "(did you mean 'zero-gradient'?)"),
        (["--accept", "mean-of-mean"], "(did you mean 'mean-of-means'?)"),
    ],
)
def test_a_name_that_does_not_exist_is_refused(options, said, tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["audit", *options, str(script)]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_failing_finding_raises_in_python(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCALE)
    audited(path)[0].raise_for_violation()
    audited(path, fail_on=["findings"], accept=[NAME])[0].raise_for_violation()
    with pytest.raises(gradcheck_suite.ViolationFound, match=NAME):
        audited(path, fail_on=[NAME])[0].raise_for_violation()
    with pytest.raises(gradcheck_suite.UsageError, match="expected the name of a finding"):
        gradcheck_suite.audit(fail_on="findins")


HELPERS = """
import torch

def send(loss):
    loss.backward()

def step(optimizer):
    optimizer.step()
    optimizer.zero_grad()
"""
IN_FILES = (
    HEAD
    + """
import losses, moves
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in ((4, 2, 7, 1), (3, 3)):
    for rows in window:
        moves.send(losses.of(model(torch.randn(rows, 3)), torch.randint(0, 2, (rows,))) WEIGHT)
    moves.step(optimizer)
"""
)
LOSSES = """
import torch

def of(y, target):
    return torch.nn.functional.cross_entropy(y, target)
"""


@pytest.mark.parametrize("file", ["losses.py", "moves.py"])
@pytest.mark.parametrize("weight", ["/ len(window)", "* rows / sum(window)"])
def test_every_file_that_a_violation_names_is_accepted_and_its_entry_grows_stale(
    file, weight, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("losses.py", LOSSES), ("moves.py", HELPERS)):
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    (tmp_path / "train.py").write_text(IN_FILES.replace("WEIGHT", weight))
    entries = [f'{{fault = "mean-of-means", file = "{file}", reason = "old"}}']
    (tmp_path / "pyproject.toml").write_text(
        f"[tool.gradcheck-suite]\naccept = [{', '.join(entries)}]\n"
    )
    is_gone = "rows" in weight
    assert main(["audit", "train.py"]) == is_gone
    err = capfd.readouterr().err
    assert (f"mean-of-means was not found again in {file}" in err) == is_gone, err
    assert ("accepted: mean-of-means" in err) == (not is_gone)


def test_each_stale_entry_is_reported_beside_one_that_is_used(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCALE)
    names = ((NAME, LINE), (NAME, 1), ("zero-gradient", LINE), ("mean-of-means", LINE))
    entries = [
        f'{{fault = "{name}", file = "train.py", line = {line}, reason = "old"}}'
        for name, line in names
    ]
    (tmp_path / "pyproject.toml").write_text(
        f"[tool.gradcheck-suite]\naccept = [{', '.join(entries)}]\n"
    )
    assert main(["audit", "train.py"]) == 1
    err = capfd.readouterr().err
    assert err.count("was not found again") == 3, err
    for name, line in names[1:]:
        assert f"accept: {name} was not found again in train.py:{line}:" in err
