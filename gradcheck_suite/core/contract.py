"""The loop contract: what a loop receives, what a user's problem provides, what a loop may assume.

torch appears in annotations only and is never imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from gradcheck_suite.core.case import OBJECTIVES, Objective, Plan
from gradcheck_suite.errors import UsageError

if TYPE_CHECKING:
    import jax
    import optax
    import torch
    from torch.utils.data import DataLoader


Batch = Any
Loop = Callable[[Any], None]
"""A training loop: it takes a `TrainingRun`, or a `JaxTrainingRun` if it is declared as a JAX loop."""
_LoopT = TypeVar("_LoopT", bound=Callable[..., Any])

EQUAL_MICRO_BATCHES = "equal-micro-batches"
EQUAL_BATCHES = "equal-batches"
PLAIN_COUNTS = "plain-counts"
WHOLE_WINDOWS = "whole-windows"
ONE_EPOCH = "one-epoch"
SUM_REDUCTION = "sum-reduction"
MEAN_REDUCTION = "mean-reduction"
DENSE_GRADIENTS = "dense-gradients"
FINITE_GRADIENTS = "finite-gradients"
BUSY_RANKS = "busy-ranks"
EVEN_RANKS = "even-ranks"
EDITS_PARAMETERS = "edits-parameters"
EDITS_SETTINGS = "edits-settings"
SCHEDULES_MICRO_BATCHES = "schedules-micro-batches"
NO_LAYER = "no-layer:"
ASSUMPTIONS = {
    EQUAL_MICRO_BATCHES: "every micro-batch of a window has the same count",
    EQUAL_BATCHES: "every micro-batch of the run has the same count",
    PLAIN_COUNTS: "every item has the same count: no ignored targets, no weights",
    WHOLE_WINDOWS: "no short last window",
    ONE_EPOCH: "one pass over the loader",
    SUM_REDUCTION: "the loss is a sum over items",
    MEAN_REDUCTION: "the loss is a mean over items",
    DENSE_GRADIENTS: "no sparse gradients",
    FINITE_GRADIENTS: "no gradient of a window is infinite or NaN",
    BUSY_RANKS: "every rank has a micro-batch in every window",
    EVEN_RANKS: "every rank has the same number of micro-batches",
    EDITS_PARAMETERS: (
        "the loop itself changes parameters between steps, as an average or clipping of weights"
        " does"
    ),
    EDITS_SETTINGS: "the loop itself changes settings of the optimizer, as a schedule by hand does",
    SCHEDULES_MICRO_BATCHES: "the learning rate schedule is meant to advance once per micro-batch",
    f"{NO_LAYER}KIND": "no layer of this kind, such as no-layer:embedding",
}
"""Assumption -> its meaning; KIND stands for the name of a layer kind."""
DECLARED = {
    EDITS_PARAMETERS: "gradients were judged at the parameters that each step found",
    EDITS_SETTINGS: "changes of the optimizer's settings were not judged",
    SCHEDULES_MICRO_BATCHES: "steps of schedulers were not judged",
}
"""Assumption that does not change which cases are drawn -> what is not judged because of it."""
AUTOCAST_DTYPES = ("bfloat16", "float16")
"""The dtypes in which a loop may declare that it computes its losses under `torch.autocast`."""


@dataclass(frozen=True)
class TrainingRun:
    """The argument of a loop: everything that it trains with.

    Attributes:
        model: a fresh `torch.nn.Module` in train mode, on `device`.
        optimizer: a `torch.optim.Optimizer` of the model's trainable parameters.
        loader: a `DataLoader`; one pass is one epoch and yields the micro-batches in order.
        loss: (model, batch) -> the scalar loss of a micro-batch, reduced over its items as
            `reduction` says.
        pairs: a `DataLoader` of the same micro-batches as pairs (x, y), whose loss is
            `criterion(model(x), y)`. Both are tensors where the batch has two tensors; otherwise
            they may be the whole batch.
        criterion: (output, y) -> the same loss, from what the model returns.
        count: batch -> a scalar tensor, the divisor of the mean: items, valid targets, or the sum
            of their weights.
        accumulation_steps: number of micro-batches in a window; the last window of an epoch may be
            shorter.
        epochs: number of passes over `loader`.
        reduction: `"mean"` or `"sum"`; `"batch"` if the objective is a function of the window's
            items in one batch.
        device: device of the model and the batches.
        dtype: dtype of the parameters.
        rank: index of this process among those that train together. `loader` yields this rank's
            micro-batches, and `count` is of one of them; the window is what all ranks together
            contribute to one step.
        world_size: number of processes that train together, in the default group of
            `torch.distributed`.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor]
    pairs: DataLoader[Any]
    criterion: Callable[[Any, Any], torch.Tensor]
    count: Callable[[Batch], torch.Tensor]
    accumulation_steps: int
    epochs: int
    reduction: Objective
    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class JaxTrainingRun:
    """The argument of a JAX loop: everything that it trains with.

    Attributes:
        params: a pytree of JAX arrays.
        optimizer: an `optax.GradientTransformation`. What reaches its `update` is judged; its
            updates are zeros, unless the case has an optimizer.
        batches: one pass is one epoch and yields the micro-batches in order, pytrees of JAX arrays
            with the items as leading dimension; `len` is their number.
        loss: (params, batch) -> the scalar loss of a micro-batch, reduced over its items as
            `reduction` says. It is pure: `jit`, `vmap`, `scan` and `grad` may be applied to it. The
            mean over no valid target is 0.
        count: batch -> a scalar array, the divisor of the mean: items, valid targets, or the sum of
            their weights. Pure as well.
        accumulation_steps: number of micro-batches in a window; the last window of an epoch may be
            shorter.
        epochs: number of passes over `batches`.
        reduction: `"mean"` or `"sum"`; `"batch"` if the objective is a function of the window's
            items in one batch.
        dtype: dtype of the parameters.
    """

    params: Any
    optimizer: optax.GradientTransformation
    batches: Iterable[Batch]
    loss: Callable[[Any, Batch], jax.Array]
    count: Callable[[Batch], jax.Array]
    accumulation_steps: int
    epochs: int
    reduction: Objective
    dtype: Any


