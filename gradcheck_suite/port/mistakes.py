"""The usual mistakes with one operation, as a table of formulas.

Of most, an argument has another value. A row names a cause, the ATen operations that it is of, and
the values to try. A formula reads its operands from the arguments alone, never from the run in
which it is tried, so that it can be tried again elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, combinations, product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it

from gradcheck_suite.port.alterations import AlterationFamily, Options
from gradcheck_suite.port.changes import CallArguments, Hypothesis, in_place_of
from gradcheck_suite.port.torch_program import OperationCall

# Normalization, in all forms that are in use.


def _shaped(value: Any, shape: Sequence[int] | None) -> Any:
    return value if value is None or shape is None else value.reshape(shape)


def _across(x: Any) -> list[int]:
    return [1, -1, *[1] * (x.dim() - 2)]


def plain_norm(
    x: Any, over: Sequence[int], eps: float, *, centre: bool = True, ddof: int = 0, place: str = ""
) -> Any:
    """Return a normalized tensor.

    Args:
        x: any shape.
        over: axes.
        eps: added to the variance.
        centre: whether the mean is subtracted.
        ddof: what is subtracted from the number of elements.
        place: of eps where it is not inside of the root: `outside`, `least deviation` or `no root`.
    """
    over = list(over)
    centred = x - x.mean(over, keepdim=True) if centre else x
    # one element less one is no divisor
    variance = (centred**2).sum(over, keepdim=True) / max(
        math.prod(x.shape[d] for d in over) - ddof, 1
    )
    return centred / _deviation(variance, eps, place)


def _deviation(variance: Any, eps: float, place: str) -> Any:
    if place == "outside":
        return variance.sqrt() + eps
    if place == "no root":
        return variance + eps
    return variance.sqrt().clamp_min(eps) if place == "least deviation" else (variance + eps).sqrt()


def _scaled(a: CallArguments, x: Any) -> Any:
    """Return a normalized tensor times the weight of a call, plus its bias."""
    layer = "normalized_shape" in a.values
    weight, bias = (
        _shaped(a.values.get(n), None if layer else _across(x)) for n in ("weight", "bias")
    )
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _norm(
    a: CallArguments,
    *,
    over: Any = None,
    groups: Any = None,
    apart: bool = False,
    running: Any = None,
    **how: Any,
) -> Any:
    """Return the result of a norm of another form.

    `groups` and `apart` are of group norm, `running` of batch norm.
    """
    # `rms_norm` without an eps takes that of the dtype
    eps = a.values.get("eps") or torch.finfo(torch.float64).eps
    if groups or "group" in a.values:
        return _group_norm(
            a,
            groups or a.group,
            eps,
            apart=apart,
            **how,
        )
    # layer norm and RMS norm name the axes by their sizes; batch norm has running statistics
    if "normalized_shape" in a.values:
        how.setdefault("centre", "bias" in a.values)  # an RMS norm has none
        axes = range(-len(a.normalized_shape), 0) if over is None else over
        return _scaled(a, plain_norm(a.first, axes, eps, **how))
    return _batch_norm(
        a,
        eps,
        running=not _trains(a) if running is None else running,
        **how,
    )


def _group_norm(a: CallArguments, n: int, eps: float, *, apart: bool, **how: Any) -> Any:
    x = a.first
    inside = x.shape[1] // n
    # channel i of a group stands n channels behind channel i - 1, and not beside it
    parts = x.unflatten(1, (inside, n)).transpose(1, 2).flatten(1, 2) if apart else x
    parts = plain_norm(parts.reshape(len(x), n, -1), (2,), eps, **how).reshape(x.shape)
    if apart:
        parts = parts.unflatten(1, (n, inside)).transpose(1, 2).flatten(1, 2)
    return _scaled(a, parts)


def _batch_norm(a: CallArguments, eps: float, *, running: bool, **how: Any) -> Any:
    x = a.first
    if not running:
        return _scaled(a, plain_norm(x, [d for d in range(x.dim()) if d != 1], eps, **how))
    if a.running_mean is None:
        raise ValueError("no running statistics")
    mean, variance = (v.reshape(_across(x)) for v in (a.running_mean, a.running_var))
    return _scaled(a, (x - mean) / _deviation(variance, eps, how.get("place", "")))


def _trains(a: CallArguments) -> bool:
    return bool(a.values.get("training", a.values.get("train", False)))


NORM_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "eps added outside of the root": ("eps-place", {"place": "outside"}),
    "eps as the least deviation": ("eps-place", {"place": "least deviation"}),
    "division by the variance": ("missing-root", {"place": "no root"}),
    "the unbiased variance": ("variance-correction", {"ddof": 1}),
    "no mean subtracted": ("rms-for-layer-norm", {"centre": False}),
    "the mean subtracted": ("layer-for-rms-norm", {"centre": True}),
    "the statistics of the batch": ("batch-statistics", {"running": False}),
    "the running statistics": ("batch-statistics", {"running": True}),
    "channels of a group that are apart": ("group-order", {"apart": True}),
}
NORMS = ".*(layer|group|batch|rms)_norm.*"


def _groups_of_axes(n: int) -> list[tuple[int, ...]]:
    """Return all groups of fewer than n axes, the smaller ones first."""
    return list(chain.from_iterable(combinations(range(n), size) for size in range(1, n)))


def _one_axis_or_all_others(n: int) -> list[list[int]]:
    found = []
    for axis in range(n):
        found += [[axis], [other for other in range(n) if other != axis]]
    return found


# Convolution and pooling.


def _wide(value: Sequence[int], n: int) -> list[int]:
    return list(value) * n if len(value) == 1 else list(value)


def _convolution(a: CallArguments, low: Any, *, flip: bool = False, **others: Any) -> Any:
    """Return a convolution with `low` zeros in front of each axis, and as many behind as its
    result's size needs.

    A transposed one has so many elements cut off in front. `others` may have a stride, a dilation,
    a mode of padding.
    """
    size = a.out().shape[2:]
    n = a.input.dim() - 2
    weight = a.weight.flip(tuple(range(2, n + 2))) if flip else a.weight
    stride, dilation = (_wide(others.get(k, a.values[k]), n) for k in ("stride", "dilation"))
    lows = _wide(low, n) if isinstance(low, list | tuple) else [low] * n
    pads = []
    conv = torch.ops.aten.convolution
    if a.transposed:
        # as long as torch lets it be, so that any part of the size of torch's can be cut out
        more = [max(s, 2) - 1 for s in stride]
        whole = conv(
            a.input,
            weight,
            a.bias,
            stride,
            [0] * n,
            dilation,
            True,
            more,
            a.groups,
        )
        return whole[(..., *[slice(b, b + s) for b, s in zip(lows, size, strict=True)])]
    for i in reversed(range(n)):
        # the result keeps its size, whatever is padded in front
        need = (size[i] - 1) * stride[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1
        pads += [lows[i], need - a.input.shape[2 + i] - lows[i]]
    x = F.pad(a.input, pads, **({"mode": others["mode"]} if "mode" in others else {}))
    return conv(
        x,
        weight,
        a.bias,
        stride,
        [0] * n,
        dilation,
        False,
        [0] * n,
        a.groups,
    )


def _lows(a: CallArguments, out: Any) -> Iterable[int]:
    n = out.dim() - 2
    if a.transposed:
        return range(max(a.weight.shape[2:]) * max(a.dilation))
    padding = _wide(a.padding, n)
    stride = _wide(a.stride, n)
    most = max(2 * p + s for p, s in zip(padding, stride, strict=True))
    return [low for low in range(most + 1) if any(low != p for p in padding)]


def _steps(name: str) -> Callable[[CallArguments, Any], Iterator[tuple[int, int]]]:
    """Return other strides or dilations, each with some numbers of zeros in front."""

    def values(a: CallArguments, out: Any) -> Iterator[tuple[int, int]]:
        others = [n for n in range(1, 5) if a.values[name] != [n]]
        if a.transposed:
            return
        for value in others:
            steps = {"stride": max(a.stride), "dilation": max(a.dilation), name: value}
            reach = steps["dilation"] * (a.weight.shape[2] - 1) + 1
            need = (out.shape[2] - 1) * steps["stride"] + reach - a.input.shape[2]
            # "SAME" puts half of the padding in front, the smaller half; "VALID" puts none
            for low in sorted({need // 2, need - need // 2, 0, max(a.padding)}):
                yield value, low

    return values


def _pooled(a: CallArguments, low: int, kind: str) -> Any:
    """Return a pooling with so many elements of padding in front, and as many behind as its
    result's size needs.
    """
    size = a.out().shape[2:]
    x = a.first
    pads = []
    n = len(size)
    kernel = _wide(a.kernel_size, n)
    stride = _wide(a.stride or a.kernel_size, n)
    for i in reversed(range(n)):
        pads += [low, (size[i] - 1) * stride[i] + kernel[i] - x.shape[x.dim() - n + i] - low]
    # a port that pads with zeros takes them for the maximum of negative numbers
    parts = F.pad(x, pads, value=-math.inf if kind == "maximum" else 0.0)
    # how many elements of each window are no padding
    inside = F.pad(torch.ones_like(x), pads)
    for i in range(n):
        parts, inside = (v.unfold(x.dim() - n + i, kernel[i], stride[i]) for v in (parts, inside))
    over = list(range(-n, 0))
    if kind.startswith("maximum"):
        return parts.amax(over)
    return parts.sum(over) / (math.prod(kernel) if kind == "average" else inside.sum(over))


BINS: dict[str, Callable[[int, int, int], tuple[int, int]]] = {
    "without overlap": lambda n, k, i: (i * n // k, (i + 1) * n // k),
    "without overlap, the larger ones first": lambda n, k, i: (
        i * (n // k) + min(i, n % k),
        (i + 1) * (n // k) + min(i + 1, n % k),
    ),
    "of one size and stride": lambda n, k, i: (i * (n // k), n - (k - 1 - i) * (n // k)),
}
"""Window i of k over n elements, its start and its end, as people pool to a given size."""


def _binned(a: CallArguments, kind: str) -> Any:
    """Return an adaptive pooling with other windows."""
    x = a.first
    reduced = torch.mean if "avg" in a.call.name else torch.amax
    for axis, k in enumerate(a.out().shape[2:], 2):
        spans = [BINS[kind](x.shape[axis], k, i) for i in range(k)]
        x = torch.stack(
            [reduced(x.narrow(axis, low, high - low), axis) for low, high in spans], axis
        )
    return x


def _resized(a: CallArguments, mode: str) -> Any:
    size = a.out().shape[2:]
    # `jax.image.resize` has another cubic kernel than torch: -0.5 where torch has -0.75
    if mode.startswith("jax"):
        return _cubic(a.self, size)
    mode, _, smooth = mode.partition(" with ")
    linear = {3: "linear", 4: "bilinear", 5: "trilinear"}[a.self.dim()]
    mode = linear if mode == "linear" else mode
    return F.interpolate(
        a.self, size=tuple(size), mode=mode, **({"antialias": True} if smooth else {})
    )


def _cubic(x: Any, size: Sequence[int], c: float = -0.5) -> Any:
    """Resize by Keys' cubic kernel with half-pixel centers.

    Positions outside of the input have no weight.
    """
    for axis, n in zip(range(2, x.dim()), size, strict=True):
        # half-pixel centers
        at = (torch.arange(n, dtype=x.dtype) + 0.5) * x.shape[axis] / n - 0.5
        d = (at[:, None] - torch.arange(x.shape[axis], dtype=x.dtype)).abs()
        far = torch.where(d < 2, ((c * d - 5 * c) * d + 8 * c) * d - 4 * c, 0.0)
        weights = torch.where(d <= 1, ((c + 2) * d - (c + 3)) * d * d + 1, far)
        x = torch.tensordot(x, weights / weights.sum(1, keepdim=True), dims=([axis], [1])).movedim(
            -1, axis
        )
    return x


# Activations, reductions, losses: what may stand in place of its sibling.


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky relu (0.01)": F.leaky_relu,
    "leaky relu (0.2)": lambda x: F.leaky_relu(x, 0.2),
    "leaky relu (0.1)": lambda x: F.leaky_relu(x, 0.1),
    "leaky relu (0.3)": lambda x: F.leaky_relu(x, 0.3),
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "softplus": F.softplus,
    "mish": F.mish,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "abs": torch.abs,
    "square": torch.square,
    "squared relu": lambda x: F.relu(x) ** 2,
    "hard sigmoid (0.2x + 0.5)": lambda x: (0.2 * x + 0.5).clamp(0, 1),
    "exp": torch.exp,
    "sin": torch.sin,
    "expm1": torch.expm1,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "cos": torch.cos,
    "elu (0.5)": lambda x: F.elu(x, 0.5),
    "softplus minus log 2": lambda x: F.softplus(x) - math.log(2),
    "reciprocal": torch.reciprocal,
    "log": torch.log,
    "negative": torch.neg,
}
ACTIVATION = "activation"
"""Stands, in a pattern of operations, for those of one tensor and nothing else, element by element."""


MATH = "exp|expm1|log|log1p|sqrt|rsqrt|neg|reciprocal|square|abs|sin|cos"


def is_activation(call: OperationCall) -> bool:
    """Return whether a call is an activation: of one tensor, element by element, and no function of
    mathematics.
    """
    # an `exp` may be a part of anything, and is seldom an activation
    if re.fullmatch(f"({MATH})_?", call.name):
        return False
    needed = [a for a in call.op._schema.arguments if not a.has_default_value()]
    each = (
        torch.Tag.pointwise in call.op.tags
        or re.match("hardswish|log_sigmoid", call.name) is not None
    )
    # a clamp needs its limits, and is used as an activation all the same
    return call.name.startswith("clamp") or (each and len(needed) == 1)


Reduction = Callable[[Any, list[int], bool], Any]
REDUCTIONS: dict[str, Reduction] = {
    "sum": lambda x, d, k: x.sum(d, keepdim=k),
    "mean": lambda x, d, k: x.mean(d, keepdim=k),
    "maximum": lambda x, d, k: x.amax(d, keepdim=k),
    "minimum": lambda x, d, k: x.amin(d, keepdim=k),
    "root mean square": lambda x, d, k: (x**2).mean(d, keepdim=k).sqrt(),
    "norm": lambda x, d, k: (x**2).sum(d, keepdim=k).sqrt(),
    "sum of squares": lambda x, d, k: (x**2).sum(d, keepdim=k),
    "sum of absolute values": lambda x, d, k: x.abs().sum(d, keepdim=k),
    "logarithm of the sum of exponentials": lambda x, d, k: x.logsumexp(d, keepdim=k),
    "median": lambda x, d, k: x.quantile(0.5, d[0], keepdim=k),
}
VARIANCES: dict[str, Reduction] = {
    "biased variance": lambda x, d, k: x.var(d, correction=0, keepdim=k),
    "unbiased variance": lambda x, d, k: x.var(d, correction=1, keepdim=k),
    "biased standard deviation": lambda x, d, k: x.std(d, correction=0, keepdim=k),
    "unbiased standard deviation": lambda x, d, k: x.std(d, correction=1, keepdim=k),
}
REDUCING = (
    "mean|sum|var|std|amax|amin|logsumexp|prod|norm|linalg_vector_norm|max|min|var_mean|std_mean"
)


def over(a: CallArguments) -> list[int]:
    """Return the axes of a reduction."""
    dim = a.values.get("dim")
    n = a.first.dim()
    # torch takes no axis, an empty list or None for all of them
    axes: list[Any] = list(dim) if isinstance(dim, list | tuple) else [dim]
    return list(range(n)) if axes in ([], [None]) else sorted(d % n for d in axes)


def _reduced(a: CallArguments, kind: str) -> Any:
    return {**REDUCTIONS, **VARIANCES}[kind](a.first, over(a), False).reshape(a.out().shape)


def _along(a: CallArguments, over: list[int], *, keep: bool = False) -> Any:
    """Return the call's own reduction, over other axes."""
    more = {name: v for name, v in a.values.items() if name not in ("self", "dim", "keepdim")}
    found = a.call.op.overloadpacket(
        a.first,
        dim=over,
        keepdim=keep,
        **more,
    )
    return found if keep else found.reshape(a.out().shape)


