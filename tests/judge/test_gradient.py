"""What is said of a wrong gradient when its weights cannot be read, or are right."""

from __future__ import annotations

import math
import re
from itertools import islice

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec, check
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.core.comparison import Comparison
from gradcheck_suite.core.results import Weight
from gradcheck_suite.judge.gradient import explain_gradient
from gradcheck_suite.judge.reruns import Evidence, LoopRunner, run_recorded
from gradcheck_suite.loops.reset_modes import MODES, backward_window, window_count, windows
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import generated_instance, user_instance
from tests.judge.explaining import (
    DATA,
    MASKED,
    PART_AND_WHOLE,
    PLAN,
    as_it_is,
    assert_rows,
    by_weights,
    double,
    every,
    explained,
    fail,
    forget,
    mix,
    of_case,
    of_weight,
    squares,
    step,
    then,
    told,
    triple,
    weight_of,
    where_not_finite,
)

SPEC = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", features=2, bias=True),),
    Loss("mse", reduction="mean"),
)
CASE = Case(SPEC, Plan((3, 1, 2), 2), seed=1)
LINEAR = Case(SPEC, Plan((1, 2), 2))
PROBE = probe_case(Plan((1, 2, 3), 3), "mean")
CLASSES = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", bias=True, features=3),),
    Loss("nll", reduction="mean", class_weights=False, ignore_index=True),
)
WHOLE = Plan((1, 2, 3, 2), 4)
"""One window."""
THREE = Plan((1, 2, 1, 2, 1, 1), 2, 3)
"""Three windows an epoch; the ninth step is the last of the third."""
TWO_EPOCHS = Plan(PLAN.micro_batches, 2, 2)
INFINITE = [[math.inf, 1.0], *DATA["y"][1:].tolist()]
"""The first item's first target is infinite: so is the gradient of its row of the weight, and of its bias."""
LAST = [*DATA["y"][:-1].tolist(), [math.inf, 1.0]]


def _times(factor):
    return every(lambda g, p: g.mul_(factor))


def _only_at(place, change, steps=9):
    changes = [as_it_is] * steps
    changes[place] = change
    return then(*changes)


_double_matrices = every(lambda g, p: g.mul_(2) if p.ndim == 2 else g)


def _weigh_the_first_twice(run):
    if "0.weight" in dict(run.model.named_parameters()) and run.model[0].weight.ndim == 1:
        run.model[0].weight.grad[0] *= 2


# Losses of NaN


def _resets_at_nan(change):
    return where_not_finite(lambda run: run.optimizer.zero_grad(), change)


def _of_case(change):
    """Return a change of the case's gradients, and not of the probe's."""
    return lambda run: (
        [change(p.grad) for p in run.model.parameters()]
        if len(list(run.model.parameters())) > 1
        else 0
    )


def _where_nan(change):
    """Return a loop that changes the gradients of a window of which a loss is not finite."""

    def loop(run):
        for window in windows(run):
            finite = all(run.loss(run.model, batch).isfinite() for batch in window)
            backward_window(run, window)
            if not finite:
                change(run)
            step(run)

    return loop


def _loses_the_bias(run):
    *_, last = run.model.parameters()
    last.grad.mul_(0.5)


# Elements


def _relu_of_each(run):
    for window in windows(run):
        total = window_count(run, window)
        kept = [torch.zeros_like(p) for p in run.model.parameters()]
        for batch in window:
            run.model.zero_grad()
            (run.loss(run.model, batch) * run.count(batch) / total).backward()
            for k, p in zip(kept, run.model.parameters(), strict=True):
                k.add_(p.grad.relu())
        for k, p in zip(kept, run.model.parameters(), strict=True):
            p.grad = k
        step(run)


def _of_rows(*rows):
    """Return the problem of ones as parameters and such items: what is positive is twice the sum in
    each element.
    """

    def ones(seed):
        model = torch.nn.Linear(len(rows[0]), 1, bias=False)
        torch.nn.init.ones_(model.weight)
        return model

    return Problem(
        ones,
        lambda items, seed: torch.tensor(([*rows] * items)[:items], dtype=torch.float64),
        lambda model, x: model(x).mean(),
    )


# Weights


def _with_a_loss_of_its_own(run):
    for window in windows(run):
        total = sum(batch["w"].sum() for batch in window if "w" in batch)
        for batch in window:
            (squares(run.model, batch) / total).backward()
        double(run)
        step(run)


def _items(batch):
    return len(next(iter(batch.values())))


