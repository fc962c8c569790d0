"""Instances: the callables, the data of one epoch, the loader and the optimizer of a case.

An instance of a generated problem and one of a user's problem have the same interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from gradcheck_suite.catalogue.definitions import Arrays
from gradcheck_suite.catalogue.tables import (
    build_model,
    checked_loss,
    draw_data,
    is_accumulable,
    needs_batch,
)
from gradcheck_suite.core.case import DEVICES, DTYPES, Case, ProblemSpec
from gradcheck_suite.core.comparison import UNIT_ROUNDOFF, dtype_name
from gradcheck_suite.core.contract import Batch, Problem, TrainingRun
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run.optimizers import optimizer_of


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a case's dtype name."""
    if name not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}; got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU operations in one thread: those of a generated model are too small for
    several.

    With two threads on two busy cores the same cases took nine times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed the random states of the CPU and of a device, and restore them afterwards.

    Args:
        seed: the seed; None leaves the states as they are at the start.
        device: the device.
    """
    # torch.manual_seed would queue a call for every kind of device, each with a formatted stack
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if on_cuda:
                torch.cuda.manual_seed(seed)
        yield


def checked_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        UsageError: no device has this name.
        CannotRunHere: the device is CUDA, and torch sees none.
    """
    if name not in DEVICES:
        raise UsageError(f"device must be one of {', '.join(DEVICES)}; got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise CannotRunHere(
            f"device 'cuda' was asked for, but torch {torch.__version__} sees no CUDA device here: "
            "use --device cpu, or a machine with a GPU and a CUDA build of torch"
        )
    return torch.device(name)


Compute = str | None
"""The name of the autocast dtype under which losses were computed, or None."""


class AutocastRecorder:
    """A loss that records the autocast dtype of its calls that need gradients.

    Autocast does not change float64 tensors, so a float64 run computes in float64 and is judged in
    float64.

    Attributes:
        compute: the autocast dtype of the calls so far; the coarsest one if they differ.
        raised: the exceptions of the calls so far, a line for each.
    """

    def __init__(
        self, loss: Callable[[torch.nn.Module, Batch], torch.Tensor], device: torch.device
    ) -> None:
        self._loss = loss
        self._device = device.type
        self.compute: Compute = None
        self.raised: list[str] = []

    def __call__(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss."""
        # a loss under `no_grad` is looked at and not trained on: its precision does not matter
        if torch.is_grad_enabled() and torch.is_autocast_enabled(self._device):
            self.compute = coarsest(
                self.compute, dtype_name(torch.get_autocast_dtype(self._device))
            )
        try:
            return self._loss(model, batch)
        except Exception as error:
            self.raised.append(" ".join(f"{type(error).__name__}: {error}".split()))
            raise


def coarsest(*names: Compute) -> Compute:
    """Return the dtype with the largest unit roundoff, ignoring None."""
    return max(
        (name for name in names if name is not None), key=UNIT_ROUNDOFF.__getitem__, default=None
    )


def autocast_context(device: torch.device, compute: Compute) -> AbstractContextManager[object]:
    """Return an autocast context of this dtype, or for None a context that does nothing."""
    return (
        nullcontext()
        if compute is None
        else torch.autocast(device.type, dtype=getattr(torch, compute))
    )


def map_leaves(function: Callable[[torch.Tensor], Any], batch: Batch) -> Batch:
    """Apply a function to every tensor of a pytree of dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: map_leaves(function, value) for name, value in batch.items()}
    # a named tuple takes its fields one by one, other tuples and lists take an iterable
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_leaves(function, value) for value in batch)
    return batch


