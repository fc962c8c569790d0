"""Whole training steps under `zero_` and under `set_to_none`, timed in turn.

The two modes alternate step by step, so that other load on the machine slows both alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

import torch
from scipy.stats import binomtest

from gradcheck_suite.loops.modes import RESET_MODES
from gradcheck_suite.measure.clock import timer
from gradcheck_suite.measure.workload import Size, sized_workload

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

WARM = 3
"""Pairs of steps that run before the first timed pair."""
SIGNIFICANT = 0.05
ZERO, NONE = "zero_", "set_to_none"


@dataclass(frozen=True)
class PairedSteps:
    """Times of steps under `zero_` and under `set_to_none`, in pairs.

    Attributes:
        parameters: number of parameters of the model.
        items: number of items in a micro-batch.
        micro_batches: number of micro-batches between two updates.
        zero: median seconds of a step under `zero_`.
        none: median seconds of a step under `set_to_none`.
        saved: median over the pairs of the seconds that releasing saves; negative where it costs time.
        faster: number of pairs in which releasing was faster.
        pairs: number of pairs.
        bytes_between: bytes of gradients that `zero_` keeps between steps and a release does not.
        faults: pages that the system mapped per step, under `zero_` and under `set_to_none`; None where unknown. Memory
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
        """The faster mode: `"none"`, `"zero"`, or `"neither"`.

        A sign test over the pairs decides, at the level `SIGNIFICANT`.
        """
        if binomtest(self.faster, self.pairs).pvalue >= SIGNIFICANT:
            return "neither"
        return "none" if 2 * self.faster > self.pairs else "zero"


def time_paired_steps(size: Size, items: int, micro_batches: int, *, pairs: int, device: str = "cpu") -> PairedSteps:
    """Time steps of AdamW under both modes in turn.

    Args:
        size: size of the model, whose weights are float32.
        items: number of items in a micro-batch.
        micro_batches: number of micro-batches between two updates.
        pairs: number of pairs of steps to time, after `WARM` pairs that are not timed.
        device: `"cpu"` or `"cuda"`.
    """
    steps = {
        name: sized_workload(RESET_MODES[name], size, micro_batches, device=device, items=items).step
        for name in (ZERO, NONE)
    }
    clock = timer(device)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    faults: dict[str, list[int]] = {name: [] for name in steps}
    turns = list(steps)
    for _ in range(WARM + pairs):
        for name in turns:
            before, start = _page_faults(), clock()
            steps[name]()
            seconds[name].append(clock() - start)
            faults[name].append(_page_faults() - before)
        turns.reverse()  # a step finds what the step before it left in the caches and in the allocator
    zeros, nones = (seconds[name][WARM:] for name in (ZERO, NONE))
    saved = [a - b for a, b in zip(zeros, nones, strict=True)]
    return PairedSteps(
        parameters=size.total,
        items=items,
        micro_batches=micro_batches,
        zero=median(zeros),
        none=median(nones),
        saved=median(saved),
        faster=sum(s > 0 for s in saved),
        pairs=pairs,
        bytes_between=size.bytes(torch.float32),
        faults=None if resource is None else (fmean(faults[ZERO][WARM:]), fmean(faults[NONE][WARM:])),
    )


def _page_faults() -> int:
    """Return the number of pages that the system has mapped for this process without reading a disk; 0 if unknown."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt
