"""Faults that were once named after a rival, each beside a rival that keeps its own name."""

from __future__ import annotations

import copy
import dataclasses
from itertools import islice

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, check, verify
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.loops.reset_modes import backward_window, part_of_window, window_count, windows
from gradcheck_suite.run.instance import map_leaves, tensor_leaves
from gradcheck_suite.verification.search import slopes_case
from studies.zoo.bug import step_with, window_gradients, window_losses
from studies.zoo.bugs.resets import delayed_by_one
from tests.judge.explaining import (
    DATA,
    MASKED,
    PART_AND_WHOLE,
    as_it_is,
    assert_rows,
    by_weights,
    every,
    of_weight,
    step,
    then,
    told,
    weight_of,
    where_not_finite,
)
from tests.training import accumulating, trains

SPEC = ProblemSpec(
    Input("vector", size=2),
    (Layer("train_scale", factor=2.0), Layer("linear", features=2, bias=True)),
    Loss("mse", reduction="mean"),
)
CASE = Case(SPEC, Plan((1, 3, 2), 2, 2), seed=3)
PROBE = probe_case(Plan((1, 3, 2), 2))
MOVING = Case(SPEC, Plan((2, 3), 1, 2), seed=3, optimizer="sgd")
TWO_SUMS = Case(dataclasses.replace(SPEC, loss=Loss("mse", reduction="sum")), Plan((1, 1), 2))
SIGNS = [[100, -50.0], [1, 20], [-30, 2], [1, -90], [50, 8], [3, 9], [-80, 4], [7, 7]]

# Weights of micro-batches


def _by_part(change):
    """Return a loop that changes each micro-batch's part of the window's loss, given its place."""
    return trains(
        backward=lambda run, window: [
            change(part, place).backward() for place, part in enumerate(window_losses(run, window))
        ]
    )


def _in_float32(run):
    """Run in float32 alone: what tells places from other weights is the last run that is left."""
    if run.dtype == torch.float64:
        raise TypeError
    _by_part(lambda loss, place: loss / (1 + place))(run)


@accumulating
def _penalised(run, window):
    for loss in window_losses(run, window):
        gradients = torch.autograd.grad(loss, list(run.model.parameters()), create_graph=True)
        (loss + 0.01 * sum((g * g).sum() for g in gradients)).backward()


def _items(batch):
    return len(next(tensor_leaves(batch)))


def _over(of_window, times=1.0):
    """Return a loop that divides by another count, given the counts of a window's micro-batches and
    its items.
    """

    def loop(run):
        def weight(window, batch):
            divisor = of_window([float(run.count(b)) for b in window], sum(map(_items, window)))
            return times * run.count(batch) / divisor

        by_weights(weight)(run)

    return loop


def _vectors(run):
    for p in run.model.parameters():
        p.grad.mul_(0.1 if p.ndim < 2 else 1)


def _one_bias(seed):
    linear = torch.nn.Linear(3, 1, dtype=torch.float64)
    torch.nn.init.ones_(linear.weight)
    torch.nn.init.ones_(linear.bias)
    return linear


_two_tasks = trains(
    backward=lambda run, window: [
        backward_window(run, task) for task in (window[::2], window[1::2]) if task
    ]
)


_warm_up = trains(
    before=lambda run, step: every(lambda g, p: g.mul_(min(1.0, (step + 1) / 4)))(run)
)


def _three_items_twice(run):
    by_weights(lambda w, b: run.count(b) / window_count(run, w) * (2 if _items(b) == 3 else 1))(run)


def _spoils_the_probe(run):
    for p in run.model.parameters() if weight_of(run) is None else ():
        p.grad.fill_(torch.nan)


def _means_of_parts(shares, leak=0.0):
    """Return parts that cut through micro-batches, whose means have shares, beside some of another
    window's item.
    """

    def change(run):
        (p,) = run.model.parameters()
        items, own = p.grad.nonzero()[:, 0], shares(run.accumulation_steps)
        for part, share in zip(items.tensor_split(len(own)), own, strict=True):
            p.grad[part] *= share * len(items) / len(part)
        p.grad[items[0] - 1] = leak * p.grad[items[0]]

    return told(then(change), probe_case(Plan((2, 3, 2, 2, 3, 2), 3)))


def _dealt(order):
    """Return a loop that trains the micro-batches of each epoch in another order, given those of
    the loader.
    """

    def loop(run):
        for _ in range(run.epochs):
            batches = order(list(run.loader))
            for first in range(0, len(batches), run.accumulation_steps):
                backward_window(run, batches[first : first + run.accumulation_steps])
                step(run)

    return loop


