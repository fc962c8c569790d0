"""What a search keeps of the verdicts it is given: which is the fault, which the smallest case, and when to stop."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.core.comparison import Comparison, Layout
from gradcheck_suite.core.results import Verdict, Violation
from gradcheck_suite.errors import UsageError
from gradcheck_suite.strategies.drawing import RedrawError
from gradcheck_suite.verification import verify as module
from gradcheck_suite.verification.verify import EnoughError, Search, StopError, ViolatedError

SPEC = ProblemSpec(Input("vector", size=3), (Layer("linear", bias=True, features=2),), Loss("mse", reduction="mean"))
OWN = Problem(lambda seed: None, lambda items, seed: None, lambda model, batch: None)


def case(micro_batches=4, **changes):
    """Return a case; its size is its number of micro-batches."""
    return Case("own", Plan((1,) * micro_batches, 1), **changes)


def violation(at, name="dropped-micro-batch", kind="gradient", explanation="", **place):
    return Violation(kind, name, explanation, at, **{"epoch": 0, "window": 0, **place})


class Scripted(Search):
    """A search that is told what each check finds."""

    def __init__(self, problem=None, *, progress=None, **options):
        super().__init__(lambda run: None, problem, 5.0, progress, **options)
        self.checks = []
        self.script = Verdict

    def _check(self, case, *, shrinking=False):
        self.checks.append((case, shrinking))
        found = self.script(case)
        return Verdict(case, found) if isinstance(found, Violation) else found

    def shows(self, case, *args, **options):
        """Judge a case that shows a violation; return whether it is the one that is searched for."""
        self.script = lambda case: violation(case, *args, **options)
        return self.takes(case)

    def takes(self, case):
        """Judge a case; return whether it shows the violation that is searched for."""
        try:
            self.judge(case)
        except ViolatedError:
            return True
        return False

    def begun(self, at, *args, **options):
        """Return this search after its first violation."""
        assert self.shows(at, *args, **options)
        return self


@pytest.fixture
def search():
    return Scripted()


# What is counted


def test_what_verdicts_say_is_added_up():
    seen = []
    search = Scripted(OWN, progress=seen.append)
    verdicts = [
        Verdict(case(1), ratio=0.5, windows=2, windows_skipped={"far": 1}, moved_by_zeros="by zeros"),
        Verdict(case(2), ratio=0.25, windows=3, windows_skipped={"far": 2, "odd": 1}),
        Verdict(case(3), skipped="no such operation", ratio=0.125),
        Verdict(case(4), finding="torch and JAX differ", ratio=0.75),
        Verdict(case(5), skipped="no such operation"),
    ]
    for verdict in verdicts:
        search.script = lambda case, verdict=verdict: verdict
        assert not search.takes(verdict.case)
    assert (search.cases, search.judged, search.windows, search.ratio) == (5, 2, 5, 0.75)
    assert dict(search.windows_skipped) == {"far": 3, "odd": 1}
    assert dict(search.skipped) == {"no such operation": 2}
    assert [*search.findings] == ["torch and JAX differ"]
    assert search.moved_by_zeros == ["by zeros"]
    assert search.users_cases == [case(1), case(2)]
    assert seen == verdicts
    assert search.checks == [(verdict.case, False) for verdict in verdicts]
    assert search.violation is None
    assert search.found_after is None
    assert not search.found


def test_the_case_that_shows_a_fault_is_counted_and_those_of_shrinking_are_not(search):
    assert not search.takes(case(9))
    search.begun(case(8))
    assert (search.cases, search.found_after) == (2, 2)
    assert search.shows(case(7))
    assert (search.cases, search.found_after) == (2, 2)
    assert search.checks == [(case(9), False), (case(8), False), (case(8), True), (case(7), True)]
    assert search.found


def test_a_users_error_ends_the_search(search):
    def fails(case):
        raise UsageError("a wrong problem")

    search.script = fails
    with pytest.raises(StopError) as stop:
        search.judge(case())
    assert str(stop.value.error) == "a wrong problem"


# The first violation


def test_a_violation_with_one_name_on_its_own_and_another_in_further_runs_is_not_the_one(search):
    answers = iter(["wrong-scale", "stale-window"])
    search.script = lambda case: violation(case, next(answers))
    assert not search.takes(case())
    assert not search.found
    assert search.violation.diagnosis == "wrong-scale"
    # the next one is, although that was the first
    assert search.shows(case(3), "first-only")
    assert search.violation.diagnosis == "first-only"
    assert search.found_after == 1


def test_a_fault_that_moved_parameters_hide_is_searched_for_where_they_stay():
    search = Scripted(moves_by_chance=True)
    search.begun(case(optimizer="sgd"))
    assert search.violation.case == case()
    search = Scripted(moves_by_chance=True)
    search.script = lambda case: violation(case) if case.optimizer else Verdict(case)
    assert search.takes(case(optimizer="sgd"))
    assert search.violation.case.optimizer == "sgd"
    assert [found.optimizer for found, _ in search.checks] == ["sgd", None, "sgd"]
    search = Scripted(moves_by_chance=True)
    assert not search.takes(case(optimizer="sgd"))
    assert len(search.checks) == 1
    search = Scripted()
    search.begun(case(optimizer="sgd"))
    assert search.violation.case.optimizer == "sgd"


# Shrinking


def test_a_smaller_case_shows_the_fault_where_it_has_its_kind_and_its_name(search):
    search.begun(case(9))
    assert search.shows(case(8))
    assert search.shows(case(8), "")  # not named while shrinking
    assert search.shows(case(8), "first-only or dropped-micro-batch")
    assert not search.shows(case(7), "first-only")
    assert not search.shows(case(7), kind="none-pattern")
    assert not search.shows(case(7), kind="step-count")


def test_of_a_violation_without_a_name_all_are_the_same_but_what_a_large_case_would_show():
    search = Scripted().begun(case(9), "not-linear")
    assert search.shows(case(8), "")
    assert search.shows(case(7), "clipped")
    assert not search.shows(case(6), "wrong-scale")


def test_a_wrong_number_of_steps_is_the_same_whatever_it_is():
    search = Scripted().begun(case(9), "steps-per-micro-batch", "step-count")
    assert search.shows(case(8), "stops-early", "step-count")
    assert not search.shows(case(7), "stops-early", "gradient")


def _of_one_parameter(at, right):
    """Return a violation of `w` alone, where the other parameter's right gradient is a number."""
    layout = Layout(("w", "v"), ((1,), (1,)))
    expected = np.array([1.0, right])
    evidence = Comparison(layout, expected, expected + np.array([1.0, 0.0]), np.full(2, 1e-9))
    return violation(at, "wrong-scale", explanation="in w alone, while v is right: 2 times", evidence=evidence)


