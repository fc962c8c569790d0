"""The loop contract: what a loop receives, what a user's problem provides, what a loop may assume.

torch appears in annotations only and is never imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, overload

from gradcheck_suite.core.case import DEVICES, DTYPES, OBJECTIVES, Objective, Plan, is_integer
from gradcheck_suite.core.faults import current_name
from gradcheck_suite.errors import UsageError

if TYPE_CHECKING:
    import jax
    import optax
    import torch
    from torch.utils.data import DataLoader


Batch = Any
Loop = Callable[[Any], None]
"""A training loop: it takes a `TrainingRun`, or a `JaxTrainingRun` where it is declared as a JAX loop."""
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
    EDITS_PARAMETERS: "the loop itself changes parameters between steps, as an average or clipping of weights does",
    EDITS_SETTINGS: "the loop itself changes settings of the optimizer, as a schedule by hand does",
    SCHEDULES_MICRO_BATCHES: "the learning rate schedule is meant to advance once per micro-batch",
    f"{NO_LAYER}KIND": "no layer of this kind, such as no-layer:embedding",
}
"""Every assumption and its meaning; KIND stands for the name of a layer kind."""
DECLARED = {
    EDITS_PARAMETERS: "gradients were judged at the parameters that each step found",
    EDITS_SETTINGS: "changes of the optimizer's settings were not judged",
    SCHEDULES_MICRO_BATCHES: "steps of schedulers were not judged",
}
"""The assumptions under which the same cases are drawn, and what is not judged because of them."""
AUTOCAST_DTYPES = ("bfloat16", "float16")
"""The dtypes in which a loop may declare that it computes its losses under `torch.autocast`."""


@dataclass(frozen=True)
class TrainingRun:
    """The argument of a loop: everything that it trains with.

    Attributes:
        model: a fresh `torch.nn.Module` in train mode, on `device`.
        optimizer: a `torch.optim.Optimizer` of the model's trainable parameters.
        loader: a `DataLoader`; one pass is one epoch and yields the micro-batches in order.
        loss: (model, batch) -> the scalar loss of a micro-batch, reduced over its items as `reduction` says.
        pairs: a `DataLoader` of the same micro-batches as pairs (x, y), whose loss is `criterion(model(x), y)`. Both
            are tensors where the batch has two tensors; otherwise they may be the whole batch.
        criterion: (output, y) -> the same loss, from what the model returns.
        count: batch -> a scalar tensor, the divisor of the mean: items, valid targets, or the sum of their weights.
        accumulation_steps: number of micro-batches in a window; the last window of an epoch may be shorter.
        epochs: number of passes over `loader`.
        reduction: `"mean"` or `"sum"`; `"batch"` if the objective is a function of the window's items in one batch.
        device: device of the model and the batches.
        dtype: dtype of the parameters.
        rank: index of this process among those that train together. `loader` yields this rank's micro-batches, and
            `count` is of one of them; the window is what all ranks together contribute to one step.
        world_size: number of processes that train together, in the default group of `torch.distributed`.
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
    """The argument of a loop of JAX: everything that it trains with.

    Attributes:
        params: a pytree of JAX arrays.
        optimizer: an `optax.GradientTransformation`. What reaches its `update` is judged; its updates are zeros, unless
            the case has an optimizer.
        batches: one pass is one epoch and yields the micro-batches in order, pytrees of JAX arrays with the items as
            leading dimension; `len` is their number.
        loss: (params, batch) -> the scalar loss of a micro-batch, reduced over its items as `reduction` says. It is
            pure: `jit`, `vmap`, `scan` and `grad` may be applied to it. The mean over no valid target is 0.
        count: batch -> a scalar array, the divisor of the mean: items, valid targets, or the sum of their weights. Pure
            as well.
        accumulation_steps: number of micro-batches in a window; the last window of an epoch may be shorter.
        epochs: number of passes over `batches`.
        reduction: `"mean"` or `"sum"`; `"batch"` if the objective is a function of the window's items in one batch.
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

    For a loop of JAX the model is a pytree of arrays, and the batch and the loss are made of arrays as well.

    Attributes:
        model: seed -> a fresh module; the same seed gives the same parameter values.
        batch: (items, seed) -> a pytree (dict, list, tuple) of tensors whose leading dimension is `items`.
        loss: (model, batch) -> a scalar tensor, reduced over the items as `reduction` says.
        reduction: `"mean"` or `"sum"`, or `"batch"` if the objective is no sum over items (contrastive losses,
            statistics of the batch): loops are then held to the loss of the window's items in one batch.
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
                raise UsageError(f"Problem: {name} must be callable, got {type(getattr(self, name)).__name__}")
        if self.count is not None and not callable(self.count):
            raise UsageError(f"Problem: count must be callable or None, got {type(self.count).__name__}")
        for name, wanted in _ARGUMENTS.items():
            _expect_arguments(name, getattr(self, name), wanted)
        if self.reduction not in OBJECTIVES:
            raise UsageError(f"Problem: reduction must be one of {', '.join(OBJECTIVES)}; got {self.reduction!r}")


_ARGUMENTS = {"model": ("seed",), "batch": ("items", "seed"), "loss": ("model", "batch"), "count": ("batch",)}


def _expect_arguments(name: str, function: Any, wanted: tuple[str, ...]) -> None:
    """Raise `UsageError` for a function that does not take these arguments."""
    # a plain function tells at once; a signature takes 30 times as long to find out more
    code = function.__code__ if isinstance(function, FunctionType) else None
    if function is None or (code and (code.co_argcount, code.co_kwonlyargcount) == (len(wanted), 0)):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some callables written in C have no signature: the call itself fails then
    try:
        signature.bind(*wanted)
    except TypeError:
        shown = f"{getattr(function, '__name__', type(function).__name__)}{signature}"
        raise UsageError(
            f"Problem: {name} is called as {name}({', '.join(wanted)}), and {shown} does not take these arguments"
        ) from None


def checked_assumptions(names: Iterable[str]) -> frozenset[str]:
    """Return the names as a set; `UsageError` lists unknown names."""
    if isinstance(names, str):
        raise UsageError(f"assumes must be a tuple of names such as ({names!r},), got the string {names!r}")
    chosen = frozenset(names)
    known = {name for name in chosen if name in ASSUMPTIONS or (name.startswith(NO_LAYER) and name != NO_LAYER)}
    if unknown := sorted(chosen - known):
        raise UsageError(f"assumption must be one of {', '.join(ASSUMPTIONS)}; got {', '.join(map(repr, unknown))}")
    if chosen >= {SUM_REDUCTION, MEAN_REDUCTION}:
        raise UsageError(f"{MEAN_REDUCTION} and {SUM_REDUCTION} exclude each other: assume one of them")
    if EQUAL_BATCHES in chosen:
        chosen |= {EQUAL_MICRO_BATCHES}
    if EVEN_RANKS in chosen:
        chosen |= {BUSY_RANKS}
    return chosen


def excluded_layers(assumes: Iterable[str]) -> frozenset[str]:
    """Return the layer kinds that a loop's assumptions exclude."""
    return frozenset(name.removeprefix(NO_LAYER) for name in assumes if name.startswith(NO_LAYER))


