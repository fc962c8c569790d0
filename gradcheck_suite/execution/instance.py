"""Instances: the callables, the data of one epoch, the loader and the optimizer of a case.

An instance of a generated problem and one of a user's problem have the same interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from gradcheck_suite.catalogue import checked_loss, is_accumulable
from gradcheck_suite.catalogue.build import build_model, draw_data, needs_batch
from gradcheck_suite.catalogue.definitions import Arrays
from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.autocast import AutocastRecorder
from gradcheck_suite.execution.batches import Items, leaves, loader_over, map_leaves, to_dtype
from gradcheck_suite.execution.devices import checked_device, torch_dtype
from gradcheck_suite.execution.optimizers import make_optimizer
from gradcheck_suite.execution.pairs import Pairs
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Batch, Problem, TrainingRun
from gradcheck_suite.schema.spec import ProblemSpec


@dataclass(frozen=True)
class Instance:
    """A case's working parts.

    Attributes:
        case: where they come from.
        problem: model, loss and count as callables; `model` takes the case's seed.
        data: one epoch's items, in the case's dtype and on its device.
        arrays: a generated problem's items in float64 as numpy arrays, already rounded to the case's dtype; None for a
            user's problem.
        scale: factor that the loss of `problem` has over the case's own.
        item_counts: what each item counts, (total items,), where `problem` counts otherwise than the case's own does
            and ranks run it; None for the case's own counts.
        users_problem: the user's problem as it was given, or None for a generated one.
    """

    case: Case
    problem: Problem
    data: Batch
    arrays: Arrays | None
    scale: float = 1.0
    item_counts: tuple[float, ...] | None = None
    users_problem: Problem | None = None

    @property
    def accumulable_spec(self) -> ProblemSpec | None:
        """The generated problem, where its objective is a sum over items by construction and JAX has its gradient."""
        spec = self.case.spec
        return spec if spec is not None and is_accumulable(spec) else None

    @property
    def device(self) -> torch.device:
        """The case's device."""
        return torch.device(self.case.device)

    @property
    def dtype(self) -> torch.dtype:
        """The case's dtype."""
        return torch_dtype(self.case.dtype)

    def model(self, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Return a fresh model in train mode, its values rounded to the case's dtype, held in `dtype` or in that."""
        model = self.problem.model(self.case.seed)
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"Problem.model(seed) must return a torch.nn.Module, got {type(model).__name__}")
        if self.case.spec and self.case.device == "cpu" and {self.dtype, dtype or self.dtype} == {torch.float64}:
            return model  # it is built so, and each walk over its modules takes a tenth of the time to build them
        model = model.to(self.device, self.dtype)
        if dtype not in (None, self.dtype):
            model = model.to(dtype)
        return model.train()

    def on_cpu(self) -> Instance:
        """Return this instance with its data and its models on the CPU."""
        return replace(self, case=self.case.replace(device="cpu"), data=map_leaves(lambda t: t.cpu(), self.data))

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the divisor of the mean over a batch, a floating-point scalar.

        It is float64 for a float64 run and float32 otherwise. A quotient of two integer tensors has torch's default
        dtype, float32, which would round a float64 run's weights at the eighth digit.
        """
        dtype = torch.promote_types(torch.float32, self.dtype)
        if self.problem.count is not None:
            counted = self.problem.count(batch)
            try:
                return torch.as_tensor(counted).to(self.device, dtype)
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(
                    f"Problem.count(batch) must return a number or a scalar tensor, got {type(counted).__name__}"
                ) from None
        return torch.tensor(float(len(next(leaves(batch)))), device=self.device, dtype=dtype)

    def batch(self, items: range, dtype: torch.dtype | None = None) -> Batch:
        """Return some of the items as one batch, floating-point tensors in `dtype` if given."""
        batch = Items(self.data).__getitems__(items)
        if dtype is None:
            return batch
        return to_dtype(batch, dtype)

    def drawn(self, items: int, dtype: torch.dtype) -> Batch:
        """Return a batch of newly drawn items, floating-point tensors in `dtype`."""
        batch = self.problem.batch(items, self.case.seed)
        return map_leaves(lambda t: t.to(self.device, dtype if t.is_floating_point() else t.dtype), batch)

    def loader(self, rank: int = 0) -> DataLoader[Any]:
        """Return a loader whose passes yield the plan's micro-batches of a rank in order."""
        plan = self.case.plan
        return loader_over(self.data, [plan.items(j) for j in plan.of_rank(rank)])

    def run(self, rank: int = 0) -> TrainingRun:
        """Return the argument of a loop, as one rank gets it."""
        model, loader = self.model(), self.loader(rank)
        loss = AutocastRecorder(self.problem.loss, self.device)
        pairs = Pairs(loss)
        return TrainingRun(
            model=model,
            optimizer=make_optimizer(self.case.optimizer, model, self.case.groups),
            loader=loader,
            loss=loss,
            pairs=pairs.over(loader),
            criterion=pairs.criterion,
            count=self.count,
            accumulation_steps=self.case.plan.accumulation_steps,
            epochs=self.case.plan.epochs,
            reduction=self.problem.reduction,
            device=self.device,
            dtype=self.dtype,
            rank=rank,
            world_size=self.case.plan.world_size,
        )


