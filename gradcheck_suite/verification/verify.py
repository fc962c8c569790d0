"""verify(loop) -> Result: check a loop on many drawn cases, and shrink the first violation."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hypothesis import find, settings
from hypothesis import strategies as st

from gradcheck_suite.catalogue.description import with_case_described
from gradcheck_suite.core.case import Case, Plan
from gradcheck_suite.core.contract import (
    EQUAL_BATCHES,
    EQUAL_MICRO_BATCHES,
    Loop,
    Problem,
    assumptions_of,
    autocast_of,
    checked_assumptions,
    checked_autocast,
    dealt_to_ranks,
    expect_loop,
    expect_within,
    is_jax,
)
from gradcheck_suite.core.options import XLA, ChosenOptions, VerifyOptions, takes
from gradcheck_suite.core.results import MovedByZeros, Result, Violation, result_lines
from gradcheck_suite.core.source_lines import judged_lines, loop_places
from gradcheck_suite.core.text import say
from gradcheck_suite.errors import UsageError
from gradcheck_suite.reference.evaluation import evaluated_by
from gradcheck_suite.run.instance import Instance, instance_of, one_thread
from gradcheck_suite.run.ranks import PLAIN, kept_ranks, traffic_per_window, traffic_text
from gradcheck_suite.run.runner import quiet_loops
from gradcheck_suite.strategies.cases import SOMETIMES_MOVING, cases, expect_layers_left
from gradcheck_suite.verification.ahead import differences_of_programs
from gradcheck_suite.verification.check import of_torch
from gradcheck_suite.verification.search import Progress, SearchState, StopError, Tally

if TYPE_CHECKING:
    from gradcheck_suite.verification.second_opinion import SecondOpinion

LARGE_MODEL = 1_000_000
"""Number of parameters from which several threads are faster than one, also on a busy machine."""
UNASKED = ("not-accumulable", "raised", "step-count")
"""Kinds of violation on which JAX is not asked: the gradient is not what is wrong."""


def whole_windows_case(problem_name: str, assumes: frozenset[str], options: ChosenOptions) -> Case:
    """Return the case of a user's problem that is tried first: two whole windows of unequal
    micro-batches, one pass.

    Most training meets a fault in whole windows; a fault of the short last window is searched for
    afterwards.
    """
    # unequal sizes tell a mean over items from a mean over micro-batches
    micro_batches = (2, 2, 1, 1) if EQUAL_MICRO_BATCHES in assumes else (1, 3, 4, 2)
    if EQUAL_BATCHES in assumes:
        micro_batches = (2, 2, 2, 2)
    plan = dealt_to_ranks(Plan(micro_batches, 2), options.ranks, assumes)
    return Case(
        problem_name,
        plan,
        dtype=options.dtype,
        device=options.device,
    )


@takes(VerifyOptions)
def verify(
    loop: Loop,
    options: VerifyOptions | None = None,
    *,
    name: str | None = None,
    problem: Problem | None = None,
    problem_name: str = "problem",
    plan: st.SearchStrategy[Plan] | None = None,
    progress: Progress | None = None,
    quiet: bool = False,
    **fields: Any,
) -> Result:
    """Verify a loop on drawn cases, and print the verdict in words.

    Args:
        loop: the subject, a callable that takes a `TrainingRun`.
        options: number of cases, dtype and so on; the defaults of `VerifyOptions` if None.
        name: the loop's name in the result.
        problem: the user's problem that is trained in place of random ones; then only plans are
            drawn.
        problem_name: the problem's name in cases, such as `"model.py:PROBLEM"`.
        plan: a strategy in place of `plans()`; then the fixed first cases, which have their own
            plans, are left out.
        progress: called with every verdict.
        quiet: whether nothing is printed; `print(result)` prints it later.
        fields: fields of `VerifyOptions`, over those of `options`: `examples=5`. `seed_value` is
            another name of `seed`.

    Raises:
        UsageError: an argument is wrong, or the problem breaks its contract.
    """
    if "seed_value" in fields:
        fields["seed"] = fields.pop("seed_value")
    options = (options or VerifyOptions()).replace(**fields).of(loop)
    # before the assumptions are checked, which are about the problem of torch
    problem = of_torch(loop, problem)
    chosen = _assumed(loop, options, problem, problem_name)
    autocast = options.autocast or checked_autocast(autocast_of(loop))
    search = SearchState(
        loop,
        problem,
        options,
        progress,
        autocast,
        chosen,
    )
    started = time.perf_counter()
    opinion = None
    interrupted = False
    traffic = None
    checked: tuple[str, ...] = ()
    try:
        with (
            evaluated_by(options.jax),
            _threads(problem),
            _frozen_heap(),
            kept_ranks(),
            quiet_loops(options.quiet_loop),
        ):
            _search(
                loop,
                search,
                options,
                chosen,
                None if problem is None else problem_name,
                plan,
            )
            # what a wrong loop sends is no measure of a right one
            if options.ranks > 1 and search.violation is None:
                traffic = _traffic(loop, options, problem, problem_name)
        opinion = _opinion(loop, search, problem, options.second_opinion_s)
        # where XLA has computed all there is nothing of numpy's to check
        checked = () if options.jax == XLA else differences_of_programs()
    except KeyboardInterrupt:
        interrupted = True  # the verdicts so far stand
    # without the search's frames, which tell the user nothing about the wrong input
    except StopError as stop:
        raise stop.error from None
    result = replace(
        _result(search, loop, (*(opinion.findings if opinion else ()), *checked), interrupted),
        loop=name or str(getattr(loop, "__name__", repr(loop))),
        seconds=time.perf_counter() - started,
        assumes=tuple(sorted(chosen)),
        autocast=autocast,
        is_uncast=autocast is not None and options.dtype == "float64",
        second_opinion=None if opinion is None else opinion.summary(),
        traffic=traffic,
        files=judged_lines(loop),
    )
    if not quiet:
        say(result_lines(result))
    return result


def _result(
    search: SearchState, loop: Loop, disagreements: Sequence[str], interrupted: bool
) -> Result:
    """Return what a search found, as a result.

    Args:
        search: the search, at its end.
        loop: the subject.
        disagreements: of torch and JAX, beside those that the search noted.
        interrupted: whether Ctrl-C ended it.
    """
    violation = _placed(search, loop)
    tally = search.tally
    findings = (*tally.findings, *disagreements)
    moving = tally.moved_by_zeros
    return Result(
        loop="",
        cases=tally.cases,
        seconds=0.0,
        violations=() if violation is None else (violation,),
        unjudged=None if tally.judged or violation or interrupted else _unjudged(tally, findings),
        worst_error_over_allowed=tally.ratio,
        findings=findings,
        skipped=dict(tally.skipped),
        interrupted=interrupted,
        judged=tally.judged,
        windows=tally.windows,
        windows_skipped=dict(tally.windows_skipped),
        shrinking=search.stopped,
        moved_by_zeros=MovedByZeros(len(moving), moving[0]) if moving else None,
        runs=search.runs,
    )


def _placed(search: SearchState, loop: Loop) -> Violation | None:
    """Return what a search found, with its case in words and its places in the loop."""
    violation = search.violation
    if violation is None:
        return None
    return replace(
        with_case_described(violation),
        found_after=search.found_after,
        **loop_places(loop, violation),
    )


def _unjudged(tally: Tally, findings: Sequence[str]) -> str:
    """Return why no case could be judged."""
    # the most frequent reason is the one to mend
    reason = max(
        tally.skipped,
        key=tally.skipped.__getitem__,
        default=next(iter(findings), "none was drawn"),
    )
    return f"none of {tally.cases} cases could be judged: {reason}"


def _assumed(
    loop: Loop, options: VerifyOptions, problem: Problem | None, problem_name: str
) -> frozenset[str]:
    """Return what a loop relies on; expect the problem, or what is drawn, to be within it."""
    if is_jax(loop) and options.ranks > 1:
        raise UsageError(
            "a loop of JAX runs in one process: drop --ranks, and set"
            " XLA_FLAGS=--xla_force_host_platform_device_count=2 for a loop that uses shard_map on"
            " several devices"
        )
    if is_jax(loop) and options.optimizer:
        from gradcheck_suite.run.jax_run import jax_optimizer  # torch loops need none of it

        # called for its error alone, before any case is drawn
        jax_optimizer(options.optimizer)
    expect_loop(loop)
    chosen = checked_assumptions({*options.assumes, *assumptions_of(loop)})
    if problem is not None:
        expect_within(problem, chosen, name=problem_name)
    expect_layers_left(chosen)
    return chosen


@lru_cache(maxsize=64)
def _cases(*, compiles: bool, optimizer: Any, **fields: Any) -> st.SearchStrategy[Case]:
    """Return the strategy of the cases.

    The same for the same arguments, since `run_on_cases` keeps what it draws.
    """
    if not compiles:
        return cases(optimizer=optimizer, **fields)
    # a strategy of optimizers
    if not isinstance(optimizer, str):
        return cases(optimizer=optimizer, **fields).map(_of_two_sizes)
    # an optimizer of optax, of which torch knows nothing
    return cases(**fields).map(lambda case: _of_two_sizes(case).replace(optimizer=optimizer))


def _of_two_sizes(case: Case) -> Case:
    """Return a case whose micro-batches have its smallest or its largest size: a loop of JAX
    compiles each size.
    """
    sizes = case.plan.micro_batches
    low = min(sizes)
    high = max(sizes)
    # the nearer of the two, so that a plan of unequal sizes stays one
    few = tuple(low if 2 * n < low + high else high for n in sizes)
    return case if few == sizes else case.replace(plan=case.plan.replace(micro_batches=few))


def _search(
    loop: Loop,
    search: SearchState,
    options: ChosenOptions,
    assumes: frozenset[str],
    problem_name: str | None,
    plan: st.SearchStrategy[Plan] | None,
) -> None:
    """Check the fixed first cases, then drawn ones, and shrink the first violation."""
    drawn, small = (
        _cases(
            problem=problem_name,
            plan=plan,
            dtype=options.dtype,
            device=options.device,
            optimizer=options.optimizer or SOMETIMES_MOVING,
            assumes=tuple(sorted(assumes)),
            small=few,
            ranks=options.ranks,
            compiles=is_jax(loop),
        )
        for few in (False, True)
    )
    fixed = (
        whole_windows_case(problem_name, assumes, options)
        if problem_name and plan is None
        else None
    )
    search.run(
        drawn,
        small,
        fixed,
        probes=plan is None,
    )


def _opinion(
    loop: Loop, search: SearchState, problem: Problem | None, budget_s: float
) -> SecondOpinion | None:
    """Ask JAX about a user's problem, on the cases that the verdict rests on.

    None where it is not asked.
    """
    violation = search.violation
    # JAX computes the gradient of a problem of JAX already
    if (
        problem is None
        or is_jax(loop)
        or (violation and (violation.kind in UNASKED or violation.case.spec))
    ):
        return None
    # generated problems need no bridge
    from gradcheck_suite.verification.second_opinion import second_opinion

    return second_opinion(
        [violation.case] if violation else search.tally.users_cases, problem, budget_s=budget_s
    )


def _traffic(
    loop: Loop, options: ChosenOptions, problem: Problem | None, problem_name: str
) -> str | None:
    """Return a sentence about what ranks communicate in each window.

    None where the loop fails on such plans.
    """
    subject = PLAIN if problem is None else problem_name

    def instance(plan: Plan) -> Instance:
        return instance_of(
            Case(
                subject,
                plan,
                dtype=options.dtype,
                device=options.device,
            ),
            problem,
        )

    found = traffic_per_window(loop, instance, options.ranks, options.time_limit_s)
    return traffic_text(found) if found else None


def _make_hypothesis_generator() -> None:
    """Let Hypothesis make its random generator, which it does at the first example.

    It then asks the collector who refers to it. Under Python 3.14, where every dict is tracked from
    its beginning, a frozen one is no answer, and Hypothesis would warn.
    """
    find(st.none(), lambda _: True, settings=settings(database=None))


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Leave what exists out of garbage collection: each walk over the objects of torch and JAX
    takes 0.3 s.
    """
    # somebody has frozen it already, as an outer `verify`: who froze it thaws it
    if gc.get_freeze_count():
        yield
        return
    _make_hypothesis_generator()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _threads(problem: Problem | None) -> AbstractContextManager[None]:
    """Return the context that a problem's models are computed in: one thread, unless they are
    large.
    """
    if problem is None:
        return one_thread()
    try:
        size = sum(p.numel() for p in problem.model(0).parameters())
    except (Exception, SystemExit):
        # a user's own code may raise anything; the check of the first case reports it
        return nullcontext()
    return one_thread() if size < LARGE_MODEL else nullcontext()
