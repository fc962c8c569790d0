"""The second process: it changes no verdict and no random number of a loop, and verification goes
on without it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from gradcheck_suite import Case, Plan, verify
from gradcheck_suite.bridge.op_table import _TABLE
from gradcheck_suite.core.case import is_probe
from gradcheck_suite.core.contract import Problem
from gradcheck_suite.core.results import Result
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.reset_modes import BUILT_IN
from gradcheck_suite.run import ranks
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.processes import may_fork
from gradcheck_suite.run.ranks import packed, unpacked
from gradcheck_suite.run.runner import run_loop
from gradcheck_suite.verification import ahead, search
from gradcheck_suite.verification import judge_process as judges
from gradcheck_suite.verification.ahead import LoopRun, answer_to
from gradcheck_suite.verification.check import check, rules_of
from gradcheck_suite.verification.judge_process import running_judge, second_process
from gradcheck_suite.verification.second_opinion import second_opinion
from studies.zoo import BUGS
from tests.faults.torch_kernels import tanh_backward
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
@pytest.mark.parametrize(("name", "dtype"), [("zero_", "float64"), ("grad_scaler", "float16")])
def test_a_sound_loop_has_the_same_result(monkeypatch, second, checked_here, name, dtype):
    options = {"examples": 12, "dtype": dtype}
    found = verify(BUILT_IN[name], **options)
    # of the drawn cases, the first alone
    here = len(checked_here)
    assert _shown(found) == _shown(_without(monkeypatch, BUILT_IN[name], **options))
    assert len(checked_here) - here == here + 11


@pytest.mark.full
@pytest.mark.parametrize("name", ["mean-of-means", "large-gradients-skipped", "delayed-by-one"])
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
    """The second process can only say that a run holds: a violation is judged here, from the same
    run.
    """
    found = verify(_wrong_for_eight, examples=60)
    assert found.violation.found_after > 2
    assert _shown(found) == _shown(_without(monkeypatch, _wrong_for_eight, examples=60))


@pytest.mark.share(4)
def test_it_says_nothing_but_that_a_run_holds(second):
    case = Case(LINEAR, Plan((1, 3, 2), 2))
    for loop, holds in ((BUILT_IN["plain"], True), (BUGS["mean-of-means"].loop, False)):
        run = LoopRun(case, run_loop(loop, generated_instance(case)), rules_of(loop))
        answer = answer_to(run)
        assert (answer is not None) == holds == check(loop, case).holds


@pytest.mark.full
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

    def users(run):
        BUILT_IN["plain"](run)

    monkeypatch.setattr(ahead, "run_loop", noted)
    monkeypatch.setattr(ranks, "run_loop", noted)
    assert verify(
        users, examples=30, progress=lambda verdict: judged.append(verdict.case.digest)
    ).holds
    assert [digest for digest in run_on if digest in judged] == judged


@pytest.mark.share(4)
@pytest.mark.usefixtures("only_linear")
def test_a_loop_of_the_suite_runs_in_both_processes_with_the_same_result(monkeypatch, second):
    here: list[Case] = []

    def noted(loop, instance, **options):
        here.append(instance.case)
        return run_loop(loop, instance, **options)

    monkeypatch.setattr(ahead, "run_loop", noted)
    monkeypatch.setattr(judges.JudgeProcess, "has_answered", property(lambda self: True))
    found = verify(BUILT_IN["zero_grad"], examples=20)
    assert found.judged == 20
    drawn = [case for case in here if not is_probe(case)]
    assert 0 < len(drawn) < 19
    # the weight probes too, from the second one on
    assert 0 < len(here) - len(drawn) < 10
    assert _shown(found) == _shown(_without(monkeypatch, BUILT_IN["zero_grad"], examples=20))


@pytest.mark.usefixtures("only_linear", "second")
def test_a_users_loop_runs_on_no_probe_before_its_turn(monkeypatch):
    """A fault that a probe shows ends the search."""
    ahead_of_turn: list[Case] = []

    def noted(loop, instance, **options):
        ahead_of_turn.append(instance.case)
        return run_loop(loop, instance, **options)

    monkeypatch.setattr(ahead, "run_loop", noted)
    assert verify(lambda run: BUILT_IN["zero_grad"](run), examples=4).holds
    assert ahead_of_turn
    assert not any(map(is_probe, ahead_of_turn))


def test_the_same_run_is_judged_once_and_another_of_the_case_by_itself(monkeypatch):
    case = Case(LINEAR, Plan((1, 3, 2), 2))
    judged: list[LoopRun] = []

    def counted(run):
        judged.append(run)
        return answer_to(run)

    monkeypatch.setattr(ahead, "answer_to", counted)
    answers = ahead._Answers()

    def holds(loop):
        run = LoopRun(case, run_loop(loop, generated_instance(case)), rules_of(loop))
        message = ahead._Message.of(1, packed(run))
        return unpacked(answers.of(message, message.asked)[judges.NUMBER :]) is not None

    assert holds(BUILT_IN["plain"])
    assert holds(BUILT_IN["zero_grad"])
    assert len(judged) == 1
    assert not holds(BUGS["mean-of-means"].loop)
    assert len(judged) == 2


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

    found = verify(
        loop, examples=60, progress=lambda verdict: verdict.violation and seen.append(len(runs))
    )
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

with second_process(forks=sys.argv[1] == "forked") as judge:
    judge.wait()
    for loop in (waits_for_all_children, forks, closes_descriptors):
        result = verify(loop, examples=12, time_limit_s=20, quiet=True)
        if os.getpid() != command:
            break
        print(loop.__name__, result.holds, result.judged, flush=True)
os._exit(0)
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["forked", "started"])
def test_a_loop_may_wait_for_children_fork_and_close_descriptors(how):
    """Each of these reached the second process, or its socket."""
    done = subprocess.run(
        [sys.executable, "-c", STRANGE, how], capture_output=True, text=True, timeout=200
    )
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


ABANDONED = """
import os, sys
from gradcheck_suite.verification.judge_process import second_process
with second_process(forks=sys.argv[2] == "forked") as judge:
    judge.wait()
    print(judge.pid, flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.full
@pytest.mark.parametrize("start", ["forked", "started"])
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_it_ends_with_its_parent(how, start):
    done = subprocess.run(
        [sys.executable, "-c", ABANDONED, how, start], capture_output=True, text=True, timeout=120
    )
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


def test_a_process_that_has_jax_is_not_forked():
    """It may have computed, and a fork would lose the threads of XLA."""
    assert not may_fork()


def test_verification_goes_on_where_there_is_no_room_for_a_process(monkeypatch):
    def refuses(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(judges, "_judges", [])
    monkeypatch.setattr(judges, "Child", refuses)
    with second_process() as judge:
        assert judge is None
        assert running_judge() is None


# JAX's opinion on users' problems: it agrees where it should, a planted error is found, and the
# loop judged anyway.


CASE = Case("p.py:P", Plan((2, 1, 2, 1), 2))


class _Model(nn.Module):
    """A model that holds a constant which is neither parameter nor buffer."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.constant = torch.full((2,), constant, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.constant


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return _Model(1.0 + seed)


def batch(items: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(items, 3, generator=generator), torch.randn(items, 2, generator=generator)


def loss(m: nn.Module, b: Any) -> torch.Tensor:
    return (m(b[0]) - b[1]).pow(2).mean()


PROBLEM = Problem(model, batch, loss)


def _tanh(slope: float) -> Any:
    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = torch.tanh(x)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (out,) = ctx.saved_tensors
            return slope * gradient * (1 - out * out)

    return Tanh.apply


@pytest.mark.full
@pytest.mark.parametrize(("slope", "findings"), [(1.0, 0), (1.001, 1)])
def test_a_custom_backward_is_one_finding_where_it_is_not_the_derivative(slope, findings):
    """The windows agree beside it, since JAX takes them with that backward."""
    tanh = _tanh(slope)
    problem = Problem(model, batch, lambda m, b: (tanh(m(b[0])) - b[1]).pow(2).mean())
    opinion = second_opinion([CASE.replace(plan=Plan((2, 1, 2), 1))], problem)
    assert (opinion.windows, opinion.answered) == (4, 4)
    assert opinion.refusal is None
    assert len(opinion.findings) == findings
    assert all("Tanh.backward is not the derivative" in text for text in opinion.findings)
    assert all("argument 0 is 1.001 times the derivative" in text for text in opinion.findings)


def test_jax_agrees_and_one_program_serves_all_windows_of_a_shape():
    """Two cases of two windows, three items each: one shape, though the models' constants differ
    with the seed.
    """
    opinion = second_opinion([CASE, CASE.replace(seed=1)], PROBLEM)
    assert (opinion.windows, opinion.answered, opinion.moved, opinion.shapes) == (5, 5, 1, 1)
    assert opinion.findings == []
    assert opinion.summary() == (
        "JAX gave a second opinion on 5 of 5 windows, of 1 shape, 1 of them at parameters that an optimizer has moved, "
        "and agrees with torch"
    )


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_a_backward_that_is_wrong_only_after_the_first_step_is_a_finding(optimizer):
    def from_zero(seed: int) -> nn.Module:
        made = model(seed)
        nn.init.zeros_(made.linear.weight)
        nn.init.zeros_(made.linear.bias)
        return made

    problem, case = Problem(from_zero, batch, loss), CASE.replace(optimizer=optimizer)
    with tanh_backward(lambda out: torch.ones_like(out)):
        assert second_opinion([case], problem).findings == []
    with tanh_backward(lambda out: 1 + 0.5 * (out != 0)):
        (finding,) = second_opinion([case], problem).findings
        result = verify(BUILT_IN["plain"], problem=problem, examples=2, optimizer=optimizer)
    assert "at parameters that the optimizer has moved" in finding
    assert "no loop is to blame" in finding
    assert result.holds
    assert result.findings


@pytest.mark.full
def test_a_wrong_derivative_is_a_finding_and_the_loop_is_judged(monkeypatch):
    """JAX is told that tanh is the sigmoid: torch's two ways agree with each other, and JAX stands
    alone.
    """
    name = "aten.tanh.default"
    monkeypatch.setitem(_TABLE, name, lambda x: 1 / (1 + jnp.exp(-x)))
    result = verify(BUILT_IN["plain"], problem=PROBLEM, examples=2, second_opinion_s=0)
    assert result.holds
    assert "torch large batch = torch accumulated against JAX large batch" in result.findings[0]
    assert "no loop is to blame" in result.findings[0]
    assert result.second_opinion is not None
    assert "agrees" not in result.second_opinion


def test_a_problem_that_cannot_be_carried_over_is_judged_by_torch_alone():
    def decides(m: nn.Module, b: Any) -> torch.Tensor:
        out = m(b[0])
        return (out if out.sum() > 0 else 2 * out).pow(2).sum(1).mean()

    # the decision is on parameters' signs, so that the objective stays a sum over items
    def signs(m: nn.Module, b: Any) -> torch.Tensor:
        return m(b[0]).pow(2).mean() * (2 if m.linear.bias[0] > 0 else 1)

    for found in (decides, signs):
        opinion = second_opinion([CASE], Problem(model, batch, found))
        assert opinion.refusal is not None
        assert "torch.export does not take this loss" in opinion.summary()
        assert ("\n" in opinion.summary()) == bool(opinion.rewrite)
    result = verify(BUILT_IN["plain"], problem=Problem(model, batch, signs), examples=2)
    assert result.holds
    assert "JAX gives no second opinion on the problem" in (result.second_opinion or "")


def test_shapes_that_cannot_be_carried_over_leave_the_opinion_on_the_others():
    def for_small_batches(m: nn.Module, b: Any) -> torch.Tensor:
        out = m(b[0]).pow(2).mean()
        # data decides, but only in batches of more than two items
        return out if len(b[0]) < 3 or b[0].sum() > -1e9 else 2 * out

    small = CASE.replace(plan=Plan((1, 1, 2), 2))
    opinion = second_opinion([CASE, small], Problem(model, batch, for_small_batches))
    assert (opinion.windows, opinion.answered, opinion.refused, opinion.shapes) == (5, 2, 3, 1)
    assert opinion.summary().startswith(
        "JAX gave a second opinion on 2 of 5 windows, of 1 shape, and agrees with torch; 3 cannot be translated: "
    )


def test_without_time_left_one_window_is_answered_and_the_others_are_counted():
    opinion = second_opinion([CASE, CASE.replace(plan=Plan((1, 1), 1))], PROBLEM, budget_s=0.0)
    assert (opinion.windows, opinion.answered) == (5, 1)
    assert "for the others the 0 s that this may take did not suffice" in opinion.summary()


def never_resets(run: Any) -> None:
    run.optimizer.zero_grad = lambda: None
    BUILT_IN["plain"](run)


def never_steps(run: Any) -> None:
    pass


@pytest.mark.full
@pytest.mark.parametrize("loop", [BUILT_IN["plain"], never_resets])
def test_a_violated_loop_is_asked_about_on_its_smallest_case_and_an_interrupt_keeps_the_verdict(
    loop, monkeypatch
):
    asked: list[Any] = []

    def interrupt(cases: Any, problem: Any, budget_s: float) -> Any:
        asked.append((list(cases), budget_s))
        raise KeyboardInterrupt

    monkeypatch.setattr("gradcheck_suite.verification.second_opinion.second_opinion", interrupt)
    result = verify(loop, problem=PROBLEM, examples=5, second_opinion_s=7)
    assert result.interrupted
    assert result.holds == (loop is not never_resets)
    assert result.second_opinion is None
    ((cases, budget),) = asked
    assert budget == 7
    assert len(cases) == (5 if result.holds else 1)
    if result.violation is not None:
        assert cases == [result.violation.case]


def test_where_no_gradient_is_at_fault_jax_is_not_asked(monkeypatch):
    monkeypatch.setattr("gradcheck_suite.verification.second_opinion.second_opinion", None)
    result = verify(never_steps, problem=PROBLEM, examples=5)
    assert (result.violation and result.violation.kind, result.second_opinion) == (
        "step-count",
        None,
    )


@pytest.mark.parametrize("seconds", [-1, "10", float("nan")])
def test_a_time_for_it_that_is_none_is_refused(seconds):
    with pytest.raises(
        UsageError, match="second_opinion_s: expected a number of seconds, 0 or more; got"
    ):
        verify(BUILT_IN["plain"], problem=PROBLEM, second_opinion_s=seconds)
