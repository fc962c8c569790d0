"""Runs a script of `scripts/` in this process under an audit; the command does so in a process of its own."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import gradcheck_suite
from gradcheck_suite.live.script import script_runner

SCRIPTS = Path(__file__).parent / "scripts"


def trained(script: Path, *arguments: str):
    """Run a script and return its names."""
    with contextlib.redirect_stdout(io.StringIO()):
        return script_runner(str(script), arguments)()


def audited(script: Path, *arguments: str, **options):
    """Return the result of an audit of a script, and the script's names."""
    audit = gradcheck_suite.audit(name=script.name, **options).open(scan=False)
    try:
        names = trained(script, *arguments)
    finally:
        result = audit.close()
    return result, names
