"""What the read-out probe does not show is looked for on the case itself, and nothing is named that is not found.

The problem is a weighted regression onto two targets, small enough that a loop's fault is all that is wrong.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Plan, Problem
from gradcheck_suite.explain import explain_gradient
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.numerics.compare import worst_difference
from gradcheck_suite.references.reference import Reference, Window
from gradcheck_suite.subject import run_loop
from gradcheck_suite.trial import user_trial

PLAN = Plan((1, 2, 3, 2), 2)
DRAWN = np.random.default_rng(0)
DATA = {"x": DRAWN.integers(1, 10, (8, 3)), "y": DRAWN.integers(1, 10, (8, 2)), "w": np.ones(8)}


@pytest.fixture(autouse=True)
def _no_draws(monkeypatch):
    """Let rounding be a billionth of the largest element: to measure it takes drawing, and is not tested here."""
    monkeypatch.setattr(Window, "allowed", lambda window, draws=0: _share(window.expected, 1e-9))


def _share(gradient, share):
    """Return, for each element, a share of the largest one that is finite."""
    return np.full(len(gradient), share * np.abs(gradient[np.isfinite(gradient)]).max())


def _model(seed):
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, -1.0], [0.5, -3.0, 1.0]]))
        model.bias.copy_(torch.tensor([0.25, -0.5]))
    return model


def _squares(model, batch):
    return (((model(batch["x"]) - batch["y"]) ** 2).sum(1) * batch["w"]).sum()


def _mean(model, batch):
    total = batch["w"].sum()
    return _squares(model, batch) / total if total else 0 * _squares(model, batch)


def _explained(
    loop,
    *,
    plan=PLAN,
    window=0,
    epoch=0,
    dtype="float64",
    optimizer=None,
    sums=False,
    model=_model,
    moved=None,
    **data,
):
    """Return the diagnosis, the explanation and the details for one step, which must be wrong."""
    tensors = {name: torch.tensor(np.array(values), dtype=torch.float64) for name, values in {**DATA, **data}.items()}
    problem = Problem(
        model,
        lambda items, seed: {name: tensor[:items] for name, tensor in tensors.items()},
        _squares if sums else _mean,
        reduction="sum" if sums else "mean",
        count=lambda batch: batch["w"].sum(),
    )
    trial = user_trial(Case("regression.py:PROBLEM", plan, dtype, optimizer=optimizer), problem)
    reference, outcome = Reference(trial), run_loop(loop, trial)
    assert outcome.raised is None
    observation = outcome.observations[epoch * len(plan.windows) + window]
    right = reference.window(window, observation.parameters or None)
    seen = reference.flat(observation.gradients)
    difference = worst_difference(seen, right.expected, _share(right.expected, 1e-6))
    assert difference.ratio > 1
    if moved is not None:
        right = SimpleNamespace(expected=right.expected, index=right.index, moved=moved)
    return explain_gradient(loop, reference, right, observation, difference, epoch)


def _then(*changes):
    """Return a sound loop with a change to the gradients before each step, in turn."""

    def loop(run):
        for step, window in enumerate(windows(run)):
            backward_window(run, window)
            changes[step % len(changes)](run)
            run.optimizer.step()
            run.optimizer.zero_grad()

    return loop


def _weight(run):
    """Return the parameter that is named `weight`; None on the probe."""
    return dict(run.model.named_parameters()).get("weight")


def _as_it_is(run):
    pass


def _double(run):
    if (weight := _weight(run)) is not None:
        weight.grad.mul_(2)


def _triple(run):
    if (weight := _weight(run)) is not None:
        weight.grad.mul_(3)


def _turn(run):
    """Hand the first target's gradient to the second: linear, and no matter of weights."""
    if (weight := _weight(run)) is not None:
        weight.grad.copy_(weight.grad.flip(0))


# What is counted


