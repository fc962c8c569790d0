"""Counts of false alarms and detections, of the suite's bounds and of the rules that they are
compared with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from scipy import stats

from gradcheck_suite.core.comparison import UNIT_ROUNDOFF, Layout, Vector

if TYPE_CHECKING:
    from gradcheck_suite.reference.large_batch import WindowReference

# The rules that the suite's bounds are compared with, applied parameter by parameter as their users
# apply them.


ASSERT_CLOSE = {
    "float64": (1e-7, 1e-7),
    "float32": (1.3e-6, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float16": (1e-3, 1e-5),
}
"""(rtol, atol) that `torch.testing.assert_close` takes for a dtype."""


@dataclass(frozen=True)
class Compared:
    """The gradients of one parameter that these rules compare.

    Attributes:
        observed: (P,): the accumulated gradient, computed in `dtype`.
        large_batch: (P,): the gradient of one large batch, computed in `dtype`.
        exact: (P,): the gradient of one large batch, computed in float64.
        dtype: name of the dtype.
    """

    observed: Vector
    large_batch: Vector
    exact: Vector
    dtype: str


def _close(
    observed: Vector, expected: Vector, rtol: float, atol: float, *, equal_nan: bool = False
) -> bool:
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.allclose(observed, expected, rtol=rtol, atol=atol, equal_nan=equal_nan))


def assert_close(compared: Compared) -> bool:
    """Apply `torch.testing.assert_close` at its defaults, against the large batch."""
    return _close(compared.observed, compared.large_batch, *ASSERT_CLOSE[compared.dtype])


def chex_all_close(compared: Compared) -> bool:
    """Apply `chex.assert_trees_all_close` at its defaults (rtol 1e-6, atol 0), against the large
    batch.
    """
    return _close(compared.observed, compared.large_batch, 1e-6, 0.0, equal_nan=True)


def nnsmith(compared: Compared) -> bool:
    """Apply NNSmith's rtol 1e-2 and atol 1e-3, against the large batch."""
    return _close(compared.observed, compared.large_batch, 1e-2, 1e-3)


def twice_the_rmse(compared: Compared) -> bool:
    """Allow twice the root mean square error that the large batch itself has against float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        own = np.sqrt(np.mean((compared.observed - compared.exact) ** 2))
        reference = np.sqrt(np.mean((compared.large_batch - compared.exact) ** 2))
    return bool(own <= 2 * reference)


RIVALS: dict[str, Callable[[Compared], bool]] = {
    "torch.testing.assert_close": assert_close,
    "chex.assert_trees_all_close": chex_all_close,
    "twice the reference's rmse": twice_the_rmse,
    "NNSmith 1e-2/1e-3": nnsmith,
}
"""The rules by name: each takes an accumulated gradient and returns whether it passes. The constants are the tools'
defaults, and so is whether two NaN at the same place are equal: only chex says that they are."""


def failed_rules(
    window: WindowReference, layout: Layout, observed: Vector, dtype: str
) -> frozenset[str]:
    """Return the rules that an observed gradient does not pass.

    Args:
        window: the gradient's window. Rules compare with its large batch in the case's dtype,
            computed as the loop computes, and the rule that needs a float64 gradient is given
            JAX's.
        layout: of the gradient.
        observed: (P,) float64: the gradient.
        dtype: of the case.
    """
    large, exact = window.bound.large_batch, window.expected
    failed: set[str] = set()
    for start, size in zip(layout.offsets, layout.sizes, strict=True):
        part = slice(start, start + size)
        compared = Compared(observed[part], large[part], exact[part], dtype)
        failed |= {
            name
            for name, rule in RIVALS.items()
            if size and name not in failed and not rule(compared)
        }
    return frozenset(failed)


# Counts of false alarms and detections, curves over them, and their summary.


BINS = 20
"""Number of bins of equal width from 0 to 1 for errors over what was allowed."""


def add_counts(into: Any, other: Any) -> Any:
    """Return two values of the same type added up: numbers, lists, Counters, dictionaries by key,
    objects by field.
    """
    if isinstance(into, Counter):
        into.update(other)
        return into
    if isinstance(into, dict):
        return into | {
            key: add_counts(into[key], value) if key in into else deepcopy(value)
            for key, value in other.items()
        }
    if hasattr(into, "add"):
        into.add(other)
        return into
    return into + other


@dataclass
class _Counts:
    def add(self, other: Self) -> None:
        """Add other counts to these."""
        for each in fields(self):
            setattr(
                self, each.name, add_counts(getattr(self, each.name), getattr(other, each.name))
            )


@dataclass
class Spread:
    """A histogram of ratios of error to bound.

    Attributes:
        counts: of each of `BINS` bins; the last one holds what is larger as well.
        largest: of all ratios.
    """

    counts: list[int] = field(default_factory=lambda: [0] * BINS)
    largest: float = 0.0

    def note(self, ratio: float) -> None:
        """Count a ratio."""
        self.counts[max(0, min(BINS - 1, int(min(ratio, 1.0) * BINS)))] += 1
        self.largest = max(self.largest, ratio)

    def quantile(self, share: float) -> float | None:
        """Return an upper bound of a share of the ratios, to the width of a bin.

        None where there are no ratios.
        """
        wanted, seen = share * sum(self.counts), 0
        for i, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return min((i + 1) / BINS, self.largest)
        return None

    def add(self, other: Spread) -> None:
        """Add other counts to these."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.largest = max(self.largest, other.largest)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON-ready data."""
        return {"counts": self.counts, "largest": self.largest}