@dataclass(frozen=True)
class Problem:
    """A user's problem: a model, a source of items and a loss.

    For a JAX loop the model is a pytree of arrays, and the batch and the loss consist of arrays,
    too.

    Attributes:
        model: seed -> a fresh module; the same seed gives the same parameter values.
        batch: (items, seed) -> a pytree (dict, list, tuple) of tensors whose leading dimension is
            `items`.
        loss: (model, batch) -> a scalar tensor, reduced over the items as `reduction` says.
        reduction: `"mean"` or `"sum"`, or `"batch"` if the objective is no sum over items
            (contrastive losses, statistics of the batch): loops are then held to the loss of the
            window's items in one batch.
        count: batch -> the divisor of the mean; None if it is the number of items.

    Raises:
        UsageError: a function is not callable with these arguments, or the reduction is unknown.
    """

    model: Callable[[int], torch.nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor]
    reduction: Objective = "mean"
    count: Callable[[Batch], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "batch", "loss"):
            if not callable(getattr(self, name)):
                raise UsageError(
                    f"Problem: {name} must be callable, got {type(getattr(self, name)).__name__}"
                )
        if self.count is not None and not callable(self.count):
            raise UsageError(
                f"Problem: count must be callable or None, got {type(self.count).__name__}"
            )
        for name, wanted in _ARGUMENTS.items():
            _expect_arguments(name, getattr(self, name), wanted)
        if self.reduction not in OBJECTIVES:
            raise UsageError(
                f"Problem: reduction must be one of {', '.join(OBJECTIVES)}; got {self.reduction!r}"
            )


_ARGUMENTS = {
    "model": ("seed",),
    "batch": ("items", "seed"),
    "loss": ("model", "batch"),
    "count": ("batch",),
}


def signature_of(function: Any) -> inspect.Signature:
    """Return a function's signature.

    Its annotations may name what only a type checker imports, as Python 3.14 allows (PEP 649):
    they are not evaluated.

    Raises:
        TypeError: the object is not callable, or
        ValueError: has no signature, as some callables written in C.
    """
    if sys.version_info >= (3, 14):
        # a new module of Python 3.14, which evaluates annotations when they are asked for
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def expect_plain_function(found: Any, called: str, expected: str, *arguments: object) -> None:
    """Refuse what is no plain function of so many arguments.

    Args:
        found: that is to be one.
        called: how the message calls it.
        expected: the function in words.
        arguments: as many as the function is called with.

    Raises:
        UsageError: it cannot be called, runs nothing when it is, or takes other arguments.
    """
    if not callable(found):
        raise UsageError(f"{called} is of type {type(found).__name__}: expected {expected}")
    # a coroutine that is called and not awaited does nothing, and every case would hold
    if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
        raise UsageError(
            f"{called} is an async function, and calling it runs nothing: expected a plain function"
        )
    if inspect.isgeneratorfunction(found):
        raise UsageError(
            f"{called} is a generator (it contains yield), and calling it runs nothing: remove the"
            " yield"
        )
    # asked before the call, where a TypeError may as well come from inside of the function
    refusing = _signature_that_refuses(found, arguments)
    if refusing is not None:
        name = called.rpartition(":")[2]
        shown = "a class" if isinstance(found, type) else f"{name}{refusing}"
        raise UsageError(f"{called} is {shown}: expected {expected}")


