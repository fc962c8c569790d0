"""The argument parser, whose errors are one line, and the types of option values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from gradcheck_suite.records.columns import aligned
from gradcheck_suite.schema.case import MAX_SEED


class BadUsageError(Exception):
    """The arguments are wrong; the message is one line."""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises in place of printing its usage, and takes no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise `BadUsageError`."""
        raise BadUsageError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def top_parser(program: str, commands: Mapping[str, str]) -> Parser:
    """Return the parser of what stands before a command: `--help`, `--version`, or a word that is no command."""
    from gradcheck_suite import __version__

    listed = "\n".join(f"  {line}" for line in aligned(commands.items()))
    parser = Parser(
        prog=program,
        usage=f"{program} COMMAND ...",
        description="Does this training loop hand its optimizer the gradient it should?",
        epilog=f"commands:\n{listed}\n\n`{program} COMMAND --help` says what each takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{program} {__version__}")
    parser.add_argument("COMMAND", nargs="?", type=one_of(commands), help=argparse.SUPPRESS)
    return parser


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Return the type of an option that takes one of some names."""
    allowed = tuple(names)

    def check(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(allowed)}; got {text!r}")
        return text

    return check


def positive_integer(text: str) -> int:
    """Return an integer of at least 1."""
    return _integer(text, 1, None, "a positive integer")


def natural(text: str) -> int:
    """Return an integer of at least 0."""
    return _integer(text, 0, None, "0 or a positive integer")


def seed(text: str) -> int:
    """Return a seed."""
    return _integer(text, 0, MAX_SEED, f"an integer from 0 to {MAX_SEED}")


def seconds(text: str) -> float:
    """Return a positive, finite number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def _integer(text: str, low: int, high: int | None, expected: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low or (high is not None and value > high):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def add_problem(parser: Parser) -> None:
    """Add `--problem`."""
    parser.add_argument(
        "--problem",
        metavar="FILE.py:NAME",
        help="train this gradcheck_suite.Problem in place of random models; only plans are drawn",
    )
