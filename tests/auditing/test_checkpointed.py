"""What a checkpoint computes again is compared with what the forward has computed: state that was
written in between is found and named, at the line that writes it where there is one.
"""

from __future__ import annotations

import pytest
import torch

from tests.auditing.running import audited, trained

HEAD = """
import functools
import numpy
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
torch.manual_seed(0)
numpy.random.seed(0)
"""
STATE_OF_THE_MODEL = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.tau = torch.nn.Linear(4, 1), 2.0
    def forward(self, x):
        return checkpoint(lambda h: torch.tanh(self.a(h) / self.tau), x, use_reentrant=REENTRANT)
net = Net()
"""
STATE_OF_A_BLOCK = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.tau = torch.nn.Linear(4, 1), 2.0
    def forward(self, h):
        return BODY
block = Block()
net = torch.nn.Sequential(block)
net.tau = 0.0
net.forward = lambda x: checkpoint(block, x, use_reentrant=False, early_stop=EARLY)
"""
LOOP = """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    for micro in range(2):
        loss = net(torch.randn(4, 4, requires_grad=True)).square().mean() / 2
        BETWEEN
        loss.backward()
        AFTER
    opt.step()
    opt.zero_grad()
"""


def _loop(model, between="pass", after="pass"):
    return model + LOOP.replace("BETWEEN", between).replace("AFTER", after)


def _of_model(reentrant, **parts):
    return _loop(STATE_OF_THE_MODEL.replace("REENTRANT", str(reentrant)), **parts)


def _of_block(body, early=True, **parts):
    text = STATE_OF_A_BLOCK.replace("BODY", body).replace("EARLY", str(early))
    return _loop(text, **parts)


AFTER_LINEAR = "torch.tanh(self.a(h) / self.tau)"
BEFORE_LINEAR = "self.a(torch.tanh(h / self.tau))"
OF_A_VARIABLE = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 1)
    def again(self, h):
        return torch.tanh(self.a(h) * tau) * 2
    def forward(self, x):
        return checkpoint(self.again, x, use_reentrant=False)  # checkpoint
