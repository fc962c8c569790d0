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
from gradcheck_suite.run.instance import leaves, map_leaves
from gradcheck_suite.verification.probe_plans import slopes_case
from studies.zoo.bug import step_with, train_with_weights, window_gradients
from studies.zoo.bugs.resets import delayed_by_one
from tests.judge.explaining import (
    DATA,
    MASKED,
    as_it_is,
    every,
    explained,
    of_weight,
    then,
    weight_of,
    where_not_finite,
)


def _by_part(change):
    """Return a loop that changes each micro-batch's part of the window's loss, given its place."""

    def loop(run):
        for window in windows(run):
            total = window_count(run, window)
            for place, batch in enumerate(window):
                change(part_of_window(run, batch, total), place).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    return loop


def _by_weights(weight):
    return lambda run: train_with_weights(run, weight)


# Weights of micro-batches


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (lambda loss, place: loss + 0.1 * loss * loss, "weighted-by-loss", "and 0.166667 with a loss 2**-20 times as"),
        (lambda loss, place: loss * torch.sigmoid(loss.detach() / 50), "weighted-by-loss", "a focal weight"),
        (lambda loss, place: loss / (1 + place), "weighted-by-place", "window: 1, 0.5, 0.333333, 0.25 times"),
        (lambda loss, place: -loss if place == 2 else loss, "weighted-by-place", "backward with the same sign"),
        (lambda loss, place: loss / 3, "wrong-scale", "weighs 0.333333 times"),
    ],
)
def test_weights_by_loss_and_by_place(change, name, says):
    found, sentence, _ = explained(_by_part(change), plan=Plan((2, 1, 3), 3))
    assert found == name
    assert says in sentence


def test_a_loop_that_runs_in_float32_alone_is_read_as_far_as_others():
    """The run that raises does not count: what tells places from other weights is the last one that is left."""

    def in_float32(run):
        if run.dtype == torch.float64:
            raise TypeError
        _by_part(lambda loss, place: loss / (1 + place))(run)

    assert explained(in_float32, plan=Plan((2, 1, 3), 3), dtype="float32")[0] == "weighted-by-place"


def test_a_wrong_weight_that_is_the_same_with_a_small_loss_is_not_blamed_on_the_loss():
    """The window's first weighs 1.5 times in every run; the rest another weight in the third run alone."""
    runs = []

    def changes(run):
        runs.append(run)
        factors = iter([1.5, 0.7, 1.3, 0.9, 1.1, 0.8, 0.6] * 9)
        _by_part(lambda loss, place: loss * (next(factors) + 0.25 * (len(runs) == 3 and place > 0)))(run)

    found = check(changes, probe_case(Plan((2, 1, 3), 3))).violation
    assert len(runs) > 2
    assert found.diagnosis in ("unrecognised-weights", "not-linear"), found.explanation


def test_a_penalty_on_the_gradient_is_told_from_a_constant_term():
    def penalise(factor):
        def loop(run):
            parameters = list(run.model.parameters())
            for window in windows(run):
                total = window_count(run, window)
                for batch in window:
                    loss = part_of_window(run, batch, total)
                    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
                    (loss + factor * sum((g * g).sum() for g in gradients)).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()

        return loop

    name, sentence, _ = explained(penalise(0.01))
    assert name == "added-term"
    assert "grows with the square of the loss" in sentence
    name, sentence, _ = explained(then(lambda run: [p.grad.add_(0.01) for p in run.model.parameters()]))
    assert name == "added-term"
    assert "does not depend on the loss" in sentence


@pytest.mark.parametrize(
    ("of_window", "says"),
    [
        (lambda counts: sum(counts) - len(counts), "one with one target too few for each micro-batch"),
        (lambda counts: sum(counts) + len(counts), "one with one target too many for each micro-batch"),
        (lambda counts: max(counts) * len(counts), "its micro-batches times that of its largest micro-batch"),
        (sum, None),
    ],
)
def test_a_window_is_divided_by_another_count(of_window, says):
    def loop(run):
        before = 1.0 if says else 2.0
        train_with_weights(run, lambda w, b: before * run.count(b) / of_window([float(run.count(x)) for x in w]))

    name, sentence, _ = explained(loop, plan=Plan((3, 4, 1), 2))
    assert name == "wrong-scale"
    assert (says or "2 times what it should") in sentence
    assert ("times that of" in sentence or "one target" in sentence) == bool(says)