def expect_within(problem: Problem, assumes: frozenset[str], *, loop: str = "the loop", name: str = "problem") -> None:
    """Raise `UsageError` where a user's problem contradicts what a loop assumes.

    Args:
        problem: of the user.
        assumes: of the loop, names from `ASSUMPTIONS`.
        loop: the name of the loop in the message.
        name: the name of the problem in the message.
    """
    for assumption, reduction in ((SUM_REDUCTION, "sum"), (MEAN_REDUCTION, "mean")):
        if assumption in assumes and problem.reduction != reduction:
            raise UsageError(
                f"{loop} assumes {assumption}, but the reduction of {name} is {problem.reduction!r}: "
                f"drop the assumption or pass a problem with reduction={reduction!r}"
            )
    if PLAIN_COUNTS in assumes and problem.count is not None:
        raise UsageError(
            f"{loop} assumes {PLAIN_COUNTS}, but {name} has a count of its own: drop the assumption, or leave "
            "Problem.count out if every item counts once"
        )


def checked_autocast(name: str | None) -> str | None:
    """Return the dtype, or None for none; `UsageError` for another value."""
    if name is not None and name not in AUTOCAST_DTYPES:
        raise UsageError(f"autocast must be one of {', '.join(AUTOCAST_DTYPES)}; got {name!r}")
    return name


