"""The entry of `gradcheck-suite` and of `python -m gradcheck_suite`, which behave the same.

Nothing heavy is imported here: `--help` and bad usage answer at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from gradcheck_suite.cli import CommandLine


def main(argv: Sequence[str] | None = None, program: CommandLine | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments after the program's name; those of this process when None.
        program: that has the command; `gradcheck-suite` when None.
    """
    for name in ("stdout", "stderr"):
        # closed by whoever started the process: a file would get its number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the end
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        from gradcheck_suite.cli import PROGRAM, exit_status, run

        status = run(given, program or PROGRAM)
    except KeyboardInterrupt:  # before the command line was read, or after its end
        print("gradcheck-suite: error: interrupted", file=sys.stderr)
        # again, where the first one was interrupted
        from gradcheck_suite.cli import exit_status

        status = exit_status.INTERRUPTED
    # a script that was run ends as Python ends it, with its finalisers
    if argv is None and (given[:1] != ["audit"] or status == exit_status.INTERRUPTED):
        _end(status, orderly=status != exit_status.INTERRUPTED)
    return status


def _end(status: int, *, orderly: bool) -> NoReturn:
    """End the process as a child of `multiprocessing` ends, without taking the modules of torch and
    jax apart.

    That would take a second, and bindings write lines about what they find alive. No issue is known
    for triton's: https://nanobind.readthedocs.io/en/latest/refleaks.html explains them.

    Args:
        status: of the process.
        orderly: whether handlers of `atexit` run; torch and jax may be half imported when an
            interrupt comes.
    """
    if orderly:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