def _by_items(run):
    for window in windows(run):
        items = sum(len(next(iter(batch.values()))) for batch in window)
        for batch in window:
            (run.loss(run.model, batch) * len(next(iter(batch.values()))) / items).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_a_mean_is_read_by_what_the_case_counts_where_its_items_are_right():
    """Of items that count 2, 1, 0 and 1, 1, 0, 0, 0 the loop gives each mean the weight of its number of items."""
    counts = (2, 1, 0, 0, 0, 0, 1, 1)
    name, sentence, details = _explained(_by_items, plan=Plan((1, 2, 3, 2), 4), w=counts)
    assert name == "wrong-count"
    assert "as if every item of theirs counted alike" in sentence
    assert details[1] == "weight of each item, by micro-batch (index, count, expected, observed):"
    # the window counts 5: right is 1/5 of each, seen are 1/8 : 2, 2/8 : 1 and 2/8 : 2; the third counts nothing
    assert [line.split() for line in details[2:]] == [
        ["0", "2", "0.2", "0.0625"],
        ["1", "1", "0.2", "0.25"],
        ["2", "0", "0", "0"],
        ["3", "2", "0.2", "0.125"],
    ]


def test_a_sum_is_read_by_its_items_alone():
    name, sentence, details = _explained(_then(_double), sums=True, w=(2, 1, 1, 1, 1, 1, 1, 1))
    assert name == "wrong-scale"
    assert sentence.startswith("in weight alone, while bias is right: every item of the window weighs 2 times")
    assert len(details) == 1


def test_items_of_a_sum_weigh_one():
    def halves(run):
        for window in windows(run):
            for batch in window:
                (run.loss(run.model, batch) / 2).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    name, sentence, details = _explained(halves, sums=True)
    assert name == "wrong-scale"
    assert "accumulation_steps = 1/2" in sentence
    assert [line.split() for line in details[2:]] == [
        ["0", "1", "1", "0.5"],
        ["1", "2", "1", "0.5"],
        ["2", "3", "0", "0"],
        ["3", "2", "0", "0"],
    ]


# Which step


def test_the_step_that_is_wrong_is_the_one_that_is_read():
    """Of three windows and two epochs each step has a fault of its own: a multiple of the right gradient."""

    def multiplies(factor):
        return lambda run: [p.grad.mul_(factor) for p in run.model.parameters()]

    plan, factors = Plan((1, 2, 1, 2, 1, 1), 2, 2), (3, 5, 7, 11, 13, 17)
    for step, factor in enumerate(factors):
        epoch, window = divmod(step, 3)
        loop = _then(*map(multiplies, factors))
        name, sentence, details = _explained(loop, plan=plan, epoch=epoch, window=window)
        assert name == "wrong-scale"
        assert f"weighs {factor} times what it should" in sentence
        table = [line.split() for line in details[2:]]
        assert [row[2] != "0" for row in table] == [j // 2 == window for j in range(6)]


@pytest.mark.parametrize("window", [0, 1])
def test_a_fault_of_one_parameter_is_read_on_the_same_step(window):
    changes = [_as_it_is] * 4
    changes[2 + window] = _triple
    name, sentence, _ = _explained(_then(*changes), plan=Plan((1, 2, 3, 2), 2, 2), window=window, epoch=1)
    assert name == "wrong-scale"
    assert sentence.startswith("in weight alone, while bias is right: every item of the window weighs 3 times")


def test_what_is_left_from_earlier_epochs_is_told_from_a_scale():
    def no_reset(run):
        for window in windows(run):
            backward_window(run, window)
            run.optimizer.step()

    name, sentence, _ = _explained(no_reset, plan=Plan((1, 2), 2, 2), epoch=1)
    assert name == "stale-window"
    assert "from earlier epochs" in sentence


# Where the probe is no guide


def _on_probe(change):
    """Return the linear fault on the case, and on the probe another."""
    return lambda run: _turn(run) if _weight(run) is not None else change(run)


def _raise(run):
    raise ValueError


def _infinite(run):
    for p in run.model.parameters():
        p.grad.div_(0)


def _raise_where_small(run):
    if all(p.grad.abs().max() < 1e-3 for p in run.model.parameters()):
        raise ValueError


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_raise, "what the loop does with the read-out probe is no guide, since it fails there"),
        (_infinite, "on the read-out probe, whose gradients are all 1, it is not even finite"),
        (_raise_where_small, "2**-20 times as large: something depends on the gradient's size (clipping, normalising)"),
        (_as_it_is, "on the read-out probe the items' weights are right, so look at what depends on the gradient's"),
    ],
)
def test_why_the_probe_tells_nothing_is_said(change, says):
    name, sentence, details = _explained(_then(_on_probe(change)))
    assert name == "not-linear"
    assert says in sentence
    assert len(details) == 1


