"""Wrong backwards of custom functions that show only at some call, dtype, memory layout or gradient,
and sound twins of each.
"""

from __future__ import annotations

import functools

import pytest
import torch

from gradcheck_suite.auditing import custom_functions
from gradcheck_suite.auditing.custom_functions import (
    CONSTANT,
    CONTIGUOUS,
    IGNORES,
    judge_backward,
)
from gradcheck_suite.auditing.function_calls import CallsOfProgram, first_calls
from tests.auditing.test_recomputation import custom, elementwise, leaf, slope


def reports(kind, *calls, passed=None):
    """Return the reports of a class after some calls of it, each with a backward.

    Args:
        kind: the class.
        calls: the arguments of each call.
        passed: makes a scalar of an output; None for a random weight of each element.
    """
    with first_calls({kind}) as recorded:
        for arguments in calls:
            output = kind.apply(*arguments)
            if passed is None:
                output.backward(leaf(*output.shape).detach().to(output))
            else:
                passed(output).backward()
    return [judge_backward(call) for call in recorded[kind].values()]


def faults(*arguments, **options):
    return [report.fault for report in reports(*arguments, **options)]


def maximum(way):
    """Return a maximum over the second dimension, whose backward spreads the gradient in some way."""

    def forward(context, x):
        values, places = x.max(1)
        context.save_for_backward(places)
        context.shape = x.shape
        return values

    def backward(context, gradient):
        (places,) = context.saved_tensors
        zeros = gradient.new_zeros(context.shape)
        if way == "all":
            return zeros + gradient[:, None] / context.shape[1]
        return zeros.scatter(1, places[:, None], gradient[:, None])

    return custom(forward, backward, own_context=True)


@pytest.mark.parametrize("way", ["all", "one"])
def test_a_maximum_that_only_bends_has_no_excuse(way):
    (fault,) = faults(maximum(way), [leaf(5, 7, 6)])
    assert ("it is not the derivative" in fault) == (way == "all"), fault


@pytest.mark.parametrize(("factor", "is_fault"), [(0.5, True), (1, False), (-1, True)])
def test_a_straight_through_estimator_is_right_where_its_output_moves(factor, is_fault):
    kind = custom(lambda x: x.clamp(-1, 1), lambda context, gradient: factor * gradient)
    (report,) = reports(kind, [leaf(8, 5)])
    assert (f"{factor:.3g} times the derivative" in report.fault) == is_fault, report
    assert (report.note == CONSTANT) == (not is_fault), report


def test_a_surrogate_of_a_rectifier_is_no_fault():
    """Its gradient is that of a smooth function near by, on purpose."""
    kind = elementwise(torch.relu, lambda x: x.sigmoid() * (1 + x * (1 - x.sigmoid())))
    (report,) = reports(kind, [leaf(20, 5)])
    assert (report.fault, report.note) == ("", CONSTANT), report


@pytest.mark.parametrize(("factor", "is_fault"), [(0.1, True), (1, False), (4, True)])
def test_a_loss_that_ignores_its_gradient_is_wrong_where_that_is_not_1(factor, is_fault):
    kind = custom(
        lambda x: x.square().sum(), lambda context, gradient: 2 * context.saved_tensors[0]
    )
    (report,) = reports(kind, [leaf(8, 5)], passed=lambda loss: loss * factor)
    assert (f"{1 / factor:.3g} times" in report.fault) == is_fault, report
    assert (report.note == IGNORES) == (not is_fault), report


def keeping(owner):
    """Return a square that keeps its argument on an object, or in its context."""

    def forward(context, x):
        context.save_for_backward(x)
        owner.append(x.detach())
        return x * x

    def backward(context, gradient):
        x = owner[-1] if owner.is_read else context.saved_tensors[0]
        return 2 * x * gradient

    return custom(forward, backward, own_context=True)


class Kept(list):
    """What a function keeps, and whether its backward reads the last of it."""

    is_read = True