def _other_axes(a: CallArguments, out: Any) -> list[list[int]]:
    """Return other axes with as many elements, or all but one."""
    x = a.first
    every = range(a.first.dim())
    options = [*([d] for d in every), *([i for i in every if i != d] for d in every)]
    return [
        o
        for o in options
        if o != over(a) and math.prod(x.shape[d] for d in o) * out.numel() == x.numel()
    ]


def _parts_of_axis(a: CallArguments, out: Any) -> list[tuple[int, int]]:
    """Return (first element, number of elements) of parts of the axis that is reduced."""
    n = a.first.shape[over(a)[0]] if len(over(a)) == 1 else 1
    # without the first, as a class token, or without the last; the first or the last alone
    return [(1, n - 1), (0, n - 1), (0, 1), (n - 1, 1)] if n > 1 else []


def _of_part(a: CallArguments, part: tuple[int, int]) -> Any:
    return a.out(self=a.first.narrow(over(a)[0], *part))


def _scattered(a: CallArguments, kind: str) -> Any:
    """Return a reduction by an index, of another kind."""
    source = a.source if "source" in a.values else a.src
    index = (
        a.index
        if a.index.dim() == source.dim()
        # `index_add` takes one index for a whole row, `scatter` one for each element
        else a.index.reshape(-1, *[1] * (source.dim() - 1 - a.dim))
    )
    return a.self.scatter_reduce(
        a.dim, index.expand_as(source), source, kind, include_self=kind == "sum"
    )