def test_a_fault_of_some_parameters_needs_another_that_is_right(search):
    search.script = lambda case: _of_one_parameter(case, 1.0)
    assert search.takes(case(9))
    assert search.takes(case(8))
    search.script = lambda case: _of_one_parameter(case, 0.0)
    assert not search.takes(case(7))


def test_only_smaller_cases_become_the_smallest(search):
    search.begun(case(9))
    for size in (6, 8, 3, 5):
        assert search.shows(case(size))
    search.settle()
    assert search.violation.case == case(3)
    # of the trail 9, 6, 3 the last one is diagnosed at once
    assert search.checks[-1] == (case(3), False)
    assert not search.search_small()


def test_of_cases_of_one_size_the_first_is_kept(search):
    search.begun(case(9))
    assert search.shows(case(5, seed=1))
    assert search.shows(case(5, seed=2))
    search.settle()
    assert search.violation.case == case(5, seed=1)
    assert search.search_small()
    assert search.shows(case(5, seed=3))
    search.settle()
    assert search.violation.case == case(5, seed=1)


@pytest.mark.parametrize("other", [2, 3, 4, 5, 6, 7, 8])
def test_the_smallest_case_that_still_shows_the_fault_is_bisected(search, other):
    """From `other` micro-batches on it is the first fault, and below another one that shrinking cannot tell from it."""
    search.begun(case(9))
    for size in (8, 7, 6, 5, 4, 3, 2):
        assert search.shows(case(size), "")
    search.checks.clear()
    search.script = lambda at: violation(at, "dropped-micro-batch" if size_is(at, other) else "first-only")
    search.settle()
    assert search.violation.case == case(other)
    assert len(search.checks) <= (1 if other == 2 else 4)  # the smallest first
    assert all(not shrinking for _, shrinking in search.checks)
    # where shrinking wandered to another fault, small cases are drawn anew
    assert search.search_small() is (other > 2)


def size_is(at, least):
    return len(at.plan.micro_batches) >= least


def test_a_case_that_shows_nothing_when_it_is_diagnosed_is_not_the_smallest(search):
    search.begun(case(9))
    assert search.shows(case(3))
    search.script = Verdict
    search.settle()
    assert search.violation.case == case(9)


