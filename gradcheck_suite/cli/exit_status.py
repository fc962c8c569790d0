"""The exit statuses of all commands."""

from __future__ import annotations

HOLDS = 0
VIOLATED = 1
BAD_USAGE = 2
DISAGREEMENT = 3
"""No loop is violated, but torch and JAX disagree somewhere: a finding, which must not pass unseen."""
BUG = 70
"""A bug in the suite itself; the number is `EX_SOFTWARE` of `sysexits.h`."""
INTERRUPTED = 130
"""Stopped by Ctrl-C before any violation was found; after one, the status is `VIOLATED`."""

EPILOG = (
    "Exit status: 0 everything holds; 1 some loop is violated (doctor: the main job cannot run here); 2 bad usage or "
    "input, or nothing could be judged; 3 nothing is violated, but torch and JAX disagree somewhere (a finding); 70 a "
    "bug in gradcheck-suite; 130 interrupted before any violation was found."
)


def status_of(*, violated: bool, findings: bool, interrupted: bool = False) -> int:
    """Return the status of a command that judged loops: a violation outweighs an interrupt, and this a finding."""
    if violated:
        return VIOLATED
    if interrupted:
        return INTERRUPTED
    return DISAGREEMENT if findings else HOLDS
