"""What releasing saves in a whole training step, for a size of model, of micro-batch and of window.

The two modes take turns, step by step, so that whatever else the machine does falls on both alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from statistics import fmean, median

import torch

from gradcheck_suite.measure.clock import timer
from gradcheck_suite.measure.models import Size, build, micro_batch
from gradcheck_suite.measure.resets import MODES, prepare

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

WARM = 3
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Decision:
    """What steps took under zero_ and under set_to_none, in pairs.

    Attributes:
        parameters: of the model.
        items: in a micro-batch.
        micro_batches: between two updates.
        zero: median seconds of a step under zero_.
        none: median seconds of a step under set_to_none.
        saved: median over the pairs of what releasing saves, in seconds; negative where it costs.
        faster: in how many pairs releasing was the faster one.
        pairs: of steps.
        bytes_between: that zero_ keeps between steps and a release does not.
        faults: pages that the system had to map per step, under zero_ and under set_to_none; None where unknown. Memory
            that a release gives back to the system is mapped anew by the next backward.
    """

    parameters: int
    items: int
    micro_batches: int
    zero: float
    none: float
    saved: float
    faster: int
    pairs: int
    bytes_between: int
    faults: tuple[float, float] | None = None

    @property
    def better(self) -> str:
        """Which mode is the faster one, `"none"`, `"zero"`, or `"neither"` where chance explains the difference.

        By the sign test over the pairs, at the level `SIGNIFICANT`.
        """
        if sign_test(self.faster, self.pairs) >= SIGNIFICANT:
            return "neither"
        return "none" if 2 * self.faster > self.pairs else "zero"


def sign_test(successes: int, trials: int) -> float:
    """Return how likely a fair coin falls at least as unevenly, on either side."""
    tail = min(successes, trials - successes)
    return min(1.0, 2 * sum(comb(trials, k) for k in range(tail + 1)) / 2**trials)


def decide(size: Size, items: int, micro_batches: int, *, pairs: int, device: str = "cpu") -> Decision:
    """Time steps of AdamW under both modes in turn.

    Args:
        size: of the model, whose weights are float32.
        items: in a micro-batch.
        micro_batches: between two updates.
        pairs: of steps to time, after a few that are not.
        device: where.
    """
    zero, none = (_step(mode, size, items, micro_batches, device) for mode in ("zero_", "set_to_none"))
    clock = timer(device)
    seconds: dict[str, list[float]] = {"zero": [], "none": []}
    faults: dict[str, list[int | None]] = {"zero": [], "none": []}
    turns = [("zero", zero), ("none", none)]
    for _ in range(WARM + pairs):
        for name, step in turns:
            before, start = _faults(), clock()
            step()
            seconds[name].append(clock() - start)
            faults[name].append(None if before is None else (_faults() or 0) - before)
        turns.reverse()  # what one step leaves in the caches and with the allocator, the next one finds
    zeros, nones = seconds["zero"][WARM:], seconds["none"][WARM:]
    saved = [a - b for a, b in zip(zeros, nones, strict=True)]
    return Decision(
        parameters=size.total,
        items=items,
        micro_batches=micro_batches,
        zero=median(zeros),
        none=median(nones),
        saved=median(saved),
        faster=sum(s > 0 for s in saved),
        pairs=pairs,
        bytes_between=size.bytes(torch.float32),
        faults=None if _faults() is None else (_mean(faults["zero"][WARM:]), _mean(faults["none"][WARM:])),
    )


def _faults() -> int | None:
    """Return how many pages the system has mapped for this process without reading a disk, where it tells."""
    return None if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _mean(counts: list[int | None]) -> float:
    return fmean(count for count in counts if count is not None)


def _step(mode: str, size: Size, items: int, micro_batches: int, device: str) -> Callable[[], None]:
    model = build(size, device, torch.float32)
    parameters = list(model.parameters())
    batches = [micro_batch(size, device, torch.float32, j, items) for j in range(micro_batches)]
    # a learning rate that changes next to nothing: the work is the same, and no value overflows
    optimizer = torch.optim.AdamW(parameters, lr=1e-12)
    chosen = MODES[mode]
    prepare(chosen, parameters)

    def run() -> None:
        for batch in batches:
            model(batch).sum().backward()
        optimizer.step()
        chosen.reset(parameters)

    return run
