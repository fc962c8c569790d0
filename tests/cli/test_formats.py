"""What CI systems read, and the baseline of accepted faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcheck_suite.core.faults import FAULTS
from gradcheck_suite.core.findings import FINDINGS, finding
from gradcheck_suite.core.formats import Notice, annotation, rendered
from gradcheck_suite.core.results import Result, Violation, notices_of, results_to_json
from gradcheck_suite.port.result import PortFinding, PortResult

MEANS = """
import torch

print("of the script")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for count in (1, 3):
    loss = torch.nn.functional.mse_loss(model(torch.randn(count, 2)), torch.ones(count, 1)) / 2
    loss.backward()
optimizer.step()
"""
FAULT = Violation(
    "gradient",
    "mean-of-means",
    "each mean weighs 1/4 (by up to 95%). Fix: multiply it by its count",
    command="audit",
    step=0,
    where="library/loss.py:7 < src/train me.py:3",
)
ACCEPTED = replace(FAULT, diagnosis="wrong-scale", where="train.py:5", reason="the sum is meant")


def everything():
    """One result of each command, with all that a result can say."""
    findings = (
        finding("unreadable-loss", "the loss cannot be read", "library/loss.py:2 < train.py:9"),
        replace(finding("frameworks-differ", "torch and JAX differ"), steps=3),
        replace(finding("zero-gradient", "all zeros", "train.py:4"), reason="a warm-up"),
        replace(finding("step-per-micro-batch", "a schedule moves", "train.py:6"), fails=True),
    )
    audited = Result(
        "train.py",
        command="audit",
        violations=(FAULT,),
        accepted=(ACCEPTED,),
        named_findings=findings,
    )
    verified = Result(
        "my_loop.py:train", violations=(replace(FAULT, command="verify", where=None),)
    )
    different = PortFinding.of(
        "forward", "layers.0", "epsilon", "1e-6 in place of 1e-5", jax="port.py:4"
    )
    port = PortResult(
        "pair.py:pair",
        violations=(different,),
        precision=(replace(different, kind="precision"),),
        accepted=(replace(different, reason="accept of the pair"),),
    )
    return [audited, verified, port, Result("zero_", unjudged="no case could be judged")]


@pytest.mark.parametrize("form", ["github", "sarif"])
def test_what_a_result_says_in_each_format(form, golden):
    notices = notices_of(everything(), ["accept: clipped was not found again"])
    text = rendered(form, results_to_json([], {}), notices, Path.cwd())
    if form == "sarif":
        run = valid(text)
        for result in run["results"]:
            del result["ruleIndex"]  # `valid` has compared it; each new row moves those after it
        text = "\n".join(map(json.dumps, [run["tool"]["driver"]["rules"][0], *run["results"]]))
    golden(f"formats_{form}", f"{text.rstrip()}\n")


def valid(text):
    """Return the run of a SARIF log, whose results have rules."""
    (run,) = json.loads(text)["runs"]
    rules = run["tool"]["driver"]["rules"]
    known = [*FAULTS, *FINDINGS]
    assert [rule["id"] for rule in rules][: len(known)] == known
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    return run


def unescaped(text, *, is_property):
    """Return a text as the runner of GitHub's actions reads it."""
    codes = {
        "%0D": "\r",
        "%0A": "\n",
        **({"%3A": ":", "%2C": ","} if is_property else {}),
        "%25": "%",
    }
    return re.sub("|".join(codes), lambda found: codes[found[0]], text)


@given(*[st.text(st.sampled_from("a1 %:,\r\n\u00e0A25D0C3"), min_size=1)] * 3)
def test_github_reads_what_was_written(text, title, name):
    notice = Notice("error", title, text, place=f"{name.strip()}.py:12")
    line = annotation(notice, Path("/nowhere"))
    assert not re.search(r"[\r\n]", line)
    head, _, message = line.removeprefix("::error ").partition("::")
    properties = dict(part.split("=", 1) for part in head.split(","))
    assert unescaped(message, is_property=False) == text
    assert unescaped(properties["title"], is_property=True) == title
    assert "line" not in properties or properties["line"] == "12"


def audited(folder, *options, script="train.py"):
    command = [sys.executable, "-m", "gradcheck_suite", "audit", *options, script]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    "end", ["", "import os, sys; sys.stdout.close()", "import os; os._exit(0)"]
)
@pytest.mark.full
def test_standard_output_of_an_audit_is_the_document_alone(tmp_path, end):
    (tmp_path / "train.py").write_text(MEANS + end)
    done = audited(tmp_path, "--output-format", "json", "--json", "r.json")
    assert done.returncode == 1
    assert done.stdout == (tmp_path / "r.json").read_text()
    assert json.loads(done.stdout)["results"][0]["violation"]["diagnosis"] == "mean-of-means"
    assert "of the script\n" in done.stderr
    assert "\ntrain.py:8: mean-of-means: " in done.stderr


