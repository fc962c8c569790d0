"""Digests of the suite's sources, by which a record is known to come from another version of the code that judges."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

JUDGING = (
    "bridge",
    "catalogue",
    "diagnosis",
    "execution",
    "generation",
    "numerics",
    "references",
    "schema",
    "verification",
)
"""The packages that decide a verdict and its name."""

MEASURING = ("loops", "measure")
"""The packages that decide what is measured."""
_SPEAKS_OF = {
    "atlas": (*JUDGING, "evidence/atlas"),
    "audit": (*JUDGING, "live"),
    "benchmark": MEASURING,
    "calibration": (*JUDGING, "evidence/calibration"),
    "claim": (*JUDGING, *MEASURING, "evidence/claims"),
    "memory": MEASURING,
    "step": ("steps",),
    "traffic": MEASURING,
    "trainer": (*JUDGING, "trainers"),
    "verify": (*JUDGING, "loops"),
    "zero-or-none": ("evidence/zero_or_none",),
    "zoo": (*JUDGING, "evidence/zoo"),
}
"""Kind of record -> the packages whose change makes its figures old, where they are not those that judge alone."""


@cache
def judge_digest() -> str:
    """Return the digest of the code that judges."""
    return sources_digest(JUDGING)


@cache
def code_digest(kind: str) -> str:
    """Return the digest of the code that records of a kind speak of."""
    return sources_digest(_SPEAKS_OF[kind]) if kind in _SPEAKS_OF else judge_digest()


def sources_digest(names: Iterable[str]) -> str:
    """Return a digest of some modules and packages of the suite.

    Comments, docstrings, annotations of arguments, imports and layout do not change the digest.

    Args:
        names: paths in the package, such as `"numerics"` or `"execution/runner.py"`.
    """
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for name in names:
        paths = sorted((package / name).rglob("*.py")) if (package / name).is_dir() else [package / name]
        for path in paths:
            digest.update(_essence(path.read_text()).encode())
    return digest.hexdigest()[:16]


def _essence(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [n for n in node.body if not _is_text(n)]
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
