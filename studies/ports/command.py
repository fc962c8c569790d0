"""Judge ports with planted faults, and equal forms: which are found, placed and named, and what a
tolerance says.
"""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.records import write_document
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run import environment


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "pairs",
        nargs="*",
        metavar="PAIR",
        help="architectures, or ARCHITECTURE/VARIANT; without one, all of them",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the pairs, with the place and the causes of a fault",
    )
    parser.add_argument(
        "--tolerances",
        action="store_true",
        help="print instead what each tolerance in use lets pass, which is quick",
    )
    parser.add_argument("--public", action="store_true", help="judge ports in public code instead")
    parser.add_argument(
        "--page", type=Path, help="write the rows of the public ports into this page"
    )
    parsers.add_json(parser, "the scoreboard")


def run(arguments: Namespace) -> int:
    """Judge the chosen pairs, or measure the tolerances on them; print and store the scoreboard."""
    environment.expect_main_job()
    if find_spec("optax") is None:
        raise CannotRunHere("the command ports needs optax: pip install optax")
    if arguments.page is not None and not (arguments.public and arguments.page.is_file()):
        raise UsageError(
            f"--page {arguments.page}: expected a file whose table has the rows of --public"
        )
    parsers.expect_writable(None, json=arguments.json)
    environment.prepare()
    from studies.ports import public
    from studies.ports import scoreboard as board
    from studies.ports.zoo import ARCHITECTURES

    zoo = public.architectures() if arguments.public else ARCHITECTURES
    known = {board.label(*pair) for pair in board.variants(zoo.values())} | set(zoo)
    if unknown := [name for name in arguments.pairs if name not in known]:
        raise UsageError(
            f"expected an architecture, one of {', '.join(zoo)}, or one of its pairs; got"
            f" {unknown[0]!r}"
        )
    chosen = list(board.variants(zoo.values(), arguments.pairs))
    if arguments.list:
        for one, variant in chosen:
            truth = one.faults.get(variant)
            said = (
                "sound"
                if truth is None
                else f"{' or '.join(truth.causes)} at {' or '.join(truth.places) or '-'}"
            )
            print(f"{board.label(one, variant):<42} {said}")
        return exit_status.HOLDS
    if arguments.public:
        for name in dict.fromkeys(one.name for one, _ in chosen):
            if reason := public.lacking(name):
                print(f"{name} is left out: {reason}")
                chosen = [pair for pair in chosen if pair[0].name != name]
    about = environment.environment()
    if arguments.tolerances:
        table = board.tolerances(chosen)
        print(*board.tolerance_lines(table), sep="\n")
        write_document(arguments.json, about, {"tolerances": [vars(row) for row in table]})
        return exit_status.HOLDS
    print(board.HEADER, flush=True)
    rows: list[board.Row] = []
    interrupted = False
    try:
        for one, variant in chosen:
            rows.append(board.run(one, variant))
            print(board.line(rows[-1]), flush=True)
            if arguments.page is not None:
                public.write_row(arguments.page, rows[-1])
    except KeyboardInterrupt:
        interrupted = True
    print(board.summary(rows))
    write_document(arguments.json, about, {"pairs": [row.to_json() for row in rows]})
    violated = not all(row.passed for row in rows)
    return exit_status.status_of(violated=violated, findings=False, interrupted=interrupted)
