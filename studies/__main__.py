"""`python -m studies`: what measures torch, JAX and the suite itself."""

from __future__ import annotations

import sys

from gradcheck_suite.__main__ import main
from studies.commands import PROGRAM

if __name__ == "__main__":
    sys.exit(main(program=PROGRAM))
