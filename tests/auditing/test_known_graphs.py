"""A graph that is known is not walked, and what is recorded of a run is the same as if it were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import gradcheck_suite
from gradcheck_suite.auditing import context, known_graphs, recorder
from tests.auditing.running import audited


class Changing(torch.nn.Module):
    """A model of which a part joins later."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.later = torch.nn.Linear(6, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.last = torch.nn.Linear(6, 3)
        self.number = 0
        self.uses_later: Callable[[int], bool] = lambda number: True
        self.kept = None

    def forward(self, x):
        self.number += 1
        hidden = self.norm(self.first(x)).relu()
        if self.uses_later(self.number):
            hidden = self.later(hidden)
        return self.last(hidden)


WINDOWS, PASSES = 14, 2


def _nothing(model, optimizer, window):
    pass


def _unfreezes(model, optimizer, window):
    # autograd makes no node for it: only the parameter tells
    model.norm.weight.requires_grad_(window >= 7)


def _adds_a_group(model, optimizer, window):
    if window == 7:
        model.norm.requires_grad_(True)
        optimizer.add_param_group({"params": [*model.norm.parameters()]})


def _adds_a_hook(model, optimizer, window):
    if window == 7:
        model.first.weight.register_hook(lambda gradient: gradient * 2)


def _rescales(parameter):
    parameter.grad.mul_(1.0)


def _adds_a_last_hook(model, optimizer, window):
    if window == 7:
        model.first.weight.register_post_accumulate_grad_hook(_rescales)


def _replaces(model, optimizer, window):
    if window == 7:
        model.last = torch.nn.Linear(6, 3)
        optimizer.param_groups[0]["params"] = [*model.parameters()]


def _adds_an_optimizer(model, optimizer, window):
    if window != 7:
        return
    model.norm.requires_grad_(True)
    other = torch.optim.SGD(model.norm.parameters(), lr=0.01)

    def steps_too(*_):
        other.step()
        other.zero_grad()

    optimizer.register_step_post_hook(steps_too)


CHANGES = {
    "none": (_nothing, None),
    "a part that joins": (_nothing, lambda number: number > 14),
    "a part by turns": (_nothing, lambda number: number % 3 > 0),
    "a parameter that is unfrozen": (_unfreezes, None),
    "a group that is added": (_adds_a_group, None),
    "an optimizer that is added": (_adds_an_optimizer, None),
    "a hook": (_adds_a_hook, None),
    "a hook after the arrival": (_adds_a_last_hook, None),
    "a layer that is replaced": (_replaces, None),
}


NEW_AT_A_STEP = ("an optimizer that is added",)
"""Changes that autograd counts no node for, and that a step shows."""
FROZEN_AT_FIRST = ("a group that is added", *NEW_AT_A_STEP)


def _run(change, monkeypatch):
    """Return what was recorded of each pass, how many graphs were walked, and the result."""
    act, uses = CHANGES[change]
    torch.manual_seed(0)
    model = Changing()
    model.uses_later = uses or model.uses_later
    own = [*model.parameters()]
    if change in FROZEN_AT_FIRST:
        model.norm.requires_grad_(False)
        own = [p for p in own if p.requires_grad]
    optimizer = torch.optim.SGD(own, lr=0.01)
    events = []
    walks = []
    receive = context.TorchAudit._receive
    below = recorder.leaves_below

    def received(self, event):
        if hasattr(event, "arrivals"):
            events.append((dict(event.arrivals), set(event.now), set(event.hooked)))
        else:
            events.append((set(event.gradients), event.has_unseen))
        receive(self, event)

    monkeypatch.setattr(context.TorchAudit, "_receive", received)
    monkeypatch.setattr(recorder, "leaves_below", lambda nodes: walks.append(1) or below(nodes))
    with gradcheck_suite.audit(quiet=True, without=("batch",), budget="none") as audit:
        for window in range(WINDOWS):
            act(model, optimizer, window)
            for _ in range(PASSES):
                loss = functional.mse_loss(model(torch.randn(5, 4)), torch.randn(5, 3))
                (loss / PASSES).backward()
            optimizer.step()
            optimizer.zero_grad()
    monkeypatch.setattr(context.TorchAudit, "_receive", receive)
    monkeypatch.setattr(recorder, "leaves_below", below)
    return events, len(walks), audit.result


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_recorded_is_the_same_as_if_each_graph_were_walked(change, monkeypatch):
    found, walks, result = _run(change, monkeypatch)
    monkeypatch.setattr(known_graphs, "ALIKE", 10**9)
    expected, all_walks, whole = _run(change, monkeypatch)
    assert all_walks == WINDOWS * PASSES
    assert walks < all_walks or change == "a part by turns"
    if change in NEW_AT_A_STEP:
        # the window in which it came is said not to be seen, and is not judged by a guess
        # both optimizers step
        changed = slice(7 * (PASSES + 1), 8 * (PASSES + 1) + 1)
        del found[changed], expected[changed]
    assert found == expected
    assert [v.diagnosis for v in result.violations] == [v.diagnosis for v in whole.violations]


def test_a_graph_of_one_shape_is_walked_once_in_many_passes(monkeypatch):
    _, walks, _ = _run("none", monkeypatch)
    # three that are alike, and one in sixteen
    assert walks <= known_graphs.ALIKE + 2 + WINDOWS * PASSES // known_graphs.WALKED_EVERY


@pytest.mark.parametrize("change", NEW_AT_A_STEP)
def test_a_parameter_that_a_step_shows_after_graphs_that_were_not_walked_is_said_to_be_unseen(
    change, monkeypatch
):
    found, _, result = _run(change, monkeypatch)
    steps = [one for one in found if len(one) == 2]
    assert [unseen for _, unseen in steps].index(
        True
    ) == 8  # the step of the new one in the eighth window
    assert sum(unseen for _, unseen in steps) == 1
    assert not result.violations


COPIES = """
import copy, torch
torch.manual_seed(0)
shared = torch.nn.Linear(4, 2)
kept = []
for client in range(4):
    model = copy.deepcopy(shared)
    kept.append(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model.zero_grad()
        out = model(torch.randn(4, 4))
        torch.nn.functional.cross_entropy(out, torch.randint(0, 2, (4,))).backward()
        optimizer.step()
"""
"""Several models of one kind are trained at one line, and none is let go."""


def test_another_copy_of_a_model_is_no_known_graph(tmp_path):
    path = tmp_path / "copies.py"
    path.write_text(COPIES)
    result, _ = audited(path, budget="0.1%")
    assert result.holds
    assert "unseen-pass" not in {found.name for found in result.named_findings}
