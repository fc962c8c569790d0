"""What a live run leaves behind, as plain data: backward passes, what arrived in them, and
optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from gradcheck_suite.auditing.loss_terms import Term
from gradcheck_suite.auditing.places import Loop, Place

if TYPE_CHECKING:
    import torch

    from gradcheck_suite.auditing.known_graphs import Uses
    from gradcheck_suite.auditing.samples import Raw
    from gradcheck_suite.auditing.terms import PendingTerm

NONE = "none"
KEPT = "kept"
TOUCHED = "touched"
BY_HAND = "by hand"
LATE = "late"
FREE = "free"
"""An edit of `.grad` that nothing explains."""

Column = dict[int, Any]
"""Key of a parameter -> a sample, which may lie on a device, or None."""


@dataclass
class PassRecord:
    """One backward pass.

    Attributes:
        place: of the call.
        accumulates: whether it adds to `.grad`.
        terms: of what went backward.
        arrivals: key of a parameter at which a gradient arrived -> what was in `.grad` before it,
            against what the last arrival left: `none`, `kept`, `touched`; or `by hand` for a result
            of `torch.autograd.grad`, which the program puts into `.grad` itself; `late` for what
            comes with a later pass that reduces it into a shard.
        was: key of a parameter whose `.grad` was touched -> a sample of it before the arrival.
        masked: key of such a parameter -> what `MaskWatch` tells of its elements, where some were
            kept.
        now: key of a parameter -> a sample of `.grad` after the arrival, or of the result; none of
            what is late.
        shards: key of this rank's part of what was summed up over all ranks in the pass -> by what
            the sum is divided.
        points: key of a parameter that requires a gradient -> a checksum of its values.
        hooked: key of a parameter whose gradient the program's own hooks change -> whether by the
            same factors as before.
        again: those of them on which a hook is once more than before.
        factors: key of a parameter -> the one factor by which these hooks multiply its gradient.
        raw: of several ranks, key of such a parameter -> a sample of its gradient before these hooks.
        modes: id of a module and whether it trained, of the calls that a gradient came through and
            that are not kept.
        whole: keys of the parameters that get the gradient of all items of a loss that sees items
            without a gradient.
        raised: whether it ended with an exception.
        loop: where the program was in the loops around the innermost one; None where that is not
            known.
        resets: index of an optimizer -> where the first gradient of its parameters was let go since
            the last pass that reached one; with None those that no optimizer has stepped on.
        uses: key of a parameter -> the nodes that use it, where the graph was walked since several
            optimizers have stepped.
        clocks: what moves with the steps -> a checksum: the schedules, the averages of parameters.
        unread: the terms whose numbers were not read yet, which could wait for a device.
        unread_hooks: the changes of gradients by hooks, likewise.
    """

    place: Place
    accumulates: bool
    terms: list[Term] = field(default_factory=list)
    arrivals: dict[int, str] = field(default_factory=dict)
    was: dict[int, Raw] = field(default_factory=dict)
    masked: dict[int, Raw] = field(default_factory=dict)
    now: dict[int, Raw] = field(default_factory=dict)
    # FSDP reduces into these, which no hook sees
    shards: dict[int, float] = field(default_factory=dict)
    points: dict[int, int] = field(default_factory=dict)
    hooked: dict[int, bool] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    factors: dict[int, float] = field(default_factory=dict)
    raw: dict[int, Raw] = field(default_factory=dict)
    modes: set[tuple[int, bool]] = field(default_factory=set)
    whole: list[int] = field(default_factory=list)
    raised: bool = False
    loop: Loop | None = None
    resets: dict[int | None, Place] = field(default_factory=dict)
    uses: Mapping[int, Uses] = field(default_factory=dict)
    clocks: dict[str, int] = field(default_factory=dict)
    unread: list[PendingTerm] = field(default_factory=list)
    unread_hooks: list[HookedGradient] = field(default_factory=list)

    @property
    def by_hand(self) -> bool:
        """Whether its results are put into `.grad` by the program, if at all."""
        return not self.accumulates

    def columns(self) -> tuple[Column, ...]:
        """Return what may lie on a device."""
        return self.was, self.masked, self.now, self.raw


@dataclass(frozen=True)
class HookedGradient:
    """A gradient that hooks of the program's were called with.

    Attributes:
        key: of the parameter.
        record: of the pass.
        then: a sample of the gradient before the hooks.
        now: the same after them.
        alike: whether the factors of its elements are those of the last pass: 1 or 0.
        times: how often one of the hooks is on the parameter.
    """

    key: int
    record: PassRecord
    then: Raw
    now: Raw
    alike: torch.Tensor
    times: int

    @property
    def raw(self) -> list[Raw]:
        """What may lie on a device."""
        return [self.then, self.now, self.alike]


@dataclass
class StepRecord:
    """One optimizer step.

    Attributes:
        optimizer: its index in the order of first steps.
        place: of the call.
        call: index of the program's call of a step, in which a closure may be called several times,
            and the optimizer that another one wraps may step.
        gradients: key of a parameter -> a sample of its `.grad`, or None.
        scale: by which the gradients are still to be divided, or were before the step, by a
            GradScaler.
        fused: whether the optimizer divides by `scale` inside its step.
        steps: the accumulation steps that a trainer is configured with.
        trainer: the module of that trainer.
        wrapped: whether a `DistributedDataParallel` or FSDP, which reduce gradients, holds the
            parameters.
        frozen: keys of parameters that require no gradient.
        twice: at the optimizer's first step, keys of parameters that it lists more than once.
        overlaid: at that step, keys of parameters that lie over one memory, and are not one.
        overlapping: at that step, keys of parameters whose `.grad` do.
        values: at that step of several ranks, key of a parameter -> a sample of its values; of one
            rank those of all parameters, where nothing has arrived at the optimizer's own.
        moved: key of a parameter -> a sample of its change by the step, where nothing at all went
            backward since the last step of the same optimizer.
        passed_by: where no GradScaler takes this step, the scales of those that there are.
        unwritten: keys of parameters whose `.grad` is the tensor that was last looked at, with
            nothing written to it.
        before_clipping: key of a parameter -> a sample of its `.grad` when torch's clipping began,
            for the first time since the last pass; empty where it did not.
        has_unseen: whether gradients arrived since the last step from a pass that was not entered
            from Python.
        masked: key of a parameter -> what `MaskWatch` tells of the elements of its `.grad`, where
            some were kept.
    """

    optimizer: int
    place: Place
    gradients: dict[int, Raw | None]
    call: int
    scale: float | None = None
    fused: bool = False  # `optimizer.grad_scale` is set then, and `.grad` is still scaled
    steps: int | None = None
    trainer: str | None = None
    wrapped: bool = False
    frozen: frozenset[int] = frozenset()
    twice: list[int] = field(default_factory=list)
    overlaid: list[int] = field(default_factory=list)
    overlapping: list[int] = field(default_factory=list)
    values: dict[int, Raw] = field(default_factory=dict)
    moved: dict[int, Raw] = field(default_factory=dict)
    passed_by: list[float] = field(default_factory=list)
    unwritten: Sequence[int] = ()
    before_clipping: dict[int, Raw] = field(default_factory=dict)
    has_unseen: bool = False
    masked: dict[int, Raw] = field(default_factory=dict)

    def columns(self) -> tuple[Column, ...]:
        """Return what may lie on a device."""
        return (
            self.gradients,
            self.values,
            self.moved,
            self.before_clipping,
            self.masked,
        )


@dataclass(frozen=True)
class Gap:
    """Steps that were only counted, so that what stands in `.grad` after them is not known.

    Attributes:
        steps: their numbers, as `StepRecord.call` counts them.
    """

    steps: range

    def columns(self) -> tuple[Column, ...]:
        """Return nothing: no field lies on a device."""
        return ()


Event = PassRecord | StepRecord | Gap


def copy_to_host(events: Sequence[Event]) -> None:
    """Turn samples that lie on a device into arrays; waits for the device once."""
    # once for all: on a GPU each read of its own would wait for the kernels before it
    columns = [
        c
        for c in chain.from_iterable(event.columns() for event in events)
        if not {np.ndarray, NoneType}.issuperset(map(type, c.values()))
    ]
    if not columns:
        return
    # a run of JAX alone has arrays only, and never imports torch
    from gradcheck_suite.auditing import samples

    places = list[tuple[Column, int]]()
    for column in columns:
        places += [(column, key) for key, raw in column.items() if raw is not None]
    for (column, key), value in zip(
        places, samples.read_samples([column[key] for column, key in places]), strict=True
    ):
        column[key] = value
