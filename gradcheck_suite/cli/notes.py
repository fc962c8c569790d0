"""What a user should know beside the result, on standard error, one line each."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from gradcheck_suite.trainers import TRAINERS


def tell_of_trainers(names: Iterable[str]) -> None:
    """Say which of the loops are trainers of a version that was never tested with."""
    for name in names:
        note = TRAINERS[name].note if name in TRAINERS else None
        if note:
            print(f"gradcheck-suite: note: {note}", file=sys.stderr, flush=True)
