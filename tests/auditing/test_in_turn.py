"""After the first windows one pass of each is computed again, in turn: what it shows is what all
passes would, at the latest when each has had its turn.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradcheck_suite
from gradcheck_suite.auditing import recomputation
from gradcheck_suite.auditing.recomputation import BY_MICRO_BATCH, IN_TURN, ONE_BATCH
from gradcheck_suite.auditing.schedule import AGAIN

PASSES = 3
BEGINS = 6
"""The window in which a fault begins."""


class Model(torch.nn.Module):
    """Two layers, the second one of which may be wrong in some pass."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 40)
        self.drop = torch.nn.Dropout(0.0)
        self.last = torch.nn.Linear(40, 3)
        self.fault = ""

    def block(self, x):
        return self.last(self.drop(x))

    def forward(self, x):
        hidden = self.first(x).tanh()
        if self.fault == "checkpoint":
            return checkpoint(self.block, hidden, use_reentrant=False, preserve_rng_state=False)
        return self.block(hidden)


def _clips(module, given, received):
    return tuple(g.clamp(-1e-3, 1e-3) for g in given)


def _no_fault(model, wrong):
    pass


def _checkpoint(model, wrong):
    model.fault = "checkpoint" if wrong else ""
    model.drop.p = 0.5 if wrong else 0.0


def _hook(model, wrong):
    for handle in getattr(model, "handles", ()):
        handle.remove()
    model.handles = [model.last.register_full_backward_hook(_clips)] if wrong else []


def _eval(model, wrong):
    model.drop.p = 0.5
    model.drop.train(not wrong)


FAULTS = {
    "none": (_no_fault, None),
    "checkpoint": (_checkpoint, "wrong-backward"),
    # it is there in one pass alone, and gone when the window is computed again
    "hook": (_hook, "unexplained-difference"),
    "eval": (_eval, "wrong-mode"),
}


def _run(fault, number, windows=14):
    act, _ = FAULTS[fault]
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradcheck_suite.audit(quiet=True, every=1) as audit:
        for window in range(windows):
            for index in range(PASSES):
                act(model, window >= BEGINS and index == number)
                out = model(torch.randn(5, 4))
                (functional.mse_loss(out, torch.randn(5, 3)) / PASSES).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit.result


@pytest.mark.share(4)
@pytest.mark.parametrize("number", range(PASSES))
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_a_fault_that_begins_later_in_one_pass_is_found_by_its_turn(fault, number):
    result = _run(fault, number)
    _, name = FAULTS[fault]
    if name == "unexplained-difference":
        assert result.unjudged_reason == name, result
        return
    assert {v.diagnosis for v in result.violations} == {name}, result
    first = min(v.step for v in result.violations)
    assert BEGINS <= first < BEGINS + PASSES


def test_a_sound_run_is_computed_again_by_turns_after_the_first_windows():
    result = _run("none", 0)
    assert result.holds
    whole = result.again.pop(IN_TURN)
    assert whole == 14 - AGAIN
    assert result.again == {ONE_BATCH: AGAIN}


def test_every_pass_has_its_turn(monkeypatch):
    turns = []
    holds = recomputation._holds_in_turn
    monkeypatch.setattr(
        recomputation,
        "_holds_in_turn",
        lambda asked, turn, *rest: turns.append(turn.index) or holds(asked, turn, *rest),
    )
    _run("none", 0)
    assert turns == [n % PASSES for n in range(14 - AGAIN)]


def test_one_call_is_computed_in_a_turn(monkeypatch):
    calls = []
    replay = recomputation.replay
    monkeypatch.setattr(recomputation, "replay", lambda *args: calls.append(1) or replay(*args))
    _run("none", 0, windows=AGAIN)
    before = len(calls)
    calls.clear()
    _run("none", 0, windows=AGAIN + 4)
    assert len(calls) == before + 4


class Heads(torch.nn.Module):
    """A model of which each pass uses another head."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 6)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(6, 1) for _ in range(PASSES))
        self.outside = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, head):
        return self.heads[head](self.body(x))


@pytest.mark.parametrize("outside", [False, True])
def test_what_holds_says_of_parameters_is_of_the_pass_in_turn(outside):
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradcheck_suite.audit(quiet=True, every=1) as audit:
        for _ in range(AGAIN + PASSES):
            for head in range(PASSES):
                loss = model(torch.randn(5, 4), head).square().mean()
                loss = loss * model.outside if outside else loss
                (loss / PASSES).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    # a body and a head of a weight and a bias each, and what no call has
    all_of = 2 + 2 * PASSES
    expected = (
        {
            f"{BY_MICRO_BATCH}, {all_of} of {all_of + 1} parameters": AGAIN,
            f"{IN_TURN}, 4 of 5 parameters": PASSES,
        }
        if outside
        else {BY_MICRO_BATCH: AGAIN, IN_TURN: PASSES}
    )
    assert audit.result.again == expected, audit.result
