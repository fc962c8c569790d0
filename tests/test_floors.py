"""The house: who may import whom, and what importing the package costs.

A floor imports only floors below it and its own. Floors 0 and 1 know neither torch nor jax.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradcheck_suite

PACKAGE = "gradcheck_suite"
ROOT = Path(gradcheck_suite.__file__).parent
FLOORS = {
    # 0: plain data
    "case": 0,
    "contract": 0,
    "errors": 0,
    "files": 0,
    "frames": 0,
    "hints": 0,
    "journal": 0,
    "plan": 0,
    "probe": 0,
    "reach": 0,
    "records": 0,
    "spec": 0,
    # 1: numbers
    "numerics": 1,
    # 2: torch and JAX
    "aliasing": 2,
    "autocast": 2,
    "catalogue": 2,
    "devices": 2,
    "entanglement": 2,
    "guard": 2,
    "item_weights": 2,
    "ledger": 2,
    "loops": 2,
    "observer": 2,
    "optimizers": 2,
    "soundness": 2,
    "references": 2,
    "probe_reading": 2,
    "subject": 2,
    "trial": 2,
    # 3: checking and drawing
    "bridge": 3,
    "calibration": 3,
    "case_reading": 3,
    "checking": 3,
    "claims": 3,
    "costs": 3,
    "counterexamples": 3,
    "describe": 3,
    "explain": 3,
    "explain_steps": 3,
    "loading": 3,
    "scripts": 3,
    "second_opinion": 3,
    "strategies": 3,
    "trainers": 3,
    "verification": 3,
    "zoo": 3,
    # 4: what people meet
    "__init__": 4,
    "__main__": 4,
    "cli": 4,
    "environment": 4,
    "pytest_plugin": 4,
    "report": 4,
}
"""The floor of every module, packages as a whole."""
FRAMEWORKS = ("torch", "jax", "jaxlib")
IMPORT_SECONDS = 0.2


def _top(module: str) -> str:
    """Return the part of a module's dotted name that the table lists."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _modules(root: Path) -> dict[str, Path]:
    """Return the package's modules by dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(source: str, modules: dict[str, Path], at: str) -> Iterator[str]:
    """Yield the modules that a source imports when it runs, inside functions too; annotations' imports are not run."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from walk(other)
            return
        yield node
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = at.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base


def _breaches(module: str, source: str, modules: dict[str, Path]) -> list[str]:
    """Return what a module must not import, in words."""
    floor = FLOORS[_top(module)]
    found = []
    for imported in _imports(source, modules, module):
        if imported.split(".")[0] in FRAMEWORKS and floor <= 1:
            found.append(f"{module} (floor {floor}) imports {imported}")
        if imported.split(".")[0] == PACKAGE and FLOORS[_top(imported)] > floor:
            found.append(f"{module} (floor {floor}) imports {imported} (floor {FLOORS[_top(imported)]})")
    return found


MODULES = _modules(ROOT)


def test_every_module_has_a_floor_and_every_floor_a_module():
    assert {_top(module) for module in MODULES} == set(FLOORS)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_nothing_from_above(module):
    assert _breaches(module, MODULES[module].read_text(), MODULES) == []


@pytest.mark.parametrize(
    ("module", "source", "breach"),
    [
        ("gradcheck_suite.plan", "from gradcheck_suite.trial import Trial", "imports gradcheck_suite.trial (floor 2)"),
        ("gradcheck_suite.plan", "from gradcheck_suite import trial", "imports gradcheck_suite.trial (floor 2)"),
        ("gradcheck_suite.plan", "from gradcheck_suite import Case", "imports gradcheck_suite (floor 4)"),
        ("gradcheck_suite.plan", "import gradcheck_suite.numerics.compare as c", "numerics.compare (floor 1)"),
        ("gradcheck_suite.plan", "def late():\n    import torch.nn", "(floor 0) imports torch.nn"),
        ("gradcheck_suite.numerics.bounds", "import jax.numpy as jnp", "(floor 1) imports jax.numpy"),
        ("gradcheck_suite.numerics.bounds", "from ..trial import Trial", "imports gradcheck_suite.trial (floor 2)"),
        ("gradcheck_suite.trial", "try:\n    pass\nexcept E:\n    from gradcheck_suite.cli import main", "(floor 4)"),
        ("gradcheck_suite.checking", "if TYPE_CHECKING:\n    pass\nelse:\n    import gradcheck_suite.cli", "(floor 4)"),
    ],
)
def test_a_planted_upward_import_is_caught(module, source, breach):
    (found,) = _breaches(module, source, MODULES)
    assert breach in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gradcheck_suite.plan", "if TYPE_CHECKING:\n    import torch"),
        ("gradcheck_suite.plan", "from gradcheck_suite.spec import Layer"),
        ("gradcheck_suite.trial", "import torch\nfrom gradcheck_suite.numerics.compare import Layout"),
        ("gradcheck_suite.cli", "from gradcheck_suite import verify"),
    ],
)
def test_a_downward_import_is_not(module, source):
    assert _breaches(module, source, MODULES) == []


def _fresh(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT.parent).stdout.strip()


def test_importing_the_package_imports_neither_framework():
    loaded = _fresh(f"import sys, {PACKAGE}; print([m for m in {FRAMEWORKS!r} if m in sys.modules])")
    assert loaded == "[]"


def test_importing_the_package_is_fast():
    """In processor time, which other work on the machine does not change."""
    code = f"import time; t = time.process_time(); import {PACKAGE}; print(time.process_time() - t)"
    assert statistics.median(float(_fresh(code)) for _ in range(3)) < IMPORT_SECONDS


def test_every_public_name_is_there():
    code = f"import {PACKAGE} as g; print([n for n in g.__all__ if getattr(g, n, None) is None])"
    assert _fresh(code) == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'checks'"):
        gradcheck_suite.checks  # noqa: B018
