"""Options and parsers that commands share, and the paths that they write to."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
import tomllib
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from gradcheck_suite.core.formats import FORMATS, Accepted
from gradcheck_suite.core.options import (
    ACCEPTED,
    FAIL_ON,
    FLAG,
    NATURAL,
    OF_COMMANDS,
    PATH,
    POSITIVE_INTEGER,
    SEED,
    Option,
    Options,
    OptionValues,
    option,
    options_of,
)
from gradcheck_suite.core.options import one_of as values_of
from gradcheck_suite.core.records import FOLDER, expect_schema, expect_writable_folder
from gradcheck_suite.core.text import aligned, suggestion
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run.environment import own_version

_Options = TypeVar("_Options", bound=Options)


class BadUsageError(Exception):
    """The arguments are wrong; the message is one line."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Break the text of an option at spaces alone: what it names, such as `even-ranks`, is copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        # argparse passes the text as it was written, with the line breaks of the source
        words = " ".join(text.split())
        return textwrap.wrap(
            words,
            width,
            break_long_words=False,
            break_on_hyphens=False,
        )


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises in place of printing its usage, and takes no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        # the examples at the end keep their lines, and the formatter that keeps them wraps no
        # description
        width = shutil.get_terminal_size().columns - 2
        settings["description"] = textwrap.fill(settings.get("description") or "", width)
        # an abbreviation in somebody's script would break with the next option that begins like it
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise `BadUsageError`; if an option is unknown, suggest a similar one."""
        # argparse has no error of its own for this: its English message is what tells it
        unknown, _, given = message.partition(": ")
        if unknown == "unrecognized arguments":
            message += suggestion(given.split()[0].partition("=")[0], self._option_string_actions)
        raise BadUsageError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def top_parser(program: str, commands: Mapping[str, str]) -> Parser:
    """Return the parser of command lines without a valid command: `--help`, `--version`, or a
    misspelt command.
    """
    listed = "\n".join(f"  {line}" for line in aligned(commands.items()))
    parser = Parser(
        prog=program,
        usage=f"{program} COMMAND ...",
        description="Does this training loop hand its optimizer the gradient it should?",
        epilog=f"commands:\n{listed}\n\n`{program} COMMAND --help` says what each takes.",
    )
    parser.add_argument("--version", action="version", version=f"{program} {own_version()}")
    parser.add_argument(
        "COMMAND",
        nargs="?",
        type=choice_of(commands),
        help=argparse.SUPPRESS,
    )
    return parser


def reader(values: OptionValues) -> Callable[[str], Any]:
    """Return the `type` of an argument that takes these values."""

    def read(text: str) -> Any:
        try:
            return values.parsed(text)
        except UsageError as error:
            # a `ValueError` would make argparse say "invalid read value", without the reason
            raise ArgumentTypeError(str(error)) from None

    return read


positive_integer = reader(POSITIVE_INTEGER)
natural = reader(NATURAL)
seed = reader(SEED)


def choice_of(names: Iterable[str]) -> Callable[[str], str]:
    """Return the `type` of an argument that takes one of some names."""
    return reader(values_of(names))


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
        type=choice_of(names),
        metavar="NAME",
        help=(
            f"{', '.join(names)}: framework of undecorated loops; without LOOP, whose reset modes"
            " to verify (default: torch)"
        ),
    )


# What `pyproject.toml` sets.


CONFIGURED = "[tool.gradcheck-suite] in pyproject.toml"


def project_table() -> tuple[Path, dict[str, Any]]:
    """Return the nearest `pyproject.toml`, from the working directory upwards, and its table
    `[tool.gradcheck-suite]`.

    Raises:
        UsageError: the file cannot be read.
    """
    here = Path.cwd()
    paths = (folder / "pyproject.toml" for folder in (here, *here.parents))
    # the nearest file counts though it may lack the table, as for pytest and ruff: a project's
    # settings end where another project begins
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        return here, {}
    try:
        return file, tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get(
            "gradcheck-suite", {}
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}") from None


def configured(declared: type[Options]) -> dict[str, Any]:
    """Return the values that `pyproject.toml` has for the options of a dataclass, by field.

    Raises:
        UsageError: the file cannot be read, or the table has another key or a wrong value.
    """
    file, table = project_table()
    # the top table holds the commands' own tables beside its options
    tables = () if declared.table else tuple(command.table for command in OF_COMMANDS)
    table = table.get(declared.table, {}) if declared.table else table
    title = ".".join(filter(None, ("tool.gradcheck-suite", declared.table)))
    where = f"[{title}] in {os.path.relpath(file)}"
    known = {one.key: one for one in options_of(declared) if one.in_project}
    if not isinstance(table, dict):
        raise UsageError(f"{where}: expected a table, got {table!r}")
    kept = {}
    # sorted, so that of two wrong keys the same one is reported each time
    for key in sorted(table.keys() - set(tables)):
        if key not in known:
            raise UsageError(f"{where}: {values_of([*known, *tables]).refusal(key)}")
        try:
            kept[known[key].name] = _configured(known[key], table[key], file.parent)
        except UsageError as error:
            raise UsageError(f"{where}: {key}: {error}") from None
    return kept


def _configured(one: Option, value: Any, folder: Path) -> Any:
    """Return the value of an option in a table of a file in a folder, to which its paths are
    relative.
    """
    if one.repeatable and not isinstance(value, list):
        raise UsageError(f"expected a list, with {one.values.expected}; got {value!r}")
    # a path in the file means the same from every working directory
    if one.values is PATH:
        value = (
            [_path_in(folder, each) for each in value]
            if one.repeatable
            else _path_in(folder, value)
        )
    checked = one.checked(value)
    if one.values is ACCEPTED:
        return tuple(replace(entry, file=os.path.relpath(folder / entry.file)) for entry in checked)
    return checked


def _path_in(folder: Path, value: Any) -> Any:
    """Return a path as seen from the working directory; what is none is left to the check."""
    is_path = isinstance(value, str) and value
    return Path(os.path.relpath(folder / value)) if is_path else value


def set_python_path() -> None:
    """Put the folders that `pythonpath` names in front of Python's path.

    Raises:
        UsageError: the file cannot be read, or one of them is no folder.
    """
    # each is put in front, so the first of the list comes to stand first
    for folder in reversed(configured(OutputOptions).get("pythonpath", ())):
        if not folder.is_dir():
            raise UsageError(f"pythonpath of {CONFIGURED}: there is no folder {folder}")
        # resolved: the code under test may change the working directory
        if (path := str(folder.resolve())) not in sys.path:
            sys.path.insert(0, path)


# Options on the command line.


@dataclass(frozen=True)
class OutputOptions(Options):
    """What `verify` and `audit` print and write."""

    output_format: str = option(
        "text",
        values_of(FORMATS),
        "write a machine-readable document to standard output, and everything else to standard"
        f" error: {', '.join(f'{name} ({what})' for name, what in FORMATS.items() if what)}",
        "--output-format",
        metavar="FORMAT",
    )
    quiet: bool = option(
        False, FLAG, "print each verdict in one line, and no more", "--quiet", short="-q"
    )
    json: Path | None = option(
        None, PATH, "write the results here as JSON", "--json", metavar="PATH"
    )
    html: Path | None = option(
        None,
        PATH,
        "write an HTML page with all violations to PATH; opens it when run from a desktop terminal",
        "--html",
        metavar="PATH",
    )
    reports: Path | None = option(
        None,
        PATH,
        "append the verdicts to the records under DIR",
        "--reports",
        metavar="DIR",
        unset=(
            f"reports of {CONFIGURED}; without that, nothing is recorded, and counterexamples of"
            " verify go to ./reports"
        ),
        in_project=True,
    )
    pythonpath: tuple[Path, ...] = option(
        (),
        PATH,
        "folders put on Python's path before your code is imported, such as src",
        repeatable=True,
        in_project=True,
        project_key="pythonpath",
    )
    baseline: tuple[Accepted, ...] = option(
        (),
        ACCEPTED,
        "faults that the project lives with, each with a file and a reason",
        repeatable=True,
        in_project=True,
        project_key="accept",
    )
    always_fail_on: tuple[str, ...] = option(
        (),
        FAIL_ON,
        "findings of audits that fail the command",
        repeatable=True,
        in_project=True,
        project_key="fail-on",
    )

    def expect_writable(self) -> None:
        """Raise `UsageError` if a path cannot be written, or if `--html` lacks the package that it
        needs.
        """
        expect_writable(self.reports, json=self.json, html=self.html)
        if self.html is not None:
            from gradcheck_suite.page.render import expect_installed

            expect_installed("the HTML report", ["jinja2"])

    def writable(self, program: str) -> OutputOptions:
        """Return the options, without a reports folder of the project's table into which nothing
        can be written: that is warned of.

        Nobody gave that option: a read-only checkout is no reason not to judge.

        Args:
            program: the command, as the warning names it.

        Raises:
            UsageError: the user named a path that cannot be written.
        """
        options = self
        if self.reports is not None and self.reports == configured(OutputOptions).get("reports"):
            try:
                expect_writable_folder(self.reports / FOLDER, "verdicts are not recorded")
            except UsageError as error:
                warn_of_folder(program, error)
                options = self.replace(reports=None)
        options.expect_writable()
        return options

    def absolute(self) -> OutputOptions:
        """Return the options with absolute paths, for code that may change the working directory."""
        paths = {name: getattr(self, name) for name in ("json", "html", "reports")}
        return self.replace(**{name: path.absolute() for name, path in paths.items() if path})


def add_options(parser: Parser, *declared: type[Options]) -> None:
    """Add the options of some dataclasses.

    Their defaults are those that `pyproject.toml` sets, else the fields'.
    """
    for each in declared:
        kept = configured(each)
        for one in options_of(each):
            if one.flag:
                add_option(parser, one, kept.get(one.name, one.default))
            # an option that only the project's file sets is read from the arguments, too
            elif one.in_project:
                parser.set_defaults(**{one.name: kept.get(one.name, one.default)})


def add_option(parser: Parser, one: Option, default: Any) -> None:
    """Add one option, which sets the attribute with the field's name."""
    names = [*filter(None, (one.short, one.flag))]
    text = one.help_text.replace("%", "%%")  # argparse formats it
    if one.values is FLAG:
        parser.add_argument(
            *names,
            dest=one.name,
            action="store_true",
            default=default,
            help=text,
        )
        return
    parser.add_argument(
        *names,
        dest=one.name,
        type=reader(one.values),
        metavar=one.metavar,
        # argparse appends to the default: what the command line adds stands beside what the project
        # sets
        action="append" if one.repeatable else "store",
        # argparse appends to a copy of the default, which a tuple would refuse
        default=list(default) if one.repeatable else default,
        help=text,
    )


