"""What could be wrong with one operation: the table of its usual mistakes, and of what may happen to any tensor.

A row is data: a cause, the operations that it is of, the values of its parameter, and the formula that is computed in
place of the operation. A formula reads its operands from the arguments alone, never from the run in which it is tried.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it

from gradcheck_suite.port.torch_program import Call, Change, Ref, flat


@dataclass
class Hypothesis:
    """One change of a torch program.

    Attributes:
        cause: a name of `causes.CAUSES`.
        words: what the port does, as a clause.
        changes: index of a call -> what is done in its place.
        leaves: leaf of the state or of the inputs -> function of its value, or the `Ref` of the leaf in its place.
        at: index of the call that is the place, where it is not the one at which the difference is seen.
        kind: `load` for a change of a parameter.
        path: the place, where it is not that of a call.
    """

    cause: str
    words: str
    changes: dict[int, Change] = field(default_factory=dict)
    leaves: dict[Any, Any] = field(default_factory=dict)
    at: int | None = None
    kind: str = "forward"
    path: str | None = None

    def further_on(self, by: int) -> Hypothesis:
        """Return the same change of calls further on in the program."""

        def shifted(change: Change) -> Change:
            def get_at(get: Any) -> Any:
                return lambda r: get(Ref(r.kind + by, r.index) if isinstance(r, Ref) and isinstance(r.kind, int) else r)

            return lambda call, args, kwargs, get: change(call, args, kwargs, get_at(get))

        changes = {i + by: shifted(c) for i, c in self.changes.items()}
        return replace(self, changes=changes, leaves={}, at=None if self.at is None else self.at + by)


class Given:
    """The arguments of a call by their names in ATen's schema, with defaults."""

    def __init__(self, call: Call, args: Sequence[Any], kwargs: Any) -> None:
        self._call, self._args, self._kwargs = call, list(args), dict(kwargs)
        schema = call.op._schema.arguments
        self.values = {a.name: a.default_value for a in schema}
        self.values |= dict(zip(call.names, self._args, strict=False)) | self._kwargs

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def first(self) -> torch.Tensor:
        """The first tensor."""
        found: torch.Tensor = next(v for v in self.values.values() if isinstance(v, torch.Tensor))
        return found

    @property
    def second(self) -> Any:
        """The second argument."""
        return self._args[1]

    def out(self, **others: Any) -> Any:
        """Return the first result, with other values for some arguments."""
        args, kwargs = list(self._args), dict(self._kwargs)
        for name, value in others.items():
            place = self._call.names.index(name)
            if name in kwargs or self._call.op._schema.arguments[place].kwarg_only:
                kwargs[name] = value
                continue
            args += [a.default_value for a in self._call.op._schema.arguments[len(args) : place + 1]]
            args[place] = value
        return flat(self._call.op(*args, **kwargs))[0]


class Row(NamedTuple):
    """One mistake.

    Attributes:
        cause: a name of `causes.CAUSES`.
        operations: a pattern of names of ATen operations.
        words: what the port does; `{0}` is the parameter, `{1}` torch's value of the argument.
        formula: (given, parameter) -> the result; None where the parameter is a value of the argument `name`.
        over: values of the parameter, or (given, result) -> values.
        name: of the argument that has another value.
        where: (given, result) -> whether the row fits.
    """

    cause: str
    operations: str
    words: str
    formula: Callable[[Given, Any], Any] | None = None
    over: Any = (None,)
    name: str = ""
    where: Callable[[Given, Any], bool] = lambda given, out: True


def argument(cause: str, operations: str, name: str, over: Any, words: str = "") -> Row:
    """Return the row of an argument that has another value."""
    return Row(cause, operations, words or f"{name} {{0}} instead of {{1}}", None, over, name)


# Formulas that several rows share.


def _normalized(x: Any, over: Sequence[int], eps: float, *, centre: bool = True, ddof: int = 0, place: str = "") -> Any:
    over = list(over)
    centred = x - x.mean(over, keepdim=True) if centre else x
    count = math.prod(x.shape[d] for d in over)
    variance = (centred**2).sum(over, keepdim=True) / max(count - ddof, 1)
    if place == "outside":
        return centred / (variance.sqrt() + eps)
    if place == "no root":
        return centred / (variance + eps)
    if place == "maximum":
        return centred / variance.sqrt().clamp_min(eps)
    return centred / (variance + eps).sqrt()


def _affine(x: Any, weight: Any, bias: Any, shape: Sequence[int] | None = None) -> Any:
    weight, bias = (v if v is None or shape is None else v.reshape(shape) for v in (weight, bias))
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _across(x: Any) -> list[int]:
    return [1, -1, *[1] * (x.dim() - 2)]


def _layer(a: Given, **how: Any) -> Any:
    over = how.pop("over", range(-len(a.normalized_shape), 0))
    return _affine(_normalized(a.input, over, a.eps, **how), a.weight, a.bias)


def _rms(a: Given, **how: Any) -> Any:
    eps = a.eps or torch.finfo(a.input.dtype).eps
    return _affine(_normalized(a.input, range(-len(a.normalized_shape), 0), eps, **how), a.weight, None)


def _group(a: Given, groups: int, **how: Any) -> Any:
    parts = a.input.reshape(a.input.shape[0], groups, -1)
    return _affine(_normalized(parts, (2,), a.eps, **how).reshape(a.input.shape), a.weight, a.bias, _across(a.input))


def _far_groups(a: Given) -> Any:
    inside = a.input.shape[1] // a.group
    mixed = a.input.unflatten(1, (inside, a.group)).transpose(1, 2).flatten(1, 2)
    parts = _normalized(mixed.reshape(mixed.shape[0], a.group, -1), (2,), a.eps).reshape(mixed.shape)
    back = parts.unflatten(1, (a.group, inside)).transpose(1, 2).flatten(1, 2)
    return _affine(back, a.weight, a.bias, _across(back))


def _batch(a: Given, running: bool, **how: Any) -> Any:
    x, shape = a.input, _across(a.input)
    if not running:
        over = [d for d in range(x.dim()) if d != 1]
        return _affine(_normalized(x, over, a.eps, **how), a.weight, a.bias, shape)
    mean, variance = a.running_mean.reshape(shape), a.running_var.reshape(shape)
    roots = {"outside": variance.sqrt() + a.eps, "no root": variance + a.eps}
    return _affine((x - mean) / roots.get(how.get("place", ""), (variance + a.eps).sqrt()), a.weight, a.bias, shape)


def _trains(a: Given) -> bool:
    return bool(a.values.get("training", a.values.get("train", False)))


