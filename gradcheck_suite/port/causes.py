"""The names of causes: what each means and what to do.

`causes.txt` has the table: name | meaning | remedy.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple


class Cause(NamedTuple):
    """What a name stands for.

    Attributes:
        meaning: as a clause that completes "the cause is that ..." or names the thing.
        remedy: what to change in the port.
    """

    meaning: str
    remedy: str


_rows = files("gradcheck_suite.port").joinpath("causes.txt").read_text().splitlines()
CAUSES: dict[str, Cause] = {
    name: Cause(meaning, remedy)
    for name, meaning, remedy in ([part.strip() for part in row.split("|")] for row in _rows)
}


def meaning(name: str) -> str:
    """Return what a name stands for, or nothing where it says so itself."""
    return " and ".join(
        CAUSES[p].meaning for p in name.split(" and ") if p in CAUSES and p != "unknown"
    )


def remedy(name: str) -> str:
    """Return what to do about a cause, or nothing."""
    return "; ".join(
        CAUSES[p].remedy for p in name.split(" and ") if p in CAUSES and p != "unknown"
    )