def scaled(instance: Instance, factor: float) -> Instance:
    """Return an instance whose loss is so many times as large."""
    problem = instance.problem
    larger = replace(problem, loss=lambda model, batch: factor * problem.loss(model, batch))
    return replace(instance, problem=larger, scale=instance.scale * factor)


def recounted(instance: Instance, count: Callable[[list[int]], float]) -> Instance:
    """Return a weight probe with a mean that divides by another count; the mean over a count of 0 is 0.

    Args:
        instance: a weight probe.
        count: what the mean over some items, given by their indices, divides by.
    """
    plan = instance.case.plan

    def count_batch(batch: Batch) -> torch.Tensor:
        return torch.tensor(count(batch["x"].reshape(-1).tolist()), dtype=torch.float64)

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        total, divisor = model(batch).sum(), count_batch(batch)
        return total / divisor if divisor else 0 * total

    return replace(
        instance,
        problem=replace(instance.problem, loss=loss, count=count_batch),
        item_counts=tuple(count([i]) for i in range(plan.total_items)) if plan.ranks else None,
    )


def as_changed(instance: Instance, scale: float, item_counts: Sequence[float] | None) -> Instance:
    """Return an instance with the changes that another process has made to its own."""
    if item_counts is not None:
        counts = item_counts
        instance = recounted(instance, lambda indices: float(sum(counts[i] for i in indices)))
    return instance if scale == 1.0 else scaled(instance, scale)


def instance_of(case: Case, problem: Problem | None) -> Instance:
    """Bring a case to life, of the user's problem where one is given and of its own generated one otherwise."""
    return generated_instance(case) if problem is None else user_instance(case, problem)


def generated_instance(case: Case) -> Instance:
    """Bring a generated case to life."""
    spec = case.spec
    if spec is None:
        name = case.problem_name
        raise UsageError(f"case {case.digest} is about the user's problem {name!r}: pass --problem {name}")
    device, dtype = checked_device(case.device), torch_dtype(case.dtype)
    masked = np.zeros(case.plan.total_items, dtype=bool)
    for j in case.plan.masked:
        masked[case.plan.items(j).start : case.plan.items(j).stop] = True
    kind, loss = checked_loss(spec), spec.loss
    if case.plan.masked and not kind.maskable(loss.o):
        raise UsageError(f"plan masks micro-batches {case.plan.masked}, but the loss {loss!r} cannot ignore targets")
    tensors = {name: torch.from_numpy(array) for name, array in draw_data(spec, case.seed, masked).items()}
    rounded = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    whole = needs_batch(spec)
    problem = Problem(
        model=lambda seed: build_model(spec, seed, torch.float64),
        batch=lambda items, seed: Items(rounded).__getitems__(range(items)),
        loss=lambda model, batch: kind.torch_loss(loss.o, model(batch if whole else batch["x"]), batch, loss.reduction),
        reduction=spec.loss.reduction,
        count=lambda batch: kind.count(loss.o, batch),
    )
    arrays = {n: t.to(torch.float64).numpy() if t.is_floating_point() else t.numpy() for n, t in rounded.items()}
    data = {name: tensor.to(device) for name, tensor in rounded.items()}
    return Instance(case=case, problem=problem, data=data, arrays=arrays)


def user_instance(case: Case, problem: Problem) -> Instance:
    """Bring a case of a user's problem to life: all of an epoch's items are asked for at once, then cut up."""
    device = checked_device(case.device)
    total = case.plan.total_items
    dtype = torch_dtype(case.dtype)
    given = problem.batch(total, case.seed)
    data = map_leaves(lambda t: t.to(device, dtype) if t.is_floating_point() else t.to(device), given)
    tensors = list(leaves(data))
    if not tensors:
        raise UsageError(
            f"Problem.batch must return tensors, in dicts, lists or tuples; got {type(given).__name__} with none in it"
        )
    for tensor in tensors:
        if tensor.ndim == 0 or len(tensor) != total:
            raise UsageError(
                f"Problem.batch({total}, seed) must return tensors of leading dimension {total}, "
                f"got one of shape {tuple(tensor.shape)}: slice or draw every tensor to the item count asked for, "
                "and pad items of different lengths to one tensor"
            )
    return Instance(case=case, problem=problem, data=data, arrays=None, users_problem=problem)
