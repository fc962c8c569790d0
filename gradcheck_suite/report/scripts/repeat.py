"""Running a script before it is announced: what does not show the fault again is said to be not repeatable."""

from __future__ import annotations

from pathlib import Path

from gradcheck_suite.report.scripts.check_code import HANGS
from gradcheck_suite.report.scripts.processes import ScriptTimeoutError, run_script
from gradcheck_suite.schema.results import Violation

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
