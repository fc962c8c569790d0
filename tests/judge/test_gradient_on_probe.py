"""What the weight probe shows of a wrong gradient: which step is read, by which count, and where it cannot be used."""

from __future__ import annotations

import pytest

from gradcheck_suite import Plan
from gradcheck_suite.core.text import HEADER
from gradcheck_suite.loops.reset_modes import backward_window, windows
from tests.judge.explaining import as_it_is, double, explained, fail, mix, table_of, then, triple, weight_of

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
    name, sentence, details = explained(_by_items, plan=Plan((1, 2, 3, 2), 4), w=counts)
    assert name == "wrong-count"
    assert "as if every item of theirs counted alike" in sentence
    assert details[1] == HEADER.format(rank="")
    # the third has count 0; right is 1/5 of each, seen n/8 over the count
    assert table_of(details) == [
        ["0", "2", "0.2", "0.0625"],
        ["1", "1", "0.2", "0.25"],
        ["2", "0", "0", "0"],
        ["3", "2", "0.2", "0.125"],
    ]


def test_a_sum_is_read_by_its_items_alone():
    name, sentence, details = explained(then(double), sums=True, w=(2, 1, 1, 1, 1, 1, 1, 1))
    assert name == "wrong-scale"
    assert sentence.startswith("in weight alone, while bias is right: every item of the window weighs 2 times")
    assert len(details) == 1


def test_items_of_a_sum_weigh_one():
    def halve(run):
        for p in run.model.parameters():
            p.grad.mul_(0.5)

    name, sentence, details = explained(then(halve), sums=True)
    assert name == "wrong-scale"
    # K is 2 here, and 3 on the probe that tells it from a constant
    assert "weighs 0.5 times what it should, in every wrong window alike, whatever its counts" in sentence
    assert table_of(details) == [
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
        loop = then(*map(multiplies, factors))
        name, sentence, details = explained(loop, plan=plan, epoch=epoch, window=window)
        assert name == "wrong-scale"
        assert f"weighs {factor} times what it should" in sentence
        table = table_of(details)
        assert [row[2] != "0" for row in table] == [j // 2 == window for j in range(6)]


@pytest.mark.parametrize("window", [0, 1])
def test_a_fault_of_one_parameter_is_read_on_the_same_step(window):
    changes = [as_it_is] * 4
    changes[2 + window] = triple
    name, sentence, _ = explained(then(*changes), plan=Plan((1, 2, 3, 2), 2, 2), window=window, epoch=1)
    assert name == "wrong-scale"
    assert sentence.startswith("in weight alone, while bias is right: every item of the window weighs 3 times")


def test_what_is_left_from_earlier_epochs_is_told_from_a_scale():
    def no_reset(run):
        for window in windows(run):
            backward_window(run, window)
            run.optimizer.step()

    name, sentence, _ = explained(no_reset, plan=Plan((1, 2), 2, 2), epoch=1)
    assert name == "stale-window"
    assert "from earlier epochs" in sentence


# Where the probe cannot be used


def _on_probe(change):
    """Return the linear fault on the case, and on the probe another."""
    return lambda run: mix(run) if weight_of(run) is not None else change(run)


def _infinite(run):
    for p in run.model.parameters():
        p.grad.div_(0)


def _doubles_where_large(run):
    if all(p.grad.abs().max() < 1e-3 for p in run.model.parameters()):
        raise ValueError
    double_all(run)


def double_all(run):
    for p in run.model.parameters():
        p.grad.mul_(2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (fail, "the weight probe cannot be used: the loop raised on it"),
        (_infinite, "on the weight probe, whose gradients are all 1, it is not even finite"),
        (_doubles_where_large, "the items' weights are wrong, and the loop stops if the loss is small"),
        (as_it_is, "on the weight probe the items' weights are right, so the fault depends on the values of the"),
    ],
)
def test_why_the_probe_tells_nothing_is_said(change, says):
    name, sentence, details = explained(then(_on_probe(change)))
    assert name == "not-linear"
    assert says in sentence
    assert len(details) == 1


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("rounding", [True, False])
def test_a_dependence_on_the_gradients_size_is_seen_where_it_is_no_rounding(probe, rounding):
    """On the probe, where weights are 1/3, or on the case alone, 1e-14 of the gradient is rounding and 1e-8 is not."""

    def change(run):
        for p in run.model.parameters():
            if (weight_of(run) is None) == probe:
                p.grad.mul_(1 + p.grad.abs() * (1e-14 if rounding else 1e-8))
        mix(run)

    name, sentence, _ = explained(then(change))
    assert name == "not-linear"
    if rounding:
        assert "on the weight probe the items' weights are right" in sentence
    else:
        said = "large gradients alone are wrong, and too large" if probe else "(clipping, decay, normalizing)"
        assert said in sentence


def test_weights_within_a_micro_batch_are_told_apart_as_soon_as_they_are_no_rounding():
    """One of the first window's second micro-batch's items weighs more by 1e-8, then by 1e-14."""

    def lifts(amount):
        def change(run):
            if weight_of(run) is None:
                next(run.model.parameters()).grad[2] *= 1 + amount
            mix(run)

        return change

    assert explained(then(lifts(1e-8)))[0] == "unequal-items"
    name, sentence, _ = explained(then(lifts(1e-14)))
    assert name == "not-linear"
    assert "the items' weights are right" in sentence
