"""Edits of `.grad` between the last backward pass and the step: each is seen, also where it changes
few elements, and a fault beside it is found all the same.
"""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite.auditing.replay import EDITED, GradChange, Replay
from gradcheck_suite.auditing.samples import sample
from tests.auditing.running import audited

START = """
import torch
import torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 32)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def loss(x):
    return F.mse_loss(model(x), torch.randn(8, 32))
@torch.no_grad()
def clip_few(number=4):
    for p in model.parameters():
        bound = p.grad.abs().flatten().topk(number).values[-1]
        p.grad.{data}copy_(torch.max(torch.min(p.grad, bound), -bound))
@torch.no_grad()
def disturb():
    for p in model.parameters():
        p.grad.data.add_(torch.randn_like(p), alpha=1e-5 * float(p.grad.abs().mean()))
"""
TWO_PASSES = """
    for _ in range(2):
        (loss(torch.randn(8, 16)) / 2).backward()
"""
WINDOWS = 6
SOUND = {
    "few elements": ("clip_few()", TWO_PASSES),
    "one element of the last layer": ("model[-1].weight.grad.data[3, 5] *= 2", TWO_PASSES),
    "less than samples tell": ("disturb()", TWO_PASSES),
    "few elements, after passes that are discarded": (
        "clip_few()",
        """
    for _ in range(2):
        model(torch.randn(8, 16)).sum().backward()
    optimizer.zero_grad()
    loss(torch.randn(8, 16)).backward()
""",
    ),
}
FAULTY = {
    "reset-inside-window": """
    for _ in range(3):
        optimizer.zero_grad()
        (loss(torch.randn(8, 16)) / 3).backward()
""",
    "changed-batch": """
    x = torch.randn(8, 16)
    one = loss(x)
    x.data.copy_(torch.randn(8, 16))
    one.backward()
""",
    "stale-parameters": """
    one = loss(torch.randn(8, 16))
    model[-1].weight.data.mul_(0.9)
    one.backward()
""",
    "wrong-mode": """
    for number in range(2):
        model.train(number == 0)
        (loss(torch.randn(8, 16)) / 2).backward()
""",
    "wrong-scale": """
    for _ in range(4):
        (loss(torch.randn(8, 16)) / 16).backward()
""",
}


def _script(passes: str, edit: str, *, data: str = "data.", windows: int = WINDOWS) -> str:
    start = START.replace("{data}", data)
    return (
        f"{start}for step in range({windows}):\n    optimizer.zero_grad()\n{passes}"
        f"    {edit}\n    optimizer.step()\n"
    )


@pytest.fixture
def audit_of(tmp_path):
    def audit(text):
        path = tmp_path / "edited.py"
        path.write_text(text)
        return audited(path)[0]

    return audit


def _edited(result) -> int:
    return sum(one.steps for one in result.named_findings if one.name == "edited-gradient")


@pytest.mark.parametrize("name", SOUND)
def test_an_edit_is_seen_in_each_window_and_none_is_blamed(name, audit_of):
    edit, passes = SOUND[name]
    result = audit_of(_script(passes, edit))
    assert result.verdict == "holds", result
    assert _edited(result) == WINDOWS
    assert sum(result.again.values()) == 3
    reasons = {"not-recomputed", "unexplained-difference", "composed-gradient"}
    assert reasons.isdisjoint(one.name for one in result.named_findings)


def test_an_edit_is_seen_where_the_program_does_not_hide_it_from_torch(audit_of):
    result = audit_of(_script(TWO_PASSES, "clip_few()", data=""))
    assert (result.verdict, _edited(result)) == ("holds", WINDOWS)


def test_clipping_that_changes_nothing_is_no_edit(audit_of):
    """Torch's writes to `.grad`: its version is another one, and its values are the same."""
    clipping = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)"
    result = audit_of(_script(TWO_PASSES, clipping))
    assert (result.verdict, _edited(result)) == ("holds", 0)
    assert sum(result.again.values()) == 3


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_beside_an_edit_of_few_elements_is_found(name, audit_of):
    result = audit_of(_script(FAULTY[name], "clip_few()", windows=8))
    assert [one.diagnosis for one in result.violations] == [name], result


