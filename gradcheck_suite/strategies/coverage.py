"""Coverage of drawn cases: how many cases contain each input, layer, loss and kind of split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gradcheck_suite.core.case import Case, Plan

Coverage = dict[str, dict[str, int]]
"""Category (`"inputs"`, `"layers"`, `"losses"`, `"splits"`) -> name -> number of cases that contain it."""
SPLITS = (
    "unequal micro-batches",
    "a micro-batch of one item",
    "a micro-batch without valid targets",
    "a short last window",
    "an epoch shorter than accumulation_steps",
    "several windows",
    "several epochs",
    "no accumulation (K = 1)",
    "5 or more micro-batches in a window",
)


class CaseCoverage:
    """Counts the cases that contain each input, layer, loss and kind of split."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {"inputs": Counter(), "layers": Counter(), "losses": Counter()}
        self._counts["splits"] = Counter(dict.fromkeys(SPLITS, 0))

    def note(self, case: Case) -> None:
        """Count a case."""
        if (spec := case.spec) is not None:
            self._counts["inputs"][spec.input.kind] += 1
            self._counts["layers"].update(set(spec.layer_kinds))
            self._counts["losses"][f"{spec.loss.kind}, {spec.loss.reduction}"] += 1
        self._counts["splits"].update(_splits(case.plan))

    def to_json(self) -> Coverage:
        """Return the counts, the most frequent first."""
        return {category: dict(counts.most_common()) for category, counts in self._counts.items()}


def _splits(plan: Plan) -> Iterator[str]:
    sizes = plan.micro_batches
    has = (
        any(len({sizes[j] for j in window}) > 1 for window in plan.windows),
        1 in sizes,
        bool(plan.masked),
        plan.has_short_window,
        len(sizes) < plan.accumulation_steps,
        len(plan.windows) > 1,
        plan.epochs > 1,
        plan.accumulation_steps == 1,
        max(len(window) for window in plan.windows) >= 5,
    )
    yield from (name for name, present in zip(SPLITS, has, strict=True) if present)
