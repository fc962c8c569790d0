"""A second call of a model never ends the program, and what it counts is put back."""

from __future__ import annotations

import gc

import pytest

from gradcheck_suite.auditing import samples
from tests.auditing.running import audited

TRAINED = """
for _ in range(4):
    for _ in range(2):
        (model(torch.randn(6, 5)).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ENDING = """
import sys
import torch
torch.manual_seed(0)


class Stop(BaseException):
    pass


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(5, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        h.register_hook(guard)
        return self.head(h)


def guard(g):
    if g.norm() > 0.3:  # the program's own gradients have norms of 0.1
        END


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize("end", ["sys.exit('a spike')", "raise Stop", "raise SystemExit(3)"])
def test_what_ends_the_second_call_does_not_end_the_program(end, tmp_path):
    path = tmp_path / "train.py"
    # eight times the gradient, which the second computation sends back, is above the limit
    path.write_text(f"{ENDING.replace('END', end)}{TRAINED}ended = True")
    result, names = audited(path, quiet=True)
    assert names["ended"]
    assert not result.violations, result
    assert any("was not computed again" in said for said in result.findings), result


COUNTING = """
import torch
torch.manual_seed(0)
calls = []
plain = torch.nn.Module.__call__


def counted(self, *args, **kwargs):
    calls.append(type(self).__name__)
    return plain(self, *args, **kwargs)


torch.nn.Module.__call__ = counted
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_a_wrapper_of_all_modules_counts_the_programs_own_calls(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"{COUNTING}{TRAINED}torch.nn.Module.__call__ = plain\nnumber = len(calls)")
    result, names = audited(path, quiet=True)
    assert result.again, result
    assert names["number"] == 8


SCALED = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
for _ in range(8):
    for _ in range(2):
        scaler.scale(model(100 * torch.randn(6, 5)).square().mean() / 2).backward()
    scaler.step(optimizer)
    scaler.update(2.0**10)
    optimizer.zero_grad()
"""


def test_a_window_that_a_scaler_skips_is_not_that_of_the_next_step(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCALED)
    result, _ = audited(path, quiet=True)
    assert result.verdict == "holds", result
    assert result.windows == result.steps == 7


ANOMALY = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []


def note():
    seen.append((torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()))


note()
for window in range(4):
    with torch.autograd.detect_anomaly() if window % 2 else torch.autograd.set_detect_anomaly(False):
        for _ in range(2):
            (model(torch.randn(3, 3)).square().mean() / 2).backward()
        note()
    optimizer.step()
    optimizer.zero_grad()
    note()
"""


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_the_program_finds_anomaly_mode_as_it_has_left_it(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(ANOMALY)
    off = (False, True)  # NaNs are checked by default, once the mode is on
    _, names = audited(path, quiet=True)
    assert names["seen"] == [
        off,
        *(off, off),
        *((True, True), off),
        *(off, off),
        *((True, True), off),
    ]


OF_A_CALL = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Tanh(), torch.nn.Linear(11, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for _ in range(2):
        (model(torch.randn(6, 7)).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_was_looked_at_is_let_go(tmp_path):
    """A node that keeps its own output by a hook is held by it, where no collector sees it."""
    path = tmp_path / "train.py"
    path.write_text(OF_A_CALL)
    result, names = audited(path, quiet=True)
    assert result.again, result
    del names
    gc.collect()
    tensors = (one for one in gc.get_objects() if type(one) in samples.OWN)
    assert not [one.shape for one in tensors if one.shape in ((11, 7), (6, 11))]
