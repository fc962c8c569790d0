"""Linear layers split over ranks (tensor parallelism): each rank has a part of the weights and trains on all items."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gradcheck_suite.loops.ranks.counting import uncounted
from gradcheck_suite.schema.contract import (
    DENSE_GRADIENTS,
    EVEN_RANKS,
    Batch,
    Loop,
    TrainingRun,
    assumptions_of,
    training_loop,
)

UNFIT = ("flat_buffer", "zero_grad_foreach")
"""The reset modes that a model with split and whole parameters rules out.

A gradient that is a `DTensor` is not added to a view of a buffer, and a foreach kernel refuses a list of both kinds.
"""


class AllMicroBatches:
    """The micro-batches of all ranks, in the same order on every rank. Each rank has as many."""

    def __init__(self, run: TrainingRun) -> None:
        """Take each rank's micro-batches from its own run."""
        self._own, self._ranks = run.loader, run.world_size

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches of one epoch."""
        for own in self._own:
            every: list[Any] = [None] * self._ranks
            # where a model is split, a sampler gives its ranks the same items without a collective
            with uncounted():
                dist.all_gather_object(every, own)
            yield from every

    def __len__(self) -> int:
        """Return the number of micro-batches of one epoch."""
        return len(self._own) * self._ranks


def in_tensor_parallel(loop: Loop) -> Loop:
    """Return a loop whose model's linear layers are split over the ranks, and that trains as one rank does.

    Every rank computes every micro-batch, so gradients of parameters that are not split are the same on all ranks, and
    nothing adds them up.
    """

    @training_loop(assumes=(*assumptions_of(loop), EVEN_RANKS, DENSE_GRADIENTS))
    @functools.wraps(loop)
    def trained(run: TrainingRun) -> None:
        split_linear_layers(run)
        loop(as_one_rank(run))

    first = (loop.__doc__ or "").strip().split("\n")[0]
    trained.__doc__ = f"{first} Linear layers are split over the ranks (tensor parallelism)."
    return trained


def as_one_rank(run: TrainingRun) -> TrainingRun:
    """Return a run of a single rank that has the micro-batches of all ranks."""
    loader: Any = AllMicroBatches(run)
    steps = run.accumulation_steps * run.world_size
    return replace(run, loader=loader, accumulation_steps=steps, rank=0, world_size=1)


def split_linear_layers(run: TrainingRun) -> None:
    """Split the weight of each `torch.nn.Linear` by rows, or else by columns, where the number of ranks divides them.

    `parallelize_module` replaces parameters, so the optimizer gets the new ones. A weight that several modules share
    stays whole.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = {id(p): name for name, p in run.model.named_parameters()}
    uses = Counter(id(p) for module in run.model.modules() for p in module.parameters(recurse=False))
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    for module in list(run.model.modules()):
        # a subclass may use its weight in another way than by a call of the layer
        if type(module) is not torch.nn.Linear or any(uses[id(p)] > 1 for p in module.parameters()):
            continue
        if not module.out_features % run.world_size:
            parallelize_module(module, mesh, ColwiseParallel(output_layouts=Replicate()))
        elif not module.in_features % run.world_size:
            parallelize_module(module, mesh, RowwiseParallel(input_layouts=Replicate()))
    split = dict(run.model.named_parameters())
    for group in run.optimizer.param_groups:
        group["params"] = [split[names[id(p)]] for p in group["params"]]
