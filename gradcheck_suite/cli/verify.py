"""Verify loops: each trains random models on random splits, and every gradient that reaches its optimizer is judged."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.arguments import OutputOptions, add_options, parsed
from gradcheck_suite.cli.exit_status import noted_interrupts
from gradcheck_suite.cli.loading import expect_found, note_untested_trainers
from gradcheck_suite.cli.progress import Progress, StandardOutput
from gradcheck_suite.core.contract import (
    Loop,
    Problem,
    assumptions_of,
    autocast_of,
    checked_assumptions,
    checked_autocast,
    expect_within,
    is_jax,
)
from gradcheck_suite.core.counterexamples import FOLDER as COUNTEREXAMPLES
from gradcheck_suite.core.counterexamples import Counterexample, loop_source, store_counterexample
from gradcheck_suite.core.formats import rendered
from gradcheck_suite.core.options import VerifyOptions
from gradcheck_suite.core.records import (
    KINDS,
    append_record,
    expect_writable_folder,
    judge_digest,
    write_json,
    write_text,
)
from gradcheck_suite.core.results import (
    Result,
    Verdict,
    no_longer_found,
    notices_of,
    result_lines,
    results_to_json,
)
from gradcheck_suite.core.text import aligned, say
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.trainers import PACKAGES, TRAINERS
from gradcheck_suite.run import environment
from gradcheck_suite.run.processes import template_ahead
from gradcheck_suite.strategies.coverage import CaseCoverage, Coverage
from gradcheck_suite.verification.judge_process import second_process

PROGRAM = "gradcheck-suite verify"
DEFAULT_REPORTS = Path("reports")
"""Where counterexamples go if no folder is named: `replay` needs their files."""


@dataclass(frozen=True)
class Subject:
    """A loop under test.

    Attributes:
        name: of the loop in the result.
        loop: the loop.
        problem: the user's problem that it trains; None for generated ones.
        problem_name: the problem's name in the cases; None for generated ones.
        importable: whether the command line accepts `name`; the script of a violation needs that.
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
    """

    result: Result
    reached: Coverage


def verify_subject(subject: Subject, options: VerifyOptions, progress: Callable[[Verdict], None]) -> Verified:
    """Verify a loop, and note what its cases reached.

    Args:
        subject: the loop.
        options: of the verification.
        progress: called with every verdict.
    """
    from gradcheck_suite.verification.verify import verify

    reach = CaseCoverage()

    def note(verdict: Verdict) -> None:
        if not (verdict.skipped or verdict.finding):
            reach.note(verdict.case)
        progress(verdict)

    result = verify(
        subject.loop,
        options,
        name=subject.name,
        problem=subject.problem,
        problem_name=subject.problem_name or "problem",
        progress=note,
        quiet=True,
    )
    return Verified(result, reach.to_json())


def store(
    subject: Subject, options: VerifyOptions, verified: Verified, reports: Path, environment: Mapping[str, Any]
) -> Counterexample | None:
    """Store a violation under a reports folder; return its files, or None if the loop holds.

    Raises:
        UsageError: a file cannot be written.
    """
    violation, stored = verified.result.violation, None
    if violation is not None:
        case = store_counterexample(reports, verified.result, environment, loop_source(subject.loop))
        stored = Counterexample(case, None)
        # a script is one process
        if subject.importable and not violation.case.plan.ranks:
            from gradcheck_suite.script import script_text

            # a weight probe that was checked beside the user's problem brings its own
            problem, limit = None if violation.case.spec else subject.problem, options.time_limit_s
            script = case.with_suffix(".py")
            text = script_text(
                subject.loop,
                subject.name,
                violation,
                problem=problem,
                time_limit_s=limit,
                assumes=verified.result.assumes,
            )
            if text is not None:
                write_text(script, text)
                stored = Counterexample(case, script)
    return stored


def record(
    subject: Subject,
    options: VerifyOptions,
    verified: Verified,
    reports: Path | None,
    environment: Mapping[str, Any],
    stored: Counterexample | None,
) -> None:
    """Append the record of a verification; do nothing without a folder.

    Raises:
        UsageError: it cannot be written.
    """
    data = {
        **asdict(options),
        **verified.result.to_json(),
        "problem": subject.problem_name,
        "reached": verified.reached,
        "stored": stored and stored.case.name,
        "unrepeatable": stored and stored.unrepeatable,
    }
    append_record(reports, KINDS["verify"], data, environment=environment)


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
    add_options(parser, VerifyOptions)
    parser.add_argument(
        "--processes",
        type=int,
        choices=(1, 2),
        default=environment.processes(),
        help="with 2, a second process judges gradients while this one runs the loop on the next cases, with the same "
        f"verdicts (default: {environment.PROCESSES_VARIABLE}, or 2 where there are two processors)",
    )
    parser.add_argument("-x", "--stop-on-violation", action="store_true", help="stop after the first violated loop")
    add_options(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Verify the loops that the arguments name; print and store the results."""
    environment.expect_main_job()
    if arguments.list:
        return _list(arguments.ranks)
    output = parsed(arguments, OutputOptions)
    output.expect_writable()
    shown = output.reports or DEFAULT_REPORTS
    expect_writable_folder(shown / COUNTEREXAMPLES, f"--reports {shown}")
    for text in (*arguments.loops, *filter(None, [arguments.problem])):
        expect_found(text)
    options = parsed(arguments, VerifyOptions)
    keep = output.output_format != "text"
    with (
        StandardOutput(keep=keep) as standard_output,
        template_ahead(wanted=options.ranks > 1),
        second_process(wanted=_is_worth_a_process(arguments, options)),
    ):
        environment.prepare()
        return _verify(arguments, options, output, standard_output)