def tensor_leaves(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield the tensors of a pytree."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensor_leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensor_leaves(value)


def named_leaves(batch: Batch, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a pytree with their places in it, such as `x` or `inputs.0`."""
    if isinstance(batch, torch.Tensor):
        yield name or "the batch", batch
    elif isinstance(batch, dict | list | tuple):
        pairs = batch.items() if isinstance(batch, dict) else enumerate(batch)
        for key, value in pairs:
            yield from named_leaves(value, f"{name}.{key}" if name else str(key))


def to_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return a pytree with its floating-point tensors in a dtype and the others unchanged."""
    return map_leaves(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def in_turns(data: Batch, distinct: int) -> Batch:
    """Return items of which the first few repeat in turn.

    The items as they are where `distinct` is 0.
    """
    return (
        map_leaves(lambda t: t[torch.arange(len(t), device=t.device) % distinct], data)
        if distinct
        else data
    )


class Items(Dataset[Any]):
    """The items of one epoch.

    A list of indices selects a batch, which is a copy, so that a loop may change it.
    """

    def __init__(self, data: Batch) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(next(tensor_leaves(self._data)))

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Iterable[int]) -> Batch:
        # a DataLoader calls this in place of one `__getitem__` per index
        chosen = torch.as_tensor(list(indices))
        return map_leaves(lambda tensor: tensor[chosen.to(tensor.device)], self._data)


class MicroBatchSampler(BatchSampler):
    """The micro-batches of one epoch in order, as lists of item indices.

    `batch_size` is that of the largest.

    Attributes:
        passes: number of passes that were begun.
    """

    def __init__(self, items: Items, micro_batches: Iterable[range]) -> None:
        self.micro_batches = [list(indices) for indices in micro_batches]
        self.passes = 0
        super().__init__(
            SequentialSampler(items), max(map(len, self.micro_batches), default=1), drop_last=False
        )

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


def loader_over(data: Batch, micro_batches: Iterable[range]) -> DataLoader[Any]:
    """Return a loader whose passes yield the micro-batches of these items, in order."""
    items = Items(data)
    return DataLoader(
        items, batch_sampler=MicroBatchSampler(items, micro_batches), collate_fn=_unchanged
    )


def epoch_of(loader: DataLoader[Any]) -> Callable[[], int]:
    """Return a function that returns the index of the pass over a loader of `loader_over`."""
    sampler = loader.batch_sampler
    assert isinstance(sampler, MicroBatchSampler)
    # asked inside of a pass, which has been counted when it began
    return lambda: sampler.passes - 1


def _unchanged(batch: Batch) -> Batch:
    return batch


Loss = Callable[[Any, Batch], torch.Tensor]
NEEDED = "run.pairs and run.criterion need a loss that calls its model once, as model(x)"


class _CalledError(BaseException):
    """Carries what a loss calls its model with.

    It is no `Exception`, so that a loss does not catch it.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__()
        self.given = args
        self.keywords = keywords


def _raise_called(*args: Any, **keywords: Any) -> Any:
    raise _CalledError(*args, **keywords)


class _Given:
    """A model that returns a given output, once."""

    def __init__(self, output: Any) -> None:
        self._output = output
        self._called = False

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        # a given output stands for one call: of several, each would have another one
        if self._called:
            raise CannotRunHere(
                f"{NEEDED}; this one calls its model several times: use run.loss(model, batch)"
            )
        self._called = True
        return self._output


def model_input(loss: Loss, batch: Batch) -> Any:
    """Return what a loss calls its model with.

    Raises:
        CannotRunHere: the loss does not call its model as `model(x)`.
    """
    try:
        loss(_raise_called, batch)
    except _CalledError as called:
        if len(called.given) == 1 and not called.keywords:
            return called.given[0]
        raise CannotRunHere(
            f"{NEEDED}; this one passes other arguments: use run.loss(model, batch)"
        ) from None
    except Exception as error:
        raise CannotRunHere(
            f"{NEEDED}; this one raises {error!r} first: use run.loss(model, batch)"
        ) from None
    raise CannotRunHere(f"{NEEDED}; this one does not call it: use run.loss(model, batch)")


class Pairs:
    """The batches of a loss as pairs (x, y), for trainers that call `criterion(model(x), y)`
    themselves.

    The loss is taken apart by calling it with another model: one that only notes what it is called
    with gives x, and one that only returns a given output gives the criterion.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._batch: Batch = None
        self._target: torch.Tensor | None = None

    def pair(self, batch: Batch) -> tuple[Any, Any]:
        """Return what the model is called with, and the rest: the one other tensor, or else the
        whole batch.
        """
        with torch.no_grad():
            x = model_input(self._loss, batch)
        # by identity: the target may be equal to the input
        others = [leaf for leaf in tensor_leaves(batch) if leaf is not x]
        # several tensors are no one target; and where the input is none of the batch's own tensors,
        # it was computed from the batch, all of which the loss may read again
        if len(others) != 1 or len(others) == len(list(tensor_leaves(batch))):
            return x, batch
        self._batch = batch
        self._target = others[0]
        return x, others[0]

    def criterion(self, output: Any, y: Any) -> torch.Tensor:
        """Return the loss of a model's output and the y of a pair, or of an output and a batch."""
        batch = y
        if self._target is not None and isinstance(y, torch.Tensor):
            target = self._target
            # the loss calls the model that returns the output: what it calls it with does not
            # matter
            batch = map_leaves(lambda leaf: y if leaf is target else None, self._batch)
        return self._loss(_Given(output), batch)

    def over(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of the same micro-batches as pairs."""
        collate = loader.collate_fn
        return DataLoader(
            loader.dataset,
            batch_sampler=loader.batch_sampler,
            collate_fn=lambda items: self.pair(collate(items)),
        )


@dataclass(frozen=True)
class Instance:
    """A case's working parts.

    Attributes:
        case: the case that is brought to life.
        problem: model, loss and count as callables; `model` takes the case's seed.
        data: one epoch's items, in the case's dtype and on its device.
        arrays: a generated problem's items in float64 as numpy arrays, already rounded to the
            case's dtype; None for a user's problem.
        scale: factor that the loss of `problem` has over the case's own.
        item_counts: what each item counts, (total items,), where `problem` counts otherwise than
            the case's own does; None for the case's own counts.
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
        """The generated problem, where its objective is a sum over items by construction and JAX
        has its gradient.
        """
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
        """Return a fresh model in train mode, its values rounded to the case's dtype, held in
        `dtype` or in that.
        """
        model = self.problem.model(self.case.seed)
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"Problem.model(seed) must return a torch.nn.Module, got {type(model).__name__}"
            )
        if (
            self.case.spec
            and self.case.device == "cpu"
            and {self.dtype, dtype or self.dtype} == {torch.float64}
        ):
            return model  # it is built so, and each walk over its modules takes a tenth of the time to build them
        model = model.to(self.device, self.dtype)
        if dtype not in (None, self.dtype):
            model = model.to(dtype)
        return model.train()

    def on_cpu(self) -> Instance:
        """Return this instance with its data and its models on the CPU."""
        return replace(
            self,
            case=self.case.replace(device="cpu"),
            data=map_leaves(lambda t: t.cpu(), self.data),
        )

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the divisor of the mean over a batch: a scalar, float64 for a float64 run and
        float32 otherwise.
        """
        # a quotient of two integer tensors has torch's default dtype, float32, which would round
        # the weights of a float64 run at the eighth digit
        dtype = torch.promote_types(torch.float32, self.dtype)
        if self.problem.count is not None:
            counted = self.problem.count(batch)
            try:
                return torch.as_tensor(counted).to(self.device, dtype)
            except (TypeError, ValueError, RuntimeError):
                raise UsageError(
                    "Problem.count(batch) must return a number or a scalar tensor, got"
                    f" {type(counted).__name__}"
                ) from None
        return torch.tensor(float(len(next(tensor_leaves(batch)))), device=self.device, dtype=dtype)

    def batch(self, items: range, dtype: torch.dtype | None = None) -> Batch:
        """Return some of the items as one batch, floating-point tensors in `dtype` if given."""
        batch = Items(self.data).__getitems__(items)
        if dtype is None:
            return batch
        return to_dtype(batch, dtype)

    def drawn(self, items: int, dtype: torch.dtype) -> Batch:
        """Return a batch of newly drawn items, floating-point tensors in `dtype`."""
        batch = self.problem.batch(items, self.case.seed)
        return map_leaves(
            lambda t: t.to(self.device, dtype if t.is_floating_point() else t.dtype), batch
        )

    def loader(self, rank: int = 0) -> DataLoader[Any]:
        """Return a loader whose passes yield the plan's micro-batches of a rank in order."""
        plan = self.case.plan
        return loader_over(self.data, [plan.items(j) for j in plan.of_rank(rank)])

    def run(self, rank: int = 0) -> TrainingRun:
        """Return the argument of a loop, as one rank gets it."""
        model = self.model()
        loader = self.loader(rank)
        loss = AutocastRecorder(self.problem.loss, self.device)
        pairs = Pairs(loss)
        return TrainingRun(
            model=model,
            optimizer=optimizer_of(self.case.optimizer, model, self.case.groups),
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


def scaled_loss(instance: Instance, factor: float) -> Instance:
    """Return an instance whose loss is so many times as large."""
    problem = instance.problem
    larger = replace(problem, loss=lambda model, batch: factor * problem.loss(model, batch))
    return replace(instance, problem=larger, scale=instance.scale * factor)


def recounted(instance: Instance, count: Callable[[list[int]], float]) -> Instance:
    """Return a weight probe with a mean that divides by another count.

    The mean over a count of 0 is 0.

    Args:
        instance: a weight probe.
        count: what the mean over some items, given by their indices, divides by.
    """
    plan = instance.case.plan

    def count_batch(batch: Batch) -> torch.Tensor:
        return torch.tensor(count(batch["x"].reshape(-1).tolist()), dtype=torch.float64)

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        total = model(batch).sum()
        divisor = count_batch(batch)
        # 0 / 0 would be NaN, and its gradient too
        return total / divisor if divisor else 0 * total

    return replace(
        instance,
        problem=replace(instance.problem, loss=loss, count=count_batch),
        item_counts=tuple(count([i]) for i in range(plan.total_items)),
    )


def as_changed(instance: Instance, scale: float, item_counts: Sequence[float] | None) -> Instance:
    """Return an instance with the changes that another process has made to its own."""
    if item_counts is not None:
        counts = item_counts
        instance = recounted(instance, lambda indices: float(sum(counts[i] for i in indices)))
    return instance if scale == 1.0 else scaled_loss(instance, scale)


def instance_of(case: Case, problem: Problem | None) -> Instance:
    """Bring a case to life, of the user's problem where one is given and of its own generated one
    otherwise.
    """
    return generated_instance(case) if problem is None else user_instance(case, problem)


def generated_instance(case: Case) -> Instance:
    """Bring a generated case to life."""
    spec = case.spec
    if spec is None:
        name = case.problem_name
        raise UsageError(
            f"case {case.digest} is about the user's problem {name!r}: pass --problem {name}"
        )
    device = checked_device(case.device)
    dtype = torch_dtype(case.dtype)
    masked = np.zeros(case.plan.total_items, dtype=bool)
    for j in case.plan.masked:
        masked[case.plan.items(j).start : case.plan.items(j).stop] = True
    kind = checked_loss(spec)
    loss = spec.loss
    if case.plan.masked and not kind.maskable(loss.o):
        raise UsageError(
            f"plan masks micro-batches {case.plan.masked}, but the loss {loss!r} cannot ignore"
            " targets"
        )
    tensors = {
        name: torch.from_numpy(array) for name, array in draw_data(spec, case.seed, masked).items()
    }
    rounded = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    whole = needs_batch(spec)
    problem = Problem(
        # drawn in float64 and rounded later: a case has the same values in every dtype, up to its
        # rounding
        model=lambda seed: build_model(spec, seed, torch.float64),
        batch=lambda items, seed: Items(rounded).__getitems__(range(items)),
        loss=lambda model, batch: kind.torch_loss(
            loss.o, model(batch if whole else batch["x"]), batch, loss.reduction
        ),
        reduction=spec.loss.reduction,
        count=lambda batch: kind.count(loss.o, batch),
    )
    data = in_turns(rounded, case.distinct_items)
    arrays = {
        n: t.to(torch.float64).numpy() if t.is_floating_point() else t.numpy()
        for n, t in data.items()
    }
    # after `arrays`, which the references in numpy read
    data = {name: tensor.to(device) for name, tensor in data.items()}
    return Instance(
        case=case,
        problem=problem,
        data=data,
        arrays=arrays,
    )


def user_instance(case: Case, problem: Problem) -> Instance:
    """Bring a case of a user's problem to life: all of an epoch's items are asked for at once, then
    cut up.
    """
    device = checked_device(case.device)
    total = case.plan.total_items
    dtype = torch_dtype(case.dtype)
    # asked for once: a second call may draw other items for the same seed
    given = problem.batch(total, case.seed)
    data = map_leaves(
        lambda t: t.to(device, dtype) if t.is_floating_point() else t.to(device), given
    )
    tensors = list(tensor_leaves(data))
    if not tensors:
        raise UsageError(
            "Problem.batch must return tensors, in dicts, lists or tuples; got"
            f" {type(given).__name__} with none in it"
        )
    for tensor in tensors:
        # items are cut up along the first axis of every tensor
        if tensor.ndim == 0 or len(tensor) != total:
            raise UsageError(
                f"Problem.batch({total}, seed) must return tensors of leading dimension {total},"
                f" got one of shape {tuple(tensor.shape)}: slice or draw every tensor to the item"
                " count asked for, and pad items of different lengths to one tensor"
            )
    data = in_turns(data, case.distinct_items)
    return Instance(
        case=case,
        problem=problem,
        data=data,
        arrays=None,
        users_problem=problem,
    )