def parsed(arguments: Namespace, declared: type[_Options]) -> _Options:
    """Return the options that a command line sets."""
    return declared(
        **{
            one.name: getattr(arguments, one.name)
            for one in options_of(declared)
            if one.flag or one.in_project
        }
    )


def to_argv(options: Options) -> list[str]:
    """Return the arguments that set these options, for a command that runs in this project."""
    kept = configured(type(options))
    argv: list[str] = []
    for one in options_of(type(options)):
        value = getattr(options, one.name)
        if (
            not one.flag
            or value is None
            or value is False
            # a value that equals the default is left out only where the project sets no other
            or value == one.default == kept.get(one.name, one.default)
        ):
            continue
        if one.values is FLAG:
            argv.append(one.flag)
        else:
            values = value if one.repeatable else [value]
            for each in values:
                argv += [one.flag, str(each)]
    return argv


def add_json(parser: Parser, what: str) -> None:
    """Add `--json`; its help says what the command writes there."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help=f"write {what} here as JSON",
    )


def add_reports(parser: Parser, what: str, default: Path | None = None) -> None:
    """Add `--reports`; its help says what the command writes there.

    Args:
        parser: of the command.
        what: it writes.
        default: the folder if neither the option nor the project names one; None if nothing is
            recorded then.
    """
    nowhere = "nothing is recorded" if default is None else f"{default}"
    shown = f"{what} (default: reports of {CONFIGURED}; without that, {nowhere})"
    kept = configured(OutputOptions).get("reports", default)
    parser.add_argument(
        "--reports",
        type=Path,
        default=kept,
        metavar="DIR",
        help=shown,
    )


def add_number(
    parser: Parser,
    flag: str,
    default: int,
    what: str,
    read: Callable[[str], int] = positive_integer,
    metavar: str | None = "N",
    short: str = "",
) -> None:
    """Add an option that takes a whole number; its help ends with the default."""
    parser.add_argument(
        *filter(None, (short, flag)),
        type=read,
        default=default,
        metavar=metavar,
        help=f"{what} (default %(default)s)",
    )


def add_quiet(parser: Parser, help: str) -> None:
    """Add `-q`, `--quiet` to a command that has no `OutputOptions`."""
    parser.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help=help,
    )


# The paths that a command writes to, refused before its work starts where they cannot be written.


def without_advice(error: UsageError) -> str:
    """Return why nothing can be written, without the end of that message: another folder is advised
    in the words of who refuses it.
    """
    return str(error).partition("; choose")[0]


def warn_of_folder(program: str, error: UsageError) -> str:
    """Warn that nothing is written into a folder that nobody named; return why."""
    why = without_advice(error)
    print(f"{program}: warning: {why}; --reports DIR names another folder", file=sys.stderr)
    return why


def expect_writable(reports: Path | None, *folders: str, **files: Path | None) -> None:
    """Raise `UsageError` if a path cannot be written.

    Args:
        reports: the reports folder, to whose records lines are appended; None for no records.
        folders: further folders under it.
        files: option without its dashes, such as `json`, -> the file that it names, or None.
    """
    for name, path in files.items():
        if path is None:
            continue
        if path.is_dir() or not path.name:
            raise UsageError(f"--{name} {path}: expected the path of a file, got a folder")
        # `--json train.py other.py` would replace the user's script by the results
        if path.suffix == ".py":
            raise UsageError(
                f"--{name} {path}: expected a path for the results, such as results.{name}, got a"
                " script"
            )
        if not path.parent.is_dir():
            raise UsageError(f"--{name} {path}: there is no folder {path.parent}; make it first")
        expect_writable_folder(path.parent, f"--{name} {path}")
    if reports is None:
        return
    for folder in (*folders, FOLDER):
        expect_writable_folder(reports / folder, f"--reports {reports}")
    # a line of this version beside lines of another would make the file unreadable to both
    for path in (reports / FOLDER).glob("*.jsonl"):
        expect_schema(path)