def _rounded(batch, window, dtype):
    counts = torch.tensor([float(b["w"].sum()) if "w" in b else float(_items(b)) for b in window])
    return (float(counts[[b is batch for b in window]]) / counts.sum()).to(dtype)


# Sizes


def _if_weight(change):
    """Return a change of the case alone, given the run and the weight."""
    return lambda run: change(run, weight) if (weight := weight_of(run)) is not None else None


_clip = _if_weight(lambda run, weight: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5))
_clip_by_value = _if_weight(
    lambda run, weight: torch.nn.utils.clip_grad_value_(run.model.parameters(), 20.0)
)
_above_a_threshold = _if_weight(
    lambda run, weight: weight.grad.mul_(2 if weight.grad.abs().max() > 1e-21 else 1)
)
_not_a_number = of_weight(lambda g: g[0, 0].fill_(math.nan))


def _raise_on_small_weight(run):
    double(run)
    if (weight := weight_of(run)) is not None and weight.grad.abs().max() < 1e-3:
        raise ValueError


def _by_size(size, *, probe):
    """Return a linear fault, and a factor that grows with the gradient, on the probe or on the
    case.
    """

    def change(run):
        for p in run.model.parameters():
            if (weight_of(run) is None) == probe:
                p.grad.mul_(1 + p.grad.abs() * size)
        mix(run)

    return then(change)


# Steps


def _kept_by_scaling(run):
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for p in run.model.parameters():
            p.grad.mul_(0)


def _in_float64(change):
    """Return what doubles the weight's gradient, but in float64 does something else."""
    return lambda run: (
        (change if run.dtype == torch.float64 else double)(run)
        if weight_of(run) is not None
        else None
    )


def _forget_one_parameter_behind_masked_targets(run):
    for window in windows(run):
        masked = any(run.count(batch) == 0 for batch in window)
        total = sum(run.count(batch) for batch in window)
        *others, last = run.model.parameters()
        run.optimizer.zero_grad()
        for j, batch in enumerate(window):
            if run.count(batch):
                (run.loss(run.model, batch) * run.count(batch) / total).backward()
            if masked and j == 0 and others:
                last.grad.zero_()
        run.optimizer.step()


# Where the probe shows nothing


def _on_probe(change):
    """Return the linear fault on the case, and on the probe another."""
    return then(lambda run: mix(run) if weight_of(run) is not None else change(run))


def _doubles_where_large(run):
    if all(p.grad.abs().max() < 1e-3 for p in run.model.parameters()):
        raise ValueError
    _times(2)(run)


def _lifts(amount):
    """Return the linear fault, and on the probe one item that weighs more."""
    return _on_probe(lambda run: next(run.model.parameters()).grad[2].mul_(1 + amount))


def _one_step_on_the_probe(run):
    for window in islice(windows(run), 1 if weight_of(run) is None else None):
        backward_window(run, window)
        mix(run)
        step(run)


def _wrong_in_some_runs(every):
    """Return a loop whose first gradient element is 0 in its first run, and in every so many runs
    from there.
    """
    runs = [0]

    def loop(run):
        def spoil(run):
            for p in run.model.parameters() if runs[0] % every == 0 else ():
                p.grad.flatten()[0] = 0

        then(spoil)(run)
        runs[0] += 1

    return loop


# On the probe of a large gradient


def _largest(run):
    return max(float(p.grad.max()) for p in run.model.parameters())


def _skips_ordinary(run):
    """The second step, whose gradient is doubled where it is 64, is not taken with slopes of 1."""
    for place, window in enumerate(windows(run)):
        backward_window(run, window)
        large = _largest(run) > 8
        _times(2 if large else 1)(run)
        if large or not place:
            run.optimizer.step()
        run.optimizer.zero_grad()


def _stops_where_large(run):
    """The second gradient, 64, is halved; where the first is 4 in place of 1, no step is taken."""
    for place, window in enumerate(windows(run)):
        backward_window(run, window)
        if not place and _largest(run) > 2:
            return
        _times(0.5 if _largest(run) > 8 else 1.0)(run)
        step(run)


def _halves_after_large(run):
    large = False
    for window in windows(run):
        backward_window(run, window)
        _times(0.5 if large else 1.0)(run)
        large = _largest(run) > 8
        step(run)


def _times_k_in_whole_windows(run):
    for window in windows(run):
        backward_window(run, window)
        _times(run.accumulation_steps)(run)
        if len(window) == run.accumulation_steps:
            run.optimizer.step()
        run.optimizer.zero_grad()