@pytest.mark.parametrize("is_read", [True, False])
def test_what_a_later_call_has_overwritten(is_read):
    owner = Kept()
    owner.is_read = is_read
    kind = keeping(owner)
    one = leaf(8, 5)
    with first_calls({kind}) as recorded:
        outputs = [kind.apply(one), kind.apply(one * 2)]
        sum(output.square().sum() for output in outputs).backward()
    (report,) = [judge_backward(call) for call in recorded[kind].values()]
    assert ("it differed in the program by" in report.fault) == is_read, report
    assert not report.note


@pytest.mark.parametrize("is_faulty", [True, False])
@pytest.mark.parametrize(
    ("passed", "reads_wrongly"),
    [
        (lambda y: (y.t().contiguous() * leaf(5, 8).detach()).sum(), lambda g: g.t()),
        (lambda y: y.sum(), lambda g: g.expand(g.shape)),
    ],
)
def test_a_gradient_that_is_not_contiguous(is_faulty, passed, reads_wrongly):
    def backward(context, gradient):
        (x,) = context.saved_tensors
        if is_faulty and not gradient.is_contiguous():
            gradient = reads_wrongly(gradient).reshape(gradient.shape) * 2
        return gradient * slope(x)

    (fault,) = faults(custom(torch.tanh, backward), [leaf(8, 5)], passed=passed)
    assert bool(fault) == is_faulty, fault


@pytest.mark.parametrize("reads_rows", [True, False])
def test_a_gradient_of_another_layout_than_those_that_were_seen_is_noted(reads_rows):
    def backward(context, gradient):
        (x,) = context.saved_tensors
        if reads_rows:
            gradient = torch.as_strided(gradient, gradient.shape, (gradient.shape[1], 1))
        return gradient * slope(x)

    (report,) = reports(custom(torch.tanh, backward), [leaf(8, 5)])
    assert (report.fault, report.note) == ("", CONTIGUOUS if reads_rows else "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_faulty", [True, False])
def test_a_dtype_that_has_a_way_of_its_own(dtype, is_faulty):
    def derivative(x):
        return slope(x) * (1.5 if is_faulty and x.dtype == dtype else 1)

    (fault,) = faults(elementwise(torch.tanh, derivative), [leaf(8, 5, dtype=dtype)])
    name = str(dtype).removeprefix("torch.")
    assert (f"another one in {name} than in float64" in fault) == is_faulty, fault


def test_an_unstable_dtype_is_not_blamed_for_its_rounding():
    def variance(x):
        return x.square().mean(1) - x.mean(1).square()

    def backward(context, gradient):
        (x,) = context.saved_tensors
        return 2 * gradient[:, None] * (x - x.mean(1, keepdim=True)) / x.shape[1]

    (report,) = reports(custom(variance, backward), [(leaf(8, 50).detach() + 300).requires_grad_()])
    assert not report.fault, report


def test_each_shape_and_each_mode_is_judged_once():
    def backward(context, gradient):
        (x,) = context.saved_tensors
        even = len(x) // 2 * 2
        whole = torch.zeros_like(x)
        whole[:even] = 2 * x[:even] * gradient[:even]
        return whole

    kind = custom(lambda x: x * x, backward)
    found = faults(kind, [leaf(4, 5)], [leaf(4, 5)], [leaf(3, 5)])
    assert [bool(fault) for fault in found] == [False, True]

    def forward(context, x, name):
        context.save_for_backward(x)
        context.name = name
        return x.tanh() if name == "tanh" else x.sigmoid()

    def of_modes(context, gradient):
        (x,) = context.saved_tensors
        return gradient * (slope(x) if context.name == "tanh" else x.sigmoid()), None

    kind = custom(forward, of_modes, own_context=True)
    found = faults(kind, [leaf(4, 5), "tanh"], [leaf(4, 5), "sigmoid"], [leaf(4, 5), "tanh"])
    assert [bool(fault) for fault in found] == [False, True]