def _stops_on_probe(*, small):
    """Return a loop with a linear fault that ends on the probe after one step, if with small losses alone."""

    def loop(run):
        for window in windows(run):
            backward_window(run, window)
            _turn(run)
            run.optimizer.step()
            if _weight(run) is None and (not small or next(run.model.parameters()).grad.abs().max() < 1e-3):
                return
            run.optimizer.zero_grad()

    return loop


@pytest.mark.parametrize(("small", "says"), [(False, "since it fails there"), (True, "(clipping, normalising)")])
def test_a_loop_that_steps_seldom_on_the_probe_is_read_as_far_as_it_goes(small, says):
    plan = Plan((1, 2, 3, 2, 1), 2)
    more = {name: [*values, values[0]] for name, values in DATA.items()}
    for window in (1, 2):
        name, sentence, _ = _explained(_stops_on_probe(small=small), plan=plan, window=window, **more)
        assert name == "not-linear"
        assert says in sentence
    name, sentence, _ = _explained(_stops_on_probe(small=small), plan=plan, window=0, **more)
    assert name == "not-linear"
    assert "the items' weights are right" in sentence


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("rounding", [True, False])
def test_a_dependence_on_the_gradients_size_is_seen_where_it_is_no_rounding(probe, rounding):
    """On the probe, where weights are 1/3, or on the case alone, 1e-12 of the gradient is rounding and 1e-8 is not."""

    def change(run):
        for p in run.model.parameters():
            if (_weight(run) is None) == probe:
                p.grad.mul_(1 + p.grad.abs() * (1e-12 if rounding else 1e-8))
        _turn(run)

    name, sentence, _ = _explained(_then(change))
    assert name == "not-linear"
    if rounding:
        assert "on the read-out probe the items' weights are right" in sentence
    else:
        assert ("(clipping, normalising)" if probe else "(clipping, decay, normalising)") in sentence


def _first_item_only(gradient):
    gradient[1:] = 0


def _times_two(gradient):
    gradient.mul_(2)


@pytest.mark.parametrize(
    ("change", "diagnosis", "says"),
    [
        (_first_item_only, "first-only", "only the window's first micro-batch"),
        (_times_two, "wrong-scale", "every item of the window weighs 2 times"),
    ],
)
def test_what_the_probe_shows_is_not_looked_for_on_the_case(change, diagnosis, says):
    def changes(run):
        if _weight(run) is None:
            change(next(run.model.parameters()).grad)
        _triple(run)

    name, sentence, _ = _explained(_then(changes))
    assert name == diagnosis
    assert sentence.startswith(says)


def test_weights_within_a_micro_batch_are_told_apart_as_soon_as_they_are_no_rounding():
    """One of the first window's second micro-batch's items weighs more by 1e-8, then by an eleventh of 1e-9."""

    def lifts(amount):
        def change(run):
            if _weight(run) is None:
                next(run.model.parameters()).grad[2] *= 1 + amount
            _turn(run)

        return change

    assert _explained(_then(lifts(1e-8)))[0] == "unequal-items"
    name, sentence, _ = _explained(_then(lifts(1e-10)))
    assert name == "not-linear"
    assert "the items' weights are right" in sentence


# On the case itself


def _with_a_loss_of_its_own(run):
    for window in windows(run):
        total = sum(batch["w"].sum() for batch in window if "w" in batch)
        for batch in window:
            (_squares(run.model, batch) / total).backward()
        _double(run)
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_a_loop_that_takes_its_losses_from_elsewhere_is_read_all_the_same():
    name, sentence, _ = _explained(_with_a_loss_of_its_own)
    assert name == "wrong-scale"
    assert sentence.startswith("in weight alone, while bias is right")


def _clip(run):
    if _weight(run) is not None:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)


def _raise_on_small_weight(run):
    _double(run)
    if (weight := _weight(run)) is not None and weight.grad.abs().max() < 1e-3:
        raise ValueError


