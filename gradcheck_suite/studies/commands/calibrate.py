"""Count how often sound loops are blamed, and how small a planted error is found, by the suite and by other rules."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gradcheck_suite.cli import arguments as output_paths
from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.progress import Progress
from gradcheck_suite.core.case import DTYPES
from gradcheck_suite.core.records import append_record
from gradcheck_suite.run import environment

if TYPE_CHECKING:
    from gradcheck_suite.studies.tally import Curve, Tally

DEFAULT_CHECKS, DEFAULT_PLANTED = 2000, 25


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--checks",
        type=parsers.natural,
        default=DEFAULT_CHECKS,
        metavar="N",
        help="checks of sound loops, in all dtypes (default %(default)s)",
    )
    parser.add_argument(
        "--planted",
        type=parsers.natural,
        default=DEFAULT_PLANTED,
        metavar="N",
        help="cases in each dtype that errors are planted in (default %(default)s)",
    )
    parser.add_argument("--seed", type=parsers.seed, default=0, metavar="S", help="of the cases (default %(default)s)")
    parser.add_argument(
        "--dtypes",
        type=parsers.one_of(DTYPES),
        nargs="+",
        default=list(DTYPES),
        metavar="DTYPE",
        help=f"of {', '.join(DTYPES)}; all of them without this",
    )
    output_paths.add_reports(parser, "where the record goes")


def run(arguments: argparse.Namespace) -> int:
    """Run the campaign, print its figures and record them."""
    environment.expect_main_job()
    output_paths.expect_writable(arguments.reports)
    environment.prepare()
    from gradcheck_suite.studies import calibration
    from gradcheck_suite.studies import tally as console_table
    from gradcheck_suite.studies.tally import false_alarms

    dtypes = tuple(dict.fromkeys(arguments.dtypes))
    settings = calibration.Settings(arguments.checks, arguments.planted, arguments.seed, dtypes)
    print(
        f"{arguments.checks:,} checks of sound loops and errors planted in {arguments.planted:,} cases per dtype, "
        f"seed {arguments.seed}, {', '.join(dtypes)}",
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
    print("\n".join(console_table.lines(data)))
    if interrupted:
        print("interrupted, and not recorded: gradcheck-suite campaign calibrate goes on where it was stopped")
    else:
        about: dict[str, Any] = environment.environment()
        append_record(arguments.reports, "calibration", data, environment=about)
    findings = any(tally.findings for tally in tallies.values())
    return exit_status.status_of(violated=bool(false_alarms(data)), findings=findings, interrupted=interrupted)