def _split(parts, weigh):
    """Return a loop that sends parts of each micro-batch backward, given the counts of all parts of
    the window.
    """

    def loop(run):
        for window in windows(run):
            pieces = [
                map_leaves(lambda t, p=part: t[p], b)
                for b in window
                for part in parts(len(next(tensor_leaves(b))))
            ]
            pieces = [piece for piece in pieces if run.count(piece)]
            counts = [float(run.count(piece)) for piece in pieces]
            for place, piece in enumerate(pieces):
                (run.loss(run.model, piece) * weigh(place, counts)).backward()
            step(run)

    return loop


def _singly(items):
    return [slice(i, i + 1) for i in range(items)]


def _parts(parts, weigh):
    return told(_split(parts, weigh), plan=Plan((3, 2, 2), 2), w=(1, 3, 2, 0, 1, 1, 1, 1))


# Elements


def _rectify(run):
    handles = [p.register_hook(lambda g: g.clamp(min=0)) for p in run.model.parameters()]
    then(as_it_is)(run)
    for handle in handles:
        handle.remove()


def _by_elements(combine):
    """Return a loop that combines each element from those of the micro-batches, (micro-batches,
    ...).
    """

    def loop(run):
        for window in windows(run):
            parts = [window_gradients(run, [batch]) for batch in window]
            shares = [run.count(batch) / window_count(run, window) for batch in window]
            step_with(
                run,
                {
                    p: combine(torch.stack([g[p] * s for g, s in zip(parts, shares, strict=True)]))
                    for p in parts[0]
                },
            )

    return loop


def _as_means(run):
    """Weigh each loss by the share of its items, as is right for means."""
    for window in windows(run):
        for batch in window:
            (run.loss(run.model, batch) * run.count(batch) / window_count(run, window)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def _combined(combine, *sizes):
    return told(_by_elements(combine), y=SIGNS, plan=Plan(sizes, len(sizes)))


class _Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (
            torch.nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2)
        )
        self.out = torch.nn.Linear(3, 2, dtype=torch.float64)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.out(self.last(torch.tanh(self.first(x / 10))))


def _untied(run):
    for window in windows(run):
        copies = {
            name: p.detach().clone().requires_grad_() for name, p in run.model.named_parameters()
        }

        class Copy(torch.nn.Module):
            def forward(self, *args, copies=copies):
                return torch.func.functional_call(run.model, copies, args, tie_weights=False)

        for batch in window:
            (run.loss(Copy(), batch) * run.count(batch) / window_count(run, window)).backward()
        for name, p in run.model.named_parameters():
            p.grad = copies[name].grad
        step(run)


def _once_per_name(run):
    for _, p in run.model.named_parameters(remove_duplicate=False):
        p.grad.mul_(0.5 if p.ndim == 2 and p.shape[0] == 3 else 1)


def _adds(size):
    return then(
        lambda run: [
            p.grad.add_(torch.linspace(1, 2, p.numel(), dtype=p.dtype), alpha=size)
            for p in run.model.parameters()
        ]
    )


# What a loop computes its losses from is named where it is not what the run hands over, and only
# there.


_stays_in_eval = trains(after=lambda run, step: run.model.eval())


@accumulating
def _evaluates_at_its_last_micro_batch(run, window):
    for j, batch in enumerate(window):
        run.model.train(j + 1 < len(window))
        part_of_window(run, batch, window_count(run, window)).backward()


def _trains_a_copy(run):
    other = copy.deepcopy(run.model)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    for window in windows(run):
        other.zero_grad()
        for batch in window:
            (run.loss(other, batch) * run.count(batch) / window_count(run, window)).backward()
        for p, q in zip(run.model.parameters(), other.parameters(), strict=True):
            p.grad = q.grad.clone()
        step(run)


