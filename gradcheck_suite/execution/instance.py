"""Instances: the callables, the data of one epoch, the loader and the optimizer of a case.

An instance of a generated problem and one of a user's problem have the same interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from gradcheck_suite.catalogue import checked_loss, is_accumulable
from gradcheck_suite.catalogue.build import build_model, draw_data
from gradcheck_suite.catalogue.definitions import Arrays
from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.autocast import AutocastRecorder
from gradcheck_suite.execution.devices import checked_device, torch_dtype
from gradcheck_suite.execution.optimizers import make_optimizer
from gradcheck_suite.schema.case import Case
from gradcheck_suite.schema.contract import Batch, Problem, TrainingRun
from gradcheck_suite.schema.spec import ProblemSpec


def map_leaves(function: Callable[[torch.Tensor], Any], batch: Batch) -> Batch:
    """Apply a function to every tensor of a pytree of dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: map_leaves(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_leaves(function, value) for value in batch)
    return batch


def leaves(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield the tensors of a pytree."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from leaves(value)


def to_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return a pytree with its floating-point tensors in a dtype and the others unchanged."""
    return map_leaves(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


class Items(Dataset[Any]):
    """The items of one epoch. A list of indices selects a batch, which is a copy, so that a loop may change it."""

    def __init__(self, data: Batch) -> None:
        self._data = data

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Iterable[int]) -> Batch:
        chosen = torch.as_tensor(list(indices))
        return map_leaves(lambda tensor: tensor[chosen.to(tensor.device)], self._data)


def loader_over(data: Batch, micro_batches: Iterable[range]) -> DataLoader[Any]:
    """Return a loader whose passes yield the micro-batches of these items, in order."""
    return DataLoader(Items(data), batch_sampler=[list(items) for items in micro_batches], collate_fn=_unchanged)


def _unchanged(batch: Batch) -> Batch:
    return batch


@dataclass(frozen=True)
class Instance:
    """A case's working parts.

    Attributes:
        case: where they come from.
        problem: model, loss and count as callables; `model` takes the case's seed.
        data: one epoch's items, in the case's dtype and on its device.
        arrays: a generated problem's items in float64 as numpy arrays, already rounded to the case's dtype; None for a
            user's problem.
    """

    case: Case
    problem: Problem
    data: Batch
    arrays: Arrays | None

    @property
    def accumulable_spec(self) -> ProblemSpec | None:
        """The generated problem, where its objective is a sum over items by construction and JAX has its gradient."""
        spec = self.case.spec
        return spec if spec is not None and is_accumulable(spec) else None

    @property
    def users_problem(self) -> Problem | None:
        """The user's problem, or None for a generated one."""
        return None if self.case.spec else self.problem

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
        model = model.to(self.device, self.dtype)
        if dtype is not None:
            model = model.to(dtype)
        return model.train()

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

    def loader(self) -> DataLoader[Any]:
        """Return a loader whose passes yield the plan's micro-batches in order."""
        plan = self.case.plan
        return loader_over(self.data, [plan.items(j) for j in range(len(plan.micro_batches))])

    def run(self) -> TrainingRun:
        """Return the argument of a loop."""
        model = self.model()
        return TrainingRun(
            model=model,
            optimizer=make_optimizer(self.case.optimizer, model),
            loader=self.loader(),
            loss=AutocastRecorder(self.problem.loss, self.device),
            count=self.count,
            accumulation_steps=self.case.plan.accumulation_steps,
            epochs=self.case.plan.epochs,
            reduction=self.problem.reduction,
            device=self.device,
            dtype=self.dtype,
        )


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
    problem = Problem(
        model=lambda seed: build_model(spec, seed, torch.float64),
        batch=lambda items, seed: Items(rounded).__getitems__(range(items)),
        loss=lambda model, batch: kind.torch_loss(loss.o, model(batch), batch, loss.reduction),
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
    return Instance(case=case, problem=problem, data=data, arrays=None)
