"""The battery of weight probes: sound loops hold in every dtype, and faults that no drawn case
shows are found.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gradcheck_suite import Case, Plan, Problem, check, training_loop, verify
from gradcheck_suite.core.contract import assumptions_of
from gradcheck_suite.core.options import VerifyOptions
from gradcheck_suite.loops.reset_modes import (
    BUILT_IN,
    backward_window,
    part_of_window,
    window_count,
    windows,
)
from gradcheck_suite.verification import search as module
from gradcheck_suite.verification.search import SearchState, first_cases
from studies.zoo import BUGS
from tests.one_problem import LINEAR
from tests.training import at, each_gradient, each_parameter, trains
from tests.verification.planted import (
    LONG,
    SIZES,
    before_step,
    clips_to_a_limit_that_no_finite_gradient_reaches,
    halves_after_a_non_finite_window,
    raises_counts_to_1,
    skips_steps,
)

SOME_DTYPES = [
    "float16",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("float64", "bfloat16")),
]
"""The smallest range, the widest, and the fewest digits."""


def battery(loop, *, dtype="float64", assumes=frozenset(), time_limit_s=None, optimizer=None):
    """Check the probes: what they show first, whether no drawn case can show it, and what was left
    out.
    """
    options = VerifyOptions(dtype=dtype, time_limit_s=time_limit_s, optimizer=optimizer).of(loop)
    search = SearchState(loop, None, options, None, None, frozenset(assumes) | assumptions_of(loop))
    violation, final = search.on_probes()
    return SimpleNamespace(violation=violation, final=final, skipped=[*search.tally.skipped])


FEW = ("set_to_none", "grad_scaler")
"""The built-in loops that are tried by default."""


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in BUILT_IN],
)
def test_sound_loops_hold(name, dtype):
    found = battery(BUILT_IN[name], dtype=dtype)
    assert found.violation is None, found.violation
    assert not found.skipped


def _in(dtype, loop):
    """Return the loop as one that runs in one precision alone."""

    def alone(run):
        if run.dtype is not getattr(torch, dtype):
            raise TypeError(f"expected {dtype}, got {run.dtype}")
        loop(run)

    return alone


def test_a_loop_that_runs_in_one_precision_alone_is_judged_and_named_in_it():
    faulty = BUGS["mean-of-means"].loop
    case = Case(LINEAR, Plan((1, 2), 2), dtype="float32")
    assert battery(_in("float32", BUILT_IN["plain"]), dtype="float32").violation is None
    assert check(_in("float32", BUILT_IN["plain"]), case).holds
    assert check(_in("float32", faulty), case).violation.diagnosis == "mean-of-means"
    # in bfloat16 weights cannot be told apart, and nothing is known of float64
    violation = battery(_in("bfloat16", faulty), dtype="bfloat16").violation
    assert violation.diagnosis == "not-linear"
    assert "the loop raises in float64" in violation.explanation


@pytest.mark.parametrize("name", SIZES)
def test_a_fault_of_large_small_or_non_finite_gradients_is_named_and_made_small(name):
    loop, diagnosis = SIZES[name]
    found = battery(loop)
    assert found.final
    assert found.violation.diagnosis == diagnosis, found.violation
    assert len(found.violation.case.plan.micro_batches) <= 2
    again = check(loop, found.violation.case).violation
    assert (again.kind, again.diagnosis) == (found.violation.kind, diagnosis)


def _biases(run):
    return [p.grad for name, p in run.model.named_parameters() if name.endswith("bias")]


replaces_nan_in_biases = before_step(
    lambda run: [g.nan_to_num_(0.0, 0.0, 0.0) for g in _biases(run)]
)
_halves_biases_after_the_17th_step = trains(
    before=lambda run, step: [g.mul_(0.5) for g in _biases(run)] if step > 16 else None
)


@pytest.mark.parametrize(
    ("loop", "optimizer", "kind", "diagnosis"),
    [
        pytest.param(
            trains(after=at({13}, lambda run, step: run.optimizer.state.clear())),
            "adam",
            "parameters",
            "optimizer-state-changed",
            marks=pytest.mark.full,
        ),
        (
            trains(after=each_parameter(lambda p: p.clamp_(-4, 4))),
            None,
            "parameters",
            "parameter-drift",
        ),
        pytest.param(
            _halves_biases_after_the_17th_step,
            None,
            "gradient",
            "wrong-scale",
            marks=pytest.mark.full,
        ),
        (replaces_nan_in_biases, None, "gradient", "not-linear"),
    ],
)
def test_a_fault_of_long_runs_or_of_one_kind_of_parameter_is_found(
    loop, optimizer, kind, diagnosis
):
    found = battery(loop, optimizer=optimizer)
    assert (found.violation.kind, found.violation.diagnosis) == (kind, diagnosis), found.violation
    assert found.violation.case.plan.total_items <= 6
    assert check(loop, found.violation.case).violation.kind == kind


@pytest.mark.full
def test_a_count_that_is_raised_to_1_is_found_before_any_case_is_drawn():
    found = battery(raises_counts_to_1)
    assert found.final
    assert found.violation.diagnosis == "wrong-scale", found.violation
    assert (
        "which is the window's count over the same raised to 1, 0.25/1"
        in found.violation.explanation
    )
    for assumes in ("plain-counts", "sum-reduction"):
        assert battery(raises_counts_to_1, assumes={assumes}).violation is None


def test_a_window_that_is_wrong_after_a_non_finite_one_is_not_called_clipped():
    violation = battery(halves_after_a_non_finite_window).violation
    assert violation.diagnosis == "wrong-scale", violation
    assert "0.5 times what it should" in violation.explanation
    assert "only after a window whose gradient is infinite or NaN" in violation.explanation


COARSE = [
    (name, dtype)
    for dtype in ("bfloat16", "float16")
    for name in SIZES
    # below the smallest number of float16
    if (name, dtype) != ("flush below 1e-30", "float16")
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype"), COARSE)
def test_it_is_found_in_coarse_dtypes(name, dtype):
    assert battery(SIZES[name][0], dtype=dtype).final


RIGHT_BELOW = {
    "keyed modulo 32": "the loop is right with accumulation_steps = 32, all else alike",
    "fourth epoch is scaled": "the loop is right with epochs = 3, all else alike",
}
"""What is said of a fault beside its smallest plan."""
OF_MANY_MICRO_BATCHES = (
    "counter in uint8",
    "every 100th micro-batch is left out",
    "stale after 50 steps",
    "windows in int8",
    "keyed modulo 32",
)
"""Found on the longest probe; each takes two seconds or more."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full if n in OF_MANY_MICRO_BATCHES else ()) for n in LONG],
)
def test_a_fault_of_long_plans_is_named_and_made_small(name):
    loop, diagnosis, micro_batches, steps, epochs = LONG[name]
    found = battery(loop)
    assert found.final
    plan = found.violation.case.plan
    assert found.violation.diagnosis == diagnosis, found.violation
    assert (len(plan.micro_batches), plan.accumulation_steps, plan.epochs) == (
        micro_batches,
        steps,
        epochs,
    ), plan
    assert check(loop, found.violation.case).violation.diagnosis == diagnosis
    assert name not in RIGHT_BELOW or RIGHT_BELOW[name] in found.violation.details