UNDIVIDED = "a division is left out"


@pytest.mark.parametrize(
    ("count", "divide_by", "says"),
    [
        (1.25, lambda counts, items: int(sum(counts)), "made a whole number"),
        (1.25, lambda counts, items: round(sum(counts)), "made a whole number"),
        (1.25, lambda counts, items: 1.0, UNDIVIDED),
        (1.25, lambda counts, items: items, "divide by run.count(batch), which is not the number of items"),
        (2.0, lambda counts, items: max(1, sum(counts) - len(counts)), "one target too few for each micro-batch"),
        (2.0, lambda counts, items: 1.0, UNDIVIDED),
        (2.0, lambda counts, items: sum(counts) + items, "one target too many is counted for every item"),
    ],
)
def test_what_one_item_that_counts_more_or_less_than_1_is_divided_by(count, divide_by, says):
    """Its window alone does not tell these apart, and a probe that counts items does not show them."""

    def loop(run):
        def weight(window, batch):
            items = sum(len(next(leaves(b))) for b in window)
            return run.count(batch) / divide_by([float(run.count(b)) for b in window], items)

        train_with_weights(run, weight)

    name, sentence, _ = explained(loop, plan=Plan((1, 1), 1), w=np.full(8, count))
    assert name == "wrong-scale"
    assert says in sentence
    assert (UNDIVIDED in sentence) == (says == UNDIVIDED)


def test_a_factor_of_vectors_alone_is_said_to_be_so_where_one_element_is_wrong():
    """The probe's only parameter is a vector, so that it shows this factor of every item."""

    def shrink_vectors(run):
        for p in run.model.parameters():
            if p.ndim < 2:
                p.grad.mul_(0.1)

    def one_bias(seed):
        linear = torch.nn.Linear(3, 1, dtype=torch.float64)
        torch.nn.init.ones_(linear.weight)
        torch.nn.init.ones_(linear.bias)
        return linear

    name, sentence, _ = explained(then(shrink_vectors), plan=Plan((1,), 1), model=one_bias, y=DATA["y"][:, :1])
    # one micro-batch's weight is no factor of windows unless the run explains it
    assert name == "unrecognised-weights"
    assert sentence.startswith("in bias alone, while weight is right: the window's micro-batches weigh 0.1 per count")
    _, sentence, _ = explained(then(lambda run: [p.grad.mul_(0.1) for p in run.model.parameters()]), plan=Plan((1,), 1))
    assert "alone" not in sentence


def test_tasks_that_have_a_count_each_are_told_from_means_of_weight_one():
    def two_tasks(run):
        for window in windows(run):
            for task in (window[::2], window[1::2]):
                if task:
                    backward_window(run, task)
            run.optimizer.step()
            run.optimizer.zero_grad()

    name, sentence, _ = explained(two_tasks)
    assert name == "mean-of-means"
    assert "dealt to 2 groups, as to tasks or ranks, and the groups' means are added up" in sentence
    name, sentence, _ = explained(_by_weights(lambda window, batch: 1.0))
    assert name == "mean-of-means"
    assert "each micro-batch's mean has weight 1" in sentence


def test_a_factor_that_grows_with_the_steps_is_given_for_each():
    def warm_up(run):
        for step, window in enumerate(windows(run)):
            total = window_count(run, window)
            for batch in window:
                (part_of_window(run, batch, total) * min(1.0, (step + 1) / 4)).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    name, sentence, _ = explained(warm_up, plan=Plan((2,), 1))
    assert name == "wrong-scale"
    assert (
        "the factors are 0.25, 0.25, 0.5, 0.75, which no usual count or quotient of counts gives in every window"
        in sentence
    )


def test_what_the_wrong_micro_batches_have_in_common_is_said():
    def three_items_twice(run):
        train_with_weights(
            run, lambda w, b: run.count(b) / window_count(run, w) * (2 if len(next(leaves(b))) == 3 else 1)
        )

    name, sentence, _ = explained(three_items_twice, plan=Plan((1, 3), 2))
    assert name == "repeated-micro-batch"
    assert "they all have 3 items, and no right one has" in sentence
    _, sentence, _ = explained(_by_part(lambda loss, place: loss * (2 if place == 1 else 1)), plan=Plan((1, 3), 2))
    assert "they all have" not in sentence


