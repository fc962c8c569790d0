"""Metamorphic properties, which need no reference: order, split and padding change nothing, a factor scales."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, cases, plans, problems
from gradcheck_suite.catalogue.tables import loss_definition
from gradcheck_suite.core.contract import Loop
from gradcheck_suite.loops.reset_modes import BUILT_IN, MODES
from gradcheck_suite.run.instance import Instance, generated_instance
from properties.assertions import Gradients, assert_gradients_equal, assert_within_rounding, differing
from properties.devices import DEVICES
from properties.helpers import REGRESSION, apart, observe, scaled, with_items, with_loss
from studies.zoo import BUGS

LOOPS = {name: BUILT_IN[name] for name in ("zero_", "set_to_none", "flat_buffer", "rescale_at_the_end")}
ONE_WINDOW = Case(REGRESSION, Plan((1, 3, 2), 3), seed=1)
one_window = plans(max_epochs=1, max_windows=1, min_accumulation_steps=2)
one_window_cases = cases(plan=one_window)


def gradients(loop: Loop, instance: Instance) -> Gradients:
    """Return the gradients at a loop's only step."""
    (observation,) = observe(loop, instance)
    return observation.gradients


def assert_same(loop: Loop, instance: Instance, other: Instance, what: str) -> None:
    """Fail where two cuts of the same items give gradients that differ by more than rounding."""
    __tracebackhide__ = True
    terms = max(len(t.case.plan.micro_batches) for t in (instance, other))
    difference = apart(instance, 0, gradients(loop, instance), gradients(loop, other), terms=terms)
    case = (instance.case, other.case.plan)
    assert_within_rounding(what=f"change of the gradient by {what}", difference=difference, case=case)


def reordered(instance: Instance, order: list[int]) -> Instance:
    """Return the instance of one window with its micro-batches in another order."""
    plan = instance.case.plan
    sizes = tuple(plan.micro_batches[j] for j in order)
    items = [i for j in order for i in plan.items(j)]
    return with_items(instance, instance.case.replace(plan=Plan(sizes, plan.accumulation_steps)), items)


def recut(instance: Instance, sizes: list[int]) -> Instance:
    """Return the instance of one window with the same items in micro-batches of other sizes."""
    plan = Plan(tuple(sizes), len(sizes))
    return with_items(instance, instance.case.replace(plan=plan), list(range(plan.total_items)))


def without_padding(instance: Instance) -> Instance:
    """Return the instance of one window without the micro-batches that have no valid targets."""
    plan = instance.case.plan
    kept = [j for j in range(len(plan.micro_batches)) if j not in plan.masked]
    return with_items(
        instance,
        instance.case.replace(plan=Plan(tuple(plan.micro_batches[j] for j in kept), len(kept))),
        [i for j in kept for i in plan.items(j)],
    )


def _maskable(problem: ProblemSpec) -> bool:
    return loss_definition(problem.loss).maskable(problem.loss.o)


@st.composite
def padded_cases(draw: st.DrawFn) -> Case:
    """Draw one window with one to three micro-batches without valid targets somewhere in it."""
    plan = draw(one_window)
    sizes, masked = list(plan.micro_batches), [False] * len(plan.micro_batches)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.integers(0, len(sizes)))
        sizes.insert(where, draw(st.integers(1, 4)))
        masked.insert(where, True)
    chosen = Plan(tuple(sizes), len(sizes), masked=tuple(j for j, m in enumerate(masked) if m))
    return Case(draw(problems().filter(_maskable)), chosen, seed=draw(st.integers(0, 2**32 - 1)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LOOPS)
@scaled(5)
@given(case=one_window_cases, data=st.data())
def test_order_of_micro_batches_does_not_matter(name, device, case, data):
    instance = generated_instance(case.replace(device=device))
    order = data.draw(st.permutations(range(len(case.plan.micro_batches))), label="order")
    event(f"another order: {order != sorted(order)}")
    assert_same(LOOPS[name], instance, reordered(instance, order), "the order of micro-batches")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LOOPS)
@scaled(5)
@given(case=one_window_cases, data=st.data())
def test_splitting_a_split_does_not_matter(name, device, case, data):
    instance = generated_instance(case.replace(device=device))
    total = case.plan.total_items
    cuts = set(accumulate(case.plan.micro_batches))
    cuts |= set(data.draw(st.lists(st.integers(1, total), max_size=6), label="further cuts"))
    ends = sorted(cuts)
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    event(f"finer: {len(sizes) > len(case.plan.micro_batches)}")
    assert_same(LOOPS[name], instance, recut(instance, sizes), "a finer split")
    assert_same(LOOPS[name], instance, recut(instance, [total]), "no split at all")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LOOPS)