def _signature_that_refuses(found: Any, arguments: Iterable[Any]) -> inspect.Signature | None:
    """Return the signature of what cannot be called with some arguments, None where it can be."""
    try:
        signature = signature_of(found)
    except (TypeError, ValueError):
        return None  # some callables written in C have no signature: the call itself fails then
    try:
        signature.bind(*arguments)
    except TypeError:
        return signature
    return None


LOOP_EXPECTED = "a function of one argument, the TrainingRun"


def expect_loop(loop: Any) -> None:
    """Refuse what is no loop.

    Raises:
        UsageError: it is none.
    """
    # `isinstance` would ask a lazy object for its class, and import what it stands for
    if issubclass(type(loop), Problem):
        raise UsageError("got a Problem, not a loop: pass it as `problem`")
    called = getattr(loop, "__qualname__", None) or f"the loop {loop!r}"
    expect_plain_function(loop, called, LOOP_EXPECTED, object())


def _expect_arguments(name: str, function: Any, wanted: tuple[str, ...]) -> None:
    """Raise `UsageError` if a function does not take these arguments."""
    # a plain function tells at once; a signature takes 30 times as long to find out more
    code = function.__code__ if isinstance(function, FunctionType) else None
    if function is None or (
        code and (code.co_argcount, code.co_kwonlyargcount) == (len(wanted), 0)
    ):
        return
    refusing = _signature_that_refuses(function, wanted)
    if refusing is not None:
        shown = f"{getattr(function, '__name__', type(function).__name__)}{refusing}"
        raise UsageError(
            f"Problem: {name} is called as {name}({', '.join(wanted)}), and {shown} does not take"
            " these arguments"
        )


def is_assumption(name: Any) -> bool:
    """Return whether a value is the name of an assumption."""
    # a layer may be one that the user has registered, which is not known here
    return isinstance(name, str) and (
        name in ASSUMPTIONS or (name.startswith(NO_LAYER) and name != NO_LAYER)
    )


def checked_assumptions(names: Iterable[str]) -> frozenset[str]:
    """Return the names as a set, with those that they imply.

    Raises:
        UsageError: a name is unknown, or two names exclude each other.
    """
    # a string is an iterable of its letters
    if isinstance(names, str):
        raise UsageError(
            f"assumes must be a tuple of names such as ({names!r},), got the string {names!r}"
        )
    chosen = frozenset(names)
    if unknown := sorted(name for name in chosen if not is_assumption(name)):
        raise UsageError(
            f"assumption must be one of {', '.join(ASSUMPTIONS)}; got"
            f" {', '.join(map(repr, unknown))}"
        )
    if chosen >= {SUM_REDUCTION, MEAN_REDUCTION}:
        raise UsageError(
            f"{MEAN_REDUCTION} and {SUM_REDUCTION} exclude each other: assume one of them"
        )
    if EQUAL_BATCHES in chosen:
        chosen |= {EQUAL_MICRO_BATCHES}
    if EVEN_RANKS in chosen:
        chosen |= {BUSY_RANKS}
    return chosen


def excluded_layers(assumes: Iterable[str]) -> frozenset[str]:
    """Return the layer kinds that a loop's assumptions exclude."""
    return frozenset(name.removeprefix(NO_LAYER) for name in assumes if name.startswith(NO_LAYER))


def expect_within(
    problem: Problem, assumes: frozenset[str], *, loop: str = "the loop", name: str = "problem"
) -> None:
    """Raise `UsageError` if a user's problem contradicts what a loop assumes.

    Args:
        problem: the user's problem.
        assumes: what the loop assumes, names from `ASSUMPTIONS`.
        loop: the name of the loop in the message.
        name: the name of the problem in the message.
    """
    for assumption, reduction in ((SUM_REDUCTION, "sum"), (MEAN_REDUCTION, "mean")):
        if assumption in assumes and problem.reduction != reduction:
            raise UsageError(
                f"{loop} assumes {assumption}, but the reduction of {name} is"
                f" {problem.reduction!r}: drop the assumption or pass a problem with"
                f" reduction={reduction!r}"
            )
    if PLAIN_COUNTS in assumes and problem.count is not None:
        raise UsageError(
            f"{loop} assumes {PLAIN_COUNTS}, but {name} has a count of its own: drop the"
            " assumption, or leave Problem.count out if every item counts once"
        )