def _scale(factor):
    return trains(before=each_gradient(lambda g: g.mul_(factor)))


@pytest.mark.parametrize(
    ("dtype", "rounding", "fault"),
    [
        ("float64", 1e-14, 1e-12),
        ("float32", 2e-7, 3e-6),
        ("bfloat16", 2.0**-8, 2.0**-3),
        ("float16", 2.0**-11, 2.0**-6),
    ],
)
def test_a_weight_is_wrong_as_soon_as_it_is_off_by_more_than_rounding(dtype, rounding, fault):
    (case, *_) = first_cases(frozenset(), dtype, "cpu")
    assert check(_scale(1 + rounding), case, shrinking=True).violation is None
    assert check(_scale(1 + fault), case, shrinking=True).violation is not None


@pytest.mark.parametrize("leak", [1e-6, 1e-9, 1e-12])
def test_a_small_leak_into_the_next_window_is_found(leak):
    def leaks(run):
        for window in windows(run):
            backward_window(run, window)
            run.optimizer.step()
            for p in run.model.parameters():
                p.grad.mul_(leak)

    assert battery(leaks).violation is not None


# GradScaler and finite-gradients


def scaled_and_skips_often(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for i, window in enumerate(windows(run)):
        backward_window(run, window)
        if i % 2:
            for p in run.model.parameters():
                p.grad.fill_(torch.inf)
        scaler.scale(torch.zeros(()))  # a scaler that scales nothing refuses to step
        scaler.step(run.optimizer)
        scaler.update(2.0**16)
        run.optimizer.zero_grad()


def test_a_step_that_is_skipped_without_a_reason_of_the_scaler_is_found():
    assert battery(skips_steps).violation.diagnosis == "skipped-non-finite"
    assert battery(scaled_and_skips_often).violation.kind == "step-count"


logs_the_norm = before_step(
    lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), torch.inf)
)


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_an_infinite_element_may_make_others_nan_at_the_same_step(dtype):
    """The Trainer of transformers 5.23.0 logs the norm in this way where nothing is to be clipped."""
    assert battery(logs_the_norm, dtype=dtype).violation is None


