"""What a search keeps of the verdicts it is given: what is the fault, which the smallest case, and
when to stop.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import replace

import pytest

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec, verify
from gradcheck_suite.core.case import is_probe, probe_case, slopes_text
from gradcheck_suite.core.options import VerifyOptions
from gradcheck_suite.core.results import Verdict, Violation, Weight
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.strategies.drawing import RedrawError
from gradcheck_suite.verification import search as module
from gradcheck_suite.verification.search import (
    LADDER,
    SearchState,
    StopError,
    ViolatedError,
    more_specific,
    smallest_probe,
)
from studies.zoo import BUGS

SPEC = ProblemSpec(
    Input("vector", size=3),
    (Layer("linear", bias=True, features=2),),
    Loss("mse", reduction="mean"),
)
OWN = Problem(lambda seed: None, lambda items, seed: None, lambda model, batch: None)
DRAWN, SMALL = object(), object()
"""Stand for the strategies of cases, and of small ones."""


def case(micro_batches=4, **changes):
    """Return a case; its size is its number of micro-batches."""
    return Case("own", Plan((1,) * micro_batches, 1), **changes)


def violation(at, name="dropped-micro-batch", kind="gradient", explanation="said", **place):
    return Violation(kind, name, explanation, at, **{"epoch": 0, "window": 0, **place})


class Scripted(SearchState):
    """A search that is told what each check finds."""

    def __init__(self, problem=None, *, progress=None, assumes=frozenset(), **options):
        loop = MODES["set_to_none"]
        super().__init__(loop, problem, VerifyOptions(**options).of(loop), progress, None, assumes)
        self.checks = []
        self.script = Verdict

    def check(self, case, *, shrinking=False):
        self.checks.append((case, shrinking))
        found = self.script(case)
        return Verdict(case, found) if isinstance(found, Violation) else found


@pytest.fixture
def run(monkeypatch):
    """Run a scripted search on the cases that are drawn.

    All further ones are tried to make the violated one smaller. Returns a function of the search,
    the drawn cases and the small ones.
    """

    def run(search, drawn=(), small=(), fixed=None, *, probes=False):
        def on_cases(judge, strategy, *, examples, seed_value, prepare):
            for_these = iter((drawn if strategy is DRAWN else small)[:examples])
            for one in for_these:
                try:
                    judge(one)
                except ViolatedError:
                    for smaller in for_these:
                        with suppress(ViolatedError):
                            judge(smaller)
                    raise

        monkeypatch.setattr(module, "run_on_cases", on_cases)
        search.run(DRAWN, SMALL, fixed, probes=probes)
        return search

    return run


def names(**by_size):
    """Return a script: a violation for each number of micro-batches, as `n4="gradient/clipped"`."""

    def script(at):
        found = by_size.get(f"n{len(at.plan.micro_batches)}")
        return Verdict(at) if found is None else violation(at, *reversed(found.split("/")))

    return script


# What is counted


def test_what_verdicts_say_is_added_up(run):
    seen = []
    search = Scripted(OWN, progress=seen.append)
    verdicts = [
        Verdict(
            case(1), ratio=0.5, windows=2, windows_skipped={"far": 1}, moved_by_zeros="by zeros"
        ),
        Verdict(case(2), ratio=0.25, windows=3, windows_skipped={"far": 2, "odd": 1}),
        Verdict(case(3), skipped="no such operation", ratio=0.125),
        Verdict(case(4), finding="torch and JAX differ", ratio=0.75),
        Verdict(case(5), skipped="no such operation"),
    ]
    search.script = lambda at: verdicts[len(at.plan.micro_batches) - 1]
    run(search, [verdict.case for verdict in verdicts])
    tally = search.tally
    assert (tally.cases, tally.judged, tally.windows, tally.ratio) == (5, 2, 5, 0.75)
    assert dict(tally.windows_skipped) == {"far": 3, "odd": 1}
    assert dict(tally.skipped) == {"no such operation": 2}
    assert [*tally.findings] == ["torch and JAX differ"]
    assert tally.moved_by_zeros == ["by zeros"]
    assert tally.users_cases == [case(1), case(2)]
    assert seen == verdicts
    assert search.checks == [(verdict.case, False) for verdict in verdicts]
    assert search.violation is None
    assert search.found_after is None


def test_the_case_that_shows_a_fault_is_counted_and_those_of_shrinking_are_not(run):
    search = Scripted()
    search.script = names(n3="gradient/clipped", n2="gradient/clipped")
    run(search, [case(4), case(3), case(2), case(1)])
    assert (search.tally.cases, search.found_after) == (2, 2)
    # named on the case that showed it and on the smallest one, and on no other
    assert search.checks == [
        (case(4), False),
        (case(3), False),
        (case(2), True),
        (case(1), True),
        (case(2), False),
    ]
    assert search.violation.case == case(2)


def test_a_users_error_ends_the_search(run):
    def fails(case):
        raise UsageError("a wrong problem")

    search = Scripted()
    search.script = fails
    with pytest.raises(StopError) as stop:
        run(search, [case()])
    assert str(stop.value.error) == "a wrong problem"


@pytest.mark.parametrize("name", ["mean-of-means", "clip-per-micro-batch"])
def test_every_run_of_the_loop_is_counted(name):
    calls = []
    loop = BUGS[name].loop

    @functools.wraps(loop)
    def counted(run):
        calls.append(run)
        loop(run)

    result = verify(counted, examples=10)
    assert result.violation is not None
    assert result.runs == len(calls)
    assert result.to_json()["runs"] == len(calls)


# Shrinking


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_a_fault_that_moved_parameters_hide_is_searched_for_where_they_stay(run, optimizer):
    search = Scripted(optimizer=optimizer)
    search.script = violation
    run(search, [case(2, optimizer="sgd")])
    assert search.violation.case.optimizer == optimizer
    search = Scripted()
    search.script = lambda at: violation(at) if at.optimizer else Verdict(at)
    run(search, [case(2, optimizer="sgd")])
    assert search.violation.case.optimizer == "sgd"


def test_a_smaller_case_shows_the_fault_where_it_has_its_kind_whatever_its_name(run):
    search = Scripted()
    search.script = names(
        n9="gradient/clipped", n8="gradient/", n7="raised/raised", n6="step-count/clipped"
    )
    run(search, [case(n) for n in (9, 8, 7, 6)])
    assert search.violation.case == case(8)
    # and of those the first of the smallest
    search = Scripted()
    search.script = violation
    run(search, [case(9), case(2, seed=1), case(5), case(2, seed=2)])
    assert search.violation.case == case(2, seed=1)


def test_a_case_that_shows_nothing_when_it_is_named_is_not_the_smallest(run):
    search = Scripted()
    search.script = lambda at: (
        Verdict(at) if (at, True) in search.checks[:-1] else violation(at, "clipped")
    )
    assert run(search, [case(3), case(2)]).violation.diagnosis == "clipped"


@pytest.mark.parametrize(("seconds", "stops"), [(30.0, False), (30.001, True)])
def test_shrinking_has_thirty_seconds(run, monkeypatch, seconds, stops):
    monkeypatch.setattr(module.ProcessorStopwatch, "passed", lambda self: seconds)
    search = Scripted()
    search.script = violation
    run(search, [case(9), case(2)])  # the first case takes as long as it takes
    assert search.violation.case == case(9 if stops else 2)
    assert search.stopped == (
        "shrinking stopped after 30 s, so a smaller case may exist" if stops else None
    )


def test_a_case_outside_what_the_loop_assumes_is_drawn_anew_up_to_eight_times(run, monkeypatch):
    search = Scripted(assumes=frozenset({"finite-gradients"}))
    monkeypatch.setattr(
        module, "starts_finite", lambda case, problem: len(case.plan.micro_batches) == 1
    )
    for first in (2, 1, 2):
        for size in range(first, 9):
            if size == 1:
                run(search, [case(1)])  # from here on they are counted anew
                continue
            with pytest.raises(RedrawError):
                run(search, [case(size)])
        search.checks.clear()
        run(search, [case(9)])
        assert search.checks == [(case(9), False)]


@pytest.mark.parametrize(
    ("layers", "plan", "is_large"),
    [
        (1, Plan((1,) * 3, 1), False),
        (2, Plan((1,) * 3, 1), False),
        (3, Plan((1,) * 3, 1), True),
        (1, Plan((1,) * 4, 1), True),
        (1, Plan((1,) * 6, 1, ranks=(3, 3)), False),
        (1, Plan((1,) * 7, 1, ranks=(4, 3)), True),
    ],
)
def test_small_cases_are_drawn_where_the_smallest_is_large(run, layers, plan, is_large):
    problem = ProblemSpec(SPEC.input, SPEC.layers * layers, SPEC.loss)
    small = Case(SPEC, Plan((1,), 1))
    search = Scripted()
    search.script = violation
    run(search, [Case(problem, plan)], [small])
    assert ((small, True) in search.checks) is is_large
    assert (search.violation.case == small) is is_large


# Which of two names stands


LARGE, LITTLE = case(9), case(2)


@pytest.mark.parametrize(
    ("first", "smallest", "stands"),
    [
        ("mean-of-means", "mean-of-means", "mean-of-means"),
        ("mean-of-means", "wrong-scale", "mean-of-means"),
        ("clipped", "no-gradient", "clipped"),
        ("clipped", "projected-gradient", "clipped"),
        ("not-linear", "clipped", "clipped"),
        ("unrecognised-weights", "clipped", "clipped"),
        # on a small case a name of weights fits by chance
        ("not-linear", "wrong-scale", "not-linear"),
        ("unrecognised-weights", "first-only", "unrecognised-weights"),
        ("partial-gradient", "not-linear", "partial-gradient"),
    ],
)
def test_the_name_of_the_larger_case_stands_unless_it_is_general(first, smallest, stands):
    found = more_specific(
        violation(LARGE, first, explanation="in the large"), violation(LITTLE, smallest)
    )
    assert (found.diagnosis, found.case) == (stands, LITTLE)
    if stands == first != smallest:
        assert found.explanation == f"in the large (named on a larger case, {LARGE.plan!r})"
        assert found.details[-1] == f"on this case alone the fault would be {smallest}: said"


@pytest.mark.parametrize(
    ("observed", "smallest", "stands"),
    [
        (0.9, "wrong-scale", "unrecognised-weights"),
        (0.9, "clipped", "clipped"),
        (0.0, "wrong-scale", "no-gradient"),
    ],
)
def test_a_name_that_the_shown_case_contradicts_does_not_stand(observed, smallest, stands):
    """Nothing is in the gradient of the larger case; on this one a micro-batch may be."""
    row = Weight(micro_batch=0, where="loop.py:1", count=1.0, expected=1.0, observed=observed)
    shown = replace(violation(LITTLE, smallest), weights=(row,))
    found = more_specific(violation(LARGE, "no-gradient"), shown)
    assert (found.diagnosis, found.case) == (stands, LITTLE)


def test_a_violation_of_another_kind_takes_no_name():
    first = violation(LARGE, "never-stepped", "step-count")
    assert more_specific(first, violation(LITTLE, "clipped")) is first


# What a probe shows


def _probed(name, *, final=False, sloped=False, problem=None, **options):
    slopes = slopes_text((2.0, 0.5)) if sloped else ""
    search = Scripted(problem, **options)
    search.on_probes = lambda: (violation(probe_case(Plan((1, 1), 2), slopes=slopes), name), final)
    search._sloped = sloped
    return search


MANY = [case(1, seed=seed) for seed in range(200)]


@pytest.mark.parametrize(
    ("name", "options", "drawn"),
    [
        ("unequal-items", {}, 50),  # general: drawn cases may say more
        ("unequal-items", {"final": True}, 20),
        ("dropped-micro-batch", {"final": True}, 0),
        ("clipped", {"final": True, "sloped": True}, 20),
        ("clipped", {"final": True, "sloped": True, "problem": OWN}, 0),
        ("timed-out", {}, 0),
        ("unequal-items", {"examples": 7}, 7),
    ],
)
def test_so_many_cases_are_drawn_for_what_a_probe_shows(run, name, options, drawn):
    search = run(_probed(name, **options), MANY, probes=True)
    assert search.tally.cases == drawn
    assert search.violation.diagnosis == name


def test_a_named_fault_of_weights_is_shown_on_the_ladder(run):
    search = _probed("dropped-micro-batch")
    search.script = lambda at: (
        violation(at, "first-only" if len(at.plan.micro_batches) < 3 else "dropped-micro-batch")
        if at.plan.accumulation_steps == 2
        else Verdict(at)
    )
    run(search, MANY, probes=True)
    # the first rung with the same name, before one of the same kind
    assert search.violation.case.plan == Plan((1, 1, 1), 2)
    assert search.violation.diagnosis == "dropped-micro-batch"
    assert (search.tally.cases, search.found_after) == (0, 0)
    assert [shrinking for _, shrinking in search.checks].count(False) == 1


@pytest.mark.parametrize("uneven", ["dropped-micro-batch", "wrong-scale", "deadlock"])
def test_a_rank_with_fewer_micro_batches_is_a_smaller_case_of_the_same_fault_alone(run, uneven):
    """Else ranks have equal numbers from there on: a loop that waits takes seconds each time."""
    search, tried = _probed("dropped-micro-batch", ranks=2), []

    def script(at):
        if at.plan.accumulation_steps == 1:
            return Verdict(at)
        if len({*at.plan.ranks}) == 1:
            return violation(at, "") if at.plan.ranks > (2, 2) else Verdict(at)
        tried.append(at)
        return violation(at, uneven, "raised" if uneven == "deadlock" else "gradient")

    search.script = script
    run(search, MANY, probes=True)
    assert search.violation.case.plan.ranks == (
        (2, 1) if uneven == "dropped-micro-batch" else (3, 3)
    )
    assert len({*tried}) == 1


def test_a_rung_of_the_same_kind_keeps_the_probes_name(run):
    search = _probed("dropped-micro-batch")
    search.script = lambda at: (
        violation(at, "wrong-scale") if len(at.plan.micro_batches) == 4 else Verdict(at)
    )
    run(search, MANY, probes=True)
    assert search.violation.case.plan == LADDER[-1]
    assert search.violation.diagnosis == "dropped-micro-batch"
    # where no rung shows it, cases are drawn
    search = run(_probed("dropped-micro-batch"), MANY, probes=True)
    assert search.tally.cases == 50
    assert is_probe(search.violation.case)


def test_a_fault_of_ordinary_gradients_is_plainer_than_one_of_large_ones(run):
    for name, kept in (("partial-gradient", "partial-gradient"), ("not-linear", "clipped")):
        search = _probed("clipped", final=True, sloped=True)
        search.script = lambda at, name=name: violation(at, name)
        assert run(search, MANY, probes=True).violation.diagnosis == kept


def test_a_sound_loop_passes_the_ladder():
    """Every rung is within the contract, for each assumption that changes plans and over ranks."""
    loop = MODES["set_to_none"]
    for assumes in ((), ("whole-windows",), ("equal-batches",), ("one-epoch",)):
        search = SearchState(loop, None, VerifyOptions().of(loop), None, None, frozenset(assumes))
        search.script = None
        seen = violation(probe_case(Plan((1, 1), 2)))
        assert not search.on_ladder(seen)
    assert search.runs >= 3


def test_a_probe_that_the_assumptions_keep_from_getting_smaller_is_not_tried_again_and_again():
    def keeps_short_window(run):
        for _ in range(run.epochs):
            for i, batch in enumerate(run.loader):
                (run.loss(run.model, batch) / run.accumulation_steps).backward()
                if (i + 1) % run.accumulation_steps == 0:
                    run.optimizer.step()
                    run.optimizer.zero_grad()

    assumes = frozenset(("equal-batches", "mean-reduction"))
    search = SearchState(
        keeps_short_window, None, VerifyOptions().of(keeps_short_window), None, None, assumes
    )
    long = search.check(probe_case(Plan((2, 2, 2, 2, 2), 2, 2))).violation
    runs = search.runs
    smallest, _ = smallest_probe(
        lambda case: search.check(case, shrinking=True), long, assumes, 5.0
    )
    # no micro-batch has another size than 2, so nothing else can be smaller
    assert smallest.case.plan == Plan((2, 2, 2), 2)
    assert search.runs - runs <= 10


def test_a_deadlock_is_shrunk_by_small_cases_alone(run, monkeypatch):
    monkeypatch.setattr(module.ProcessorStopwatch, "passed", lambda self: 0.1)
    search = Scripted()
    search.script = names(n9="raised/deadlock", n8="raised/deadlock", n2="raised/deadlock")
    run(search, [case(9), case(8)], [case(2)])
    assert [size for at, _ in search.checks if (size := len(at.plan.micro_batches)) == 8] == []
    assert search.violation.case == case(2)


@pytest.mark.full
def test_the_same_seed_finds_the_same_smallest_case():
    first, second = (verify(BUGS["mean-of-means"].loop) for _ in range(2))
    assert first.violation.case == second.violation.case
    assert first.violation.found_after == second.violation.found_after
