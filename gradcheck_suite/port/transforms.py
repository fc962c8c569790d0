"""What may happen to any tensor by mistake: other orders of its elements, another sign, one more
operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations
from typing import Any

import torch

from gradcheck_suite.port.alterations import Alteration
from gradcheck_suite.port.mistakes import ACTIVATIONS, plain_norm

PERMUTING = frozenset(
    ["transposed", "permuted", "reversed", "halves-swapped", "blocks-swapped", "shifted"]
)


def transforms(x: Any) -> Iterator[Alteration]:
    """Yield what may happen to a tensor; the shape stays."""
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


def _of_complex(x: Any) -> Iterator[Alteration]:
    yield Alteration("conjugated", "conjugated", torch.conj_physical)
    yield Alteration("sign", "with its sign flipped", torch.neg)
    yield Alteration("conjugated", "with real and imaginary part exchanged", _exchanged_parts)
    yield Alteration(
        "other-value", "without its imaginary part", lambda v: torch.complex(v.real, 0 * v.real)
    )


def _exchanged_parts(value: Any) -> Any:
    return torch.complex(value.imag, value.real)


def _of_mask(x: Any) -> Iterator[Alteration]:
    yield Alteration("mask-polarity", "inverted", lambda v: ~v)
    # libraries differ in whether true means to look or to leave out, so both may be a mask that is
    # left out
    yield Alteration("missing-mask", "false everywhere", torch.zeros_like)
    yield Alteration("missing-mask", "true everywhere", torch.ones_like)
    # the last two axes of a mask are queries and keys
    for d in range(max(x.dim() - 2, 0), x.dim()):
        for s in (1, -1):
            yield Alteration(
                "mask-window", f"moved by {s:+d} along axis {d}", lambda v, s=s, d=d: v.roll(s, d)
            )
    if x.dim() < 2 or min(x.shape[-2:]) < 2:
        return
    n, m = x.shape[-2:]
    if n == m:
        yield Alteration("mask-transposed", "transposed", lambda v: v.mT)
    for k in (0, -1, 1, 2):
        for side in ("triu", "tril"):
            yield Alteration(
                "mask-diagonal",
                f"true from diagonal {k} on ({side})",
                lambda v, k=k, s=side: _band(v, s, k),
            )
    # a query that sees no key gives NaN: some ports leave the first one its own
    corner = torch.zeros(n, m, dtype=torch.bool)
    corner[0, 0] = True
    yield Alteration(
        "mask-diagonal",
        "true from the diagonal on but for the first",
        lambda v: _band(v, "triu", 0) & ~corner,
    )
    for k in range(1 - n, m):
        diagonal = torch.ones(n, m, dtype=torch.bool).triu(k).tril(k)
        yield Alteration("mask-window", f"false on diagonal {k}", lambda v, d=diagonal: v & ~d)
        yield Alteration("mask-window", f"true on diagonal {k}", lambda v, d=diagonal: v | d)


def _band(mask: Any, side: str, diagonal: int) -> Any:
    return getattr(torch.ones_like(mask), side)(diagonal)


def _of_whole_numbers(x: Any) -> Iterator[Alteration]:
    # one or two more is what special tokens, such as the beginning of a text, shift ids by
    for s in (1, -1, 2, -2):
        yield Alteration("index-offset", f"with {s:+d} added", lambda v, s=s: v + s)
    for d in reversed(range(x.dim())):
        yield Alteration("index-reversed", f"reversed along axis {d}", lambda v, d=d: v.flip(d))
    yield Alteration("zeros", "as zeros", torch.zeros_like)
    yield Alteration("ones", "as ones", torch.ones_like)


def exchanges(x: Any) -> Iterator[Alteration]:
    """Yield other orders of a tensor's elements."""
    for d in range(x.dim()):
        for e in range(d + 1, x.dim()):
            if x.shape[d] == x.shape[e] > 1:
                yield Alteration(
                    "transposed",
                    f"with axes {d} and {e} exchanged",
                    lambda v, d=d, e=e: v.transpose(d, e),
                )
    if x.dim() in (3, 4):  # a kernel that was flattened in another order
        for order in list(permutations(range(x.dim())))[1:]:
            words = f"read in the order of axes {order}"
            yield Alteration("permuted", words, lambda v, o=order: v.permute(o).reshape(v.shape))
    for d in reversed(range(x.dim())):
        yield from _regroupings(d, x.shape[d])
    for d in reversed(range(x.dim())):
        yield from _exchanges_along(d, x.shape[d])