def _where_empty(a: CallArguments, value: float) -> Any:
    """Return a reduction by an index with another value where no element has the index."""
    count = torch.zeros_like(a.self).scatter_add(a.dim, a.index, torch.ones_like(a.src))
    return torch.where(count == 0, torch.as_tensor(value, dtype=a.self.dtype), a.out())


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    **{
        f"Huber's loss with {d:g}": lambda x, y, d=d: F.huber_loss(x, y, delta=d)
        for d in (1.0, 0.5, 2.0, 0.1)
    },
    **{
        f"smooth L1 with {d:g}": lambda x, y, d=d: F.smooth_l1_loss(x, y, beta=d)
        for d in (1.0, 0.5, 2.0, 0.1)
    },
    "half of the squares": lambda x, y: 0.5 * F.mse_loss(x, y),
    "absolute differences": F.l1_loss,
    "squares": F.mse_loss,
}
_LOSS = ".*_loss|nll_loss.*|kl_div|binary_cross_entropy.*"


def _each(a: CallArguments) -> Any:
    return F.nll_loss(
        a.self,
        a.target,
        a.weight,
        reduction="none",
        ignore_index=a.ignore_index,
    )


def smoothed(logp: Any, target: Any, eps: float, *, others: bool, weight: Any, ignore: int) -> Any:
    """Return a cross entropy with label smoothing, shared by all classes or by those that are not
    the target.

    Args:
        logp: (n, classes, ...), logarithms of probabilities.
        target: (n, ...).
        eps: the share.
        others: whether the target has none of it.
        weight: (classes,), or None.
        ignore: target that does not count.
    """
    valid = target != ignore
    # an ignored target is often -100, which is no class
    safe = torch.where(valid, target, 0)
    plain = -logp.gather(1, safe.unsqueeze(1)).squeeze(1)
    every = -logp.sum(1)
    n = logp.shape[1]
    item = (1 - eps) * plain + (eps * (every - plain) / (n - 1) if others else eps * every / n)
    counted = valid if weight is None else weight[safe] * valid
    return (item * counted).sum() / counted.sum()