def _is_worth_a_process(arguments: argparse.Namespace, options: VerifyOptions) -> bool:
    """Whether a second process, which takes seconds to start, can judge enough: generated problems on one CPU rank."""
    if arguments.processes == 1 or arguments.problem is not None or options.ranks > 1 or options.device != "cpu":
        return False
    return (options.examples or FEW_CASES) * max(len(arguments.loops), 1) >= FEW_CASES


def _verify(
    arguments: argparse.Namespace, options: VerifyOptions, output: OutputOptions, standard_output: StandardOutput
) -> int:
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
    if not output.quiet:
        say(header.splitlines())
    done = _Run(output, Path.cwd(), header.splitlines(), arguments.stop_on_violation)
    try:
        _verify_all(subjects, options, about, done)
    finally:
        results = [verified.result for verified in done.verified]
        stale = no_longer_found(output.baseline, results)
        document = results_to_json(results, about, stale)
        # bad input stops the work before any result: then nothing is written
        if (json := output.json) is not None and (results or done.interrupted):
            exit_status.attempt(PROGRAM, lambda: write_json(done.folder / json, document))
        if output.output_format != "text" and (results or done.interrupted):
            notices = notices_of(results, stale)
            standard_output.document = rendered(output.output_format, document, notices, done.folder)
        if (html := output.html) is not None and results:
            exit_status.attempt(PROGRAM, lambda: _write_page(html, done))
    for line in stale:
        exit_status.fail(PROGRAM, line)
    violated = bool(stale) or any(result.violations for result in results)
    unjudged = [f"{result.loop}: {result.unjudged}" for result in results if result.unjudged]
    if unjudged and not violated and not done.interrupted:
        raise UsageError(unjudged[0])
    if not output.quiet:
        say([verdict_text.summary(results, len(subjects), interrupted=done.interrupted)])
    findings = any(result.findings for result in results)
    return exit_status.status_of(violated=violated, findings=findings, interrupted=done.interrupted)


@dataclass
class _Run:
    """The verifications so far, what was printed on them and stored, and whether Ctrl-C has stopped them.

    Paths of the arguments are relative to the folder in which the command began: a loop may leave it.
    """

    output: OutputOptions
    folder: Path
    lines: list[str]
    stop_on_violation: bool = False
    verified: list[Verified] = field(default_factory=list)
    stored: list[tuple[Path, Path]] = field(default_factory=list)
    interrupted: bool = False


