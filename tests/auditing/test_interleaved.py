"""Windows of several optimizers that are open at the same time are computed again, each with all of
its passes, and the calls of a pass are kept no longer than a window needs them.
"""

from __future__ import annotations

import pytest
import torch

import gradcheck_suite
from tests.auditing.running import audited

HEAD = """
import torch
import torch.nn.functional as F
torch.manual_seed(0)
a = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
b = torch.nn.Linear(3, 1)
def sgd(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
def loss_of(module):
    return module(torch.randn(4, 3)).square().mean()
"""
INTERLEAVED = """
opt_a, opt_b = sgd(a), sgd({owned})
for step in range(8):
    for micro in range(3):
        a.train({mode})
        (loss_of(a) / 3).backward()
        if micro == 1:
            opt_b.zero_grad()
            loss_of(b).backward()
            opt_b.step()
    opt_a.step()
    opt_a.zero_grad()
"""
ONE_SCALER = """
opt_a, opt_b = sgd(a), sgd(b)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval={interval})
for i in range(8):
    scaler.scale(loss_of(b)).backward()
    scaler.step(opt_b)
    opt_b.zero_grad()
    scaler.scale(loss_of(a) / 2).backward()
    if i % 2:
        scaler.step(opt_a)
        opt_a.zero_grad()
    scaler.update()
"""
FAULTY = {
    "a reset by the optimizer that has the module, too": (
        INTERLEAVED.format(owned="a, b", mode=True),
        "reset-inside-window",
    ),
    # nothing but the second computation shows it
    "another mode in one micro-batch": (
        INTERLEAVED.format(owned="b", mode="micro != 1"),
        "wrong-mode",
    ),
    "a scale that is updated inside of a window": (
        ONE_SCALER.format(interval=3),
        "unrecognised-weights",
    ),
}
SOUND = {
    "a step inside of the window": INTERLEAVED.format(owned="b", mode=True),
    "one scaler": ONE_SCALER.format(interval=1000),
}


def _audited(text, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    result, _ = audited(path, every=1)
    # modules lead to every loss
    assert not any("no call of a module" in said for said in result.findings), result
    return result


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_of_a_window_with_another_inside_is_found(name, tmp_path):
    text, expected = FAULTY[name]
    result = _audited(text, tmp_path)
    assert [v.diagnosis for v in result.violations] == [expected], result
    # the first window of an optimizer alone is one of whose parameters not all owners are known
    not_kept = [one for one in result.named_findings if "were not kept" in one.sentence]
    assert all(one.steps == 1 for one in not_kept), result


@pytest.mark.parametrize("name", SOUND)
def test_each_window_of_a_sound_run_is_computed_again(name, tmp_path):
    result = _audited(SOUND[name], tmp_path)
    assert result.verdict == "holds", result
    assert not any(one.name == "not-recomputed" for one in result.named_findings), result
    assert sum(result.again.values()) == result.steps, result.again


def test_calls_are_not_kept_for_an_optimizer_that_steps_no_more():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    with gradcheck_suite.audit(every=1) as audit:
        for _ in range(2):  # the second phase has an optimizer of its own
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(5):
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert len(audit._torch._running) <= 1
    assert audit.result.verdict == "holds"