def _convolution(a: Given, low: Sequence[int], size: Sequence[int], **others: Any) -> Any:
    """Return a convolution with so many zeros in front of each axis, and as many behind as its result's size needs."""
    stride, dilation, pads = others.get("stride", a.stride), others.get("dilation", a.dilation), []
    n = len(size)
    stride, dilation = _wide(stride, n), _wide(dilation, n)
    for i in reversed(range(n)):
        need = (size[i] - 1) * stride[i] + dilation[i] * (a.weight.shape[2 + i] - 1) + 1
        pads += [low[i], need - a.input.shape[2 + i] - low[i]]
    x = F.pad(a.input, pads, **({"mode": others["mode"]} if "mode" in others else {}))
    weight = others.get("weight", a.weight)
    conv = torch.ops.aten.convolution.default
    return conv(x, weight, a.bias, stride, [0] * n, dilation, False, [0] * n, a.groups)


def _wide(value: Sequence[int], n: int) -> list[int]:
    return list(value) * n if len(value) == 1 else list(value)


def _lows(a: Given, out: Any) -> Iterator[tuple[int, ...]]:
    n = out.dim() - 2
    padding, stride = _wide(a.padding, n), _wide(a.stride, n)
    most = max(2 * p + s for p, s in zip(padding, stride, strict=True))
    yield from ((low,) * n for low in range(most + 1) if any(low != p for p in padding))


def _transposed(a: Given, low: int, weight: Any, size: Sequence[int]) -> Any:
    n = len(size)
    conv = torch.ops.aten.convolution.default
    stride = _wide(a.stride, n)
    more = [max(s, 2) - 1 for s in stride]
    whole = conv(a.input, weight, a.bias, stride, [0] * n, a.dilation, True, more, a.groups)
    return whole[(..., *[slice(low, low + s) for s in size])]


def _spatial(x: Any) -> tuple[int, ...]:
    return tuple(range(2, x.dim()))


