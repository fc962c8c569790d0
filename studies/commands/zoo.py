"""Run the zoo of known bugs: which are found, after how many cases, with which diagnosis;
whether sound loops hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.case import DTYPES
from gradcheck_suite.core.records import append_record, write_document
from gradcheck_suite.core.results import Result, json_number
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run import environment
from studies.records import KINDS

if TYPE_CHECKING:
    from studies.zoo.bug import Bug
    from studies.zoo.scoreboard import Row

DEFAULT_SEEDS, DEFAULT_EXAMPLES, DEFAULT_SOUND_CASES = 10, 200, 200


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "bugs", nargs="*", metavar="BUG", help="names of bugs; without one, all of them"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the bugs, what they are and where reported"
    )
    parsers.add_number(parser, "--seeds", DEFAULT_SEEDS, "runs per bug", metavar=None)
    parsers.add_number(parser, "--examples", DEFAULT_EXAMPLES, "cases per run", metavar=None)
    parsers.add_number(parser, "--seed", 0, "of the first run", parsers.seed, None)
    parser.add_argument(
        "--counts",
        action="store_true",
        help=(
            "only count after how many drawn cases each run finds its bug, with a record per bug:"
            " no diagnosis, no smaller case, no sound loop"
        ),
    )
    sound = "cases for each sound loop, none of which may be blamed; 0 runs no sound loop"
    parsers.add_number(parser, "--sound-cases", DEFAULT_SOUND_CASES, sound, parsers.natural, None)
    parser.add_argument(
        "--dtype",
        type=parsers.choice_of(DTYPES),
        metavar="DTYPE",
        help=f"of all cases, one of {', '.join(DTYPES)} (default float64)",
    )
    parsers.add_json(parser, "the scoreboard")
    parsers.add_reports(parser, "a run of the whole zoo is recorded in DIR/records")


def run(arguments: argparse.Namespace) -> int:
    """Run the bugs that the arguments name, then the sound loops.

    Print and store the scoreboard.
    """
    environment.expect_main_job()
    bugs = chosen(arguments.bugs)
    if arguments.list:
        for bug in bugs:
            print(
                f"{bug.number or '-':>2}  {bug.name:<26}  {bug.mechanism} "
                f" [{', '.join(bug.citations)}]"
            )
        return exit_status.HOLDS
    parsers.expect_writable(arguments.reports, json=arguments.json)
    environment.prepare()
    if arguments.counts:
        return _count(arguments, bugs)
    from studies.zoo.scoreboard import HEADER, line, summary

    about = environment.environment()
    print(
        f"{len(bugs)} bugs, {arguments.seeds} runs each of up to {arguments.examples} cases, from"
        f" seed {arguments.seed}"
    )
    print(HEADER, flush=True)
    rows: list[Row] = []
    sound: list[Result] = []
    interrupted = False
    try:
        for row in _rows(arguments, bugs):
            rows.append(row)
            print(line(row), flush=True)
        for result in _sound(arguments.sound_cases, arguments.dtype or "float64"):
            sound.append(result)
            print(f"sound loop {result.loop}: {_outcome(result)}", flush=True)
            interrupted = interrupted or result.interrupted
    except KeyboardInterrupt:
        interrupted = True
    print(summary(rows, sound, asked=len(bugs), interrupted=interrupted))
    data = _data(arguments, rows, sound)
    write_document(arguments.json, about, data)
    if not interrupted and not arguments.bugs:
        append_record(arguments.reports, KINDS["zoo"], data, environment=about)
    violated = not (
        all(row.passed for row in rows) and not any(result.violation for result in sound)
    )
    findings = any(result.findings for result in sound)
    return exit_status.status_of(violated=violated, findings=findings, interrupted=interrupted)


def _count(arguments: argparse.Namespace, bugs: list[Bug]) -> int:
    """Count the cases until each bug is found; print and record a line for each as it comes."""
    from gradcheck_suite.run.ranks import kept_ranks
    from studies.zoo.scoreboard import count_cases, counts_line

    about = environment.environment()
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    missed = interrupted = False
    print(f"{'bug':<40} median   most  each of seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    try:
        with kept_ranks():
            for bug in bugs:
                counts = count_cases(bug, seeds, examples=arguments.examples)
                missed |= None in counts.cases
                print(counts_line(counts), flush=True)
                # each by itself, so that a run in parts is one whole in the end
                append_record(
                    arguments.reports, KINDS["zoo-count"], counts.to_json(), environment=about
                )
    except KeyboardInterrupt:
        interrupted = True
    return exit_status.status_of(violated=missed, findings=False, interrupted=interrupted)


def chosen(names: list[str]) -> list[Bug]:
    """Return the bugs of these names, all of them without one; refuse an unknown name."""
    from studies.zoo import BUGS

    for name in names:
        if name not in BUGS:
            raise UsageError(f"expected the name of a bug, one of {', '.join(BUGS)}; got {name!r}")
    return [BUGS[name] for name in names] if names else list(BUGS.values())


def _rows(arguments: argparse.Namespace, bugs: list[Bug]) -> Iterator[Row]:
    from gradcheck_suite.run.ranks import kept_ranks
    from studies.zoo.scoreboard import run_bug

    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    with kept_ranks():
        for bug in bugs:
            row = run_bug(bug, seeds, examples=arguments.examples, dtype=arguments.dtype)
            if any(result.interrupted for result in row.runs):
                # the row is not whole, and what it lacks would read as a bug missed
                raise KeyboardInterrupt
            yield row


def _sound(cases: int, dtype: str) -> Iterator[Result]:
    from gradcheck_suite.loops.reset_modes import BUILT_IN
    from gradcheck_suite.reference import large_batch
    from gradcheck_suite.verification.verify import verify

    # most loops are judged on the same cases, whose references take half of the time
    large_batch.MAX_REFERENCES = max(large_batch.MAX_REFERENCES, cases)
    for name, loop in BUILT_IN.items() if cases else ():
        yield verify(loop, name=name, examples=cases, dtype=dtype, quiet=True)


def _outcome(result: Result) -> str:
    if result.interrupted:
        return f"not blamed in {result.cases} cases (interrupted)"
    if result.violation is None:
        return f"not blamed in {result.cases} cases"
    return f"BLAMED: {result.violation.kind}/{result.violation.diagnosis}"


def _data(arguments: argparse.Namespace, rows: list[Row], sound: list[Result]) -> dict[str, Any]:
    return {
        "dtype": arguments.dtype,
        "seeds": arguments.seeds,
        "examples": arguments.examples,
        "bugs": [row.to_json() for row in rows],
        "sound": [
            {
                "loop": r.loop,
                "cases": r.cases,
                "blamed": r.violation is not None,
                "worst": json_number(r.worst_error_over_allowed),
            }
            for r in sound
        ],
    }
