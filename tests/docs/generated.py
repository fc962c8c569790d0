"""Write into the pages what the code's tables know: `python -m tests.docs.generated`.

A page marks the place with `<!-- generated: NAME -->` and `<!-- end -->`. What stands between
them is written again.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import gradcheck_suite.core
from gradcheck_suite.cli import PROGRAM, exit_status
from gradcheck_suite.cli.arguments import OutputOptions
from gradcheck_suite.core.causes import CAUSES
from gradcheck_suite.core.contract import ASSUMPTIONS
from gradcheck_suite.core.faults import FAULTS
from gradcheck_suite.core.findings import FINDINGS
from gradcheck_suite.core.options import OF_COMMANDS, Option, VerifyOptions, options_of
from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.pytest_plugin import SECOND_OPINION_S
from studies.tests.findings import known as in_public_code
from tests.docs.pages import ROOT

_SCHEMA = Path(gradcheck_suite.core.__file__).with_name("result.schema.json")
_MARKED = re.compile(
    r"(?<=<!-- generated: )(?P<name>[\w. -]+?) -->\n.*?(?=<!-- end -->)", re.DOTALL
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def diagnoses(kind: str) -> str:
    """Return the table of the faults of one kind of violation, in the order of the code's table."""
    rows = (
        [f"`{one.name}`", one.meaning, one.remedy.torch]
        for one in FAULTS.values()
        if one.kind == kind
    )
    return table(["diagnosis", "what it means", "what to do"], rows)


def findings(kind: str) -> str:
    """Return the table of findings, or of reasons, in the order of the code's table."""
    rows = ([f"`{one.name}`", one.meaning] for one in FINDINGS.values() if one.kind == kind)
    return table([kind, "what it means"], rows)


def findings_in_public_code() -> str:
    """Return the table of the findings that are ready to send, from their files."""
    head = ["file", "what is wrong", "since", "fixed in", "you are hit if"]
    return table(head, in_public_code())


def causes() -> str:
    """Return the table of the causes that a port may differ by."""
    return table(
        ["cause", "what differs", "what to do"],
        ([f"`{one.name}`", one.meaning, one.remedy] for one in CAUSES.values()),
    )


def options_of_command(command: str) -> str:
    """Return the table of what a command takes, from its parser."""
    return table(["argument", "what it does"], _arguments(command))


def _arguments(command: str) -> Iterator[Sequence[str]]:
    for action in PROGRAM.parser(command)._actions:
        if action.help in (None, argparse.SUPPRESS) or isinstance(action, argparse._HelpAction):
            continue
        name = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
        name = " ".join(name) if isinstance(name, tuple) else name
        takes_value = action.option_strings and action.nargs != 0
        names = [
            f"`{option} {name}`" if takes_value else f"`{option}`"
            for option in action.option_strings[-1:]
        ]
        short = [f"`{option}`" for option in action.option_strings[:-1]]
        yield (
            ", ".join([*short, *names] or [f"`{name}`"]),
            _without_choices((action.help or "") % vars(action)),
        )


def _without_choices(text: str) -> str:
    """Return an option's help without the list of assumptions, which has a table of its own."""
    return re.sub(
        r": equal-micro-batches \(.*\)$", "; see [what a loop may assume](#assumptions)", text
    )


def exit_statuses() -> str:
    """Return the table of what each command's exit statuses mean.

    Commands that mean the same share a row.
    """
    meant: dict[tuple[int, str], list[str]] = {}
    for name, command in PROGRAM.commands.items():
        for status, meaning in exit_status.status_meanings(command.meanings).items():
            meant.setdefault((status, meaning), []).append(name)
    rows = []
    for (status, meaning), commands in sorted(
        meant.items(), key=lambda one: (one[0][0], -len(one[1]))
    ):
        rows.append(
            [
                f"`{status}`",
                meaning,
                "all" if len(commands) == len(PROGRAM.commands) else ", ".join(commands),
            ]
        )
    return table(["status", "meaning", "commands"], rows)


def assumptions() -> str:
    """Return the table of what a loop may declare."""
    return table(
        ["name", "the loop assumes"],
        ([f"`{name}`", meaning] for name, meaning in ASSUMPTIONS.items()),
    )


def of_the_fixture() -> str:
    """Return the table of what `verify_training_loop` takes."""
    defaults = {"second_opinion_s": f"{SECOND_OPINION_S:g}"}
    rows = (
        [f"`{one.name}`", one.help, defaults.get(one.name) or _default(one)]
        for one in options_of(VerifyOptions)
    )
    return table(["option", "what it sets", "default"], rows)


def of_pyproject() -> str:
    """Return the table of what `pyproject.toml` may set."""
    rows = []
    for options in (OutputOptions, *OF_COMMANDS):
        title = ".".join(["tool.gradcheck-suite", *filter(None, [options.table])])
        rows.append(
            [
                f"`[{title}]`",
                ", ".join(f"`{one.key}`" for one in options_of(options) if one.in_project),
            ]
        )
    return table(["table", "keys"], rows)


def _default(one: Option) -> str:
    return one.default_text or (f"`{one.default}`" if one.default not in (None, ()) else "nothing")


def fields_of_json(definition: str) -> str:
    """Return the table of an object's keys in the JSON Schema that ships with the package."""
    schema = json.loads(_SCHEMA.read_text())["$defs"][definition]
    return table(
        ["key", "type", "meaning"],
        (
            [f"`{key}`", _type(one), one.get("description", _choices(one))]
            for key, one in schema["properties"].items()
        ),
    )


