"""Options and parsers that commands share, and the paths that they write to."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import textwrap
import tomllib
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from gradcheck_suite.core.case import DEVICES, DTYPES, MAX_SEED
from gradcheck_suite.core.contract import (
    ASSUMPTIONS,
    AUTOCAST_DTYPES,
    MAX_RANKS,
    OPTIMIZER_NAMES,
    VerifyOptions,
    checked_assumptions,
)
from gradcheck_suite.core.records import FOLDER, expect_schema, expect_writable_folder
from gradcheck_suite.core.text import aligned, suggestion
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run.environment import own_version


class BadUsageError(Exception):
    """The arguments are wrong; the message is one line."""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises in place of printing its usage, and takes no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        # the examples at the end keep their lines, and the formatter that keeps them wraps no description
        width = shutil.get_terminal_size().columns - 2
        settings["description"] = textwrap.fill(settings.get("description") or "", width)
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise `BadUsageError`, with the option that may have been meant."""
        unknown, _, given = message.partition(": ")
        if unknown == "unrecognized arguments":
            message += suggestion(given.split()[0].partition("=")[0], self._option_string_actions)
        raise BadUsageError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def top_parser(program: str, commands: Mapping[str, str]) -> Parser:
    """Return the parser of what stands before a command: `--help`, `--version`, or a word that is no command."""
    listed = "\n".join(f"  {line}" for line in aligned(commands.items()))
    parser = Parser(
        prog=program,
        usage=f"{program} COMMAND ...",
        description="Does this training loop hand its optimizer the gradient it should?",
        epilog=f"commands:\n{listed}\n\n`{program} COMMAND --help` says what each takes.",
    )
    parser.add_argument("--version", action="version", version=f"{program} {own_version()}")
    parser.add_argument("COMMAND", nargs="?", type=one_of(commands), help=argparse.SUPPRESS)
    return parser


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Return the type of an option that takes one of some names."""
    allowed = tuple(names)

    def check(text: str) -> str:
        if text not in allowed:
            meant = suggestion(text, allowed)
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(allowed)}; got {text!r}{meant}")
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


def add_framework(parser: Parser, names: tuple[str, ...]) -> None:
    """Add `--framework`."""
    parser.add_argument(
        "--framework",
        type=one_of(names),
        metavar="NAME",
        help=f"{', '.join(names)}: what loops without a decorator are written in, and whose reset modes are verified "
        "where no loop is named (default torch)",
    )


# The options of a verification, declared once for the command line and for pytest.


DEFAULTS = VerifyOptions()
MARKER_OPTIONS = tuple(field.name for field in fields(VerifyOptions))


@dataclass(frozen=True)
class Option:
    """One option of the command line.

    Attributes:
        field: the field of `VerifyOptions` that it sets, which has its default; its name is the keyword of the pytest
            marker.
        flag: such as `"--examples"`.
        metavar: of its value, in the help.
        help: what it does, without its default.
        read: text -> value; raises `argparse.ArgumentTypeError`. None for a flag, which takes no value.
        repeatable: whether each use adds one value to a tuple.
        short: a second flag of one letter, or None.
    """

    field: str
    flag: str
    metavar: str
    help: str
    read: Callable[[str], Any] | None
    repeatable: bool = False
    short: str | None = None


EXAMPLES = Option(
    "examples",
    "--examples",
    "N",
    "cases drawn for each loop (default 200, and 50 of a loop of JAX)",
    positive_integer,
    short="-n",
)
SEED = Option("seed", "--seed", "S", "the same seed and the same versions draw the same cases", seed)
TIME_LIMIT = Option(
    "time_limit_s",
    "--time-limit",
    "SECONDS",
    "how long a loop may take on one case before it counts as one that hangs",
    seconds,
)
AUTOCAST = Option(
    "autocast",
    "--autocast",
    "DTYPE",
    f"the loops may compute their losses under torch.autocast in {' or '.join(AUTOCAST_DTYPES)} (default: what a loop "
    "declares)",
    one_of(AUTOCAST_DTYPES),
)


def _assumption(text: str) -> str:
    try:
        checked_assumptions((text,))
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


OPTIONS = (
    EXAMPLES,
    SEED,
    Option(
        "dtype",
        "--dtype",
        "DTYPE",
        f"of parameters and data: {', '.join(DTYPES)} (default float64, and float32 of a loop of JAX)",
        one_of(DTYPES),
    ),
    Option("device", "--device", "DEVICE", " or ".join(DEVICES), one_of(DEVICES)),
    Option(
        "ranks",
        "--ranks",
        "N",
        f"processes of torch.distributed that train together, 1 to {MAX_RANKS}: each has its own micro-batches, and a "
        "window is what all contribute",
        positive_integer,
    ),
    Option(
        "optimizer",
        "--optimizer",
        "NAME",
        f"a real optimizer, so that parameters move and their path is judged too: {', '.join(OPTIMIZER_NAMES)}; for a "
        "loop of JAX normalized or a factory of optax, such as adam or lion (default: one whose step changes nothing, "
        "in some cases normalized)",
        str.lower,
    ),
    Option(
        "assumes",
        "--assume",
        "NAME",
        "what the loops rely on, so that only such cases are drawn; repeatable: "
        + "; ".join(f"{name} ({meaning})" for name, meaning in ASSUMPTIONS.items()),
        _assumption,
        repeatable=True,
    ),
    AUTOCAST,
    TIME_LIMIT,
    Option("quiet_loop", "--quiet-loop", "", "discard what the loops print", None),
)


def add_option(parser: Parser, option: Option) -> None:
    """Add one option to a command."""
    default = getattr(DEFAULTS, option.field)
    if option.read is None:
        parser.add_argument(option.flag, dest=option.field, action="store_true", help=option.help)
        return
    shown = f"{default:g}" if isinstance(default, float) else default
    parser.add_argument(
        *filter(None, (option.short, option.flag)),
        dest=option.field,
        type=option.read,
        metavar=option.metavar,
        action="append" if option.repeatable else "store",
        default=list(default) if option.repeatable else default,
        help=option.help if default in (None, ()) else f"{option.help} (default {shown})",
    )


def options_of(arguments: Namespace) -> VerifyOptions:
    """Return the options that a command line sets."""
    return DEFAULTS.replace(**{option.field: getattr(arguments, option.field) for option in OPTIONS})


# The paths that a command writes to, refused before its work starts where they cannot be written.


CONFIGURED = "[tool.gradcheck-suite] in pyproject.toml"


def project_table() -> tuple[Path, dict[str, Any]]:
    """Return the nearest `pyproject.toml`, from the working directory upwards, and its table of the suite.

    Raises:
        UsageError: the file cannot be read, or the table has another key.
    """
    here = Path.cwd()
    file = next((path for folder in (here, *here.parents) if (path := folder / "pyproject.toml").is_file()), None)
    if file is None:
        return here, {}
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("gradcheck-suite", {})
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}") from None
    if unknown := sorted(table.keys() - {"reports", "audit"}):
        expected = "expected reports or a table audit"
        raise UsageError(f"{CONFIGURED}: {expected}, got {unknown[0]!r}{suggestion(unknown[0], ['reports', 'audit'])}")
    return file, table


def configured_reports() -> Path | None:
    """Return the folder of records that the project asks for; None where it asks for none.

    Raises:
        UsageError: the table has another key, or another value than a string.
    """
    file, table = project_table()
    if not isinstance(table.get("reports", ""), str):
        raise UsageError(f"{CONFIGURED}: reports must be a string, the path of a folder; got {table['reports']!r}")
    return Path(os.path.relpath(file.parent / table["reports"])) if table.get("reports") else None


def add_reports(parser: Parser, what: str, default: Path | None = None) -> None:
    """Add `--reports`; its help says what the command writes there.

    Args:
        parser: of the command.
        what: it writes.
        default: the folder where neither the option nor the project names one; None where nothing is recorded then.
    """
    nowhere = "nothing is recorded" if default is None else f"{default}"
    shown = f"{what} (default: reports of {CONFIGURED}; without that, {nowhere})"
    parser.add_argument("--reports", type=Path, default=configured_reports() or default, metavar="DIR", help=shown)


def add_json(parser: Parser, what: str) -> None:
    """Add `--json`; its help says what the command writes there."""
    parser.add_argument("--json", type=Path, metavar="PATH", help=f"write {what} here as JSON")


def add_html(parser: Parser) -> None:
    """Add `--html`."""
    parser.add_argument(
        "--html",
        type=Path,
        metavar="PATH",
        help="write a page on each violation here, one HTML file, and open it if a desktop's terminal runs the command",
    )


def add_quiet(parser: Parser) -> None:
    """Add `-q`."""
    parser.add_argument("-q", "--quiet", action="store_true", help="print each verdict in one line, and no more")


def add_number(
    parser: Parser,
    flag: str,
    default: int,
    what: str,
    read: Callable[[str], int] = positive_integer,
    metavar: str | None = "N",
) -> None:
    """Add an option that takes a whole number; its help says of what, and the default."""
    parser.add_argument(flag, type=read, default=default, metavar=metavar, help=f"{what} (default %(default)s)")


def add_rows(parser: Parser) -> None:
    """Add `--device`, `--json` and `--reports` of a command that computes rows by torch and by JAX."""
    parser.add_argument(
        "--device", type=one_of(DEVICES), default="cpu", help="where torch computes (default %(default)s)"
    )
    add_json(parser, "the rows")
    add_reports(parser, "the rows are recorded in DIR/records")


def expect_writable(reports: Path | None, *folders: str, **files: Path | None) -> None:
    """Refuse paths that cannot be written.

    Args:
        reports: the reports folder, whose records are written; None for no records.
        folders: others under it.
        files: option without its dashes, such as `json`, -> the file that it names, or None.
    """
    for option, path in files.items():
        if path is None:
            continue
        if path.is_dir() or not path.name:
            raise UsageError(f"--{option} {path}: expected the path of a file, got a folder")
        if not path.parent.is_dir():
            raise UsageError(f"--{option} {path}: there is no folder {path.parent}; make it first")
        expect_writable_folder(path.parent, f"--{option} {path}")
    if reports is None:
        return
    for folder in (*folders, FOLDER):
        expect_writable_folder(reports / folder, f"--reports {reports}")
    for path in (reports / FOLDER).glob("*.jsonl"):
        expect_schema(path)
