"""Whole steps under `zero_` and under `set_to_none`, from their records: which mode is faster where, in words.

The claim about when zeroing may do (C1.8) and the report's section on steps both read this module, and so say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import binomtest, false_discovery_control

Row = Mapping[str, Any]
LEVEL = 0.05
"""Expected share of wrong answers among the settings in which one mode is called faster (false discovery rate)."""
MODES = {"none": "set_to_none", "zero": "zero_", "neither": "neither"}


@dataclass(frozen=True)
class StepTimes:
    """What was found over several settings.

    Attributes:
        faster: for each setting that was not disturbed, a key of `MODES`.
        rows: those settings.
        disturbed: settings that other load on the machine disturbed each time; they count for nothing.
    """

    faster: tuple[str, ...]
    rows: tuple[Row, ...]
    disturbed: tuple[Row, ...]

    def where(self, which: str) -> list[Row]:
        """Return the settings with this answer."""
        return [row for row, answer in zip(self.rows, self.faster, strict=True) if answer == which]


def step_times(rows: Sequence[Row]) -> StepTimes:
    """Answer for every setting which mode is faster.

    A sign test over the pairs of a setting gives its p-value. Since many settings are tested at once, the procedure of
    Benjamini and Hochberg (1995, J. R. Statist. Soc. B 57, 289-300) decides which of them are significant.
    """
    kept = tuple(row for row in rows if not row.get("disturbed"))
    p_values = [binomtest(int(row["faster"]), int(row["pairs"])).pvalue if row["pairs"] else 1.0 for row in kept]
    adjusted = false_discovery_control(p_values) if kept else ()
    answers = (
        "neither" if p >= LEVEL else "none" if 2 * row["faster"] > row["pairs"] else "zero"
        for row, p in zip(kept, adjusted, strict=True)
    )
    return StepTimes(tuple(answers), kept, tuple(row for row in rows if row.get("disturbed")))


def summary(rows: Sequence[Row], device: str) -> str:
    """Return in how many settings each mode is faster, as a sentence or two.

    Args:
        rows: the settings of one device.
        device: what a reader calls the device, such as `"CPU"`.
    """
    found = step_times(rows)
    counts = {which: len(found.where(which)) for which in MODES}
    text = (
        f"On the {device}, of {len(found.rows)} settings releasing is faster in {counts['none']}, zeroing in "
        f"{counts['zero']}, neither in {counts['neither']} (sign test over pairs of steps in turn, corrected for the "
        f"number of settings, {LEVEL:.0%})."
    )
    best = max((row["saved"] / row["zero"] for row in found.where("none")), default=0.0)
    if best > 0:
        text += f" A release saves at most {best:.0%} of a step."
    if found.disturbed:
        text += f" {len(found.disturbed)} more settings were disturbed by other load and count for nothing."
    return text


def answer(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the sentence, the figures and the counterexample of claim C1.8 from steps timed on a CPU."""
    found = step_times(rows)
    figures = {
        f"{_setting(row)}: saved by releasing": (
            f"{1000 * row['saved']:+.3f} ms of {1000 * row['zero']:.3f} ({100 * row['saved'] / row['zero']:+.0f}%), "
            f"faster in {row['faster']} of {row['pairs']} pairs; {row['bytes_between'] / 2**20:.1f} MiB between steps"
        )
        for row in found.rows
    }
    return {
        "sentence": f"{summary(rows, 'CPU')} Two things decide: the share of the gradients' traffic in a step, and the "
        "cost of memory that is given back and allocated again. A release always saves the memory of all gradients "
        "between steps.",
        "figures": figures,
        "counterexample": "; ".join(map(_setting, found.where("none"))) or "none: releasing was faster in no setting",
    }


def _setting(row: Row) -> str:
    return f"{row['parameters']:.0e} parameters, {row['items']} items, K = {row['micro_batches']}"
