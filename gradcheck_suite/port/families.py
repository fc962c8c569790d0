"""Families of hypotheses about a lost call: its usual mistakes, and how it may be wired otherwise.

Each is a function of (search, place) that yields hypotheses; `FAMILIES` has their order, the usual ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it

from gradcheck_suite.port.matching import array
from gradcheck_suite.port.search import Family, Found, Search
from gradcheck_suite.port.torch_program import LOSS, Call, Change, Ref, fill, flat
from gradcheck_suite.port.variants import ACTIVE, NORMS, PERMUTING, Hypothesis, smoothed, transforms, variants

CHOOSING = frozenset(
    [
        "masked_fill",
        "where",
        "tril",
        "triu",
        "relu",
        "clamp",
        "max_pool2d_with_indices",
        "max_pool1d_with_indices",
        "max_pool3d_with_indices",
        "embedding",
        "pow",
        "topk",
        "sort",
        "index",
        "select",
        "slice",
        "arange",
        "amax",
        "maximum",
        "minimum",
        "roll",
        "hardtanh",
        "leaky_relu",
        "threshold",
        "gt",
        "ge",
        "lt",
        "le",
        "eq",
        "ne",
        "logical_and",
        "logical_or",
        "logical_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "__and__",
        "__or__",
        "relu_",
        "masked_fill_",
        "tril_",
        "triu_",
        "cumsum",
        "constant_pad_nd",
        "gather",
        "index_select",
    ]
)
"""Operations whose results the port may seem to have though it chose others."""
ARITHMETIC = frozenset(["add", "mul", "div", "sub", "rsub"])


def usual(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield the usual mistakes with the call."""
    call, run = search.program.calls[place], search.matching.run
    args, kwargs = fill((call.args, call.kwargs), run.get)
    yield from variants(place, call, args, kwargs, run.seen[place][0])


def _usual_at(search: Search, index: int) -> Iterator[Hypothesis]:
    call, run = search.program.calls[index], search.matching.run
    if not run.seen[index] or call.mutates:
        return
    args, kwargs = fill((call.args, call.kwargs), run.get)
    for hypothesis in variants(index, call, args, kwargs, run.seen[index][0]):
        yield replace(hypothesis, at=index)