# Masks.


def _parts_exchanged(a: CallArguments, places: tuple[int, int]) -> list[Any]:
    outs = a.every()
    i, j = places
    order = list(range(len(outs)))
    order[i] = j
    order[j] = i
    return [outs[k] for k in order]


def _masked(a: CallArguments) -> tuple[Any, Any, Any]:
    """Return mask, value where it is set, and value elsewhere."""
    return (a.condition, a.self, a.other) if a.call.name == "where" else (a.mask, a.value, a.self)


def _filled(a: CallArguments, value: float, *, invert: bool = False) -> Any:
    mask, _, other = _masked(a)
    other = torch.as_tensor(other)
    return torch.where(~mask if invert else mask, torch.as_tensor(value, dtype=other.dtype), other)


def _mask_of_sum(a: CallArguments) -> tuple[Any, Any] | None:
    """Return the additive mask of a sum and its other summand, None where neither is a mask."""
    for mine, other in ((a.self, a.other), (a.other, a.self)):
        both = isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor)
        # what is added to hide something is large and negative; -1e4 is as low as people go in
        # float16
        if both and mine.is_floating_point() and bool((mine <= -1e4).any()):
            return mine, other
    return None


def _where_masked(values: Iterable[float]) -> Options:
    """Return values of a row that is of sums with an additive mask alone."""
    return lambda a, out: list(values) if _mask_of_sum(a) is not None else []


def _added(a: CallArguments, value: float, *, invert: bool = False, replace: bool = False) -> Any:
    """Return a sum with another additive mask."""
    found = _mask_of_sum(a)
    if found is None:  # the row is tried again at another call of the line
        raise ValueError("no mask")
    mask = (found[0] <= -1e4) ^ invert
    other = found[1]
    put = torch.as_tensor(value, dtype=other.dtype)
    return torch.where(mask, put, other) if replace else other + torch.where(mask, put, 0.0)


# The table.


EPS = (
    1e-5,
    1e-6,
    1e-3,
    1e-12,
    1e-8,
    1e-7,
    1e-4,
    0.0,
    1e-2,
    1e-10,
    1e-9,
    # the unit roundoffs of float64 and float32, as `jnp.finfo` gives them
    2.0**-52,
    2.0**-23,
    1e-15,
    1e-16,
    0.1,
)
FILLS = (-1e4, -1e9, -1e30, 0.0, -1.0, 1.0, -100.0, -1e5, -1e3, -10.0, -5.0, -math.inf, -1e2, -1e6)
NEGATIVE = (-1e9, -math.inf, -1e30, -1e4, -1e5)
COMPARED = {
    "gt": ("ge", "lt", "le"),
    "ge": ("gt", "le", "lt"),
    "lt": ("le", "gt", "ge"),
    "le": ("lt", "ge", "gt"),
}
SOFTMAX = "_?softmax|_?log_softmax"
MODES = ("reflect", "replicate", "circular")
BOTH = (True, False)


def _near(name: str) -> Callable[[CallArguments, Any], list[Any]]:
    return lambda a, out: [a.values[name] + 1, a.values[name] - 1]


def _reindexed(a: CallArguments, by: int) -> Any:
    indices = zip(a.indices, a.self.shape, strict=False)
    return a.out(
        indices=[i if i is None or i.dtype == torch.bool else (i + by) % n for i, n in indices]
    )


def _padded(x: Any, pad: Sequence[int], mode: str) -> Any:
    """Return a padded tensor; with a negative number at one end, a circular kind rolls it."""
    if mode == "constant":
        return F.pad(x, list(pad))
    for d, low, high in zip(range(x.dim() - 1, -1, -1), pad[::2], pad[1::2], strict=False):
        n = x.shape[d]
        at = torch.arange(-low, n + high)
        at = {
            "circular": lambda at=at, n=n: at % n,
            "replicate": lambda at=at, n=n: at.clamp(0, n - 1),
            "reflect": lambda at=at, n=n: n - 1 - (at % max(2 * n - 2, 1) - (n - 1)).abs(),
        }[mode]()
        x = x.index_select(d, at)
    return x


