"""Windows in bfloat16, of which each gradient is rounded: a division, a count and a sum made by hand
have the names that they have in float32, and sound ones beside them none.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.auditing.running import audited

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(torch.bfloat16)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
mse = nn.functional.mse_loss
count = 0
for step, sizes in enumerate({windows}):
    N, K = sum(sizes), len(sizes)
    {begin}
    kept = []
    for n in sizes:
        out = net(torch.randn(n, 5).to(torch.bfloat16)).float()
        loss = {loss}
        loss.backward()
        count += n
        {inside}
    {end}
    opt.step()
    opt.zero_grad()
"""
EQUAL = [[4, 4, 4]] * 5
UNEQUAL = [[5, 2], [1, 5], [4, 1], [2, 3]]
SINGLE = [[4], [3], [1], [5]]
LONG = [[4, 3, 2, 5], [5, 6, 2, 4], [1, 6, 2, 3], [3, 2, 1, 6], [6, 2, 1, 4]]
MEAN = "mse(out, torch.zeros(n, 3))"
TOTAL = "mse(out, torch.zeros(n, 3), reduction='sum')"
DIVIDED = "for p in net.parameters(): p.grad.div_({})"
CLIPPED = "for p in net.parameters(): p.grad.mul_([0.83, 0.334, 0.61, 0.95, 0.47][step])"
KEPT = "kept.append([p.grad.clone() for p in net.parameters()]); opt.zero_grad()"
SUMMED = "for p, *of in zip(net.parameters(), *kept): p.grad = sum(of)"


@dataclass(frozen=True)
class Case:
    """A script by its pieces, and the name of its fault; nothing of a sound one."""

    fault: str
    windows: list[list[int]]
    loss: str
    end: str
    begin: str = "pass"
    inside: str = "pass"

    @property
    def text(self) -> str:
        return SCRIPT.format(**vars(self))


CASES = {
    "divided twice": Case("wrong-scale", EQUAL, f"{MEAN} / K", DIVIDED.format("K")),
    "divided after": Case("", EQUAL, MEAN, DIVIDED.format("K")),
    "divided inside": Case("", EQUAL, f"{MEAN} / K", "pass"),
    # one of the factors is one over the number of micro-batches, as it may be of clipping by hand
    "clipped by hand": Case("", EQUAL, f"{MEAN} / K", CLIPPED),
    "divided by the count": Case("", UNEQUAL, TOTAL, DIVIDED.format("3 * N")),
    "divided by a running count": Case("wrong-count", UNEQUAL, TOTAL, DIVIDED.format("3 * count")),
    "divided by a count that is reset": Case(
        "", UNEQUAL, TOTAL, DIVIDED.format("3 * count"), begin="count = 0"
    ),
    "single batches by a running count": Case(
        "wrong-count", SINGLE, TOTAL, DIVIDED.format("3 * count")
    ),
    "single batches by their count": Case("", SINGLE, TOTAL, DIVIDED.format("3 * n")),
    "kept means": Case("mean-of-means", LONG, f"{MEAN} / K", SUMMED, inside=KEPT),
    "kept shares": Case("", LONG, f"{MEAN} * n / N", SUMMED, inside=KEPT),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rounded_gradient_is_judged_as_one_in_float32(name, tmp_path):
    case = CASES[name]
    path = tmp_path / "rounded.py"
    path.write_text(case.text)
    result, _ = audited(path)
    names = {one.diagnosis for one in result.violations}
    assert names == ({case.fault} if case.fault else set()), result
    assert result.verdict == ("violated" if case.fault else "holds"), result


def test_the_first_window_of_a_running_count_is_right(tmp_path):
    path = tmp_path / "rounded.py"
    path.write_text(CASES["divided by a running count"].text)
    result, _ = audited(path)
    assert min(one.step for one in result.violations) == 1
