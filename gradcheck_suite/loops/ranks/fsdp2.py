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
FLOAT32_BUFFERS = tuple(f"{NO_LAYER}batch_norm{n}d" for n in (1, 2))
"""What a loop assumes whose mixed precision policy casts parameters and no buffers, which batch norm refuses."""
NO_SCALARS = (f"{NO_LAYER}scale",)
"""What a loop assumes since `fully_shard` refuses scalar parameters: no layer that has one."""
UNFIT = ("flat_buffer", "zero_between")
"""The reset modes that `fully_shard` rules out.

A view of a buffer of whole gradients is no shard. Between forward and backward the model has the gathered parameters,
whose gradients are not those that the step uses.
"""


def in_fsdp2(loop: Loop, *, reach_all: bool = True, compute: str | None = None, **options: Any) -> Loop:
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
        compute: dtype to which a mixed precision policy casts parameters and inputs of a model in a lower precision
            than float64; gradients are added up in float32. It is declared as an autocast, whose rounding errors are
            the same.
        options: of `fully_shard`.
    """
    assumed = [*assumptions_of(loop), EVEN_RANKS, DENSE_GRADIENTS, *NO_SCALARS]
    assumed += [] if reach_all else SAME_PARAMETERS
    assumed += [] if compute is None else FLOAT32_BUFFERS

    @training_loop(assumes=assumed, autocast=compute)
    @functools.wraps(loop)
    def trained(run: TrainingRun) -> None:
        policy = {} if compute is None or run.dtype is torch.float64 else {"mp_policy": _policy(compute)}
        model, calls = _sharded(run, {**options, **policy}), count()

        def loss(_: torch.nn.Module, batch: Batch) -> torch.Tensor:
            model.set_requires_gradient_sync(is_last_of_window(run, next(calls)))
            part = run.loss(model, batch) * run.world_size
            return part + _zero_of_each_parameter(model) if reach_all else part

        loop(replace(run, loss=loss))

    first = (loop.__doc__ or "").strip().split("\n")[0]
    shown = options if compute is None else {**options, "param_dtype": compute}
    told = "".join(f", {name}={value}" for name, value in shown.items())
    trained.__doc__ = f"{first} After fully_shard{told}."
    return trained


def _zero_of_each_parameter(model: torch.nn.Module) -> Any:
    """Return 0, with a gradient of zeros for every trainable parameter."""
    return sum((0 * p).sum() for p in model.parameters() if p.requires_grad)


def _policy(compute: str) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # the loss is computed in float32, since some losses take no targets of another dtype than the output's
    return MixedPrecisionPolicy(getattr(torch, compute), reduce_dtype=torch.float32, output_dtype=torch.float32)


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
