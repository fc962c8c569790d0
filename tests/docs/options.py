"""Write the tables of options into the pages: `python -m tests.docs.options`."""

from __future__ import annotations

import re
from collections.abc import Callable

from gradcheck_suite.cli.arguments import OutputOptions
from gradcheck_suite.core.options import OF_COMMANDS, Option, VerifyOptions, options_of
from gradcheck_suite.pytest_plugin import SECOND_OPINION_S
from tests.docs.pages import ROOT


def of_the_fixture() -> str:
    """Return the table of what `verify_training_loop` takes."""
    lines = ["| option | what | default |", "| --- | --- | --- |"]
    for one in options_of(VerifyOptions):
        default = f"{SECOND_OPINION_S:g}" if one.name == "second_opinion_s" else _default(one)
        lines.append(f"| `{one.name}` | {one.help} | {default} |")
    return "".join(f"{line}\n" for line in lines)


def of_pyproject() -> str:
    """Return the table of what `pyproject.toml` may set."""
    lines = ["| table | keys |", "| --- | --- |"]
    for options in (OutputOptions, *OF_COMMANDS):
        title = ".".join(["tool.gradcheck-suite", *filter(None, [options.table])])
        keys = ", ".join(f"`{one.key}`" for one in options_of(options) if one.in_project)
        lines.append(f"| `[{title}]` | {keys} |")
    return "".join(f"{line}\n" for line in lines)


def _default(one: Option) -> str:
    return one.default_text or (f"`{one.default}`" if one.default not in (None, ()) else "nothing")


TABLES = {"in-your-tests.md": of_the_fixture, "commands.md": of_pyproject}
"""The page -> its table."""


def written(text: str, table: Callable[[], str]) -> str:
    """Return a page's text with a table as it is now."""
    now = table()
    head = re.escape(now.partition("\n")[0])
    return re.sub(rf"^{head}\n(?:\|.*\n)+", lambda _: now, text, count=1, flags=re.MULTILINE)


if __name__ == "__main__":
    for name, table in TABLES.items():
        page = ROOT / "docs" / name
        page.write_text(written(page.read_text(), table))
