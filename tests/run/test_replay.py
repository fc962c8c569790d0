"""A step is computed again to the bit, for every optimizer.

Compiled code gets as much as rounding explains.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradcheck_suite.run.observer import StepObserver
from gradcheck_suite.run.optimizers import (
    FOR_ANY_LOOP,
    OPTIMIZERS,
    fault_before,
    fault_between,
    fault_of_step,
    optimizer_of,
    rounding,
    stepped,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Names of the optimizers that train a linear layer with a bias, and need no closure."""


def _trained(make, dtype, steps=4, closure=False):
    """Return the observer of some steps on drawn gradients, one parameter's None at first."""
    drawn = torch.Generator().manual_seed(1)
    model = torch.nn.Linear(11, 13).to(dtype)
    for p in model.parameters():
        p.data = torch.rand(p.shape, generator=drawn).to(dtype)
    optimizer = make(list(model.parameters()))
    observer = StepObserver(model, optimizer, limit=steps)
    for step in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=drawn).to(dtype)
        if step == 0:
            model.bias.grad = None
        optimizer.step((lambda: torch.zeros(())) if closure else None)
    return observer


def first_fault(make_optimizer, start, observations, end):
    """Return the first fault of the parameters in a run, or None.

    `start` is `at_start` of the run.
    """
    for previous, observation in zip([start, *observations], observations, strict=False):
        fault = fault_before(previous, observation, start.after)
        if fault := fault or fault_of_step(make_optimizer, previous, observation):
            return fault
    return fault_between([start, *observations][-1], end, start.after)


def _start(observer):
    return observer.beginning


def _moved_by(observation, name, change):
    after = dict(observation.after)
    after[name] = (after[name].double() + change).to(after[name].dtype)
    return replace(observation, after=after)


@pytest.mark.parametrize("name", FOR_ANY_LOOP)
def test_every_optimizers_steps_have_the_same_bits_again(name):
    make = OPTIMIZERS[name]
    for dtype in DTYPES:
        for foreach in (None, True):

            def of(parameters, foreach=foreach):
                optimizer = make(parameters)
                optimizer.param_groups[0]["foreach"] = foreach
                return optimizer

            observer = _trained(of, dtype)
            assert (
                first_fault(make, _start(observer), observer.observations, observer.values())
                is None
            )
            assert all(observation.repeatable for observation in observer.observations)


def test_a_step_of_l_bfgs_has_the_same_bits_again_at_each_call_of_its_closure():
    def make(parameters):
        return torch.optim.LBFGS(parameters, max_iter=4)

    model = torch.nn.Linear(3, 1)
    optimizer = make(list(model.parameters()))
    observer = StepObserver(model, optimizer, limit=2)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.eye(3)) - 5).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    first, second = observer.observations
    assert len(first.evaluations) > 1
    assert not torch.equal(first.evaluations[0].parameters["weight"], first.parameters["weight"])
    # bit for bit, though the closure is called by a decorator of torch's and not by the step
    for previous, observation in ((_start(observer), first), (first, second)):
        again = stepped(make, observation, previous.state_after)
        assert all(torch.equal(again[name], observation.after[name]) for name in again)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's own Adagrad
@pytest.mark.parametrize("name", ["sgd", "nesterov", "adagrad", "sparseadam", "normalized"])
def test_a_step_on_uncoalesced_sparse_gradients_has_the_same_bits_again(name):
    model = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    observer = StepObserver(model, optimizer, limit=3)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            (model(torch.tensor([1, 1, 2])) ** 2).sum().backward()
        optimizer.step()
    assert (
        first_fault(OPTIMIZERS[name], _start(observer), observer.observations, observer.values())
        is None
    )