def _not_a_number(run):
    if (weight := _weight(run)) is not None:
        weight.grad[0, 0] = math.nan


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_clip, "on this very case, a loss 2**-20 times as large does not give"),
        (_raise_on_small_weight, "on the read-out probe the items' weights are right"),
        (_not_a_number, "on the read-out probe the items' weights are right"),
    ],
)
def test_what_the_case_does_not_show_is_not_named(change, says, window):
    name, sentence, _ = _explained(_then(change), window=window)
    assert name == "not-linear"
    assert says in sentence


def test_a_threshold_is_seen_however_small_the_gradients_are():
    """On a sum of items that count 1e-20 each: gradients of 1e-18 are doubled, and those of 1e-24 are not."""

    def change(run):
        if (weight := _weight(run)) is not None and weight.grad.abs().max() > 1e-21:
            weight.grad.mul_(2)

    name, sentence, _ = _explained(_then(change), sums=True, w=[1e-20] * 8)
    assert name == "not-linear"
    assert "(clipping, decay, normalising)" in sentence


def test_elements_that_small_losses_flush_to_zero_are_not_taken_for_a_dependence_on_size():
    """Of float32, whose least number is 1e-45: the first column's gradient is 1e-39 of what the others' is."""
    x = DATA["x"] * np.array([1e-39, 1, 1])
    name, sentence, _ = _explained(_then(_turn), plan=Plan((1, 2), 2), x=x, dtype="float32")
    assert name == "not-linear"
    assert "on the read-out probe the items' weights are right" in sentence


class _Shared(torch.autograd.Function):
    """The sum of a vector with a number, whose backward hands out the same tensor each time."""

    buffer = torch.zeros((), dtype=torch.float64)

    @staticmethod
    def forward(ctx, x, shift):
        return x + shift

    @staticmethod
    def backward(ctx, gradient):
        _Shared.buffer.copy_(gradient.sum())
        return gradient, _Shared.buffer.view(())