def test_a_step_that_is_not_finite_on_the_probe_is_no_evidence_on_another():
    def spoil(run):
        if weight_of(run) is None:
            for p in run.model.parameters():
                p.grad.fill_(torch.nan)

    assert explained(then(every(lambda g, p: g.mul_(0.5)), spoil), window=0)[0] == "wrong-scale"


# Other windows


def _dealt(order):
    """Return a loop that trains the micro-batches of each epoch in another order, given those of the loader."""

    def loop(run):
        for _ in range(run.epochs):
            batches = order(list(run.loader))
            for first in range(0, len(batches), run.accumulation_steps):
                backward_window(run, batches[first : first + run.accumulation_steps])
                run.optimizer.step()
                run.optimizer.zero_grad()

    return loop


@pytest.mark.parametrize(
    "order",
    [
        lambda batches: batches[1::2] + batches[::2],
        lambda batches: sorted(batches, key=lambda b: len(next(leaves(b)))),
        lambda batches: batches[::-1],
    ],
)
@pytest.mark.parametrize("plan", [Plan((3, 1), 1, 2), Plan((3, 1, 2, 2), 2)])
def test_micro_batches_in_another_order_are_of_other_windows(order, plan):
    name, sentence, _ = explained(_dealt(order), plan=plan)
    assert name == "other-window"
    assert "train the windows in the loader's order" in sentence


# Batches that are split


def _split(parts, weigh):
    """Return a loop that sends parts of each micro-batch backward, given the counts of all parts of the window."""

    def loop(run):
        for window in windows(run):
            pieces = [map_leaves(lambda t, p=part: t[p], b) for b in window for part in parts(len(next(leaves(b))))]
            pieces = [piece for piece in pieces if run.count(piece)]
            counts = [float(run.count(piece)) for piece in pieces]
            for place, piece in enumerate(pieces):
                (run.loss(run.model, piece) * weigh(place, counts)).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    return loop


def _singly(items):
    return [slice(i, i + 1) for i in range(items)]


@pytest.mark.parametrize(
    ("parts", "weigh", "name", "says"),
    [
        (_singly, lambda place, counts: 1 / len(counts), "mean-of-means", "the means of a micro-batch's parts"),
        # items that count 1, 3 and 2 have their mean, and one of the next micro-batch counts 1
        (
            _singly,
            lambda place, counts: sum(counts[:3]) / 3 / sum(counts) if place < 3 else counts[place] / sum(counts),
            "mean-of-means",
            "the means of a micro-batch's parts",
        ),
        (_singly, lambda place, counts: 0.5**place, "unequal-items", "parts weigh 1, 0.5, 0.25"),
        (lambda n: [slice(0, max(1, n - 1))], lambda place, counts: counts[place] / sum(counts), "changed-batch", ""),
    ],
)
def test_parts_of_micro_batches_are_told_from_other_batches(parts, weigh, name, says):
    found, sentence, _ = explained(_split(parts, weigh), plan=Plan((3, 2, 2), 2), w=(1, 3, 2, 0, 1, 1, 1, 1))
    assert found == name, sentence
    assert says in sentence


@pytest.mark.parametrize(
    ("shares", "leak", "name"),
    [
        (lambda k: (1 / 2, 1 / 2), 0.0, "mean-of-means"),
        (lambda k: (1 / 3,) * 3, 0.0, "mean-of-means"),
        (lambda k: (1 / 3, 2 / 3), 0.0, "unequal-items"),
        # the parts of one plan are no devices where another plan has more of them
        (lambda k: (1 / (k - 1),) * (k - 1), 0.0, "unequal-items"),
        (lambda k: (1 / 2, 1 / 2), 0.1, "unequal-items"),
    ],
)
def test_parts_of_a_window_as_devices_have_them_are_seen_by_the_weights_of_items(shares, leak, name):
    """Parts that cut through micro-batches, whose means have these shares, beside some of an item of another window."""

    def means_of_parts(run):
        (p,) = run.model.parameters()
        items, own = p.grad.nonzero()[:, 0], shares(run.accumulation_steps)
        for part, share in zip(items.tensor_split(len(own)), own, strict=True):
            p.grad[part] *= share * len(items) / len(part)
        p.grad[items[0] - 1] = leak * p.grad[items[0]]

    violation = check(then(means_of_parts), probe_case(Plan((2, 3, 2, 2, 3, 2), 3))).violation
    assert violation.diagnosis == name, violation.explanation
    said = f"a window's items are in {len(shares(3))} parts"
    assert (said in violation.explanation) == (name == "mean-of-means")


