"""Notes on standard error beside the result, one line each."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from gradcheck_suite.trainers import TRAINERS


def note_untested_trainers(names: Iterable[str]) -> None:
    """Print a note for each loop that is a trainer whose installed version is not a tested one."""
    for name in names:
        note = TRAINERS[name].note if name in TRAINERS else None
        if note:
            print(f"gradcheck-suite: note: {note}", file=sys.stderr, flush=True)