def _filled(where, value):
    return before_step(
        lambda run: [p.grad.masked_fill_(where(p.grad), value) for p in run.model.parameters()]
    )


@pytest.mark.parametrize(
    ("where", "value"),
    [(torch.isposinf, -torch.inf), (torch.isnan, torch.inf)],
    ids=["other sign", "in place of NaN"],
)
@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_an_infinity_that_is_not_the_right_one_is_found(where, value, dtype):
    violation = battery(_filled(where, value), dtype=dtype).violation
    assert (violation.kind, violation.diagnosis) == ("gradient", "not-linear")
    assert f"comes out as {value}" in violation.explanation


@pytest.mark.full
@pytest.mark.usefixtures("only_linear")
def test_a_loop_may_assume_finite_gradients():
    assert battery(skips_steps, assumes={"finite-gradients"}).violation is None
    # the decorator marks what it is given, which other tests use
    loop = training_loop(assumes=("finite-gradients", "dense-gradients"))(
        lambda run: skips_steps(run)
    )
    assert verify(loop, examples=8).holds


# What is left out, and what is searched for


def test_a_probe_that_would_exceed_the_time_limit_is_left_out_and_reported():
    found = battery(BUILT_IN["zero_"], time_limit_s=1e-3)
    assert found.violation is None or found.violation.diagnosis == "timed-out"
    if found.violation is None:
        assert "micro-batches was left out: it would take this loop" in found.skipped[0]


def _on_probe(run):
    return "readout" in type(run.model[0]).__name__.lower()


@pytest.mark.full
@pytest.mark.usefixtures("only_linear")
def test_the_search_for_a_fault_of_the_probes_ends(monkeypatch):
    """One loop is wrong on the probes alone, the other is wrong in another way on drawn cases."""

    def wrong_on_probes(run):
        if _on_probe(run):
            run.model[0].weight.grad.mul_(2)

    def wrong_in_two_ways(run):
        wrong_on_probes(run)
        for p in run.model.parameters():
            if p.grad is not None and not _on_probe(run):
                p.grad.add_(1)

    monkeypatch.setattr(module, "MOST_HUNTED", 6)
    only, both = (verify(before_step(change)) for change in (wrong_on_probes, wrong_in_two_ways))
    assert (only.cases, only.violation.found_after, only.violation.diagnosis) == (
        6,
        None,
        "wrong-scale",
    )
    # a small case that shows another fault than the probe stands for it, and has a name of its own
    assert both.violation.case.spec.input.kind != "index"
    assert both.violation.diagnosis == "added-term"


