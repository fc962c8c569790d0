"""Definitions copied from the suite's modules, each with all that it needs, so that a script stands alone.

A name is looked up among its module's definitions and imports. A definition is copied as it stands, with comments, and
without decorators that belong to the suite. A name imported from another module of the suite is looked up there. Any
other import becomes an import of the script.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class _Import:
    """`from module import name`, or `import module` where `name` is None; either may be renamed."""

    module: str
    name: str | None = None
    renamed: str | None = None

    @property
    def is_own(self) -> bool:
        return self.module.partition(".")[0] == PACKAGE

    @property
    def what(self) -> str:
        """What the statement imports."""
        return f"{self.name or self.module} as {self.renamed}" if self.renamed else self.name or self.module


@dataclass(frozen=True)
class _Definition:
    """A function, class or assignment as text, and the names that occur in it."""

    text: str
    names: tuple[str, ...]


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield top-level statements, those for type checkers among them."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements(node.body)
        else:
            yield node


def _named(node: ast.stmt) -> Iterator[tuple[str, ast.stmt | _Import]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], _Import(alias.name, None, alias.asname)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, _Import(node.module or "", alias.name, alias.asname)
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for name in (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
            yield name.id, node


@cache
def _module(name: str) -> tuple[str, dict[str, ast.stmt | _Import]]:
    """Return a module's source, and its top-level names with what each stands for."""
    source = inspect.getsource(importlib.import_module(name))
    return source, dict(pair for node in _statements(ast.parse(source).body) for pair in _named(node))


@cache
def _look_up(module: str, name: str) -> _Definition | _Import | None:
    """Return what a name stands for in a module of the suite; None where the module does not define it."""
    source, names = _module(module)
    node = names.get(name)
    if node is None or isinstance(node, _Import):
        return node
    decorators = getattr(node, "decorator_list", [])
    dropped = [decorator for decorator in decorators if _is_own(names, decorator)]
    kept = [f"@{ast.get_source_segment(source, d)}" for d in decorators if d not in dropped]
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    children = [child for child in ast.iter_child_nodes(node) if child not in dropped]
    needed = [inner.id for child in children for inner in ast.walk(child) if isinstance(inner, ast.Name)]
    return _Definition("\n".join([*kept, *lines]), tuple(dict.fromkeys(needed)))


def _is_own(names: dict[str, ast.stmt | _Import], decorator: ast.expr) -> bool:
    """Return whether a decorator belongs to the suite: it says something to the suite only."""
    found = names.get(next(node.id for node in ast.walk(decorator) if isinstance(node, ast.Name)))
    return found is not None and (not isinstance(found, _Import) or found.is_own)


class CopiedSource:
    """Definitions and imports gathered so far; a definition comes after those it needs."""

    def __init__(self) -> None:
        self._imports: set[_Import] = set()
        self._texts: dict[str, str] = {}
        self._taken: set[str] = set()

    def copy(self, *objects: Any) -> None:
        """Gather some of the suite's functions and classes, and all that they need."""
        for what in objects:
            self.add(what.__module__, what.__name__)

    def add(self, module: str, *names: str) -> None:
        """Gather what some names mean in a module of the suite; names that it does not define are left alone."""
        for name in names:
            found = _look_up(module, name)
            if isinstance(found, _Import):
                self._follow(found)
            elif found is not None:
                self._copy(module, name, found)

    def add_import(self, module: str, name: str | None = None) -> None:
        """Have the script import a module, or a name from it."""
        self._imports.add(_Import(module, name))

    def _follow(self, found: _Import) -> None:
        if not found.is_own:
            self._imports.add(found)
        elif found.name is not None:
            assert found.renamed is None, f"{found}: what is renamed cannot be copied"
            self.add(found.module, found.name)

    def _copy(self, module: str, name: str, found: _Definition) -> None:
        if name in self._texts:
            other = self._texts[name] != found.text
            assert not other, f"{name} of {module} and of another module cannot stand in one script"
            return
        self._texts[name] = found.text
        self.add(module, *found.names)
        # what it needs has come in between
        self._texts[name] = self._texts.pop(name)

    def take(self) -> list[str]:
        """Return the texts gathered since the last call, each after those it needs."""
        texts = [text for text in dict.fromkeys(self._texts.values()) if text not in self._taken]
        self._taken.update(texts)
        return texts

    def imports(self) -> str:
        """Return the import statements, those of Python's own modules first."""
        groups: tuple[list[str], list[str]] = ([], [])
        for module in {found.module for found in self._imports}:
            group = groups[module.partition(".")[0] not in sys.stdlib_module_names]
            group += [f"import {i.what}" for i in self._imports if i.module == module and i.name is None]
            if names := sorted(i.what for i in self._imports if i.module == module and i.name is not None):
                group.append(f"from {module} import {', '.join(names)}")
        in_order = [sorted(group, key=lambda line: (line.startswith("from"), line)) for group in groups]
        return "\n\n".join("\n".join(group) for group in in_order if group)
