"""What a claim is, and what testing it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["confirmed", "refuted", "conditional"]


@dataclass(frozen=True)
class Finding:
    """What running a claim's check showed.

    Attributes:
        verdict: `"confirmed"`, `"refuted"`, or `"conditional"`: true where `condition` says.
        sentence: what holds, in one or two sentences.
        condition: under which the claim is true; empty unless conditional.
        figures: name (with its unit) -> what was measured or counted in this run.
        counterexample: the smallest case in which the claim fails, in words or code; empty where there is none.
    """

    verdict: Verdict
    sentence: str
    condition: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    counterexample: str = ""

    def __post_init__(self) -> None:
        assert bool(self.condition) == (self.verdict == "conditional"), "a condition goes with `conditional` alone"


@dataclass(frozen=True)
class Claim:
    """One statement about gradient zeroing, and the check that puts it to the test.

    Attributes:
        number: such as `"C1.1"`: the source's number and the claim's.
        text: the claim.
        how: how it is tested here.
        check: runs the test; returns what it showed. Every figure comes out of the run, none is written down.
    """

    number: str
    text: str
    how: str
    check: Callable[[], Finding]


SOURCES = {
    1: 'a blog post, "Why zeroing gradients isn\'t enough?"',
    2: 'an answer, "When using PyTorch\'s grad.zero_(), should gradient tracking be enabled?"',
    3: 'an answer, "When should I call optimizer.zero_grad() in PyTorch mini-batch training?"',
}