def training_loop(*, assumes: Iterable[str] = (), autocast: str | None = None) -> Callable[[_LoopT], _LoopT]:
    """Declare what a loop assumes, and in which lower precision it computes its losses.

    Args:
        assumes: names from `ASSUMPTIONS`, such as `"equal-micro-batches"`; only plans and problems that satisfy them
            are drawn.
        autocast: `"bfloat16"` or `"float16"` for a loop that computes its losses under `torch.autocast` in this dtype;
            its gradients are then held to this dtype's rounding errors.
    """
    chosen, declared = checked_assumptions(assumes), checked_autocast(autocast)

    def mark(loop: _LoopT) -> _LoopT:
        loop.assumes = chosen  # type: ignore[attr-defined]
        loop.autocast = declared  # type: ignore[attr-defined]
        return loop

    return mark


@overload
def jax_training_loop(loop: _LoopT, *, assumes: Iterable[str] = ()) -> _LoopT: ...


@overload
def jax_training_loop(loop: None = None, *, assumes: Iterable[str] = ()) -> Callable[[_LoopT], _LoopT]: ...


def jax_training_loop(loop: Any = None, *, assumes: Iterable[str] = ()) -> Any:
    """Declare a loop of JAX, which takes a `JaxTrainingRun`, and what it assumes.

    It decorates with or without arguments: `@jax_training_loop`, `@jax_training_loop(assumes=("whole-windows",))`.

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
    """Return whether a loop is declared as one of JAX."""
    return getattr(loop, "framework", None) == "jax"


def assumptions_of(loop: Loop) -> frozenset[str]:
    """Return the assumptions that a loop declares."""
    return frozenset(getattr(loop, "assumes", ()))


def autocast_of(loop: Loop) -> str | None:
    """Return the dtype of the autocast that a loop declares, or None."""
    return getattr(loop, "autocast", None)


# How a loop is verified: the options that the command line, the pytest plugin and Python share.


OPTIMIZER_NAMES = (
    *("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "adadelta", "adamax", "nadam", "radam"),
    *("rprop", "asgd", "adafactor", "lbfgs", "muon", "sparseadam", "normalized"),
)
"""The names of `optimizers.OPTIMIZERS`, which cannot be imported without torch; a test holds the two equal."""
MAX_RANKS = 4
"""Ranks that a verification may start on one machine."""
DEFAULT_TIME_LIMIT = 30.0
"""Seconds that the loop may take on one case; a generated case takes milliseconds."""
SECOND_OPINION_S = 60.0
"""Seconds that one verification spends on JAX's second opinion."""


BY_FRAMEWORK = {"torch": (200, "float64"), "jax": (50, "float32")}
"""Cases and dtype of a verification where neither is asked for, by the framework of the loop."""