def masks_before(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield mistakes of what chose, masked or moved the operands: its results are matched, or tell nothing."""
    calls, status, seen = search.program.calls, search.matching.status, set[int]()
    todo = [s.kind for r in calls[place].refs for s in search.matching.sources(r)]
    todo += [r.kind for r in calls[place].refs]
    for _ in range(6):
        following: list[Any] = []
        for index in todo:
            if not isinstance(index, int) or index in seen:
                continue
            seen.add(index)
            chooses = calls[index].name in CHOOSING or calls[index].name.rstrip("_") in ARITHMETIC
            if chooses or status[index] is None:
                following += [r.kind for r in calls[index].refs]
            if chooses:
                yield from _usual_at(search, index)
        todo = following


def further(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield mistakes of the calls before: the port may compute the right value too, and not use it."""
    level, seen = [place], {place}
    for _ in range(4):
        refs = [r.kind for i in level for r in search.program.calls[i].refs]
        level = [k for k in dict.fromkeys(refs) if isinstance(k, int) and k not in seen]
        seen.update(level)
        for index in level:
            yield from _usual_at(search, index)


def smoothings(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield other label smoothings, at the sum of the two terms of a smoothed cross entropy."""
    calls = search.program.calls
    if calls[place].path != LOSS or calls[place].name not in ("add", "nll_loss_forward"):
        return
    near, todo = {place}, [place]
    for _ in range(6):
        todo = [r.kind for i in todo for r in calls[i].refs if isinstance(r.kind, int)]
        near |= set(todo)
    losses = [i for i in near if calls[i].name.startswith("nll_loss")]
    if len(losses) != 1:
        return
    is_smoothed = any(calls[r].name == "mul" for r in search.program.readers.get(Ref(losses[0], 0), []))
    if losses[0] == place and is_smoothed:
        return
    args = [*calls[losses[0]].args, None, 1, -100][:5] if len(calls[losses[0]].args) < 5 else calls[losses[0]].args
    logp, target, weight, _, ignore = args[:5]
    for share in (0.0, 0.1, 0.05, 0.2, 0.01, 0.15, 0.3, 0.02):
        for others in (False, True):

            def smooth(c: Call, a: Any, k: Any, get: Any, share: float = share, others: bool = others) -> Any:
                return [smoothed(get(logp), get(target), share, others=others, weight=get(weight), ignore=ignore)]

            whom = "the other classes" if others else "all classes"
            yield Hypothesis("label-smoothing", f"label smoothing {share:g} shared by {whom}", {place: smooth})


def reset_gates(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield the reset gate of a GRU applied to the state before the product instead of to its result."""
    calls = search.program.calls
    if calls[place].name.rstrip("_") != "mul":
        return
    for i, ref in search.positions(place):
        split = calls[ref.kind] if isinstance(ref.kind, int) else None
        if split is None or not ("split" in split.name or "chunk" in split.name):
            continue
        for total in search.matching.sources(split.args[0]):
            if not isinstance(total.kind, int) or calls[total.kind].name != "addmm":
                continue
            bias, state, weight = calls[total.kind].args[:3]

            yield from _gates_of(place, (i, ref.index), bias, state, weight)


def _gates_of(place: int, at: tuple[int, int], bias: Any, state: Any, weight: Any) -> Iterator[Hypothesis]:
    """Yield the other forms of a product of a gate with one part of an affine map of the state."""
    i, part = at

    def rows(value: Any) -> slice:
        width = value.shape[-1]
        return slice(part * width, (part + 1) * width)

    def early(c: Call, a: Any, k: Any, get: Any) -> Any:
        kept = rows(a[1 - i])
        return [(a[1 - i] * get(state)) @ get(weight)[:, kept] + get(bias)[kept]]

    def bare(c: Call, a: Any, k: Any, get: Any) -> Any:
        return [(a[i] - get(bias)[rows(a[i])]) * a[1 - i]]

    def outside(c: Call, a: Any, k: Any, get: Any) -> Any:
        return [(a[i] - get(bias)[rows(a[i])]) * a[1 - i] + get(bias)[rows(a[i])]]

    words = "the reset gate before the product with the recurrent weight"
    yield Hypothesis("gru-reset-gate", words, {place: early})
    yield Hypothesis("missing-bias", "no bias in the product that the reset gate multiplies", {place: bare})
    yield Hypothesis("gru-bias", "the recurrent bias added outside of the reset gate", {place: outside})


def skipped(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield that the call, or one that makes an operand, is left out."""
    yield from _left_out(search, place)
    for _, ref in search.positions(place):
        for source in search.matching.sources(ref):
            if isinstance(source.kind, int):
                yield from _left_out(search, source.kind)


def _left_out(search: Search, index: int) -> Iterator[Hypothesis]:
    run, call = search.matching.run, search.program.calls[index]
    made = run.seen[index][0]
    for i, ref in search.positions(index):
        value = run.get(ref)
        if isinstance(value, torch.Tensor) and value.shape == made.shape and value.is_floating_point():
            words = f"without {call.name.strip('_')}"
            yield Hypothesis(missing(call, i), words, {index: lambda c, a, k, g, i=i: [a[i]]}, at=index)


def missing(call: Call, kept: int) -> str:
    """Return the cause of a call that is left out, of which one operand is kept."""
    name = call.name.rstrip("_")
    if name in ACTIVE or call.name in ACTIVE:
        return "missing-activation"
    if call.name in NORMS:
        return "missing-norm"
    if name in ("add", "sub"):
        other = call.args[1 - kept] if kept < 2 and len(call.args) > 1 else None
        is_bias = isinstance(other, Ref) and other.kind == "state" and "bias" in str(other.index)
        return "missing-bias" if is_bias else "missing-term"
    named = {"mul": "missing-scale", "div": "missing-scale", "_softmax": "missing-softmax", "where": "missing-mask"}
    return {**named, "masked_fill": "missing-mask"}.get(call.name if call.name in named else name, "missing-operation")


def scaled(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield that the result or an operand is a * x + b, with a and b read from the port's values."""
    call, run = search.program.calls[place], search.matching.run
    for a, b in _affine(search, run.seen[place][0]):
        yield Hypothesis("scale", _linear("the result", a, b), {place: _after(lambda o, a=a, b=b: a * o + b)})
    for i, ref in search.positions(place):
        value = run.get(ref)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        for a, b in _affine(search, value):
            yield Hypothesis(
                "scale", _linear(_named(search, ref), a, b), {place: _operand(i, lambda v, a=a, b=b: a * v + b)}
            )
        if call.name in ("_softmax", "_log_softmax", "sigmoid", "exp"):
            sizes = {d for n in _sizes_near(search, place) for d in (float(n), n**0.5)} | {2.0, 4.0}
            for f in sorted({f for s in sizes if s not in (0.0, 1.0) for f in (s, 1 / s)}):
                yield Hypothesis(
                    "scale", f"{_named(search, ref)} times {f:.6g}", {place: _operand(i, lambda v, f=f: f * v)}
                )


def ratios(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield that a scalar is divided by another count: the quotient of the two losses is one of sizes."""
    out = search.matching.run.seen[place][0]
    if not isinstance(out, torch.Tensor) or out.numel() != 1 or not float(out):
        return
    sizes = {1.0, 2.0} | {float(n) for n in _sizes_near(search, place)}
    sizes |= {a * b for a in sizes for b in sizes}
    for i in search.matching.lost_numbers.of_size(1):
        factor = float(search.matching.lost_numbers.arrays[i].reshape(())) / float(out)
        for a in sorted(sizes):
            b = a / factor if factor else 0.0
            if abs(b - round(b)) < 1e-9 * abs(b) and round(b) in sizes and abs(factor - 1) > 1e-9:
                words = f"the result times {a:g} / {b:g}"
                yield Hypothesis("reduction", words, {place: _after(lambda o, f=factor: o * f)})
                break


def _sizes_near(search: Search, place: int) -> set[int]:
    found: set[int] = set()
    for index in range(max(0, place - 14), place + 1):
        outs = search.matching.run.seen[index]
        if outs and isinstance(outs[0], torch.Tensor):
            found |= {int(s) for s in outs[0].shape}
    return found


def _affine(search: Search, value: Any) -> Iterator[tuple[float, float]]:
    """Yield a and b such that a * x + b are the numbers of a value that the port alone has."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < 4:
        return
    mine = np.sort(array(value).reshape(-1))
    if not np.isfinite(mine).all() or mine[-1] - mine[0] <= 1e-9 * abs(mine[-1]):
        return
    numbers = search.matching.lost_numbers
    for i in numbers.of_size(mine.size):
        theirs = numbers.sorted(i)
        largest = np.abs(theirs).max()
        if not np.isfinite(largest) or theirs[-1] == theirs[0]:
            continue
        slope = (theirs[-1] - theirs[0]) / (mine[-1] - mine[0])
        for a, ours in ((slope, mine), (-slope, mine[::-1])):
            b = float(theirs[0] - a * ours[0])
            b = 0.0 if abs(b) < 1e-9 * largest else b
            fits = np.abs(a * ours + b - theirs).max() <= numbers.tolerance * largest
            if fits and (abs(a - 1) > 1e-9 or b):
                yield float(a), b


def _linear(what: str, a: float, b: float) -> str:
    return f"{what} times {a:.9g}" + (f" plus {b:.9g}" if b else "")


def other_values(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield that an operand is another value of the same shape: a parameter, an input, a result from before."""
    run = search.matching.run
    for i, ref in search.positions(place):
        value = run.get(ref)
        if not isinstance(value, torch.Tensor):
            continue
        memory = value.untyped_storage().data_ptr() if value.numel() else 0
        seen = {id(value)}
        for key, other in run.leaves.items():
            alike = other.shape == value.shape and other.is_floating_point() == value.is_floating_point()
            if alike and id(other) not in seen and (not other.numel() or other.untyped_storage().data_ptr() != memory):
                seen.add(id(other))
                load = ref.kind == "state" and key[0] == "state"
                name = "swapped-parameters" if load else "other-value" if key[0] == "state" else "other-input"
                words = f"{_named(search, ref)} is {_named(search, Ref(*key))}"
                kind = "load" if load else "forward"
                yield Hypothesis(name, words, {place: _taken(i, Ref(*key))}, kind=kind)
        if value.is_floating_point() or value.dtype == torch.bool:
            yield from _earlier_results(search, place, (i, ref), seen, memory)


def _earlier_results(
    search: Search, place: int, position: tuple[int, Ref], seen: set[int], memory: int
) -> Iterator[Hypothesis]:
    run, calls, (i, ref) = search.matching.run, search.program.calls, position
    value = run.get(ref)
    for index in range(place - 1, -1, -1):
        for j, other in enumerate(run.seen[index]):
            if not isinstance(other, torch.Tensor) or other.shape != value.shape or other.dtype != value.dtype:
                continue
            same = other.untyped_storage().data_ptr() == memory and other.storage_offset() == value.storage_offset()
            if id(other) in seen or same or len(seen) > 120:
                continue
            seen.add(id(other))
            words = f"{_named(search, ref)} is the result of {calls[index].name.strip('_')} at {calls[index].where}"
            yield Hypothesis(_why_taken(search, place, ref, index), words, {place: _taken(i, Ref(index, j))})


def _why_taken(search: Search, place: int, ref: Ref, other: int) -> str:
    calls, producers = search.program.calls, {s.kind for s in search.matching.sources(ref)}
    if calls[place].name in ("add", "add_"):
        return "residual"
    if ref.kind == "state" or "state" in producers:
        return "weight-transposed"
    for producer in producers:
        if isinstance(producer, int):
            reads = {s.kind for r in calls[producer].refs for s in search.matching.sources(r)}
            if other in reads:
                return missing(calls[producer], 0)
    return "other-value"


def moves(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield other axes, orders and slices in the operations that move the operands."""
    yield from moves_from(search, [ref.kind for _, ref in search.positions(place) if isinstance(ref.kind, int)])


def moves_from(search: Search, todo: list[int]) -> Iterator[Hypothesis]:
    """Yield other axes, orders and slices in calls that move numbers, and in those that they read."""
    calls, seen = search.program.calls, set[int]()
    while todo and len(seen) < 16:
        index = todo.pop(0)
        if index in seen or search.matching.status[index] is not None:
            continue
        seen.add(index)
        todo += [r.kind for r in calls[index].refs if isinstance(r.kind, int)]
        outs = search.matching.run.seen[index]
        if outs and isinstance(outs[0], torch.Tensor):
            for hypothesis in _moved_otherwise(search, index, outs):
                yield replace(hypothesis, at=index)


def _moved_otherwise(search: Search, index: int, outs: list[Any]) -> Iterator[Hypothesis]:
    call, run = search.program.calls[index], search.matching.run
    shape = tuple(outs[0].shape)
    if call.name in ("permute", "transpose", "t") and isinstance(call.args[0], Ref):
        source = call.args[0]
        change = {index: lambda c, a, k, g: [a[0].reshape(shape)]}
        if source.kind == "state":
            path = str(source.index).rpartition(".")[0]
            yield Hypothesis("weight-transposed", f"{source.index} not transposed", change, kind="load", path=path)
        else:
            yield Hypothesis("missing-transpose", f"no {call.name}", change)
    if call.name in ("cat", "stack"):
        yield Hypothesis("order-of-parts", "the parts in the other order", {
            index: lambda c, a, k, g: c.op(list(reversed(a[0])), *a[1:], **k)})  # fmt: skip
    if call.name == "roll":
        yield Hypothesis("roll-direction", "rolled the other way", {
            index: lambda c, a, k, g: c.op(a[0], [-s for s in a[1]], *a[2:])})  # fmt: skip
    if call.name in ("embedding", "index_select", "gather"):
        args, kwargs = fill((call.args, call.kwargs), run.get)
        yield from variants(index, call, args, kwargs, outs[0])
    if call.name in ("slice", "select", "split", "unbind", "split_with_sizes", "unsafe_split"):
        yield from _exchanged_parts(search, index, outs)
    if call.name == "constant_pad_nd":
        yield from _padded_otherwise(index, call)
    if call.name == "select" and isinstance(call.args[2], int):
        size = run.get(call.args[0]).shape[call.args[1]]
        for other in range(min(size, 64)):
            if other != call.args[2] % size:
                yield Hypothesis("other-position", f"element {other} instead of {call.args[2]}", {
                    index: lambda c, a, k, g, o=other: c.op(a[0], a[1], o)})  # fmt: skip
    if call.name == "select":
        yield Hypothesis("other-position", f"the mean instead of element {call.args[2]}", {
            index: lambda c, a, k, g: [a[0].mean(a[1])]})  # fmt: skip
    if call.name == "slice" and len(call.args) > 2:
        length, size = shape[call.args[1]], run.get(call.args[0]).shape[call.args[1]]
        for begin in range(min(size - length + 1, 64)):
            if begin != call.args[2]:
                yield Hypothesis("other-slice", f"elements from {begin} instead of {call.args[2]}", {
                    index: lambda c, a, k, g, b=begin: [a[0].narrow(a[1], b, length)]})  # fmt: skip


def _padded_otherwise(index: int, call: Call) -> Iterator[Hypothesis]:
    def other_end(c: Call, a: Any, k: Any, g: Any) -> Any:
        return c.op(a[0], [p for i in range(0, len(a[1]), 2) for p in (a[1][i + 1], a[1][i])], *a[2:])

    yield Hypothesis("padding", "padding at the other end", {index: other_end})
    for mode in ("replicate", "reflect", "circular"):
        yield Hypothesis("padding-mode", f"padding of the kind {mode}", {
            index: lambda c, a, k, g, m=mode: [F.pad(a[0], a[1], mode=m)]})  # fmt: skip


def _exchanged_parts(search: Search, index: int, outs: list[Any]) -> Iterator[Hypothesis]:
    """Yield the exchange of a part of a tensor with another part of it."""
    calls, run, call = search.program.calls, search.matching.run, search.program.calls[index]
    for i in range(len(outs)):
        for j in range(i + 1, len(outs)):
            if outs[i].shape == outs[j].shape:
                yield Hypothesis(
                    "parts-swapped", f"parts {i} and {j} of {len(outs)} exchanged", {index: _exchange(i, j)}
                )
    if len(outs) > 1:
        return
    for k in search.program.readers.get(call.args[0], []):
        if calls[k].name == call.name and k != index and run.seen[k] and run.seen[k][0].shape == outs[0].shape:
            words = f"the parts at {call.where} and {calls[k].where} exchanged"
            yield Hypothesis("parts-swapped", words, {index: _as_call(calls[k]), k: _as_call(call)})


def _as_call(other: Call) -> Change:
    return lambda c, a, k, g: other.op(a[0], *other.args[1:], **other.kwargs)


def _exchange(i: int, j: int) -> Change:
    def change(call: Call, args: Any, kwargs: Any, get: Any) -> Any:
        outs = flat(call.op(*args, **kwargs))
        outs[i], outs[j] = outs[j], outs[i]
        return outs

    return change


def weights(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield that a parameter which the call reads is transposed, permuted, or left at zeros or ones."""
    for i, ref in search.positions(place):
        for source in search.matching.sources(ref):
            if source.kind == "state":
                for cause, words, function in transforms(search.matching.run.get(source)):
                    yield _of_parameter(search, (place, i), source, cause, words, function)


def _of_parameter(
    search: Search, position: tuple[int, int], source: Ref, cause: str, words: str, function: Callable[[Any], Any]
) -> Hypothesis:
    name, kind = _transformed_as(search, position[0], source, cause)
    path = str(source.index).rpartition(".")[0]
    leaves = {(source.kind, source.index): function}
    return Hypothesis(name, f"{_named(search, source)} {words}", {}, leaves, kind=kind, path=path)


def transformed(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield that an operand, or what it is moved from, is transformed."""
    run, done = search.matching.run, set[Ref]()
    for i, ref in search.positions(place):
        for cause, words, function in transforms(run.get(ref)):
            name, kind = _transformed_as(search, place, ref, cause)
            yield Hypothesis(name, f"{_named(search, ref)} {words}", {place: _operand(i, function)}, kind=kind)
        for source in search.matching.sources(ref):
            if source == ref or source in done:
                continue
            done.add(source)
            for cause, words, function in transforms(run.get(source)):
                if isinstance(source.kind, int):
                    name, kind = _transformed_as(search, place, source, cause)
                    words = f"{_named(search, source)} {words}"
                    yield Hypothesis(name, words, {source.kind: _after(function, source.index)}, kind=kind)
                else:
                    yield _of_parameter(search, (place, i), source, cause, words, function)


def _transformed_as(search: Search, place: int, ref: Ref, cause: str) -> tuple[str, str]:
    """Return the name and the kind of a transformation of an operand."""
    name = search.program.calls[place].name.rstrip("_")
    if ref.kind == "state":
        if cause == "transposed":
            return "weight-transposed", "load"
        if cause in ("permuted", "reversed", "shifted"):
            return "weight-permuted", "load"
        if cause in ("zeros", "ones"):
            bias = "bias" in str(ref.index)
            return "missing-bias" if bias else "missing-scale" if cause == "ones" else "zeros", "forward"
        if cause in ("blocks-swapped", "halves-swapped", "sign", "scale", "unit-offset"):
            return cause, "load"
    if cause == "zeros":
        return ("missing-term" if name in ("add", "sub") else "zeros"), "forward"
    if cause == "ones":
        return ("missing-scale" if name in ("mul", "div") else "constant"), "forward"
    return cause, "forward"


def deep(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield exchanges of values further up, which are not seen until elements of different places meet."""
    calls, run = search.program.calls, search.matching.run
    seen: list[Ref] = []
    level = list(calls[place].refs)
    while level and len(seen) < 60:
        following: list[Ref] = []
        for ref in level:
            if ref not in seen:
                seen.append(ref)
                following += calls[ref.kind].refs if isinstance(ref.kind, int) else []
        level = following
    yield from _exchanged_parameters(search, seen)
    for ref in seen[:30]:
        for cause, words, function in transforms(run.get(ref)):
            if cause not in PERMUTING and not (cause == "index-offset" and ref.kind == "input"):
                continue
            if ref.kind == "state":
                yield _of_parameter(search, (place, 0), ref, cause, words, function)
            elif ref.kind == "input":
                yield Hypothesis(cause, f"{_named(search, ref)} {words}", {}, {(ref.kind, ref.index): function})
            elif isinstance(ref.kind, int) and not calls[ref.kind].mutates:
                words = f"{_named(search, ref)} {words}"
                yield Hypothesis(cause, words, {ref.kind: _after(function, ref.index)}, at=ref.kind)


def _exchanged_parameters(search: Search, near: list[Ref]) -> Iterator[Hypothesis]:
    """Yield exchanges of parameters of equal shapes: of whole modules, of one tensor each, and within a module."""
    leaves = search.matching.run.leaves
    modules: dict[str, dict[str, str]] = {}
    for name in search.program.names:
        if leaves["state", name].is_floating_point():
            path, _, own = name.rpartition(".")
            modules.setdefault(path, {})[own] = name

    def exchange(pairs: list[tuple[str, str]], words: str, path: str) -> Hypothesis:
        swapped = {("state", x): Ref("state", y) for a, b in pairs for x, y in ((a, b), (b, a))}
        return Hypothesis("swapped-parameters", f"{words} exchanged", {}, swapped, kind="load", path=path)

    done: set[tuple[str, str]] = set()
    for a in list(dict.fromkeys(str(r.index).rpartition(".")[0] for r in near if r.kind == "state"))[:8]:
        for b in _nearest_modules(a, modules)[:24]:
            first, second = min(a, b), max(a, b)
            one, other = modules.get(a, {}), modules[b]
            same = one.keys() == other.keys() and all(
                leaves["state", one[k]].shape == leaves["state", other[k]].shape for k in other
            )
            if (first, second) in done or not same:
                continue
            done.add((first, second))
            pairs = [(one[k], other[k]) for k in other]
            yield exchange(pairs, f"the parameters of {first} and {second}", first)
            for x, y in pairs if len(pairs) > 1 else []:
                yield exchange([(x, y)], f"{x} and {y}", first)
        names = list(modules.get(a, {}).values())
        for i, x in enumerate(names):
            for y in names[i + 1 :]:
                if leaves["state", x].shape == leaves["state", y].shape:
                    yield exchange([(x, y)], f"{x} and {y}", a)


def _nearest_modules(path: str, modules: dict[str, Any]) -> list[str]:
    parent, _, own = path.rpartition(".")
    others = [b for b in modules if b != path]
    return sorted(others, key=lambda b: (b.rpartition(".")[0] != parent, b.rpartition(".")[2] != own))


def swapped_calls(search: Search, place: int) -> Iterator[Hypothesis]:
    """Yield that a call and the one after it are done in the other order."""
    calls, run = search.program.calls, search.matching.run
    own = next((i for i, _ in search.positions(place)), None)
    for reader in search.readers(place):
        second, first = calls[reader], calls[place]
        mine = [i for i, r in search.positions(reader) if Ref(place, 0) in search.matching.sources(r)]
        if not mine or own is None or run.seen[reader][0].shape != run.seen[place][0].shape:
            continue

        def early(c: Call, a: Any, k: Any, g: Any, second: Call = second, i: int = mine[0], place: int = place) -> Any:
            without = lambda ref: None if ref.kind == place else g(ref)  # noqa: E731 - one use
            args, kwargs = fill((second.args, second.kwargs), without)
            args = list(args)
            args[i] = a[own]
            return second.op(*args, **kwargs)

        def late(c: Call, a: Any, k: Any, g: Any, first: Call = first, i: int = mine[0]) -> Any:
            args, kwargs = fill((first.args, first.kwargs), g)
            args = list(args)
            args[own] = a[i]
            return first.op(*args, **kwargs)

        words = f"{second.name.strip('_')} before {first.name.strip('_')}"
        yield Hypothesis("order", words, {place: early, reader: late})


FAMILIES: tuple[tuple[Family, str], ...] = (
    (smoothings, "region"),
    (reset_gates, "region"),
    (usual, "order"),
    (masks_before, "order"),
    (weights, "order"),
    (skipped, "order"),
    (scaled, "order"),
    (ratios, "order"),
    (moves, "order"),
    (other_values, "order"),
    (transformed, "order"),
    (swapped_calls, "order"),
    (further, "order"),
    (deep, "first"),
)
"""The families in the order in which they are tried, and where."""


def reordered(search: Search, ends: list[Ref]) -> Found | None:
    """Return what happened to outputs of which the port has all numbers, in another order or at other positions."""
    before = search.test(0, Hypothesis("", ""))
    if before is None:
        return None
    best: Found | None = None
    for hypothesis in moves_from(search, [e.kind for e in ends if isinstance(e.kind, int)]):
        found = None if search.late else search.test(next(iter(hypothesis.changes)), hypothesis)
        if found is not None and found.error < min(0.5 * before.error, best.error if best else 1.0):
            best = found
            if best.error <= search.close:
                return best
    for end in ends:
        for source in [end, *search.matching.sources(end)]:
            if best is not None or not isinstance(source.kind, int):
                continue
            for cause, words, function in transforms(search.matching.run.get(source)):
                if search.late:
                    return best
                change = {source.kind: _after(function, source.index)}
                found = search.test(source.kind, Hypothesis(cause, f"{_named(search, source)} {words}", change))
                if found is not None and found.error <= search.close:
                    return found
    return best


def _named(search: Search, ref: Ref) -> str:
    if isinstance(ref.kind, int):
        return f"the result of {search.program.calls[ref.kind].name.strip('_')}"
    return str(ref.index) if ref.kind == "state" else f"{ref.kind} {ref.index}"


def _operand(position: int, function: Callable[[Any], Any]) -> Change:
    return lambda call, args, kwargs, get: _with(call, args, kwargs, position, function(args[position]))


def _taken(position: int, other: Ref) -> Change:
    return lambda call, args, kwargs, get: _with(call, args, kwargs, position, get(other))


def _with(call: Call, args: Any, kwargs: Any, position: int, value: Any) -> Any:
    new = list(args)
    new[position] = value
    return call.op(*new, **kwargs)


def _after(function: Callable[[Any], Any], number: int = 0) -> Change:
    def change(call: Call, args: Any, kwargs: Any, get: Any) -> Any:
        outs = flat(call.op(*args, **kwargs))
        outs[number] = function(outs[number])
        return outs

    return change
