"""What may happen to any tensor by mistake: other orders of its elements, another sign, one more
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import torch

from gradcheck_suite.port.mistakes import ACTIVATIONS, plain_norm

PERMUTING = frozenset(
    ["transposed", "permuted", "reversed", "halves-swapped", "blocks-swapped", "shifted"]
)
Transform = tuple[str, str, Callable[[Any], Any]]
"""Cause, words, and function of a tensor; the shape stays."""


def transforms(x: Any) -> Iterator[Transform]:
    """Yield what may happen to a tensor."""
    if not isinstance(x, torch.Tensor):
        return
    if x.dtype == torch.bool:
        yield from _of_mask(x)
    elif x.is_complex():
        yield from _of_complex(x)
    elif not x.is_floating_point():
        yield from _of_whole_numbers(x)
    else:
        yield from exchanges(x)
        yield from signs(x)
        yield from functions(x)


def _of_complex(x: Any) -> Iterator[Transform]:
    yield "conjugated", "conjugated", torch.conj_physical
    yield "sign", "with the other sign", torch.neg
    yield "conjugated", "with real and imaginary part exchanged", _exchanged_parts
    yield "other-value", "without its imaginary part", lambda v: torch.complex(v.real, 0 * v.real)


def _exchanged_parts(value: Any) -> Any:
    return torch.complex(value.imag, value.real)


def _of_mask(x: Any) -> Iterator[Transform]:
    yield "mask-polarity", "inverted", lambda v: ~v
    yield "missing-mask", "false everywhere", torch.zeros_like
    yield "missing-mask", "true everywhere", torch.ones_like
    for d in range(max(x.dim() - 2, 0), x.dim()):
        for s in (1, -1):
            yield "mask-window", f"moved by {s:+d} along axis {d}", lambda v, s=s, d=d: v.roll(s, d)
    if x.dim() < 2 or min(x.shape[-2:]) < 2:
        return
    n, m = x.shape[-2:]
    if n == m:
        yield "mask-transposed", "transposed", lambda v: v.mT
    for k in (0, -1, 1, 2):
        for side in ("triu", "tril"):
            yield (
                "mask-diagonal",
                f"true from diagonal {k} on ({side})",
                lambda v, k=k, s=side: _band(v, s, k),
            )
    corner = torch.zeros(n, m, dtype=torch.bool)
    corner[0, 0] = True
    yield (
        "mask-diagonal",
        "true from the diagonal on but for the first",
        lambda v: _band(v, "triu", 0) & ~corner,
    )
    for k in range(1 - n, m):
        diagonal = torch.ones(n, m, dtype=torch.bool).triu(k).tril(k)
        yield "mask-window", f"false on diagonal {k}", lambda v, d=diagonal: v & ~d
        yield "mask-window", f"true on diagonal {k}", lambda v, d=diagonal: v | d


def _band(mask: Any, side: str, diagonal: int) -> Any:
    return getattr(torch.ones_like(mask), side)(diagonal)


def _of_whole_numbers(x: Any) -> Iterator[Transform]:
    for s in (1, -1, 2, -2):
        yield "index-offset", f"with {s:+d} added", lambda v, s=s: v + s
    for d in reversed(range(x.dim())):
        yield "index-reversed", f"reversed along axis {d}", lambda v, d=d: v.flip(d)
    yield "zeros", "as zeros", torch.zeros_like
    yield "ones", "as ones", torch.ones_like


def exchanges(x: Any) -> Iterator[Transform]:
    """Yield other orders of a tensor's elements."""
    for d in range(x.dim()):
        for e in range(d + 1, x.dim()):
            if x.shape[d] == x.shape[e] > 1:
                yield (
                    "transposed",
                    f"with axes {d} and {e} exchanged",
                    lambda v, d=d, e=e: v.transpose(d, e),
                )
    if x.dim() in (3, 4):  # a kernel that was flattened in another order
        for order in list(permutations(range(x.dim())))[1:]:
            words = f"read in the order of axes {order}"
            yield "permuted", words, lambda v, o=order: v.permute(o).reshape(v.shape)
    for d in reversed(range(x.dim())):
        yield from _regroupings(d, x.shape[d])
    for d in reversed(range(x.dim())):
        yield from _exchanges_along(d, x.shape[d])