@pytest.mark.parametrize(("seconds", "stops"), [(30.0, False), (30.001, True)])
@pytest.mark.parametrize("settled", [False, True])
def test_shrinking_has_thirty_seconds(search, monkeypatch, seconds, stops, settled):
    monkeypatch.setattr(module.Stopwatch, "passed", lambda self: seconds)
    search.begun(case(9))  # the first case takes as long as it takes
    if settled:
        search.settle()
    assert search.shows(case(8)) is not stops
    assert search.stopped == ("shrinking stopped after 30 s, so a smaller case may exist" if stops else None)


# Gradients that the loop assumes to be finite


def test_a_case_outside_what_the_loop_assumes_is_drawn_anew_up_to_eight_times(monkeypatch):
    search = Scripted(assumes=frozenset({"finite-gradients"}))
    monkeypatch.setattr(module, "starts_finite", lambda case, problem: len(case.plan.micro_batches) == 1)
    for _ in range(2):
        for size in range(2, 9):
            with pytest.raises(RedrawError):
                search.judge(case(size))
        search.checks.clear()
        search.judge(case(9))
        assert search.checks == [(case(9), False)]
    with pytest.raises(RedrawError):
        search.judge(case(2))
    search.judge(case(1))  # from here on they are counted anew
    for size in range(2, 9):
        with pytest.raises(RedrawError):
            search.judge(case(size))
    search.judge(case(9))


# Small cases


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
def test_small_cases_are_drawn_where_the_smallest_is_large(search, layers, plan, is_large):
    problem = ProblemSpec(SPEC.input, SPEC.layers * layers, SPEC.loss)
    search.begun(Case(problem, plan))
    search.settle()
    assert search.search_small() is is_large


@pytest.mark.parametrize("name", ["dropped-micro-batch", "rounded-weights", "not-linear"])
def test_a_small_case_replaces_the_smallest_only_where_it_is_smaller(name):
    for size, kept in ((3, 3), (5, 5), (6, 5), (7, 5)):
        search = Scripted().begun(case(5), name)
        search.settle()
        assert search.search_small()
        assert search.shows(case(size), name)
        search.settle()
        assert search.violation.case == case(min(size, kept))


@pytest.mark.parametrize("name", ["clipped", "rounded-weights"])
def test_a_small_case_that_names_the_fault_replaces_one_that_does_not(name):
    search = Scripted().begun(case(5), "not-linear")
    search.settle()
    assert search.shows(case(6), name)
    search.settle()
    assert search.violation.diagnosis == name
    search = Scripted().begun(case(5), "clipped")
    search.settle()
    assert not search.shows(case(6), "not-linear")


def test_after_wandering_the_shape_of_the_window_is_kept():
    """In the second of two windows; a case of one window that shows the fault may show the other one."""
    search = Scripted().begun(case(9), window=1)
    assert search.shows(case(8), "", window=0)
    search.script = lambda at: violation(at, "first-only", window=0)
    search.settle()
    assert search.search_small()
    assert search.shows(case(7), window=1)
    assert not search.shows(case(6), "", window=0)
    assert search.shows(case(6), "", window=1)
    assert search.shows(case(5), window=0)  # which has a name
    assert not search.shows(case(4), "", window=0)
    assert search.shows(case(4), "", window=1)


# The probes' faults


def _probed(name="dropped-micro-batch", final=False, **options):
    search = Scripted(**options)
    search._on_probe, search._final = violation(probe_case(Plan((1, 1), 2)), name), final
    return search


def _until_enough(search, most=200):
    """Return after how many cases the search ends by itself."""
    for number in range(1, most):
        try:
            search.takes(case(number))
        except EnoughError:
            return number
    return None


def test_fifty_cases_are_searched_for_a_probes_fault():
    assert _until_enough(_probed()) == 50
    assert _until_enough(Scripted(), 60) is None


@pytest.mark.parametrize("first", [1, 10, 50])
def test_twenty_more_are_searched_where_another_fault_is_found_first(first):
    search = _probed()
    search.script = lambda at: violation(at, "first-only") if len(at.plan.micro_batches) == first else Verdict(at)
    assert _until_enough(search) == first + 20
    assert search.found_after == first
    assert search.violation.diagnosis == "first-only"
    # then that one is searched for
    assert search.turn_to_other_fault()
    assert not search.found
    assert search.shows(case(5), "first-only")
    assert search.violation.case == case(5)
    assert not search.turn_to_other_fault()
    assert search.cases == first + 20


# The run
