"""The second process: it changes no verdict and no random number of a loop, and verification goes on without it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from gradcheck_suite import Case, Plan, verify
from gradcheck_suite.core.results import Result
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.run import ranks
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.runner import run_loop
from gradcheck_suite.studies.zoo import BUGS
from gradcheck_suite.verification import ahead
from gradcheck_suite.verification import judge_process as judges
from gradcheck_suite.verification import verify as search
from gradcheck_suite.verification.ahead import Run, answer_to
from gradcheck_suite.verification.check import check, terms_of
from gradcheck_suite.verification.judge_process import running_judge, second_process
from tests.one_problem import LINEAR

FIELDS = [field.name for field in fields(Result) if field.name != "seconds"]


@pytest.fixture(scope="module")
def second():
    """A second process that has started, for all tests that do not end it."""
    with second_process() as judge:
        assert judge is not None
        judge.wait()
        yield judge


@pytest.fixture(autouse=True)
def _none_is_slow(monkeypatch):
    """However busy the machine is, the loop runs on the cases to come."""
    monkeypatch.setattr(ahead, "SLOW_S", float("inf"))


@pytest.fixture
def checked_here(monkeypatch):
    """The cases that this process has checked itself."""
    cases: list[Case] = []

    def counted(loop, case, **options):
        cases.append(case)
        return check(loop, case, **options)

    monkeypatch.setattr(search, "check", counted)
    return cases


def _without(monkeypatch, loop, **options):
    """Return what a verification without the second process finds."""
    with monkeypatch.context() as patch:
        patch.setattr(ahead, "running_judge", lambda: None)
        return verify(loop, **options)


def _shown(result):
    return {name: getattr(result, name) for name in FIELDS}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("zero_", "float64"),
        *(
            pytest.param(*other, marks=pytest.mark.full)
            for other in (("zero_", "bfloat16"), ("grad_scaler", "float16"), ("closure", "float32"))
        ),
    ],
)
def test_a_sound_loop_has_the_same_result(monkeypatch, second, checked_here, name, dtype):
    options = {"examples": 12, "dtype": dtype}
    found = verify(BUILT_IN[name], **options)
    # of the drawn cases, the first alone
    here = len(checked_here)
    assert _shown(found) == _shown(_without(monkeypatch, BUILT_IN[name], **options))
    assert len(checked_here) - here == here + 11


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["mean-of-means", "large-gradients-skipped", "delayed-by-one"],
)
def test_a_fault_has_the_same_name_and_the_same_smallest_case(monkeypatch, second, name):
    found = verify(BUGS[name].loop, examples=40)
    assert not found.holds
    assert _shown(found) == _shown(_without(monkeypatch, BUGS[name].loop, examples=40))


def _is_drawn(run, micro_batches=None):
    """Whether a loop trains `LINEAR`, which the probes do not, on so many micro-batches."""
    drawn = sum(p.numel() for p in run.model.parameters()) == 2
    return drawn and micro_batches in (None, len(run.loader))


def _wrong_for_eight(run):
    (BUGS["mean-of-means"].loop if _is_drawn(run, 8) else BUILT_IN["plain"])(run)


@pytest.mark.full
@pytest.mark.usefixtures("only_linear")
def test_a_fault_of_some_drawn_cases_is_found_where_it_is(monkeypatch, second):
    """The second process can only say that a run holds: a violation is judged here, from the same run."""
    found = verify(_wrong_for_eight, examples=60)
    assert found.found_after > 2
    assert _shown(found) == _shown(_without(monkeypatch, _wrong_for_eight, examples=60))


def test_it_says_nothing_but_that_a_run_holds(second):
    case = Case(LINEAR, Plan((1, 3, 2), 2))
    for loop, holds in ((BUILT_IN["plain"], True), (BUGS["mean-of-means"].loop, False)):
        run = Run(case, run_loop(loop, generated_instance(case)), terms_of(loop))
        answer = answer_to(run)
        assert (answer is not None) == holds == check(loop, case).holds


@pytest.mark.usefixtures("only_linear")
def test_loops_draw_the_same_random_numbers(monkeypatch, second):
    drawn: list[tuple[float, float]] = []

    def loop(run):
        if _is_drawn(run):
            drawn.append((random.random(), float(np.random.random())))
        BUILT_IN["plain"](run)

    assert verify(loop, examples=15).holds
    found = drawn.copy()
    drawn.clear()
    assert _without(monkeypatch, loop, examples=15).holds
    assert found == drawn


@pytest.mark.parametrize("slow_s", [0.0, float("inf")])
@pytest.mark.usefixtures("only_linear")
def test_the_loop_runs_on_cases_in_the_order_in_which_they_are_judged(monkeypatch, second, slow_s):
    """Also where it is slow in some of them: a loop that keeps state has one verdict."""
    run_on: list[str] = []
    judged: list[str] = []

    def noted(loop, instance, **options):
        run_on.append(instance.case.digest)
        # slow in every third case
        monkeypatch.setattr(ahead, "SLOW_S", slow_s if len(run_on) % 3 == 0 else float("inf"))
        return run_loop(loop, instance, **options)

    monkeypatch.setattr(ahead, "run_loop", noted)
    monkeypatch.setattr(ranks, "run_loop", noted)
    assert verify(BUILT_IN["plain"], examples=30, progress=lambda verdict: judged.append(verdict.case.digest)).holds
    assert [digest for digest in run_on if digest in judged] == judged


@pytest.mark.usefixtures("only_linear")
def test_a_slow_loop_is_one_case_ahead(monkeypatch, second):
    monkeypatch.setattr(ahead, "SLOW_S", 0.0)
    runs, most = 0, 0

    def loop(run):
        nonlocal runs
        runs += 1
        BUILT_IN["plain"](run)

    def progress(verdict):
        nonlocal most, judged
        judged += 1
        most = max(most, runs - judged)

    judged = 0
    assert verify(loop, examples=30, progress=progress).holds
    # the probes are runs without progress
    probes = runs - judged
    assert most <= probes + 1


@pytest.mark.usefixtures("only_linear")
def test_what_no_other_process_can_have_is_judged_here(second, checked_here):
    def loop(run):
        for group in run.optimizer.param_groups:
            group["chosen"] = lambda name: name
        BUILT_IN["plain"](run)

    found = verify(loop, examples=15)
    assert found.holds
    assert found.judged == 15
    assert len(checked_here) >= 15


@pytest.mark.full
@pytest.mark.usefixtures("only_linear")
def test_a_loop_that_fails_is_not_run_on_further_cases(second):
    runs: list[int] = []
    seen: list[int] = []

    def loop(run):
        if _is_drawn(run, 8):
            runs.append(1)
            raise RuntimeError("eight")
        if runs:
            runs.append(0)
        BUILT_IN["plain"](run)

    found = verify(loop, examples=60, progress=lambda verdict: verdict.violation and seen.append(len(runs)))
    assert found.violation.kind == "raised"
    assert "eight" in found.violation.explanation
    # no case after it was run before its turn came
    assert seen == [1]


@pytest.mark.full
@pytest.mark.usefixtures("only_linear")
def test_verification_goes_on_where_the_process_ends(monkeypatch):
    monkeypatch.setattr(judges, "_judges", [])  # that of the module
    with second_process() as judge:
        judge.wait()
        judged = 0

        def progress(verdict):
            nonlocal judged
            judged += 1
            if judged == 5:
                os.kill(judge.pid, signal.SIGKILL)

        found = verify(BUILT_IN["plain"], examples=30, progress=progress)
        assert found.holds
        assert found.judged == 30
        assert running_judge() is None
        assert _shown(found) == _shown(_without(monkeypatch, BUILT_IN["plain"], examples=30))


STRANGE = """
import os, sys
import gradcheck_suite
from gradcheck_suite.run import environment
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.verification.judge_process import second_process
from gradcheck_suite.verification.verify import verify