@pytest.mark.parametrize(("division", "said"), [("p.grad.div_(3)", False), ("pass", True)])
def test_a_division_before_an_edit_of_few_elements_is_seen(division, said, audit_of):
    passes = """
    for _ in range(3):
        loss(torch.randn(8, 16)).backward()
"""
    edit = f"for p in model.parameters(): {division}\n    clip_few()"
    result = audit_of(_script(passes, edit))
    assert result.verdict == "holds", result
    assert any(one.name == "coefficient" for one in result.named_findings) is said


def test_a_second_division_before_an_edit_of_few_elements_is_found(audit_of):
    passes = """
    for _ in range(3):
        (loss(torch.randn(8, 16)) / 3).backward()
"""
    edit = "for p in model.parameters(): p.grad.div_(3)\n    clip_few()"
    result = audit_of(_script(passes, edit))
    assert [one.diagnosis for one in result.violations] == ["wrong-scale"], result


def test_what_one_window_left_open_is_settled_by_edited_ones(audit_of):
    """A state that the forward changes is not kept of the first window's calls, and is of the next
    ones, which are edited.
    """
    state = """
class Running(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
    def forward(self, x):
        self.scale.mul_(0.7)
        return x * self.scale
model.append(Running())
"""
    text = _script("    loss(torch.randn(8, 16)).backward()\n", "clip_few() if step else None")
    result = audit_of(text.replace("optimizer = ", f"{state}optimizer = ", 1))
    assert (result.verdict, _edited(result)) == ("holds", WINDOWS - 1), result
    assert sum(result.again.values()) == 3


PRECONDITIONED = """
class Preconditioned(torch.optim.Optimizer):
    def __init__(self, model):
        super().__init__(model.parameters(), {})
        self.inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    def step(self):
        for p in model.parameters():
            if p.dim() > 1:
                values, vectors = torch.linalg.eigh(p.grad @ p.grad.t())
                rotated = vectors.t() @ p.grad / (values.clamp(min=0).sqrt() + 0.01)[:, None]
                p.grad.data.copy_(vectors @ rotated)
                p.grad.data.mul_(0.3)
        self.inner.step()
optimizer = Preconditioned(model)
"""


def test_an_optimizer_that_preconditions_in_its_own_step_edits_in_each(audit_of):
    """As K-FAC does, after a pass for its statistics which is discarded."""
    passes = """
    model(torch.randn(8, 16)).log_softmax(1)[:, 0].mean().backward()
    optimizer.zero_grad()
    loss(torch.randn(8, 16)).backward()
"""
    text = _script(passes, "pass").replace("for step in", f"{PRECONDITIONED}for step in", 1)
    result = audit_of(text)
    assert (result.verdict, _edited(result)) == ("holds", WINDOWS), result
    assert result.windows == WINDOWS
    assert "unlike-gradient" not in {one.name for one in result.named_findings}


def _preconditioned(gradient):
    values, vectors = torch.linalg.eigh(gradient @ gradient.t())
    rotated = vectors.t() @ gradient / (values.clamp(min=0).sqrt() + 0.01)[:, None]
    return vectors @ rotated


def test_a_pass_that_was_reset_is_not_seen_in_a_preconditioned_gradient_by_chance():
    """A whole sample repeats the elements of a small parameter: they are counted once."""
    seen = 0
    for seed in range(150):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 4, bias=False)
        )
        replayed = Replay(1, {})
        for index in range(2):
            model.zero_grad()
            outputs = model(torch.randn(20, 6))
            torch.nn.functional.cross_entropy(outputs, torch.randint(0, 4, (20,))).backward()
            replayed._arrived[0, index] = {
                key: sample(p.grad, whole=True) for key, p in enumerate(model.parameters())
            }
        written = {
            key: GradChange(EDITED, 1.0, {}, sample(_preconditioned(p.grad), whole=True))
            for key, p in enumerate(model.parameters())
        }
        fit = replayed._fit_of([0, 1], written, {0})
        assert fit is not None
        seen += fit.is_of_copies
    assert seen == 0
