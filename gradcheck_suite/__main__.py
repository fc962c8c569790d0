"""The entry of `gradcheck-suite` and of `python -m gradcheck_suite`, which behave the same.

Nothing heavy is imported here: `--help` and bad usage answer at once.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments after the program's name; those of this process when None.
    """
    from gradcheck_suite.cli import run

    # at its end Python would look for garbage among the objects of torch and jax, which takes a second
    atexit.register(gc.freeze)
    return run(sys.argv[1:] if argv is None else list(argv))


if __name__ == "__main__":
    sys.exit(main())