def _strides(name: str) -> Callable[[Given, Any], Iterator[Any]]:
    def over(a: Given, out: Any) -> Iterator[Any]:
        n = out.dim() - 2
        for value in range(1, 5):
            mine = {"stride": _wide(a.stride, n), "dilation": _wide(a.dilation, n)}
            if mine[name] == [value] * n:
                continue
            mine[name] = [value] * n
            need = [
                (out.shape[2 + i] - 1) * mine["stride"][i] + mine["dilation"][i] * (a.weight.shape[2 + i] - 1) + 1
                - a.input.shape[2 + i]
                for i in range(n)
            ]  # fmt: skip
            for low in sorted({need[0] // 2, need[0] - need[0] // 2, 0, _wide(a.padding, n)[0]}):
                yield value, low

    return over


def _pooled(a: Given, *, largest: bool, low: int, size: Sequence[int], counted: bool = True) -> Any:
    """Return a pooling with so many elements of padding in front, and as many behind as its result's size needs."""
    n, x, pads = len(size), a.first, []
    kernel = _wide(a.kernel_size, n)
    stride = _wide(a.stride, n) if a.stride else kernel
    for i in reversed(range(n)):
        need = (size[i] - 1) * stride[i] + kernel[i]
        pads += [low, need - x.shape[x.dim() - n + i] - low]
    parts = F.pad(x, pads, value=-math.inf if largest else 0.0)
    inside = F.pad(torch.ones_like(x), pads)
    for i in range(n):
        parts, inside = (v.unfold(x.dim() - n + i, kernel[i], stride[i]) for v in (parts, inside))
    over = list(range(-n, 0))
    if largest:
        return parts.amax(over)
    return parts.sum(over) / (math.prod(kernel) if counted else inside.sum(over))


def _resized(x: Any, size: Sequence[int], mode: str, **how: Any) -> Any:
    return F.interpolate(x, size=list(size), mode=mode, **how)


_SPATIAL_MODE = {3: "linear", 4: "bilinear", 5: "trilinear"}


def _cubic(x: Any, size: Sequence[int], coefficient: float = -0.5) -> Any:
    """Resize by Keys' cubic kernel with half-pixel centers; positions outside of the input have no weight."""
    for axis, n in zip(range(2, x.dim()), size, strict=True):
        old = x.shape[axis]
        at = (torch.arange(n, dtype=x.dtype) + 0.5) * old / n - 0.5
        d = (at[:, None] - torch.arange(old, dtype=x.dtype)).abs()
        c = coefficient
        near = ((c + 2) * d - (c + 3)) * d * d + 1
        far = ((c * d - 5 * c) * d + 8 * c) * d - 4 * c
        weights = torch.where(d <= 1, near, torch.where(d < 2, far, 0.0))
        weights = weights / weights.sum(1, keepdim=True)
        x = torch.tensordot(x, weights, dims=([axis], [1])).movedim(-1, axis)
    return x


def _taken(a: Given, ignored: int | None = None) -> Any:
    ignore = a.ignore_index if ignored is None else ignored
    return F.nll_loss(a.self, a.target, a.weight, reduction="none", ignore_index=ignore)


def smoothed(logp: Any, target: Any, eps: float, *, others: bool, weight: Any, ignore: int) -> Any:
    """Return a cross entropy with label smoothing, shared by all classes or by those that are not the target.

    Args:
        logp: (n, classes, ...), logarithms of probabilities.
        target: (n, ...).
        eps: the share.
        others: whether the target has none of it.
        weight: (classes,), or None.
        ignore: target that does not count.
    """
    valid = target != ignore
    safe = torch.where(valid, target, 0)
    plain = -logp.gather(1, safe.unsqueeze(1)).squeeze(1)
    every, n = -logp.sum(1), logp.shape[1]
    item = (1 - eps) * plain + (eps * (every - plain) / (n - 1) if others else eps * every / n)
    counted = valid if weight is None else weight[safe] * valid
    return (item * counted).sum() / counted.sum()


def _sizes(a: Given, out: Any) -> list[int]:
    shape = a.first.shape
    found = {*shape, a.first.numel(), *(shape[0] * s for s in shape[1:])} if shape else {1}
    if isinstance(target := a.values.get("target"), torch.Tensor):
        found.add(target.numel())
    return sorted(s for s in found if s > 1)


def _sum_of(a: Given) -> Any:
    name = "reduction" if "reduction" in a.values else ""
    return a.out(**{name: 2}) if name else a.out()


def _over(a: Given) -> list[int]:
    """Return the axes of a reduction."""
    dim, n = a.values.get("dim"), a.first.dim()
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(n))
    return sorted(d % n for d in (dim if isinstance(dim, list | tuple) else [dim]))


REDUCTIONS: dict[str, Callable[[Any, list[int], bool], Any]] = {
    "sum": lambda x, d, k: x.sum(d, keepdim=k),
    "mean": lambda x, d, k: x.mean(d, keepdim=k),
    "maximum": lambda x, d, k: x.amax(d, keepdim=k),
    "minimum": lambda x, d, k: x.amin(d, keepdim=k),
    "biased variance": lambda x, d, k: x.var(d, correction=0, keepdim=k),
    "unbiased variance": lambda x, d, k: x.var(d, correction=1, keepdim=k),
    "biased standard deviation": lambda x, d, k: x.std(d, correction=0, keepdim=k),
    "unbiased standard deviation": lambda x, d, k: x.std(d, correction=1, keepdim=k),
    "root mean square": lambda x, d, k: (x**2).mean(d, keepdim=k).sqrt(),
    "norm": lambda x, d, k: (x**2).sum(d, keepdim=k).sqrt(),
    "sum of squares": lambda x, d, k: (x**2).sum(d, keepdim=k),
    "sum of absolute values": lambda x, d, k: x.abs().sum(d, keepdim=k),
    "logarithm of the sum of exponentials": lambda x, d, k: x.logsumexp(d, keepdim=k),
    "logarithm of the mean of exponentials": lambda x, d, k: (
        x.logsumexp(d, keepdim=k) - math.log(math.prod(x.shape[i] for i in d))
    ),
    "median": lambda x, d, k: x.quantile(0.5, d[0], keepdim=k),
}
_REDUCING = "mean|sum|var|std|amax|amin|logsumexp|prod|norm|linalg_vector_norm|max|min|mean_.*|var_mean|std_mean"
_OWN_KIND = {"mean": "mean", "sum": "sum", "amax": "maximum", "amin": "minimum", "norm": "norm",
             "linalg_vector_norm": "norm", "logsumexp": "logarithm of the sum of exponentials"}  # fmt: skip


def _own_kind(a: Given) -> Callable[[Any, list[int], bool], Any]:
    name = a._call.name
    if name in ("var", "std"):
        biased = a.values.get("correction", 1) == 0
        return REDUCTIONS[
            ("biased " if biased else "unbiased ") + {"var": "variance", "std": "standard deviation"}[name]
        ]
    return REDUCTIONS[_OWN_KIND[name]]


def _axes(a: Given, out: Any) -> list[tuple[int, ...]]:
    every = range(a.first.dim())
    return [*((d,) for d in every), *(tuple(i for i in every if i != d) for d in every), tuple(every)]


def _reduced(a: Given, kind: str) -> Any:
    return REDUCTIONS[kind](a.first, _over(a), bool(a.values.get("keepdim", False)))


def _narrowed(a: Given, what: tuple[int, int]) -> Any:
    axis = _over(a)[0]
    return _own_kind(a)(a.first.narrow(axis, *what), [axis], bool(a.values.get("keepdim", False)))


def _parts_of_axis(a: Given, out: Any) -> list[tuple[int, int]]:
    over = _over(a)
    n = a.first.shape[over[0]] if len(over) == 1 else 1
    return [(1, n - 1), (0, n - 1), (0, 1), (n - 1, 1)] if n > 1 else []


def _masked(a: Given) -> tuple[Any, Any, Any]:
    """Return mask, value where it is set, and value elsewhere."""
    if a._call.name == "where":
        return a.condition, a.self, a.other
    return a.mask, a.value, a.self


def _put(a: Given, mask: Any, value: Any = None) -> Any:
    _, own, other = _masked(a)
    value = own if value is None else value
    other = torch.as_tensor(other)
    return torch.where(mask, torch.as_tensor(value, dtype=other.dtype), other)


def _is_square(a: Given, out: Any) -> bool:
    mask = _masked(a)[0]
    return bool(mask.dim() >= 2 and mask.shape[-1] == mask.shape[-2] > 1)


def _later(a: Given, diagonal: int, first: bool = False) -> Any:
    mask = torch.ones(_masked(a)[0].shape[-2:], dtype=torch.bool).triu(diagonal)
    if first:
        mask[0, 0] = False
    return mask


def _added(a: Given, mask_value: float, inverted: bool, replaced: bool) -> Any:
    """Return a sum with another additive mask."""
    mine, other = (a.self, a.other) if bool((torch.as_tensor(a.self) <= -1e4).any()) else (a.other, a.self)
    mask = (mine <= -1e4) ^ inverted
    if replaced:
        return torch.where(mask, torch.as_tensor(mask_value, dtype=other.dtype), other)
    return other + torch.where(mask, torch.as_tensor(mask_value, dtype=mine.dtype), 0.0)


def _adds_mask(a: Given, out: Any) -> bool:
    terms = (a.self, a.other)
    return any(isinstance(t, torch.Tensor) and t.is_floating_point() and bool((t <= -1e4).any()) for t in terms)


def _both_tensors(a: Given, out: Any) -> bool:
    return isinstance(a.self, torch.Tensor) and isinstance(a.other, torch.Tensor)


def _softmax_plus_one(x: Any, dim: int) -> Any:
    top = x.amax(dim, keepdim=True).clamp_min(0)
    e = (x - top).exp()
    return e / (e.sum(dim, keepdim=True) + (-top).exp())


EPS = (1e-5, 1e-6, 1e-3, 1e-12, 1e-8, 1e-7, 1e-4, 0.0, 1e-2, 1e-10, 1e-9, 2.0**-52, 2.0**-23, 1e-15, 1e-16, 0.1)
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda x: x, "relu": F.relu, "gelu": F.gelu, "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu, "quick gelu": lambda x: x * torch.sigmoid(1.702 * x), "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "leaky relu (0.01)": F.leaky_relu, "leaky relu (0.2)": lambda x: F.leaky_relu(x, 0.2),
    "leaky relu (0.1)": lambda x: F.leaky_relu(x, 0.1), "leaky relu (0.3)": lambda x: F.leaky_relu(x, 0.3),
    "elu": F.elu, "selu": F.selu, "celu": F.celu, "softplus": F.softplus, "mish": F.mish, "relu6": F.relu6,
    "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "hardtanh": F.hardtanh, "softsign": F.softsign,
    "logsigmoid": F.logsigmoid, "squared relu": lambda x: F.relu(x) ** 2, "abs": torch.abs, "square": torch.square,
    "hard sigmoid (0.2x + 0.5)": lambda x: (0.2 * x + 0.5).clamp(0, 1), "exp": torch.exp, "sin": torch.sin,
    "log(1 + x)": torch.log1p, "expm1": torch.expm1, "rsqrt": torch.rsqrt, "sqrt": torch.sqrt, "cos": torch.cos,
    "elu (0.5)": lambda x: F.elu(x, 0.5), "softplus minus log 2": lambda x: F.softplus(x) - math.log(2),
    "reciprocal": torch.reciprocal,
}  # fmt: skip
ACTIVE = frozenset(
    [
        "relu",
        "gelu",
        "silu",
        "tanh",
        "sigmoid",
        "leaky_relu",
        "elu",
        "selu",
        "celu",
        "softplus",
        "mish",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "log_sigmoid_forward",
        "clamp",
        "clamp_min",
        "relu_",
        "silu_",
        "leaky_relu_",
        "elu_",
        "hardtanh_",
        "hardswish_",
        "log_sigmoid",
        "tanh_",
        "sigmoid_",
        "exp",
        "sin",
        "cos",
        "square",
        "sqrt",
        "rsqrt",
        "abs",
        "mish_",
        "celu_",
        "selu_",
        "gelu_",
        "clamp_",
        "clamp_min_",
        "clamp_max",
    ]
)
NORMS = frozenset(
    [
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "cudnn_batch_norm",
        "_native_batch_norm_legit_no_training",
        "_fused_rms_norm",
        "rms_norm",
        "_batch_norm_with_update",
        "batch_norm",
    ]
)
_BATCH = ".*batch_norm.*"
_LOSSES = ".*_loss|nll_loss.*|kl_div|binary_cross_entropy.*"
_FILLS = (-1e4, -1e9, -1e30, 0.0, -1.0, 1.0, -100.0, -1e5, -1e3, -10.0, -5.0, -math.inf, -1e2, -1e6)


