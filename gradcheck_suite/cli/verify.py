"""Verify loops: each trains random models on random splits, and every gradient that reaches its
optimizer is judged.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.arguments import OutputOptions, add_options, parsed
from gradcheck_suite.cli.exit_status import noted_interrupts
from gradcheck_suite.cli.loading import expect_found, libraries_of, note_untested_trainers
from gradcheck_suite.cli.progress import CommandOutput, Progress
from gradcheck_suite.cli.waiting import IMPORTS, LapTimer, waiting
from gradcheck_suite.core.contract import (
    DEFAULT_TIME_LIMIT,
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
from gradcheck_suite.core.counterexamples import Counterexample, store_counterexample
from gradcheck_suite.core.options import ChosenOptions, VerifyOptions
from gradcheck_suite.core.records import (
    KINDS,
    append_record,
    expect_writable_folder,
    judge_digest,
    write_text,
)
from gradcheck_suite.core.results import (
    Result,
    Verdict,
    Violation,
    no_longer_found,
    result_lines,
)
from gradcheck_suite.core.source_lines import loop_source
from gradcheck_suite.core.text import aligned, counted, say, summary_of
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.trainers import PACKAGES, TRAINERS
from gradcheck_suite.run import environment
from gradcheck_suite.run.private_names import expect_present
from gradcheck_suite.run.processes import may_fork, template_ahead
from gradcheck_suite.strategies.coverage import CaseCoverage, Coverage
from gradcheck_suite.verification.judge_process import SERVE, second_process

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


def verify_subject(
    subject: Subject, options: VerifyOptions, progress: Callable[[Verdict], None]
) -> tuple[Result, Coverage]:
    """Verify a loop; return the result, and how many judged cases had each layer, loss and kind of
    split.

    Args:
        subject: the loop.
        options: of the verification.
        progress: called with every verdict.
    """
    from gradcheck_suite.verification.verify import verify

    reach = CaseCoverage()

    def note(verdict: Verdict) -> None:
        # what was not judged covers nothing: a layer that only skipped cases have was not tried
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
        # the lines are printed by this module, which also knows the files and how far the run has
        # come
        quiet=True,
    )
    return result, reach.to_json()


def store(
    subject: Subject,
    options: VerifyOptions,
    result: Result,
    reports: Path,
    environment: Mapping[str, Any],
) -> Counterexample | None:
    """Store a violation under a reports folder; return its files, or None if the loop holds.

    Raises:
        UsageError: a file cannot be written.
    """
    violation = result.violation
    stored = None
    if violation is not None:
        case = store_counterexample(reports, result, environment, loop_source(subject.loop))
        stored = _with_script(subject, options, result, case)
    return stored


def _with_script(
    subject: Subject, options: VerifyOptions, result: Result, case: Path
) -> Counterexample:
    """Write the script of a violation beside its case; return both, or why there is no script."""
    from gradcheck_suite.script import NoScriptError, script_text

    assert result.violation is not None
    # such as a lambda: only the process that made it has it
    if not subject.importable:
        why = "the loop is no FILE.py:NAME or package.module:NAME that a script could import"
        return Counterexample(case, None, why)
    # a weight probe that was checked beside the user's problem brings its own
    problem = None if result.violation.case.spec else subject.problem
    try:
        text = script_text(
            subject.loop,
            subject.name,
            result.violation,
            problem=problem,
            time_limit_s=options.time_limit_s,
            assumes=result.assumes,
        )
    except NoScriptError as error:
        return Counterexample(case, None, str(error))
    script = case.with_suffix(".py")
    write_text(script, text)
    return Counterexample(case, script)


def _tried(stored: Counterexample, violation: Violation, options: VerifyOptions) -> Counterexample:
    """Run a script; return the files without it where it does not show the fault, and why not."""
    from gradcheck_suite.script import script_failure

    if stored.script is None:
        return stored
    failure = script_failure(stored.script, violation, options.time_limit_s)
    # it failed with the fault that it was written for, so it shows what the verdict says
    if failure is None:
        return stored
    # it was too slow or could not start here: it may well show the fault on the reader's machine,
    # so it stays, with a word that nobody has seen it fail
    if not failure.is_refuted:
        return replace(stored, no_script=failure.reason)
    # a script that says that the fault is gone, or that fails, would contradict the verdict
    stored.script.unlink(missing_ok=True)
    return replace(stored, script=None, no_script=failure.reason)


def record(
    subject: Subject,
    options: VerifyOptions,
    result: Result,
    reached: Coverage,
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
        **result.to_json(),
        "problem": subject.problem_name,
        "reached": reached,
        "stored": stored and stored.case.name,
        "no_script": stored and stored.no_script,
    }
    append_record(
        reports,
        KINDS["verify"],
        data,
        environment=environment,
    )


# What a run prints: its first lines, the files of a violation, the summary.


def header(
    loops: Iterable[str],
    chosen: Mapping[bool, ChosenOptions],
    problem: str | None,
    about: Mapping[str, Any],
    libraries: Iterable[str] = (),
) -> list[str]:
    """Return the first lines of a run of `verify`: versions, options and precision flags.

    Args:
        loops: the names of the loops, as the command line has them.
        chosen: whether loops are of JAX -> the options of these loops.
        problem: the name of the user's problem, None for generated ones.
        about: the environment.
        libraries: the distributions that the loops import.
    """
    versions = about["versions"]
    flags = about["precision"]
    # the first kind of loop fills the line, and the other kind adds only what is different of it
    options = next(iter(chosen.values()))
    optimizer = "" if options.optimizer is None else f", optimizer {options.optimizer}"
    others = "".join(
        f"; of JAX {counted(o.examples, 'case')}, {o.dtype}"
        for o in chosen.values()
        if o != options
    )
    lines = [
        (
            f"{subjects(loops, versions, libraries)}: {counted(options.examples, 'case')} per loop,"
            f" seed {options.seed}, {options.dtype} on {options.device}{optimizer}{others}"
        ),
        (
            # printed with every run, since TF32 keeps ten bits of each factor, where float32 keeps
            # 23
            f"matmul precision: torch {flags.get('torch_float32_matmul_precision')} "
            f"(TF32 {_on(flags.get('torch_cuda_matmul_allow_tf32'))}, "
            f"cuDNN TF32 {_on(flags.get('torch_cudnn_allow_tf32'))}), "
            f"jax {flags.get('jax_default_matmul_precision')}"
        ),
    ]
    if problem is not None:
        lines.append(f"problem {problem}: only plans are drawn")
    return lines


def subjects(
    names: Iterable[str], versions: Mapping[str, str | None], libraries: Iterable[str] = ()
) -> str:
    """Return the versions on which a verdict depends: of the suite, the frameworks and the loops'
    libraries.
    """
    trainers = [TRAINERS[name] for name in names if name in TRAINERS]
    packages = dict.fromkeys(chain.from_iterable(trainer.packages for trainer in trainers))
    # keys alone: a library that two loops share is named once, in the order of the loops
    packages |= dict.fromkeys(libraries)
    return ", ".join(
        f"{name} {versions[name]}" for name in ("gradcheck-suite", "torch", "jax", *packages)
    )


def file_lines(
    stored: Counterexample, options: VerifyOptions, seen: Callable[[Path], Path]
) -> list[str]:
    """Return the files of a violation in words.

    Args:
        stored: the files.
        options: of the verification.
        seen: returns a path as messages have it.
    """
    # only what differs from the default, so that the line stays short enough to copy
    further = (
        ""
        if options.time_limit_s == DEFAULT_TIME_LIMIT
        else f" --time-limit {options.time_limit_s:g}"
    )
    further += "" if options.autocast is None else f" --autocast {options.autocast}"
    lines = [f"    stored  {seen(stored.case)}"]
    if stored.script is not None:
        unknown = "" if stored.no_script is None else f"  (not seen to fail: {stored.no_script})"
        lines.append(f"    script  python {shlex.quote(str(seen(stored.script)))}{unknown}")
    elif stored.no_script is not None:
        lines.append(f"    script  none: {stored.no_script}")
    return [
        *lines,
        f"    replay  gradcheck-suite replay {shlex.quote(str(seen(stored.case)))}{further}",
    ]


def summary(
    results: Sequence[Result], asked: int, *, interrupted: bool, examples: int | None = None
) -> str:
    """Return the last line: how many loops hold.

    Args:
        results: of the loops that were verified.
        asked: number of loops.
        interrupted: whether Ctrl-C ended the run.
        examples: cases that were asked for, of a run of one loop.
    """
    violated = [result.loop for result in results if result.violations]
    # of one loop it says how many cases were tried: "0 of 1 loop" would tell nothing of the run's
    # worth
    if interrupted and asked == 1:
        return _summary_of_one(results, examples)
    complete = [result for result in results if not result.interrupted]
    if violated:
        text = f"{len(violated)} of {counted(asked, 'loop')} violated: {', '.join(violated)}"
    elif interrupted:
        text = f"no violation so far in {counted(asked, 'loop')}"
    else:
        text = f"all {asked} loops hold" if asked > 1 else "the loop holds"
    # "the loop holds" with an accepted fault would be read as a clean loop
    if accepted := sum(len(result.accepted) for result in results):
        text += f"; {counted(accepted, 'fault')} accepted"
    if found := sum(len(result.findings) for result in results):
        text += f"; torch and JAX disagree: {counted(found, 'finding')} above"
    if interrupted:
        text += f"; interrupted, {len(complete)} of {counted(asked, 'loop')} went to the end"
    return text


def _summary_of_one(results: Sequence[Result], examples: int | None) -> str:
    """Return the last line of a run of one loop that Ctrl-C ended."""
    cases = results[0].cases if results else 0
    of = counted(cases, "case") if examples is None else f"{cases} of {counted(examples, 'case')}"
    violated = any(result.violations for result in results)
    return f"interrupted after {of}: {'violated' if violated else 'no violation so far'}"


def _on(flag: Any) -> str:
    # a build without CUDA has no such flag, and then None is printed and not "off"
    return ("on" if flag else "off") if isinstance(flag, bool) else str(flag)


# The command.


FEW_CASES = 50
"""Cases of all loops below which a second process would hardly have started."""


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "loops",
        nargs="*",
        metavar="LOOP",
        help=(
            "FILE.py:NAME, package.module:NAME, the name of a built-in loop or a trainer; without"
            " LOOP, every built-in reset mode"
        ),
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help=(
            "print the built-in loops and the trainers, and stop; with --ranks, those for several"
            " ranks"
        ),
    )
    parsers.add_framework(parser, ("torch", "jax", "all"))
    parsers.add_problem(parser)
    add_options(parser, VerifyOptions)
    parser.add_argument(
        "--processes",
        type=int,
        choices=(1, 2),
        default=environment.processes(),
        help=(
            "2: judge in a second process while the loop runs on, with the same verdicts"
            f" (default: {environment.PROCESSES_VARIABLE}, or 2 where there are two processors)"
        ),
    )
    parser.add_argument(
        "-x", "--stop-on-violation", action="store_true", help="stop after the first violated loop"
    )
    add_options(parser, OutputOptions)


def run(arguments: argparse.Namespace) -> int:
    """Verify the loops that the arguments name; print and store the results."""
    # it begins before the imports, which the user waits for too
    stopwatch = LapTimer()
    environment.expect_main_job()
    if arguments.list:
        return _list(arguments.ranks)
    # all that can be refused is refused before torch is imported: a typo costs no seconds
    wanted = parsed(arguments, OutputOptions).writable(PROGRAM)
    not_stored = _why_not_stored(wanted)
    for text in arguments.loops:
        expect_found(text, is_loop=True)
    if arguments.problem is not None:
        expect_found(arguments.problem)
    options = parsed(arguments, VerifyOptions)
    wants_process = _is_worth_a_process(arguments, options)
    forks = may_fork()
    with (
        CommandOutput(wanted) as output,
        # both start before the imports below, so that they import torch at the same time as this
        # process
        template_ahead(wanted=options.ranks > 1),
        second_process(wanted=wants_process and not forks),
    ):
        with waiting(IMPORTS):
            environment.prepare()
            expect_present("verify")
            import_module(SERVE)
        # before anything is computed, and before a user's code is imported
        with second_process(wanted=wants_process and forks, forks=True):
            return _verify(arguments, options, output, not_stored, stopwatch)


def _why_not_stored(wanted: OutputOptions) -> str:
    """Return why counterexamples cannot be stored in the default folder, empty where they can.

    Nobody asked for that folder: a read-only one is no reason not to judge.

    Raises:
        UsageError: the user named the folder, and nothing can be written there.
    """
    folder = (wanted.reports or DEFAULT_REPORTS) / COUNTEREXAMPLES
    if wanted.reports is not None:
        expect_writable_folder(folder, f"--reports {wanted.reports}")
        return ""
    try:
        expect_writable_folder(folder, "counterexamples are not stored")
    except UsageError as error:
        return parsers.warn_of_folder(PROGRAM, error)
    return ""


def _is_worth_a_process(arguments: argparse.Namespace, options: VerifyOptions) -> bool:
    """Whether a second process, which takes seconds to start, can judge enough: generated problems
    on one CPU rank.
    """
    if (
        arguments.processes == 1
        or arguments.problem is not None
        or options.ranks > 1
        or options.device != "cpu"
    ):
        return False
    return (options.examples or FEW_CASES) * max(len(arguments.loops), 1) >= FEW_CASES


def _verify(
    arguments: argparse.Namespace,
    options: VerifyOptions,
    output: CommandOutput,
    not_stored: str,
    stopwatch: LapTimer,
) -> int:
    with waiting("loading the loops"):
        subjects = _subjects(arguments, options)

    from gradcheck_suite.run.instance import checked_device
    from gradcheck_suite.run.ranks import expect_ranks

    checked_device(options.device)
    if options.ranks > 1:
        expect_ranks(options.ranks, options.device)
        judge_digest()  # its sources are read while the ranks' process imports torch, and kept for the records
    libraries = dict.fromkeys(chain.from_iterable(libraries_of(each.loop) for each in subjects))
    # after the import of the loops, since it names the versions that were loaded
    about = environment.environment((*PACKAGES, *libraries))
    chosen = {is_jax(subject.loop): options.of(subject.loop) for subject in subjects}
    lines = header(arguments.loops, chosen, arguments.problem, about, libraries)
    quiet = output.options.quiet
    if not quiet:
        say(lines)
    done = _Run(
        output,
        lines,
        stopwatch,
        arguments.stop_on_violation,
        not_stored,
    )
    try:
        _verify_all(subjects, options, about, done)
    finally:
        results = done.results
        # an exception of the fourth loop must not lose the verdicts on the first three
        stale = no_longer_found(output.options.baseline, results)
        # bad input stops the work before any result: then nothing is written
        if results or done.interrupted:
            output.deliver(PROGRAM, results, about, done.page, stale)
    # an accepted fault that is gone fails the run: its entry would hide the next fault of this name
    violated = bool(stale) or any(result.violations for result in results)
    # a run in which nothing could be judged must not pass; a violation is told first
    if not violated and not done.interrupted:
        _expect_judged(results)
    if not quiet:
        examples = options.of(subjects[0].loop).examples
        say([summary(results, len(subjects), interrupted=done.interrupted, examples=examples)])
    return exit_status.status_of(
        violated=violated,
        findings=any(result.findings for result in results),
        interrupted=done.interrupted,
    )


def _expect_judged(results: Sequence[Result]) -> None:
    unjudged = [f"{result.loop}: {result.unjudged}" for result in results if result.unjudged]
    if unjudged:
        raise UsageError(unjudged[0])


@dataclass
class _Run:
    """The verifications so far, what was printed on them and stored, and whether Ctrl-C has stopped
    them.

    `not_stored` says why nothing is stored; empty where it is.
    """

    output: CommandOutput
    lines: list[str]
    stopwatch: LapTimer
    stop_on_violation: bool = False
    not_stored: str = ""
    results: list[Result] = field(default_factory=list)
    stored: list[Path] = field(default_factory=list)
    interrupted: bool = False

    def page(self) -> str:
        """Return the page of the run and its violations."""
        from gradcheck_suite.page.render import violations_html
        from gradcheck_suite.page.violation import read_violation

        return violations_html(
            [read_violation(path, self.output.seen(path)) for path in self.stored], self.lines
        )


def _verify_all(
    subjects: list[Subject], options: VerifyOptions, about: dict[str, Any], done: _Run
) -> None:
    """Verify, store and print the subjects one after the other, until Ctrl-C, or the first
    violation with `-x`.
    """
    from gradcheck_suite.run.ranks import kept_ranks
    from gradcheck_suite.verification.ahead import caller_checks_programs

    # known beforehand, so that the verdicts stand under each other though they come one by one
    width = max(len(subject.name) for subject in subjects)
    then = None if subjects[0].problem is None else "judged, asking JAX for a second opinion"
    with (
        Progress(then=then) as progress,
        noted_interrupts() as pressed,
        kept_ranks(),
        caller_checks_programs(),
    ):

        def advance(verdict: Verdict) -> None:
            if pressed:
                # a loop that catches every exception has swallowed the interrupt
                raise KeyboardInterrupt
            progress.advance(verdict)

        try:
            for number, subject in enumerate(subjects, 1):
                chosen = options.of(subject.loop)
                progress.start(subject.name, chosen.examples)
                found, reached = verify_subject(subject, chosen, advance)
                progress.stop()
                # what the user has waited for, with the imports: the time in `verify` alone would
                # look better than it is
                found = replace(found, seconds=done.stopwatch.lap())
                result = found.accepting(done.output.options.baseline)
                # before it is stored and recorded: Ctrl-C there keeps the verdict
                done.results.append(result)
                stored = _keep(subject, chosen, result, about, done, width)
                stops = done.stop_on_violation and bool(result.violations)
                # after Ctrl-C the programs are left unchecked: it would take seconds that the user
                # has refused
                if not (result.interrupted or pressed):
                    is_last = stops or number == len(subjects)
                    result = _check_programs(done, is_last=is_last)
                # recorded last, since the check of the programs may add a finding to the result
                reports = done.output.options.reports
                exit_status.attempt(
                    PROGRAM,
                    partial(record, subject, chosen, result, reached, reports, about, stored),
                )
                if result.interrupted or pressed:
                    done.interrupted = True
                    return
                if stops:
                    return
        except KeyboardInterrupt:
            done.interrupted = True


def _check_programs(done: _Run, *, is_last: bool) -> Result:
    """Let XLA check the programs that numpy has evaluated: beside the next loop, or now.

    Return the result of the last loop, with what XLA computes otherwise among its findings.
    """
    from gradcheck_suite.verification.ahead import check_programs_beside, checked_programs

    result = done.results[-1]
    # XLA compiles while the next loop runs, and its answer is collected with the last loop's
    if not is_last:
        check_programs_beside()
        return result
    with waiting("XLA checks JAX's derivatives as numpy evaluates them") as show:
        checks = checked_programs(
            lambda left: show(
                "XLA checks JAX's derivatives as numpy evaluates them:"
                f" {counted(left, 'program')} left"
            )
        )
    # the differences of all loops' programs are collected here, so they stand with the last result
    if checks.differences:
        result = done.results[-1] = replace(
            result, findings=(*result.findings, *checks.differences)
        )
        say(f"    finding, for which no loop is to blame: {text}" for text in checks.differences)
    return result


def _keep(
    subject: Subject,
    options: VerifyOptions,
    result: Result,
    about: dict[str, Any],
    done: _Run,
    width: int,
) -> Counterexample | None:
    """Print the verdict, then store a violation and print the names of its files; return these.

    If a file cannot be written, a message says so, and the exit status stays. The script runs after
    the verdict, too: it imports torch, which takes seconds.
    """
    output = done.output
    quiet = done.output.options.quiet
    lines = result_lines(result, width=width)
    done.lines.append(lines[0])
    say(
        ["  ".join([lines[0], *(violation.title for violation in result.violations)])]
        if quiet
        else lines
    )
    if done.not_stored:
        return None
    reports = output.options.reports or output.folder / DEFAULT_REPORTS
    # a full disk must not take the place of the verdict
    stored = exit_status.attempt(PROGRAM, lambda: store(subject, options, result, reports, about))
    if stored is None:
        return None
    if result.violation is not None:
        with waiting("running the script of the violation"):
            stored = _tried(stored, result.violation, options)
    done.stored.append(stored.case)
    if not quiet:
        say(file_lines(stored, options, output.seen))
    return stored


def _list(ranks: int) -> int:
    from gradcheck_suite.loops.jax_modes import JAX_MODES
    from gradcheck_suite.loops.ranks import RANK_LOOPS
    from gradcheck_suite.loops.reset_modes import BUILT_IN

    loops = {**BUILT_IN, **JAX_MODES} if ranks == 1 else RANK_LOOPS
    # a loop's docstring describes it, so that the two cannot differ
    built_in = [(name, summary_of(loop)) for name, loop in loops.items()]
    trainers = [(name, f"{trainer.about} [{trainer.status}]") for name, trainer in TRAINERS.items()]
    rows = [*built_in, *(trainers if ranks == 1 else [])]
    say(aligned(rows))
    return exit_status.HOLDS


def reset_modes_of(framework: str | None, ranks: int) -> dict[str, Loop]:
    """Return the reset modes of a framework, `"torch"`, `"jax"` or `"all"`, or those for several
    ranks.
    """
    from gradcheck_suite.loops.jax_modes import JAX_MODES
    from gradcheck_suite.loops.ranks import RANK_MODES
    from gradcheck_suite.loops.reset_modes import MODES

    if ranks > 1:
        return dict(RANK_MODES)
    return {
        **({} if framework == "jax" else MODES),
        **(JAX_MODES if framework in ("jax", "all") else {}),
    }


def _subjects(arguments: argparse.Namespace, options: VerifyOptions) -> list[Subject]:
    """Load the loops and the problem.

    Raise `UsageError` if a loop's assumptions exclude the problem.
    """
    from gradcheck_suite.cli.loading import resolve_loop, resolve_problem
    from gradcheck_suite.loops.ranks import RANK_LOOPS
    from gradcheck_suite.strategies.cases import expect_layers_left

    # they would run on one rank, too, and hold there: a verdict on nothing that they are about
    if options.ranks == 1 and (
        over_ranks := next((text for text in arguments.loops if text in RANK_LOOPS), None)
    ):
        raise UsageError(f"{over_ranks} trains on several ranks: give --ranks 2, 3 or 4")
    problem = None if arguments.problem is None else resolve_problem(arguments.problem)
    loops = {
        text: resolve_loop(text, arguments.framework) for text in arguments.loops
    } or reset_modes_of(arguments.framework, options.ranks)
    note_untested_trainers(loops)
    for name, loop in loops.items():
        try:
            # each loop before any is verified: otherwise the tenth would be refused after minutes
            assumes = checked_assumptions({*options.assumes, *assumptions_of(loop)})
            checked_autocast(autocast_of(loop))
            expect_layers_left(assumes)
        except (UsageError, TypeError) as error:
            raise UsageError(f"{name}: {error}") from None
        if problem is not None:
            expect_within(
                problem,
                assumes,
                loop=name,
                name=arguments.problem,
            )
    return [
        Subject(
            name,
            loop,
            problem,
            arguments.problem,
        )
        for name, loop in loops.items()
    ]
