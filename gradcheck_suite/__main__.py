"""The entry of `gradcheck-suite` and of `python -m gradcheck_suite`, which behave the same.

Nothing heavy is imported here: `--help` and bad usage answer at once.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments after the program's name; those of this process when None.
    """
    # at its end Python would look for garbage among the objects of torch and jax, which takes a second
    atexit.register(gc.freeze)
    try:
        from gradcheck_suite.cli import exit_status, run

        status = run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:  # before the command line was read, or after its end
        print("gradcheck-suite: error: interrupted", file=sys.stderr)
        # again, where the first one was interrupted
        from gradcheck_suite.cli import exit_status

        status = exit_status.INTERRUPTED
    if argv is None and status == exit_status.INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        # torch and jax may be half imported: Python's orderly end may crash then
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
