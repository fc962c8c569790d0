"""Count how often sound loops are blamed, and how small a planted error is found."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.progress import Progress
from gradcheck_suite.core.case import DTYPES
from gradcheck_suite.core.records import append_record
from gradcheck_suite.run import environment
from studies.commands import prepare
from studies.records import KINDS

if TYPE_CHECKING:
    from studies.tally import Curve, Tally

DEFAULT_CHECKS, DEFAULT_PLANTED = 2000, 25


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    natural = parsers.natural
    parsers.add_number(
        parser, "--checks", DEFAULT_CHECKS, "checks of sound loops, in all dtypes", natural
    )
    parsers.add_number(
        parser,
        "--planted",
        DEFAULT_PLANTED,
        "cases in each dtype that errors are planted in",
        natural,
    )
    parsers.add_number(parser, "--seed", 0, "of the cases", parsers.seed, "S")
    parser.add_argument(
        "--dtypes",
        type=parsers.choice_of(DTYPES),
        nargs="+",
        default=list(DTYPES),
        metavar="DTYPE",
        help=f"of {', '.join(DTYPES)}; all of them without this",
    )
    parsers.add_reports(parser, "where the record goes")


def run(arguments: Namespace) -> int:
    """Run the campaign, print its figures and record them."""
    prepare(arguments)
    from studies import calibration, tally

    dtypes = tuple(dict.fromkeys(arguments.dtypes))
    settings = calibration.Settings(arguments.checks, arguments.planted, arguments.seed, dtypes)
    print(
        f"{arguments.checks:,} checks of sound loops and errors planted in {arguments.planted:,}"
        f" cases per dtype, seed {arguments.seed}, {', '.join(dtypes)}",
        flush=True,
    )
    tallies: dict[str, Tally] = {}
    curves: dict[str, Curve] = {}
    interrupted = False
    try:
        with Progress(examples=arguments.checks) as progress:
            progress.start("checks of sound loops")
            calibration.count_alarms(settings, progress.count, tallies)
        with Progress(examples=arguments.planted * len(dtypes)) as progress:
            progress.start("cases with planted errors")
            calibration.trace_curves(settings, progress.count, curves)
    except KeyboardInterrupt:
        interrupted = True
    data = calibration.record(settings, tallies, curves)
    print(*tally.lines(data), sep="\n", flush=True)
    if interrupted:
        print(
            "interrupted, and not recorded: python -m studies campaign calibrate goes on where it"
            " was stopped"
        )
    else:
        append_record(
            arguments.reports, KINDS["calibration"], data, environment=environment.environment()
        )
    findings = any(counts.findings for counts in tallies.values())
    return exit_status.status_of(
        violated=bool(tally.false_alarms(data)), findings=findings, interrupted=interrupted
    )
