"""A case as plain data: the spec of a problem, the plan of micro-batches and windows, and the
weight probe.

Must import neither torch nor JAX, and of this package only `errors`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, Literal

from gradcheck_suite.errors import UsageError

# Specs: generated problems as data, made of an input, a chain of layers and a loss.
#
# Hypothesis shrinks and prints specs, and they convert to and from JSON, so they contain no module
# and no tensor. The catalogue implements them in torch and in JAX.


Scalar = bool | int | float | str | None
Reduction = Literal["mean", "sum"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum")
Objective = Literal["mean", "sum", "batch"]
"""A reduction over items, or `"batch"`: a function of a whole window that is no sum over items."""
OBJECTIVES: tuple[Objective, ...] = (*REDUCTIONS, "batch")


def _freeze(options: Mapping[str, Any], where: str) -> tuple[tuple[str, Scalar], ...]:
    for name, value in options.items():
        if name in ("kind", "layers"):
            raise UsageError(
                f"{where}: option {name!r} has a name that JSON uses for something else; choose"
                " another"
            )
        if not isinstance(value, bool | int | float | str | None):
            raise UsageError(
                f"{where}: option {name!r} must be a bool, int, float, str or None, got"
                f" {type(value).__name__}"
            )
    # sorted, so that equal specs are equal whatever the order of their options: digests rest on it
    return tuple(sorted(options.items()))


@dataclass(frozen=True, init=False, repr=False)
class _Spec:
    """The name of a kind and its options. Base of `Input`, `Layer` and `Loss`."""

    kind: str
    options: tuple[tuple[str, Scalar], ...]

    def __init__(self, kind: str, /, **options: Scalar) -> None:
        if not isinstance(kind, str):
            raise UsageError(
                f"{type(self).__name__}: kind must be a string, got {type(kind).__name__}"
            )
        # the class is frozen
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "options", _freeze(options, f"{type(self).__name__}({kind!r})"))

    @property
    def o(self) -> Mapping[str, Any]:
        """The options by name."""
        return MappingProxyType(dict(self.options))

    def _arguments(self) -> list[str]:
        return [repr(self.kind), *(f"{name}={value!r}" for name, value in self.options)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._arguments())})"

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON-ready data."""
        return {"kind": self.kind, **dict(self.options)}


class Input(_Spec):
    """A source of items: `Input("vector", size=3)`, `Input("tokens", length=3, vocabulary=5)`..."""


class Loss(_Spec):
    """A loss with its options and its `reduction`: `Loss("cross_entropy", reduction="mean")`."""

    @property
    def reduction(self) -> Reduction:
        """How the item losses are reduced: `"mean"` or `"sum"`."""
        reduction: Reduction = self.o.get("reduction", "mean")
        return reduction


@dataclass(frozen=True, init=False, repr=False)
class Layer(_Spec):
    """A layer with its options, and the inner layers of a kind that wraps others.

    `Layer("linear", features=2)`, `Layer("residual", Layer("tanh"))`.
    """

    layers: tuple[Layer, ...]

    def __init__(self, kind: str, /, *layers: Layer, **options: Scalar) -> None:
        super().__init__(kind, **options)
        for layer in layers:
            if not isinstance(layer, Layer):
                raise UsageError(
                    f"Layer({kind!r}): inner layers must be Layer, got {type(layer).__name__}"
                )
        # the class is frozen
        object.__setattr__(self, "layers", tuple(layers))

    def _arguments(self) -> list[str]:
        kind, *options = super()._arguments()
        return [kind, *(repr(layer) for layer in self.layers), *options]

    def to_json(self) -> dict[str, Any]:
        """Return the layer and its inner layers as JSON-ready data."""
        inner = {"layers": [layer.to_json() for layer in self.layers]} if self.layers else {}
        return {**super().to_json(), **inner}


Tie = tuple[str, str]


