"""The installed libraries that a user's loop imports: a verdict on a trainer is about their versions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from gradcheck_suite.schema.contract import Loop

ALWAYS_NAMED = {"gradcheck-suite", "torch", "jax"}


def libraries_of(loop: Loop) -> tuple[str, ...]:
    """Return the distributions that the loop's file and the files beside it import, in order of appearance."""
    module = sys.modules.get(getattr(loop, "__module__", None) or type(loop).__module__)
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "gradcheck_suite":  # type: ignore[union-attr]
        return ()
    imported = dict.fromkeys(_imports(Path(file), set()))
    if not imported:
        return ()
    distributions = packages_distributions()
    found = dict.fromkeys(name for top in imported for name in distributions.get(top, [])[:1])
    return tuple(name for name in found if name not in ALWAYS_NAMED)


def _imports(file: Path, seen: set[Path]) -> Iterator[str]:
    """Yield the top-level names that a file imports from elsewhere, and those that files beside it import."""
    if file in seen or file.suffix != ".py":
        return
    seen.add(file)
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.module or not node.level else [alias.name for alias in node.names]
        for name in names:
            yield from _imports_of(name.split("."), file.parent, seen)


def _imports_of(parts: list[str], folder: Path, seen: set[Path]) -> Iterator[str]:
    beside = folder.joinpath(*parts)
    local = [path for path in (beside.with_suffix(".py"), beside / "__init__.py") if path.is_file()]
    if local:
        yield from _imports(local[0], seen)
    elif parts[0] and parts[0] not in sys.stdlib_module_names and not (folder / parts[0]).is_dir():
        yield parts[0]
