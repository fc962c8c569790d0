"""Loops for several ranks that fail in ways which only processes can: the ranks of `test_ranks.py`
import them.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradcheck_suite.loops.ranks import (
    add_up_gradients,
    all_reduced,
    as_one_rank,
    in_ddp,
    in_fsdp2,
    in_tensor_parallel,
    in_zero_redundancy,
    split_linear_layers,
)
from gradcheck_suite.loops.reset_modes import (
    MODES,
    backward_window,
    part_of_window,
    window_count,
    windows,
)
from studies.zoo.bug import train_over_ranks, train_soundly


def right(run):
    train_over_ranks(run)


def not_reduced(run):
    train_over_ranks(run, reduce=lambda run: None)


def wrong_on_rank_1(run):
    def reduce(run):
        add_up_gradients(run)
        if run.rank == 1:
            for p in run.model.parameters():
                p.grad.mul_(2)

    train_over_ranks(run, reduce=reduce)


def _with_scheduler(run, steps_of):
    """Train, and step a scheduler so many times in each window."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0)
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        add_up_gradients(run)
        run.optimizer.step()
        for _ in range(steps_of(run, window)):
            scheduler.step()


def scheduler_per_window(run):
    _with_scheduler(run, lambda run, window: 1)


def scheduler_as_accelerate(run):
    _with_scheduler(run, lambda run, window: run.world_size)


def scheduler_per_micro_batch(run):
    _with_scheduler(run, lambda run, window: len(window))


def exits(run):
    if run.rank == 1:
        os._exit(7)
    right(run)


def killed(run):
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    right(run)


def killed_once(run):
    """End rank 1 as the kernel (SIGKILL) or gloo (SIGABRT) does, unless that happened before."""
    done = Path(os.environ["GRADCHECK_SUITE_TEST_KILLED"])
    if run.rank == 1 and not done.exists():
        done.touch()
        os.kill(os.getpid(), getattr(signal, done.suffix[1:]))
    right(run)


def raises(run):
    if run.rank == 1:
        raise ValueError("no data")
    right(run)


def waits_alone(run):
    right(run)
    if run.rank == 0:
        dist.all_reduce(torch.zeros(1))


def out_of_step(run):
    if run.rank == 0:
        dist.all_reduce(torch.zeros(100))
    right(run)


def never_ends(run):
    while run.rank == 1:
        pass


def sleeps_first(run):
    """Let rank 0 be away for longer than the ranks need to be still, as one that writes a
    checkpoint is.
    """
    if run.rank == 0:
        time.sleep(2.5)
    right(run)


def reduces_every_micro_batch(run):
    """Add up each micro-batch's own gradient over ranks: right where ranks have as many, and K
    times the traffic.
    """
    for window in windows(run):
        total = window_count(run, window)
        sums = {}
        for batch in window:
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
            add_up_gradients(run)
            sums = {p: sums.get(p, 0) + p.grad for p in run.model.parameters() if p.requires_grad}
        for p, gradient in sums.items():
            p.grad = gradient
        run.optimizer.step()


def _under_hook(run, register):
    wrapped = DistributedDataParallel(run.model)
    register(wrapped)
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for j, batch in enumerate(window):
            with wrapped.no_sync() if j < len(window) - 1 else nullcontext():
                (run.loss(wrapped, batch) * run.count(batch) / total * run.world_size).backward()
        run.optimizer.step()


def _sent_in_bfloat16(state, bucket):
    # DistributedDataParallel refuses torch's own hook, by its name, where there is no NCCL
    return default_hooks.bf16_compress_hook(state, bucket)


def bfloat16_hook(run):
    _under_hook(
        run, lambda wrapped: wrapped.register_comm_hook(dist.group.WORLD, _sent_in_bfloat16)
    )


def _power_sgd(run, **settings):
    state = powerSGD_hook.PowerSGDState(None, **settings)
    _under_hook(run, lambda wrapped: wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook))


def power_sgd_not_yet(run):
    _power_sgd(run)


def power_sgd(run):
    _power_sgd(run, start_powerSGD_iter=2, min_compression_rate=0.1)


def static_graph_under_no_sync(run):
    wrapped = DistributedDataParallel(run.model, static_graph=True)
    with wrapped.no_sync():
        run.loss(wrapped, next(iter(run.loader))).backward()


def steps_on_one_rank(run):
    """Step on one rank alone, after parameters were sharded: the suite cannot gather what it
    observes.
    """
    fully_shard(run.model)
    run.optimizer.param_groups[0]["params"] = list(run.model.parameters())
    if run.rank == 0:
        run.optimizer.step()


def own_items_in_split_layers(run):
    """Give each rank its own items, as with a sampler for data parallelism, though the ranks share
    one model.
    """
    split_linear_layers(run)
    train_soundly(run)


def whole_parameters_added_up(run):
    """Add up gradients of parameters that are not split, which every rank has in full already."""
    split_linear_layers(run)
    run = as_one_rank(run)
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        for p in run.model.parameters():
            if not hasattr(p, "full_tensor"):
                dist.all_reduce(p.grad)
        run.optimizer.step()


def parts_not_sent(run):
    """Step on the parameters in turn, a half of them on each rank, and send none."""
    every = run.optimizer.param_groups[0]["params"]
    run.optimizer.param_groups[0]["params"] = every[run.rank :: run.world_size]
    for window in windows(run):
        run.model.zero_grad()
        backward_window(run, window)
        add_up_gradients(run)
        run.optimizer.step()


def _here(loop):
    # the ranks look for a loop in the module that it says it is of
    loop.__module__ = __name__
    return loop


def _under_policy(**dtypes):
    return _here(in_fsdp2(MODES["zero_grad"], mp_policy=MixedPrecisionPolicy(**dtypes)))


fsdp2_reduced_in_bfloat16 = _under_policy(reduce_dtype=torch.bfloat16)
fsdp2_computed_in_bfloat16 = _under_policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""Computes in bfloat16 and does not say so."""
fsdp2_without_zeros = _here(in_fsdp2(MODES["zero_grad"], reach_all=False))
WRAPPERS = {
    "all_reduce": all_reduced,
    "ddp": in_ddp,
    "ddp_bucket_view": lambda loop: in_ddp(loop, gradient_as_bucket_view=True),
    "fsdp2": in_fsdp2,
    "tensor_parallel": in_tensor_parallel,
    "zero_redundancy": in_zero_redundancy,
}
IN_MODES = {
    f"{name}/{mode}": _here(wrap(MODES[mode])) for name, wrap in WRAPPERS.items() for mode in MODES
}
"""Every reset mode in every wrapper, sound or not."""
