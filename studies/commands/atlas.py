"""Print where torch and JAX choose a derivative, at kinks, ties and limits, and which derivative
each chooses.
"""

from __future__ import annotations

from argparse import Namespace
from difflib import get_close_matches
from itertools import groupby

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.text import aligned
from gradcheck_suite.errors import UsageError
from studies.commands import add_rows, prepare, record_rows


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "operations", nargs="*", metavar="OPERATION", help="such as relu; without one, all of them"
    )
    add_rows(parser)


def run(arguments: Namespace) -> int:
    """Compute, print and record the rows. That torch and JAX differ at a point is no failure."""
    prepare(arguments)
    from gradcheck_suite.run.instance import checked_device
    from studies import atlas
    from studies.atlas_points import POINTS

    checked_device(arguments.device)
    known = dict.fromkeys(point.operation for point in POINTS)
    if unknown := [name for name in arguments.operations if name not in known]:
        near = get_close_matches(unknown[0], known, n=3)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else "`python -m studies atlas` prints all of them"
        )
        raise UsageError(f"expected an operation of the atlas, got {unknown[0]!r}: {hint}")
    wanted = set(arguments.operations or known)
    rows = atlas.run(
        [point for point in POINTS if point.operation in wanted], device=arguments.device
    )
    table = []
    for (operation, at), of_point in groupby(rows, lambda row: (row.point.operation, row.point.at)):
        shown = ""
        for row in of_point:
            # a further dtype has a line of its own where it comes out otherwise
            words = f"{'agree ' if row.agree else 'differ'}  {row.convention}"
            if words != shown:
                table.append((f"{operation}, {at}" if not shown else f"    in {row.dtype}", words))
            shown = shown or words
    print(*aligned(table), sep="\n", flush=True)
    differ = len({(row.point.operation, row.point.at) for row in rows if not row.agree})
    count = len(rows) // len(atlas.DTYPES)
    print(
        f"points: {count}, each in {' and '.join(atlas.DTYPES)}; torch and JAX differ at {differ}"
    )
    record_rows(arguments, "atlas", {"rows": [row.to_json() for row in rows]})
    return exit_status.HOLDS