# Elements


_quantise = of_weight(lambda g: g.copy_((g * 127 / g.abs().max()).round() * g.abs().max() / 127))
_average = of_weight(lambda g: g.copy_(g.mean(0, keepdim=True).expand_as(g)))
_centre = of_weight(lambda g: g.sub_(g.mean(0, keepdim=True)))
SIGNS = [[100, -50.0], [1, 20], [-30, 2], [1, -90], [50, 8], [3, 9], [-80, 4], [7, 7]]


def _rectify(run):
    handles = [p.register_hook(lambda g: g.clamp(min=0)) for p in run.model.parameters()]
    then(as_it_is)(run)
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    ("loop", "name", "says"),
    [
        (then(_quantise), "low-precision", "multiples of 1/127 of the largest"),
        (then(of_weight(lambda g: g[:, 1].zero_())), "partial-gradient", "in columns 1, and are 0"),
        (then(_average), "projected-gradient", "each of its elements is the mean of its column"),
        (then(_centre), "projected-gradient", "the mean of each column has been subtracted"),
        (
            then(of_weight(lambda g: g.abs_())),
            "partial-gradient",
            "or for what looks at signs or sizes (clipping by value, a threshold, an abs)",
        ),
        (_rectify, "partial-gradient", "only the positive elements are in the step's"),
    ],
)
def test_elements_that_are_wrong(loop, name, says):
    found, sentence, _ = explained(loop, y=SIGNS)
    assert found == name, sentence
    assert says in sentence


def _by_elements(combine):
    """Return a loop that combines each element from those of the micro-batches, (micro-batches, ...)."""

    def loop(run):
        for window in windows(run):
            parts = [window_gradients(run, [batch]) for batch in window]
            shares = [run.count(batch) / window_count(run, window) for batch in window]
            step_with(
                run, {p: combine(torch.stack([g[p] * s for g, s in zip(parts, shares, strict=True)])) for p in parts[0]}
            )

    return loop


@pytest.mark.parametrize(
    ("combine", "sizes", "name", "says"),
    [
        (lambda parts: parts.median(0).values * 3, (1, 2, 2), "not-summed", "the median of those"),
        (lambda parts: parts.median(0).values * 2, (1, 2), "not-summed", "the smallest of those"),
        (lambda parts: parts.amax(0), (1, 2, 2), "not-summed", "the largest of those"),
        (lambda parts: parts.norm(dim=0), (1, 2), "not-summed", "the root of the sum of the squares"),
        (
            lambda parts: parts.sum(0) * (parts.sign().sum(0).abs() == len(parts)),
            (4, 4),
            "not-summed",
            "sum where their signs agree",
        ),
        # functions of micro-batches, not of elements
        (lambda parts: parts[0], (1, 2), "first-only", "the window's first micro-batch"),
        (lambda parts: parts.mean(0), (1, 2), "wrong-scale", "one over the window's micro-batches, 2"),
    ],
)
def test_other_functions_of_the_elements_than_their_sum(combine, sizes, name, says):
    found, sentence, _ = explained(_by_elements(combine), y=SIGNS, plan=Plan(sizes, len(sizes)))
    assert found == name, sentence
    assert says in sentence


# Two names


class _Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (torch.nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2))
        self.out = torch.nn.Linear(3, 2, dtype=torch.float64)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.out(self.last(torch.tanh(self.first(x / 10))))


def _untied(run):
    for window in windows(run):
        copies = {name: p.detach().clone().requires_grad_() for name, p in run.model.named_parameters()}

        class Copy(torch.nn.Module):
            def forward(self, *args, copies=copies):
                return torch.func.functional_call(run.model, copies, args, tie_weights=False)

        for batch in window:
            (run.loss(Copy(), batch) * run.count(batch) / window_count(run, window)).backward()
        for name, p in run.model.named_parameters():
            p.grad = copies[name].grad
        run.optimizer.step()
        run.optimizer.zero_grad()


def _once_per_name(run):
    for _, p in run.model.named_parameters(remove_duplicate=False):
        p.grad.mul_(0.5 if p.ndim == 2 and p.shape[0] == 3 else 1)