net = Net()
tau = STARTS
"""
TAU = "net.tau *= 0.9  # here"
OF_BLOCK = "block.tau *= 0.9  # here"
FAULTY = {
    "a state that is used outside of a module": (
        "wrong-backward",
        "`tau` of Net was 2.0 and is 1.8",
        _of_model(False, between=TAU),
    ),
    "the same, reentrant": (
        "wrong-backward",
        "`tau` of Net was 2.0 and is 1.8",
        _of_model(True, between=TAU),
    ),
    "a state of a module": (
        "wrong-backward",
        "`tau` of Block was 2.0 and is 1.8",
        _of_block(AFTER_LINEAR, between=OF_BLOCK),
    ),
    "a state before another module": (
        "wrong-backward",
        "`tau` of Block was 2.0 and is 1.8",
        _of_block(BEFORE_LINEAR, between=OF_BLOCK),
    ),
    "no early stop": (
        "wrong-backward",
        "`tau` of Block was 2.0 and is 1.8",
        _of_block(AFTER_LINEAR, early=False, between=OF_BLOCK),
    ),
    "a variable": (
        "wrong-backward",
        "`tau` was 2.0 and is 1.8",
        _loop(OF_A_VARIABLE.replace("STARTS", "2.0"), between="tau *= 0.9  # here"),
    ),
    # what writes to it is a method of the tensor, of which no statement tells
    "a tensor of the program's": (
        "changed-batch",
        "`tau` was written in between",
        _loop(
            OF_A_VARIABLE.replace("STARTS", "torch.tensor(2.0)").replace("# checkpoint", "# here"),
            between="tau.data.mul_(0.9)",
        ),
    ),
    "numbers of numpy": (
        "wrong-backward",
        "it draws other random numbers of numpy",
        _loop(
            OF_A_VARIABLE.replace("* tau", "* float(numpy.random.rand() + tau)")
            .replace("STARTS", "2.0")
            .replace("# checkpoint", "# here")
        ),
    ),
}
SOUND_MODEL = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(inplace=True)
        )
        self.drop = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Tanh()
        )
        self.last = torch.nn.Linear(8, 1)
        self.gain = torch.nn.Parameter(torch.ones(8))
        self.calls = 0
    def counted(self, h):
        self.calls += 1
        h = F.dropout(torch.tanh(h) * self.gain, 0.2)
        return h.sigmoid_()
    def outer(self, h):
        h = checkpoint(self.counted, h, use_reentrant=False)
        return h * torch.exp(-h)
    def forward(self, x):
        h = self.first(x)
        for reentrant in (False, True):
            h = checkpoint(self.norm, h, use_reentrant=reentrant)
            h = checkpoint(self.drop, h, use_reentrant=reentrant)
        h = checkpoint(self.outer, h, use_reentrant=False)
        h = checkpoint(self.counted, h, use_reentrant=False, determinism_check="none")
        h = checkpoint(self.counted, h, use_reentrant=True)
        h = checkpoint_sequential(self.drop, 2, h, use_reentrant=False)
        return self.last(h)
net = Net()
"""
SELECTIVE = """
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
def policy(ctx, op, *arguments, **keywords):
    is_kept = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
kept = functools.partial(create_selective_checkpoint_contexts, policy)
body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
net = torch.nn.Sequential(body)
net.forward = lambda x: checkpoint(body, x, use_reentrant=False, context_fn=kept)
"""
SOUND = {
    "checkpoints of all kinds": _loop(SOUND_MODEL),
    "what is kept is not computed again": _loop(SELECTIVE),
    "a state that is written after the backward": _of_model(False, after="net.tau *= 0.9"),
    "the same, reentrant": _of_model(True, after="net.tau *= 0.9"),
    "a state that is not read": _of_block(AFTER_LINEAR, between="net.tau += 1"),
    "a state that is written and put back": _of_model(
        False, between="net.tau *= 2\n        net.tau /= 2"
    ),
    # autograd keeps the number of the forward, which is no tensor
    "a number that the graph keeps": _of_block("self.a(h) / self.tau", between="block.tau *= 0.9"),
}


def _written(text, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    return path


@pytest.mark.parametrize("name", FAULTY)
def test_what_is_computed_otherwise_is_found_at_the_line_to_change(name, tmp_path):
    diagnosis, said, text = FAULTY[name]
    path = _written(text, tmp_path)
    result, _ = audited(path, every=1)
    assert [one.diagnosis for one in result.violations] == [diagnosis], result
    violation = result.violations[0]
    assert said in violation.explanation, violation.explanation
    lines = enumerate(path.read_text().splitlines(), 1)
    assert violation.where == f"{path}:{next(n for n, line in lines if '# here' in line)}"
    # nothing says that the outputs were the same
    assert not any(one.name == "unexplained-difference" for one in result.named_findings)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_checkpoint_is_not_blamed_and_trains_as_without_an_audit(name, tmp_path):
    path = _written(SOUND[name], tmp_path)
    plain = [p.detach().clone() for p in trained(path)["net"].parameters()]
    result, names = audited(path, every=1)
    assert not result.violations, result
    for then, now in zip(plain, names["net"].parameters(), strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0)


def test_torch_is_as_it_was_when_the_audit_has_ended(tmp_path):
    module = torch.utils.checkpoint
    names = "_checkpoint_without_reentrant_generator", "_allowed_determinism_checks_to_fns"
    before = [getattr(module, name) for name in names]
    checks = dict(before[1])
    audited(_written(SOUND["checkpoints of all kinds"], tmp_path), every=1)
    assert [getattr(module, name) for name in names] == before
    assert before[1] == checks
    assert "apply" not in vars(module.CheckpointFunction)
