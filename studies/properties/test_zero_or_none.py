"""What zeros do to a parameter that a window does not reach, and None does not: for every optimizer
of torch.

A prediction takes the published step in exact numbers. Torch must do precisely this in every
element of the parameter and its state, to the bit where all operations are exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.helpers import scaled
from studies import zero_or_none
from studies.reset_modes import RESET_MODES, ResetMode
from studies.zero_or_none import (
    PARAMETER,
    ROUTED,
    Difference,
    Point,
    Rounded,
    Run,
    differences,
    expected_gradients,
    predict,
    start,
    train,
)
from studies.zero_or_none_laws import DECAY, DEFAULTS, LAWS, PLAIN, Law

ZERO, NONE, FLAT = (RESET_MODES[name] for name in ("zero_", "set_to_none", "flat_buffer"))
OTHERS = [
    mode for mode in RESET_MODES.values() if mode.reset is not None and mode not in (ZERO, NONE)
]
EXACT = {
    ("SGD", "plain"),
    ("SGD", "momentum"),
    ("SGD", "weight decay"),
    ("Muon", "weight decay"),
    ("Rprop", "plain"),
}
"""Rows whose every operation is exact, so that torch must agree to the bit."""

windows = st.lists(
    st.sampled_from((zero_or_none.REACHED, zero_or_none.MISSED, zero_or_none.FROZEN)),
    min_size=1,
    max_size=6,
).map(tuple)


def wrong(law: Law, run: Run, seen: Sequence[Any]) -> list[Difference]:
    """Return what rounding does not explain."""
    return [d for d in differences(predict(law, run.settings, start(law), seen), run) if d.is_wrong]


def assert_as_predicted(
    law: Law, variant: str, these: Sequence[str], mode: ResetMode, **implementation: Any
) -> None:
    """Fail unless each step found the predicted gradient, and left what the law predicts."""
    __tracebackhide__ = True
    run = train(law, law.variants[variant], these, mode, **implementation)
    seen = expected_gradients(law, these, mode)
    what = f"{law.optimizer}, {variant}, {mode.name}, {these}"
    for w, (observed, expected) in enumerate(zip(run.seen, seen, strict=True)):
        assert (observed is None) == (expected is None), (
            f"{what}: gradient {observed}, should be {expected}"
        )
        assert expected is None or np.array_equal(observed, expected), (
            f"{what}, window {w}: {observed}, {expected}"
        )
    assert not (found := wrong(law, run, seen)), f"{what}: {found}"


def test_every_optimizer_of_torch_has_a_law():
    classes = {
        name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)
    } - {"Optimizer"}
    assert classes == {law.optimizer for law in LAWS.values()}


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(name, marks=() if name == "routed" else pytest.mark.full)
        for name in zero_or_none.SCENARIOS
    ],
)
@pytest.mark.parametrize("name", LAWS)
def test_torch_does_as_predicted(name, scenario):
    law, these = LAWS[name], zero_or_none.SCENARIOS[scenario]
    if law.reads_none_as_zero and zero_or_none.ABSENT in these:
        pytest.skip("L-BFGS takes no second parameter group")
    for variant in law.variants:
        for mode in (ZERO, NONE):
            assert_as_predicted(law, variant, these, mode)


@pytest.mark.full
@pytest.mark.parametrize("name", LAWS)
def test_torch_does_as_predicted_under_every_reset(name):
    law = LAWS[name]
    for mode in OTHERS:
        # a flat buffer is dense, which SparseAdam refuses
        if not (law.sparse and mode is FLAT):
            assert_as_predicted(law, next(iter(law.variants)), ROUTED, mode)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_a_gradient_allocated_at_the_start_is_a_zero_from_the_start(name):
    assert_as_predicted(LAWS[name], DECAY, zero_or_none.MISSED_FIRST, FLAT)


@pytest.mark.full
@pytest.mark.parametrize("name", LAWS)
def test_the_other_implementations_do_as_predicted(name):
    law = LAWS[name]
    for implementation in ("foreach", "fused"):
        if implementation in inspect.signature(getattr(torch.optim, law.optimizer)).parameters:
            # the fused kernels keep the step in float32, in which it is exact
            assert_as_predicted(law, PLAIN, ROUTED, ZERO, **{implementation: True})


@pytest.mark.full
@scaled(2)
@given(name=st.sampled_from(sorted(LAWS)), these=windows, data=st.data())
def test_torch_does_as_predicted_on_drawn_windows(name, these, data):
    law = LAWS[name]
    variant = data.draw(st.sampled_from(sorted(law.variants)))
    if not law.reads_none_as_zero:
        assert_as_predicted(law, variant, these, data.draw(st.sampled_from((ZERO, NONE))))


@pytest.mark.parametrize(("name", "variant"), sorted(EXACT))
def test_an_exact_prediction_allows_no_error(name, variant):
    law = LAWS[name]
    run = train(law, law.variants[variant], ROUTED, ZERO)
    predicted = predict(law, run.settings, start(law), expected_gradients(law, ROUTED, ZERO))
    assert [d.allowed for d in differences(predicted, run) if d.allowed] == []


# --- planted mistakes


def predicted_wrongly(law: Law, variant: str, mode: ResetMode, seen: Sequence[Any]) -> set[str]:
    """Return the entries in which torch differs from the prediction for gradients that it did not
    see.
    """
    run = train(law, law.variants[variant], ROUTED, mode)
    return {d.entry for d in wrong(law, run, seen)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("SGD", "AdamW") else pytest.mark.full)
        for name in LAWS
    ],
)
def test_a_law_that_takes_zeros_for_none_is_caught(name):
    law, alike = (
        LAWS[name],
        {("SGD", PLAIN), ("SGD", DEFAULTS), ("LBFGS", PLAIN), ("LBFGS", DEFAULTS)},
    )
    for variant in list(law.variants)[:2]:
        zeros, nothing = (expected_gradients(law, ROUTED, mode) for mode in (ZERO, NONE))
        for mode, seen in ((ZERO, nothing), (NONE, zeros)):
            assert bool(predicted_wrongly(law, variant, mode, seen)) == (
                (name, variant) not in alike
            ), variant


@pytest.mark.parametrize("name", LAWS)
def test_a_law_that_is_slightly_off_is_caught(name):
    law = LAWS[name]
    variant = next(reversed(law.variants))
    run = train(law, law.variants[variant], ROUTED, ZERO)
    seen = expected_gradients(law, ROUTED, ZERO)
    for entry in {PARAMETER} | run.states[-1].keys():
        found = {d.entry for d in wrong(replace(law, step=off(law, entry)), run, seen)}
        assert entry in found, (variant, entry)


def off(law: Law, entry: str) -> Callable[..., Point]:
    """Return the law's step with one entry off by 2^-40 of itself; a count is off by 1."""

    def step(theta: Any, state: dict[str, Any], g: Any, s: Any) -> Point:
        theta, state = law.step(theta, state, g, s)
        values = {PARAMETER: theta, **state}
        value = values[entry]
        larger = Rounded(1 + Decimal(2) ** -40)
        if isinstance(value, int):
            values[entry] = value + 1
        else:
            values[entry] = (
                [larger * v for v in value] if isinstance(value, list) else larger * value
            )
        return values.pop(PARAMETER), values

    return step


# --- surprises


def test_muon_moves_as_far_on_zeros_as_on_a_gradient():
    # the momentum falls by half a step, and is brought back to full size before it is applied
    p = torch.nn.Parameter(torch.zeros(3, 3))
    muon = torch.optim.Muon([p], lr=1.0, momentum=0.5, weight_decay=0.0)
    p.grad = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    moves = []
    for _ in range(4):
        before = p.detach().clone()
        muon.step()
        moves.append(p.detach() - before)
        p.grad.zero_()
    for move in moves[1:]:
        assert move.norm() == pytest.approx(float(moves[0].norm()), rel=2**-7)


def test_sparse_adam_refuses_a_gradient_that_is_allocated_before():
    # sparse gradients are added to a dense buffer, and the sum is dense
    law = LAWS["SparseAdam"]
    with pytest.raises(RuntimeError, match="expected sparse coordinate tensor layout"):
        train(law, law.variants[PLAIN], ROUTED, FLAT)


def test_lbfgs_refuses_a_parameter_added_late():
    law = LAWS["LBFGS"]
    with pytest.raises(AssertionError, match="exactly one param_group"):
        train(law, law.variants[PLAIN], zero_or_none.ADDED_LATE, NONE)
