"""The states of `.grad` hold for the `DTensor` parameters of FSDP2, but for two rules that torch
breaks.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradcheck_suite.stateful import GradStates


@pytest.fixture(scope="module")
def mesh():
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    destroy_process_group()


def sharded(mesh, value):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(value)
    return fully_shard(module, mesh=mesh).weight


class OnDTensor(GradStates):
    """All rules but the two that torch breaks."""

    steps = ("plain", "foreach", "first")  # torch has no fused SGD for DTensor
    data = None  # changes nothing: github.com/pytorch/pytorch/issues/157391
    to_dtype = None  # loses hooks, and cuts graphs


def test_the_other_rules_hold(mesh):
    run_state_machine_as_test(
        lambda: OnDTensor(make_parameter=lambda value: sharded(mesh, value)),
        settings=settings(max_examples=10),
    )


@pytest.mark.parametrize("rule", ["data", "to_dtype"])
def test_a_rule_that_is_left_out_fails(mesh, rule):
    machine = type("Machine", (OnDTensor,), {rule: getattr(GradStates, rule)})
    until = settings(max_examples=50, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(
        AssertionError,
        match=r"parameter . is|was called 0 times|should have a graph| is .*, should be",
    ):
        run_state_machine_as_test(
            lambda: machine(make_parameter=lambda v: sharded(mesh, v)), settings=until
        )
