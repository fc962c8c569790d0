"""Run somebody's script or module as `python SCRIPT ARGS` does."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import io
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradcheck_suite.errors import UsageError


@contextlib.contextmanager
def _interpreter_of(argv: list[str], folder: str) -> Iterator[None]:
    """Set `sys.argv` and the first entry of `sys.path` as Python does; put them and the main module back."""
    kept = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = argv
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = kept


def script_runner(path: str, arguments: Sequence[str]) -> Callable[[], dict[str, Any]]:
    """Return a function that runs a script as the main module, and returns its names.

    Raises:
        UsageError: there is no such script, it cannot be read, or it is no Python.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{path}: no such script")
    try:
        with io.open_code(str(file.resolve())) as opened:
            code = compile(opened.read(), path, "exec")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path}: not Python: {error}") from None

    def run() -> dict[str, Any]:
        main = types.ModuleType("__main__")
        main.__dict__.update(
            __file__=path,
            __builtins__=sys.modules["builtins"],
            __cached__=None,
            __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        )
        with _interpreter_of([path, *arguments], str(file.resolve().parent)):
            sys.modules["__main__"] = main
            exec(code, main.__dict__)
        return main.__dict__

    return run


def module_runner(name: str, arguments: Sequence[str]) -> Callable[[], dict[str, Any]]:
    """Return a function that runs a module as `python -m` does, and returns its names.

    Raises:
        UsageError: there is no such module.
    """
    try:
        with _interpreter_of(sys.argv, str(Path.cwd())):
            found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise UsageError(f"-m {name}: {error}") from None
    if found is None:
        raise UsageError(f"-m {name}: no such module")

    def run() -> dict[str, Any]:
        with _interpreter_of([name, *arguments], str(Path.cwd())):
            return runpy.run_module(name, run_name="__main__", alter_sys=True)

    return run