@scaled(5)
@given(case=padded_cases())
def test_micro_batches_without_valid_targets_change_nothing(name, device, case):
    padded = generated_instance(case.replace(device=device))
    assert_gradients_equal(
        what="with and without micro-batches that have no valid targets",
        observed=gradients(LOOPS[name], padded),
        expected=gradients(LOOPS[name], without_padding(padded)),
        case=case,
    )


def assert_homogeneous(loop: Loop, instance: Instance, factor: float, *, exact: bool) -> None:
    """Fail unless `factor` times the loss gives `factor` times the gradient."""
    __tracebackhide__ = True
    loss = instance.problem.loss
    times = with_loss(instance, lambda model, batch: factor * loss(model, batch))
    once, scaled_up = gradients(loop, instance), gradients(loop, times)
    expected = {name: None if g is None else factor * g for name, g in once.items()}
    what = f"{factor:g} times the loss against {factor:g} times the gradient"
    if exact:
        assert_gradients_equal(what=what, observed=scaled_up, expected=expected, case=instance.case)
        return
    terms = len(instance.case.plan.micro_batches)
    difference = apart(instance, 0, scaled_up, expected, terms=terms, scale=factor)
    assert_within_rounding(what=what, difference=difference, case=instance.case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LOOPS)
@scaled(5)
@given(case=one_window_cases, exponent=st.integers(-12, 12), sign=st.sampled_from([1, -1]))
def test_a_power_of_two_on_the_loss_scales_the_gradient_exactly(name, device, case, exponent, sign):
    # 2**12 moves an exponent far less than float64's range allows, so nothing is rounded on the way
    assert_homogeneous(
        LOOPS[name], generated_instance(case.replace(device=device)), sign * 2.0**exponent, exact=device == "cpu"
    )


@pytest.mark.parametrize("name", LOOPS)
@scaled(5)
@given(case=one_window_cases, factor=st.floats(-1000, 1000, allow_subnormal=False))
def test_any_factor_on_the_loss_scales_the_gradient(name, case, factor):
    assume(factor != 0)
    assert_homogeneous(LOOPS[name], generated_instance(case), factor, exact=False)


@pytest.mark.parametrize("name", ["rescaled-accumulator", "first-only", "reset-per-micro-batch"])
def test_a_fault_that_depends_on_the_order_is_caught(name):
    instance = generated_instance(ONE_WINDOW)
    with pytest.raises(AssertionError, match="change of the gradient by the order"):
        assert_same(BUGS[name].loop, instance, reordered(instance, [2, 0, 1]), "the order of micro-batches")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["mean-of-means", "no-divide", "double-divide"])
def test_a_fault_that_depends_on_the_split_is_caught(name, device):
    instance = generated_instance(ONE_WINDOW.replace(device=device))
    with pytest.raises(AssertionError, match="change of the gradient by a finer split"):
        assert_same(BUGS[name].loop, instance, recut(instance, [1, 1, 2, 2]), "a finer split")


def test_the_order_alone_does_not_show_a_mean_of_means():
    instance = generated_instance(ONE_WINDOW)
    assert_same(BUGS["mean-of-means"].loop, instance, reordered(instance, [2, 0, 1]), "the order of micro-batches")


def test_counting_a_micro_batch_without_valid_targets_is_caught():
    classes = ProblemSpec(
        Input("vector", size=2),
        (Layer("linear", features=3, bias=True),),
        Loss("cross_entropy", ignore_index=True, label_smoothing=0.0, class_weights=False, reduction="mean"),
    )
    padded = generated_instance(Case(classes, Plan((2, 1), 2, masked=(1,)), seed=1))
    for loop, wrong in ((MODES["zero_"], []), (BUGS["mean-of-means"].loop, ["0.weight", "0.bias"])):
        observed, expected = (gradients(loop, each) for each in (padded, without_padding(padded)))
        assert differing(observed=observed, expected=expected) == wrong


def test_clipping_per_micro_batch_is_caught():
    with pytest.raises(pytest.fail.Exception, match="8 times the loss against"):
        assert_homogeneous(BUGS["clip-per-micro-batch"].loop, generated_instance(ONE_WINDOW), 8.0, exact=True)
