"""What a program moves with its steps: schedules of the learning rate, averages of the parameters, and
the scales of GradScalers.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeGuard

import numpy as np
import torch

from gradcheck_suite.auditing import samples
from gradcheck_suite.auditing.events import StepRecord
from gradcheck_suite.auditing.places import live_instances

SCHEDULE = "a schedule of the learning rate"
AVERAGE = "an average of the parameters"
NEAR = 0.5
"""Relative difference of an average from its parameter; gradients and other states differ by more."""
FEWEST = 8
"""Elements that a tensor needs for its nearness to a parameter to be no coincidence."""
MOST_AVERAGES = 64
"""Tensors that are watched."""


def alive_of(references: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return what weak references refer to still."""
    return [one for one in (reference() for reference in references) if one is not None]


class Clocks:
    """Schedules, averages and scalers of a program.

    Attributes:
        are_found: whether the search for them was made.
    """

    def __init__(self) -> None:
        self.are_found = False
        self._schedules: list[weakref.ref[Any]] = []
        self._averages: list[weakref.ref[torch.Tensor]] = []
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []

    def now(self, optimizers: Iterable[Any]) -> dict[str, int]:
        """Return checksums of what a program moves with its steps.

        Args:
            optimizers: of the program.
        """
        rates = [
            group.get("lr")
            for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
        ]
        epochs = [one.last_epoch for one in alive_of(self._schedules)]
        # to read a rate that is a tensor could wait for a device
        rates = [rate._version if isinstance(rate, torch.Tensor) else rate for rate in rates]
        clocks = {SCHEDULE: zlib.crc32(repr((rates, epochs)).encode())}
        averages = alive_of(self._averages)
        for average, mark in zip(averages, samples.BatchedSampler().marks(averages), strict=True):
            clocks[AVERAGE] = zlib.crc32(
                repr((mark, average._version, clocks.get(AVERAGE))).encode()
            )
        return clocks

    def find(self, parameters: Sequence[torch.Tensor]) -> None:
        """Find scalers, schedules and averages once, by a search through all objects.

        A tensor near to a parameter is an average.

        Args:
            parameters: those that are known.
        """
        self.are_found = True  # once, also where it fails
        found = live_instances(
            torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler, torch.Tensor
        )
        self._scalers = [
            weakref.ref(one)
            for one in found
            if isinstance(one, torch.amp.GradScaler) and one.is_enabled()
        ]
        self._schedules = [
            weakref.ref(one)
            for one in found
            if isinstance(one, torch.optim.lr_scheduler.LRScheduler)
        ]
        pairs = _alike(found, parameters)
        self._averages = [weakref.ref(one) for one in _near(pairs)][:MOST_AVERAGES]

    def note_scale(self, step: StepRecord, optimizer: Any) -> None:
        """Note which GradScaler has divided by its scale, by `unscale_`, and which ones may have
        and have not.
        """
        for scaler in alive_of(self._scalers):
            if scaler._scale is None:
                continue
            state = scaler._per_optimizer_states.get(id(optimizer), {}).get("stage")
            if state is torch.amp.grad_scaler.OptState.UNSCALED:
                step.scale = float(scaler._scale)
            else:
                step.passed_by.append(float(scaler._scale))


def _has_memory(one: Any) -> TypeGuard[torch.Tensor]:
    """Return whether an object is a tensor with values in memory of its own."""
    # no subclass: a fake or a functional tensor of a compiler has no values; a sparse gradient, a
    # nested tensor and one inside of `torch.func` raise where they are asked for address or shape
    if type(one) not in samples.OWN or one.layout != torch.strided:
        return False
    if one.is_meta or one.is_nested:
        return False
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(one)
    return not is_wrapped and not torch._is_functional_tensor(one)


def _alike(
    found: Iterable[Any], parameters: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return objects that are tensors of the form of a parameter, each with that parameter."""
    known = {*map(id, parameters)}
    own = [p for p in parameters if p.is_floating_point()]
    like = {(p.shape, p.dtype, p.device): p for p in own if p.numel() >= FEWEST}
    memory = {
        tensor.data_ptr()
        for tensor in chain.from_iterable((p, p.grad) for p in own)
        if _has_memory(tensor)
    }
    return [
        (one, like[one.shape, one.dtype, one.device])
        for one in found
        if _has_memory(one)
        and one.is_leaf
        and (one.shape, one.dtype, one.device) in like
        and id(one) not in known
        and one.data_ptr() not in memory
    ]


def _near(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the first one of each pair whose tensors are near to each other.

    Waits once where they lie on a device.
    """
    found, _ = samples.BatchedSampler().taken(list(chain.from_iterable(pairs)), whole=False)
    values = samples.read_samples(found)
    return [
        one
        for (one, _), now, then in zip(pairs, values[::2], values[1::2], strict=True)
        if np.hypot.reduce(now - then) < NEAR * np.hypot.reduce(then)
    ]
