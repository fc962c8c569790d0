"""Scripts whose first line says what is true of them get that verdict, under that name, at that line."""

from __future__ import annotations

import re

import pytest

from gradcheck_suite.auditing import samples
from tests.auditing.running import audited
from tests.auditing.scripts_with_truth import WITH_TRUTH

TRUTH = re.compile(
    r"# TRUTH (?P<verdict>sound|faulty) ?(?P<name>(?!line )[a-z-]+)? ?(line (?P<line>\d+))?"
)


@pytest.fixture
def result_of(tmp_path):
    def result(name):
        path = tmp_path / f"{name}.py"
        path.write_text(WITH_TRUTH[name].lstrip())
        return audited(path)[0]

    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.share(6)
@pytest.mark.parametrize("name", WITH_TRUTH)
def test_the_verdict_is_what_is_true_of_the_script(name, result_of):
    truth = TRUTH.match(WITH_TRUTH[name].lstrip())
    result = result_of(name)
    assert result.verdict == ("holds" if truth["verdict"] == "sound" else "violated"), result
    if truth["name"] is not None and truth["verdict"] == "faulty":
        # one cause has one name
        assert {one.diagnosis for one in result.violations} == {truth["name"]}, result
    if truth["line"] is not None:
        places = {str(one.where).rpartition(":")[2] for one in result.violations}
        assert truth["line"] in places, result


@pytest.mark.parametrize("name", ["m_s3a", "m_s3c", "m_s3e", "late", "prune"])
def test_elements_that_are_set_to_zero_after_each_pass_are_a_finding(name, result_of):
    result = result_of(name)
    (edited,) = [one for one in result.named_findings if one.name == "edited-gradient"]
    assert "nothing stands in them at the step" in edited.sentence
    windows = 6 if name == "late" else result.windows
    assert edited.steps == windows


def test_parameters_of_another_pass_are_said_as_they_were_measured(result_of):
    """In a window that is not computed again: both forwards had the same parameters."""
    (stale,) = result_of("f6_ema_swap").violations
    assert stale.step == 5
    assert (
        "when one backward pass of the window began than when another one did" in stale.explanation
    )
    assert "computed with different ones" not in stale.explanation
    assert "f6_ema_swap.py:29)" in stale.explanation
    assert "f6_ema_swap.py:24 or " in stale.explanation
    assert stale.explanation.endswith("reset the gradients before its passes")


@pytest.mark.parametrize(("name", "step"), [("m_embreset", 4), ("m_stem", 5)])
def test_a_fault_of_rows_that_few_passes_reach_is_found_when_it_begins(name, step, result_of):
    assert min(one.step for one in result_of(name).violations) == step


@pytest.mark.parametrize("name", ["keyword_refilled_after", "keyword_written_by_model"])
def test_a_call_with_keywords_is_computed_again_from_what_they_were(name, result_of):
    result = result_of(name)
    assert sum(result.again.values()) == 3, result
    reasons = [one for one in result.named_findings if one.name == "not-recomputed"]
    assert [one.steps for one in reasons] == [1], result


MASKED = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(8, 3)
keep = torch.tensor([0.0, 1, 1, 1, 1, 1, 0, 1])
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    for micro in range(2):
        (net(torch.randn(4, 8)).square().mean() / 2).backward()
        if micro <= {last}:
            {edit}
    opt.step()
    opt.zero_grad()
"""
EDITS = (
    "net.weight.grad.data[:, :2] = 0.0",
    "net.weight.grad[:, keep == 0] *= 0",
    "net.weight.grad[:, 3].zero_()",
    "net.weight.grad.masked_fill_(keep == 0, 0)",
    "net.weight.grad = net.weight.grad * keep",
)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("last", "verdict"), [(1, "holds"), (0, "violated")])
def test_a_mask_has_its_line_however_it_is_written(edit, last, verdict, tmp_path):
    path = tmp_path / "masked.py"
    path.write_text(MASKED.format(last=last, edit=edit))
    result, _ = audited(path)
    assert result.verdict == verdict, result
    places = {str(one.where) for one in result.violations}
    names = {one.diagnosis for one in result.violations}
    if verdict == "holds":
        places = {str(one.where) for one in result.named_findings}
        names = {one.name for one in result.named_findings}
    assert names == ({"edited-gradient"} if verdict == "holds" else {"reset-inside-window"})
    assert {place.rpartition(":")[2] for place in places} == {"11"}, result


@pytest.mark.parametrize(
    "name",
    [
        "s3_frozen_rows",
        "m_s3c",
        "m_f2",
        "m_f2b",
        "f2_rows_reset",
        "faulty_mask_of_last",
        "topk_ids",
    ],
)
def test_elements_that_lie_on_a_device_are_compared_there(name, result_of, monkeypatch):
    """As tensors, of which nothing is read before the step."""

    def some_of(tensor, most):
        assert tensor.numel() <= most
        return tensor.detach().reshape(-1).clone()

    monkeypatch.setattr(samples, "some_of", some_of)
    truth = TRUTH.match(WITH_TRUTH[name].lstrip())
    result = result_of(name)
    assert result.verdict == ("holds" if truth["verdict"] == "sound" else "violated"), result
    assert {one.diagnosis for one in result.violations} <= {"reset-inside-window"}