@pytest.mark.parametrize("name", FOR_ANY_LOOP)
def test_a_step_in_another_implementation_gets_what_rounding_explains(name):
    make = OPTIMIZERS[name]
    for dtype in (torch.float64, torch.float32):
        observer = _trained(make, dtype)
        before, last = observer.observations[-2:]
        allowed = rounding(make, last, before.state_after)["weight"]
        own = torch.finfo(dtype).eps / 2
        # the step count of the others is float32 in every dtype
        coarsest = own if name in ("sgd", "momentum", "nesterov", "normalized") else 2.0**-24
        assert 2 * own * float(last.after["weight"].abs().max()) <= allowed <= 1000 * coarsest
        compiled = replace(last, repeatable=False)
        for factor, found in ((0.8, False), (1.3, True), (-1.3, True)):
            fault = fault_of_step(make, before, _moved_by(compiled, "weight", factor * allowed))
            assert (fault is not None) is found, (dtype, factor)
        # of torch's compiler, and of no other value
        captured = replace(
            last, settings=[{**group, "capturable": True} for group in last.settings]
        )
        assert first_fault(make, before, [captured], last.after) is None
        # torch's own code gets nothing
        fault = fault_of_step(make, before, _moved_by(last, "weight", 0.8 * allowed))
        assert (fault.diagnosis, fault.parameter, fault.allowed) == ("wrong-update", "weight", 0)


def test_a_step_that_another_order_of_operations_computes_is_within_its_rounding():
    # Adam by hand, in float32 and in an order of its own
    make = OPTIMIZERS["adam"]
    observer = _trained(make, torch.float32)
    before, last = observer.observations[-2:]
    state, gradient = before.state_after["weight"], last.gradients["weight"]
    step = float(state["step"]) + 1
    mean = 0.9 * state["exp_avg"] + 0.1 * gradient
    square = 0.999 * state["exp_avg_sq"] + 0.001 * gradient * gradient
    by_hand = last.parameters["weight"] - 0.01 * (mean / (1 - 0.9**step)) / (
        (square / (1 - 0.999**step)).sqrt() + 1e-8
    )
    assert not torch.equal(by_hand, last.after["weight"])
    other = replace(last, repeatable=False, after={**last.after, "weight": by_hand})
    assert fault_of_step(make, before, other) is None
    assert fault_of_step(make, before, replace(other, repeatable=True)).diagnosis == "wrong-update"


def test_a_step_that_changes_nothing_is_named():
    make = OPTIMIZERS["sgd"]
    observer = _trained(make, torch.float32)
    before, last = observer.observations[-2:]
    fault = fault_of_step(make, before, replace(last, after=last.parameters))
    assert (fault.diagnosis, fault.parameter) == ("parameter-not-updated", "weight")
    assert "the step left weight as it was" in fault.sentence


def test_an_optimizer_that_changes_nothing_must_change_nothing():
    observer = _trained(OPTIMIZERS["sgd"], torch.float32)
    before, last = observer.observations[-2:]
    assert fault_of_step(None, before, replace(last, after=last.parameters)) is None
    assert fault_of_step(None, before, last).diagnosis == "wrong-update"


def test_state_that_a_loop_puts_in_is_seen_by_what_it_does():
    make = OPTIMIZERS["momentum"]
    model = torch.nn.Linear(2, 1)
    optimizer = make(list(model.parameters()))
    observer = StepObserver(model, optimizer, limit=2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)
    optimizer.step()
    fault = first_fault(make, _start(observer), observer.observations, observer.values())
    assert fault.diagnosis == "wrong-update"


def test_no_element_moves_further_than_the_normalized_optimizer_says():
    for dtype in DTYPES:
        observer = _trained(OPTIMIZERS["normalized"], dtype)
        for observation in observer.observations:
            for name, value in observation.after.items():
                moved = (value.double() - observation.parameters[name].double()).abs().max()
                assert moved <= 0.04 * (1 + 2.0**-6) + torch.finfo(dtype).eps


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch._dynamo itself
@pytest.mark.parametrize("name", [None, "momentum", "adam", "normalized"])
def test_a_compiled_step_is_judged_within_its_rounding(name):
    make = OPTIMIZERS["sgd"] if name is None else OPTIMIZERS[name]
    for dtype in (torch.float64, torch.float32):
        model = torch.nn.Linear(3, 2).to(dtype)
        optimizer = optimizer_of(name, model)
        observer = StepObserver(model, optimizer, limit=3)
        torch._dynamo.reset()
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            step()
        assert not any(observation.repeatable for observation in observer.observations)
        chosen = None if name is None else make
        assert (
            first_fault(chosen, _start(observer), observer.observations, observer.values()) is None
        )
        wrong = _moved_by(observer.observations[-1], "weight", 1e-3)
        assert fault_of_step(chosen, observer.observations[-2], wrong).diagnosis == "wrong-update"