class _Steals(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.shift = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return _Shared.apply(x @ self.weight[:3], self.shift)[:, None]


def test_a_buffer_that_the_model_uses_again_is_named():
    name, sentence, _ = _explained(_then(_as_it_is), model=lambda seed: _Steals())
    assert name == "stolen-buffer"
    assert sentence.startswith("shift.grad shares its storage")


# NaN and infinity from an earlier window


def _kept_by_scaling(run):
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        for p in run.model.parameters():
            p.grad.mul_(0)


INFINITE = [[math.inf, 1.0], *DATA["y"][1:].tolist()]
"""The first item's first target is infinite: so is the gradient of its row of the weight, and of its bias."""
LAST = [*DATA["y"][:-1].tolist(), [math.inf, 1.0]]


@pytest.mark.parametrize(
    ("epoch", "window", "y", "source"), [(0, 1, INFINITE, 0), (1, 0, LAST, 1), (1, 1, INFINITE, 0)]
)
def test_what_is_not_finite_in_an_earlier_window_is_blamed(epoch, window, y, source):
    name, sentence, details = _explained(
        _kept_by_scaling, plan=Plan(PLAN.micro_batches, 2, 2), epoch=epoch, window=window, y=y
    )
    assert name == "poisoned-by-earlier-window"
    assert f"window {source}'s gradient is rightly not finite" in sentence
    assert len(details) == 1


def test_the_first_of_several_windows_that_are_not_finite_is_blamed():
    y = [*INFINITE[:4], [math.inf, 1.0], *INFINITE[5:]]
    _, sentence, _ = _explained(_kept_by_scaling, plan=Plan((2, 3, 3), 1), window=2, y=y)
    assert "window 0's gradient is rightly not finite" in sentence


def _spoils(row):
    def change(run):
        if (weight := _weight(run)) is not None:
            weight.grad[row] = math.nan

    return change


@pytest.mark.parametrize(
    ("window", "loop", "y"),
    [
        (0, _then(_spoils(0)), LAST),
        (1, _then(_spoils(1)), INFINITE),
        (1, _then(_spoils(0)), DATA["y"]),
        (1, _then(_turn), INFINITE),
    ],
    ids=["later", "elsewhere", "finite", "finite here"],
)
def test_an_earlier_window_that_has_no_part_in_it_is_not_blamed(window, loop, y):
    name, sentence, _ = _explained(loop, window=window, y=y)
    assert name == "not-linear"
    assert "poisoned" not in sentence


def test_once_parameters_have_moved_no_earlier_window_is_blamed():
    """What was not finite where the parameters were says nothing of where they are."""
    assert _explained(_kept_by_scaling, window=1, y=INFINITE, moved=False)[0] == "poisoned-by-earlier-window"
    assert _explained(_kept_by_scaling, window=1, y=INFINITE, moved=True)[0] == "not-linear"


@pytest.mark.parametrize("change", [_double, _turn])
def test_float16_in_which_small_losses_underflow_is_read_in_float64_alone(change):
    name, sentence, _ = _explained(_then(change), dtype="float16")
    assert name == ("wrong-scale" if change is _double else "not-linear")
    assert "gradient's size" not in sentence


def test_so_is_a_loop_that_computes_in_float16():
    def under_autocast(run):
        for window in windows(run):
            with torch.autocast("cpu", dtype=torch.float16):
                backward_window(run, window)
            _double(run)
            run.optimizer.step()
            run.optimizer.zero_grad()

    name, sentence, _ = _explained(under_autocast, dtype="float32")
    assert name == "wrong-scale"
    assert sentence.endswith("(read off the same case in float64)")


# Where a real optimizer has moved the parameters


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_fault_is_read_at_the_parameters_that_the_optimizer_has_moved(window, dtype):
    changes = [_as_it_is, _as_it_is]
    changes[window] = _double
    name, sentence, _ = _explained(_then(*changes), window=window, dtype=dtype, optimizer="sgd")
    assert name == "wrong-scale"
    assert sentence.startswith("in weight alone, while bias is right: every item of the window weighs 2 times")
    assert sentence.endswith("(read off the same case in float64)") == (dtype == "float32")


@pytest.mark.parametrize("change", [_clip, _turn])
def test_moved_parameters_are_not_taken_for_a_dependence_on_size(change):
    name, sentence, _ = _explained(_then(_as_it_is, change), window=1, optimizer="sgd")
    assert name == "not-linear"
    assert ("(clipping, decay, normalising)" in sentence) == (change is _clip)


# In float64


@pytest.mark.parametrize("window", [0, 1])
def test_lower_precision_is_read_in_float64_on_the_same_step(window):
    changes = [_as_it_is] * 4
    changes[2 + window] = _triple
    name, sentence, _ = _explained(
        _then(*changes), plan=Plan(PLAN.micro_batches, 2, 2), window=window, epoch=1, dtype="float32"
    )
    assert name == "wrong-scale"
    assert sentence.startswith("in weight alone, while bias is right: every item of the window weighs 3 times")
    assert sentence.endswith("(read off the same case in float64)")


def _in_float64(change):
    """Return what doubles the weight's gradient, but in float64 does something else."""
    return lambda run: (change if run.dtype == torch.float64 else _double)(run) if _weight(run) is not None else None


def _square(run):
    for p in run.model.parameters():
        p.grad.mul_(p.grad)


@pytest.mark.parametrize("change", [_as_it_is, _raise, _turn, _square])
def test_what_float64_does_not_show_is_not_named(change):
    name, sentence, _ = _explained(_then(_in_float64(change)), dtype="float32")
    assert name == "not-linear"
    assert sentence.endswith("(clipping, hooks, buffers, casts)")


def test_a_loop_that_steps_seldom_in_float64_is_not_read_there():
    def stops(run):
        for window in windows(run):
            backward_window(run, window)
            _double(run)
            run.optimizer.step()
            run.optimizer.zero_grad()
            if _weight(run) is not None and run.dtype == torch.float64:
                return

    for window in (1, 2):
        name, sentence, _ = _explained(stops, plan=Plan((1, 2, 3), 1), window=window, dtype="float32")
        assert name == "not-linear"
        assert sentence.endswith("(clipping, hooks, buffers, casts)")
    assert _explained(stops, plan=Plan((1, 2, 3), 1), window=0, dtype="float32")[0] == "wrong-scale"


def _forget(run):
    if (weight := _weight(run)) is not None:
        weight.grad.zero_()


def test_a_parameter_that_is_left_out_is_named_in_lower_precision_too():
    for dtype in ("float64", "float32"):
        name, sentence, _ = _explained(_then(_forget), dtype=dtype)
        assert name == "no-gradient"
        assert sentence.startswith("in weight alone, while bias is right: nothing of the window is in the gradient")