@accumulating
def _adversarial(run, window):
    """Move each input along the sign of its own gradient: two losses of each micro-batch are sent
    backward.
    """
    for batch in window:
        x = batch["x"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(run.loss(run.model, {**batch, "x": x}), x)
        moved = {**batch, "x": (x + 0.01 * gradient.sign()).detach()}
        (run.loss(run.model, moved) * run.count(batch) / window_count(run, window)).backward()


def _changes(change):
    return trains(
        backward=lambda run, window: backward_window(
            run, [{name: change(name, t) for name, t in batch.items()} for batch in window]
        )
    )


def _targets_shifted(run):
    for _ in range(run.epochs):
        pairs = iter(run.pairs)
        while window := list(islice(pairs, run.accumulation_steps)):
            total = sum(len(y) for _, y in window)
            for x, y in window:
                (run.criterion(run.model(x), y.roll(1, 0)) * len(y) / total).backward()
            step(run)


def _at_an_average(run):
    parameters = list(run.model.parameters())
    average = [p.detach().clone() for p in parameters]
    for window in windows(run):
        own = [p.detach().clone() for p in parameters]
        for p, value in zip(parameters, average, strict=True):
            p.data.copy_(value)
        backward_window(run, window)
        for p, value in zip(parameters, own, strict=True):
            p.data.copy_(value)
        step(run)
        for p, value in zip(parameters, average, strict=True):
            value.lerp_(p.detach(), 0.1)


def _cut(items):
    """Return a loop that leaves out an item of three, or adds one."""

    def cut(name, t):
        return (
            t[:items]
            if len(t) > items
            else torch.cat([t, t[-1:]])
            if items > 2 and len(t) == 3
            else t
        )

    return _changes(cut)


# the model computes the same in eval mode
_loses_the_last_in_eval = trains(
    begin=lambda run: run.model.eval(),
    backward=lambda run, window: [part.backward() for part in [*window_losses(run, window)][:-1]],
)


def _drops_windows_at_nan(run):
    for window in windows(run):
        if all(run.loss(run.model, batch).isfinite() for batch in window):
            backward_window(run, window)
            step(run)


OTHER_INPUTS = {
    "wrong-mode": {
        "in eval mode": _stays_in_eval,
        "1 of 2 in eval mode": _evaluates_at_its_last_micro_batch,
    },
    "other-parameters": {"of a copy": _trains_a_copy},
    "changed-batch": {
        "adversarial": _adversarial,
        "shifted targets": _changes(lambda name, t: t.roll(1, 0) if name == "target" else t),
    },
}
_means = every(lambda g, p: g.sub_(g.mean()))
THREE = Plan((2, 1, 3), 3)
ONE_ITEM = {"plan": Plan((1, 1), 1)}
NAMED = {
    "weighted-by-loss": {
        "squared": told(_by_part(lambda loss, place: loss + 0.1 * loss * loss), plan=THREE),
        "focal": told(
            _by_part(lambda loss, place: loss * torch.sigmoid(loss.detach() / 50)), plan=THREE
        ),
    },
    "weighted-by-place": {
        "harmonic": told(_by_part(lambda loss, place: loss / (1 + place)), plan=THREE),
        "harmonic in float32 alone": told(_in_float32, plan=THREE, dtype="float32"),
        "a sign": told(_by_part(lambda loss, place: -loss if place == 2 else loss), plan=THREE),
    },
    "wrong-scale": {
        "a third": told(_by_part(lambda loss, place: loss / 3), plan=THREE),
        "one target too few": told(
            _over(lambda counts, n: sum(counts) - len(counts)), plan=Plan((3, 4, 1), 2)
        ),
        "one target too many": told(
            _over(lambda counts, n: sum(counts) + len(counts)), plan=Plan((3, 4, 1), 2)
        ),
        "the largest": told(
            _over(lambda counts, n: max(counts) * len(counts)), plan=Plan((3, 4, 1), 2)
        ),
        "twice": told(_over(lambda counts, n: sum(counts), 2.0), plan=Plan((3, 4, 1), 2)),
        # a window of one item does not tell these apart, and a probe that counts items does not
        # show them
        **{
            f"an item that counts {count}, over {what}": told(
                _over(over), **ONE_ITEM, w=np.full(8, count)
            )
            for count, rows in (
                (
                    1.25,
                    {
                        "int": lambda counts, n: int(sum(counts)),
                        "round": lambda counts, n: round(sum(counts)),
                        "nothing": lambda counts, n: 1.0,
                        "items": lambda counts, n: n,
                    },
                ),
                (
                    2.0,
                    {
                        "one less": lambda counts, n: max(1, sum(counts) - len(counts)),
                        "nothing": lambda counts, n: 1.0,
                        "one more an item": lambda counts, n: sum(counts) + n,
                    },
                ),
            )
            for what, over in rows.items()
        },
        "a tenth": told(then(every(lambda g, p: g.mul_(0.1))), plan=Plan((1,), 1)),
        "warm-up": told(_warm_up, plan=Plan((2,), 1)),
        # a step that is not finite on the probe is no evidence on another
        "half, and NaN on the probe": told(
            then(every(lambda g, p: g.mul_(0.5)), _spoils_the_probe)
        ),
        "one over micro-batches": _combined(lambda parts: parts.mean(0), 1, 2),
        "once per name": told(then(_once_per_name), model=lambda seed: _Tied()),
    },
    # one micro-batch's weight is no factor of windows unless the run explains it
    "unrecognised-weights": {
        # the probe's only parameter is a vector, so that it shows this factor of every item
        "of vectors": told(then(_vectors), plan=Plan((1,), 1), model=_one_bias, y=DATA["y"][:, :1]),
        # the mean of two is their median, and their sum over the number of those that are not 0
        "a mean of two sums": told(_as_means, TWO_SUMS),
    },
    "mean-of-means": {
        "of two tasks": told(_two_tasks),
        "1 each": told(by_weights(lambda window, batch: 1.0)),
        "of parts": _parts(_singly, lambda place, counts: 1 / len(counts)),
        # items that count 1, 3 and 2 have their mean, and one of the next micro-batch counts 1
        "of parts of the first": _parts(
            _singly,
            lambda place, counts: (
                sum(counts[:3]) / 3 / sum(counts) if place < 3 else counts[place] / sum(counts)
            ),
        ),
        "of two devices": _means_of_parts(lambda k: (1 / 2, 1 / 2)),
        "of three devices": _means_of_parts(lambda k: (1 / 3,) * 3),
    },
    "unequal-items": {
        "parts": _parts(_singly, lambda place, counts: 0.5**place),
        "other shares": _means_of_parts(lambda k: (1 / 3, 2 / 3)),
        # the parts of one plan are no devices where another plan has more of them
        "more parts in another plan": _means_of_parts(lambda k: (1 / (k - 1),) * (k - 1)),
        "a leak": _means_of_parts(lambda k: (1 / 2, 1 / 2), 0.1),
    },
    "repeated-micro-batch": {
        "three items": told(_three_items_twice, plan=Plan((1, 3), 2)),
        "the second": told(
            _by_part(lambda loss, place: loss * (2 if place == 1 else 1)), plan=Plan((1, 3), 2)
        ),
    },
    "other-window": {
        **{
            f"{what}, {plan!r}": told(_dealt(order), plan=plan)
            for what, order in (
                ("odd ones first", lambda batches: batches[1::2] + batches[::2]),
                ("sorted", lambda batches: sorted(batches, key=_items)),
                ("backwards", lambda batches: batches[::-1]),
            )
            for plan in (Plan((3, 1), 1, 2), Plan((3, 1, 2, 2), 2))
        },
        # five items of one micro-batch weigh the same: their mean is all of them
        **{
            f"one late, {n} epochs": told(delayed_by_one, plan=Plan((5,), 2, epochs=n))
            for n in (1, 2)
        },
    },
    "no-gradient": {
        f"{n} epochs": told(then(every(lambda g, p: g.zero_())), plan=Plan((5,), 2, epochs=n))
        for n in (1, 2)
    },
    "projected-gradient": {
        **{
            f"the mean, {n} epochs": told(then(_means), plan=Plan((5,), 2, epochs=n))
            for n in (1, 2)
        },
        "means of columns": told(
            then(of_weight(lambda g: g.copy_(g.mean(0, keepdim=True).expand_as(g)))), y=SIGNS
        ),
        "without means of columns": told(
            then(of_weight(lambda g: g.sub_(g.mean(0, keepdim=True)))), y=SIGNS
        ),
    },
    "low-precision": {
        # what float16 loses of small gradients makes the loop no linear one
        "float16": told(
            then(every(lambda g, p: g.copy_(g.half()))), TWO_SUMS.replace(plan=Plan((1,), 1))
        ),
        "quantised": told(
            then(
                of_weight(
                    lambda g: g.copy_((g * 127 / g.abs().max()).round() * g.abs().max() / 127)
                )
            ),
            y=SIGNS,
        ),
    },
    "partial-gradient": {
        "a column": told(then(of_weight(lambda g: g[:, 1].zero_())), y=SIGNS),
        "abs": told(then(of_weight(lambda g: g.abs_())), y=SIGNS),
        "positive elements": told(_rectify, y=SIGNS),
        "a use of a tied weight": told(_untied, model=lambda seed: _Tied()),
    },
    "not-summed": {
        "median": _combined(lambda parts: parts.median(0).values * 3, 1, 2, 2),
        "smallest": _combined(lambda parts: parts.median(0).values * 2, 1, 2),
        "largest": _combined(lambda parts: parts.amax(0), 1, 2, 2),
        "root of squares": _combined(lambda parts: parts.norm(dim=0), 1, 2),
        "where signs agree": _combined(
            lambda parts: parts.sum(0) * (parts.sign().sum(0).abs() == len(parts)), 4, 4
        ),
    },
    "first-only": {"of elements": _combined(lambda parts: parts[0], 1, 2)},
    "added-term": {
        "a penalty on the gradient": told(_penalised),
        "a constant": told(then(lambda run: [p.grad.add_(0.01) for p in run.model.parameters()])),
        **{
            f"{size} beside tiny gradients": told(
                _adds(size), slopes_case(frozenset(), "float64", "cpu")
            )
            for size in (1e-40, 1e-19)
        },
    },
    **{
        name: {
            f"{title} in {dtype}": told(loop, CASE.replace(dtype=dtype))
            for title, loop in rows.items()
            for dtype in ("float64", "float32")
        }
        for name, rows in OTHER_INPUTS.items()
    },
}
# its elements are about 1e-12, and so is what they are off by: a tiny gradient is not right at any
# parameters
NAMED["other-parameters"] |= {
    "tiny": told(_trains_a_copy, plan=Plan((2,), 1), sums=True, w=np.full(8, 2.0**-50)),
    # it is right where parameters do not move, and is no earlier step's either
    "of an average": told(_at_an_average, MOVING),
}
NAMED["changed-batch"] |= {
    "a part": _parts(
        lambda n: [slice(0, max(1, n - 1))], lambda place, counts: counts[place] / sum(counts)
    ),
    **{
        f"{items} items for 3, {what}": told(_cut(items), case)
        for what, case in (("case", CASE), ("probe", PROBE))
        for items in (2, 4)
    },
    # the loss is not called with the model then, but with its output
    "targets in the criterion": told(_targets_shifted, Case(SPEC, Plan((2, 3), 2, 2), seed=3)),
}
NAMED["dropped-micro-batch"] = {
    "in eval mode, which changes nothing": told(
        _loses_the_last_in_eval,
        Case(dataclasses.replace(SPEC, layers=SPEC.layers[1:]), Plan((1, 3, 2), 3), seed=3),
    ),
}
NAMED["skipped-non-finite"] = {
    "resets": told(where_not_finite(lambda run: run.optimizer.zero_grad()), MASKED),
    "ends the window": told(where_not_finite(lambda run: "end"), MASKED),
}
NAMED["step-count/skipped-non-finite"] = {"drops windows": told(_drops_windows_at_nan, MASKED)}


@PART_AND_WHOLE
def test_each_rival_has_its_name(part, golden):
    assert_rows(golden, "judge_rivals", NAMED, part=part)


def test_what_is_right_there_holds():
    """A loss of NaN alone is skipped; an average is trained where parameters do not move."""
    assert check(where_not_finite(lambda run: None), MASKED).holds
    assert check(_at_an_average, MOVING.replace(optimizer=None)).holds


def test_a_wrong_weight_that_is_the_same_with_a_small_loss_is_not_blamed_on_the_loss():
    """The window's first micro-batch weighs 1.5 times what it should in every run.

    The others have another weight in the third run alone.
    """
    runs = []

    def changes(run):
        runs.append(run)
        factors = iter([1.5, 0.7, 1.3, 0.9, 1.1, 0.8, 0.6] * 9)
        _by_part(
            lambda loss, place: loss * (next(factors) + 0.25 * (len(runs) == 3 and place > 0))
        )(run)

    found = check(changes, probe_case(Plan((2, 1, 3), 3))).violation
    assert len(runs) > 2
    assert found.diagnosis in ("unrecognised-weights", "not-linear"), found.explanation


@pytest.mark.full
def test_elements_are_asked_for_where_a_long_probe_shows_nothing_of_a_window():
    """Of a probe's parameter a window has few elements, so a quantile of all is 0."""

    def cut_at_a_quantile(run):
        def change(run):
            for p in run.model.parameters():
                if p.grad is not None and p.numel() > 1:
                    p.grad = p.grad.to_dense()
                    most = float(p.grad.abs().double().quantile(0.9))
                    p.grad.clamp_(-most, most)

        then(change)(run)

    assert verify(cut_at_a_quantile).violation.diagnosis == "partial-gradient"