@pytest.mark.parametrize("is_cloned", [True, False])
def test_a_gradient_in_the_same_memory_each_time(is_cloned):
    memory = torch.empty(5)

    def backward(context, gradient):
        x, weight = context.saved_tensors
        buffer = memory if gradient.dtype == memory.dtype else torch.empty(5, dtype=gradient.dtype)
        torch.sum(gradient * x, 0, out=buffer)
        return gradient * weight, buffer.clone() if is_cloned else buffer.view(5)

    kind = custom(lambda x, weight: x * weight, backward)
    (fault,) = faults(kind, [leaf(8, 5), leaf(5)])
    assert ("gives the same memory" in fault) == (not is_cloned), fault


def penalised(derivative):
    """Return the reports of an activation after a gradient penalty has gone through it."""
    kind = elementwise(torch.nn.functional.softplus, derivative)
    calls = CallsOfProgram()
    calls.watch([kind])
    x = leaf(6, 3)
    weighted = kind.apply(x * 1) * leaf(6, 3)
    (gradient,) = torch.autograd.grad(weighted.sum(), x, create_graph=True)
    gradient.square().sum().backward()
    found = [judge_backward(call) for call in calls.taken()]
    calls.close()
    return found


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_backward_that_a_penalty_goes_through(is_lost):
    def derivative(x):
        return (x.detach() if is_lost else x).sigmoid()

    (report,) = penalised(derivative)
    assert ("a further pass goes through" in report.fault) == is_lost, report


class Block(torch.nn.Module):
    """A layer with dropout that may write to its input."""

    def __init__(self, *, writes, rate):
        super().__init__()
        self.linear = torch.nn.Linear(5, 5)
        self.rate = rate
        self.writes = writes

    def forward(self, x):
        x = x.mul_(0.5).tanh_() if self.writes else (x * 0.5).tanh()
        return self.linear(torch.nn.functional.dropout(x, self.rate))


def checkpoint(*, restores, accumulates):
    """Return a checkpoint of one's own: a function of a callable, an input and parameters."""

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(context, function, x, *parameters):
            context.kept = function, x, parameters
            context.state = torch.get_rng_state()
            with torch.no_grad():
                return function(x)

        @staticmethod
        def backward(context, gradient):
            function, x, parameters = context.kept
            x = x.detach().requires_grad_()
            now = torch.get_rng_state()
            if restores:
                torch.set_rng_state(context.state)
            with torch.enable_grad():
                y = function(x.clone())
            torch.set_rng_state(now)
            if accumulates:
                torch.autograd.backward(y, gradient)
                return (None, x.grad, *[None] * len(parameters))
            return (None, *torch.autograd.grad(y, (x, *parameters), gradient))

    return Checkpoint


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize(
    ("writes", "restores", "is_fault"),
    [(False, True, False), (True, True, True), (False, False, True)],
)
@pytest.mark.parametrize("how", ["a module", "a method", "a partial function", "a closure"])
def test_a_checkpoint_of_ones_own(how, accumulates, writes, restores, is_fault):
    block = Block(writes=writes, rate=0.0 if writes else 0.4)
    functions = {
        "a module": block,
        "a method": block.forward,
        "a partial function": functools.partial(block),
        "a closure": lambda x: block(x),
    }
    kind = checkpoint(restores=restores, accumulates=accumulates)
    given = [] if accumulates else list(block.parameters())
    with first_calls({kind}) as recorded:
        kind.apply(functions[how], leaf(8, 5) * 1, *given).square().sum().backward()
    before = [(p.clone(), p.grad.clone(), id(p.grad)) for p in block.parameters()]
    (report,) = [judge_backward(call) for call in recorded[kind].values()]
    assert bool(report.fault) == is_fault, report
    assert not report.note
    for p, (value, gradient, place) in zip(block.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert torch.equal(p.grad, gradient)
        assert id(p.grad) == place


def test_a_call_that_takes_long_is_not_checked_and_that_is_said(monkeypatch):
    wrong = elementwise(torch.tanh, lambda x: 2 * slope(x))
    assert faults(wrong, [leaf(3)])[0]
    monkeypatch.setattr(custom_functions, "LONGEST_S", 0.0)
    (report,) = reports(wrong, [leaf(3)])
    assert report.note.startswith("its backward was not checked, since one call of it takes")
    assert not report.fault
