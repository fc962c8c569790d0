"""Verify loops: each trains random models on random splits, and every gradient that reaches its optimizer is judged."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradcheck_suite.cli import parsers, places, statuses
from gradcheck_suite.cli.interrupts import noted_interrupts
from gradcheck_suite.cli.notes import note_untested_trainers
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.execution import environment
from gradcheck_suite.generation.coverage import Reach
from gradcheck_suite.records.counterexamples import store_counterexample, store_script
from gradcheck_suite.records.files import write_json
from gradcheck_suite.records.store import append_record, this_command
from gradcheck_suite.schema.case import DEVICES, DTYPES
from gradcheck_suite.schema.contract import (
    ASSUMPTIONS,
    SUM_REDUCTION,
    Loop,
    Problem,
    assumptions_of,
    checked_assumptions,
)
from gradcheck_suite.schema.options import OPTIMIZER_NAMES
from gradcheck_suite.schema.results import Result, Verdict, results_to_json
from gradcheck_suite.trainers import PACKAGES, TRAINERS

if TYPE_CHECKING:
    from gradcheck_suite.cli.progress import Progress


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "loops",
        nargs="*",
        metavar="LOOP",
        help="FILE.py:NAME, package.module:NAME, a built-in's or a trainer's name; without one, every built-in reset "
        "mode",
    )
    parser.add_argument("--list", action="store_true", help="print the built-in loops and the trainers, and stop")
    parsers.add_problem(parser)
    parser.add_argument(
        "--examples",
        type=parsers.positive_integer,
        default=200,
        metavar="N",
        help="cases drawn for each loop (default %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=parsers.seed,
        default=0,
        metavar="S",
        help="same seed and same versions, same cases (default %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        type=parsers.one_of(DTYPES),
        default="float64",
        metavar="DTYPE",
        help=f"of parameters and data: {', '.join(DTYPES)} (default %(default)s)",
    )
    parser.add_argument(
        "--device",
        type=parsers.one_of(DEVICES),
        default="cpu",
        metavar="DEVICE",
        help=f"{' or '.join(DEVICES)} (default %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        type=parsers.one_of(OPTIMIZER_NAMES),
        metavar="NAME",
        help="a real optimizer, so that parameters move and their path is judged too: "
        f"{', '.join(OPTIMIZER_NAMES)} (default: one whose step changes nothing)",
    )
    parser.add_argument(
        "--assume",
        action="append",
        default=[],
        type=parsers.one_of(ASSUMPTIONS),
        metavar="NAME",
        help="what the loops rely on, so that only such cases are drawn; repeatable: "
        + "; ".join(f"{name} ({meaning})" for name, meaning in ASSUMPTIONS.items()),
    )
    parsers.add_time_limit(parser)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here as JSON")
    places.add_reports(parser, "counterexamples go to DIR/counterexamples")


@dataclass
class _Judged:
    """What one loop's judged cases reached, and why the others were not judged."""

    reasons: Counter[str] = field(default_factory=Counter)
    reach: Reach = field(default_factory=Reach)

    def note(self, verdict: Verdict) -> None:
        if reason := verdict.skipped or verdict.finding:
            self.reasons[reason] += 1
        else:
            self.reach.note(verdict.case)

    def nothing(self, result: Result) -> str | None:
        """Return why nothing can be said of the loop, or None where something can."""
        if result.judged or not result.holds or result.interrupted:
            return None
        ((reason, _),) = self.reasons.most_common(1) or [("none was drawn", 0)]
        return f"{result.loop}: none of {result.cases} cases could be judged: {reason}"


def run(arguments: argparse.Namespace) -> int:
    """Verify the loops that the arguments name; print and store what comes out."""
    if arguments.list:
        return _list()
    if reasons := environment.missing():
        raise CannotRunHere(reasons[0])
    places.expect_places(arguments.reports, "counterexamples", json=arguments.json)
    from gradcheck_suite.cli.loading import expect_file

    for text in (*arguments.loops, *([] if arguments.problem is None else [arguments.problem])):
        expect_file(text)  # before torch and jax are imported, which takes seconds
    environment.prepare()
    environment.keep_working_directory_clean()
    environment.set_precision()
    loops, problem = _subjects(arguments)

    from gradcheck_suite.cli import output
    from gradcheck_suite.cli.progress import Progress
    from gradcheck_suite.execution.devices import checked_device

    checked_device(arguments.device)
    about = environment.environment(PACKAGES)
    print(output.header(arguments, about), flush=True)
    results: list[Result] = []
    unjudged: list[str] = []
    interrupted = False
    width = max(map(len, loops))
    asked = None if problem is None else "judged, asking JAX for a second opinion"
    with Progress(examples=arguments.examples, then=asked) as progress, noted_interrupts() as pressed:
        try:
            for name, loop in loops.items():
                judged = _Judged()
                result = _verify(arguments, name, loop, problem, judged, progress, pressed)
                results.append(result)
                nothing = judged.nothing(result)
                stored = None if result.holds else _store(arguments, result, loop, problem, about)
                _record(arguments, result, stored, judged, about)
                progress.stop()
                _show(arguments, result, stored, width, judged=nothing is None)
                if nothing:
                    unjudged.append(nothing)
                if result.interrupted or pressed:
                    interrupted = True
                    break
        except KeyboardInterrupt:
            interrupted = True
        finally:
            # not where bad input has stopped the work before anything was found out
            if arguments.json is not None and (results or interrupted):
                write_json(arguments.json, results_to_json(results, about))
    violated = any(not result.holds for result in results)
    if unjudged and not violated and not interrupted:
        raise UsageError(unjudged[0])
    print(output.summary(results, len(loops), interrupted=interrupted), flush=True)
    return statuses.VIOLATED if violated else statuses.INTERRUPTED if interrupted else statuses.HOLDS