ALLOWED = 2.0**-30


NAMED = {
    "not-linear": {
        "squares of matrices": told(
            then(every(lambda g, p: g.mul_(g) if p.ndim == 2 else g)), CASE
        ),
        **{
            f"{what} in window {window}": told(then(change), window=window)
            for what, change in (
                ("raises on small gradients", _raise_on_small_weight),
                ("NaN", _not_a_number),
            )
            for window in (0, 1)
        },
        # of a sum of items that count 1e-20 each: gradients of 1e-18 are doubled, and those of
        # 1e-24 are not
        "above a threshold": told(then(_above_a_threshold), sums=True, w=[1e-20] * 8),
        # of float32, whose least number is 1e-45: the first column's gradient is 1e-39 of what the
        # others' is
        "small losses flush to zero": told(
            then(mix), plan=Plan((1, 2), 2), x=DATA["x"] * np.array([1e-39, 1, 1]), dtype="float32"
        ),
        "mixed in float16": told(then(mix), dtype="float16"),
        "mixed after a step": told(then(as_it_is, mix), window=1, optimizer="sgd"),
        **{
            f"in float64 {what}": told(then(_in_float64(change)), dtype="float32")
            for what, change in (("right", as_it_is), ("raises", fail), ("mixed", mix))
        },
        "raises on the probe": told(_on_probe(fail)),
        "infinite on the probe": told(_on_probe(every(lambda g, p: g.div_(0)))),
        "doubled on the probe, raises on small losses": told(_on_probe(_doubles_where_large)),
        "right on the probe": told(_on_probe(as_it_is)),
        "one item of the probe by 1e-14": told(_lifts(1e-14)),
        # weights of the probe are 1/3: 1e-14 of the gradient is rounding, and 1e-8 is not
        **{
            f"by size {size} of the {'probe' if probe else 'case'}": told(
                _by_size(size, probe=probe)
            )
            for size in (1e-14, 1e-8)
            for probe in (True, False)
        },
        "one step on the probe": told(_one_step_on_the_probe, window=1),
        "skips ordinary gradients": told(
            _skips_ordinary, probe_case(Plan((1, 1), 1), slopes="1.0 64.0")
        ),
        "stops before the step": told(
            _stops_where_large, probe_case(Plan((1, 1), 1), slopes="1.0 64.0")
        ),
    },
    "added-term": {
        "decay": told(then(every(lambda g, p: g.add_(p, alpha=0.25))), CASE),
    },
    "normalised": {
        "by norm": told(then(every(lambda g, p: g.div_(g.norm()))), CASE),
        "signs": told(then(every(lambda g, p: g.sign_())), CASE),
    },
    "clipped": {
        **{
            f"by norm in window {window} of the regression": told(then(_clip), window=window)
            for window in (0, 1)
        },
        "by value in the regression": told(then(_clip_by_value)),
        "by norm after a step": told(then(as_it_is, _clip), window=1, optimizer="sgd"),
    },
    "skipped-by-size": {
        "small elements": told(
            then(every(lambda g, p: g.masked_fill_(g.abs() < g.abs().max().clamp(min=1e-3), 0))),
            CASE,
        ),
    },
    "skipped-non-finite": {
        "resets at NaN": told(_resets_at_nan(as_it_is), MASKED),
        "and is off by 1e-16": told(_resets_at_nan(_of_case(lambda g: g.mul_(1 + 1e-16))), MASKED),
    },
    "none-pattern/skipped-non-finite": {
        "None where a loss is NaN": told(
            _where_nan(lambda run: run.optimizer.zero_grad(set_to_none=True)), MASKED
        ),
    },
    "wrong-scale": {
        "of matrices": told(then(_double_matrices), CASE),
        **{
            f"in {d}": told(then(_double_matrices), CASE.replace(dtype=d))
            for d in ("float32", "bfloat16")
        },
        # what is skipped would be missing in the weight as well
        "of the bias where a loss is NaN": told(_where_nan(_loses_the_bias), MASKED),
        # every parameter doubled is seen on the probe; the weight alone, on the case
        **{
            f"{what} at step {at}": told(
                _only_at(at, change), plan=THREE, epoch=at // 3, window=at % 3
            )
            for what, change in (
                ("1.7 times", _times(1.7)),
                ("1.7 times the weight", of_weight(lambda g: g.mul_(1.7))),
            )
            for at in (0, 4, 8)
        },
        "1.7 times": told(then(_times(1.7)), plan=WHOLE),
        "a loss of its own": told(_with_a_loss_of_its_own),
        "of the weight in float16": told(then(double), dtype="float16"),
        **{
            f"of the weight at moved parameters, window {window} in {dtype}": told(
                _only_at(window, double, 2), window=window, dtype=dtype, optimizer="sgd"
            )
            for window in (0, 1)
            for dtype in ("float64", "float32")
        },
        **{
            f"of one step in float32, window {window}": told(
                _only_at(2 + window, triple, 4),
                plan=TWO_EPOCHS,
                window=window,
                epoch=1,
                dtype="float32",
            )
            for window in (0, 1)
        },
        # whatever scales the gradient leaves a gradient of 0 as it is
        "of what nothing reaches": told(
            then(of_case(lambda g, p: g.mul_(0.99))), x=0.0 * DATA["x"]
        ),
        "of the weight in a sum": told(then(double), sums=True, w=(2, 1, 1, 1, 1, 1, 1, 1)),
        # K is 2 here, and 3 on the probe that tells it from a constant
        "half in a sum": told(then(_times(0.5)), sums=True),
        **{
            f"another factor at each step, {at}": told(
                then(*map(_times, (3, 5, 7, 11, 13, 17))),
                plan=Plan(THREE.micro_batches, 2, 2),
                epoch=at // 3,
                window=at % 3,
            )
            for at in range(6)
        },
        # of two micro-batches of an item, 2 is the count, too
        "K in whole windows, the short one dropped": told(
            _times_k_in_whole_windows, probe_case(Plan((1, 1), 2))
        ),
    },
    "unequal-items": {
        "the first twice": told(then(_weigh_the_first_twice), probe_case(Plan((2, 1), 2))),
        "one item of the probe by 1e-8": told(_lifts(1e-8)),
    },
    "wrong-scale or partial-gradient": {
        "a relu of two elements": told(
            _relu_of_each, Case("own", Plan((1, 1), 2)), problem=_of_rows([4.0, -2.0], [-2.0, 4.0])
        ),
    },
    "partial-gradient": {
        "a relu of three elements": told(
            _relu_of_each,
            Case("own", Plan((1, 1), 2)),
            problem=_of_rows([4.0, -2.0, 8.0], [-2.0, 4.0, -4.0]),
        ),
        "one by some millionths": told(then(of_weight(lambda g: g[1, 2].mul_(1 + 8e-6)))),
    },
    "no-gradient": {
        "of the weight": told(then(forget)),
        "of the case": told(then(of_case(lambda g, p: g.zero_()))),
        "of every step": told(then(lambda run: run.optimizer.zero_grad(set_to_none=False))),
    },
    "low-precision": {
        # thirds, which no binary format has
        "of gradients": told(then(every(lambda g, p: g.copy_(g.bfloat16()))), plan=Plan((1, 2), 2)),
        "of weights": told(
            by_weights(lambda w, b: _rounded(b, w, torch.bfloat16)), plan=Plan((1, 2), 2)
        ),
        "of an accumulator": told(
            then(every(lambda g, p: g.copy_(g.float()))), LINEAR.replace(plan=Plan((1, 2, 3), 3))
        ),
    },
    "poisoned-by-earlier-window": {
        f"window {window} of epoch {epoch}": told(
            _kept_by_scaling, plan=TWO_EPOCHS, epoch=epoch, window=window, y=y
        )
        for epoch, window, y in ((0, 1, INFINITE), (1, 0, LAST), (1, 1, INFINITE))
    },
    # a micro-batch without valid targets has a gradient of 0, and may be there
    "no-gradient or dropped-micro-batch": {
        f"behind masked targets {changes}": told(
            _forget_one_parameter_behind_masked_targets,
            Case(CLASSES, Plan((2, 2, 2, 3), 2, masked=(3,)), seed=3, **changes),
        )
        for changes in ({}, {"dtype": "bfloat16"}, {"optimizer": "adamw"})
    },
    "projected-gradient": {
        "means of rows": told(
            then(of_case(lambda g, p: g.sub_(g.mean(-1, keepdim=True)) if g.ndim > 1 else g))
        ),
        "along the parameter": told(
            then(of_case(lambda g, p: g.sub_(p * (g * p).sum() / (p * p).sum())))
        ),
    },
    "unrecognised-weights": {
        "after a large gradient": told(
            _halves_after_large, probe_case(Plan((1, 1), 1), slopes="64.0 1.0")
        ),
    },
    "not-repeatable": {
        f"in every {often}th run of the {what}": told(_wrong_in_some_runs(often), case)
        for what, case in (("case", LINEAR), ("probe", PROBE))
        for often in (4, 9)
    },
}
"""Name -> what is planted -> the row that plants it and returns what is said."""