def _pow_bases(a: Given, out: Any) -> list[float]:
    return [b for b in (1e4, 5e5, 1e6, 1e3, 1e5, 100.0, 1e2) if not isinstance(a.self, torch.Tensor) and b != a.self]


# fmt: off
ROWS: tuple[Row, ...] = (
    # padding, kernels, pooling
    Row("kernel-flipped", "convolution", "the kernel flipped",
        lambda a, p: a.out(weight=a.weight.flip(_spatial(a.weight)))),
    Row("missing-bias", "convolution", "no bias", lambda a, p: a.out(bias=None), where=lambda a, o: a.bias is not None),
    Row("kernel-transposed", "convolution", "height and width of the kernel exchanged",
        lambda a, p: a.out(weight=a.weight.mT),
        where=lambda a, o: a.weight.dim() == 4 and a.weight.shape[2] == a.weight.shape[3] > 1),
    Row("kernel-transposed", "convolution", "input and output channels exchanged",
        lambda a, p: a.out(weight=a.weight.transpose(0, 1)), where=lambda a, o: a.weight.shape[0] == a.weight.shape[1]),
    Row("padding", "convolution", "{0} zeros in front", lambda a, p: _convolution(a, p[0], p[1]), lambda a, o: [(low,
        tuple(o.shape[2:])) for low in _lows(a, o)], where=lambda a, o: not a.transposed),
    Row("kernel-flipped and padding", "convolution", "the kernel flipped, {0} zeros in front",
        lambda a, p: _convolution(a, p[0], p[1], weight=a.weight.flip(_spatial(a.weight))), lambda a, o: [(low,
        tuple(o.shape[2:])) for low in _lows(a, o)], where=lambda a, o: not a.transposed),
    Row("padding-mode", "convolution", "padding of the kind {0}", lambda a, p: _convolution(a, _wide(a.padding,
        len(p[1])), p[1], mode=p[0]), lambda a, o: [(m, tuple(o.shape[2:])) for m in ("reflect", "replicate",
        "circular")], where=lambda a, o: not a.transposed and any(a.padding)),
    *(Row(name, "convolution", f"{name} {{0}}", lambda a, p, name=name: _convolution(a, [p[0][1]] * len(p[1]), p[1],
        **{name: [p[0][0]] * len(p[1])}), lambda a, o, name=name: [(v, tuple(o.shape[2:])) for v in _strides(name)(a,
        o)], where=lambda a, o: not a.transposed) for name in ("dilation", "stride")),
    Row("padding", "convolution", "{0} elements cut off in front", lambda a, p: _transposed(a, p[0], a.weight, p[1]),
        lambda a, o: [(low, tuple(o.shape[2:])) for low in range(max(a.weight.shape[2:]) * max(a.dilation))],
        where=lambda a, o: a.transposed),
    Row("kernel-flipped and padding", "convolution", "the kernel flipped, {0} elements cut off in front",
        lambda a, p: _transposed(a, p[0], a.weight.flip(_spatial(a.weight)), p[1]), lambda a, o: [(low,
        tuple(o.shape[2:])) for low in range(max(a.weight.shape[2:]) * max(a.dilation))],
        where=lambda a, o: a.transposed),
    Row("group-order", "convolution", "the channels of groups interleaved", lambda a, p: _regrouped_convolution(a),
        where=lambda a, o: a.groups > 1 and (not a.transposed)),
    argument("average-window", "avg_pool.*", "count_include_pad", lambda a, o: [not a.count_include_pad]),
    argument("average-window", ".*pool.*", "ceil_mode", lambda a, o: [not a.ceil_mode]),
    *(Row(cause, "(avg|max)_pool.*", words, lambda a, p, large=large, c=c: _pooled(a, largest=large, low=p[0],
        size=p[1], counted=c), lambda a, o: [(low,
        tuple(o.shape[-(o.dim() - 2):])) for low in range(max(a.kernel_size))]) for cause, words, large,
        c in (("pool-kind", "the maximum, padded by {0}", True, True), ("pool-kind", "the average, padded by {0}",
        False, True), ("average-window", "the average of what is inside, padded by {0}", False, False))),
    Row("pool-kind", "_?adaptive_(avg|max)_pool.*", "the {0}", lambda a, p: getattr(F,
        f"adaptive_{p[0]}_pool{len(p[1])}d")(a.first, p[1]), lambda a, o: [(k, tuple(o.shape[2:])) for k in ("max",
        "avg")]),
    # resizing
    argument("align-corners", "_?upsample.*", "align_corners", lambda a, o: [not a.align_corners]),
    Row("resize-mode", "_?upsample.*", "resizing by {0}", lambda a, p: _resized(a.self, p[1], p[0]), lambda a, o: [(m,
        tuple(o.shape[2:])) for m in ("nearest", "nearest-exact", "area", _SPATIAL_MODE[o.dim()],
        *(["bicubic"] if o.dim() == 4 else []))]),
    Row("resize-mode", "_?upsample.*", "resizing by the cubic kernel of jax.image ({0[0]})", lambda a, p: _cubic(a.self,
        p[1], p[0]), lambda a, o: [(c, tuple(o.shape[2:])) for c in (-0.5, -0.75)]),
    Row("resize-mode", "_?upsample.*", "resizing with antialias", lambda a, p: _resized(a.self, p, "bilinear",
        antialias=True), lambda a, o: [tuple(o.shape[2:])], where=lambda a, o: o.dim() == 4),
    # normalization
    argument("eps", ".*norm.*", "eps", lambda a, o: [e for e in EPS if e != a.eps]),
    *(row for operations, formula in (("native_layer_norm", _layer), ("_fused_rms_norm|rms_norm", _rms),
        ("native_group_norm", lambda a, **how: _group(a, a.group, **how)), (_BATCH, lambda a, **how: _batch(a,
        not _trains(a), **how))) for row in (Row("eps-place", operations, "eps added outside of the root", lambda a,
        p, f=formula: f(a, place="outside")), Row("eps-place", operations, "eps as the least deviation", lambda a,
        p, f=formula: f(a, place="maximum")), Row("missing-root", operations, "division by the variance", lambda a,
        p, f=formula: f(a, place="no root")))),
    *(row for operations, formula in (("native_layer_norm", _layer), ("native_group_norm", lambda a, **how: _group(a,
        a.group, **how)), (_BATCH, lambda a, **how: _batch(a, False, **how))) for row in (Row("variance-correction",
        operations, "the unbiased variance", lambda a, p, f=formula: f(a, ddof=1)), Row("rms-for-layer-norm",
        operations, "no mean subtracted", lambda a, p, f=formula: f(a, centre=False)))),
    Row("layer-for-rms-norm", "_fused_rms_norm|rms_norm", "the mean subtracted", lambda a, p: _rms(a)),
    Row("missing-norm", "native_layer_norm", "the mean subtracted alone",
        lambda a, p: _affine(a.input - a.input.mean([-1], True), a.weight, a.bias)),
    Row("missing-norm", ".*norm.*", "no normalization, scale and bias alone", lambda a, p: _affine(a.input, a.weight,
        a.values.get("bias"), None if "layer" in a._call.name or "rms" in a._call.name else _across(a.input))),
    Row("norm-axis", "native_layer_norm", "normalization over axis {0}", lambda a, p: _layer(a, over=(p,)),
        lambda a, o: range(o.dim())),
    Row("norm-axis", "native_layer_norm", "normalization over all axes but the first", lambda a, p: _layer(a,
        over=range(1, a.input.dim()))),
    Row("unit-offset", "native_layer_norm|.*rms_norm", "the scale as 1 + weight",
        lambda a, p: a.out(weight=1 + a.weight), where=lambda a, o: a.weight is not None),
    Row("unit-offset", "native_layer_norm|.*rms_norm", "the scale as weight - 1",
        lambda a, p: a.out(weight=a.weight - 1), where=lambda a, o: a.weight is not None),
    Row("groups", "native_group_norm", "{0} groups", lambda a, p: _group(a, p), lambda a, o: [g for g in range(1,
        o.shape[1] + 1) if o.shape[1] % g == 0 and g != a.group]),
    Row("group-order", "native_group_norm", "channels of a group that are apart", lambda a, p: _far_groups(a)),
    Row("group-order", "native_group_norm", "groups of channels that are apart, scaled in their order",
        lambda a, p: _affine(_far_plain(a), a.weight, a.bias, _across(a.input))),
    Row("batch-statistics", _BATCH, "the other statistics (of the batch or running)", lambda a, p: _batch(a,
        _trains(a)), where=lambda a, o: a.values.get("running_mean") is not None or not _trains(a)),
    # activations and softmax
    Row("gelu-approximation", "gelu_?", "gelu of the form {0}", lambda a, p: F.gelu(a.first, approximate=p),
        lambda a, o: ["tanh" if a.values.get("approximate", "none") == "none" else "none"]),
    Row("missing-activation", "|".join(ACTIVE), "no activation", lambda a, p: a.first + 0.0),
    Row("activation", "|".join(ACTIVE), "{0}", lambda a, p: ACTIVATIONS[p](a.first),
        [name for name in ACTIVATIONS if name != "identity"]),
    argument("activation", "leaky_relu_?", "negative_slope", (0.01, 0.2, 0.1, 0.3, 0.02, 0.05)),
    argument("activation", "elu_?|celu_?", "alpha", (1.0, 0.5, 0.1, 1.6732632423543772)),
    argument("activation", "softplus", "beta", (1, 2, 0.5, 10)),
    Row("softmax-axis", "_?softmax|_?log_softmax", "softmax over axis {0}",
        lambda a, p: getattr(a.self.clamp_min(-1e30), a._call.name.strip("_"))(p),
        lambda a, o: [d for d in range(o.dim()) if d != a.dim % o.dim()]),
    Row("softmax-kind", "_?softmax", "a logarithm of softmax", lambda a, p: a.self.log_softmax(a.dim)),
    Row("softmax-kind", "_?log_softmax", "softmax", lambda a, p: a.self.softmax(a.dim)),
    Row("softmax-kind", "_?softmax|_?log_softmax", "a sigmoid", lambda a, p: a.self.sigmoid()),
    Row("softmax-plus-one", "_?softmax", "softmax with one more in the sum", lambda a, p: _softmax_plus_one(a.self,
        a.dim)),
    # positions, embeddings, masks
    Row("index-offset", "embedding", "rows {0:+d} away", lambda a, p: a.weight[(a.indices + p).clamp(0,
        len(a.weight) - 1)], (1, -1, 2, -2)),
    Row("index-offset", "embedding", "rows {0:+d} away, around the end",
        lambda a, p: a.weight[(a.indices + p) % len(a.weight)], (1, -1)),
    Row("index-reversed", "embedding", "positions from the other end", lambda a, p: a.weight[a.indices.flip(-1)]),
    Row("index-offset", "embedding", "row {0} everywhere", lambda a, p: a.weight[torch.full_like(a.indices, p)], (0,
        1)),
    Row("padding-row", "embedding", "row {0} taken as zeros", lambda a, p: a.weight[a.indices] * (a.indices != p)[...,
        None], lambda a, o: sorted({0, 1, len(a.weight) - 1, *([a.padding_idx] if a.padding_idx >= 0 else [])})),
    Row("embedding-scale", "embedding", "rows times {0:.6g}", lambda a, p: a.out() * p,
        lambda a, o: [o.shape[-1] ** 0.5, o.shape[-1] ** (-0.5), float(o.shape[-1])]),
    Row("constant", "pow", "{0:g} instead of {1}", lambda a, p: p ** a.exponent, _pow_bases),
    argument("mask-diagonal", "tril_?|triu_?", "diagonal", lambda a, o: [a.diagonal - 1, a.diagonal + 1]),
    Row("mask-polarity", "tril_?|triu_?", "the other triangle",
        lambda a, p: a.self.triu(a.diagonal) if "tril" in a._call.name else a.self.tril(a.diagonal)),
    argument("mask-window", "(gt|ge|lt|le|eq|ne)_?", "other", lambda a, o: [a.other + 1,
        a.other - 1] if isinstance(a.other, int | float) else []),
    Row("comparison", "gt|ge|lt|le", "{0}", lambda a, p: getattr(torch, p)(a.self, a.other), lambda a, o: {"gt": ("ge",
        "lt", "le"), "ge": ("gt", "le", "lt"), "lt": ("le", "gt", "ge"), "le": ("lt", "ge", "gt")}[a._call.name]),
    Row("mask-polarity", "eq|ne|logical_not|bitwise_not", "the opposite", lambda a, p: ~a.out()),
    Row("mask-polarity", "where|masked_fill_?", "the mask inverted", lambda a, p: _put(a, ~_masked(a)[0])),
    Row("mask-polarity", "where|masked_fill_?", "the mask inverted, with {0:g}",
        lambda a, p: _put(a, ~_masked(a)[0], p), (-1e30, -1e9, -1e4, -1e10)),
    Row("missing-mask", "(bitwise|logical)_(and|or)|__and__|__or__", "the {0} of two masks alone",
        lambda a, p: (a.self if p == "first" else a.other).expand(a.out().shape).clone(), ("first", "second")),
    Row("mask-polarity", "(bitwise|logical)_(and|or)|__and__|__or__", "the {0} of two masks inverted",
        lambda a, p: _inverted(a, p), ("first", "second")),
    Row("missing-mask", "where|masked_fill_?", "no mask",
        lambda a, p: (torch.as_tensor(_masked(a)[2]) + 0.0).expand(torch.broadcast_shapes(_masked(a)[0].shape,
        _masked(a)[2].shape)).clone()),
    Row("missing-mask", "where", "no mask, the other value",
        lambda a, p: (torch.as_tensor(a.self) + 0.0).expand(torch.broadcast_shapes(a.condition.shape,
        a.other.shape)).clone()),
    Row("mask-transposed", "where|masked_fill_?", "the mask transposed", lambda a, p: _put(a, _masked(a)[0].mT),
        where=_is_square),
    Row("mask-diagonal", "where|masked_fill_?", "positions masked from diagonal {0}", lambda a, p: _put(a, _later(a,
        p)), (1, 0, -1, 2), where=_is_square),
    Row("mask-diagonal", "where|masked_fill_?", "positions masked from diagonal {0}, the first seen",
        lambda a, p: _put(a, _later(a, p, first=True)), (0, -1), where=_is_square),
    Row("mask-window", "where|masked_fill_?", "the mask {0[0]:+d} position along axis {0[1]}", lambda a, p: _put(a,
        _masked(a)[0].roll(p[0], p[1])), [(s, d) for d in (-1, -2) for s in (1, -1)],
        where=lambda a, o: _masked(a)[0].dim() >= 2),
    Row("mask-window", "where|masked_fill_?", "one diagonal {0} seen", lambda a, p: _put(a,
        _masked(a)[0] & ~_diagonal(_masked(a)[0], p)), lambda a, o: range(1 - o.shape[-1], o.shape[-1]),
        where=_is_square),
    Row("mask-window", "where|masked_fill_?", "one diagonal {0} masked", lambda a, p: _put(a,
        _masked(a)[0] | _diagonal(_masked(a)[0], p)), lambda a, o: range(1 - o.shape[-1], o.shape[-1]),
        where=_is_square),
    Row("mask-value", "where|masked_fill_?", "masked elements as {0:g}", lambda a, p: _put(a, _masked(a)[0], p),
        _FILLS),
    Row("mask-value", "where|masked_fill_?", "{0:g} added where masked",
        lambda a, p: _masked(a)[2] + p * _masked(a)[0].double(),
        [f for f in _FILLS if f < -1 and math.isfinite(f)]),
    Row("mask-value", "where|masked_fill_?", "masked elements times 0", lambda a, p: _masked(a)[2] * ~_masked(a)[0]),
    *(Row(cause, "add", words, lambda a, p, i=i, r=r: _added(a, p, i, r), (-1000000000.0, -math.inf, -1e+30, -10000.0,
        -100000.0), where=_adds_mask) for cause, words, i in (("mask-value", "{0:g} where masked", False),
        ("mask-polarity", "the mask inverted ({0:g})", True)) for r in (False, True)),
    Row("missing-mask", "add", "no mask",
        lambda a, p: (a.other if bool((a.self <= -10000.0).any()) else a.self) + torch.zeros_like(a.out()),
        where=_adds_mask),
    # reductions
    *(Row("variance-correction" if "var" in kind or "dev" in kind else "reduction", operations, f"the {kind}", lambda a,
        p, kind=kind: _reduced(a, kind)) for kind in REDUCTIONS for operations in [_REDUCING]),
    Row("axis", "mean|sum|amax|amin|var|std|norm|linalg_vector_norm|logsumexp", "axis {0[0]}",
        lambda a, p: _own_kind(a)(a.first, [p[0]], False).reshape(p[1]), lambda a, o: [(d,
        tuple(o.shape)) for d in range(a.first.dim()) if [d] != _over(a) and a.first.numel() // max(a.first.shape[d],
        1) == o.numel()]),
    Row("axis", "mean|sum|amax|amin|var|std|norm|linalg_vector_norm", "axes {0}", lambda a, p: _own_kind(a)(a.first,
        list(p), True), _axes),
    Row("count", "mean", "the mean over a count of {0[0]:+d}", lambda a, p: a.out() * p[1] / (p[1] + p[0]),
        lambda a, o: [(e, a.first.numel() // max(o.numel(), 1)) for e in (1, -1) if a.first.numel() // max(o.numel(),
        1) + e > 0]),
    Row("other-slice", "mean|sum|amax|amin|var|std", "elements {0[0]} to {0[0]}+{0[1]} alone", _narrowed,
        _parts_of_axis),
    Row("cumulative-sum", "cumsum", "a sum without the element itself", lambda a, p: a.self.cumsum(a.dim) - a.self),
    Row("cumulative-sum", "cumsum", "a sum from the other end",
        lambda a, p: a.self.flip(a.dim).cumsum(a.dim).flip(a.dim)),
    argument("axis", "cumsum|cumprod", "dim", lambda a, o: [d for d in range(o.dim()) if d != a.dim % o.dim()]),
    argument("top-k", "topk", "k", lambda a, o: [k for k in range(1, a.self.shape[a.dim] + 1) if k != a.k]),
    # products and sums
    Row("operands-swapped", "mm|bmm|matmul", "the operands in the other order", lambda a, p: a.second @ a.first),
    Row("missing-bias", "addmm", "no bias", lambda a, p: a.mat1 @ a.mat2),
    Row("sign", "add|sub|rsub", "the other sign",
        lambda a, p: a.self - a.other if a._call.name == "add" else a.self + a.other, where=_both_tensors),
    Row("term-order", "add|sub|rsub", "the difference in the other order", lambda a, p: a.other - a.self,
        where=_both_tensors),
    Row("product-for-sum", "add|sub", "a product", lambda a, p: a.self * a.other, where=_both_tensors),
    Row("unit-offset", "mul_?", "1 + the {0} factor",
        lambda a, p: a.self * (1 + a.other) if p == "second" else (1 + a.self) * a.other, ("second", "first"),
        where=_both_tensors),
    Row("missing-term", "addcmul", "a product alone", lambda a, p: a.tensor1 * a.tensor2),
    Row("one-minus", "lerp", "the weights exchanged", lambda a, p: torch.lerp(a.end, a.self, a.weight)),
    Row("scale", "mul_?|div_?", "the inverse",
        lambda a, p: a.self / a.other if "mul" in a._call.name else a.self * a.other, where=_both_tensors),
    Row("sum-for-product", "mul_?|div_?", "a sum", lambda a, p: a.self + a.other, where=_both_tensors),
    # losses
    Row("ignore-index", "nll_loss.*", "a mean over all targets, ignored ones too",
        lambda a, p: _taken(a).sum() / a.target.numel()),
    Row("ignore-index", "nll_loss.*", "ignored targets as class 0", lambda a, p: F.nll_loss(a.self,
        torch.where(a.target == a.ignore_index, 0, a.target), a.weight)),
    Row("ignore-index", "nll_loss.*", "targets of {0} ignored", lambda a, p: F.nll_loss(a.self, a.target, a.weight,
        ignore_index=p), lambda a, o: [0, 1, -1, a.self.shape[1] - 1, -1000]),
    Row("class-weights", "nll_loss.*", "no class weights", lambda a, p: a.out(weight=None),
        where=lambda a, o: a.weight is not None),
    Row("class-weights", "nll_loss.*", "weighted losses divided by their number",
        lambda a, p: _taken(a).sum() / (a.target != a.ignore_index).sum(), where=lambda a, o: a.weight is not None),
    *(argument("class-weights", "binary_cross_entropy.*", name, (None,)) for name in ("weight", "pos_weight")),
    argument("reduction", _LOSSES, "reduction", lambda a, o: [r for r in (1, 2) if r != a.reduction]),
    Row("reduction", _LOSSES, "the sum divided by {0}", lambda a, p: _sum_of(a) / p, _sizes),
    argument("loss-threshold", "smooth_l1_loss", "beta", (1.0, 0.5, 2.0, 0.1, 1 / 9)),
    argument("loss-threshold", "huber_loss", "delta", (1.0, 0.5, 2.0, 0.1, 1.35)),
    Row('loss-kind', 'smooth_l1_loss|huber_loss|mse_loss|l1_loss', "Huber's loss with {0}",
        lambda a, p: F.huber_loss(a.self, a.target, delta=p), (1.0, 0.5, 2.0, 0.1)),
    Row("loss-kind", "smooth_l1_loss|huber_loss|mse_loss|l1_loss", "smooth L1 with {0}",
        lambda a, p: F.smooth_l1_loss(a.self, a.target, beta=p), (1.0, 0.5, 2.0, 0.1)),
    Row("loss-kind", "smooth_l1_loss|huber_loss|mse_loss|l1_loss", "half of the squares",
        lambda a, p: 0.5 * F.mse_loss(a.self, a.target)),
    Row("loss-kind", "smooth_l1_loss|huber_loss|mse_loss", "absolute differences", lambda a, p: F.l1_loss(a.self,
        a.target)),
    Row("loss-kind", "smooth_l1_loss|huber_loss|l1_loss", "squares", lambda a, p: F.mse_loss(a.self, a.target)),
)
# fmt: on