def _regroupings(d: int, n: int) -> Iterator[Alteration]:
    """Yield an axis of outer * inner elements read as inner * outer, whole or in blocks."""
    for a in range(2, n):
        # heads and groups are few: a long axis has many divisors that nobody reshapes by
        if n % a == 0 and (n <= 64 or a <= 16 or n // a <= 16):
            words = f"with axis {d} read as {n // a} by {a}"
            yield Alteration(
                "permuted",
                words,
                lambda v, a=a: v.unflatten(d, (a, -1)).transpose(d, d + 1).flatten(d, d + 1),
            )
    for a in range(2, min(n, 17)):
        for b in range(2, min(n // a, 17)):
            if n >= 8 and n % (a * b) == 0 and n // (a * b) > 1:
                words = f"with axis {d} read as {b} by {a} blocks"
                parts = (a, b, -1)
                yield Alteration(
                    "permuted",
                    words,
                    lambda v, p=parts: v.unflatten(d, p).transpose(d, d + 1).flatten(d, d + 2),
                )


def _exchanges_along(d: int, n: int) -> Iterator[Alteration]:
    if n < 2:
        return
    yield Alteration("reversed", f"reversed along axis {d}", lambda v: v.flip(d))
    for s in (1, -1):
        yield Alteration("shifted", f"rolled by {s} along axis {d}", lambda v, s=s: v.roll(s, d))
        yield Alteration(
            "shifted", f"shifted by {s} along axis {d}", lambda v, s=s: _shifted(v, d, s)
        )
    # such as sine and cosine, or the gate and the value of a gated layer
    if n % 2 == 0 and n > 2:
        yield Alteration(
            "halves-swapped",
            f"with the halves of axis {d} exchanged",
            lambda v: v.roll(n // 2, d),
        )
    # queries, keys and values are three blocks, the gates of an LSTM four
    for k in (3, 4):
        if n % k or n <= k:
            continue
        for a, b in combinations(range(k), 2):
            words = f"with blocks {a} and {b} of {k} of axis {d} exchanged"
            yield Alteration(
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
    order = list(range(k))
    order[a] = b
    order[b] = a
    return torch.cat([parts[i] for i in order], dim)


def signs(x: Any) -> Iterator[Alteration]:
    """Yield a tensor with its sign flipped, with 1 added, or with another factor."""
    yield Alteration("sign", "with its sign flipped", lambda v: -v)
    yield Alteration("one-minus", "as 1 - x", lambda v: 1 - v)
    yield Alteration("unit-offset", "with 1 added", lambda v: v + 1)
    yield Alteration("unit-offset", "with 1 subtracted", lambda v: v - 1)
    yield Alteration("scale", "times 2", lambda v: v * 2)
    yield Alteration("scale", "times 0.5", lambda v: v * 0.5)
    yield Alteration("zeros", "as zeros", torch.zeros_like)
    yield Alteration("ones", "as ones", torch.ones_like)


def functions(x: Any) -> Iterator[Alteration]:
    """Yield other functions of a tensor, element by element or along its last axis."""
    for name, function in ACTIVATIONS.items():
        yield Alteration("extra-activation", f"after {name}", function)
    if x.dim() and x.shape[-1] > 1:
        yield Alteration("extra-softmax", "after softmax", lambda v: v.softmax(-1))
        yield Alteration(
            "extra-norm", "after division by its norm", lambda v: v / v.norm(dim=-1, keepdim=True)
        )
        yield Alteration(
            "renormalized", "divided by its sum", lambda v: v / v.sum(-1, keepdim=True)
        )
        yield Alteration("extra-norm", "centred", lambda v: v - v.mean(-1, keepdim=True))
        # the defaults of torch's and of flax's norms
        for eps in (1e-5, 1e-6):
            yield Alteration(
                "extra-norm", "after layer norm", lambda v, e=eps: plain_norm(v, [-1], e)
            )
            yield Alteration(
                "extra-norm",
                "after RMS norm",
                lambda v, e=eps: plain_norm(v, [-1], e, centre=False),
            )
        for i in (0, x.shape[-1] - 1):
            yield Alteration(
                "zeros",
                f"with element {i} zero",
                lambda v, i=i: v.masked_fill(torch.arange(v.shape[-1]) == i, 0.0),
            )
    for d in range(x.dim()):
        if x.shape[d] > 1:
            yield Alteration(
                "reduction",
                f"averaged over axis {d}",
                lambda v, d=d: v.mean(d, keepdim=True).expand_as(v),
            )
