"""A device other than the CPU: what the suite puts there, its random state, and where rounding
errors are drawn.
"""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, cases, check
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.reference.rounding import Computation, RandomRounding
from gradcheck_suite.run.instance import generated_instance, seeded
from gradcheck_suite.run.runner import run_loop
from gradcheck_suite.strategies.drawing import draw_cases
from properties.devices import DEVICES, repeatable_run
from studies.zoo import BUGS
from studies.zoo.bug import train_with_weights
from tests.second_device import SecondDeviceTensor, second_device
from tests.training import each_gradient, trains

PROBABILITIES = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", features=1, bias=True),),
    Loss("bce", weight=False, reduction="mean"),
)
UNEQUAL = Plan((1, 3), 2)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_sound_loop_holds_and_a_fault_is_named_on_a_second_device(dtype):
    """Whatever is left on the CPU raises, and would be a violation of the kind `raised`."""
    plan = Plan((1, 3, 2), 2, 2)
    with second_device():
        for case in draw_cases(cases(), examples=3, seed_value=7):
            verdict = check(MODES["zero_"], case.replace(device="cuda", dtype=dtype))
            assert verdict.holds, verdict
        case = Case(PROBABILITIES, plan, dtype=dtype, device="cuda", seed=1)
        violation = check(BUGS["mean-of-means"].loop, case).violation
        assert violation is not None
        assert violation.diagnosis == "mean-of-means"


def test_a_tensor_left_on_the_cpu_raises_on_a_second_device():
    """Planted fault: a loop weighs its losses by numbers that it keeps on the CPU."""

    def keeps_weights_on_the_cpu(run):
        train_with_weights(run, lambda window, batch: torch.ones(1))

    with second_device():
        violation = check(
            keeps_weights_on_the_cpu, Case(PROBABILITIES, UNEQUAL, device="cuda")
        ).violation
    assert violation is not None
    assert violation.kind == "raised"
    assert "Expected all tensors to be on the same device" in violation.explanation


def test_rounding_errors_are_drawn_on_the_cpu(monkeypatch):
    """On a GPU a probability that rounding moves out of [0, 1] would end every later CUDA call of
    the process.
    """
    devices = set()
    dispatch = RandomRounding.__torch_dispatch__

    def recorded(self, func, types, args=(), kwargs=None):
        devices.update(type(value) for value in args if isinstance(value, torch.Tensor))
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(RandomRounding, "__torch_dispatch__", recorded)
    with second_device():
        window = Reference(
            generated_instance(Case(PROBABILITIES, UNEQUAL, device="cuda", seed=1))
        ).window(0)
        noise = window.bound.errors.noise()
    assert (noise > 0).all()
    assert devices
    assert SecondDeviceTensor not in devices


def test_draws_of_a_problem_that_computes_on_its_own_device_move_its_parameters_alone():
    """Its loss has a constant on that device, so nothing can be computed on the CPU, and no
    operation is rounded.
    """
    with second_device():
        instance = generated_instance(Case(PROBABILITIES, UNEQUAL, device="cuda", seed=1))
        constant, loss = torch.ones((), device=instance.device), instance.problem.loss
        assert isinstance(constant, SecondDeviceTensor)

        def on_its_own_device(model, batch):
            if not isinstance(batch["x"], SecondDeviceTensor):
                raise RuntimeError("Expected all tensors to be on the same device")
            return loss(model, batch) * constant

        object.__setattr__(instance.problem, "loss", on_its_own_device)
        computation = Computation(instance, instance.model(), torch.float64)
        part = (range(4), 1.0)
        assert computation.on_cpu(part) is computation
        right, drawn = (
            computation.gradient(part),
            computation.rounded_at_random([part], torch.float32, 0),
        )
    assert 0 < abs(drawn - right).max() < 1e-5


def test_the_random_state_of_a_gpu_is_seeded_and_restored(monkeypatch):
    states, seeds = {"now": "before"}, []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states["now"])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update(now=state))
    monkeypatch.setattr(
        torch.cuda, "manual_seed", lambda seed: (seeds.append(seed), states.update(now="seeded"))
    )
    with seeded(5, torch.device("cuda")):
        assert states["now"] == "seeded"
    assert (seeds, states["now"]) == ([5], "before")


@pytest.mark.parametrize("device", DEVICES)
def test_a_loop_that_draws_gives_the_same_gradients_again(device):
    noisy = trains(before=each_gradient(lambda g: g.add_(torch.rand_like(g))))
    instance = generated_instance(Case(PROBABILITIES, UNEQUAL, device=device, seed=1))
    torch.rand(1, device=instance.device)
    before = torch.rand(1, device=instance.device)
    first, again = (run_loop(noisy, instance).observations[0].gradients for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(before, torch.rand(1, device=instance.device))


def test_a_run_that_does_not_repeat_is_left_out():
    """Planted: every run adds another number. Nothing is concluded from `==` on such a run."""
    runs = []

    unrepeatable = trains(begin=runs.append, before=each_gradient(lambda g: g.add_(len(runs))))
    with second_device():
        instance = generated_instance(Case(PROBABILITIES, UNEQUAL, device="cuda", seed=1))
        assert repeatable_run(MODES["zero_"], instance).raised is None
        with pytest.raises(pytest.skip.Exception, match="not repeatable on this device"):
            repeatable_run(unrepeatable, instance)
