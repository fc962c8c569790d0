"""Stand-alone scripts: a violation as one Python file that needs torch alone, to send to whoever mends the loop.

A script reads from top to bottom: model, data, loop, expected gradient, comparison. The numbers come from the
violation's evidence; no loop is run to write it. It is run once before it is announced.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from gradcheck_suite.core.contract import DEFAULT_TIME_LIMIT, Loop, Problem, is_jax
from gradcheck_suite.core.results import Violation, is_endless
from gradcheck_suite.script import writer

__all__ = ["script_text", "unrepeatable"]


def script_text(
    loop: Loop,
    name: str,
    violation: Violation,
    *,
    problem: Problem | None = None,
    time_limit_s: float | None = DEFAULT_TIME_LIMIT,
    assumes: Iterable[str] = (),
) -> str | None:
    """Return the script of a violation, which needs torch alone, or jax and optax alone; None where there is none."""
    if is_jax(loop):
        from gradcheck_suite.script.jax_writer import jax_script_text  # torch loops need none of it

        return jax_script_text(loop, name, violation, problem)
    return writer.script_text(loop, name, violation, problem=problem, time_limit_s=time_limit_s, assumes=assumes)


START_S = 120.0
"""Seconds that a script may take beside the time limit of its loop: it imports torch and what the loop needs."""


def unrepeatable(script: Path, violation: Violation, time_limit_s: float | None) -> str | None:
    """Run a script in a process of its own, in the working directory; return why it does not show the fault, or None.

    Args:
        script: the script of the violation.
        violation: what the script is to show.
        time_limit_s: seconds that the loop may take.
    """
    longest = None if time_limit_s is None else START_S + time_limit_s
    command = [sys.executable, str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=longest, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not end within {longest:g} s"
    except (KeyboardInterrupt, OSError) as error:
        return f"it could not be run: {error}" if str(error) else "it was not run to its end: interrupted"
    # a loop that hangs ends the process, so nothing more is printed
    shown = is_endless(violation) or done.stdout.endswith("the fault is there\n")
    if done.returncode == 1 and shown:
        return None
    if done.returncode == 0:
        return "in a process of its own the loop does not show the fault (status 0)"
    errors = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith((" ", "Traceback"))]
    return f"it ends with status {done.returncode}: {errors[0] if errors else 'no message'}"
