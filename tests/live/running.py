"""Runs a script of `scripts/` in this process under an audit; the command does so in a process of its own."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import gradcheck_suite
from gradcheck_suite.live.script import script_runner

SCRIPTS = Path(__file__).parent / "scripts"


def audited(script: Path, *arguments: str, **options):
    """Return the result of an audit of a script, and the script's names."""
    kept = sys.argv[:], sys.path[:], sys.modules["__main__"]
    audit = gradcheck_suite.audit(name=script.name, **options).open(scan=False)
    error = None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            script_runner(str(script), arguments)()
    except SystemExit as stop:
        error = stop
    finally:
        names = vars(sys.modules["__main__"])
        sys.argv[:], sys.path[:], sys.modules["__main__"] = kept
        result = audit.close(error)
    return result, names


def trained(script: Path, *arguments: str):
    """Return the names of a script that ran without an audit."""
    kept = sys.argv[:], sys.path[:], sys.modules["__main__"]
    try:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            script_runner(str(script), arguments)()
        return vars(sys.modules["__main__"])
    finally:
        sys.argv[:], sys.path[:], sys.modules["__main__"] = kept
