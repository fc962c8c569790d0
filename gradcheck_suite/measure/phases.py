"""The phases of a training loop that the ledger distinguishes."""

from __future__ import annotations

from dataclasses import dataclass

from gradcheck_suite.errors import UsageError

PHASES = ("reset", "forward", "backward", "accumulate", "handling", "step", "other")
"""The phases of a loop, distinguished without patching anything:

- reset: gradients are zeroed or released;
- forward: inside the loss;
- backward: autograd runs;
- accumulate: the part of the backward in which a gradient is added to `.grad`, or is taken or cloned as `.grad`,
  including the hooks that run there;
- handling: the loop itself reads or changes gradients (clipping, scaling, copying);
- step: inside an optimizer's step;
- other: everything else, such as the loader and the loop's own arithmetic.
"""


@dataclass(frozen=True)
class Phase:
    """A phase that was entered.

    Attributes:
        name: the phase's name.
        task: the autograd task in which it was entered; a later task is a backward inside the phase.
        marks: the number of profiler marks that were open.
    """

    name: str
    task: int
    marks: int


def check_phases(phases: tuple[str, ...]) -> None:
    """Raise `UsageError` unless every name is that of a phase."""
    for name in phases:
        if name not in PHASES:
            raise UsageError(f"ledger: phase must be one of {', '.join(PHASES)}; got {name!r}")