def _diagonal(mask: Any, offset: int) -> Any:
    ones = torch.ones(mask.shape[-2:], dtype=torch.bool)
    return ones.triu(offset) & ones.tril(offset)


def _inverted(a: Given, which: str) -> Any:
    one, other = (~a.self, a.other) if which == "first" else (a.self, ~a.other)
    return one & other if "and" in a._call.name else one | other


def _far_plain(a: Given) -> Any:
    inside = a.input.shape[1] // a.group
    mixed = a.input.unflatten(1, (inside, a.group)).transpose(1, 2).flatten(1, 2)
    parts = _normalized(mixed.reshape(mixed.shape[0], a.group, -1), (2,), a.eps).reshape(mixed.shape)
    return parts.unflatten(1, (a.group, inside)).transpose(1, 2).flatten(1, 2)


def _regrouped_convolution(a: Given) -> Any:
    x = a.input.unflatten(1, (a.input.shape[1] // a.groups, a.groups)).transpose(1, 2).flatten(1, 2)
    return a.out(input=x)


@cache
def _rows_of(operation: str) -> tuple[Row, ...]:
    return tuple(row for row in ROWS if re.fullmatch(row.operations, operation))


def _formula(row: Row, parameter: Any) -> Change:
    def change(call: Call, args: Any, kwargs: Any, get: Any) -> list[Any]:
        given = Given(call, args, kwargs)
        value = given.out(**{row.name: parameter}) if row.formula is None else row.formula(given, parameter)
        if not call.mutates and len(call.op._schema.returns) == 1:
            return [value]
        outs = flat(call.op(*args, **kwargs))
        return [value, *outs[1:]]

    return change


def _values(row: Row, given: Given, out: Any) -> Iterable[Any]:
    if row.name and row.name not in given.values:
        return ()
    if not row.where(given, out):
        return ()
    found: Iterable[Any] = row.over(given, out) if callable(row.over) else row.over
    return found


def variants(index: int, call: Call, args: Sequence[Any], kwargs: Any, out: Any) -> Iterator[Hypothesis]:
    """Yield the usual mistakes with one operation, by its table and by its numbers."""
    given = Given(call, args, kwargs)
    for row in _rows_of(call.name):
        try:
            values = list(_values(row, given, out))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError):
            continue  # a row that does not fit this overload or these shapes
        for value in values:
            torchs = given.values.get(row.name or "self")
            if row.name and value is not None and value == torchs:
                continue
            shown = value[0] if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], tuple) else value
            words = row.words.format(shown, torchs if isinstance(torchs, int | float | str | None) else "torch's")
            yield Hypothesis(row.cause, words, {index: _formula(row, value)})
    yield from _other_numbers(index, call, given)


