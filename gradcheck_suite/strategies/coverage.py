"""Coverage of drawn cases: how many cases contain each input, layer, loss and kind of split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from gradcheck_suite.core.case import Case, Plan

Coverage = dict[str, dict[str, int]]
"""Category (`"inputs"`, `"layers"`, `"losses"`, `"splits"`) -> name -> number of cases that contain it."""
SPLITS: dict[str, Callable[[Plan], bool]] = {
    "unequal micro-batches": lambda plan: any(
        len({plan.micro_batches[j] for j in w}) > 1 for w in plan.windows
    ),
    "a micro-batch of one item": lambda plan: 1 in plan.micro_batches,
    "a micro-batch without valid targets": lambda plan: bool(plan.masked),
    "a short last window": lambda plan: plan.has_short_window,
    "an epoch shorter than accumulation_steps": lambda plan: (
        len(plan.micro_batches) < plan.accumulation_steps
    ),
    "several windows": lambda plan: len(plan.windows) > 1,
    "several epochs": lambda plan: plan.epochs > 1,
    "no accumulation (K = 1)": lambda plan: plan.accumulation_steps == 1,
    "5 or more micro-batches in a window": lambda plan: max(map(len, plan.windows)) >= 5,
}
"""Kinds of split -> whether a plan has it."""


class CaseCoverage:
    """Counts the cases that contain each input, layer, loss and kind of split."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {
            "inputs": Counter(),
            "layers": Counter(),
            "losses": Counter(),
        }
        # all of them from the beginning: a kind that no case reached is told as 0
        self._counts["splits"] = Counter(dict.fromkeys(SPLITS, 0))

    def note(self, case: Case) -> None:
        """Count a case."""
        if (spec := case.spec) is not None:
            self._counts["inputs"][spec.input.kind] += 1
            # a set: the number of cases, not of layers
            self._counts["layers"].update(set(spec.layer_kinds))
            self._counts["losses"][f"{spec.loss.kind}, {spec.loss.reduction}"] += 1
        self._counts["splits"].update(name for name, is_in in SPLITS.items() if is_in(case.plan))

    def to_json(self) -> Coverage:
        """Return the counts, the most frequent first."""
        return {category: dict(counts.most_common()) for category, counts in self._counts.items()}
