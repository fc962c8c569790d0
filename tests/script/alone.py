"""Runs scripts in processes of their own, where torch can be imported and the suite cannot."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SUITE = ("gradcheck_suite", "tests", "jax", "hypothesis")
# importing torch takes most of a script's time: the server has done it before it forks
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "pytest"])


class Ended(NamedTuple):
    """How a script ended: its exit status, negative for a signal, and what it printed."""

    status: int
    output: str
    errors: str


def _run(script: str, folder: str, missing: tuple[str, ...]) -> None:
    os.chdir(folder)
    for number, kind in ((1, "output"), (2, "errors")):
        os.dup2(os.open(f"{script}.{kind}", os.O_WRONLY | os.O_CREAT, 0o600), number)
    for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(missing))
    sys.argv = [script]
    sys.dont_write_bytecode = True  # a test may run it again on a file that it has changed since
    runpy.run_path(script, run_name="__main__")


def run_alone(text: str, folder: Path | str = "/", missing: tuple[str, ...] = SUITE) -> Ended:
    """Run a script's text in a working directory of its own, without some packages."""
    with tempfile.TemporaryDirectory() as place:
        script = Path(place, "script.py")
        script.write_text(text)
        process = _context.Process(target=_run, args=(str(script), str(folder), missing))
        process.start()
        process.join(120)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return Ended(
            process.exitcode,
            *(Path(f"{script}.{kind}").read_text() for kind in ("output", "errors")),
        )
