"""Print where torch and JAX choose a derivative, at kinks, ties and limits, and which derivative each chooses."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from itertools import groupby
from typing import TYPE_CHECKING

from gradcheck_suite.cli import arguments as output_paths
from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.records import append_record, write_document
from gradcheck_suite.core.text import aligned
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run import environment

if TYPE_CHECKING:
    from gradcheck_suite.studies.atlas import Row


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help="such as relu; without one, all of them")
    output_paths.add_rows(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compute, print and record the rows. That torch and JAX differ at a point is no failure."""
    environment.expect_main_job()
    output_paths.expect_writable(arguments.reports, json=arguments.json)
    environment.prepare()
    from gradcheck_suite.run.instance import checked_device
    from gradcheck_suite.studies import atlas
    from gradcheck_suite.studies.atlas_points import POINTS

    checked_device(arguments.device)
    known = dict.fromkeys(point.operation for point in POINTS)
    if unknown := [name for name in arguments.operations if name not in known]:
        near = get_close_matches(unknown[0], known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`gradcheck-suite atlas` prints all of them"
        raise UsageError(f"expected an operation of the atlas, got {unknown[0]!r}: {hint}")
    wanted = set(arguments.operations or known)
    rows = atlas.run([point for point in POINTS if point.operation in wanted], device=arguments.device)
    print("\n".join(_lines(rows)))
    differ = len({(row.point.operation, row.point.at) for row in rows if not row.agree})
    count = len(rows) // len(atlas.DTYPES)
    print(f"points: {count}, each in {' and '.join(atlas.DTYPES)}; torch and JAX differ at {differ}")
    data = {"rows": [row.to_json() for row in rows]}
    about = environment.environment()
    append_record(arguments.reports, "atlas", data, environment=about)
    write_document(arguments.json, about, data)
    return exit_status.HOLDS


def _lines(rows: list[Row]) -> list[str]:
    """Return a line for each point, and one for each further dtype in which it comes out otherwise."""
    table = []
    for (operation, at), of_point in groupby(rows, lambda row: (row.point.operation, row.point.at)):
        shown = ""
        for row in of_point:
            words = f"{'agree ' if row.agree else 'differ'}  {row.convention}"
            if words != shown:
                table.append((f"{operation}, {at}" if not shown else f"    in {row.dtype}", words))
            shown = shown or words
    return aligned(table)
