"""What the audit says of a difference was measured: each fault is found, and its sound twins are
not blamed, are judged, and train as they do without an audit.
"""

from __future__ import annotations

import pytest
import torch

from tests.auditing.evidence_scripts import EVIDENCE, SELF_WRITING
from tests.auditing.running import audited, trained

OF_THE_SYSTEM = "sound_system_entropy"
"""The script that draws from the system, and trains otherwise each time."""


def _named(verdict):
    return [name for name, script in EVIDENCE.items() if script.verdict == verdict]


@pytest.fixture
def written(tmp_path):
    def write(name):
        path = tmp_path / f"{name}.py"
        path.write_text(EVIDENCE[name].text)
        return path

    return write


def _parameters(names):
    found = [one for one in names.values() if isinstance(one, torch.nn.Module)]
    return [p.detach().clone() for module in found for p in module.parameters()]


@pytest.mark.share(6)
@pytest.mark.parametrize("name", _named("violated"))
def test_a_fault_is_found(name, written):
    result, _ = audited(written(name))
    assert [v.diagnosis for v in result.violations] == [*EVIDENCE[name].said], result


@pytest.mark.share(6)
@pytest.mark.parametrize("name", _named("holds"))
def test_a_sound_script_holds_and_trains_as_it_does_without_an_audit(name, written):
    path = written(name)
    without = _parameters(trained(path))
    state = torch.get_rng_state()
    result, names = audited(path)
    assert result.verdict == "holds", result
    if name == OF_THE_SYSTEM:
        return
    for then, now in zip(without, _parameters(names), strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", _named("unjudged"))
def test_what_is_not_judged_has_its_reason(name, written):
    result, _ = audited(written(name))
    assert result.verdict == "unjudged", result
    assert EVIDENCE[name].said[0] in result.unjudged, result


def test_the_module_in_which_two_calls_part_is_named(written):
    result, _ = audited(written(OF_THE_SYSTEM))
    said = [one for one in result.named_findings if one.name == "not-reproducible"]
    assert said, result
    assert all("part in linear (Linear)" in one.sentence for one in said), said


def test_it_is_said_how_many_parameters_were_compared(written):
    result, _ = audited(written("sound_penalty_outside"))
    assert result.again == {"micro-batch by micro-batch, 3 of 4 parameters": 3}, result
    assert audited(written("sound_loss_module"))[0].again == {"micro-batch by micro-batch": 3}


@pytest.mark.parametrize("name", SELF_WRITING)
def test_a_window_of_a_model_that_writes_to_its_input_is_computed_again(name, written):
    result, _ = audited(written(name), every=1)
    assert sum(result.again.values()) >= 3, result
    assert not any("outside of the recorded calls" in one for one in result.findings), result


HOOKED = """
import torch
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    def forward(self, x):
        h = self.a(x)
        h.register_hook(lambda g: {returned})
        return self.b(h.tanh())
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    (net(torch.randn(6, 4)) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("returned", ["2 * g", "None"])
def test_a_hook_that_a_forward_sets_on_a_tensor_is_told_where_it_changes_the_gradient(
    returned, tmp_path
):
    path = tmp_path / "hooked.py"
    path.write_text(HOOKED.format(returned=returned))
    result, _ = audited(path)
    said = [one.sentence for one in result.named_findings if one.name == "hook-factor"]
    assert result.verdict == "holds", result
    assert [one.endswith("what is below it") and "hooked.py:10" in one for one in said] == [
        True
    ] * (returned != "None"), result
