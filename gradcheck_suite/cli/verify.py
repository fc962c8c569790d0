"""Verify loops: each trains random models on random splits, and every gradient that reaches its optimizer is judged."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.arguments import OPTIONS, add_option, options_of
from gradcheck_suite.cli.exit_status import noted_interrupts
from gradcheck_suite.cli.loading import note_untested_trainers
from gradcheck_suite.cli.progress import Progress
from gradcheck_suite.core.contract import (
    Loop,
    Problem,
    VerifyOptions,
    assumptions_of,
    autocast_of,
    checked_assumptions,
    checked_autocast,
    expect_within,
    is_jax,
)
from gradcheck_suite.core.counterexamples import Counterexample, store_counterexample
from gradcheck_suite.core.records import append_record, judge_digest, write_json, write_text
from gradcheck_suite.core.results import Result, Verdict, results_to_json
from gradcheck_suite.core.text import aligned
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.trainers import PACKAGES, TRAINERS
from gradcheck_suite.run import environment
from gradcheck_suite.run.processes import template_ahead
from gradcheck_suite.strategies.coverage import CaseCoverage, Coverage
from gradcheck_suite.verification.judge_process import second_process


def open_page(path: Path) -> bool:
    """Open a file in the browser, and return whether a browser took it.

    Nothing opens in a pipe, as in CI, or on a machine without a desktop: `webbrowser` would start a browser of text in
    the terminal there.
    """
    desktop = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return bool(desktop) and sys.stdout.isatty() and webbrowser.open(path.resolve().as_uri())


@dataclass(frozen=True)
class Subject:
    """A loop under test.

    Attributes:
        name: of the loop in the result.
        loop: the loop.
        problem: the user's problem that it trains; None for generated ones.
        problem_name: of that problem in the cases, None without one.
        importable: whether `name` is one that the command line takes, as a script must.
    """

    name: str
    loop: Loop
    problem: Problem | None = None
    problem_name: str | None = None
    importable: bool = True


@dataclass(frozen=True)
class Verified:
    """The result of one verification.

    Attributes:
        result: the verdict.
        reached: how many judged cases had each layer, loss and kind of split.
        unjudged: the most frequent reason where no case could be judged, else None.
    """

    result: Result
    reached: Coverage
    unjudged: str | None


def verify_subject(subject: Subject, options: VerifyOptions, progress: Callable[[Verdict], None]) -> Verified:
    """Verify a loop, and note what its cases reached.

    Args:
        subject: the loop.
        options: of the verification.
        progress: called with every verdict.
    """
    from gradcheck_suite.verification.verify import verify

    reach, reasons = CaseCoverage(), Counter[str]()

    def note(verdict: Verdict) -> None:
        if reason := verdict.skipped or verdict.finding:
            reasons[reason] += 1
        else:
            reach.note(verdict.case)
        progress(verdict)

    problem_name = subject.problem_name or "problem"
    result = verify(
        subject.loop, options, name=subject.name, problem=subject.problem, problem_name=problem_name, progress=note
    )
    unjudged = None
    if result.holds and not result.judged and not result.interrupted:
        ((reason, _),) = reasons.most_common(1) or [("none was drawn", 0)]
        unjudged = f"{result.loop}: none of {result.cases} cases could be judged: {reason}"
    return Verified(result, reach.to_json(), unjudged)


def record(
    subject: Subject, options: VerifyOptions, verified: Verified, reports: Path, environment: Mapping[str, Any]
) -> Counterexample | None:
    """Record a verification under a reports folder; return the files of its counterexample, None where it holds.

    Raises:
        UsageError: a file cannot be written.
    """
    violation, stored = verified.result.violation, None
    if violation is not None:
        case = store_counterexample(reports, verified.result, environment)
        stored = Counterexample(case, None)
        # a script is one process
        if subject.importable and not violation.case.plan.ranks:
            from gradcheck_suite.script import script_text, unrepeatable

            # a weight probe that was checked beside the user's problem brings its own
            problem, limit = None if violation.case.spec else subject.problem, options.time_limit_s
            script = case.with_suffix(".py")
            text = script_text(subject.loop, subject.name, violation, problem=problem, time_limit_s=limit)
            if text is not None:
                write_text(script, text)
                stored = Counterexample(case, script, unrepeatable(script, violation, limit))
    data = {
        **asdict(options),
        **verified.result.to_json(),
        "problem": subject.problem_name,
        "reached": verified.reached,
        "stored": stored and stored.case.name,
        "unrepeatable": stored and stored.unrepeatable,
    }
    append_record(reports, "verify", data, environment=environment)
    return stored


FEW_CASES = 50
"""Cases of all loops below which a second process would hardly have started."""


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "loops",
        nargs="*",
        metavar="LOOP",
        help="FILE.py:NAME, package.module:NAME, a built-in's or a trainer's name; without one, every built-in reset "
        "mode",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the built-in loops and the trainers, and stop; with --ranks, those for several ranks",
    )
    parsers.add_framework(parser, ("torch", "jax", "all"))
    parsers.add_problem(parser)
    for option in OPTIONS:
        add_option(parser, option)
    parser.add_argument(
        "--processes",
        type=int,
        choices=(1, 2),
        default=environment.processes(),
        help="with 2, a second process judges gradients while this one runs the loop on the next cases, with the same "
        f"verdicts (default: {environment.PROCESSES_VARIABLE}, or 2 where there are two processors)",
    )
    parsers.add_json(parser, "the results")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="PATH",
        help="write a page on each violation here, one HTML file, and open it if a desktop's terminal runs the command",
    )
    parsers.add_reports(parser, "counterexamples go to DIR/counterexamples")


def run(arguments: argparse.Namespace) -> int:
    """Verify the loops that the arguments name; print and store the results."""
    environment.expect_main_job()
    if arguments.list:
        return _list(arguments.ranks)
    parsers.expect_writable(arguments.reports, "counterexamples", json=arguments.json, html=arguments.html)
    if arguments.html is not None:
        from gradcheck_suite.page.render import expect_installed

        expect_installed("the HTML report", ["jinja2"])
    from gradcheck_suite.cli.loading import expect_file

    for text in (*arguments.loops, *([] if arguments.problem is None else [arguments.problem])):
        expect_file(text)  # before torch and jax are imported, which takes seconds
    options = options_of(arguments)
    with template_ahead(wanted=options.ranks > 1), second_process(wanted=_is_worth_a_process(arguments, options)):
        environment.prepare()
        return _verify(arguments, options)


def _is_worth_a_process(arguments: argparse.Namespace, options: VerifyOptions) -> bool:
    """Whether a second process, which takes seconds to start, can judge enough: generated problems on one CPU rank."""
    if arguments.processes == 1 or arguments.problem is not None or options.ranks > 1 or options.device != "cpu":
        return False
    return (options.examples or FEW_CASES) * max(len(arguments.loops), 1) >= FEW_CASES


def _verify(arguments: argparse.Namespace, options: VerifyOptions) -> int:
    subjects = _subjects(arguments, options)

    from gradcheck_suite.cli import verdict_text
    from gradcheck_suite.cli.loading import libraries_of
    from gradcheck_suite.run.instance import checked_device
    from gradcheck_suite.run.ranks import expect_ranks

    checked_device(options.device)
    if options.ranks > 1:
        expect_ranks(options.ranks, options.device)
        judge_digest()  # its sources are read while the ranks' process imports torch, and kept for the records
    libraries = dict.fromkeys(name for subject in subjects for name in libraries_of(subject.loop))
    about = environment.environment((*PACKAGES, *libraries))
    chosen = {is_jax(subject.loop): options.of(subject.loop) for subject in subjects}
    header = verdict_text.header(arguments.loops, chosen, arguments.problem, about, libraries)
    print(header, flush=True)
    done = _Run(lines=header.splitlines())
    try:
        _verify_all(subjects, options, arguments.reports, about, done)
    finally:
        results = [verified.result for verified in done.verified]
        # bad input stops the work before any result: then nothing is written
        if arguments.json is not None and (results or done.interrupted):
            write_json(arguments.json, results_to_json(results, about))
        if arguments.html is not None and results:
            _write_page(arguments.html, done)
    violated = any(not result.holds for result in results)
    unjudged = [verified.unjudged for verified in done.verified if verified.unjudged]
    if unjudged and not violated and not done.interrupted:
        raise UsageError(unjudged[0])
    print(verdict_text.summary(results, len(subjects), interrupted=done.interrupted), flush=True)
    findings = any(result.findings for result in results)
    return exit_status.status_of(violated=violated, findings=findings, interrupted=done.interrupted)


@dataclass
class _Run:
    """The verifications so far, what was printed on them and stored, and whether Ctrl-C has stopped them."""

    verified: list[Verified] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    stored: list[Path] = field(default_factory=list)
    interrupted: bool = False


def _verify_all(
    subjects: list[Subject], options: VerifyOptions, reports: Path, about: dict[str, Any], done: _Run
) -> None:
    """Verify, record and print the subjects one after the other, until Ctrl-C."""
    from gradcheck_suite.cli.verdict_text import result_lines
    from gradcheck_suite.run.ranks import kept_ranks

    width = max(len(subject.name) for subject in subjects)
    then = None if subjects[0].problem is None else "judged, asking JAX for a second opinion"
    with Progress(then=then) as progress, noted_interrupts() as pressed, kept_ranks():

        def advance(verdict: Verdict) -> None:
            if pressed:
                # a loop that catches every exception has swallowed the interrupt
                raise KeyboardInterrupt
            progress.advance(verdict)

        try:
            for subject in subjects:
                chosen = options.of(subject.loop)
                progress.start(subject.name, chosen.examples)
                verified = verify_subject(subject, chosen, advance)
                done.verified.append(verified)
                stored = record(subject, chosen, verified, reports, about)
                progress.stop()
                lines = result_lines(verified.result, stored, options, width, judged=not verified.unjudged)
                print("\n".join(lines), flush=True)
                done.lines.append(lines[0])
                done.stored += [] if stored is None else [stored.case]
                if verified.result.interrupted or pressed:
                    done.interrupted = True
                    return
        except KeyboardInterrupt:
            done.interrupted = True


def _write_page(path: Path, done: _Run) -> None:
    """Write the page of the run and of each violation, name it, and open it where there is a violation to look at."""
    from gradcheck_suite.core.records import write_text
    from gradcheck_suite.page.render import violations_html
    from gradcheck_suite.page.violation import read_violation

    count = len(done.stored)
    title = "No violation" if not count else "A violation" if count == 1 else f"{count} violations"
    write_text(path, violations_html(title, done.lines, [read_violation(stored) for stored in done.stored]))
    print(f"page    {path}", flush=True)
    if done.stored:
        open_page(path)


def _list(ranks: int) -> int:
    from gradcheck_suite.loops.jax_modes import JAX_MODES
    from gradcheck_suite.loops.ranks import RANK_LOOPS
    from gradcheck_suite.loops.reset_modes import BUILT_IN

    loops = {**BUILT_IN, **JAX_MODES} if ranks == 1 else RANK_LOOPS
    built_in = [(name, (loop.__doc__ or "").strip().splitlines()[0]) for name, loop in loops.items()]
    trainers = [(name, f"{trainer.about} [{trainer.status}]") for name, trainer in TRAINERS.items()]
    print("\n".join(aligned([*built_in, *(trainers if ranks == 1 else [])])))
    return exit_status.HOLDS


def _modes(arguments: argparse.Namespace, options: VerifyOptions) -> dict[str, Loop]:
    """Return the reset modes of the frameworks that are asked for."""
    from gradcheck_suite.loops.jax_modes import JAX_MODES
    from gradcheck_suite.loops.ranks import RANK_MODES
    from gradcheck_suite.loops.reset_modes import MODES

    if options.ranks > 1:
        return dict(RANK_MODES)
    of_torch = {} if arguments.framework == "jax" else MODES
    return {**of_torch, **(JAX_MODES if arguments.framework in ("jax", "all") else {})}


def _subjects(arguments: argparse.Namespace, options: VerifyOptions) -> list[Subject]:
    """Load the loops and the problem; refuse a problem that a loop's assumptions exclude."""
    from gradcheck_suite.cli.loading import resolve_loop, resolve_problem
    from gradcheck_suite.loops.ranks import RANK_LOOPS
    from gradcheck_suite.strategies.cases import expect_layers_left

    if options.ranks == 1 and (over_ranks := next((text for text in arguments.loops if text in RANK_LOOPS), None)):
        raise UsageError(f"{over_ranks} trains on several ranks: give --ranks 2, 3 or 4")
    problem = None if arguments.problem is None else resolve_problem(arguments.problem)
    loops = {text: resolve_loop(text, arguments.framework) for text in arguments.loops} or _modes(arguments, options)
    note_untested_trainers(loops)
    for name, loop in loops.items():
        try:
            assumes = checked_assumptions({*options.assumes, *assumptions_of(loop)})
            checked_autocast(autocast_of(loop))
            expect_layers_left(assumes)
        except (UsageError, TypeError) as error:
            raise UsageError(f"{name}: {error}") from None
        if problem is not None:
            expect_within(problem, assumes, loop=name, name=arguments.problem)
    return [Subject(name, loop, problem, arguments.problem) for name, loop in loops.items()]
