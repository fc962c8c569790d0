"""Marks in a traced program: an identity that carries what is to be recorded.

In the user's own program a mark lowers to nothing. `replay` evaluates the same program a second
time, and returns for each mark the summary that is made here: samples of gradients, weights of the
terms of a loss.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from gradcheck_suite.auditing.jax.equations import Program, Var
from gradcheck_suite.auditing.jax.losses import (
    CustomRule,
    LossTerm,
    check_rule,
    mixing_of,
    row_inputs,
    varying,
    weights_of,
)
from gradcheck_suite.auditing.places import Place

SAMPLES = 48
PROJECTIONS = 2
"""Elements of a leaf that are kept, and sums of all of its elements, each times a wave of its own."""
# no multiple of one is near one of the other or of a layer's width, so that the two sums see other
# combinations of the elements
_FREQUENCIES = (0.7390851, 1.618034)


@dataclass(eq=False)
class PassMark:
    """The gradient of a loss.

    Attributes:
        place: where it was asked for.
        shapes: of the leaves of the gradient that are real numbers.
        names: of these leaves.
        dtype: the coarsest one of these leaves.
        program: the loss.
        terms: of it.
        trained: the inputs that it is differentiated by.
        data: its other inputs.
        rules: functions with a backward of their own that the gradient goes through.
        reduced: axes of devices over which JAX itself has added the gradient up.
        adds_up_loss: whether the loss is itself added up over devices, and what JAX makes of that
            is more than the gradient of one device.
        scaled: whether what went backward is a value of the mark, and not 1.
        unread: index of a term whose weights could not be computed -> why.
    """

    place: Place
    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    dtype: str
    program: Program
    terms: list[LossTerm]
    trained: list[Var]
    data: list[Var]
    rules: list[CustomRule] = field(default_factory=list)
    reduced: tuple[str, ...] = ()
    adds_up_loss: bool = False
    scaled: bool = False
    unread: dict[int, str] = field(default_factory=dict)

    def summary(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return what is recorded of the gradient, the loss, and what went into it; traceable."""
        number = len(self.shapes)
        gradient = values[:number]
        loss = values[number]
        inputs = values[number + 1 :]
        if self.scaled:
            cotangent, *inputs = inputs
            # a loss scale went backward in place of 1; the weights are those of the loss itself
            gradient = [one / cotangent for one in gradient]
        program = self.program
        own = [*program.inputs, *program.constants, *program.literals]
        given = dict(zip(own, inputs, strict=True))
        terms = [self._weights(i, given) for i in range(len(self.terms))]
        known = dict(given)  # what several of the following need is computed once
        mixing = []
        for term in self.terms:
            for one in row_inputs(term, self.data):
                by = _or_unknown(
                    mixing_of,
                    (),
                    self.program,
                    term,
                    one,
                    known,
                )
                mixing.append({"by": by, "input": sketch([given[one]])["sample"]})
        return {
            "gradient": _chosen_entries(sketch(gradient), "sample", "norms"),
            "loss": loss.astype(jnp.float32).reshape(()),
            "parameters": _chosen_entries(sketch([given[one] for one in self.trained]), "sample"),
            "terms": terms,
            "mixing": mixing,
            "rules": [
                _or_unknown(check_rule, (4,), self.program, rule, known) for rule in self.rules
            ],
        }

    def _weights(self, index: int, given: dict[Var, Any]) -> list[Any]:
        term = self.terms[index]
        if term.opaque:
            return []
        try:
            return weights_of(self.program, term, given)
        except Exception as error:  # a primitive without a rule, a collective out of its place
            self.unread[index] = f"its weights could not be computed ({type(error).__name__})"
            return []


def _or_unknown(compute: Callable[..., Any], shape: tuple[int, ...], *args: Any) -> Any:
    """Return what a function computes, NaN where JAX has no rule for it."""
    try:
        return compute(*args)
    except Exception:
        return jnp.full(shape, jnp.nan, jnp.float32)


