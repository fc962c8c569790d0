"""What a loop computes its losses from, in one recorded run: the model's mode and parameters, and the
batches.

A rank records in its own process and sends what it has recorded, so everything here can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradcheck_suite.core.contract import Batch
from gradcheck_suite.run.instance import Instance, map_leaves, named_leaves


@dataclass(frozen=True)
class LateValues:
    """What was written between a forward and its backward, past autograd's own check of that.

    Attributes:
        batch: name of each leaf of the batch that was written -> its later value.
        parameters: name of each parameter that was written -> its later value.
    """

    batch: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one != one)).all())


@dataclass
class LossCall:
    """A call of the loss.

    Attributes:
        step: number of optimizer steps before it.
        batch: a copy of the batch.
        parameters: name -> a copy of the value, of the model that it was called with; none where it
            was called with the output of one, as `run.criterion` does. The batch is without what
            the model reads then.
        training: name of each module -> its mode.
        given: the batch itself, and the parameters themselves, as far as they were read.
        cotangent: what backward handed to the loss; None where the loss was not sent backward.
        late: what stood in the batch and in the parameters when the loss was first sent backward;
            None where that is what the loss was computed from.
        rank: the rank whose loop called it.
    """

    step: int
    batch: Batch
    parameters: dict[str, torch.Tensor]
    training: dict[str, bool]
    given: tuple[Batch, dict[str, torch.Tensor]] = (None, {})
    cotangent: torch.Tensor | None = None
    late: LateValues | None = None
    rank: int = 0

    def note(self, cotangent: torch.Tensor) -> None:
        """Add what a backward hands to the loss, and what stands in its inputs by then."""
        if self.cotangent is None:
            self._note_late()
        # a loss that is sent backward twice is worth the sum of both cotangents
        self.cotangent = cotangent if self.cotangent is None else self.cotangent + cotangent

    def _note_late(self) -> None:
        batch, parameters = self.given
        now = dict(named_leaves(batch))
        before = dict(named_leaves(self.batch))
        refilled = {
            name: t.detach().clone() for name, t in now.items() if not _same_values(t, before[name])
        }
        written = {
            name: p.detach().clone()
            for name, p in parameters.items()
            if not _same_values(p, self.parameters[name])
        }
        if refilled or written:
            self.late = LateValues(refilled, written)


@dataclass(frozen=True)
class Losses:
    """The recorded losses of one process.

    Attributes:
        calls: the calls with gradients, in order.
        called: whether the loop calls the loss to train.
    """

    calls: tuple[LossCall, ...]
    called: bool

    def sent(self, step: int) -> list[LossCall]:
        """Return the calls that were sent backward for a step."""
        return [call for call in self.calls if call.step == step and call.cotangent is not None]


class LossRecorder:
    """Records the calls of a loss.

    Attributes:
        calls: those with gradients, in order.
        called: whether the loop calls the loss to train, which a look under `no_grad` is not.
        instance: the instance that records.
    """

    def __init__(self, instance: Instance, rank: int = 0) -> None:
        """Make an instance that records.

        Args:
            instance: the instance whose loss is recorded.
            rank: of this process.
        """
        self.calls: list[LossCall] = []
        self.called = False
        self._rank = rank
        self._loss = instance.problem.loss
        self._steps = 0
        self.instance = replace(instance, problem=replace(instance.problem, loss=self._recorded))

    @contextmanager
    def counting_steps(self) -> Iterator[None]:
        """Count the optimizer's steps meanwhile, so that each call knows how many were before it."""
        handle = register_optimizer_step_post_hook(self._note_step)
        try:
            yield
        finally:
            handle.remove()

    def losses(self) -> Losses:
        """Return what has been recorded, without what lives in this process alone."""
        return Losses(tuple(replace(call, given=(None, {})) for call in self.calls), self.called)

    def _note_step(self, *_: Any) -> None:
        self._steps += 1

    def _recorded(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        self.called |= torch.is_grad_enabled()
        if not torch.is_grad_enabled():
            return self._loss(model, batch)
        # DistributedDataParallel puts its own name before those of the parameters
        own = model.module if isinstance(model, DistributedDataParallel) else model
        read = own if isinstance(own, torch.nn.Module) else torch.nn.ParameterDict()
        if any(type(p.detach()) is not torch.Tensor for p in read.parameters()):
            # a rank has a part of a sharded parameter, from which nothing is computed again
            return self._loss(model, batch)
        call = LossCall(
            self._steps,
            map_leaves(lambda t: t.detach().clone(), batch),
            {name: p.detach().clone() for name, p in read.named_parameters()},
            train_modes(read),
            (batch, dict(read.named_parameters())),
            rank=self._rank,
        )
        loss = self._loss(model, batch)
        if loss.requires_grad:
            self.calls.append(call)
            # a hook on the loss is called with what backward hands to it, before the graph below is
            # walked
            loss.register_hook(call.note)
        return loss


def train_modes(model: torch.nn.Module) -> dict[str, bool]:
    """Return whether each module is in train mode, by name."""
    return {name: module.training for name, module in model.named_modules()}