def test_an_audit_and_verify_annotate_the_lines_of_a_planted_fault(project, run):
    (project / "train.py").write_text(MEANS)
    outcome = run("audit", "--output-format", "github", "train.py")
    assert outcome.status == 1
    assert re.fullmatch(
        r"::error file=train\.py,line=8,title=mean-of-means::[^\n]+%0Afix: [^\n]+\n", outcome.out
    )
    assert "1 step judged of 1" in outcome.err
    outcome = run("verify", "--output-format", "sarif", "loops.py:no_reset")
    assert outcome.status == 1
    (result,) = valid(outcome.out)["results"]
    place = {
        "artifactLocation": {"uri": "loops.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 13},
    }
    assert (result["ruleId"], result["locations"]) == (
        "stale-window",
        [{"physicalLocation": place}],
    )
    assert "1 of 1 loop violated: loops.py:no_reset\n" in outcome.err


# The baseline


def accepting(project, **entry):
    fields = ", ".join(f"{name} = {json.dumps(value)}" for name, value in entry.items())
    (project / "pyproject.toml").write_text(f"[tool.gradcheck-suite]\naccept = [{{{fields}}}]\n")


@pytest.mark.parametrize(
    ("command", "fault", "file", "line"),
    [("audit", "mean-of-means", "train.py", 8), ("verify", "stale-window", "loops.py", 13)],
)
def test_an_accepted_fault_is_shown_and_fails_only_when_it_is_gone(
    project, run, command, fault, file, line
):
    (project / "train.py").write_text(MEANS)
    faulty = {"audit": "train.py", "verify": "loops.py:no_reset"}[command]
    accepting(project, fault=fault, file=file, line=line, reason="an old model needs it")
    outcome = run(command, "--json", "r.json", faulty)
    assert outcome.status == 0
    assert re.search(
        rf"accepted: {fault}.*; accepted: an old model needs it", outcome.out + outcome.err
    )
    (result,) = json.loads((project / "r.json").read_text())["results"]
    assert (result["violation"], result["accepted"][0]["reason"]) == (None, "an old model needs it")

    accepting(project, fault=fault, file=file, line=line + 1, reason="an old model needs it")
    outcome = run(command, faulty)
    assert outcome.status == 1
    assert (
        outcome.err.count(
            f"accept: {fault} was not found again in {file}:{line + 1}: remove the entry"
        )
        == 1
    )

    accepting(project, fault=fault, file="another.py", reason="an old model needs it")
    outcome = run(command, faulty)
    assert (outcome.status, "not found again" in outcome.err) == (1, False)


def test_an_entry_is_gone_where_its_file_is_judged_and_sound(project, run):
    (project / "train.py").write_text(MEANS.replace("(1, 3)", "(2, 2)"))
    accepting(project, fault="mean-of-means", file="train.py", reason="an old model needs it")
    outcome = run("audit", "--output-format", "json", "train.py")
    assert outcome.status == 1
    (line,) = json.loads(outcome.out)["no_longer_found"]
    assert outcome.err.endswith(f"gradcheck-suite audit: error: {line}\n")
    assert (
        line
        == "accept: mean-of-means was not found again in train.py: remove the entry from pyproject.toml"
    )


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"fault": "wrong-scal", "file": "a.py", "reason": "x"}, "(did you mean 'wrong-scale'?)"),
        (
            {"fault": "wrong-scale", "file": "a.py"},
            "reason is no text: expected entries such as {fault",
        ),
        (
            {"fault": "wrong-scale", "file": 3, "reason": "x"},
            "file is no text: expected entries such as {fault",
        ),
        (
            {"fault": "wrong-scale", "file": "a.py", "reason": "x", "line": 0},
            "expected a positive integer, got 0",
        ),
        (
            {"fault": "wrong-scale", "file": "a.py", "reason": "x", "lines": 1},
            "got 'lines' (did you mean 'line'?)",
        ),
    ],
)
def test_a_wrong_entry_is_one_line(project, run, entry, said):
    accepting(project, **entry)
    outcome = run("verify", "zero_")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert "[tool.gradcheck-suite] in pyproject.toml: accept: " in outcome.err
    assert said in outcome.err