def _verify_all(subjects: list[Subject], options: VerifyOptions, about: dict[str, Any], done: _Run) -> None:
    """Verify, store and print the subjects one after the other, until Ctrl-C, or the first violation with `-x`."""
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
                found = verify_subject(subject, chosen, advance)
                verified = replace(found, result=found.result.accepting(done.output.baseline))
                done.verified.append(verified)
                _keep(subject, chosen, verified, about, done, width, progress.stop)
                if verified.result.interrupted or pressed:
                    done.interrupted = True
                    return
                if done.stop_on_violation and verified.result.violations:
                    return
        except KeyboardInterrupt:
            done.interrupted = True


def _keep(
    subject: Subject,
    options: VerifyOptions,
    verified: Verified,
    about: dict[str, Any],
    done: _Run,
    width: int,
    before: Callable[[], None],
) -> None:
    """Store a violation, print the verdict and the names of its files, then append the record if one is wanted.

    If a file cannot be written, the message follows the verdict, and the exit status stays. The script runs after the
    verdict, too: it imports torch, which takes seconds.
    """
    from gradcheck_suite.cli.verdict_text import file_lines

    result, reports = verified.result, done.output.reports
    shown = DEFAULT_REPORTS if reports is None else reports
    refusal: UsageError | None = None
    stored = None
    try:
        stored = store(subject, options, verified, done.folder / shown, about)
    except UsageError as error:
        refusal = error
    before()
    lines = result_lines(result, width=width)
    if done.output.quiet:
        say(["  ".join([lines[0], *(violation.title for violation in result.violations)])])
    else:
        say(lines)
    if stored is not None and stored.script is not None and result.violation is not None:
        from gradcheck_suite.script import unrepeatable

        why = unrepeatable(stored.script, result.violation, options.time_limit_s)
        stored = replace(stored, unrepeatable=why)
    files = stored and stored.seen_from(done.folder / shown, shown)
    if files and not done.output.quiet:
        say(file_lines(files, options))
    done.lines.append(lines[0])
    done.stored += [(stored.case, files.case)] if stored and files else []
    if refusal is not None:
        exit_status.fail(PROGRAM, str(refusal))
    folder = None if reports is None else done.folder / reports
    exit_status.attempt(PROGRAM, lambda: record(subject, options, verified, folder, about, stored))


def _write_page(html: Path, done: _Run) -> None:
    """Write the page of the run and its violations, print its name, and open it if there is a violation."""
    from gradcheck_suite.page.render import open_page, violations_html
    from gradcheck_suite.page.violation import read_violation

    path = done.folder / html
    write_text(path, violations_html([read_violation(*paths) for paths in done.stored], done.lines))
    say([f"page    {html}"])
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


def modes_of(framework: str | None, ranks: int) -> dict[str, Loop]:
    """Return the reset modes of a framework, `"torch"`, `"jax"` or `"all"`, or those for several ranks."""
    from gradcheck_suite.loops.jax_modes import JAX_MODES
    from gradcheck_suite.loops.ranks import RANK_MODES
    from gradcheck_suite.loops.reset_modes import MODES

    if ranks > 1:
        return dict(RANK_MODES)
    return {**({} if framework == "jax" else MODES), **(JAX_MODES if framework in ("jax", "all") else {})}


def _subjects(arguments: argparse.Namespace, options: VerifyOptions) -> list[Subject]:
    """Load the loops and the problem; raise `UsageError` if a loop's assumptions exclude the problem."""
    from gradcheck_suite.cli.loading import resolve_loop, resolve_problem
    from gradcheck_suite.loops.ranks import RANK_LOOPS
    from gradcheck_suite.strategies.cases import expect_layers_left

    if options.ranks == 1 and (over_ranks := next((text for text in arguments.loops if text in RANK_LOOPS), None)):
        raise UsageError(f"{over_ranks} trains on several ranks: give --ranks 2, 3 or 4")
    problem = None if arguments.problem is None else resolve_problem(arguments.problem)
    loops = {text: resolve_loop(text, arguments.framework) for text in arguments.loops} or modes_of(
        arguments.framework, options.ranks
    )
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
