"""A claim, and the finding of its check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["confirmed", "refuted", "conditional"]


@dataclass(frozen=True)
class Finding:
    """The result of a claim's check.

    Attributes:
        verdict: `"confirmed"`, `"refuted"`, or `"conditional"` (true under `condition`).
        sentence: one to three sentences on what holds.
        condition: condition under which the claim is true; empty unless conditional.
        figures: name (with its unit) -> value measured or counted in this run.
        counterexample: smallest case in which the claim fails, in words or code; empty where there is none.
        rows: measurements behind the figures that are kept as benchmark records too.
    """

    verdict: Verdict
    sentence: str
    condition: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    counterexample: str = ""
    rows: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.condition) == (self.verdict == "conditional"), "only a `conditional` finding has a condition"


@dataclass(frozen=True)
class Claim:
    """One statement about gradient zeroing, and the check that tests it.

    Attributes:
        number: the source's number and the claim's, such as `"C1.1"`.
        text: the claim.
        how: how the check tests it.
        check: runs the test and returns its finding. Every figure comes from the run.
        short: the claim in at most 42 characters, for a list of one line each.
    """

    number: str
    text: str
    how: str
    check: Callable[[], Finding]
    short: str


SOURCES = {
    1: 'a blog post, "Why zeroing gradients isn\'t enough?"',
    2: 'an answer, "When using PyTorch\'s grad.zero_(), should gradient tracking be enabled?"',
    3: 'an answer, "When should I call optimizer.zero_grad() in PyTorch mini-batch training?"',
}
