"""`with audit()` and `verify()` in a program: what they print, and what a program asks of their
results.
"""

from __future__ import annotations

import re
import sys

import pytest
import torch

import gradcheck_suite
from gradcheck_suite.core.results import Result, Violation, Weight
from gradcheck_suite.verification.verify import verify


def trained(reset=True):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        torch.nn.functional.mse_loss(model(torch.ones(2, 2)), torch.ones(2, 1)).backward()
        optimizer.step()
        if reset:
            optimizer.zero_grad()


def test_an_audit_prints_its_verdict_on_standard_error_when_it_is_closed(capsys):
    with gradcheck_suite.audit(name="mine") as audit:
        trained()
        assert capsys.readouterr() == ("", "")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("\nmine  holds  3 steps judged of 3")
    audit.close()
    assert capsys.readouterr() == ("", ""), "printed twice"
    assert audit.holds
    audit.result.raise_for_violation()


def test_a_violation_is_printed_when_it_is_found_and_raised_when_it_is_asked_for(capsys):
    with gradcheck_suite.audit(name="mine") as audit:
        trained(reset=False)
        assert re.search(r"test_in_python\.py:\d+: stale-window: ", capsys.readouterr().err)
    assert "mine  VIOLATED" in capsys.readouterr().err
    assert not audit.holds
    with pytest.raises(gradcheck_suite.ViolationFound, match=": stale-window: "):
        audit.result.raise_for_violation()
    assert "stale-window" in str(audit.result)


def test_a_quiet_audit_prints_nothing_and_its_result_says_all_of_it(capsys):
    with gradcheck_suite.audit(name="mine", quiet=True) as audit:
        trained(reset=False)
    assert capsys.readouterr() == ("", "")
    print(audit.result)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("mine  VIOLATED  3 steps judged of 3")
    assert any(re.search(r"^ *\d+ \| .* loss, backward$", line) for line in said)


def test_what_was_not_judged_holds_for_nobody(capsys):
    with gradcheck_suite.audit(name="mine") as audit:
        pass
    assert "unjudged: no backward pass and no optimizer.step() was seen" in capsys.readouterr().err
    assert not audit.holds
    with pytest.raises(gradcheck_suite.UsageError, match="unjudged"):
        audit.result.raise_for_violation()


def test_a_standard_error_that_the_program_closed_ends_no_run(monkeypatch, tmp_path):
    with open(tmp_path / "log", "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        with gradcheck_suite.audit() as audit:
            trained(reset=False)
            closed.close()
    assert audit.result.violation.diagnosis == "stale-window"


ROWS = tuple(
    Weight(micro_batch=j, where="f.py:1", count=n, expected=0.25, observed=w)
    for j, n, w in ((0, 1.0, 0.5), (1, 3.0, -0.1))
)
VIOLATION = Violation(
    "gradient", "mean-of-means", "<b>escaped</b>", where="f.py:1", weights=ROWS, command="audit"
)


def test_html_has_a_bar_for_each_weight_and_escapes_what_is_not_its_own():
    html = Result("<script>.py", violations=(VIOLATION,), command="audit")._repr_html_()
    assert "width:100%" in html  # 0.5 is the largest
    assert "width:20%" in html  # 0.1 of 0.5
    assert html.count("left:50%") == 2  # 0.25 is expected
    assert "<script>" not in html
    assert "<b>escaped</b>" not in html
    assert ">violated</b>" in html


@pytest.mark.usefixtures("without_second_opinion", "only_linear")
def test_verify_prints_what_the_command_prints(capsys):
    def never(run):
        pass

    result = verify(never, name="never", examples=1)
    out, err = capsys.readouterr()
    assert err == ""
    assert out == f"{result}\n"
    assert re.search(r"test_in_python\.py:\d+: never-stepped: ", out)
    assert "@example(Case(" in out
    with pytest.raises(gradcheck_suite.ViolationFound, match="never-stepped"):
        result.raise_for_violation()
    verify(never, name="never", examples=1, quiet=True)
    assert capsys.readouterr().out == ""


def test_a_loop_without_a_judged_case_neither_holds_nor_is_violated():
    result = Result("mine", 3, 0.1, unjudged="none of 3 cases could be judged: no kernel")
    assert result.verdict == "unjudged"
    with pytest.raises(
        gradcheck_suite.UsageError, match="none of 3 cases could be judged: no kernel"
    ):
        result.raise_for_violation()
    assert Result("mine", 3, 0.1, judged=3).verdict == "holds"
