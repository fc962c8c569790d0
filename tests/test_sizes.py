"""The sizes that CONTRIBUTING.md allows: lines of a module, lines of a function, parameters of a public function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradcheck_suite

PACKAGE = Path(gradcheck_suite.__file__).parent
MAX_LINES_OF_MODULE, MAX_LINES, MAX_PARAMETERS = 900, 60, 8


def _too_large(text: str) -> Iterator[str]:
    """Yield what exceeds a limit in the text of a module."""
    if len(text.splitlines()) > MAX_LINES_OF_MODULE:
        yield f"{len(text.splitlines())} lines"
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > MAX_LINES:
            yield f"{function.name} has {lines} lines"
        arguments = function.args
        # what begins with an underscore is there for a caller that passes more than the function reads
        named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        read = [name for name in named if not name.startswith("_") and name not in ("self", "cls")]
        if len(read) > MAX_PARAMETERS and (function.name == "__init__" or not function.name.startswith("_")):
            yield f"{function.name} has {len(read)} parameters"


def test_no_module_function_or_signature_is_too_large():
    found = {path: [*_too_large(path.read_text())] for path in PACKAGE.rglob("*.py")}
    assert {str(path.relative_to(PACKAGE)): what for path, what in found.items() if what} == {}


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("#\n" * MAX_LINES_OF_MODULE, "#", ["901 lines"]),
        ("def f():\n" + " pass\n" * (MAX_LINES - 1), " pass\n", ["f has 61 lines"]),
        ("def f(_x, a, b, c, d, e, f, g, h", "): ...", []),
        ("class A:\n def f(self, a, b, c, d, e, f, g, h", ", i): ...", ["f has 9 parameters"]),
        ("def f(a, b, c, d, /, e, f, g, *, h", ", i): ...", ["f has 9 parameters"]),
    ],
)
def test_what_is_one_too_large_is_found(text, more, said):
    assert [*_too_large(text + more)] == said
    assert [*_too_large(text if "(" not in text or text.endswith("\n") else text + "): ...")] == []
