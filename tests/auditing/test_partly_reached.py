"""Parameters that get a gradient in some passes of a window alone are a finding and no fault: a path
that is cut by mistake leaves what truncated backpropagation through time leaves.
"""

from __future__ import annotations

import pytest

from tests.auditing.running import audited

HEAD = """
import torch
torch.manual_seed(0)
a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
for step in range(4):
"""
CUT_OFF = """
    code = a(torch.randn(1, 3))
    for micro in range(2):
        (b(code + torch.randn(4, 3)).square().mean() / 2).backward()  # here
        code = code.detach()
    opt.step()
    opt.zero_grad()
"""
TRUNCATED = """
    state = torch.tanh(a(torch.randn(4, 3)))
    for chunk in range(2):
        (b(state).square().mean() / 2).backward()  # here
        state = torch.tanh(state.detach() * 0.9)
    opt.step()
    opt.zero_grad()
"""
DROPPED = """
    for micro in range(4):
        x = torch.randn(4, 3)
        x = a(x) if micro % 2 else x
        (b(x).square().mean() / 4).backward()  # here
    opt.step()
    opt.zero_grad()
"""
FIRST = "got a gradient in the first of 2 passes of a window alone"
SOME = "got a gradient in some passes of a window and in others none"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(CUT_OFF, FIRST, id="a context that is cut off after its first use"),
        pytest.param(TRUNCATED, FIRST, id="truncated backpropagation through time"),
        pytest.param(DROPPED, SOME, id="a layer that is left out in some passes"),
    ],
)
def test_it_is_said_where_they_go_backward_and_in_which_passes(text, said, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    result, _ = audited(path)
    assert result.verdict == "holds", result
    (found,) = [one for one in result.named_findings if one.name == "partly-reached-parameters"]
    assert said in found.sentence
    lines = enumerate(path.read_text().splitlines(), 1)
    assert found.place == f"{path}:{next(n for n, line in lines if '# here' in line)}"
