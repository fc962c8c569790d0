"""Each private name of torch and JAX that the package uses is in one table, and is asked for."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import pytest
import torch

import gradcheck_suite
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.run import private_names
from gradcheck_suite.run.private_names import TABLE, expect_present, lacking

PACKAGE = Path(gradcheck_suite.__file__).parent
OF_OTHERS = {
    # of Python and its library
    "_fields",
    "_getframe",
    "_option_string_actions",
    "_replace",
    "_run_exitfuncs",
    # of accelerate, whose trainers are subjects
    "_reset_state",
}
"""Private names of packages other than torch and JAX."""


class _Uses(ast.NodeVisitor):
    """Private names that a module reads from objects, and those it defines itself."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.of_frameworks: set[str] = set()
        self.own: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.own.add(node.name)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.own.add(node.name)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.own.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
            self.own.add(node.attr)
        elif ast.unparse(node.value).startswith(("torch", "jax", "module_hooks")):
            self.of_frameworks.add(node.attr)
        elif not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            self.read.add(node.attr)
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if module.startswith(("torch", "jax")):
            self.of_frameworks.update(module.split("."), [alias.name for alias in node.names])

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", "")
        if name in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
            self.read.add(node.args[1].value)
        self.generic_visit(node)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _used() -> dict[str, list[str]]:
    """Return the private names that are not the package's own -> the files that use them."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        uses = _Uses()
        uses.visit(ast.parse(path.read_text()))
        modules[str(path.relative_to(PACKAGE))] = uses
    own = set().union(*(uses.own for uses in modules.values()))
    found: dict[str, list[str]] = {}
    for path, uses in modules.items():
        for name in uses.of_frameworks | (uses.read - own):
            if _is_private(name) and name not in OF_OTHERS:
                found.setdefault(name, []).append(path)
    return found


def _listed() -> set[str]:
    listed: set[str] = set()
    for row in TABLE:
        listed.update(*(name.split(".") for name in row.needed), row.optional)
    return listed


def test_every_private_name_of_the_package_is_in_the_table():
    missing = {name: files for name, files in _used().items() if name not in _listed()}
    assert not missing, f"add a row to run/private_names.py: {missing}"


def test_the_table_has_no_name_that_nothing_uses():
    sources = [p for p in PACKAGE.rglob("*.py") if p != Path(private_names.__file__)]
    text = "\n".join(path.read_text() for path in sources)
    last = {name.rpartition(".")[2] for row in TABLE for name in (*row.needed, *row.optional)}
    # what a node of autograd saved is read by f"_raw_saved_{name}"
    assert [n for n in last if n not in text and not n.startswith("_raw_saved_")] == []


def test_a_use_that_is_not_listed_would_be_found():
    uses = _Uses()
    uses.visit(ast.parse("import torch\nfrom jax._src import core\ntorch._C._made_up(x._hidden)"))
    assert {"_made_up", "_src"} <= uses.of_frameworks
    assert "_hidden" in uses.read


def test_the_installed_releases_have_all_that_is_needed():
    assert lacking(TABLE) == []


def test_a_release_without_a_name_is_refused_in_one_line(monkeypatch):
    monkeypatch.delattr(torch, "_is_functional_tensor")
    with pytest.raises(CannotRunHere) as refused:
        expect_present("audit")
    assert lacking(TABLE) == [("torch", "torch._is_functional_tensor")]
    words = str(refused.value)
    assert words.startswith(
        f"audit: torch {importlib.metadata.version('torch')} has no torch._is_functional_tensor, which"
    )
    assert "\n" not in words


def test_names_of_another_command_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(private_names, "TABLE", [row for row in TABLE if row.user != "port"])
    expect_present("port")