def _other_pads(a: CallArguments, out: Any) -> list[list[int]]:
    """Return as many elements of padding, split otherwise between the two ends of each axis; the
    ends exchanged come first.
    """
    pairs = list(zip(a.pad[::2], a.pad[1::2], strict=True))
    ends = [[(high, low) for low, high in pairs]]
    for first in range(max(map(sum, pairs)) + 1):
        ends.append([(min(first, sum(pair)), max(sum(pair) - first, 0)) for pair in pairs])
    return [list(chain.from_iterable(pads)) for pads in ends]


def _both(a: CallArguments, out: Any) -> list[str]:
    """Return the operands of a sum or a product of two tensors, or nothing."""
    return (
        ["second", "first"]
        if isinstance(a.self, torch.Tensor) and isinstance(a.other, torch.Tensor)
        else []
    )


def _one(a: CallArguments, out: Any) -> list[str]:
    return _both(a, out)[:1]


def _axes(a: CallArguments, out: Any) -> list[int]:
    return [d for d in range(out.dim()) if d != a.dim % out.dim()]


def _argument(cause: str, operations: str, name: str, values: Options) -> AlterationFamily:
    """Return that an argument has another value."""

    def others(a: CallArguments, out: Any) -> list[Any]:
        mine = getattr(a, name)
        every = values(a, out) if callable(values) else values
        return [
            v
            for v in every
            if v is not mine and (v is None or isinstance(mine, torch.Tensor) or v != mine)
        ]

    words = f"no {name}" if values == (None,) else f"{name} {{}} instead of {{given.{name}}}"
    return AlterationFamily(
        cause,
        operations,
        words,
        lambda a, value: a.every(**{name: value}),
        others,
    )