@pytest.mark.full
@pytest.mark.usefixtures("only_linear")
def test_a_fault_of_elements_is_no_fault_of_the_values_of_a_probe(monkeypatch):
    """The smallest element of each gradient is set to 0.

    Of NaN and numbers, argmin takes the NaN.
    """

    def without_the_smallest(gradient):
        kept = gradient.clone()
        kept.view(-1)[gradient.abs().argmin()] = 0
        return kept

    def each(change):
        return before_step(
            lambda run: [p.grad.copy_(change(p.grad)) for p in run.model.parameters()]
        )

    monkeypatch.setattr(module, "MOST_BESIDE", 3)
    elements, values = (verify(each(change)) for change in (without_the_smallest, torch.nan_to_num))
    assert battery(each(without_the_smallest)).violation.diagnosis == "skipped-non-finite"
    assert elements.violation.diagnosis == "partial-gradient"
    assert elements.violation.found_after == 1
    assert (values.violation.diagnosis, values.cases, values.violation.found_after) == (
        "skipped-non-finite",
        3,
        None,
    )


@pytest.mark.full
def test_no_case_is_drawn_for_a_fault_that_no_drawn_case_shows():
    result = verify(LONG["keyed modulo 32"][0])
    assert (result.cases, result.violation.found_after, result.holds) == (0, None, False)


def _linear(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 1)


PROBLEM = Problem(
    _linear,
    lambda items, seed: {"x": torch.ones(items, 2) * torch.arange(items)[:, None]},
    lambda model, batch: model(batch["x"]).mean(),
)


@pytest.mark.full
@pytest.mark.usefixtures("without_second_opinion")
def test_the_battery_runs_beside_a_users_problem():
    result = verify(LONG["keyed modulo 32"][0], problem=PROBLEM, examples=3)
    assert result.violation.case.plan.accumulation_steps == 33
    assert result.violation.case.spec is not None


@pytest.mark.usefixtures("without_second_opinion")
def test_a_loop_that_is_made_for_its_problem_is_not_blamed_for_the_probes():
    def only_linear(run):
        assert isinstance(run.model, torch.nn.Linear)
        BUILT_IN["zero_"](run)

    result = verify(only_linear, problem=PROBLEM, examples=3)
    assert result.holds
    assert list(result.skipped) == [
        "the weight probes: the loop fails on them (raised), so its own problem alone was tried"
    ]


# of micro-batches: every probe has 0, those of long plans alone have 100
@pytest.mark.parametrize("least", [0, 100])
def test_a_loop_that_is_made_for_its_optimizer_is_not_blamed_for_one_that_rests(least):
    def only_adamw(run):
        assert len(run.loader) < least or isinstance(run.optimizer, torch.optim.AdamW)
        BUILT_IN["zero_"](run)

    found = battery(only_adamw, optimizer="adamw")
    assert found.violation is None
    assert "lacks what the loop uses of adamw" in found.skipped[0]
    for optimizer in ("sgd", None):
        assert battery(only_adamw, optimizer=optimizer).violation.diagnosis == "raised"


def test_a_limit_that_only_an_infinite_norm_reaches_is_clipping():
    """`clip_grad_norm_` multiplies by the limit over the norm: the finite elements become 0, the
    infinite one NaN.
    """
    violation = battery(clips_to_a_limit_that_no_finite_gradient_reaches).violation
    assert violation.diagnosis == "clipped"
    assert "clipping by norm with a finite limit sets them to 0" in violation.explanation


@pytest.mark.parametrize(
    "size", [33, *(pytest.param(n, marks=pytest.mark.full) for n in (6, 7, 16))]
)
def test_a_fault_of_one_size_of_a_micro_batch_is_found(size):
    """Planted fault: one item of a micro-batch of this size is not counted.

    No strategy draws such sizes.
    """

    def loses_an_item(run, window):
        total = window_count(run, window)
        for batch in window:
            wrong = len(batch[next(iter(batch))]) == size
            (part_of_window(run, batch, total) * ((size - 1) / size if wrong else 1)).backward()

    violation = battery(trains(backward=loses_an_item)).violation
    assert size in violation.case.plan.micro_batches


def test_what_overflows_in_a_cast_is_low_precision():
    """Planted fault: elements above 60,000 go through float16, whose largest number is 65,504."""

    def cast(run):
        for p in run.model.parameters():
            p.grad = torch.where(
                p.grad.abs() > 60_000, p.grad.to(torch.float16).to(p.dtype), p.grad
            )

    violation = battery(before_step(cast)).violation
    assert (violation.kind, violation.diagnosis) == ("non-finite", "low-precision")