def spread_from_json(data: Mapping[str, Any]) -> Spread:
    """Read what `Spread.to_json` wrote."""
    return Spread(list(data["counts"]), float(data["largest"]))


@dataclass
class Tally(_Counts):
    """Counts of checks of sound loops, in one dtype.

    Attributes:
        checks: number of checks: one loop judged on one case.
        cases: number of different cases.
        elements: number of elements of gradients, compared in all the checks.
        skipped: reason why a check could not be made -> number of checks.
        alarms: sound loops that were blamed, each with its case.
        findings: disagreement of torch and JAX -> number of checks.
        over: kind of layer -> ratios of error to bound of the checks whose case has that layer;
            `""` -> of all checks.
        drawn_on: ratios of the gradients that needed the Monte Carlo part of the bound.
        layers: kind of layer -> checks that were made on cases with it.
        losses: kind of loss -> checks that were made on cases with it.
        loops: loop -> checks that were made of it.
        rivals: rival rule -> checks in which it blames the sound loop, losses under an autocast
            left out, since their precision differs from the case's.
        autocast: number of checks whose losses were under an autocast.
        rivals_autocast: rival rule -> checks under an autocast in which it blames the sound loop.
    """

    checks: int = 0
    cases: int = 0
    elements: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    findings: Counter[str] = field(default_factory=Counter)
    over: dict[str, Spread] = field(default_factory=dict)
    drawn_on: Spread = field(default_factory=Spread)
    layers: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    loops: Counter[str] = field(default_factory=Counter)
    rivals: Counter[str] = field(default_factory=Counter)
    autocast: int = 0
    rivals_autocast: Counter[str] = field(default_factory=Counter)

    @property
    def judged(self) -> int:
        """Number of checks that were made, the skipped ones left out."""
        return self.checks - self.skipped.total()

    def note_ratio(self, kinds: Iterable[str], ratio: float) -> None:
        """Count the ratio of a check whose case has these kinds of layers."""
        for kind in ("", *kinds):
            self.over.setdefault(kind, Spread()).note(ratio)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON-ready data."""
        return {"judged": self.judged} | {name: _plain(getattr(self, name)) for name in _NAMES}


_NAMES = [field.name for field in fields(Tally)]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in sorted(value.items())}
    return value.to_json() if isinstance(value, Spread) else value


def tally_from_json(data: Mapping[str, Any]) -> Tally:
    """Read what `Tally.to_json` wrote."""
    values = {name: data[name] for name in _NAMES}
    counters = {name: Counter(value) for name, value in values.items() if isinstance(value, dict)}
    over = {kind: spread_from_json(spread) for kind, spread in data["over"].items()}
    return Tally(
        **values | counters | {"over": over, "drawn_on": spread_from_json(data["drawn_on"])}
    )


OURS = "gradcheck-suite"
NEVER = -1
"""Stands in place of an exponent where not even an error of relative size 1 is found."""
WANTED = 0.99


def exponents(dtype: str) -> range:
    """Return k = 0, 1, ...: errors of size 2**-k are planted, from 1 down to one unit roundoff."""
    return range(round(-math.log2(UNIT_ROUNDOFF[dtype])) + 1)


@dataclass
class Curve(_Counts):
    """The smallest errors that are found, in one dtype.

    Attributes:
        cases: number of cases.
        skipped: reason why no error was planted in a case -> number of cases.
        smallest: place -> rule -> Counter of k, where 2**-k is the smallest error that is found
            with all larger ones.
    """

    cases: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    smallest: dict[str, dict[str, Counter[int]]] = field(default_factory=dict)

    def note(self, place: str, found: Mapping[str, int]) -> None:
        """Count what each rule finds in a case at a place."""
        for rule, k in found.items():
            self.smallest.setdefault(place, {}).setdefault(rule, Counter())[k] += 1

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON-ready data."""
        smallest = {
            place: {
                rule: {str(k): n for k, n in sorted(counts.items())}
                for rule, counts in rules.items()
            }
            for place, rules in self.smallest.items()
        }
        return {"cases": self.cases, "skipped": dict(self.skipped), "smallest": smallest}