def checked_autocast(name: str | None) -> str | None:
    """Return the name of an autocast dtype, or None; raise `UsageError` for another value."""
    if name is not None and name not in AUTOCAST_DTYPES:
        raise UsageError(f"autocast must be one of {', '.join(AUTOCAST_DTYPES)}; got {name!r}")
    return name


def training_loop(
    *, assumes: Iterable[str] = (), autocast: str | None = None
) -> Callable[[_LoopT], _LoopT]:
    """Declare what a loop assumes, and in which lower precision it computes its losses.

    Args:
        assumes: names from `ASSUMPTIONS`, such as `"equal-micro-batches"`; only plans and problems
            that satisfy them are drawn.
        autocast: `"bfloat16"` or `"float16"` for a loop that computes its losses under
            `torch.autocast` in this dtype; its gradients are then held to this dtype's rounding
            errors.
    """
    chosen = checked_assumptions(assumes)
    declared = checked_autocast(autocast)

    def mark(loop: _LoopT) -> _LoopT:
        loop.assumes = chosen  # type: ignore[attr-defined]
        loop.autocast = declared  # type: ignore[attr-defined]
        return loop

    return mark


@overload
def jax_training_loop(loop: _LoopT, *, assumes: Iterable[str] = ()) -> _LoopT: ...


@overload
def jax_training_loop(
    loop: None = None, *, assumes: Iterable[str] = ()
) -> Callable[[_LoopT], _LoopT]: ...


def jax_training_loop(loop: Any = None, *, assumes: Iterable[str] = ()) -> Any:
    """Declare a JAX loop, which takes a `JaxTrainingRun`, and what it assumes.

    Use it with or without arguments: `@jax_training_loop`,
    `@jax_training_loop(assumes=("whole-windows",))`.

    Args:
        loop: the loop.
        assumes: as for `training_loop`.
    """
    declare = training_loop(assumes=assumes)

    def mark(loop: _LoopT) -> _LoopT:
        loop = declare(loop)
        loop.framework = "jax"  # type: ignore[attr-defined]
        return loop

    return mark if loop is None else mark(loop)


def is_jax(loop: Loop) -> bool:
    """Return whether a loop is declared as a JAX loop."""
    return getattr(loop, "framework", None) == "jax"


def assumptions_of(loop: Loop) -> frozenset[str]:
    """Return the assumptions that a loop declares."""
    return frozenset(getattr(loop, "assumes", ()))


def autocast_of(loop: Loop) -> str | None:
    """Return the autocast dtype that a loop declares, or None."""
    return getattr(loop, "autocast", None)


DEFAULT_TIME_LIMIT = 30.0
"""Seconds that the loop may take on one case; a generated case takes milliseconds."""


# Fixed plans dealt to several ranks, within what a loop assumes.


ITEMS_OF_RANKS = (1, 3, 4, 8)
"""How many times as many items as rank 0 each rank has: together 4, 8 and 16 times as many, powers of two."""


def dealt_to_ranks(
    plan: Plan, ranks: int, assumes: Collection[str], *, uneven: bool = False
) -> Plan:
    """Return a plan for several ranks: each has the micro-batches of a plan of one rank, in sizes
    of its own.

    Args:
        plan: a plan of one rank, within the assumptions.
        ranks: number of ranks.
        assumes: what the loop assumes.
        uneven: whether the last rank has fewer micro-batches in the last window, or none, as the
            assumptions allow.
    """
    if ranks == 1:
        return plan
    count = len(plan.micro_batches)
    shares = [count] * ranks
    if uneven and EVEN_RANKS not in assumes:
        last = plan.windows[-1]
        # each rank keeps one micro-batch in all, since a rank without any is no rank
        shares[-1] -= min(len(last) - (BUSY_RANKS in assumes), count - 1)
    factors = (1,) * ranks if EQUAL_MICRO_BATCHES in assumes else ITEMS_OF_RANKS
    # as in `Plan.select`: a plan of ones says which rank comes when
    owners = Plan((1,) * sum(shares), plan.accumulation_steps, ranks=tuple(shares)).owners
    own = [iter([n * factor for n in plan.micro_batches]) for factor in factors]
    return plan.replace(
        micro_batches=tuple(next(own[rank]) for rank in owners), ranks=tuple(shares)
    )
