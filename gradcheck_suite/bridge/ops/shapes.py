"""Views, slices, constants, reads and writes by index, look-ups.

JAX copies in place of views: the exported graph has no in-place writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from gradcheck_suite.bridge.op_table import (
    Array,
    Lowering,
    default_float,
    is_inexact,
    jax_dtype,
    on_vectors,
    promote,
    register_op,
    register_table,
    result_dtype,
)


def _place(self: Array, dim: int, at: Any) -> tuple[Any, ...]:
    """Return the index of one axis that is `at`, a number, a slice or an array, and all of the
    other axes.
    """
    index: list[Any] = [slice(None)] * self.ndim
    index[dim] = at
    return tuple(index)


@register_op("aten.expand")
def expand(self: Array, size: Sequence[int], *, implicit: bool = False) -> Array:
    """Return self with axes of length 1 broadcast; -1 keeps an axis."""
    # says that torch inserted the call itself, which changes nothing
    del implicit
    lead = len(size) - self.ndim
    return jnp.broadcast_to(
        self, [self.shape[i - lead] if n == -1 else n for i, n in enumerate(size)]
    )


@register_op("aten.squeeze")
@on_vectors
def squeeze(self: Array, dim: int | Sequence[int] | None = None) -> Array:
    """Return self without those of the given axes, or of all, that have length 1."""
    # torch leaves an axis of another length as it is, and `jnp.squeeze` raises on it
    dims = range(self.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(self, tuple(d % self.ndim for d in dims if self.shape[d] == 1))


@register_op("aten.as_strided")
def as_strided(
    self: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Array:
    """Return strided entries of self's memory, taken to be contiguous: the strides of a view are
    not known here.
    """
    place = np.full((), storage_offset or 0)
    for n, s in zip(size, stride, strict=True):
        place = place[..., None] + np.arange(n) * s
    return self.reshape(-1)[place]


@register_op("aten._to_copy")
def to_copy(self: Array, dtype: torch.dtype | None = None, **_: Any) -> Array:
    """Return self in another dtype; floats are truncated to integers."""
    if dtype is None:
        return self
    # torch drops the imaginary part, and JAX warns of that
    if jnp.iscomplexobj(self) and not dtype.is_complex:
        self = jnp.real(self)
    return self.astype(jax_dtype(dtype))


@register_op("aten.cat")
def cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    """Return the tensors concatenated along an axis."""
    # torch leaves tensors of shape (0,) out, whatever the shape of the others
    kept = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])
    dtype = promote(*tensors)[0].dtype
    return jnp.concatenate([x.astype(dtype) for x in kept], axis=dim)


def fancy(self: Array, indices: Sequence[Array | None]) -> tuple[Any, ...]:
    """Return torch's list of index tensors as a JAX index.

    A boolean mask becomes the indices of its True entries.
    """
    index: list[Any] = []
    for tensor in indices:
        if tensor is None:
            index.append(slice(None))
        elif tensor.dtype in (jnp.bool_, jnp.uint8):
            # torch takes uint8 for a mask; its number of True entries is a shape, which JAX needs
            # to know
            index.extend(
                jnp.asarray(places) for places in np.nonzero(np.asarray(lax.stop_gradient(tensor)))
            )
        else:
            index.append(tensor)
    return tuple(index[: self.ndim] if self.ndim else index)


@register_op("aten.index.Tensor")
def index(self: Array, indices: Sequence[Array | None]) -> Array:
    """Return self[i, j, ...]; None selects a whole axis."""
    return self[fancy(self, indices)]


@register_op("aten.gather")
def gather(self: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    """Return out[i, j] = self[index[i, j], j] for dim 0.

    `index` may be smaller than self along the other axes.
    """
    # the layout of torch's gradient, not its values
    del sparse_grad
    if self.ndim == 0 or index.ndim == 0:
        return jnp.reshape(self.reshape(-1)[index.reshape(-1)], index.shape)
    if index.size == 0:
        return jnp.zeros(index.shape, self.dtype)
    # take_along_axis wants equal lengths along the other axes
    cut = tuple(
        slice(None) if a == dim % self.ndim else slice(n) for a, n in enumerate(index.shape)
    )
    return jnp.take_along_axis(self[cut], index, axis=dim)


@register_op("aten.masked_select", dynamic=True)
def masked_select(self: Array, mask: Array) -> Array:
    """Return the entries where the mask is True, (count,)."""
    x, m = jnp.broadcast_arrays(self, lax.stop_gradient(mask))
    return x.reshape(-1)[np.flatnonzero(np.asarray(m))]


@register_op("aten.nonzero", dynamic=True)
def nonzero(self: Array) -> Array:
    """Return the indices of the nonzero entries, (count, axes)."""
    return jnp.asarray(np.argwhere(np.asarray(lax.stop_gradient(self))))


@register_op("aten.repeat_interleave.Tensor", dynamic=True)
def repeat_interleave(repeats: Array, output_size: int | None = None) -> Array:
    """Return each index i repeated repeats[i] times."""
    counts = np.asarray(lax.stop_gradient(repeats))
    return jnp.asarray(np.repeat(np.arange(len(counts)), counts)[:output_size]).astype(
        repeats.dtype
    )


@register_op("aten.searchsorted")
def searchsorted(sorted_sequence: Array, self: Any, **options: Any) -> Array:
    """Return the insertion index of each value along the last axis."""
    if (sorter := options.get("sorter")) is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, axis=-1)
    sequence, values = promote(sorted_sequence, self)
    compare = jnp.less_equal if options.get("right") or options.get("side") == "right" else jnp.less
    below = compare(sequence if sequence.ndim == 1 else sequence[..., None, :], values[..., None])
    return jnp.sum(below, axis=-1, dtype=jnp.int32 if options.get("out_int32") else jnp.int64)


@register_op("aten.bincount", dynamic=True)
def bincount(self: Array, weights: Array | None = None, minlength: int = 0) -> Array:
    """Return the count, or the sum of weights, of each integer."""
    length = max(minlength, int(np.asarray(lax.stop_gradient(self)).max(initial=-1)) + 1)
    # torch adds weights up in float32 or float64, and has no derivative for them
    if weights is not None:
        weights = lax.stop_gradient(weights).astype(
            weights.dtype if weights.dtype == jnp.float32 else jnp.float64
        )
    counts = jnp.bincount(self, weights, length=length)
    return counts.astype(jnp.int64) if weights is None else counts


@register_op("aten.histc")
def histc(self: Array, bins: int = 100, min: Any = 0, max: Any = 0) -> Array:
    """Return how many entries fall in each of `bins` equal parts of [min, max].

    The gradient is 0.
    """
    x = lax.stop_gradient(self).reshape(-1)
    low, high = (jnp.asarray(v, x.dtype) for v in (min, max))
    if min == max:
        low = x.min()
        high = x.max()
        # torch widens an empty range by 1 on both sides
        widening = jnp.where(low == high, 1, 0)
        low = low - widening
        high = high + widening
    share = (x - low) / (high - low)
    # the largest value is in the last part, not in one of its own
    place = jnp.clip((share * bins).astype(jnp.int64), 0, bins - 1)
    inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, self.dtype).at[place].add(inside.astype(self.dtype))


@register_op("aten.index_put")
def index_put(
    self: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False
) -> Array:
    """Return self with self[i, j, ...] replaced by the values, or the values added to it."""
    given = [tensor for tensor in indices if tensor is not None]
    if len(given) == 1 and given[0].dtype == jnp.bool_ and values.size == 1:
        # a single value needs no count of the True entries, so the mask may be traced
        behind = self.ndim - next(i for i, x in enumerate(indices) if x is not None) - given[0].ndim
        value = values.reshape(()).astype(self.dtype)
        mask = given[0].reshape(*given[0].shape, *[1] * behind)
        return jnp.where(mask, self + value if accumulate else value, self)
    place = self.at[fancy(self, indices)]
    values = values.astype(self.dtype)
    return place.add(values) if accumulate else place.set(values)


def _along(index: Array, dim: int) -> tuple[Array, ...]:
    grid = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij"))
    grid[dim] = index
    return tuple(grid)


@on_vectors
def _scattered(self: Array, dim: int, index: Array, src: Any, reduce: str = "set") -> Array:
    """Return self with self[index[i, j], j] = src[i, j] for dim 0, or with `reduce` in place of the
    assignment.
    """
    index = jnp.atleast_1d(index)
    if isinstance(src, Array) and src.ndim:
        src = src[tuple(slice(n) for n in index.shape)]
    src = jnp.broadcast_to(jnp.asarray(src).astype(self.dtype), index.shape)
    updated: Array = getattr(self.at[_along(index, dim % self.ndim)], reduce)(src)
    return updated


def _multiplied(self: Array, dim: int, index: Array, src: Array) -> Array:
    """Return self times the entries of src whose index points to it.

    The gradient is right where factors are 0.
    """
    dim = dim % self.ndim
    read = [slice(size) for size in index.shape]
    cut = list(read)
    cut[dim] = slice(None)
    sources = jnp.moveaxis(src[tuple(read)].astype(self.dtype), dim, -1)
    places = jnp.moveaxis(index, dim, -1)
    # (..., entries of self, entries of src): JAX has no gradient of a product where indices repeat
    # ("scatter_mul gradients are only implemented if `unique_indices=True`"), so the factors of each
    # entry are multiplied first
    sent = places[..., None, :] == jnp.arange(self.shape[dim])[:, None]
    factors = jnp.prod(jnp.where(sent, sources[..., None, :], 1), axis=-1)
    return self.at[tuple(cut)].multiply(jnp.moveaxis(factors, -1, dim), unique_indices=True)


@register_op("aten.scatter_reduce.two")
@on_vectors
def scatter_reduce(
    self: Array, dim: int, index: Array, src: Array, reduce: str, *, include_self: bool = True
) -> Array:
    """Return the sum, prod, mean, amax or amin of the entries whose index points to the same
    element.

    Equal extrema share the gradient evenly, as in torch.
    """
    if index.size == 0:
        return self
    index = jnp.atleast_1d(index)
    if reduce in ("amax", "amin"):
        return _extremum(
            self,
            dim,
            index,
            src,
            reduce == "amax",
            include_self,
        )
    start = self if include_self else _scattered(self, dim, index, reduce == "prod", "set")
    if reduce == "prod":
        return _multiplied(start, dim, index, src)
    total = _scattered(start, dim, index, src, "add")
    if reduce == "sum":
        return total
    count = jnp.ones(self.shape, jnp.int64)
    count = count if include_self else _scattered(count, dim, index, 0, "set")
    count = jnp.maximum(_scattered(count, dim, index, 1, "add"), 1).astype(self.dtype)
    return total / count if is_inexact(self) else jnp.floor_divide(total, count)


def _extremum(
    self: Array, dim: int, index: Array, src: Array, largest: bool, include_self: bool
) -> Array:
    edge: Any = jnp.inf
    if not is_inexact(self):
        edge = jnp.iinfo(self.dtype).min if largest else jnp.iinfo(self.dtype).max
    elif largest:
        edge = -jnp.inf
    start = self if include_self else _scattered(self, dim, index, edge, "set")
    value = _scattered(
        lax.stop_gradient(start), dim, index, lax.stop_gradient(src), "max" if largest else "min"
    )
    if not is_inexact(self):
        return value
    # the gradient is shared among all that equal the extreme: self's entry and the entries of src
    places = _along(index, dim % self.ndim)
    src = src[tuple(slice(n) for n in index.shape)]
    from_src = (src == value[places]).astype(self.dtype)
    from_self = (start == value).astype(self.dtype)
    if not include_self:
        from_self = from_self * _scattered(
            jnp.ones(self.shape, jnp.bool_), dim, index, False, "set"
        )
    ties = jnp.maximum(_scattered(from_self, dim, index, from_src, "add"), 1)
    linear = from_self * jnp.where(jnp.isfinite(start), start, 0) / ties
    linear = _scattered(
        linear,
        dim,
        index,
        from_src * src / ties[places],
        "add",
    )
    return value + (linear - lax.stop_gradient(linear))


@register_op("aten.masked_scatter")
def masked_scatter(self: Array, mask: Array, source: Array) -> Array:
    """Return self with the entries of source, in order, where the mask is True."""
    x, m = jnp.broadcast_arrays(self, mask.astype(jnp.bool_))
    order = jnp.clip(jnp.cumsum(m.reshape(-1)) - 1, 0, source.size - 1)
    return jnp.where(m, source.reshape(-1)[order].reshape(x.shape), x)


@register_op("aten.put")
def put(self: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    """Return self with the entries at these indices of the flattened tensor replaced, or added to."""
    place = self.reshape(-1).at[index.reshape(-1)]
    values = source.reshape(-1).astype(self.dtype)
    return (place.add(values) if accumulate else place.set(values)).reshape(self.shape)


def _without_padding_gradient(weight: Array, padding_idx: int) -> Array:
    """Return the weight, its padding row detached."""
    # aten has -1 for no padding row
    if padding_idx < 0:
        return weight
    padding = (np.arange(weight.shape[0]) == padding_idx)[:, None]
    return jnp.where(padding, lax.stop_gradient(weight), weight)


def _by_frequency(rows: Array, indices: Array, size: int) -> Array:
    """Return the rows with gradients divided by how often each index occurs."""
    counts = jnp.zeros(size, rows.dtype).at[indices.reshape(-1)].add(1)
    scale = (1 / counts[indices])[..., None]
    scaled = rows * scale
    return lax.stop_gradient(rows) + (scaled - lax.stop_gradient(scaled))


@register_op("aten.embedding")
def embedding(
    weight: Array,
    indices: Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Array:
    """Return weight[indices], (..., width); the row `padding_idx` gets no gradient."""
    del sparse
    rows = _without_padding_gradient(weight, padding_idx)[indices]
    return _by_frequency(rows, indices, weight.shape[0]) if scale_grad_by_freq else rows


@register_op("aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    _sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, Array, Array, Array]:
    """Return the sum (mode 0), mean (1) or maximum (2) of the rows of each bag, without its
    padding.

    Only torch's backward reads the other three results; they are empty here.
    """
    starts = offsets[:-1] if include_last_offset else offsets
    bags = starts.shape[0]
    has_begun = jnp.arange(indices.shape[0])[:, None] >= starts[None, :]
    bag = jnp.sum(has_begun, axis=1) - 1
    rows = _without_padding_gradient(weight, padding_idx)[indices]
    if scale_grad_by_freq:
        rows = _by_frequency(rows, indices, weight.shape[0])
    kept = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, jnp.bool_)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    counts = jnp.zeros(bags, jnp.int64).at[bag].add(kept)
    if mode == 2:
        # (bags, entries)
        member = (bag[None, :] == jnp.arange(bags)[:, None]) & kept[None, :]
        candidates = jnp.where(member[..., None], lax.stop_gradient(rows)[None], -jnp.inf)
        best = jnp.argmax(candidates, axis=1)
        largest = jnp.take_along_axis(rows, best, axis=0)
        out = jnp.where((counts > 0)[:, None], largest, 0)
    else:
        out = (
            jnp.zeros((bags, weight.shape[1]), weight.dtype)
            .at[bag]
            .add(jnp.where(kept[:, None], rows, 0))
        )
        if mode == 1:
            out = out / jnp.maximum(counts, 1)[:, None].astype(weight.dtype)
    empty = jnp.zeros(0, indices.dtype)
    return out, empty, empty, empty


@register_op("aten.arange.start_step")
def arange(
    start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, **_: Any
) -> Array:
    """Return start, start + step, ... below end."""
    whole = all(isinstance(n, int) for n in (start, end, step))
    kind = _or(dtype, jnp.dtype(jnp.int64) if whole else default_float())
    # -(-a // b) is a / b rounded up, without a float's own rounding
    count = len(range(start, end, step)) if whole else max(0, int(-(-(end - start) // step)))
    wide = jnp.float64 if jnp.issubdtype(kind, jnp.floating) else kind
    first = jnp.asarray(start, wide)
    numbers = first + jnp.arange(count).astype(wide) * jnp.asarray(step, wide)
    return numbers.astype(kind)


def _or(dtype: torch.dtype | None, default: Any) -> Any:
    return default if dtype is None else jax_dtype(dtype)


def _empty(size: Sequence[int], *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Array:
    return jnp.zeros(tuple(size), _or(dtype, default_float()))


def _split(self: Array, sizes: Sequence[int], dim: int = 0) -> tuple[Array, ...]:
    return tuple(jnp.split(self, np.cumsum(sizes)[:-1].tolist(), axis=dim))


def _channel_shuffle(self: Array, groups: int) -> Array:
    n, c, *rest = self.shape
    return self.reshape(n, groups, c // groups, *rest).swapaxes(1, 2).reshape(self.shape)


def _through(view: Lowering) -> Lowering:
    """Return self with `src` written to a view."""

    def lowering(self: Array, src: Array, *arguments: Any) -> Array:
        places = view(jnp.arange(self.size).reshape(self.shape), *arguments).reshape(-1)
        values = src.astype(self.dtype).reshape(-1)
        written = self.reshape(-1).at[places].set(values)
        return written.reshape(self.shape)

    return lowering


def _slice(
    self: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    return self[_place(self, dim, slice(start, end, step))]


def _diagonal(self: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return jnp.diagonal(self, offset, dim1, dim2)


register_op("aten._local_scalar_dense", dynamic=True)(lambda self: lax.stop_gradient(self).item())
register_table(
    {
        # torch checked the assertions at export
        "aten._assert_async": lambda *_: None,
        "aten._assert_scalar": lambda *_: None,
        "aten._assert_tensor_metadata": lambda *_, **__: None,
        "aten._linalg_check_errors": lambda *_, **__: None,
        "aten._unsafe_view": lambda self, size: jnp.reshape(self, tuple(size)),
        "aten.alias": lambda self: self,
        "aten.as_strided_scatter": _through(as_strided),
        "aten.bucketize": lambda self, boundaries, **options: searchsorted(
            boundaries, self, **options
        ),
        "aten.clone": lambda self, **_: self,
        "aten.copy": lambda self, src, non_blocking=False: jnp.broadcast_to(
            src.astype(self.dtype), self.shape
        ),
        "aten.detach": lambda self: lax.stop_gradient(self),
        "aten.diagonal": _diagonal,
        "aten.diagonal_scatter": _through(_diagonal),
        "aten.empty.memory_format": _empty,
        "aten.empty_permuted": _empty,
        "aten.empty_strided": _empty,
        "aten.flip": on_vectors(lambda self, dims: jnp.flip(self, tuple(dims))),
        "aten.full": lambda size, value, *, dtype=None, **_: jnp.full(
            tuple(size), value, _or(dtype, result_dtype(value))
        ),
        "aten.full_like": lambda self, value, *, dtype=None, **_: jnp.full(
            self.shape, value, _or(dtype, self.dtype)
        ),
        "aten.index_select": on_vectors(
            lambda self, dim, index: jnp.take(self, index.reshape(-1), axis=dim)
        ),
        "aten.lift_fresh_copy": lambda self: self,
        "aten.native_channel_shuffle": _channel_shuffle,
        "aten.new_empty_strided": lambda self, size, _, *, dtype=None, **__: jnp.zeros(
            tuple(size), _or(dtype, self.dtype)
        ),
        "aten.permute": lambda self, dims: jnp.transpose(self, tuple(dims)),
        "aten.repeat": lambda self, repeats: jnp.tile(self, tuple(repeats)),
        "aten.scalar_tensor": lambda s, *, dtype=None, **_: jnp.asarray(
            s, _or(dtype, default_float())
        ),
        "aten.scatter": _scattered,
        "aten.scatter_add": lambda self, dim, index, src: _scattered(self, dim, index, src, "add"),
        "aten.select.int": lambda self, dim, index: self[_place(self, dim, index)],
        "aten.slice.Tensor": _slice,
        "aten.split_with_sizes": _split,
        "aten.sym_constrain_range_for_size": lambda *_, **__: None,
        "aten.sym_numel": lambda self: self.size,
        "aten.sym_size.int": lambda self, dim: self.shape[dim],
        "aten.take": lambda self, index: self.reshape(-1)[index],
        "aten.unsqueeze": lambda self, dim: jnp.expand_dims(self, dim),
        "aten.view.default": lambda self, size: jnp.reshape(self, tuple(size)),
        "aten.view.dtype": lambda self, dtype: self.view(jax_dtype(dtype)),
    }
)
