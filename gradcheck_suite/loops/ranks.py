"""Correct loops for several ranks: every reset mode in each way of adding up gradients over the
ranks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import count, product
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradcheck_suite.core.contract import (
    BUSY_RANKS,
    DENSE_GRADIENTS,
    EVEN_RANKS,
    NO_LAYER,
    Batch,
    Loop,
    TrainingRun,
    assumptions_of,
    autocast_of,
    training_loop,
)
from gradcheck_suite.core.text import summary_of
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.loops.reset_modes import MODES

# Collectives that are no part of a loop's communication: those of the suite, and those that hand
# out items.


_SUSPENDED = [False]


@contextmanager
def uncounted() -> Iterator[None]:
    """Leave the collectives of the block out of the count."""
    before = _SUSPENDED[0]
    _SUSPENDED[0] = True
    try:
        yield
    finally:
        _SUSPENDED[0] = before


def is_counted() -> bool:
    """Return whether collectives are the loop's."""
    return not _SUSPENDED[0]


# Gradients added up over ranks by one all-reduce per window, just before the step.


def add_up_gradients(run: TrainingRun) -> None:
    """Give every rank the sum of all ranks' gradients; a parameter that no rank reaches gets zeros.

    The sum replaces each gradient in place, so that views of a buffer stay views.
    """
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    for p in trainable:
        if p.grad is None:
            # each rank must bring the same elements to the all-reduce, whether it reaches them or
            # not
            p.grad = torch.zeros_like(p)
        elif p.grad.layout is not torch.strided:
            # ranks may reach other rows, so they add up dense gradients
            p.grad = p.grad.to_dense()
    gradients = [p.grad for p in trainable if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _made_of(
    loop: Loop, told: str, *, assumes: Iterable[str] = (), autocast: str | None = None
) -> Callable[[Loop], Loop]:
    """Return a decorator of a loop that wraps another one, with that one's name and assumptions.

    Args:
        loop: the other one.
        told: the text about the wrapper after what the other one's docstring says first.
        assumes: what the wrapper assumes besides.
        autocast: as for `training_loop`.
    """

    def made(trained: Loop) -> Loop:
        functools.update_wrapper(trained, loop)
        trained.__doc__ = f"{summary_of(loop)} {told}"
        return training_loop(assumes=(*assumptions_of(loop), *assumes), autocast=autocast)(trained)

    return made


def all_reduced(loop: Loop) -> Loop:
    """Return a loop whose every step begins with an all-reduce of the gradients."""

    @_made_of(loop, "One all-reduce per window.", autocast=autocast_of(loop))
    def trained(run: TrainingRun) -> None:
        def add_up(*_: Any) -> None:
            add_up_gradients(run)

        run.optimizer.register_step_pre_hook(add_up)
        loop(run)

    return trained


# Gradients averaged over ranks by `DistributedDataParallel`, in the last backward of each window.


def is_last_of_window(run: TrainingRun, call: int) -> bool:
    """Return whether a rank's n-th micro-batch of the run, from 0, is the last one of its window."""
    place = call % len(run.loader) + 1
    return place % run.accumulation_steps == 0 or place == len(run.loader)


def in_ddp(loop: Loop, *, assumes: Iterable[str] = (), **options: Any) -> Loop:
    """Return a loop that trains the model in `DistributedDataParallel`.

    The wrapper averages over ranks, so each loss is multiplied by their number. All micro-batches
    of a window but the last one run under `no_sync`. With `static_graph` the first of the run does
    not, where torch would fail an assertion (pytorch#143580): the part that is reduced twice stays
    what it is. A rank without a micro-batch in a window would leave the others waiting.

    Args:
        loop: the loop that accumulates each micro-batch's part of the window's loss.
        assumes: what the loop assumes besides, as some options do.
        options: keyword arguments of `DistributedDataParallel`. Random models have parameters that
            a micro-batch does not reach, so `find_unused_parameters` is True by default.
    """
    settings = {"find_unused_parameters": True, **options}
    told = f"In DistributedDataParallel{_shown(options)}."

    @_made_of(loop, told, assumes=(BUSY_RANKS, DENSE_GRADIENTS, *assumes))
    def trained(run: TrainingRun) -> None:
        wrapped = DistributedDataParallel(run.model, **settings)
        calls = count()

        def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            own: AbstractContextManager[None] = nullcontext()
            call = next(calls)
            if not is_last_of_window(run, call) and (call or not settings.get("static_graph")):
                own = wrapped.no_sync()
            with own:
                return run.loss(wrapped, batch) * run.world_size

        loop(replace(run, loss=loss))

    return trained


def _shown(options: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value}" for name, value in options.items())


# Parameters and gradients sharded over ranks by `fully_shard` (FSDP2).


SAME_PARAMETERS = (f"{NO_LAYER}branch", f"{NO_LAYER}mixture")
"""What a loop assumes whose ranks must reach the same parameters: no layers that choose parameters by their input."""
FLOAT32_BUFFERS = tuple(f"{NO_LAYER}batch_norm{n}d" for n in (1, 2))
"""What a loop assumes whose mixed precision policy casts parameters and no buffers, which batch norm refuses."""
NO_SCALARS = (f"{NO_LAYER}scale",)
"""What a loop assumes since `fully_shard` refuses scalar parameters: no layer that has one."""


def in_fsdp2(
    loop: Loop, *, reach_all: bool = True, compute: str | None = None, **options: Any
) -> Loop:
    """Return a loop that trains the model after `fully_shard`.

    `fully_shard` replaces parameters, so the optimizer gets the new ones. Its reduction averages
    over ranks, so each loss is multiplied by their number. Gradients are reduced in the last
    backward of each window. Every forward gathers parameters, so all ranks need as many
    micro-batches.

    Args:
        loop: the loop that accumulates each micro-batch's part of the window's loss.
        reach_all: whether to give every parameter a gradient in every backward. `fully_shard` lays
            the gradients that a rank has side by side and adds up these buffers, so ranks must have
            those of the same parameters: else it adds gradients of different parameters, or ranks
            wait for each other (pytorch#158719). Otherwise the loop assumes models whose parameters
            are reached by every input.
        compute: dtype to which a mixed precision policy casts parameters and inputs of a model in a
            lower precision than float64; gradients are added up in float32. It is declared as an
            autocast, whose rounding errors are the same.
        options: keyword arguments of `fully_shard`.
    """
    assumed = [EVEN_RANKS, DENSE_GRADIENTS, *NO_SCALARS]
    assumed += [] if reach_all else SAME_PARAMETERS
    assumed += [] if compute is None else FLOAT32_BUFFERS
    shown = options if compute is None else {**options, "param_dtype": compute}

    @_made_of(loop, f"After fully_shard{_shown(shown)}.", assumes=assumed, autocast=compute)
    def trained(run: TrainingRun) -> None:
        from torch.distributed.fsdp import fully_shard

        if any(not p.ndim for p in run.model.parameters()):
            raise CannotRunHere("fully_shard does not take scalar parameters")
        policy = (
            {} if compute is None or run.dtype is torch.float64 else {"mp_policy": _policy(compute)}
        )
        model: Any = run.model
        with _parameters_replaced(run):
            fully_shard(model, **options, **policy)
        calls = count()

        def loss(_: torch.nn.Module, batch: Batch) -> torch.Tensor:
            model.set_requires_gradient_sync(is_last_of_window(run, next(calls)))
            part = run.loss(model, batch) * run.world_size
            # 0, with a gradient of zeros for every trainable parameter
            return (
                part + sum((0 * p).sum() for p in model.parameters() if p.requires_grad)
                if reach_all
                else part
            )

        loop(replace(run, loss=loss))

    return trained


@contextmanager
def _parameters_replaced(run: TrainingRun) -> Iterator[None]:
    """Give the optimizer the parameters that the block puts in the place of the model's."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    yield
    new = dict(run.model.named_parameters())
    for group in run.optimizer.param_groups:
        # in the optimizer's own order, which its groups rest on
        group["params"] = [new[names[id(p)]] for p in group["params"]]


def _policy(compute: str) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # the loss is computed in float32, since some losses take no targets of another dtype than the
    # output's
    return MixedPrecisionPolicy(
        getattr(torch, compute), reduce_dtype=torch.float32, output_dtype=torch.float32
    )


# Linear layers split over ranks (tensor parallelism): each rank has a part of the weights and
# trains on all items.


class AllMicroBatches:
    """The micro-batches of all ranks, in the same order on every rank. Each rank has as many."""

    def __init__(self, run: TrainingRun) -> None:
        """Take each rank's micro-batches from its own run."""
        self._own = run.loader
        self._ranks = run.world_size

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
    """Return a loop whose model's linear layers are split over the ranks, and that trains as one
    rank does.

    Every rank computes every micro-batch, so gradients of parameters that are not split are the
    same on all ranks, and nothing adds them up.
    """
    told = "Linear layers are split over the ranks (tensor parallelism)."

    @_made_of(loop, told, assumes=(EVEN_RANKS, DENSE_GRADIENTS))
    def trained(run: TrainingRun) -> None:
        split_linear_layers(run)
        loop(as_one_rank(run))

    return trained


def as_one_rank(run: TrainingRun) -> TrainingRun:
    """Return a run of a single rank that has the micro-batches of all ranks."""
    loader: Any = AllMicroBatches(run)
    steps = run.accumulation_steps * run.world_size
    return replace(
        run,
        loader=loader,
        accumulation_steps=steps,
        rank=0,
        world_size=1,
    )


def split_linear_layers(run: TrainingRun) -> None:
    """Split the weight of each `torch.nn.Linear` by rows, or else by columns, where the number of
    ranks divides them.

    `parallelize_module` replaces parameters, so the optimizer gets the new ones. A weight that
    several modules share stays whole.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    uses: Counter[int] = Counter()
    for module in run.model.modules():
        uses.update(id(p) for p in module.parameters(recurse=False))
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    with _parameters_replaced(run):
        for module in list(run.model.modules()):
            # a subclass may use its weight in another way than by a call of the layer
            if type(module) is not torch.nn.Linear or any(
                uses[id(p)] > 1 for p in module.parameters()
            ):
                continue
            # uneven shards are not supported by all operations on a DTensor, and are left whole
            if not module.out_features % run.world_size:
                parallelize_module(module, mesh, ColwiseParallel(output_layouts=Replicate()))
            elif not module.in_features % run.world_size:
                parallelize_module(module, mesh, RowwiseParallel(input_layouts=Replicate()))


# Optimizer states sharded over ranks by `ZeroRedundancyOptimizer`, on gradients of
# `DistributedDataParallel`.


def in_zero_redundancy(loop: Loop) -> Loop:
    """Return a loop whose steps are those of a `ZeroRedundancyOptimizer`, in
    `DistributedDataParallel`.

    `run.optimizer` becomes the local optimizer, which has a part of the parameters; the other ranks
    step on the rest.
    """
    inner = in_ddp(loop)

    @_made_of(inner, "Steps of ZeroRedundancyOptimizer.")
    def trained(run: TrainingRun) -> None:
        inner(replace(run, optimizer=_with_sharded_states(run.optimizer)))

    return trained


def _with_sharded_states(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters that gives each rank's part to the given one."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def local(groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
        for own, part in zip(optimizer.param_groups, groups, strict=True):
            own["params"] = part["params"]
        return optimizer

    # copies: the wrapper changes its groups, and the local optimizer's get its own part below
    groups = [dict(group) for group in optimizer.param_groups]
    return ZeroRedundancyOptimizer(groups, local, **optimizer.defaults)  # type: ignore[arg-type]


WRAPPERS = {
    "all_reduce": all_reduced,
    "ddp": in_ddp,
    "fsdp2": in_fsdp2,
    "tensor_parallel": in_tensor_parallel,
}
"""Ways to train on several ranks, each a function that makes one loop of another."""
UNFIT = {
    # A view of a buffer of whole gradients is no shard. Between forward and backward the model has
    # the gathered parameters, whose gradients are not those that the step uses.
    "fsdp2": ("flat_buffer", "zero_between"),
    # A gradient that is a `DTensor` is not added to a view of a buffer, and a foreach kernel
    # refuses a list of both kinds.
    "tensor_parallel": ("flat_buffer", "zero_grad_foreach"),
}
"""The reset modes that a wrapper rules out."""
RANK_MODES: dict[str, Loop] = {
    f"{name}/{mode}": WRAPPERS[name](MODES[mode])
    for name, mode in product(WRAPPERS, MODES)
    if mode not in UNFIT.get(name, ())
}
"""What `verify --ranks` runs when it is given no loop: every reset mode in every wrapper, by the names of both."""
_ZEROED = MODES["zero_grad"]
_RELEASED = MODES["set_to_none"]
RANK_LOOPS: dict[str, Loop] = {
    **RANK_MODES,
    # one mode that zeroes and one that releases
    "ddp_bucket_view/zero_grad": in_ddp(_ZEROED, gradient_as_bucket_view=True),
    "ddp_bucket_view/set_to_none": in_ddp(_RELEASED, gradient_as_bucket_view=True),
    "ddp_static_graph/zero_grad": in_ddp(
        _ZEROED,
        assumes=(*SAME_PARAMETERS, EVEN_RANKS),
        static_graph=True,
        find_unused_parameters=False,
    ),
    "ddp_all_used/zero_grad": in_ddp(
        _ZEROED, assumes=(*SAME_PARAMETERS, f"{NO_LAYER}unused"), find_unused_parameters=False
    ),
    "fsdp2_resharded/zero_grad": in_fsdp2(_ZEROED, reach_all=False, reshard_after_forward=True),
    "fsdp2_bfloat16/zero_grad": in_fsdp2(_ZEROED, compute="bfloat16"),
    "zero_redundancy/zero_grad": in_zero_redundancy(_ZEROED),
    "zero_redundancy/set_to_none": in_zero_redundancy(_RELEASED),
}
"""All built-in loops for several ranks by name."""