def _choices(schema: dict[str, Any]) -> str:
    *others, last = [f"`{value}`" for value in schema.get("enum", ())] or [""]
    return f"{', '.join(others)} or {last}" if others else last


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "enum" in schema:
        return "string"
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    kinds = schema.get("type", "any")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def trainers() -> str:
    """Return the table of extras and of the trainers that each brings."""
    brought: dict[str, list[str]] = {}
    for trainer in TRAINERS.values():
        brought.setdefault(trainer.package, []).append(f"`{trainer.name}`")
    return table(["extra", "trainers"], ([f"`{e}`", ", ".join(n)] for e, n in brought.items()))


def api(group: str) -> str:
    """Return the signatures and docstrings of a group of public names, as a file view shows them."""
    module, names = API[group]
    return "\n".join(_described(module, name) for name in names)


def _described(module: str, name: str) -> str:
    found = getattr(import_module(module), name)
    if not callable(found):
        about = (inspect.getdoc(found) or "").partition("\n\n")[0]
        is_module = inspect.ismodule(found)
        said = (
            about if is_module else "Names with their meaning: [Commands](commands.md#assumptions)."
        )
        return f"### `{module}.{name}`\n\n{said}\n"
    lines = [f"{name}{_signature(found)}", "", *(inspect.getdoc(found) or "").splitlines()]
    for method in _methods(found):
        lines += ["", f"{name}.{method.__name__}{_signature(method)}"]
        lines += [f"    {line}".rstrip() for line in (inspect.getdoc(method) or "").splitlines()]
    return f"### `{module}.{name}`\n\n```text\n{chr(10).join(lines)}\n```\n"


def _methods(found: Any) -> list[Any]:
    """Return the public methods of a class, those of the private classes that it is made of first."""
    if not inspect.isclass(found):
        return []
    parts = [one for one in reversed(found.__mro__) if one is found or one.__name__.startswith("_")]
    own: dict[str, Any] = {}
    for part in parts:
        own |= vars(part)
    return [
        method
        for name, method in own.items()
        if inspect.isfunction(method) and not name.startswith("_")
    ]


def _signature(found: Any) -> str:
    """Return a signature without annotations, which the docstring has in words; empty without one."""
    if inspect.isclass(found) and issubclass(found, Exception):
        return ""
    try:
        signature = inspect.signature(found)
    except ValueError:
        return ""
    plain = [
        p.replace(annotation=p.empty, default=p.default if _is_short(p.default) else ...)
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty)).replace(
        "=Ellipsis", "=..."
    )


def _is_short(default: Any) -> bool:
    # an object's own text has the address of the process
    return isinstance(default, bool | int | float | str | tuple | None) or default is inspect._empty


PACKAGE = "gradcheck_suite"
API: dict[str, tuple[str, tuple[str, ...]]] = {
    "verifying": (
        PACKAGE,
        (
            "verify",
            "check",
            "training_loop",
            "jax_training_loop",
            "transformers_loop",
            "ASSUMPTIONS",
        ),
    ),
    "auditing": (PACKAGE, ("audit", "objective")),
    "ports": (PACKAGE, ("compare_port", "Port", "PortResult")),
    "inputs": (PACKAGE, ("TrainingRun", "JaxTrainingRun", "Problem")),
    "results": (PACKAGE, ("Result", "Verdict", "Violation")),
    "cases": (
        PACKAGE,
        ("Case", "case_from_json", "Plan", "ProblemSpec", "Input", "Layer", "Loss"),
    ),
    "strategies": (PACKAGE, ("cases", "problems", "plans")),
    "errors": (
        PACKAGE,
        ("GradcheckSuiteError", "UsageError", "CannotRunHere", "ViolationFound"),
    ),
    "environment": (PACKAGE, ("environment",)),
    "bridge": (
        f"{PACKAGE}.bridge",
        (
            *("jax_gradient", "lower", "register_op", "accept_backward", "wrong_backwards"),
            *("WrongBackward", "table", "arguments_of", "Lowered", "BridgeError"),
            *("UnknownOperation", "NotExportable", "RandomnessError", "WrongLowering"),
        ),
    ),
    "states": (f"{PACKAGE}.stateful", ("GradStates",)),
}
"""Group of the reference -> its module and the names in it, in the order of the page."""


TABLES: dict[str, Callable[[], str]] = {
    "trainers": trainers,
    **{f"API of {group}": lambda group=group: api(group) for group in API},
    **{
        f"options of {name}": lambda name=name: options_of_command(name)
        for name in PROGRAM.commands
        if name != "doctor"
    },
    **{
        f"diagnoses of {kind}": lambda kind=kind: diagnoses(kind)
        for kind in {one.kind: 0 for one in FAULTS.values()}
    },
    **{
        f"JSON of {name}": lambda name=name: fields_of_json(name)
        for name in ("of_verify", "of_audit", "of_port", "violation", "port_finding")
    },
    "findings": lambda: findings("finding"),
    "findings-in-public-code": findings_in_public_code,
    "reasons": lambda: findings("reason"),
    "causes of a port": causes,
    "exit statuses": exit_statuses,
    "assumptions": assumptions,
    "options of the fixture": of_the_fixture,
    "options of pyproject.toml": of_pyproject,
}
"""Name of a generated block -> its text."""


def written(text: str) -> str:
    """Return a page's text with every generated block as it is now."""
    return _MARKED.sub(lambda found: f"{found['name']} -->\n\n{TABLES[found['name']]()}\n", text)


if __name__ == "__main__":
    for page in sorted((ROOT / "docs").glob("*.md")):
        page.write_text(written(page.read_text()))