@dataclass(eq=False)
class UpdateMark:
    """An optimizer's update.

    Attributes:
        place: of the call.
        shapes: of the leaves of the gradient that it was given.
        names: of these leaves.
        dtype: the coarsest one of these leaves.
        owner: index of the optimizer.
        name: of the transformation.
        depth: the number of updates that it was called inside of.
        multi: whether it is `optax.MultiSteps`.
        inside: whether `MultiSteps` has called it.
        results: the number of leaves of what it returned.
        parameters: the number of leaves of the parameters that it was given.
        is_lost: whether no result of the program that it stands in depends on it.
    """

    place: Place
    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    owner: int
    name: str
    dtype: str = "float32"
    depth: int = 0
    multi: bool = False
    inside: bool = False
    results: int = 0
    parameters: int = 0
    is_lost: bool = False

    def summary(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return what is recorded of the gradient, the update and the parameters; traceable."""
        first = self.results + len(self.shapes)
        update = sketch(values[: self.results])
        found = {
            "gradient": _chosen_entries(sketch(values[self.results : first]), "sample", "norms"),
            "update": _chosen_entries(update, "sample"),
            "moved": update["moved"],
        }
        return found | (
            {"parameters": _chosen_entries(sketch(values[first:]), "sample")}
            if self.parameters
            else {}
        )


Mark = PassMark | UpdateMark


@dataclass(frozen=True)
class MappedAxis:
    """A `vmap` around a mark.

    Attributes:
        dims: of each value of the mark, the axis that is mapped, or None.
        name: of the axis, for collectives; None where it has none.
        size: of the axis.
    """

    dims: tuple[int | None, ...]
    name: str | None
    size: int


RECORD: list[Callable[[Mark, Sequence[Any], tuple[MappedAxis, ...]], None]] = []
"""Takes the values of a mark that is evaluated, and not traced; empty while no audit is open."""

mark_p = jex.Primitive("audit_mark")
mark_p.multiple_results = True


def _evaluate(
    *values: Any, mark: Mark, through: int, axes: tuple[MappedAxis, ...]
) -> Sequence[Any]:
    if RECORD:
        RECORD[-1](mark, values, axes)
    return list(values[:through])


def _abstract(*avals: Any, mark: Mark, through: int, axes: tuple[MappedAxis, ...]) -> Sequence[Any]:
    return list(avals[:through])


def _lower(
    context: Any, *values: Any, mark: Mark, through: int, axes: tuple[MappedAxis, ...]
) -> Sequence[Any]:
    return list(values[:through])


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, through: int, **params: Any
) -> tuple[Sequence[Any], Sequence[Any]]:
    return mark_p.bind(*primals, through=through, **params), list(tangents[:through])


def _batch(
    axis: Any,
    values: Sequence[Any],
    dims: Sequence[int | None],
    *,
    through: int,
    axes: tuple[MappedAxis, ...],
    **params: Any,
) -> tuple[Sequence[Any], Sequence[int | None]]:
    # the values go through as they are: whatever is computed of one copy is computed in the replay
    name = axis.name if isinstance(axis.name, str) else None
    mapped = (MappedAxis(tuple(dims), name, axis.size),) if any(d is not None for d in dims) else ()
    return mark_p.bind(*values, through=through, axes=axes + mapped, **params), dims[:through]


mark_p.def_impl(_evaluate)
mark_p.def_abstract_eval(_abstract)
mlir.register_lowering(mark_p, _lower)
ad.primitive_jvps[mark_p] = _jvp
batching.fancy_primitive_batchers[mark_p] = _batch


COARSE_FIRST = ("bfloat16", "float16", "float32", "float64")
"""Dtypes of gradients, the coarsest first."""


def coarsest_of(leaves: Sequence[Any]) -> str:
    """Return the coarsest dtype of some arrays."""
    found = {str(one.dtype) for one in leaves}
    # a dtype that is not listed, such as one of 8 bits, is no finer than the coarsest that is
    return next((name for name in COARSE_FIRST if name in found), "bfloat16")


def put_mark(mark: Mark, through: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Send some values through a mark, which carries others along, and return the former."""
    return list(mark_p.bind(*through, *values, mark=mark, through=len(through), axes=()))


# What is recorded.


def sketch(leaves: Sequence[Any]) -> dict[str, Any]:
    """Return samples of all leaves in one vector, the norm of each leaf, and whether any is not 0.

    A sample is linear, so that of a sum is the sum of the samples. Leaves of one shape are looked at
    together: each operation is compiled once for all of them.
    """
    arrays = [_in_one_piece(jnp.asarray(leaf)) for leaf in leaves]
    groups = _alike(arrays)
    order = list(itertools.chain.from_iterable(groups))
    parts = []
    norms = []
    moved = []
    for members in groups:
        rows = (
            jnp.stack([arrays[i] for i in members])
            if len(members) > 1
            else arrays[members[0]][None]
        )
        # norms and projections add up thousands of elements, of which bfloat16 would keep two
        # digits
        rows = rows if rows.dtype == jnp.float64 else rows.astype(jnp.float32)
        parts.append(_sampled(rows).reshape(-1))
        flat = rows.reshape(rows.shape[0], -1)
        norms.append(jnp.sqrt(jnp.sum(flat * flat, 1)))
        moved.append(jnp.any(flat != 0))
    lengths = [_sampled_size(arrays[i].size) for i in order]
    return {
        "sample": _in_order(jnp.concatenate(parts), order, lengths),
        "norms": _in_order(jnp.concatenate(norms), order, [1] * len(order)),
        "moved": jnp.stack(moved).any(),
    }


def _chosen_entries(found: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return some parts of a sketch; what nobody reads is not compiled."""
    return {name: found[name] for name in names}


MOST_STACKED = 2**22
"""Elements that are copied at most to look at several leaves together."""


def _alike(arrays: Sequence[Any]) -> list[list[int]]:
    """Return the indices of arrays of one type each, no more of them than may be copied."""
    groups: dict[tuple[str, int], list[int]] = {}
    seen = Counter[str]()
    for i, one in enumerate(arrays):
        kind = f"{jax.typeof(one)} {sorted(varying(jax.typeof(one)))}"
        most = max(1, MOST_STACKED // max(one.size, 1))
        groups.setdefault((kind, seen[kind] // most), []).append(i)
        seen[kind] += 1
    return list(groups.values())


def _in_order(values: Any, order: Sequence[int], lengths: Sequence[int]) -> Any:
    """Return values, so many for each index, in the order of the indices."""
    if list(order) == sorted(order):
        return values
    ends = np.cumsum(lengths)
    pieces = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return values[np.concatenate([pieces[i] for i in np.argsort(order)])]


def _sampled(rows: Any) -> Any:
    """Return samples of the leaves of one shape, (leaves, samples).

    The elements of a large leaf stand a fixed step apart, which is cheap to compile, and prime to
    their number, so that they are of all columns.
    """
    number = int(np.prod(rows.shape[1:], dtype=np.int64))
    flat = rows.reshape(rows.shape[0], number)
    if number <= SAMPLES:
        return flat
    # 1 is prime to every number, so that there always is one
    step = next(s for s in range(number // SAMPLES, 0, -1) if np.gcd(s, number) == 1)
    elements = jax.lax.slice(flat, (0, 0), (rows.shape[0], (SAMPLES - 1) * step + 1), (1, step))
    width = _width(rows.shape[1:])
    table = rows.reshape(rows.shape[0], number // width, width)
    of_rows = _waves(number // width, rows.dtype)
    # a sum with the outer product of two short waves: two small products, and no long wave
    columns = jnp.einsum(
        "lrc,cp->lrp",
        table,
        _waves(width, rows.dtype),
        # XLA multiplies float32 in bfloat16 on a TPU and in TF32 on a GPU unless told otherwise:
        # https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision
        precision="highest",
    )
    return jnp.concatenate([elements, jnp.sum(columns * of_rows, 1)], 1)


def _sampled_size(number: int) -> int:
    return number if number <= SAMPLES else SAMPLES + PROJECTIONS


def _width(shape: Sequence[int]) -> int:
    """Return the number of columns of a leaf: those of its last axis, or of a vector as a table."""
    if len(shape) > 1:
        return int(shape[-1])
    number = shape[0]
    divisors = (w for w in range(min(number, MOST_WIDTH), 0, -1) if number % w == 0)
    return number if number <= MOST_WIDTH else next(divisors)


MOST_WIDTH = 4096
PERIOD = 4093
"""Elements after which a wave comes again, a prime: the angles of later ones would be rounded otherwise in each
program."""


def _waves(number: int, dtype: Any) -> Any:
    """Return waves of some length, (number, PROJECTIONS)."""
    period = min(number, PERIOD)
    angles = np.arange(1, period + 1)[:, None] * np.array(_FREQUENCIES)
    waves = jnp.asarray(np.cos(angles), dtype)
    # `jnp.resize` repeats what it is given
    return waves if period == number else jnp.resize(waves, (number, PROJECTIONS))


def _in_one_piece(leaf: Any) -> Any:
    """Return an array that is on each device as a whole, where its type says how it is cut up.

    Elements cannot be taken out of one that is cut up over explicit axes of a mesh.
    https://docs.jax.dev/en/latest/notebooks/explicit-sharding.html
    """
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    spec = getattr(sharding, "spec", ())
    is_cut = any(part is not None for part in spec or ())
    return jax.sharding.reshard(leaf, jax.sharding.PartitionSpec()) if is_cut else leaf


def segments(shapes: Sequence[tuple[int, ...]]) -> list[list[slice]]:
    """Return where the samples of each leaf stand: its elements, then its projections if it has
    some.
    """
    found = []
    begin = 0
    for shape in shapes:
        number = int(np.prod(shape, dtype=np.int64))
        sizes = [number] if number <= SAMPLES else [SAMPLES, PROJECTIONS]
        slices = []
        for size in sizes:
            slices.append(slice(begin, begin + size))
            begin += size
        found.append(slices)
    return found


def summarized(mark: Mark, axes: Sequence[MappedAxis], values: Sequence[Any]) -> Any:
    """Return the summary of a mark; of a `vmap` without a name, that of the first copy.

    A named axis may have collectives over it, as devices have, and is mapped over: the summary then
    has one more leading axis.
    """
    if not axes:
        return mark.summary(values)
    *inner, last = axes
    if last.name is None:
        first = [
            one if dim is None else jax.lax.index_in_dim(one, 0, dim, keepdims=False)
            for one, dim in zip(values, last.dims, strict=True)
        ]
        return summarized(mark, inner, first)
    mapped = jax.vmap(
        lambda *some: summarized(mark, inner, some),
        in_axes=last.dims,
        axis_name=last.name,
        axis_size=last.size,
    )
    return mapped(*values)