@dataclass(frozen=True)
class VerifyOptions:
    """What one verification draws, and how long it may take.

    Attributes:
        examples: number of cases to draw, at least 1; None for 200, and for 50 of a loop of JAX, which compiles each.
        seed: seed of the drawn cases; the same seed and versions draw the same cases.
        dtype: dtype of parameters and data, one of `DTYPES`; None for float64, and for float32 of a loop of JAX, since
            optax accumulates in float32 unless it is told otherwise.
        device: `"cpu"` or `"cuda"`.
        ranks: number of processes of `torch.distributed` that train together, 1 to `MAX_RANKS`.
        optimizer: one of `OPTIMIZER_NAMES`, for a loop of JAX `normalized` or a factory of optax; None for one whose
            step changes nothing, in some cases `normalized`.
        assumes: names from `ASSUMPTIONS`, in addition to those that the loop declares.
        autocast: dtype in which the loop may compute its losses under `torch.autocast`, one of `AUTOCAST_DTYPES`; None
            for what the loop declares.
        time_limit_s: time limit of the loop on one case, in seconds; None for no limit.
        quiet_loop: whether to discard what the loop prints.
        second_opinion_s: seconds after which JAX computes no further window of a user's problem. It computes at least
            one window.

    Raises:
        UsageError: a value is out of range.
    """

    examples: int | None = None
    seed: int = 0
    dtype: str | None = None
    device: str = "cpu"
    optimizer: str | None = None
    assumes: tuple[str, ...] = ()
    autocast: str | None = None
    time_limit_s: float | None = DEFAULT_TIME_LIMIT
    second_opinion_s: float = SECOND_OPINION_S
    quiet_loop: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "assumes", tuple(sorted(checked_assumptions(self.assumes))))
        checked_autocast(self.autocast)
        if not isinstance(self.quiet_loop, bool):
            raise UsageError(f"quiet_loop must be True or False, got {self.quiet_loop!r}")
        if self.examples is not None and (not is_integer(self.examples) or self.examples < 1):
            raise UsageError(f"examples must be a positive integer, got {self.examples!r}")
        if not is_integer(self.ranks) or not 1 <= self.ranks <= MAX_RANKS:
            raise UsageError(f"ranks must be a number from 1 to {MAX_RANKS}, got {self.ranks!r}")
        if not is_integer(self.seed):
            raise UsageError(f"seed must be an integer, got {self.seed!r}")
        if not isinstance(self.optimizer, str | None):
            raise UsageError(f"optimizer must be a name or None, got {self.optimizer!r}")
        for name, allowed in (("dtype", (None, *DTYPES)), ("device", DEVICES)):
            if (value := getattr(self, name)) not in allowed:
                raise UsageError(f"{name} must be one of {', '.join(filter(None, allowed))}; got {value!r}")
        if self.time_limit_s is not None and not (_is_number(self.time_limit_s) and self.time_limit_s > 0):
            raise UsageError(f"time_limit_s must be a positive number of seconds or None, got {self.time_limit_s!r}")
        if not (_is_number(self.second_opinion_s) and self.second_opinion_s >= 0):
            raise UsageError(f"second_opinion_s must be a number of seconds, 0 or more, got {self.second_opinion_s!r}")

    def of(self, loop: Loop) -> ChosenOptions:
        """Return the options of a loop, with a number of cases and a dtype.

        Raises:
            UsageError: no optimizer of torch has the name, and the loop is one of torch.
        """
        if not is_jax(loop) and self.optimizer not in (None, *OPTIMIZER_NAMES):
            raise UsageError(f"optimizer must be one of {', '.join(OPTIMIZER_NAMES)}; got {self.optimizer!r}")
        examples, dtype = BY_FRAMEWORK["jax" if is_jax(loop) else "torch"]
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return ChosenOptions(**{**chosen, "examples": self.examples or examples, "dtype": self.dtype or dtype})

    def replace(self, **changes: Any) -> Self:
        """Return the options with some fields changed; `UsageError` names a field that does not exist."""
        names = [field.name for field in fields(self)]
        if unknown := sorted(changes.keys() - set(names)):
            raise UsageError(f"expected some of {', '.join(names)}; got {', '.join(unknown)}")
        return replace(self, **changes)


@dataclass(frozen=True)
class ChosenOptions(VerifyOptions):
    """The options of one loop: none of them is left open."""

    examples: int = 0
    dtype: str = ""


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or is_integer(value)


# Fixed plans dealt to several ranks, within what a loop assumes.


ITEMS_OF_RANKS = (1, 3, 4, 8)
"""How many times as many items as rank 0 each rank has: together 4, 8 and 16 times as many, powers of two."""