def _list() -> int:
    if reasons := environment.missing():
        raise CannotRunHere(reasons[0])
    from gradcheck_suite.loops import BUILT_IN

    width = max(map(len, [*BUILT_IN, *TRAINERS]))
    for name, loop in BUILT_IN.items():
        print(f"{name:<{width}}  {(loop.__doc__ or '').strip().splitlines()[0]}")
    for name, trainer in TRAINERS.items():
        print(f"{name:<{width}}  {trainer.about} [{trainer.status}]")
    return statuses.HOLDS


def _subjects(arguments: argparse.Namespace) -> tuple[dict[str, Loop], Problem | None]:
    """Load the loops, by name, and the problem; refuse what cannot go together."""
    from gradcheck_suite.cli.loading import resolve_loop, resolve_problem

    problem = None if arguments.problem is None else resolve_problem(arguments.problem)
    if arguments.loops:
        loops = {text: resolve_loop(text) for text in arguments.loops}
        note_untested_trainers(loops)
    else:
        from gradcheck_suite.loops.modes import MODES

        loops = dict(MODES)
    for name, loop in loops.items():
        try:
            assumes = checked_assumptions({*arguments.assume, *assumptions_of(loop)})
        except (UsageError, TypeError) as error:
            raise UsageError(f"{name}: {error}") from None
        if problem is not None and SUM_REDUCTION in assumes and problem.reduction != "sum":
            raise UsageError(
                f"{name} assumes sum-reduction, but the reduction of {arguments.problem} is 'mean': "
                "drop the assumption or pass a problem with reduction='sum'"
            )
    return loops, problem


def _verify(
    arguments: argparse.Namespace,
    name: str,
    loop: Loop,
    problem: Problem | None,
    judged: _Judged,
    progress: Progress,
    pressed: list[int],
) -> Result:
    from gradcheck_suite.verification.verify import verify

    progress.start(name)

    def note(verdict: Verdict) -> None:
        if pressed:
            # a loop that catches everything has swallowed the interrupt
            raise KeyboardInterrupt
        judged.note(verdict)
        progress.advance(verdict)

    return verify(
        loop,
        name=name,
        problem=problem,
        problem_name=arguments.problem or "problem",
        examples=arguments.examples,
        seed_value=arguments.seed,
        dtype=arguments.dtype,
        device=arguments.device,
        optimizer=arguments.optimizer,
        assumes=arguments.assume,
        time_limit_s=arguments.time_limit,
        progress=note,
    )


def _store(
    arguments: argparse.Namespace, result: Result, loop: Loop, problem: Problem | None, about: dict[str, Any]
) -> tuple[Path, Path]:
    """Store a violation and the script that shows it; return where."""
    from gradcheck_suite.report.scripts import script_text

    assert result.violation is not None
    case = store_counterexample(arguments.reports, result, about)
    text = script_text(loop, result.loop, result.violation, problem=problem, time_limit_s=arguments.time_limit)
    return case, store_script(case, text)


def _record(
    arguments: argparse.Namespace,
    result: Result,
    stored: tuple[Path, Path] | None,
    judged: _Judged,
    about: dict[str, Any],
) -> None:
    """Append the result to the records that the report is built from."""
    data = {
        **result.to_json(),
        "reached": judged.reach.to_json(),
        "problem": arguments.problem,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "optimizer": arguments.optimizer,
        "seed": arguments.seed,
        "stored": None if stored is None else stored[0].name,
    }
    append_record(arguments.reports, "verify", data, environment=about, command=this_command())


def _show(
    arguments: argparse.Namespace, result: Result, stored: tuple[Path, Path] | None, width: int, *, judged: bool
) -> None:
    from gradcheck_suite.cli import output

    for line in output.result_lines(result, stored, arguments, width, judged=judged):
        print(line)
    sys.stdout.flush()