def test_a_use_of_a_tied_weight_that_is_missing_is_told_from_what_is_done_once_per_name():
    name, sentence, _ = explained(_untied, model=lambda seed: _Tied())
    assert name == "partial-gradient"
    assert "its use as last.weight is not in the gradient" in sentence
    name, sentence, _ = explained(then(_once_per_name), model=lambda seed: _Tied())
    assert name == "wrong-scale"
    assert "what is done once per name is done 2 times to it" in sentence


# On the weight probes


def _adds(size):
    return then(
        lambda run: [
            p.grad.add_(torch.linspace(1, 2, p.numel(), dtype=p.dtype), alpha=size) for p in run.model.parameters()
        ]
    )


@pytest.mark.parametrize("size", [1e-40, 1e-19])
def test_a_term_that_only_tiny_gradients_show_is_no_leak(size):
    violation = check(_adds(size), slopes_case(frozenset(), "float64", "cpu")).violation
    assert violation.diagnosis == "added-term"
    assert "does not shrink with the loss" in violation.explanation


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


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (delayed_by_one, "other-window"),
        (then(every(lambda g, p: g.zero_())), "no-gradient"),
        (then(every(lambda g, p: g.sub_(g.mean()))), "projected-gradient"),
    ],
)
def test_a_gradient_of_0_on_the_probe_is_told_by_items_that_weigh_differently(loop, name, epochs):
    """Five items of one micro-batch weigh the same: their mean is all of them."""
    assert explained(loop, plan=Plan((5,), 2, epochs=epochs))[0] == name


# What a loop computes its losses from is named where it is not what the run hands over, and only there.


SPEC = ProblemSpec(
    Input("vector", size=2),
    (Layer("train_scale", factor=2.0), Layer("linear", features=2, bias=True)),
    Loss("mse", reduction="mean"),
)
CASE = Case(SPEC, Plan((1, 3, 2), 2, 2), seed=3)


def _step(run):
    run.optimizer.step()
    run.optimizer.zero_grad()


def _stays_in_eval(run):
    for window in windows(run):
        backward_window(run, window)
        _step(run)
        run.model.eval()


def _evaluates_at_its_last_micro_batch(run):
    for window in windows(run):
        for j, batch in enumerate(window):
            run.model.train(j + 1 < len(window))
            part_of_window(run, batch, window_count(run, window)).backward()
        _step(run)


def _perturbs(run, times=1):
    """Take the gradient where a first one leads, as sharpness-aware minimisation does."""
    for window in windows(run):
        start = copy.deepcopy(run.model.state_dict())
        for _ in range(times):
            backward_window(run, window)
            with torch.no_grad():
                for p in run.model.parameters():
                    p.add_(0.1 * p.grad)
            run.optimizer.zero_grad()
        backward_window(run, window)
        run.model.load_state_dict(start)
        _step(run)


def _perturbs_twice(run):
    _perturbs(run, times=2)


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
        _step(run)


def _normalizes_in_every_epoch(run):
    batches = list(run.loader)
    for epoch in range(run.epochs):
        for batch in batches if epoch else ():
            batch["x"].div_(2)
        for first in range(0, len(batches), run.accumulation_steps):
            backward_window(run, batches[first : first + run.accumulation_steps])
            _step(run)


def _adversarial(run):
    """Move each input along the sign of its own gradient: two losses of each micro-batch are sent backward."""
    for window in windows(run):
        total = window_count(run, window)
        for batch in window:
            x = batch["x"].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(run.loss(run.model, {**batch, "x": x}), x)
            moved = {**batch, "x": (x + 0.01 * gradient.sign()).detach()}
            (run.loss(run.model, moved) * run.count(batch) / total).backward()
        _step(run)


