"""Whether the definitions in a script are those that the suite itself runs, to the letter."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import gradcheck_suite
from gradcheck_suite.script import runtime

FOLDER = gradcheck_suite.__path__[0]
WRITTEN = {
    *("load_loop", "make_optimizer", "Model", "PARAMETERS", "make_model", "LOSS_OPTIONS", "loss", "count"),
    *(
        "FOUND",
        "PROBLEM",
        "DATA",
        "MICRO_BATCHES",
        "batch_of",
        "EXPECTED",
        "OBSERVED",
        "ALLOWED",
        "large_batch",
        "main",
    ),
    *("DEVICE", "DTYPE"),
}
"""What a script defines for its case, and does not copy."""


@contextmanager
def executed_functions() -> Iterator[set[str]]:
    """Yield a set that is the source of every function of the suite that was called inside, once the block is left."""
    codes, sources = set(), set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield sources
    finally:
        sys.setprofile(None)
    sources.update(_source(code) for code in codes)
    functions = inspect.getmembers(runtime, inspect.isfunction)
    sources.update(_source(function) for _, function in functions if function.__module__ == runtime.__name__)


def _source(what) -> str:
    return textwrap.dedent(inspect.getsource(what)).rstrip()


def assert_copied(text: str, executed: set[str]) -> None:
    """Hold each definition that a script copies to the suite's source.

    A function must be one that the suite called; a class or an assignment must stand in a module of the suite.

    Args:
        text: of the script.
        executed: from `executed_functions`.
    """
    __tracebackhide__ = True
    modules = {name: inspect.getsource(m) for name, m in sys.modules.items() if name.startswith("gradcheck_suite.")}
    seen = set()
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        names = {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else names
        assert not names & seen, f"defined twice: {names & seen}"
        seen |= names
        if names & WRITTEN:
            continue
        source = ast.get_source_segment(text, node)
        if isinstance(node, ast.FunctionDef):
            assert source in executed, f"not a function that the suite called:\n{source}"
        else:
            assert any(f"\n{source}\n" in module for module in modules.values()), f"not the suite's:\n{source}"