def _regroupings(d: int, n: int) -> Iterator[Transform]:
    """Yield an axis of outer * inner elements read as inner * outer, whole or in blocks."""
    for a in range(2, n):
        if n % a == 0 and (n <= 64 or a <= 16 or n // a <= 16):
            words = f"with axis {d} read as {n // a} by {a}"
            yield (
                "permuted",
                words,
                lambda v, a=a: v.unflatten(d, (a, -1)).transpose(d, d + 1).flatten(d, d + 1),
            )
    for a in range(2, min(n, 17)):
        for b in range(2, min(n // a, 17)):
            if n >= 8 and n % (a * b) == 0 and n // (a * b) > 1:
                words = f"with axis {d} read as {b} by {a} blocks"
                parts = (a, b, -1)
                yield (
                    "permuted",
                    words,
                    lambda v, p=parts: v.unflatten(d, p).transpose(d, d + 1).flatten(d, d + 2),
                )


def _exchanges_along(d: int, n: int) -> Iterator[Transform]:
    if n < 2:
        return
    yield "reversed", f"reversed along axis {d}", lambda v: v.flip(d)
    for s in (1, -1):
        yield "shifted", f"rolled by {s} along axis {d}", lambda v, s=s: v.roll(s, d)
        yield "shifted", f"shifted by {s} along axis {d}", lambda v, s=s: _shifted(v, d, s)
    if n % 2 == 0 and n > 2:
        yield (
            "halves-swapped",
            f"with the halves of axis {d} exchanged",
            lambda v: v.roll(n // 2, d),
        )
    for k in (3, 4):
        for a in range(k if n % k == 0 and n > k else 0):
            for b in range(a + 1, k):
                words = f"with blocks {a} and {b} of {k} of axis {d} exchanged"
                yield (
                    "blocks-swapped",
                    words,
                    lambda v, k=k, a=a, b=b: swapped_blocks_of(v, d, k, a, b),
                )


def _shifted(x: Any, dim: int, by: int) -> Any:
    out = x.roll(by, dim).clone()
    out.select(dim, 0 if by > 0 else x.shape[dim] - 1).zero_()
    return out


def swapped_blocks_of(x: Any, dim: int, k: int, a: int, b: int) -> Any:
    """Return a tensor with two of the k blocks of an axis exchanged."""
    parts = list(x.chunk(k, dim))
    parts[a], parts[b] = parts[b], parts[a]
    return torch.cat(parts, dim)


def signs(x: Any) -> Iterator[Transform]:
    """Yield a tensor with another sign, one added, or another factor."""
    yield "sign", "with the other sign", lambda v: -v
    yield "one-minus", "as 1 - x", lambda v: 1 - v
    yield "unit-offset", "with 1 added", lambda v: v + 1
    yield "unit-offset", "with 1 subtracted", lambda v: v - 1
    yield "scale", "times 2", lambda v: v * 2
    yield "scale", "times 0.5", lambda v: v * 0.5
    yield "zeros", "as zeros", torch.zeros_like
    yield "ones", "as ones", torch.ones_like


def functions(x: Any) -> Iterator[Transform]:
    """Yield other functions of a tensor, element by element or along its last axis."""
    for name, function in ACTIVATIONS.items():
        yield "extra-activation", f"after {name}", function
    if x.dim() and x.shape[-1] > 1:
        yield "extra-softmax", "after softmax", lambda v: v.softmax(-1)
        yield "extra-norm", "after division by its norm", lambda v: v / v.norm(dim=-1, keepdim=True)
        yield "renormalized", "divided by its sum", lambda v: v / v.sum(-1, keepdim=True)
        yield "extra-norm", "centred", lambda v: v - v.mean(-1, keepdim=True)
        for eps in (1e-5, 1e-6):
            yield "extra-norm", "after layer norm", lambda v, e=eps: plain_norm(v, [-1], e)
            yield (
                "extra-norm",
                "after RMS norm",
                lambda v, e=eps: plain_norm(v, [-1], e, centre=False),
            )
        for i in (0, x.shape[-1] - 1):
            yield (
                "zeros",
                f"with element {i} zero",
                lambda v, i=i: v * (torch.arange(v.shape[-1]) != i),
            )
    for d in range(x.dim()):
        if x.shape[d] > 1:
            yield (
                "reduction",
                f"averaged over axis {d}",
                lambda v, d=d: v.mean(d, keepdim=True).expand_as(v),
            )
