"""The budget of an audit: which windows are judged, what is seen in them, and what is kept of the
others.
"""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
import torch
from torch.nn import functional

import gradcheck_suite

FRUGAL = "0.001%"
"""A budget that pays for nothing, so that the windows that are judged do not depend on the machine."""
FAULTS = "mean-of-means", "stale-window", "reset-inside-window"
SIZES = 6, 4
"""Items of the micro-batches of a window."""


def _classifier(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def _loss(model, size, *, reduction):
    return functional.cross_entropy(
        model(torch.randn(size, 5)), torch.randint(0, 3, (size,)), reduction=reduction
    )


def _audited(windows, fault=None, begins=300, *, to_none=True, seen=lambda window: None, **options):
    """Audit windows of two micro-batches; the fault is in all from one on."""
    model = _classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradcheck_suite.audit(quiet=True, **options) as audit:
        for window in range(windows):
            now = fault if window >= begins else None
            for index, size in enumerate(SIZES):
                mean = _loss(model, size, reduction="mean") / len(SIZES)
                loss = mean if now == "mean-of-means" else mean * len(SIZES) * size / sum(SIZES)
                loss.backward()
                if index == 0 and now == "reset-inside-window":
                    optimizer.zero_grad(to_none)
            optimizer.step()
            if now != "stale-window":
                optimizer.zero_grad(to_none)
            seen(window)
    return audit


@pytest.mark.parametrize(
    "to_none",
    [True, pytest.param(False, marks=pytest.mark.full)],
    ids=["set to None", "set to zeros"],
)
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_fault_that_begins_late_is_found_in_the_pair_that_is_judged_whatever_it_costs(
    fault, to_none
):
    """Window 517 tells what stands in `.grad`, so that 518 and 519 are judged."""
    result = _audited(530, fault, to_none=to_none, budget=FRUGAL, without=("batch",)).result
    assert {v.diagnosis for v in result.violations} == ({fault} if fault else set()), result
    assert [v.step for v in result.violations] == [518] * bool(fault)
    assert [v.occurrences for v in result.violations] == [2] * bool(fault)
    assert not any("not judged" in finding for finding in result.findings), result.findings


def test_there_is_a_pair_in_each_500_windows_and_it_is_said_how_many_were_judged():
    result = _audited(1500, "mean-of-means", budget=FRUGAL, without=("batch",)).result
    assert [(v.diagnosis, v.step, v.occurrences) for v in result.violations] == [
        ("mean-of-means", 518, 4)
    ], result
    assert (result.windows, result.steps) == (24, 1500)
    assert result.windows_skipped == {f"budget {FRUGAL}": 1476}
    assert f"judged 24 of 1,500 windows (budget {FRUGAL})" in str(result)


def test_a_fault_in_windows_that_are_only_counted_is_not_passed_as_judged():
    result = _audited(400, "mean-of-means", budget=FRUGAL, without=("batch",)).result
    assert (result.verdict, result.windows, result.windows_skipped) == (
        "holds",
        20,
        {f"budget {FRUGAL}": 380},
    )


@pytest.mark.parametrize("options", [{"budget": "none"}, {"every": 7}, {"budget": "100%"}])
def test_every_window_is_judged_without_a_budget_or_where_it_pays_for_all(options):
    result = _audited(60, "stale-window", begins=57, without=("batch",), **options).result
    assert (result.windows, result.windows_skipped) == (60, {})
    assert [(v.diagnosis, v.step) for v in result.violations] == [("stale-window", 58)]


def test_the_first_three_windows_are_computed_again_and_later_ones_where_the_budget_pays():
    assert sum(_audited(60, budget=FRUGAL).result.again.values()) == 3
    assert sum(_audited(60, budget="none").result.again.values()) == 6


def test_the_short_last_window_of_an_epoch_is_judged_from_the_second_one_on():
    model = _classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradcheck_suite.audit(quiet=True, budget=FRUGAL, without=("batch",)) as audit:
        for _ in range(3):
            for window in range(150):
                for _ in range(1 if window == 149 else 4):
                    (_loss(model, 4, reduction="mean") / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
    result = audit.result
    assert [(v.diagnosis, v.step) for v in result.violations] == [("wrong-scale", 299)], result
    assert result.windows == 20 + 2 * 2


def test_what_goes_backward_after_the_last_step_is_said_where_it_was_only_counted():
    def audited(tail):
        model = _classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with gradcheck_suite.audit(quiet=True, budget=FRUGAL, without=("batch",)) as audit:
            for number in range(30 * 4 + tail):
                (_loss(model, 4, reduction="mean") / 4).backward()
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
        return [
            finding
            for finding in audit.result.findings
            if "backward after the last step" in finding
        ]

    assert audited(0) == []
    (said,) = audited(2)
    assert said.startswith("2 calls of backward")


def test_steps_end_an_audit_that_only_counts_too():
    result = _audited(
        60, "stale-window", begins=40, steps=30, budget=FRUGAL, without=("batch",)
    ).result
    assert (result.verdict, result.windows, result.steps) == ("holds", 20, 30)


@pytest.mark.full
def test_windows_of_two_optimizers_are_judged_in_pairs_of_each():
    """One optimizer steps five times as often as the other one, whose loss leads through its
    parameters.
    """

    def audited(faulty):
        critic, actor = _classifier(), torch.nn.Linear(5, 5)
        of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
        of_actor = torch.optim.SGD(actor.parameters(), lr=0.01)
        with gradcheck_suite.audit(quiet=True, budget=FRUGAL, without=("batch",)) as audit:
            for number in range(240):
                for _ in range(5):
                    of_critic.zero_grad()
                    _loss(critic, 4, reduction="mean").backward()
                    of_critic.step()
                if number < 50 or not faulty:
                    of_actor.zero_grad()
                _loss(lambda x: critic(actor(x)), 4, reduction="mean").backward()
                of_actor.step()
        return audit.result

    sound = audited(False)
    assert not sound.violations, sound
    assert 20 + 2 * 2 * 6 <= sound.windows <= 100
    found = audited(True)
    assert [v.diagnosis for v in found.violations] == ["stale-window"], found
    assert found.violations[0].step > 300


@pytest.mark.full
def test_a_closure_is_judged_again_after_windows_that_were_only_counted():
    model = _classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def audited(faulty):
        calls = itertools.count()

        def closure():
            if not faulty or next(calls) < 100:
                optimizer.zero_grad()
            loss = _loss(model, 4, reduction="mean")
            loss.backward()
            return loss

        with gradcheck_suite.audit(quiet=True, budget=FRUGAL, without=("batch",)) as audit:
            for _ in range(530):
                optimizer.step(closure)
        return audit.result

    sound = audited(False)
    assert (sound.verdict, sound.windows, sound.findings) == ("holds", 22, ())
    assert [v.diagnosis for v in audited(True).violations] == ["stale-window"]


@pytest.mark.share(4)
def test_the_memory_of_an_audit_does_not_grow_with_the_windows_that_are_counted():
    used = {}

    def seen(window):
        if window in (299, 599):
            used[window] = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(True, "*gradcheck_suite/*")]
            )

    tracemalloc.start()
    try:
        _audited(600, seen=seen, without=("batch",), budget=FRUGAL)
    finally:
        tracemalloc.stop()
    before, after = (
        sum(each.size for each in used[window].statistics("filename")) for window in (299, 599)
    )
    assert after - before < 50_000, (before, after)
