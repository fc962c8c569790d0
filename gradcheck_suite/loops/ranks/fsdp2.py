"""Parameters and gradients sharded over ranks by `fully_shard` (FSDP2)."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.loops.ranks.ddp import is_last_of_window
from gradcheck_suite.schema.contract import (
    DENSE_GRADIENTS,
    EVEN_RANKS,
    NO_LAYER,
    Batch,
    Loop,
    TrainingRun,
    assumptions_of,
    training_loop,
)

SAME_PARAMETERS = (f"{NO_LAYER}branch", f"{NO_LAYER}mixture")
"""What a loop assumes whose ranks must reach the same parameters: no layers that choose parameters by their input."""
UNFIT = ("flat_buffer", "zero_between")
"""The reset modes that `fully_shard` rules out.

A view of a buffer of whole gradients is no shard. Between forward and backward the model has the gathered parameters,
whose gradients are not those that the step uses.
"""


def in_fsdp2(loop: Loop, *, reach_all: bool = True, **options: Any) -> Loop:
    """Return a loop that trains the model after `fully_shard`.

    `fully_shard` replaces parameters, so the optimizer gets the new ones. Its reduction averages over ranks, so each
    loss is multiplied by their number. Gradients are reduced in the last backward of each window. Every forward
    gathers parameters, so all ranks need as many micro-batches.

    Args:
        loop: that accumulates each micro-batch's part of the window's loss.
        reach_all: whether to give every parameter a gradient in every backward. `fully_shard` lays the gradients that
            a rank has side by side and adds up these buffers, so ranks must have those of the same parameters: else it
            adds gradients of different parameters, or ranks wait for each other (pytorch#158719).
            Otherwise the loop assumes models whose parameters are reached by every input.
        options: of `fully_shard`.
    """
    assumed = (*assumptions_of(loop), EVEN_RANKS, DENSE_GRADIENTS, *(() if reach_all else SAME_PARAMETERS))

    @training_loop(assumes=assumed)
    @functools.wraps(loop)
    def trained(run: TrainingRun) -> None:
        model, calls = _sharded(run, options), count()

        def loss(_: torch.nn.Module, batch: Batch) -> torch.Tensor:
            model.set_requires_gradient_sync(is_last_of_window(run, next(calls)))
            part = run.loss(model, batch) * run.world_size
            return part + _zero_of_each_parameter(model) if reach_all else part

        loop(replace(run, loss=loss))

    first = (loop.__doc__ or "").strip().split("\n")[0]
    told = "".join(f", {name}={value}" for name, value in options.items())
    trained.__doc__ = f"{first} After fully_shard{told}."
    return trained


def _zero_of_each_parameter(model: torch.nn.Module) -> Any:
    """Return 0, with a gradient of zeros for every trainable parameter."""
    return sum((0 * p).sum() for p in model.parameters() if p.requires_grad)


def _sharded(run: TrainingRun, options: dict[str, Any]) -> Any:
    """Shard the model, give the optimizer its new parameters, and return the model."""
    from torch.distributed.fsdp import fully_shard

    if any(not p.ndim for p in run.model.parameters()):
        raise CannotRunHere("fully_shard does not take scalar parameters")
    names = {id(p): name for name, p in run.model.named_parameters()}
    fully_shard(run.model, **options)
    sharded = dict(run.model.named_parameters())
    for group in run.optimizer.param_groups:
        group["params"] = [sharded[names[id(p)]] for p in group["params"]]
    return run.model