@PART_AND_WHOLE
def test_a_wrong_gradient_is_named(part, golden):
    assert_rows(golden, "judge_gradient", NAMED, part=part)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        *(
            (told(_resets_at_nan(_of_case(change)), MASKED), "skipped-non-finite")
            for change in (lambda g: g.mul_(1.001), lambda g: g.sub_(0.001), lambda g: g.neg_())
        ),
        # what was not finite where the parameters were says nothing of where they are
        (
            told(_kept_by_scaling, window=1, y=INFINITE, optimizer="sgd"),
            "poisoned-by-earlier-window",
        ),
        (told(_wrong_in_some_runs(1), LINEAR), "not-repeatable"),
        (told(_wrong_in_some_runs(1), PROBE), "not-repeatable"),
    ],
)
def test_another_fault_has_not_the_name(row, name):
    assert row()[0] != name


def test_the_weights_are_shown_beside_the_right_ones():
    def no_reset(run):
        for window in windows(run):
            backward_window(run, window)
            run.optimizer.step()

    violation = check(no_reset, CASE).violation
    assert (violation.epoch, violation.window) == (0, 1)
    # right: 0, 0, 1/2; the first window's 1/4 is still there
    assert violation.weights == (
        Weight(micro_batches="0", count=3, expected=0, observed=0.25),
        Weight(micro_batches="1", count=1, expected=0, observed=0.25),
        Weight(micro_batches="2", count=2, expected=0.5, observed=0.5),
    )