@dataclass(frozen=True, repr=False)
class ProblemSpec:
    """A generated problem.

    Attributes:
        input: the source of items.
        layers: the model: a chain of layers.
        loss: the loss of the model's output.
        ties: modules or parameters under a second name: pairs of that name and the first one, such
            as `("2.weight", "0.weight")`; the first one is of an earlier layer.
    """

    input: Input
    layers: tuple[Layer, ...]
    loss: Loss
    ties: tuple[Tie, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "ties", tuple(map(_checked_tie, self.ties)))
        if not isinstance(self.input, Input) or not isinstance(self.loss, Loss):
            raise UsageError("ProblemSpec: expected an Input, a sequence of Layer and a Loss")
        for layer in self.layers:
            if not isinstance(layer, Layer):
                raise UsageError(f"ProblemSpec: layers must be Layer, got {type(layer).__name__}")

    @property
    def layer_kinds(self) -> list[str]:
        """The kinds of all layers, in the model's order; a layer comes before those inside it."""

        def walk(layers: Iterable[Layer]) -> Iterator[str]:
            for layer in layers:
                yield layer.kind
                yield from walk(layer.layers)

        return list(walk(self.layers))

    def __repr__(self) -> str:
        ties = f", ties={self.ties!r}" if self.ties else ""
        return (
            f"ProblemSpec(input={self.input!r}, layers={self.layers!r}, loss={self.loss!r}{ties})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the problem as JSON-ready data.

        Without ties where there are none, so that digests stay.
        """
        return {
            "input": self.input.to_json(),
            "layers": [layer.to_json() for layer in self.layers],
            "loss": self.loss.to_json(),
            **({"ties": [list(tie) for tie in self.ties]} if self.ties else {}),
        }


def _checked_tie(tie: Any) -> Tie:
    """Return a tie as a tuple of two names, the second of them of an earlier layer."""
    try:
        name, original = tie
        # a name is a path, and begins with the place of its layer in the chain
        if int(name.partition(".")[0]) > int(original.partition(".")[0]):
            return name, original
    except (AttributeError, TypeError, ValueError):
        pass
    raise UsageError(
        f"ProblemSpec: ties must be pairs of a name and one of an earlier layer, got {tie!r}"
    )


def _kind_and_options(data: Any, where: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
        raise UsageError(f"{where}: expected an object with a string 'kind', got {data!r}")
    options = {str(name): value for name, value in data.items() if name not in ("kind", "layers")}
    return data["kind"], options


def layer_from_json(data: Any) -> Layer:
    """Return the layer of JSON data; `UsageError` says why the data is not a layer."""
    kind, options = _kind_and_options(data, "layer")
    inner = data.get("layers", [])
    if not isinstance(inner, Sequence) or isinstance(inner, str):
        raise UsageError(f"layer {kind!r}: 'layers' must be a list, got {inner!r}")
    return Layer(kind, *map(layer_from_json, inner), **options)


def problem_from_json(data: Any) -> ProblemSpec:
    """Return the problem of JSON data; `UsageError` says why the data is not a problem."""
    if not isinstance(data, Mapping) or not {"input", "layers", "loss"} <= data.keys():
        raise UsageError("problem: expected an object with 'input', 'layers' and 'loss'")
    input_kind, input_options = _kind_and_options(data["input"], "input")
    loss_kind, loss_options = _kind_and_options(data["loss"], "loss")
    if not isinstance(data["layers"], Sequence) or isinstance(data["layers"], str):
        raise UsageError(f"problem: 'layers' must be a list, got {data['layers']!r}")
    ties = data.get("ties", [])
    if not isinstance(ties, list) or not all(isinstance(tie, list) for tie in ties):
        raise UsageError(f"problem: 'ties' must be a list of pairs, got {ties!r}")
    return ProblemSpec(
        input=Input(input_kind, **input_options),
        layers=tuple(map(layer_from_json, data["layers"])),
        loss=Loss(loss_kind, **loss_options),
        ties=tuple(map(tuple, ties)),
    )


# Plans: the micro-batches, windows and epochs of a run.


ALWAYS_WRITTEN = ("micro_batches", "accumulation_steps", "epochs", "masked")
"""The fields that JSON and repr state even where they have their default."""


def is_integer(value: Any) -> bool:
    """Return whether a value is an int and no bool."""
    # True is an int in Python
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Plan:
    """How the items of a run are split into micro-batches, windows and epochs.

    Attributes:
        micro_batches: number of items of each micro-batch of one epoch, in order; each at least 1.
        accumulation_steps: number of micro-batches in a window (K), at least 1. The last window of
            an epoch is shorter if K does not divide the number of micro-batches.
        epochs: number of passes over the items, at least 1.
        masked: indices of the micro-batches without valid targets: all their targets are ignored.
        ranks: number of micro-batches that each rank gets in an epoch, each at least 1; empty for
            one rank. A rank's window has `accumulation_steps` micro-batches or what is left,
            possibly none. `micro_batches` lists the first window's micro-batches of rank 0, then
            those of rank 1 and so on, then the second window's.

    Raises:
        UsageError: a value is out of range, or a window has no valid targets.
    """

    micro_batches: tuple[int, ...]
    accumulation_steps: int
    epochs: int = 1
    masked: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_batches", tuple(self.micro_batches))
        # one rank is no distributed run: both ways of saying so are one plan, with one digest
        object.__setattr__(self, "ranks", () if len(self.ranks) == 1 else tuple(self.ranks))
        object.__setattr__(self, "masked", tuple(sorted(set(self.masked))))
        self._expect_numbers()
        self._expect_targets()

    def _expect_numbers(self) -> None:
        if not self.micro_batches or not all(is_integer(n) and n >= 1 for n in self.micro_batches):
            raise UsageError(
                "Plan: micro_batches must be positive integers, at least one, got"
                f" {self.micro_batches}"
            )
        for name in ("accumulation_steps", "epochs"):
            value = getattr(self, name)
            if not is_integer(value) or value < 1:
                raise UsageError(f"Plan: {name} must be a positive integer, got {value!r}")
        if not all(is_integer(n) and n >= 1 for n in self.ranks) or (
            self.ranks and sum(self.ranks) != len(self.micro_batches)
        ):
            raise UsageError(
                "Plan: ranks must be positive integers that add up to the"
                f" {len(self.micro_batches)} micro-batches, got {self.ranks}"
            )

    def _expect_targets(self) -> None:
        if not all(is_integer(j) and 0 <= j < len(self.micro_batches) for j in self.masked):
            raise UsageError(
                f"Plan: masked must be indices of micro-batches below {len(self.micro_batches)},"
                f" got {self.masked}"
            )
        for w, window in enumerate(self.windows):
            # the mean over no valid target is 0 / 0: such a window has no right gradient
            if set(window) <= set(self.masked):
                raise UsageError(
                    f"Plan: window {w} has no valid targets: all its micro-batches {window} are"
                    " masked"
                )

    @property
    def world_size(self) -> int:
        """The number of ranks that train together."""
        return len(self.ranks) or 1

    @cached_property
    def _parts(self) -> tuple[tuple[range, ...], ...]:
        """For each window the indices of each rank's micro-batches in it."""
        k = self.accumulation_steps
        left = self.ranks or (len(self.micro_batches),)
        start = 0
        parts: list[tuple[range, ...]] = []
        # a rank that has run out leaves the last windows to the others
        while any(left):
            # each rank's micro-batches of a window are numbered one after the other: rank 0's, rank
            # 1's, ...
            ends = tuple(accumulate((min(n, k) for n in left), initial=start))
            parts.append(tuple(map(range, ends, ends[1:])))
            left = tuple(n - min(n, k) for n in left)
            start = ends[-1]
        return tuple(parts)

    @cached_property
    def windows(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the micro-batches of each window of one epoch, over all ranks."""
        return tuple(tuple(range(parts[0].start, parts[-1].stop)) for parts in self._parts)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank that gets each micro-batch."""
        owners: list[int] = []
        for parts in self._parts:
            for rank, part in enumerate(parts):
                owners += [rank] * len(part)
        return tuple(owners)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the micro-batches that a rank gets in an epoch, in order."""
        return tuple(chain.from_iterable(parts[rank] for parts in self._parts))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The index of the first item of each micro-batch."""
        return tuple(accumulate(self.micro_batches[:-1], initial=0))

    def items(self, micro_batch: int) -> range:
        """Return the indices of the items of a micro-batch."""
        return range(
            self.starts[micro_batch], self.starts[micro_batch] + self.micro_batches[micro_batch]
        )

    @property
    def cuts(self) -> list[range]:
        """The indices of the items of each micro-batch."""
        return [self.items(j) for j in range(len(self.micro_batches))]

    def window_items(self, window: int) -> range:
        """Return the indices of the items of a window."""
        members = self.windows[window]
        return range(self.items(members[0]).start, self.items(members[-1]).stop)

    @property
    def total_items(self) -> int:
        """The number of items in one epoch."""
        return sum(self.micro_batches)

    @property
    def steps(self) -> int:
        """The number of optimizer steps that a loop must take: one per window of every epoch."""
        return self.epochs * len(self.windows)

    @property
    def step_limit(self) -> int:
        """The number of optimizer steps after which a loop is stopped: more than two per
        micro-batch.
        """
        # a step after each micro-batch and another after each window is still a loop that ends by
        # itself; 8 is for the smallest plans
        return 2 * self.epochs * len(self.micro_batches) + 8

    @property
    def has_short_window(self) -> bool:
        """Whether the last window of an epoch has fewer than `accumulation_steps` micro-batches."""
        return len(self.windows[-1]) < self.accumulation_steps * self.world_size

    @property
    def has_idle_rank(self) -> bool:
        """Whether some rank has no micro-batch in the last window of an epoch, while others have
        some.
        """
        return not all(self._parts[-1])

    def replace(self, **changes: Any) -> Plan:
        """Return the plan with some fields changed."""
        return replace(self, **changes)

    def select(self, kept: Iterable[int]) -> Plan:
        """Return the plan of some of its micro-batches, given by their indices in the order wanted.

        Each goes to the rank that it had. A rank that keeps none is left out.
        """
        kept = tuple(kept)
        if self.ranks:
            counts = [sum(self.owners[j] == rank for j in kept) for rank in range(self.world_size)]
            given = [
                iter([j for j in kept if self.owners[j] == rank])
                for rank, n in enumerate(counts)
                if n
            ]
            ranks = tuple(n for n in counts if n)
            # the order of micro-batches follows from what each rank has: a plan of ones says which
            # rank comes when
            owners = Plan((1,) * len(kept), self.accumulation_steps, ranks=ranks).owners
            kept = tuple(next(given[owner]) for owner in owners)
        else:
            ranks = ()
        return self.replace(
            micro_batches=tuple(self.micro_batches[j] for j in kept),
            masked=tuple(i for i, j in enumerate(kept) if j in self.masked),
            ranks=ranks,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data.

        A field that is not among `ALWAYS_WRITTEN` is left out where it has its default, so that a
        field which is added later changes no stored case and no digest.
        """
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, (value, default) in values.items()
            if name in ALWAYS_WRITTEN or value != default
        }

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{name}={getattr(self, name)!r}' for name in self.to_json())})"


def plan_from_json(data: Any) -> Plan:
    """Return the plan of JSON data.

    Raises:
        UsageError: the data is not a plan; the message says why.
    """
    if not isinstance(data, Mapping):
        raise UsageError(f"plan: expected an object, got {data!r}")
    known = {field.name: field for field in fields(Plan)}
    missing = {name for name, field in known.items() if field.default is MISSING} - data.keys()
    unknown = data.keys() - known.keys()
    if missing or unknown:
        raise UsageError(f"plan: missing {sorted(missing)}, unknown {sorted(unknown)}")
    for name, value in data.items():
        # JSON has no tuples
        if str(known[name].type).startswith("tuple") and not isinstance(value, list):
            raise UsageError(f"plan: {name} must be a list, got {value!r}")
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in data.items()
    }
    return Plan(**values)


# Cases: everything that a run depends on.


SCHEMA = 1
DTYPES = ("float64", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
MAX_SEED = 2**32 - 1


@dataclass(frozen=True, repr=False)
class Case:
    """Everything that one run depends on.

    Attributes:
        problem: a generated problem, or the `FILE.py:NAME` of a user's problem.
        plan: the split of the items into micro-batches, windows and epochs.
        dtype: dtype of parameters and floating-point inputs, one of `DTYPES`.
        device: device of model and data, one of `DEVICES`.
        seed: seed of parameter values and data, 0 to 2**32 - 1.
        optimizer: name of the optimizer, or None for one whose step leaves the parameters
            unchanged.
        groups: number of parameter groups of the optimizer; each has a learning rate of its own.
        distinct_items: number of different items of an epoch, which repeat in turn, so that whole
            micro-batches are equal, and with 1 all losses; 0 where every item is drawn.
    """

    problem: ProblemSpec | str
    plan: Plan
    dtype: str = "float64"
    device: str = "cpu"
    seed: int = 0
    optimizer: str | None = None
    groups: int = 1
    distinct_items: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.problem, ProblemSpec | str):
            raise UsageError(
                f"Case: problem must be a ProblemSpec or 'FILE.py:NAME', got {self.problem!r}"
            )
        if not isinstance(self.plan, Plan):
            raise UsageError(f"Case: plan must be a Plan, got {self.plan!r}")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if self.device not in DEVICES:
            raise UsageError(f"device must be one of {', '.join(DEVICES)}; got {self.device!r}")
        if not is_integer(self.seed) or not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed must be an integer from 0 to {MAX_SEED}, got {self.seed!r}")
        if self.optimizer is not None and not isinstance(self.optimizer, str):
            raise UsageError(f"optimizer must be a name or None, got {self.optimizer!r}")
        if not is_integer(self.groups) or self.groups < 1:
            raise UsageError(f"groups must be a positive integer, got {self.groups!r}")
        if not is_integer(self.distinct_items) or self.distinct_items < 0:
            raise UsageError(
                f"distinct_items must be an integer from 0 on, got {self.distinct_items!r}"
            )
        if self.distinct_items and self.plan.masked:
            raise UsageError(
                "distinct_items: micro-batches without valid targets differ from others; drop"
                " plan.masked"
            )

    def __repr__(self) -> str:
        return f"Case({', '.join(f'{name}={value!r}' for name, value in self._written().items())})"

    def _written(self) -> dict[str, Any]:
        """Return the fields, without later ones that have their default, so that the digests of
        stored cases stay.
        """
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        later = ("groups", "distinct_items")
        return {
            name: value
            for name, (value, default) in values.items()
            if name not in later or value != default
        }

    @property
    def spec(self) -> ProblemSpec | None:
        """The generated problem; None where the case is about a user's."""
        return None if isinstance(self.problem, str) else self.problem

    @property
    def problem_name(self) -> str | None:
        """The file and name of the user's problem, as on the command line.

        None for a generated one.
        """
        return self.problem if isinstance(self.problem, str) else None

    @cached_property
    def digest(self) -> str:
        """The id of the case: the first 12 hexadecimal digits of the SHA-256 of its canonical JSON."""
        # one spelling for one content
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def replace(self, **changes: Any) -> Case:
        """Return a copy of the case with other values of these fields."""
        return replace(self, **changes)

    def _content(self) -> dict[str, Any]:
        problem = self.problem if isinstance(self.problem, str) else self.problem.to_json()
        return {
            "schema": SCHEMA,
            **self._written(),
            "problem": problem,
            "plan": self.plan.to_json(),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the case as JSON-ready data, with its digest."""
        return {**self._content(), "digest": self.digest}


def case_from_json(data: Any) -> Case:
    """Return the case of JSON data.

    Raises:
        UsageError: the data is not a case, has another schema version, or was edited (its digest
            does not match).
    """
    if not isinstance(data, Mapping) or "problem" not in data or "plan" not in data:
        raise UsageError("not a gradcheck-suite case: expected an object with 'problem' and 'plan'")
    if data.get("schema") != SCHEMA:
        raise UsageError(
            f"case schema must be {SCHEMA}, got {data.get('schema')!r}: it comes from another"
            " version"
        )
    given = {name: value for name, value in data.items() if name not in ("schema", "digest")}
    if unknown := given.keys() - {field.name for field in fields(Case)}:
        raise UsageError(
            f"case has unknown fields {sorted(unknown)}: it comes from another version or was"
            " edited"
        )
    problem = data["problem"]
    given["problem"] = problem if isinstance(problem, str) else problem_from_json(problem)
    case = Case(**{**given, "plan": plan_from_json(data["plan"])})
    # a case that was edited by accident would be replayed as another one
    if "digest" in data and data["digest"] != case.digest:
        raise UsageError(
            f"case was edited: its digest is {data['digest']!r} but its content has"
            f" {case.digest!r}; remove the 'digest' field to accept the edit"
        )
    return case


# The weight probe: a case whose accumulated gradient is the weight that a loop gives to each item.


SMALL_SCALE = 2.0**-20
"""A factor of the loss so small that thresholds such as gradient clipping have no effect.

It is a power of two, so a linear loop's weights scale without rounding."""
PARAMETER = "0.weight"
"""The name of the probe's parameter."""


def probe_case(
    plan: Plan,
    reduction: Reduction = "mean",
    *,
    device: str = "cpu",
    dtype: str = "float64",
    slopes: str = "",
    unit: float = 1.0,
) -> Case:
    """Return the case whose accumulated gradient is the weights that a loop gives to the items of
    `plan`.

    If the counts are powers of two, the weights of a correct loop equal 1/N bit for bit.

    Args:
        plan: the plan; its micro-batches without valid targets become ordinary ones.
        reduction: reduction of the loss.
        device: device of the model and the data.
        dtype: dtype of the parameter.
        slopes: derivatives of the item losses as `slopes_text` writes them, repeated over the
            items; 1 each if empty.
        unit: what an item counts.
    """
    items = plan.total_items
    options: dict[str, str | float] = {"slopes": slopes} if slopes else {}
    if unit != 1:
        options["unit"] = unit
    loss = Loss("identity", reduction=reduction, **options)
    spec = ProblemSpec(Input("index", items=items), (Layer("readout"),), loss)
    return Case(
        spec,
        # a micro-batch without valid targets would have weight 0 whatever a loop does
        plan.replace(masked=()),
        dtype=dtype,
        device=device,
    )


def is_probe(case: Case) -> bool:
    """Return whether a case is a weight probe, whose right gradient needs no reference."""
    spec = case.spec
    return spec is not None and (spec.input.kind, spec.layer_kinds, spec.loss.kind) == (
        "index",
        ["readout"],
        "identity",
    )


def slopes_text(slopes: Iterable[float]) -> str:
    """Return slopes as text, such as `1 2**10 inf`; each is a power of two, infinite or NaN."""
    return " ".join(_word_of_slope(slope) for slope in slopes)


def read_slopes(text: str, items: int) -> list[float]:
    """Return the slope of each item's loss.

    The text's slopes are repeated, and without a text all are 1.
    """
    slopes = [_slope_of_word(word) for word in text.split()] or [1.0]
    return [slopes[i % len(slopes)] for i in range(items)]


def slopes_of(case: Case) -> Sequence[float]:
    """Return the derivative of each item's loss on a weight probe."""
    assert case.spec is not None
    return read_slopes(case.spec.loss.o.get("slopes", ""), case.plan.total_items)


def unit_of(case: Case) -> float:
    """Return what an item of a weight probe counts."""
    assert case.spec is not None
    return float(case.spec.loss.o.get("unit", 1.0))


def _word_of_slope(slope: float) -> str:
    if not math.isfinite(slope) or slope == 1:
        return f"{slope:g}"
    mantissa, exponent = math.frexp(slope)
    assert mantissa == 0.5, f"a slope must be a power of two, got {slope}"
    return f"2**{exponent - 1}"


def _slope_of_word(word: str) -> float:
    base, power, exponent = word.partition("**")
    return float(base) ** int(exponent) if power else float(base)