_NUMBERS = (0.0, 1.0, 2.0, 0.5, -1.0, 3.0, 4.0, 0.1, 0.2, 0.3, 0.01)
_NUMBERED = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "pow",
        "rsub",
        "clamp",
        "clamp_min",
        "clamp_max",
        "softplus",
        "hardtanh",
        "addcmul",
        "lerp",
    ]
)


def _other_numbers(index: int, call: Call, given: Given) -> Iterator[Hypothesis]:
    """Yield other values of a number that the author's code has in a sum, product, power or limit."""
    if call.name.rstrip("_") not in _NUMBERED:
        return
    for name, value in given.values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or name == "alpha":
            continue
        value = float(value)
        tiny = call.name.rstrip("_") in ("add", "clamp_min", "clamp") and 0 < abs(value) < 1e-2
        near = [] if not value or not math.isfinite(value) else [
            1 / value, value**2, math.copysign(math.sqrt(abs(value)), value), -value, 2 * value, value / 2, 1 - value,
            value + 1, value - 1,
            *(value * math.log(b) / math.log(1e4) for b in (1e3, 1e5, 5e5, 1e6, 100.0)),
        ]  # fmt: skip
        bases = (1e4, 1e3, 1e5, 5e5, 1e6, 100.0) if abs(value) >= 50 else ()
        cause = "eps" if tiny else "scale" if call.name.rstrip("_") in ("mul", "div") else "constant"
        for other in (*(EPS if tiny else ()), *bases, *near, *_NUMBERS):
            if other != value:
                change = _formula(Row(cause, "", "", None, (), name), other)
                yield Hypothesis(cause, f"{other:.9g} instead of {value:g}", {index: change})