def curve_from_json(data: Mapping[str, Any]) -> Curve:
    """Read what `Curve.to_json` wrote."""
    smallest = {
        place: {
            rule: Counter({int(k): n for k, n in counts.items()}) for rule, counts in rules.items()
        }
        for place, rules in data["smallest"].items()
    }
    return Curve(data["cases"], Counter(data["skipped"]), smallest)


def share_found(counts: Mapping[int, int], exponent: int) -> float:
    """Return in what share of cases an error of size 2**-exponent and all larger ones are found."""
    return sum(n for k, n in counts.items() if k >= exponent) / sum(counts.values())


def size_found(counts: Mapping[int, int], share: float = WANTED) -> float | None:
    """Return the smallest size that is found in at least a share of cases.

    None where not even 1 is.
    """
    found = [k for k in counts if k != NEVER and share_found(counts, k) >= share]
    return 2.0 ** -max(found) if found else None


def surely(share: float, cases: int) -> float:
    """Return a lower bound, with 95% confidence, of the true share where a share of some cases was
    counted.

    Source: E. B. Wilson, Probable Inference, J. Am. Stat. Assoc. 22 (1927), the lower limit of the
    score interval.
    """
    interval = stats.binomtest(round(share * cases), cases).proportion_ci(0.9, method="wilson")
    return float(interval.low)


Data = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """The smallest errors that are found in one dtype, at one place.

    Attributes:
        dtype: of the cases.
        place: where errors were planted.
        cases: how many.
        sizes: rule -> the smallest size that it finds in 99% of the cases; None where not even 1
            is.
        half: the smallest size that the suite's bound finds in half of the cases.
        at_least: with 95% confidence, the share of all such cases in which the suite's bound finds
            its size.
    """

    dtype: str
    place: str
    cases: int
    sizes: Mapping[str, float | None]
    half: float | None
    at_least: float | None


def found(data: Data) -> Iterator[Found]:
    """Yield a row per dtype and place."""
    for dtype, curve in data["curves"].items():
        for place, rules in curve_from_json(curve).smallest.items():
            cases = sum(rules[OURS].values())
            sizes = {rule: size_found(rules[rule]) for rule in (OURS, *RIVALS)}
            exponent = max((k for k in rules[OURS] if sizes[OURS] == 2.0**-k), default=None)
            sure = None if exponent is None else surely(share_found(rules[OURS], exponent), cases)
            yield Found(dtype, place, cases, sizes, size_found(rules[OURS], 0.5), sure)


def rival_alarms(data: Data, dtype: str) -> dict[str, int]:
    """Return how often each rival blames a sound loop, losses under an autocast left out."""
    counts = data["alarms"].get(dtype, {}).get("rivals", {})
    return {rule: int(counts.get(rule, 0)) for rule in RIVALS}


