"""Whole steps under `zero_` and under `set_to_none`, from their records: which mode is faster
where, in words.

The claim about when zeroing may do (C1.8) and the report's section on steps both read this module,
and so say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any

from scipy.stats import binomtest, false_discovery_control

from gradcheck_suite.core.records import Data
from gradcheck_suite.core.text import counted
from gradcheck_suite.page.reading import DEVICES
from studies.report.measurements import by_device

LEVEL = 0.05
"""Expected share of wrong answers among the settings in which one mode is called faster (false discovery rate)."""
SETTING = ("device", "parameters", "items", "micro_batches")
MODES = {"none": "set_to_none", "zero": "zero_", "neither": "neither"}


@dataclass(frozen=True)
class StepTimes:
    """What was found over several settings.

    Attributes:
        faster: for each setting that was not disturbed, a key of `MODES`.
        rows: those settings.
        disturbed: settings that other load on the machine disturbed each time; they count for
            nothing.
    """

    faster: tuple[str, ...]
    rows: tuple[Data, ...]
    disturbed: tuple[Data, ...]

    def where(self, which: str) -> list[Data]:
        """Return the settings with this answer."""
        return [row for row, answer in zip(self.rows, self.faster, strict=True) if answer == which]


def pooled(rows: Sequence[Data]) -> list[Data]:
    """Return one row for each setting, from all runs that timed it.

    Pairs of one run share the places of their tensors in memory, and another run may find the
    opposite. `agree` says whether the majority of pairs is on the same side in every run. Times and
    savings are medians over the runs, the quartiles reach over those of all runs, and the pairs are
    added up. A disturbed run counts where there is no other. `each` has the rows of the runs.
    """
    settings: dict[tuple[Any, ...], list[Data]] = {}
    for row in rows:
        settings.setdefault(tuple(row[name] for name in SETTING), []).append(row)
    found: list[Data] = []
    for mine in settings.values():
        runs = [row for row in mine if not row.get("disturbed")] or mine[-1:]
        bars = [row["saved_quartiles"] for row in runs if row.get("saved_quartiles")]
        found.append(
            {
                **runs[-1],
                **{name: median(row[name] for row in runs) for name in ("zero", "none", "saved")},
                **{name: sum(row[name] for row in runs) for name in ("faster", "pairs")},
                "saved_quartiles": (
                    (min(low for low, _ in bars), max(high for _, high in bars)) if bars else None
                ),
                "runs": len(runs),
                "agree": len({2 * row["faster"] > row["pairs"] for row in runs}) == 1,
                "each": runs,
            }
        )
    return found


def step_times(rows: Sequence[Data]) -> StepTimes:
    """Answer for every setting which mode is faster.

    A sign test over the pairs of a setting gives its p-value. Since many settings are tested at
    once, the procedure of Benjamini and Hochberg (1995, J. R. Statist. Soc. B 57, 289-300) decides
    which of them are significant. In a setting that several runs timed, neither mode is faster
    unless they agree; see `pooled`.
    """
    kept = tuple(row for row in rows if not row.get("disturbed"))
    p_values = [
        binomtest(int(row["faster"]), int(row["pairs"])).pvalue if row["pairs"] else 1.0
        for row in kept
    ]
    adjusted = false_discovery_control(p_values) if kept else ()
    answers = (
        (
            "neither"
            if p >= LEVEL or not row.get("agree", True)
            else "none"
            if 2 * row["faster"] > row["pairs"]
            else "zero"
        )
        for row, p in zip(kept, adjusted, strict=True)
    )
    return StepTimes(tuple(answers), kept, tuple(row for row in rows if row.get("disturbed")))


def run_by_run(rows: Sequence[Data]) -> list[list[Data]]:
    """Return the rows of each run that `pooled` has put together.

    Of a run that was not, the rows themselves.
    """
    runs = zip_longest(*(row.get("each", (row,)) for row in rows))
    return [[row for row in run if row is not None] for run in runs]


def summary(rows: Sequence[Data], device: str) -> str:
    """Return in how many settings each mode is faster, as a sentence or two.

    Args:
        rows: the settings of one device.
        device: what a reader calls the device, such as `"CPU"`.
    """
    found = step_times(rows)
    counts = {which: len(found.where(which)) for which in MODES}
    text = (
        f"On the {device}, of {len(found.rows)} settings releasing is faster in {counts['none']},"
        f" zeroing in {counts['zero']}, neither in {counts['neither']} (sign test over pairs of"
        f" steps in turn, corrected for the number of settings, {LEVEL:.0%})."
    )
    runs = min((row.get("runs", 1) for row in found.rows), default=1)
    if runs > 1:
        text += (
            f" Each setting was timed in {runs} runs or more, and one whose runs disagree counts as"
            " neither."
        )
        each = [step_times(run) for run in run_by_run(rows)]
        counts_of = {
            which: ", ".join(str(len(run.where(which))) for run in each)
            for which in ("none", "zero")
        }
        text += (
            f" Run by run, releasing is faster in {counts_of['none']} settings, zeroing in"
            f" {counts_of['zero']}."
        )
    best = max((row["saved"] / row["zero"] for row in found.where("none")), default=0.0)
    if best > 0:
        text += f" A release saves at most {best:.0%} of a step."
    if found.disturbed:
        text += (
            f" {len(found.disturbed)} more settings were disturbed by other load and count for"
            " nothing."
        )
    return text


def answer(rows: Sequence[Data]) -> dict[str, Any]:
    """Return what claim C1.8 says: verdict, sentence, condition, figures, counterexample.

    A device is judged by itself. The claim is confirmed where no setting is faster under a release,
    and refuted where all are.
    """
    devices = {device: [row for row in rows if row["device"] == device] for device in DEVICES}
    found = {device: step_times(mine) for device, mine in devices.items() if mine}
    figures = {
        f"{_setting(row)}: saved by releasing": (
            f"{1000 * row['saved']:+.3f} ms of {1000 * row['zero']:.3f}"
            f" ({100 * row['saved'] / row['zero']:+.0f}%), faster in {row['faster']} of"
            f" {row['pairs']} pairs; {row['bytes_between'] / 2**20:.1f} MiB between steps"
        )
        for times in found.values()
        for row in times.rows
    }
    said = " ".join(summary(devices[device], DEVICES[device]) for device in found)
    verdict, faster, total = _verdict(rows)
    share = f"as in {total - len(faster)} of the {total} settings timed here"
    verdicts = Counter(_verdict(run)[0] for run in run_by_run(rows))
    if verdicts.total() > 1:
        times = ", ".join(f"{name} in {count}" for name, count in verdicts.most_common())
        said += f" Of {verdicts.total()} runs, each judged by itself, the claim is {times}."
    return {
        "verdict": verdict,
        "sentence": (
            f"{said} Two things decide: the share of the gradients' traffic in a step, and the cost"
            " of memory that is given back and allocated again. A release saves the memory of all"
            " gradients between steps."
        ),
        "figures": figures,
        "condition": (
            "memory between steps is no constraint, and releasing is not faster in the setting,"
            f" {share}"
            if verdict == "conditional"
            else ""
        ),
        "counterexample": "; ".join(faster),
    }


def _verdict(rows: Sequence[Data]) -> tuple[str, list[str], int]:
    """Return the verdict on C1.8, the settings in which releasing is faster, and how many settings
    there are.
    """
    found = [step_times(mine) for mine in by_device(rows).values()]
    total = sum(len(times.rows) for times in found)
    faster = [_setting(row) for times in found for row in times.where("none")]
    mixed = not total or 0 < len(faster) < total
    return "conditional" if mixed else "refuted" if faster else "confirmed", faster, total


def _setting(row: Data) -> str:
    where = "" if row["device"] == "cpu" else f" on the {DEVICES[row['device']]}"
    return (
        f"{row['parameters']:,} parameters, {counted(row['items'], 'item')}, K ="
        f" {row['micro_batches']}{where}"
    )
