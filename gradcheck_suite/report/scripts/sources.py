"""Definitions copied out of the suite's own modules, each with everything it needs, so that a script stands alone.

A module's source is read as a tree: a name is looked up among the module's definitions and imports, what comes from
another module of the suite is followed there, what comes from elsewhere becomes an import of the script. Texts are
copied as they stand, comments included; only decorators that belong to the suite are left out.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class _Import:
    """`from module import name`, or `import module` where `name` is None; either may be renamed."""

    module: str
    name: str | None
    renamed: str | None

    @property
    def is_own(self) -> bool:
        return self.module.partition(".")[0] == PACKAGE

    @property
    def what(self) -> str:
        """What the statement imports."""
        return f"{self.name or self.module} as {self.renamed}" if self.renamed else self.name or self.module


@dataclass(frozen=True)
class _Module:
    source: str
    names: dict[str, ast.stmt | _Import]


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
def _read(module: str) -> _Module:
    source = inspect.getsource(importlib.import_module(module))
    body = _statements(ast.parse(source).body)
    return _Module(source, dict(pair for node in body for pair in _named(node)))


class Sources:
    """Definitions and imports gathered so far; a definition comes after those it needs."""

    def __init__(self) -> None:
        self._imports: set[_Import] = set()
        self._texts: dict[str, str] = {}

    def add(self, module: str, *names: str) -> None:
        """Gather what some names mean in a module of the suite; names that it does not define are left alone."""
        for name in names:
            found = _read(module).names.get(name)
            if isinstance(found, _Import):
                self._follow(found)
            elif found is not None:
                self._copy(module, name, found)

    def add_needs(self, module: str, *trees: ast.AST) -> None:
        """Gather what the names in some trees mean in a module of the suite."""
        for tree in trees:
            self.add(module, *(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))

    def add_import(self, module: str, name: str | None = None) -> None:
        """Have the script import a module, or a name from it."""
        self._imports.add(_Import(module, name, None))

    def _follow(self, found: _Import) -> None:
        if not found.is_own:
            self._imports.add(found)
        elif found.name is not None:
            assert found.renamed is None, f"{found}: what is renamed cannot be copied"
            self.add(found.module, found.name)

    def _copy(self, module: str, name: str, node: ast.stmt) -> None:
        dropped = [d for d in getattr(node, "decorator_list", ()) if _is_own(module, d)]
        text = _text(_read(module).source, node, dropped)
        if name in self._texts:
            assert self._texts[name] == text, f"{name} of {module} and of another module cannot stand in one script"
            return
        self._texts[name] = text
        self.add_needs(module, *(child for child in ast.iter_child_nodes(node) if child not in dropped))
        # what it needs has come in between
        self._texts[name] = self._texts.pop(name)

    @property
    def definitions(self) -> list[str]:
        """The texts, each after those it needs."""
        return list(dict.fromkeys(self._texts.values()))

    @property
    def imports(self) -> list[str]:
        """The import statements, torch's last."""
        plain = [f"import {i.what}" for i in self._imports if i.name is None]
        froms = {
            module: sorted({i.what for i in self._imports if i.module == module and i.name is not None})
            for module in {i.module for i in self._imports}
        }
        lines = plain + [f"from {module} import {', '.join(names)}" for module, names in froms.items() if names]
        return sorted(lines, key=lambda line: (not _is_pythons(line), line[0] == "f", line))


def _is_pythons(line: str) -> bool:
    """Return whether an import statement is about Python's own modules."""
    return line.split()[1].partition(".")[0] in sys.stdlib_module_names


def _is_own(module: str, decorator: ast.expr) -> bool:
    """Return whether a decorator belongs to the suite: it says something to the suite only."""
    root = next(node.id for node in ast.walk(decorator) if isinstance(node, ast.Name))
    found = _read(module).names.get(root)
    return found is not None and (not isinstance(found, _Import) or found.is_own)


def _text(source: str, node: ast.stmt, dropped: Sequence[ast.expr]) -> str:
    kept = [d for d in getattr(node, "decorator_list", ()) if d not in dropped]
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join([*(f"@{ast.get_source_segment(source, d)}" for d in kept), *lines])