# What may happen to any tensor.


PERMUTING = frozenset(["transposed", "permuted", "reversed", "halves-swapped", "blocks-swapped", "shifted"])


def regrouped(x: Any, dim: int, outer: int) -> Any:
    """Return a tensor with an axis of outer * inner elements read as inner * outer."""
    return x.unflatten(dim, (outer, x.shape[dim] // outer)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _shift(x: Any, dim: int, by: int) -> Any:
    out = x.roll(by, dim).clone()
    out.select(dim, 0 if by > 0 else x.shape[dim] - 1).zero_()
    return out


def _swap(x: Any, dim: int, k: int, a: int, b: int) -> Any:
    parts = list(x.chunk(k, dim))
    parts[a], parts[b] = parts[b], parts[a]
    return torch.cat(parts, dim)


Transform = tuple[str, str, Callable[[Any], Any]]


def _whole_number_transforms(x: Any) -> Iterator[Transform]:
    if x.dtype == torch.bool:
        yield "mask-polarity", "inverted", lambda v: ~v
        return
    for s in (1, -1, 2):
        yield "index-offset", f"with {s:+d} added", lambda v, s=s: v + s
    for d in range(x.dim()):
        yield "reversed", f"reversed along axis {d}", lambda v, d=d: v.flip(d)
    yield "zeros", "as zeros", torch.zeros_like
    yield "ones", "as ones", torch.ones_like


def _exchanges(x: Any) -> Iterator[Transform]:
    """Yield other orders of a tensor's elements."""
    for d in range(x.dim()):
        for e in range(d + 1, x.dim()):
            if x.shape[d] == x.shape[e] > 1:
                yield "transposed", f"with axes {d} and {e} exchanged", lambda v, d=d, e=e: v.transpose(d, e)
    if x.dim() in (3, 4):  # a kernel that was flattened in another order
        for order in permutations(range(x.dim())):
            if any(a != b for a, b in enumerate(order)):
                words = f"read in the order of axes {order}"
                yield "permuted", words, lambda v, o=order: v.permute(o).reshape(v.shape)
    for d in reversed(range(x.dim())):
        n = x.shape[d]
        for outer in range(2, n):
            if n % outer == 0 and (n <= 64 or outer <= 16 or n // outer <= 16):
                words = f"with axis {d} read as {n // outer} by {outer}"
                yield "permuted", words, lambda v, d=d, o=outer: regrouped(v, d, o)
    for d in reversed(range(x.dim())):
        n = x.shape[d]
        for a in range(2, min(n, 17)):
            for b in range(2, min(n // a, 17)):
                if n >= 8 and n % (a * b) == 0 and n // (a * b) > 1:
                    words = f"with axis {d} read as {b} by {a} blocks"
                    yield (
                        "permuted",
                        words,
                        lambda v, d=d, a=a, b=b: v.unflatten(d, (a, b, -1)).transpose(d, d + 1).flatten(d, d + 2),
                    )
    for d in reversed(range(x.dim())):
        yield from _exchanges_along(d, x.shape[d])


def _exchanges_along(d: int, n: int) -> Iterator[Transform]:
    if n < 2:
        return
    yield "reversed", f"reversed along axis {d}", lambda v: v.flip(d)
    for s in (1, -1):
        yield "shifted", f"rolled by {s} along axis {d}", lambda v, s=s: v.roll(s, d)
        yield "shifted", f"shifted by {s} along axis {d}", lambda v, s=s: _shift(v, d, s)
    if n % 2 == 0 and n > 2:
        yield "halves-swapped", f"with the halves of axis {d} exchanged", lambda v: v.roll(n // 2, d)
    for k in (3, 4):
        for a in range(k if n % k == 0 and n > k else 0):
            for b in range(a + 1, k):
                words = f"with blocks {a} and {b} of {k} of axis {d} exchanged"
                yield "blocks-swapped", words, lambda v, k=k, a=a, b=b: _swap(v, d, k, a, b)


def transforms(x: Any) -> Iterator[Transform]:
    """Yield (cause, words, function) of what may happen to a tensor by mistake; shapes stay."""
    if not isinstance(x, torch.Tensor):
        return
    if not x.is_floating_point():
        yield from _whole_number_transforms(x)
        return
    yield from _exchanges(x)
    yield "one-minus", "as 1 - x", lambda v: 1 - v
    yield "sign", "with the other sign", lambda v: -v
    yield "unit-offset", "with 1 added", lambda v: v + 1
    yield "unit-offset", "with 1 subtracted", lambda v: v - 1
    yield "scale", "times 2", lambda v: v * 2
    yield "scale", "times 0.5", lambda v: v * 0.5
    yield "zeros", "as zeros", torch.zeros_like
    yield "ones", "as ones", torch.ones_like
    for name, function in ACTIVATIONS.items():
        if name != "identity":
            yield "extra-activation", f"after {name}", function
    if x.dim() and x.shape[-1] > 1:
        yield "extra-softmax", "after softmax", lambda v: v.softmax(-1)
        yield "extra-norm", "after division by its norm", lambda v: v / v.norm(dim=-1, keepdim=True)
        yield "renormalized", "divided by its sum", lambda v: v / v.sum(-1, keepdim=True)
        yield "extra-norm", "centred", lambda v: v - v.mean(-1, keepdim=True)
        for eps in (1e-5, 1e-6):
            yield "extra-norm", "after layer norm", lambda v, e=eps: _normalized(v, [-1], e)
            yield "extra-norm", "after RMS norm", lambda v, e=eps: _normalized(v, [-1], e, centre=False)
        for i in (0, x.shape[-1] - 1):
            yield "zeros", f"with element {i} zero", lambda v, i=i: v * (torch.arange(v.shape[-1]) != i)
    for d in range(x.dim()):
        if x.shape[d] > 1:
            yield "reduction", f"averaged over axis {d}", lambda v, d=d: v.mean(d, keepdim=True).expand_as(v)