FORMULAS = (
    # arguments
    _argument("eps", ".*norm.*", "eps", EPS),
    _argument("gelu-approximation", "gelu_?", "approximate", ("tanh", "none")),
    _argument("align-corners", "_?upsample.*|grid_sampler.*", "align_corners", BOTH),
    _argument("padding-mode", "grid_sampler.*", "padding_mode", (0, 1, 2)),
    _argument("average-window", "avg_pool.*", "count_include_pad", BOTH),
    _argument("average-window", ".*pool.*", "ceil_mode", BOTH),
    _argument("missing-bias", "convolution", "bias", (None,)),
    _argument("constant", "leaky_relu_?", "negative_slope", (0.01, 0.2, 0.1, 0.3, 0.02, 0.05)),
    _argument("constant", "elu_?|celu_?", "alpha", (1.0, 0.5, 0.1, 1.6732632423543772)),
    _argument("constant", "softplus", "beta", (1, 2, 0.5, 10)),
    _argument("mask-diagonal", "tril_?|triu_?", "diagonal", _near("diagonal")),
    _argument("mask-window", "(gt|ge|lt|le|eq|ne)_?", "other", _near("other")),
    _argument(
        "other-position", "select", "index", lambda a, out: range(min(a.self.shape[a.dim], 64))
    ),
    _argument("top-k", "topk", "k", lambda a, out: range(1, a.self.shape[a.dim] + 1)),
    _argument("axis", "cumsum|cumprod", "dim", _axes),
    _argument("class-weights", "nll_loss.*|binary_cross_entropy.*", "weight", (None,)),
    _argument("class-weights", "binary_cross_entropy.*", "pos_weight", (None,)),
    AlterationFamily(
        "class-weights",
        "binary_cross_entropy_with_logits",
        "the weights of the positive targets on all",
        lambda a, p: a.out(weight=a.pos_weight, pos_weight=None),
    ),
    _argument("ignore-index", "nll_loss.*", "ignore_index", (0, 1, -1, -100, -1000)),
    _argument("reduction", _LOSS, "reduction", (1, 2)),
    _argument("reversed", "sort", "descending", BOTH),
    _argument("loss-threshold", "smooth_l1_loss", "beta", (1.0, 0.5, 2.0, 0.1, 1 / 9)),
    _argument("loss-threshold", "huber_loss", "delta", (1.0, 0.5, 2.0, 0.1, 1.35)),
    # convolution, pooling, resizing
    AlterationFamily(
        "padding", "convolution", "{} elements of padding in front", _convolution, _lows
    ),
    AlterationFamily(
        "kernel-flipped",
        "convolution",
        "the kernel flipped",
        lambda a, p: _convolution(a, a.padding, flip=True),
    ),
    AlterationFamily(
        "kernel-flipped and padding",
        "convolution",
        "the kernel flipped, {} elements of padding in front",
        lambda a, low: _convolution(a, low, flip=True),
        _lows,
    ),
    AlterationFamily(
        "kernel-transposed",
        "convolution",
        "axes {} of the kernel exchanged",
        lambda a, p: a.out(weight=a.weight.transpose(*p)),
        ((2, 3), (0, 1)),
    ),
    AlterationFamily(
        "padding-mode",
        "convolution",
        "padding of the kind {}",
        lambda a, m: _convolution(a, a.padding, mode=m),
        MODES,
    ),
    AlterationFamily(
        "dilation",
        "convolution",
        "dilation and padding {}",
        lambda a, p: _convolution(a, p[1], dilation=[p[0]]),
        _steps("dilation"),
    ),
    AlterationFamily(
        "stride",
        "convolution",
        "stride and padding {}",
        lambda a, p: _convolution(a, p[1], stride=[p[0]]),
        _steps("stride"),
    ),
    AlterationFamily(
        "group-order",
        "convolution",
        "the channels of groups interleaved",
        lambda a, p: a.out(
            input=a.input.unflatten(1, (-1, a.groups)).transpose(1, 2).flatten(1, 2)
        ),
    ),
    *(
        AlterationFamily(
            "pool-kind",
            "(avg|max)_pool.*",
            f"the {kind}, padded by {{}}",
            lambda a, low, kind=kind: _pooled(a, low, kind),
            lambda a, out: range(max(a.kernel_size)),
        )
        for kind in ("maximum", "average", "average of what is inside")
    ),
    AlterationFamily(
        "padding-mode",
        "max_pool.*",
        "zeros in the padding",
        lambda a, p: _pooled(a, max(a.padding), "maximum with zeros"),
    ),
    AlterationFamily(
        "pool-kind",
        "_?adaptive_(avg|max)_pool.*",
        "the {}",
        lambda a, kind: getattr(F, f"adaptive_{kind}_pool{a.first.dim() - 2}d")(
            a.first, a.out().shape[2:]
        ),
        ("max", "avg"),
    ),
    AlterationFamily("average-window", "_?adaptive_(avg|max)_pool.*", "windows {}", _binned, BINS),
    AlterationFamily(
        "resize-mode",
        "_?upsample.*",
        "resizing by {}",
        _resized,
        (
            "nearest",
            "nearest-exact",
            "area",
            "linear",
            "bicubic",
            "jax.image's cubic kernel",
            "linear with antialias",
        ),
    ),
    # normalization, activation, softmax
    *(
        AlterationFamily(cause, NORMS, words, lambda a, p, how=how: _norm(a, **how))
        for words, (cause, how) in NORM_FORMS.items()
    ),
    AlterationFamily(
        "norm-axis",
        ".*layer_norm",
        "normalization over axes {}",
        lambda a, over: _norm(a, over=over),
        lambda a, out: _groups_of_axes(out.dim()),
    ),
    AlterationFamily(
        "norm-axis",
        "_weight_norm.*",
        "the norm over axes {}",
        lambda a, over: a.v * a.g / a.v.pow(2).sum(over, keepdim=True).sqrt(),
        lambda a, out: _one_axis_or_all_others(out.dim()),
    ),
    AlterationFamily(
        "groups",
        ".*group_norm",
        "{} groups",
        lambda a, n: _norm(a, groups=n),
        lambda a, out: (
            [g for g in range(1, out.shape[1] + 1) if out.shape[1] % g == 0 and g != a.group]
        ),
    ),
    AlterationFamily(
        "norm-axis",
        ".*batch_norm",
        "{} channels normalized together",
        lambda a, d: _norm(a, groups=a.first.shape[1] // d),
        lambda a, out: (
            [d for d in range(2, out.shape[1] + 1) if out.shape[1] % d == 0 and _trains(a)]
        ),
    ),
    AlterationFamily(
        "missing-norm",
        NORMS,
        "no normalization, scale and bias alone",
        lambda a, p: _scaled(a, a.first),
    ),
    AlterationFamily("missing-activation", ACTIVATION, "no activation", lambda a, p: a.first + 0.0),
    AlterationFamily("sign", "neg", "the sign not exchanged", lambda a, p: a.first + 0.0),
    AlterationFamily("missing-operation", MATH, "none", lambda a, p: a.first + 0.0),
    *(
        AlterationFamily(
            "activation", operations, "{}", lambda a, name: ACTIVATIONS[name](a.first), ACTIVATIONS
        )
        for operations in (ACTIVATION, MATH)
    ),
    AlterationFamily(
        "softmax-axis",
        SOFTMAX,
        "softmax over axis {}",
        lambda a, d: getattr(a.self.clamp_min(-1e30), a.call.name.strip("_"))(d),
        _axes,
    ),
    AlterationFamily(
        "softmax-kind",
        SOFTMAX,
        "{}",
        lambda a, name: getattr(a.self, name)(*[a.dim][: name != "sigmoid"]),
        ("log_softmax", "softmax", "sigmoid"),
    ),
    AlterationFamily(
        "mask-value",
        SOFTMAX,
        "rows that see nothing as {:.6g}",
        lambda a, p: torch.where(a.self.amax(a.dim, keepdim=True) < -1e4, p, a.out()),
        lambda a, out: [1 / out.shape[a.dim], 0.0],
    ),
    # embeddings, masks
    # an array of JAX has its last row beyond its end, and counts negative indices from there
    AlterationFamily(
        "index-offset",
        "embedding",
        "rows {:+d} away",
        lambda a, p: a.weight[(a.indices + p).clamp_max(len(a.weight) - 1) % len(a.weight)],
        (1, -1, 2, -2),
    ),
    AlterationFamily(
        "index-offset", "index", "indices {:+d} away, around the end", _reindexed, (1, -1)
    ),
    AlterationFamily(
        "other-position",
        "index",
        "position {} of every row",
        lambda a, p: a.out(indices=[*a.indices[:-1], torch.full_like(a.indices[-1], p)]),
        lambda a, out: [-1, 0] if a.indices[-1].dtype == torch.int64 else [],
    ),
    AlterationFamily(
        "padding-row",
        "embedding",
        "row {} taken as zeros",
        lambda a, p: a.weight[a.indices] * (a.indices != p)[..., None],
        lambda a, out: sorted(
            {0, 1, len(a.weight) - 1, *([a.padding_idx] if a.padding_idx >= 0 else [])}
        ),
    ),
    AlterationFamily(
        "embedding-scale",
        "embedding",
        "rows times {:.6g}",
        lambda a, p: a.out() * p,
        lambda a, out: [out.shape[-1] ** 0.5, out.shape[-1] ** -0.5, float(out.shape[-1])],
    ),
    AlterationFamily(
        "constant",
        "pow",
        "base {:g}",
        lambda a, base: base**a.exponent,
        lambda a, out: [] if isinstance(a.self, torch.Tensor) else [1e4, 5e5, 1e6, 1e3, 1e5, 100.0],
    ),
    AlterationFamily(
        "mask-polarity",
        "tril_?|triu_?",
        "the other triangle",
        lambda a, p: a.self.triu(a.diagonal) if "tril" in a.call.name else a.self.tril(a.diagonal),
    ),
    AlterationFamily(
        "comparison",
        "gt|ge|lt|le",
        "{}",
        lambda a, p: getattr(torch, p)(a.self, a.other),
        lambda a, out: COMPARED[a.call.name],
    ),
    AlterationFamily(
        "mask-polarity", "eq|ne|logical_not|bitwise_not", "the opposite", lambda a, p: ~a.out()
    ),
    AlterationFamily(
        "mask-value", "where|masked_fill_?", "masked elements as {:g}", _filled, FILLS
    ),
    AlterationFamily(
        "mask-polarity",
        "where|masked_fill_?",
        "the mask inverted, with {:g}",
        lambda a, p: _filled(a, p, invert=True),
        (-1e30, -1e9, -1e4, -1e10),
    ),
    AlterationFamily(
        "mask-value",
        "where|masked_fill_?",
        "{:g} added where masked",
        lambda a, p: _masked(a)[2] + p * _masked(a)[0].double(),
        [f for f in FILLS if -math.inf < f < -1],
    ),
    *(
        AlterationFamily(
            "mask-polarity" if invert else "mask-value",
            "add",
            "the mask inverted ({:g})" if invert else "{:g} where masked",
            lambda a, p, i=invert, r=put: _added(a, p, invert=i, replace=r),
            _where_masked(NEGATIVE if invert else [f for f in FILLS if f or put]),
        )
        for invert, put in product((False, True), (False, True))
    ),
    AlterationFamily(
        "missing-mask", "add", "no mask", lambda a, p: _added(a, p), _where_masked([0.0])
    ),
    # parts and orders of elements
    AlterationFamily(
        "missing-transpose",
        "permute|transpose|t",
        "the elements read in their old order",
        lambda a, p: a.self.reshape(a.out().shape),
    ),
    *(
        AlterationFamily(
            cause,
            "cat|stack",
            "the parts in the other order",
            lambda a, p: a.out(tensors=a.tensors[::-1]),
            lambda a, out, many=cause == "reversed": [None] if (len(a.tensors) > 3) == many else [],
        )
        for cause in ("order-of-parts", "reversed")
    ),
    AlterationFamily(
        "parts-swapped",
        "(unsafe_)?split.*|unbind|chunk",
        "parts {} exchanged",
        _parts_exchanged,
        lambda a, out: combinations(range(len(a.every())), 2),
    ),
    AlterationFamily(
        "roll-direction",
        "roll",
        "rolled the other way",
        lambda a, p: a.out(shifts=[-s for s in a.shifts]),
    ),
    AlterationFamily(
        "padding", "constant_pad_nd", "padding {}", lambda a, pad: a.out(pad=pad), _other_pads
    ),
    AlterationFamily(
        "padding-mode",
        "(constant|reflection|replication)_pad.*",
        "padding of the kind {}",
        lambda a, mode: _padded(a.self, a.values.get("pad") or a.padding, mode),
        ("constant", *MODES),
    ),
    AlterationFamily(
        "reduction",
        "minimum|maximum",
        "the {} of both",
        lambda a, kind: REDUCTIONS[kind](torch.stack((a.self, a.other)), [0], False),
        REDUCTIONS,
    ),
    AlterationFamily(
        "reduction",
        "select",
        "the {} instead of one element",
        lambda a, kind: REDUCTIONS[kind](a.self, [a.dim], False),
        REDUCTIONS,
    ),
    AlterationFamily("other-slice", "slice", "all elements", lambda a, p: a.self + 0.0),
    AlterationFamily(
        "other-slice",
        "slice",
        "elements from {} on",
        lambda a, b: a.self.narrow(a.dim, b, a.out().shape[a.dim]),
        lambda a, out: range(min(a.self.shape[a.dim] - out.shape[a.dim] + 1, 64)),
    ),
    # reductions, sums and products
    AlterationFamily(
        "missing-root", "std|norm|linalg_vector_norm", "the square", lambda a, p: a.out() ** 2
    ),
    AlterationFamily(
        "variance-correction", "var|std|var_mean|std_mean", "the {}", _reduced, VARIANCES
    ),
    AlterationFamily("reduction", REDUCING, "the {}", _reduced, REDUCTIONS),
    AlterationFamily(
        "reduction",
        "(index_add|scatter_add|scatter_reduce)_?",
        "the {} of the elements at an index",
        _scattered,
        ("sum", "mean", "amax", "amin"),
    ),
    AlterationFamily(
        "empty-segment",
        "scatter_reduce_?",
        "{:g} where no element has the index",
        _where_empty,
        (-math.inf, math.inf, 0.0, 1.0, math.nan),
    ),
    AlterationFamily("axis", REDUCING, "axes {}", _along, _other_axes),
    AlterationFamily(
        "axis",
        REDUCING,
        "axes {}, which are kept",
        lambda a, over: _along(a, over, keep=True),
        lambda a, out: [
            *([d] for d in range(a.first.dim())),
            list(range(a.first.dim())),
            *_other_axes(a, out),
        ],
    ),
    AlterationFamily(
        "count",
        "mean",
        "the mean over a count of {:+d}",
        lambda a, p: a.out() * (n := a.first.numel() // max(a.out().numel(), 1)) / (n + p),
        (1, -1),
    ),
    AlterationFamily(
        "other-slice",
        REDUCING,
        "a part of the axis alone (start, length): {}",
        _of_part,
        _parts_of_axis,
    ),
    AlterationFamily(
        "cumulative-sum",
        "cumsum",
        "a sum without the element itself",
        lambda a, p: a.self.cumsum(a.dim) - a.self,
    ),
    AlterationFamily(
        "cumulative-sum",
        "cumsum",
        "a sum from the other end",
        lambda a, p: a.self.flip(a.dim).cumsum(a.dim).flip(a.dim),
    ),
    AlterationFamily("missing-bias", "addmm", "no bias", lambda a, p: a.mat1 @ a.mat2),
    AlterationFamily(
        "eps-place",
        "add",
        "{:g} added to the square, inside of the root",
        lambda a, p: (a.self**2 + p).sqrt(),
        lambda a, out: (
            [] if isinstance(a.other, torch.Tensor) or not 0 < a.other < 1e-2 else [a.other]
        ),
    ),
    *(
        AlterationFamily(
            "eps-place",
            "clamp_min|clamp",
            words,
            formula,
            lambda a, out: [a.min] if 0 < (a.min or 0) < 1e-2 else [],
        )
        for words, formula in (
            ("{:g} added", lambda a, p: a.self + p),
            ("{:g} added to the square, inside of the root", lambda a, p: (a.self**2 + p).sqrt()),
            (
                "the square of {:g} added, inside of the root",
                lambda a, p: (a.self**2 + p**2).sqrt(),
            ),
        )
    ),
    AlterationFamily(
        "sign",
        "add|sub|rsub",
        "the sign of one operand flipped",
        lambda a, p: a.self - a.other if a.call.name == "add" else a.self + a.other,
        _one,
    ),
    AlterationFamily(
        "term-order",
        "add|sub|rsub",
        "the difference in the other order",
        lambda a, p: a.other - a.self,
        _one,
    ),
    AlterationFamily(
        "product-for-sum", "add|sub", "a product", lambda a, p: a.self * a.other, _one
    ),
    AlterationFamily(
        "sum-for-product", "mul_?|div_?", "a sum", lambda a, p: a.self + a.other, _one
    ),
    AlterationFamily(
        "unit-offset",
        "mul_?",
        "1 + the {} factor",
        lambda a, p: a.self * (1 + a.other) if p == "second" else (1 + a.self) * a.other,
        _both,
    ),
    AlterationFamily(
        "scale",
        "mul_?|div_?",
        "the inverse",
        lambda a, p: a.self / a.other if "mul" in a.call.name else a.self * a.other,
        _one,
    ),
    AlterationFamily(
        "missing-term", "addcmul", "a product alone", lambda a, p: a.value * a.tensor1 * a.tensor2
    ),
    AlterationFamily(
        "one-minus",
        "lerp",
        "the weights exchanged",
        lambda a, p: torch.lerp(a.end, a.self, a.weight),
    ),
    # losses
    AlterationFamily(
        "ignore-index",
        "nll_loss.*",
        "a mean over all targets, ignored ones too",
        lambda a, p: _each(a).sum() / a.target.numel(),
    ),
    AlterationFamily(
        "ignore-index",
        "nll_loss.*",
        "the weight of class 0 for ignored targets in the mean",
        lambda a, p: (
            _each(a).sum() / a.weight[torch.where(a.target == a.ignore_index, 0, a.target)].sum()
        ),
        lambda a, out: [None] if a.weight is not None else [],
    ),
    AlterationFamily(
        "ignore-index",
        "nll_loss.*",
        "ignored targets as class 0",
        lambda a, p: a.out(target=torch.where(a.target == a.ignore_index, 0, a.target)),
    ),
    AlterationFamily(
        "class-weights",
        "nll_loss.*",
        "weighted losses divided by their number",
        lambda a, p: _each(a).sum() / (a.target != a.ignore_index).sum(),
    ),
    AlterationFamily(
        "loss-kind",
        "smooth_l1_loss|huber_loss|mse_loss|l1_loss",
        "{}",
        lambda a, kind: LOSSES[kind](a.self, a.target),
        LOSSES,
    ),
)


@cache
def rows_of(operation: str, activates: bool) -> tuple[AlterationFamily, ...]:
    """Return the rows of an operation.

    Args:
        operation: its name.
        activates: whether it is an activation.
    """
    return tuple(
        row for row in FORMULAS if (activates if row.where == ACTIVATION else row.is_of(operation))
    )


def mistakes(
    index: int, call: OperationCall, args: Sequence[Any], kwargs: Any, out: Any
) -> Iterator[Hypothesis]:
    """Yield the usual mistakes with one operation, by the table and by its numbers."""
    given = CallArguments(call, args, kwargs)
    yield from _other_numbers(index, call, given)
    activates = is_activation(call) and isinstance(out, torch.Tensor) and out.is_floating_point()
    for row in rows_of(call.name, activates):
        for one in row.alterations(given, out):
            yield Hypothesis(one.cause, one.words, {index: in_place_of(one.make)})


_NUMBERS = (0.0, 1.0, 2.0, 0.5, -1.0, 3.0, 4.0, 0.1, 0.2, 0.3, 0.01)
_NUMBERED = re.compile(
    "(add|sub|mul|div|pow|rsub|clamp|clamp_min|clamp_max|softplus|hardtanh|addcmul|lerp)_?"
)
BASES = (1e4, 1e3, 1e5, 5e5, 1e6, 100.0)


def _other_numbers(index: int, call: OperationCall, given: CallArguments) -> Iterator[Hypothesis]:
    """Yield other values of a number that the author's code has in a sum, product, power or limit."""
    if not _NUMBERED.fullmatch(call.name):
        return
    name = call.name.rstrip("_")
    for argument, value in given.values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and argument != "alpha":
            yield from _other_values(index, name, argument, float(value))


def _other_values(index: int, name: str, argument: str, value: float) -> Iterator[Hypothesis]:
    """Yield other values of a number that is an argument of an operation."""

    def put(other: float) -> dict[int, Any]:
        return {index: in_place_of(lambda a: a.out(**{argument: other}))}

    tiny = name in ("add", "clamp_min", "clamp") and 0 < abs(value) < 1e-2
    if name.startswith("clamp") and not tiny:
        # a limit that is left out is more usual than another one, which may do the same here
        free = -math.inf if argument == "min" else math.inf
        yield Hypothesis("missing-operation", f"no limit at {value:g}", put(free))
    cause = "scale" if name in ("mul", "div") else "constant"
    cause = "eps" if tiny else cause
    bases = BASES if abs(value) >= 50 else ()
    # of what keeps a denominator from zero only such values are usual: a larger limit may do the
    # same at one input
    others = EPS if tiny else (*bases, *_numbers_near(value), *_NUMBERS)
    for other in others:
        if other != value:
            named = "missing-scale" if cause == "scale" and other == 1 else cause
            yield Hypothesis(named, f"{other:.9g} instead of {value:g}", put(other))


def _numbers_near(value: float) -> list[float]:
    """Return what people take for a number: its inverse, its square, another base of a table."""
    if not value or not math.isfinite(value):
        return []
    return [
        1 / value,
        value**2,
        math.copysign(math.sqrt(abs(value)), value),
        -value,
        2 * value,
        value / 2,
        1 - value,
        value + 1,
        value - 1,
        *(value * math.log(b) / math.log(1e4) for b in BASES),
    ]
