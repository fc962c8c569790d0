"""Optimizer states sharded over ranks by `ZeroRedundancyOptimizer`, on gradients of `DistributedDataParallel`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from gradcheck_suite.loops.ranks.ddp import in_ddp
from gradcheck_suite.schema.contract import Loop, TrainingRun, assumptions_of, training_loop


def in_zero_redundancy(loop: Loop) -> Loop:
    """Return a loop whose steps are those of a `ZeroRedundancyOptimizer`, in `DistributedDataParallel`.

    `run.optimizer` becomes the local optimizer, which has a part of the parameters; the other ranks step on the rest.
    """
    inner = in_ddp(loop)

    @training_loop(assumes=assumptions_of(inner))
    @functools.wraps(loop)
    def trained(run: TrainingRun) -> None:
        inner(replace(run, optimizer=_sharded(run.optimizer)))

    trained.__doc__ = f"{(inner.__doc__ or '').strip()} Steps of ZeroRedundancyOptimizer."
    return trained


def _sharded(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters that gives each rank's part to the given one."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def local(groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
        for own, part in zip(optimizer.param_groups, groups, strict=True):
            own["params"] = part["params"]
        return optimizer

    groups = [dict(group) for group in optimizer.param_groups]
    return ZeroRedundancyOptimizer(groups, local, **optimizer.defaults)  # type: ignore[arg-type]