def test_a_window_is_blamed_for_nan_only_where_parameters_stay():
    """The second window's root has an infinite derivative at the first parameters, 0, and none
    elsewhere.
    """

    def root(model, x):
        found = model(x)[:, 0]
        return torch.where(x[:, 0] > 1, found.sqrt(), found).mean()

    def zeros(seed):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model

    problem = Problem(zeros, lambda items, seed: torch.arange(1.0, items + 1)[:, None], root)
    reference = Reference(user_instance(Case("own", Plan((1, 1), 1, 2)), problem))
    for parameters in (None, {"weight": torch.ones(1, 1)}):
        window = reference.window(0, parameters)
        comparison = Comparison(
            reference.layout, np.ones(1), np.full(1, np.nan), np.full(1, ALLOWED)
        )
        found = explain_gradient(
            Evidence(comparison, window, 1, LoopRunner(MODES["set_to_none"], max_runs=0))
        )
        assert (found.name == "poisoned-by-earlier-window") is (parameters is None)


@pytest.mark.parametrize("factor", [2.0, 1 + 1.1e-6])
def test_the_worst_element_is_shown_in_six_digits_unless_they_agree(factor):
    """It is 1000 sevenths: digits that rounding decides are not shown, unless the two differ in
    them alone.
    """
    _, _, details = explained(then(of_weight(lambda g: g.mul_(factor))), w=(3, 3, 1, 1, 1, 1, 1, 1))
    expected, observed = re.search("expected (.+), observed (.+), off by", details[0]).groups()
    assert float(observed) == pytest.approx(-1000 / 7 * factor, rel=1e-5 if factor == 2 else 1e-15)
    assert (expected == "-142.857") == (factor == 2)


def test_nothing_is_recorded_of_ranks_where_no_run_is_left():
    instance = generated_instance(probe_case(Plan((1, 1), 1, ranks=(1, 1))))
    _, outcome = run_recorded(LoopRunner(MODES["set_to_none"], max_runs=0), instance)
    assert outcome is None


def _keeps_the_last_batch(run):
    last = []
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in [*last, *window]:
            loss = run.loss(run.model, batch)
            (loss * run.count(batch) / total).backward()
        last = window[-1:]
        run.optimizer.step()


def _keeps_the_gradient(run):
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()


@pytest.mark.parametrize("loop", [_keeps_the_last_batch, _keeps_the_gradient])
def test_a_micro_batch_that_is_sent_again_is_told_from_a_gradient_that_is_left(loop):
    found = check(loop, Case(SPEC, Plan((1, 2, 3, 2), 2), seed=1)).violation
    assert found is not None
    assert found.diagnosis == "stale-window", found.explanation
    again = loop is _keeps_the_last_batch
    assert ("the losses of micro-batches 1 are sent backward" in found.explanation) == again
    assert ("reset once after every step" in found.explanation) != again