def _changes(change):
    def loop(run):
        for window in windows(run):
            backward_window(run, [{name: change(name, t) for name, t in batch.items()} for batch in window])
            _step(run)

    return loop


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("loop", "diagnosis", "says"),
    [
        (_stays_in_eval, "wrong-mode", "the window's losses are computed in eval mode"),
        (_evaluates_at_its_last_micro_batch, "wrong-mode", "1 of the window's 2 losses is computed in eval mode"),
        (_perturbs, "other-parameters", "perturbed or rounded and restored before the step"),
        (_perturbs_twice, "other-parameters", "perturbed or rounded and restored before the step"),
        (_trains_a_copy, "other-parameters", "other values of 1.weight than those that the step changes"),
        (_adversarial, "changed-batch", "it has other values in x,"),
        (_normalizes_in_every_epoch, "changed-batch", "it has other values in x,"),
        (_changes(lambda name, t: t.roll(1, 0) if name == "target" else t), "changed-batch", "other values in target,"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_inputs_than_the_contracts_are_named(loop, diagnosis, says, dtype):
    violation = check(loop, CASE.replace(dtype=dtype)).violation
    assert (violation.kind, violation.diagnosis) == ("gradient", diagnosis), violation.explanation
    assert says in violation.explanation


def test_a_tiny_gradient_is_not_right_at_any_parameters():
    """Its elements are about 1e-12, and so is what they are off by."""
    found, sentence, _ = explained(_trains_a_copy, plan=Plan((2,), 1), sums=True, w=np.full(8, 2.0**-50))
    assert found == "other-parameters", sentence


@pytest.mark.parametrize("case", [CASE, probe_case(Plan((1, 3, 2), 2))], ids=["case", "probe"])
@pytest.mark.parametrize("items", [2, 4])
def test_a_batch_with_other_items_is_told_from_a_wrong_weight(case, items):
    def cut(name, t):
        return t[:items] if len(t) > items else torch.cat([t, t[-1:]]) if items > 2 and len(t) == 3 else t

    violation = check(_changes(cut), case).violation
    assert violation.diagnosis == "changed-batch", violation.explanation
    assert f"{items} items in place of 3" in violation.explanation


def test_a_mode_that_changes_nothing_is_not_blamed():
    """The loop stays in eval mode, in which this model computes the same, and loses a micro-batch."""

    def loses_the_last(run):
        run.model.eval()
        for window in windows(run):
            for batch in window[:-1]:
                part_of_window(run, batch, window_count(run, window)).backward()
            _step(run)

    spec = dataclasses.replace(SPEC, layers=SPEC.layers[1:])
    violation = check(loses_the_last, Case(spec, Plan((1, 3, 2), 3), seed=3)).violation
    assert violation.diagnosis == "dropped-micro-batch"


@pytest.mark.parametrize(
    "then", [lambda run: run.optimizer.zero_grad(), lambda run: "end"], ids=["resets", "ends the window"]
)
def test_a_loop_that_loses_more_than_a_loss_of_nan_is_said_to(then):
    violation = check(where_not_finite(then), MASKED).violation
    assert violation.diagnosis == "skipped-non-finite", violation.explanation
    assert "with finite losses in place of such ones the loop is right" in violation.explanation


def test_a_loop_that_drops_a_window_of_a_nan_loss_is_said_to():
    def drops(run):
        for window in windows(run):
            if all(run.loss(run.model, batch).isfinite() for batch in window):
                backward_window(run, window)
                run.optimizer.step()
                run.optimizer.zero_grad()

    violation = check(drops, MASKED).violation
    assert (violation.kind, violation.diagnosis) == ("step-count", "skipped-non-finite")


def test_a_loop_that_skips_nothing_but_the_loss_of_nan_holds():
    assert check(where_not_finite(lambda run: None), MASKED).holds


def _targets_shifted(run):
    for _ in range(run.epochs):
        pairs = iter(run.pairs)
        while window := list(islice(pairs, run.accumulation_steps)):
            total = sum(len(y) for _, y in window)
            for x, y in window:
                (run.criterion(run.model(x), y.roll(1, 0)) * len(y) / total).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()


def test_targets_that_belong_to_other_inputs_are_named_where_the_loop_calls_the_criterion():
    """The loss is not called with the model then, but with its output."""
    violation = check(_targets_shifted, Case(SPEC, Plan((2, 3), 2, 2), seed=3)).violation
    assert violation.diagnosis == "changed-batch"
    assert (
        "where micro-batch 0 is due, it has other values in target, and the gradient is right" in violation.explanation
    )


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
        run.optimizer.step()
        run.optimizer.zero_grad()
        for p, value in zip(parameters, average, strict=True):
            value.lerp_(p.detach(), 0.1)


def test_an_average_of_the_parameters_is_named_once_they_move():
    """It is right where they do not, and is no earlier step's either."""
    violation = check(_at_an_average, Case(SPEC, Plan((2, 3), 1, 2), seed=3, optimizer="sgd")).violation
    assert violation.diagnosis == "other-parameters"
    assert "than those that the step changes" in violation.explanation
    assert check(_at_an_average, Case(SPEC, Plan((2, 3), 1, 2), seed=3)).holds