def better(data: Data) -> list[str]:
    """Return one line for each place where a rule that blames no sound loop finds smaller errors
    than the bound.
    """
    lines = []
    for row in found(data):
        quiet = [rule for rule, alarms in rival_alarms(data, row.dtype).items() if not alarms]
        own = row.sizes[OURS]
        for rule in quiet:
            size = row.sizes[rule]
            if size is not None and (own is None or size < own):
                lines.append(
                    f"{row.dtype}, {row.place}: {rule} finds {shown(size)}, the bound {shown(own)}"
                )
    return lines


def false_alarms(data: Data) -> int:
    """Return how often the suite blames a sound loop."""
    return sum(len(tally["alarms"]) for tally in data["alarms"].values())


def checks(data: Data) -> int:
    """Return the number of checks that were made, in all dtypes."""
    return sum(tally["judged"] for tally in data["alarms"].values())


def shown(size: float | None) -> str:
    """Return a relative error as text."""
    return "none" if size is None else "1" if size == 1 else f"{size:.1e}"


def percent() -> str:
    """Return the share of cases in which an error of a size must be found, as text."""
    return f"{100 * WANTED:g}%"


SHORT = {
    "torch.testing.assert_close": "assert_close",
    "chex.assert_trees_all_close": "chex",
    "twice the reference's rmse": "twice rmse",
    "NNSmith 1e-2/1e-3": "NNSmith",
}


def lines(data: Data) -> list[str]:
    """Return the lines to print."""
    return [*_alarm_lines(data), "", *_detection_lines(data), "", *_summary(data)]


def _table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(f"{row[i]:{'<' if i < left else '>'}{w}}" for i, w in enumerate(widths))
        for row in rows
    ]


def _alarm_lines(data: Data) -> list[str]:
    rows = [["dtype", "checks", "judged", "elements", "false alarms", "largest", "by draws", "largest then",
             *(SHORT[rule] for rule in RIVALS)]]  # fmt: skip
    notes = []
    for dtype, tally in data["alarms"].items():
        drawn = spread_from_json(tally["drawn_on"])
        over = tally["over"].get("")
        rows.append(
            [
                dtype,
                f"{tally['checks']:,}",
                f"{tally['judged']:,}",
                f"{tally['elements']:,}",
                str(len(tally["alarms"])),
                f"{over['largest']:.3f}" if over else "-",
                f"{sum(drawn.counts):,}",
                f"{drawn.largest:.3f}",
                *(f"{count:,}" for count in rival_alarms(data, dtype).values()),
            ]
        )
        notes += [
            f"FALSE ALARM in {dtype}: {a['loop']}: {a['explanation']}" for a in tally["alarms"]
        ]
        notes += [
            f"finding in {dtype}, {n} checks: {text}" for text, n in tally["findings"].items()
        ]
        notes += [
            f"{n:,} checks in {dtype} could not be made: {why}"
            for why, n in tally["skipped"].items()
        ]
    return [
        (
            "Sound loops judged; errors over what is allowed; and how often other rules blame the"
            " same loops"
        ),
        *_table(rows),
        *notes,
    ]


def _detection_lines(data: Data) -> list[str]:
    rows = [["dtype", "planted in", "cases", OURS, "in half", *(SHORT[rule] for rule in RIVALS)]]
    for row in found(data):
        alarms = rival_alarms(data, row.dtype)
        rivals = [shown(row.sizes[rule]) + ("*" if alarms[rule] else " ") for rule in RIVALS]
        rows.append(
            [
                row.dtype,
                row.place,
                f"{row.cases:,}",
                shown(row.sizes[OURS]),
                shown(row.half),
                *rivals,
            ]
        )
    return [
        (
            f"Smallest relative error found in {percent()} of the cases, by the suite also in half"
            " of them (* a rule that blames sound loops)"
        ),
        *_table(rows, left=2),
    ]


def _summary(data: Data) -> list[str]:
    alarms, coverage = false_alarms(data), data["coverage"]
    text = [f"{alarms} false alarms in {checks(data):,} checks of sound loops"]
    for what in ("layers", "losses"):
        reached, missing = coverage[what]["reached"], coverage[what]["missing"]
        text.append(f"{reached} of {reached + len(missing)} kinds of {what} reached"
                    + (f"; not reached: {', '.join(missing)}" if missing else ""))  # fmt: skip
    worse = better(data)
    return text + (worse or ["no rule without false alarms finds smaller errors, in any dtype"])
