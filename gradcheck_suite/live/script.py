"""Run somebody's script or module as `python SCRIPT ARGS` does."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from gradcheck_suite.errors import UsageError


def script_runner(path: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Return a function that runs a script as the main module.

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

    def run() -> None:
        main = types.ModuleType("__main__")
        main.__dict__.update(
            __file__=path,
            __builtins__=sys.modules["builtins"],
            __cached__=None,
            __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        )
        # left in place after the run: functions that the script registered for the exit still need it
        sys.modules["__main__"] = main
        sys.argv = [path, *arguments]
        sys.path.insert(0, str(file.resolve().parent))
        exec(code, main.__dict__)

    return run


def module_runner(name: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Return a function that runs a module as `python -m` does.

    Raises:
        UsageError: there is no such module.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise UsageError(f"-m {name}: {error}") from None
    if found is None:
        raise UsageError(f"-m {name}: no such module")

    def run() -> None:
        sys.argv = [name, *arguments]
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return run