def dealt_to_ranks(plan: Plan, ranks: int, assumes: Collection[str], *, uneven: bool = False) -> Plan:
    """Return a plan in which every rank has micro-batches like those of a plan of one rank, but of other sizes.

    Args:
        plan: of one rank, within the assumptions.
        ranks: number of ranks.
        assumes: what the loop assumes.
        uneven: whether the last rank has fewer micro-batches in the last window, or none, as the assumptions allow.
    """
    if ranks == 1:
        return plan
    count = len(plan.micro_batches)
    shares = [count] * ranks
    if uneven and EVEN_RANKS not in assumes:
        last = plan.windows[-1]
        shares[-1] -= min(len(last) - (BUSY_RANKS in assumes), count - 1)
    factors = (1,) * ranks if EQUAL_MICRO_BATCHES in assumes else ITEMS_OF_RANKS
    owners = Plan((1,) * sum(shares), plan.accumulation_steps, ranks=tuple(shares)).owners
    own = [iter([n * factor for n in plan.micro_batches]) for factor in factors]
    return plan.replace(micro_batches=tuple(next(own[rank]) for rank in owners), ranks=tuple(shares))


# The options of an audit.


INSTRUMENTS = ("weights", "sums", "batch")
"""What can be switched off by `without`: the weights of items, the sums of arrivals, the window again in one batch."""


class AuditFields(TypedDict, total=False):
    """The fields of `AuditOptions`, by name."""

    steps: int | None
    every: int
    accept: tuple[str, ...]
    accumulation_steps: int | None
    without: tuple[str, ...]
    stop_on_violation: bool
    jax: bool
    eager: bool
    objectives: tuple[str, ...]


@dataclass(frozen=True)
class AuditOptions:
    """How a run is audited.

    Attributes:
        steps: number of optimizer steps to judge; None for all.
        every: the first window and every `every`-th after it are computed again.
        accept: diagnoses that are reported as accepted and not as violations: `NAME`, or `NAME@FILE:LINE` for one
            place.
        accumulation_steps: K, where the user states it.
        without: instruments that are switched off.
        stop_on_violation: whether the first violation ends the run.
        jax: whether JAX is asked about the first window that is computed again.
        eager: whether what `torch.compile` compiles runs eagerly, so that its losses can be read.
        objectives: `FILE:LINE=COUNT`: what the mean divides by of the loss that goes backward at a line, an expression
            of the names there.
    """

    steps: int | None = None
    every: int = 10
    accept: tuple[str, ...] = ()
    accumulation_steps: int | None = None
    without: tuple[str, ...] = ()
    stop_on_violation: bool = False
    jax: bool = False
    eager: bool = False
    objectives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "every", "accumulation_steps"):
            value = getattr(self, name)
            if value is None and name != "every":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"audit: {name} must be a positive integer, got {value!r}")
        for name in ("accept", "without", "objectives"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if wrong := sorted(set(self.without) - set(INSTRUMENTS)):
            raise UsageError(f"audit: without takes {', '.join(INSTRUMENTS)}; got {wrong[0]!r}")
        for given in self.objectives:
            place, _, count = given.partition("=")
            if not count or not place.rpartition(":")[2].isdigit():
                raise UsageError(
                    f"audit: objectives takes FILE:LINE=COUNT, such as 'train.py:40=mask.sum()'; got {given!r}"
                )
        if self.jax and "batch" in self.without:
            raise UsageError("audit: JAX is asked about a window that is computed again, so leave `batch` switched on")

    def accepts(self, diagnosis: str, where: str | None) -> bool:
        """Return whether a violation is accepted."""
        for accepted in self.accept:
            name, _, place = accepted.partition("@")
            places = (where or "").split(" < ")
            here = not place or any(one == place or one.endswith("/" + place) for one in places)
            if here and current_name(name) == diagnosis:
                return True
        return False


def _names(option: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable):
        raise UsageError(f"audit: {option} takes names, got {given!r}")
    return tuple(str(name) for name in given)
