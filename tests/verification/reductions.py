"""Ways to make one gradient of those of all ranks, sound and faulty: the ranks of `test_ranks.py`
import them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard

from studies.zoo.bug import fill_missing, train_over_ranks, train_soundly


def _parts(gradient):
    """Return a gradient's elements with zeros behind them, as many for each rank."""
    flat = gradient.flatten()
    return torch.cat([flat, flat.new_zeros(-flat.numel() % dist.get_world_size())])


def _gathered(gradient, part):
    whole = torch.empty_like(_parts(gradient))
    dist.all_gather_into_tensor(whole, part)
    gradient.copy_(whole[: gradient.numel()].view_as(gradient))


def _each(reduce):
    return lambda run: [reduce(gradient) for gradient in fill_missing(run)]


def reduce_scatter(run):
    def reduce(gradient):
        flat = _parts(gradient)
        part = flat.new_empty(flat.numel() // dist.get_world_size())
        dist.reduce_scatter_tensor(part, flat)
        _gathered(gradient, part)

    train_over_ranks(run, reduce=_each(reduce))


def waited_for(run):
    def reduce(run):
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in fill_missing(run)]:
            work.wait()

    train_over_ranks(run, reduce=reduce)


def functional_all_reduce(run):
    def reduce(gradient):
        gradient.copy_(
            functional.wait_tensor(functional.all_reduce(gradient, "sum", dist.group.WORLD))
        )

    train_over_ranks(run, reduce=_each(reduce))


def point_to_point(run):
    def reduce(gradient):
        others = range(1, dist.get_world_size())
        if dist.get_rank():
            dist.send(gradient, 0)
            dist.recv(gradient, 0)
            return
        for other in others:
            received = torch.empty_like(gradient)
            dist.recv(received, other)
            gradient += received
        for other in others:
            dist.send(gradient, other)

    train_over_ranks(run, reduce=_each(reduce))


# Faulty ones


def by_max(run):
    train_over_ranks(
        run, reduce=_each(lambda gradient: dist.all_reduce(gradient, dist.ReduceOp.MAX))
    )


def to_rank_0_alone(run):
    def reduce(gradient):
        # what gloo leaves in the tensors of the other ranks is not specified
        sent = gradient.clone()
        dist.reduce(sent, 0)
        if not dist.get_rank():
            gradient.copy_(sent)

    train_over_ranks(run, reduce=_each(reduce))


def negated_on_rank_1(run):
    def reduce(gradient):
        if dist.get_rank() == 1:
            gradient.neg_()
        dist.all_reduce(gradient)

    train_over_ranks(run, reduce=_each(reduce))


def in_other_order(run):
    def reduce(run):
        flat = torch.cat([gradient.flatten() for gradient in fill_missing(run)])
        flat = flat.flip(0) if run.rank else flat
        dist.all_reduce(flat)
        flat = flat.flip(0) if run.rank else flat
        for gradient, part in zip(
            fill_missing(run), flat.split([g.numel() for g in fill_missing(run)]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    train_over_ranks(run, reduce=reduce)


def moved_on_rank_1(run):
    if run.rank == 1:
        with torch.no_grad():
            for p in run.model.parameters():
                p.add_(0.25)
    train_over_ranks(run)


def sharded_behind_the_optimizer(run):
    fully_shard(run.model)
    train_soundly(run)