command, runs = os.getpid(), 0

def waits_for_all_children(run):
    BUILT_IN["plain"](run)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return

def forks(run):
    global runs
    runs += 1
    if runs == 30 and os.fork() == 0:
        sys.exit(0)  # `verify` takes it for a fault of the loop: a second copy of this program goes on
    BUILT_IN["plain"](run)

def closes_descriptors(run):
    BUILT_IN["plain"](run)
    os.closerange(3, 300)
    open(os.devnull)

with second_process() as judge:
    judge.wait()
    for loop in (waits_for_all_children, forks, closes_descriptors):
        result = verify(loop, examples=12, time_limit_s=20)
        if os.getpid() != command:
            break
        print(loop.__name__, result.holds, result.judged, flush=True)
os._exit(0)
"""


@pytest.mark.full
def test_a_loop_may_wait_for_children_fork_and_close_descriptors():
    """Each of these reached the second process, or its socket."""
    done = subprocess.run([sys.executable, "-c", STRANGE], capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines() == [
        "waits_for_all_children True 12",
        "forks True 12",
        "closes_descriptors True 12",
    ], done.stderr


@pytest.mark.full
@pytest.mark.parametrize("stopped", ["before a message", "before an answer"])
def test_verification_goes_on_where_the_process_is_stopped(monkeypatch, stopped):
    """Ctrl-Z of another, or a debugger: it neither reads nor answers."""
    monkeypatch.setattr(judges, "_judges", [])
    monkeypatch.setattr(judges, "LIMIT_S", 30)
    with second_process() as judge:
        judge.wait()
        assert judge.pid
        if stopped == "before a message":
            os.kill(judge.pid, signal.SIGSTOP)
        number = judge.send(bytes(10 if stopped == "before an answer" else 10_000_000))
        assert bool(number) == (stopped != "before a message")
        os.kill(judge.pid, signal.SIGSTOP)
        assert judge.answer(number) is None
        assert verify(BUILT_IN["plain"], examples=5).judged == 5


def test_a_verdict_that_nobody_wants_any_more_is_none_on_the_next_case(second):
    case, other = Case(LINEAR, Plan((1, 3, 2), 2)), Case(LINEAR, Plan((1, 3, 2), 3))
    loop = BUILT_IN["plain"]
    prepared = ahead.Ahead(loop, None, terms_of(loop), 30.0, runs=True)
    prepared.prepare(case)
    prepared.forget()
    prepared.prepare(other)
    assert prepared.result(case) == (None, None)
    verdict, _ = prepared.result(other)
    assert verdict.holds
    assert verdict.case == other


ABANDONED = """
import os, sys
from gradcheck_suite.verification.judge_process import second_process
with second_process() as judge:
    judge.wait()
    print(judge.pid, flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_it_ends_with_its_parent(how):
    done = subprocess.run([sys.executable, "-c", ABANDONED, how], capture_output=True, text=True, timeout=120)
    pid = int(done.stdout)
    end = time.monotonic() + 60
    while time.monotonic() < end and os.path.exists(f"/proc/{pid}") and _is_running(pid):
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid):
    try:
        return "second_process" in Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return False


def test_nothing_starts_where_it_is_not_wanted():
    before = list(judges._judges)
    with second_process(wanted=False) as judge:
        assert judge is None
        assert judges._judges == before
