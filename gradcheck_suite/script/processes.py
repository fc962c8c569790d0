"""Processes for scripts: one that has imported torch and nothing of the suite is forked for each script.

Importing torch takes most of a script's time, and a run may announce many.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gradcheck_suite.core.results import Violation
from gradcheck_suite.script.writer import HANGS

PARENT = """\
import json, os, runpy, sys, traceback
import torch

# an optimizer imports torch._dynamo, which takes a second: once, in place of once for each script
torch.optim.SGD([torch.zeros(1)], lr=0.1)
for line in sys.stdin:
    script, folder, output, errors = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o600), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    sys.argv, sys.path[0], status = [script], os.path.dirname(os.path.abspath(script)), 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else ended.code is not None
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""


@dataclass(frozen=True)
class Ended:
    """How a script ended.

    Attributes:
        status: its exit status; negative for a signal.
        output: what it printed.
        errors: what it printed on standard error.
    """

    status: int
    output: str
    errors: str


class ScriptTimeoutError(Exception):
    """A script did not end in time. Its process has been killed."""


def run_script(script: Path, timeout_s: float | None) -> Ended:
    """Run a script in a process of its own, in the working directory.

    Raises:
        ScriptTimeoutError: it did not end in time.
        OSError: no process could be started.
    """
    if not hasattr(os, "fork"):
        return _run_alone(script, timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        status = _forked([str(script), str(Path.cwd()), str(output), str(errors)], timeout_s)
        return Ended(status, *(p.read_text(errors="replace") if p.exists() else "" for p in (output, errors)))


def _run_alone(script: Path, timeout_s: float | None) -> Ended:
    command = [sys.executable, str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ScriptTimeoutError from None
    return Ended(done.returncode, done.stdout, done.stderr)


_parents: list[subprocess.Popen[bytes]] = []


def _forked(request: list[str], timeout_s: float | None) -> int:
    """Have the parent fork a process for a script, and return the exit status."""
    if not _parents or _parents[0].poll() is not None:
        command = [sys.executable, "-c", PARENT]
        # a session of its own: Ctrl-C is for the suite, which ends the script
        pipe = subprocess.PIPE
        # unbuffered, since `select` sees nothing of what a buffer holds
        _parents[:] = [subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)]
    parent, end = _parents[0], None if timeout_s is None else time.monotonic() + timeout_s
    assert parent.stdin is not None
    child = None
    try:
        parent.stdin.write(json.dumps(request).encode() + b"\n")
        parent.stdin.flush()
        child = _line(parent, end)
        return _line(parent, end)
    except BaseException:
        # what is left of this request must not answer the next one
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        parent.kill()
        _end_parent()
        raise


@atexit.register
def _end_parent() -> None:
    for parent in _parents:
        with parent:  # closes its pipes, at which it ends, and waits
            pass
    _parents.clear()


def _line(parent: subprocess.Popen[bytes], end: float | None) -> int:
    """Return the number on the next line that the parent prints."""
    assert parent.stdout is not None
    left = None if end is None else max(0.0, end - time.monotonic())
    if not select.select([parent.stdout], [], [], left)[0]:
        raise ScriptTimeoutError
    line = parent.stdout.readline()
    if not line.strip():
        raise OSError("the process that runs scripts ended")
    return int(line)


# Running a script before it is announced: what does not show the fault again is said to be not repeatable.


START_S = 120.0
"""Seconds that a script may take beside the time limit of its loop: it imports torch and what the loop needs."""
SHOWN = "the fault is there"


def unrepeatable(script: Path, violation: Violation, time_limit_s: float | None) -> str | None:
    """Run a script in a process of its own, in the working directory; return why it does not show the fault, or None.

    Args:
        script: of the violation.
        violation: what the script is to show.
        time_limit_s: seconds that the loop may take.
    """
    longest = None if time_limit_s is None else START_S + time_limit_s
    try:
        done = run_script(script, longest)
    except ScriptTimeoutError:
        return f"it did not end within {longest:g} s"
    except KeyboardInterrupt:
        return "it was not run to its end: interrupted"
    except OSError as error:
        return f"it could not be run: {error}"
    lines = done.output.splitlines()
    # a loop that hangs ends the process, so nothing more is printed
    shown = violation.diagnosis in HANGS or lines[-1:] == [SHOWN]
    if done.status == 1 and shown:
        return None
    if done.status == 0:
        return "in a process of its own the loop does not show the fault (status 0)"
    said = [line for line in done.errors.splitlines() if line.strip()]
    reason = next((line for line in said if not line.startswith((" ", "Traceback"))), "no message")
    return f"it ends with status {done.status}: {reason}"
