"""A folder to follow a page in, and nothing left behind in this process."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from gradcheck_suite.core.comparison import FEW_DRAWS

ENVIRONMENT = ("HYPOTHESIS_STORAGE_DIRECTORY", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory; what a page imports, registers and sets is undone."""
    _forget_modules(tmp_path.parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "cpu" if name == "JAX_PLATFORMS" else str(tmp_path.parent / name))
    monkeypatch.setenv("COLUMNS", "100")
    operations = import_module("gradcheck_suite.bridge.op_table")
    monkeypatch.setattr(operations, "_TABLE", dict(operations._TABLE))
    # few draws of the rounding errors, whose bound is 30 times as wide: each page's fault is
    # thousands of times larger
    for name in ("DRAWS", "MANY_DRAWS"):
        for module in ("large_batch", "rounding"):
            monkeypatch.setattr(
                import_module(f"gradcheck_suite.reference.{module}"), name, FEW_DRAWS
            )
    # one window of each problem is compiled
    opinions = import_module("gradcheck_suite.verification.second_opinion")
    asked = opinions.second_opinion
    monkeypatch.setattr(
        opinions, "second_opinion", lambda *about, budget_s: asked(*about, budget_s=0)
    )
    yield tmp_path
    _forget_modules(tmp_path.parent)


def _forget_modules(folder):
    """Forget the modules of a folder, those of other tests included: two pages have a `my_loop`
    each.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_relative_to(folder):
            del sys.modules[name]
