"""Families of hypotheses about a lost call: its usual mistakes, and how it may be wired otherwise.

Each is a function of (search, place) that yields hypotheses; `FAMILIES` has their order, the usual
ones first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, groupby, islice, permutations, product
from typing import Any

import numpy as np
import torch

from gradcheck_suite.port.alterations import Alteration
from gradcheck_suite.port.changes import (
    CallArguments,
    Hypothesis,
    of_operand,
    of_result,
    other_operand,
)
from gradcheck_suite.port.explanation import Explanation, best_explanation
from gradcheck_suite.port.matching import array
from gradcheck_suite.port.mistakes import (
    BASES,
    NORMS,
    REDUCING,
    is_activation,
    mistakes,
    over,
    smoothed,
)
from gradcheck_suite.port.number_sets import error, variety, with_axes_aligned
from gradcheck_suite.port.rare_inputs import ordered
from gradcheck_suite.port.search import (
    LEAST,
    CauseSearch,
    Family,
    FoundChange,
    breadth_first,
    downstream,
    recomputed,
)
from gradcheck_suite.port.torch_program import (
    LOSS,
    Change,
    OperationCall,
    Ref,
    TorchProgram,
    flat,
    with_tensors,
)
from gradcheck_suite.port.transforms import (
    PERMUTING,
    exchanges,
    functions,
    signs,
    swapped_blocks_of,
    transforms,
)

LINEAR: dict[Any, str] = {
    (1, 1): "unit-offset",
    (1, -1): "unit-offset",
    (-1, 0): "sign",
    (-1, 1): "one-minus",
}
"""Causes of a * x + b, by a and b."""
ARITHMETIC = ("add", "mul", "div", "sub", "rsub")


def usual(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield the usual mistakes with the call, and with the masks and indices that it reads."""
    call = search.program.calls[place]
    run = search.matching.run
    if not run.seen[place]:
        return
    args, kwargs = with_tensors((call.args, call.kwargs), run.get)
    counted = any(_is_count(search, ref) for _, ref in search.positions(place))
    # `clamp(min=1)` before a division guards a count
    divides = call.name.startswith("clamp") and _divides(search, place)
    renamed = {"unit-offset": "index-offset"} if counted else {}
    renamed |= {"constant": "count"} if divides else {}
    for hypothesis in mistakes(place, call, args, kwargs, run.seen[place][0]):
        named = renamed.get(hypothesis.cause, hypothesis.cause)
        # the pair comes before the single call: one wrong axis in two reductions of a line is one
        # mistake
        if named == "axis":
            yield from _over_alike(search, place, hypothesis)
        yield replace(hypothesis, cause=named)
    if not re.search(NO_INDEX, call.name) and not _is_divisor(search, place):
        yield from _other_indices(search, place)


def _over_alike(search: CauseSearch, place: int, hypothesis: Hypothesis) -> Iterator[Hypothesis]:
    """Yield another axis also of the other reductions of a tensor in a line: a mean and a deviation
    go over the same axes.
    """
    calls = search.program.calls
    beside = _readers_of_a_line(search, place, next(r for _, r in search.positions(place)))
    alike = [i for i in beside if re.fullmatch(REDUCING, calls[i].name)]
    if len(alike) > 1:
        yield replace(hypothesis, changes=dict.fromkeys(alike, hypothesis.changes[place]))


NO_INDEX = "embedding_bag|^index$|^div_?$"
"""Operations whose whole numbers are not moved: the kernel of an embedding bag checks no offsets,
what sorts the indices of `index` says more than their order, and a divisor is a count."""


def _divides(search: CauseSearch, index: int) -> bool:
    """Return whether a result is what something is divided by, also after it is moved."""
    readers = search.program.readers.get(Ref(index, 0), [])
    calls = search.program.calls
    status = search.matching.status
    return bool(readers) and all(
        calls[i].args[1:2] == (Ref(index, 0),)
        if calls[i].name.startswith("div")
        else status[i] is None and _divides(search, i)
        for i in readers
    )


def _is_divisor(search: CauseSearch, index: int) -> bool:
    """Return whether a result has whole numbers by which something is divided, and does nothing
    else.
    """
    out = search.matching.run.seen[index][0]
    readers = search.program.readers.get(Ref(index, 0), [])
    # a number of another dtype may be anything
    if not isinstance(out, torch.Tensor) or out.is_floating_point() or not readers:
        return False
    calls = search.program.calls
    return all(calls[i].name.startswith("div") or _is_divisor(search, i) for i in readers)


def _other_indices(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that masks and indices which a call reads are inverted, moved or left out."""
    for i, ref in search.positions(place):
        value = search.matching.run.get(ref)
        if not value.is_floating_point():
            for one in transforms(value):
                named = _OTHERS.get(one.cause, one.cause)
                # a table of the model is called what it is, whatever operation reads it
                if ref.kind != "state":
                    named = _transformed_as(search, place, ref, one.cause)
                words = f"{_named(search, ref)} {one.words}"
                yield Hypothesis(named, words, {place: of_operand(i, one.make)})


def _choosing(search: CauseSearch, place: int, depth: int) -> Iterator[int]:
    """Yield the calls before one that tell nothing, also past sums and products."""
    calls = search.program.calls
    status = search.matching.status
    return search.read_by(
        [place], depth, lambda i: status[i] is None or calls[i].name in ARITHMETIC
    )


def chosen_before(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield mistakes of what chose, masked or moved the operands: its results are matched, or tell
    nothing.
    """
    for hypothesis in _before(search, _choosing(search, place, 6), usual, ties):
        refs = search.program.calls[hypothesis.at].refs if hypothesis.at is not None else []
        parameter = next((r for r in refs if r.kind == "state"), None)
        # a parameter is not transposed in the model but when it is loaded
        if hypothesis.cause == "missing-transpose" and parameter is not None:
            path = str(parameter.index).rpartition(".")[0]
            hypothesis = replace(
                hypothesis,
                cause="weight-transposed",
                kind="load",
                path=path,
            )
        yield hypothesis


def beyond_a_table(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that an index is not limited before a table: JAX counts a negative one from the end,
    and takes the last row for one that is too large.
    """
    program = search.program
    call = program.calls[place]
    if call.name not in ("embedding", "index_select", "index"):
        return
    index = next((r for _, r in search.positions(place) if _is_index(search, r)), None)
    for limit in _choosing(search, place, 6):
        if index is not None and program.calls[limit].name.startswith("clamp"):
            free = {Ref(limit, 0): program.calls[limit].args[0]}

            def read(c: OperationCall, a: Any, k: Any, get: Any, free: Any = free) -> Any:
                own = {ref: get(source) for ref, source in free.items()}
                rows = get(c.args[0])
                at = _with_others(program, index.kind, own, get)
                # https://docs.jax.dev/en/latest/_autosummary/jax.numpy.ndarray.at.html
                at = torch.where(at < 0, at + len(rows), at).clamp(0, len(rows) - 1)
                return [rows[at]]

            words = f"no {program.calls[limit].label}: an index that is out of the table is"
            words += " counted from its end, or is the last"
            yield Hypothesis("missing-operation", words, {place: read})


def ties(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that equal elements are in another order, or that the largest elements are told by a
    threshold in place of their positions, or the other way: a threshold keeps all elements that are
    equal to the last one.
    """
    calls = search.program.calls
    call = calls[place]
    if call.name in _KEEPING:
        dim, index, source = call.args[1:4]
        top = _top(search, index, 1)
        if top is not None and top.dim == dim:
            yield Hypothesis("ties", _BY_THRESHOLD, {place: _by_threshold(top, source)})
    elif call.name == "sort":
        yield Hypothesis("ties", "the last of equal elements first", {place: ordered(first=False)})
    elif call.name in _COMPARING:
        # either side of a comparison may be the limit
        for x, limit in (call.args[:2], call.args[1::-1]):
            top = _top(search, limit, 0)
            if top is not None and top.of == x:
                yield Hypothesis("ties", _BY_POSITION, {place: _by_position(top)})


_KEEPING = ("scatter", "scatter_")
_COMPARING = ("lt", "le", "gt", "ge")
_BY_THRESHOLD = "a threshold, which keeps all elements that are equal to the last of the largest"
_BY_POSITION = "so many elements by their positions, of equal ones the first"


@dataclass(frozen=True)
class _Top:
    """A call that takes the largest or the smallest elements along an axis.

    Attributes:
        of: what they are taken of.
        values: the elements.
        dim: the axis.
        largest: whether the largest are taken.
    """

    of: Ref
    values: Ref
    dim: int
    largest: bool


def _top(search: CauseSearch, ref: Any, result: int) -> _Top | None:
    """Return the call of `topk` that a tensor is a result of, also one that was moved since."""
    calls = search.program.calls
    while isinstance(ref, Ref) and isinstance(ref.kind, int):
        call = calls[ref.kind]
        if call.name == "topk":
            given = CallArguments(call, call.args, call.kwargs)
            if ref.index != result:
                return None
            return _Top(
                call.args[0],
                Ref(ref.kind, 0),
                given.dim,
                bool(given.largest),
            )
        # what is computed from two tensors, or is another value in the port, is no longer what
        # `topk` gave
        if len(call.refs) != 1 or search.matching.status[ref.kind] is False:
            return None
        ref = call.refs[0]
    return None


def _last_of(top: _Top, get: Any) -> Any:
    """Return the last of the elements that are taken."""
    values = get(top.values)
    return values.narrow(top.dim, values.shape[top.dim] - 1, 1)


def _by_threshold(top: _Top, source: Any) -> Change:
    def change(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        x = get(top.of)
        last = _last_of(top, get)
        kept = x >= last if top.largest else x <= last
        put = x if isinstance(source, Ref) else torch.as_tensor(source, dtype=args[0].dtype)
        return [torch.where(kept, put, args[0])]

    return change


def _by_position(top: _Top) -> Change:
    def change(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        x = get(top.of)
        # torch promises no order of equal elements, and JAX takes the first ones
        order = torch.sort(x, dim=top.dim, descending=top.largest, stable=True).indices
        places = order.narrow(top.dim, 0, get(top.values).shape[top.dim])
        taken = torch.zeros_like(x, dtype=torch.bool).scatter(top.dim, places, True)
        says_of_equal = _compared(call, top, 0.0)
        # `>` of the largest keeps no equal ones: then the threshold and the positions agree
        if says_of_equal == _compared(call, top, -1.0 if top.largest else 1.0):
            raise ValueError("equal elements are not kept: the comparison keeps no more")
        return [taken if says_of_equal else ~taken]

    return change


def _compared(call: OperationCall, top: _Top, off: float) -> bool:
    """Return what a comparison says of an element that is so far from the last one that is taken."""
    # the recorded operation decides: `<` and `<=` differ where `off` is 0
    operands = [torch.tensor(off if ref == top.of else 0.0) for ref in call.args[:2]]
    return bool(call.op(*operands))


def _is_index(search: CauseSearch, ref: Ref) -> bool:
    value = search.matching.run.get(ref)
    whole = isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)
    return whole and isinstance(ref.kind, int)


def further(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield mistakes of the calls before: the port may compute the right value too, and not use it."""
    yield from _before(search, search.read_by([place], 4), usual)


def _before(search: CauseSearch, indices: Iterable[int], *families: Family) -> Iterator[Hypothesis]:
    """Yield what families say of calls that a lost one depends on; these are then the place."""
    for index in indices:
        for family in families:
            yield from (replace(h, at=index) for h in family(search, index))


def smoothings(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield other label smoothings, at the sum of the two terms of a smoothed cross entropy."""
    calls = search.program.calls
    if calls[place].path != LOSS or not re.match("add$|nll_loss", calls[place].name):
        return
    near = [place, *search.read_by([place], 6)]
    losses = [i for i in near if calls[i].name.startswith("nll_loss")]
    readers = search.program.readers
    reading = chain.from_iterable(readers.get(Ref(i, 0), []) for i in losses)
    is_smoothed = any(calls[r].name == "mul" for r in reading)
    # another sum has more than the two terms
    if len(losses) != 1 or (losses[0] == place) == is_smoothed:
        return
    logp, target, weight, _, ignore = [*calls[losses[0]].args, None, 1, -100][:5]
    # the usual shares first
    for share in (0.0, 0.1, 0.05, 0.2, 0.01, 0.15, 0.3, 0.02):
        for others in (False, True):

            def smooth(
                c: OperationCall,
                a: Any,
                k: Any,
                get: Any,
                share: float = share,
                others: bool = others,
            ) -> Any:
                return [
                    smoothed(
                        get(logp),
                        get(target),
                        share,
                        others=others,
                        weight=get(weight),
                        ignore=ignore,
                    )
                ]

            whom = "the other classes" if others else "all classes"
            yield Hypothesis(
                "label-smoothing", f"label smoothing {share:g} shared by {whom}", {place: smooth}
            )


def reset_gates(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield the reset gate of a GRU applied to the state before the product instead of to its
    result.
    """
    calls = search.program.calls
    operands = list(search.positions(place))
    if calls[place].name.rstrip("_") != "mul" or len(operands) != 2:
        return
    for i, ref in operands:
        # torch computes all gates by one product, which is split: the reset gate multiplies one of
        # the parts
        if isinstance(ref.kind, int) and re.search("split|chunk", calls[ref.kind].name):
            for total in search.read_by([ref.kind], 2):
                if calls[total].name == "addmm":
                    bias, state, weight = calls[total].args[:3]
                    yield from _gates_of(place, (i, ref.index), bias, state, weight)


def _gates_of(
    place: int, at: tuple[int, int], bias: Any, state: Any, weight: Any
) -> Iterator[Hypothesis]:
    """Yield the other forms of a product of a gate with one part of an affine map of the state."""
    i, part = at

    def rows(value: Any) -> slice:
        width = value.shape[-1]
        return slice(part * width, (part + 1) * width)

    def early(c: OperationCall, a: Any, k: Any, get: Any) -> Any:
        kept = rows(a[1 - i])
        return [(a[1 - i] * get(state)) @ get(weight)[:, kept] + get(bias)[kept]]

    def bare(c: OperationCall, a: Any, k: Any, get: Any) -> Any:
        return [(a[i] - get(bias)[rows(a[i])]) * a[1 - i]]

    def outside(c: OperationCall, a: Any, k: Any, get: Any) -> Any:
        return [(a[i] - get(bias)[rows(a[i])]) * a[1 - i] + get(bias)[rows(a[i])]]

    words = "the reset gate before the product with the recurrent weight"
    yield Hypothesis("gru-reset-gate", words, {place: early})
    yield Hypothesis(
        "missing-bias", "no bias in the product that the reset gate multiplies", {place: bare}
    )
    yield Hypothesis(
        "gru-bias", "the recurrent bias added outside of the reset gate", {place: outside}
    )


def skipped(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that the call, or one that makes or moves an operand, is left out."""
    yield from _left_out(search, place)
    status = search.matching.status
    for index in search.read_by([place], 6, lambda i: status[i] is None):
        yield from _left_out(search, index)
    for _, ref in search.positions(place):
        for source in search.matching.sources(ref):
            if isinstance(source.kind, int):
                yield from _left_out(search, source.kind)


def _left_out(search: CauseSearch, index: int) -> Iterator[Hypothesis]:
    run = search.matching.run
    calls = search.program.calls
    call = search.program.calls[index]
    made = run.seen[index][0]
    for i, ref in search.positions(index):
        value = run.get(ref)
        # only what has the shape of the result can stand in its place
        if isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (
            made.shape,
            made.dtype,
        ):
            words = f"without {call.label}"
            cause = left_out_call(call, i)
            if (
                call.name.startswith("div")
                # what is divided by its own norm or sum is normalized
                and i == 0
                and _is_reduction_of(search, call.args[1], ref)
            ):
                cause = "missing-norm"
            elif call.name.startswith("mul") and any(
                r != ref and _is_mask(array(run.get(r))) for r in call.refs
            ):
                cause = "missing-mask"
            yield Hypothesis(cause, words, {index: lambda c, a, k, g, r=ref: [g(r)]}, at=index)
            # the epsilon goes with what it is for
            if isinstance(ref.kind, int) and _adds_little(calls[ref.kind]):
                before = calls[ref.kind].args[0]
                yield Hypothesis(
                    cause, words, {index: lambda c, a, k, g, b=before: [g(b)]}, at=index
                )


def _is_reduction_of(search: CauseSearch, ref: Any, whole: Ref) -> bool:
    """Return whether a tensor is computed from another one alone, by some reduction."""
    if not isinstance(ref, Ref) or not isinstance(ref.kind, int):
        return False
    near = [
        search.program.calls[i]
        for i in (ref.kind, *search.read_by([ref.kind], 5, lambda i: i != whole.kind))
    ]
    return any(whole in c.refs for c in near) and any(re.fullmatch(REDUCING, c.name) for c in near)


def left_out_call(call: OperationCall, kept: int) -> str:
    """Return the cause of a call that is left out, of which one operand is kept."""
    name = call.name.rstrip("_")
    if is_activation(call):
        return "missing-activation"
    if re.fullmatch(NORMS, call.name):
        return "missing-norm"
    if name in ("add", "sub"):
        other = call.args[1 - kept] if kept < 2 and len(call.args) > 1 else None
        is_bias = isinstance(other, Ref) and other.kind == "state" and "bias" in str(other.index)
        return "missing-bias" if is_bias else "missing-term"
    named = {
        "mul": "missing-scale",
        "div": "missing-scale",
        "_softmax": "missing-softmax",
        "where": "missing-mask",
    }
    return {**named, "masked_fill": "missing-mask"}.get(
        call.name if call.name in named else name, "missing-operation"
    )


def scaled(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that the result or an operand is a * x + b, with a and b read from the port's values."""
    yield from _scaled_results(search, place)
    yield from _other_exponents(search, place)
    yield from _scaled_operands(search, place)


def _number_in(call: OperationCall) -> float | None:
    """Return the number that stands in a call, such as an epsilon that is added."""
    second = call.args[1] if len(call.args) > 1 else None
    return second if isinstance(second, int | float) else None


def _scaled_results(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    call = search.program.calls[place]
    name = call.name.rstrip("_")
    number = _number_in(call)
    for cause, words, a, b in _affine(search, search.matching.run.seen[place][0]):
        said = f"the result {words}"
        named = cause
        if number is not None and name == "add" and cause != "scale":
            # x + eps with another eps: the sum has another number, and nothing is added
            named = "eps" if 0 < number < 1e-2 else "constant"
            said = f"{number + b:.6g} instead of {number:g}"
        elif number is not None and name == "mul" and not b:
            said = f"{a * number:.9g} instead of {number:g}"
        yield Hypothesis(named, said, {place: of_result(lambda o, a=a, b=b: a * o + b)})


def _other_exponents(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    call = search.program.calls[place]
    number = _number_in(call)
    if call.name != "pow" or number is None:
        return
    # the exponent is the slope between logarithms
    logarithm = search.matching.run.get(call.args[0]).log()
    for _, _, a, _ in _affine(search, logarithm, np.log):
        words = f"the exponent {a:.9g} instead of {number:g}"
        yield Hypothesis("constant", words, {place: of_operand(1, lambda v, a=a: a)})


def _scaled_operands(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    run = search.matching.run
    for i, ref in search.positions(place):
        # the port may compute torch's value too, and multiply it, or what it is moved to
        for source in dict.fromkeys([*_moves(search, ref), ref, *search.matching.sources(ref)]):
            is_result = source != ref and isinstance(source.kind, int)
            # parameters and inputs are tried by other families
            if source != ref and not is_result:
                continue
            for one in _scalings(search, run.get(source)):
                change = {place: of_operand(i, one.make)}
                if is_result:
                    change = {source.kind: of_result(one.make, source.index)}
                words = f"{_named(search, source)} {one.words}"
                yield Hypothesis(one.cause, words, change, at=max(change))


def _moves(search: CauseSearch, ref: Ref) -> list[Ref]:
    """Return what a tensor is moved from as a whole, the first move of all first."""
    found = list[Ref]()
    while isinstance(ref.kind, int) and search.matching.status[ref.kind] is None:
        found.insert(0, ref)
        # a call of two tensors is no move
        before = search.program.calls[ref.kind].refs
        if len(before) != 1:
            break
        ref = before[0]
    return found


def _scalings(search: CauseSearch, value: Any) -> Iterator[Alteration]:
    """Yield what multiplies a value, or its parts along an axis, in the port alone."""
    for cause, words, a, b in _affine(search, value):
        yield Alteration(cause, words, lambda v, a=a, b=b: a * v + b)
    numbers = search.matching.lost_numbers
    mine = array(value)
    # zeros stay zeros by any factor
    if mine.dtype.kind != "f" or not mine.any():
        return
    for i in numbers.of_size(mine.size):
        theirs = with_axes_aligned(numbers.arrays[i], mine)
        for axis in range(mine.ndim if theirs.shape == mine.shape else 0):
            others = tuple(d for d in range(mine.ndim) if d != axis)
            # the factor of each part that fits best, by least squares
            factors = (theirs * mine).sum(others, keepdims=True) / (mine**2).sum(
                others, keepdims=True
            )
            off = np.abs(factors * mine - theirs).max()
            if (
                # with as many factors as elements, any array would fit
                off <= numbers.tolerance * np.abs(theirs).max()
                and 1 < factors.size <= mine.size / LEAST
            ):
                put = torch.as_tensor(factors)
                words = f"times another number for each part of axis {axis}"
                yield Alteration("scale", words, lambda v, f=put: v * f)


def ratios(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that a sum is divided by another count, the same for all of it, or a scalar multiplied
    by one of sizes.
    """
    out = search.matching.run.seen[place][0]
    if not isinstance(out, torch.Tensor) or not out.any():
        return
    # a count is a number of rows, or of rows and tokens: a product of two sizes near the place
    single = {1.0, 2.0} | {float(n) for n in _sizes_near(search, place)}
    sizes = single | {a * b for a, b in product(single, single)}
    for i in search.matching.lost_numbers.of_size(out.numel()):
        theirs = search.matching.lost_numbers.arrays[i].reshape(-1)
        yield from _other_count(search, place, theirs, sizes)
        if out.numel() == 1:
            yield from _ratio_of_sizes(place, float(theirs[0]) / float(out), sizes)


def _other_count(
    search: CauseSearch, place: int, theirs: Any, sizes: Collection[float]
) -> Iterator[Hypothesis]:
    """Yield the count by which a sum is divided in the port."""
    call = search.program.calls[place]
    # the count is read where rounding blurs it least
    most = np.abs(theirs).argmax()
    if call.name != "div" or not isinstance(call.args[1], Ref) or not theirs[most]:
        return
    total = array(search.matching.run.get(call.args[0])).reshape(-1)
    count = float(total[most] / theirs[most])
    # a whole number that is no size of this run would not be the count in another run
    if abs(count - round(count)) < 1e-9 * count and round(count) in sizes:
        words = f"{_named(search, call.args[1])} is {count:.9g}"
        yield Hypothesis("count", words, {place: of_operand(1, lambda v: 0 * v + count)})


def _ratio_of_sizes(place: int, factor: float, sizes: Collection[float]) -> Iterator[Hypothesis]:
    """Yield that a scalar is multiplied by a ratio of two sizes."""
    if not factor or abs(factor - 1) <= 1e-9:
        return
    for a in sorted(sizes):
        b = a / factor
        if abs(b - round(b)) < 1e-9 * abs(b) and round(b) in sizes:
            words = f"the result times {a:g} / {b:g}"
            yield Hypothesis("reduction", words, {place: of_result(lambda o: o * factor)})
            return


def constants(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that a table, which depends on neither parameters nor inputs, is one that the port has.

    A table of other numbers is the port's alone. Of zeros and ones each side may have the other's.
    """
    for i, ref in search.positions(place):
        value = search.matching.run.get(ref)
        if isinstance(value, torch.Tensor) and _is_constant(search, ref):
            yield from _other_masks(search, place, i, ref)
            yield from _other_tables(search, place, i, ref)


def _other_masks(search: CauseSearch, place: int, position: int, ref: Ref) -> Iterator[Hypothesis]:
    """Yield the masks of the port that have the size of a constant mask."""
    mine = array(search.matching.run.get(ref))
    if not _is_mask(mine):
        return
    # the port may have one mask in many places
    tried = set[bytes]()
    for table in search.matching.side.values:
        if table.size != mine.size or not _is_mask(table):
            continue
        theirs = with_axes_aligned(table, mine).astype(mine.dtype)
        off = int((theirs != mine).sum()) if theirs.shape == mine.shape else 0
        if off and theirs.tobytes() not in tried:
            tried.add(theirs.tobytes())
            other = torch.as_tensor(theirs.copy())
            words = f"{_named(search, ref)} with {off} of its {mine.size} elements otherwise"
            change = of_operand(position, lambda v, o=other: o)
            yield Hypothesis("mask-elements", words, {place: change})


def _other_tables(search: CauseSearch, place: int, position: int, ref: Ref) -> Iterator[Hypothesis]:
    """Yield the arrays of the port alone that have the size of a constant table."""
    numbers = search.matching.lost_numbers
    value = search.matching.run.get(ref)
    for k in list(numbers.of_size(value.numel()))[:40]:
        other = torch.as_tensor(np.array(with_axes_aligned(numbers.arrays[k], array(value))))
        if other.shape == value.shape:
            at = int((other - value).abs().argmax())
            words = f"{_named(search, ref)} with other numbers, such as"
            words += f" {other.flatten()[at]:.6g} for {value.flatten()[at]:.6g}"
            change = of_operand(position, lambda v, o=other: o)
            yield Hypothesis("constant", words, {place: change})


def _is_mask(table: Any) -> bool:
    return bool(np.isin(table, (0, 1)).all()) and bool(table.any()) and not bool(table.all())


def bases(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that all tables of rotary or sinusoidal positions have another base."""
    tables = [k for k in search.matching.run.leaves if _is_constant(search, Ref(*k))]
    for base in BASES:
        made = {k: _rebased(search.matching.run.leaves[k], base) for k in tables}
        rebased = {k: v for k, v in made.items() if v is not None}
        if rebased:
            leaves = {k: lambda v, new=new: new for k, new in rebased.items()}
            yield Hypothesis("constant", f"the table of positions with base {base:g}", {}, leaves)


def _rebased(x: Any, base: float) -> Any:
    """Return a table of frequencies, or of sines and cosines of positions, with another base.

    None if it is none.
    """
    # tables are often broadcast: axes of one element say nothing
    sizes = [n for n in x.shape if n > 1]
    if not x.is_floating_point() or len(sizes) not in (1, 2):
        return None
    rows = x.reshape(sizes)
    half = torch.arange(sizes[-1] // 2) / (sizes[-1] // 2)

    def made(exponents: Any, b: float) -> Any:
        frequencies = b ** -exponents.double()
        if len(sizes) == 1:
            return frequencies
        angles = torch.arange(sizes[0])[:, None] * frequencies
        # at position 0 a cosine is 1 and a sine 0, which says where each of them stands
        return torch.where(rows[0] == 1, angles.cos(), angles.sin())

    layouts = [torch.arange(sizes[-1]) / sizes[-1]]
    # halves, as GPT-NeoX and Llama lay frequencies out, or pairs, as the paper on rotary embeddings
    # does
    layouts += [torch.cat((half, half)), half.repeat_interleave(2)] if sizes[-1] % 2 == 0 else []
    for exponents in layouts:
        for old in BASES:
            if old != base and torch.allclose(
                made(exponents, old), rows, rtol=1e-4, atol=1e-6 * len(rows)
            ):
                return made(exponents, base).reshape(x.shape)
    return None


def _is_count(search: CauseSearch, ref: Ref) -> bool:
    """Return whether a tensor has positions or other whole numbers that depend on no parameter and
    no input.
    """
    return _is_constant(search, ref) and _is_whole(search, ref)


def _is_whole(search: CauseSearch, ref: Ref) -> bool:
    """Return whether a tensor has whole numbers alone, of whatever dtype."""
    value = search.matching.run.get(ref)
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool or value.is_complex():
        return False
    return bool((value.double() == value.double().round()).all())


def _is_constant(search: CauseSearch, ref: Ref) -> bool:
    if isinstance(ref.kind, int):
        return all(_is_constant(search, r) for r in search.program.calls[ref.kind].refs)
    return ref.kind == "constant" or (
        ref.kind == "state" and ref.index not in search.program.parameters
    )


def _sizes_near(search: CauseSearch, place: int) -> set[int]:
    found: set[int] = set()
    for index in range(max(0, place - 14), place + 1):
        outs = search.matching.run.seen[index]
        if outs and isinstance(outs[0], torch.Tensor):
            found |= {outs[0].numel(), *(int(s) for s in outs[0].shape)}
    return found


def _affine(
    search: CauseSearch, value: Any, of: Callable[[Any], Any] = np.array
) -> Iterator[tuple[str, str, float, float]]:
    """Yield cause, words, a and b of each a * x + b that is a function of the numbers that the port
    alone has.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < 2:
        return
    # sorted, a * x + b has the same order or the reverse one, wherever its elements stand in the
    # port
    mine = np.sort(array(value).reshape(-1))
    # a constant has a line through anything
    if not np.isfinite(mine).all() or mine[-1] - mine[0] <= 1e-9 * abs(mine[-1]):
        return
    numbers = search.matching.lost_numbers
    for i in numbers.of_size(mine.size):
        theirs = of(numbers.sorted(i))
        if np.isfinite(theirs).all() and theirs[-1] != theirs[0]:
            yield from _lines_through(mine, theirs, numbers.tolerance)


def _lines_through(
    mine: Any, theirs: Any, tolerance: float
) -> Iterator[tuple[str, str, float, float]]:
    """Yield cause, words, a and b of each a * x + b that makes some sorted numbers of others."""
    largest = np.abs(theirs).max()
    slope = (theirs[-1] - theirs[0]) / (mine[-1] - mine[0])
    for a, ours in ((slope, mine), (-slope, mine[::-1])):
        b = float(theirs[0] - a * ours[0])
        b = 0.0 if abs(b) < 1e-9 * largest else b
        scales = abs(a - 1) > 1e-9
        fits = np.abs(a * ours + b - theirs).max() <= tolerance * largest
        # a line through two numbers always fits
        if not fits or not (scales or b) or (mine.size == 2 and b):
            continue
        adds = f"plus {b:.9g}" if b else ""
        words = f"times {a:.9g} {adds}".strip() if scales else adds
        general = "scale" if scales else "constant"
        yield LINEAR.get((round(float(a), 9), round(b, 9)), general), words, float(a), b


def other_values(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that an operand is another value of the same shape: a parameter, an input, a result
    from before.
    """
    calls = search.program.calls
    for i, ref in search.positions(place):
        for other in _alike_before(search, place, ref):
            # two parameters exchanged are exchanged where they are loaded
            load = ref.kind == other.kind == "state"
            cause = "swapped-parameters" if load else _why_taken(search, place, ref, other)
            words = f"{_named(search, ref)} is {_named(search, other)}"
            words += f" at {calls[other.kind].where}" if isinstance(other.kind, int) else ""
            for group in _groups(search, place, i, ref):
                change = {k: other_operand(j, other) for k, j in group}
                yield Hypothesis(cause, words, change, kind="load" if load else "forward")


OTHERS = 120
"""Values of one shape that are tried in place of another."""


def _alike_before(search: CauseSearch, place: int, ref: Ref) -> Iterator[Ref]:
    """Yield what has the shape and the dtype of a tensor: parameters and inputs, then the results
    before a call, the nearest first.
    """
    run = search.matching.run
    value = run.get(ref)
    others = [Ref(*key) for key in run.leaves]
    for i in range(place - 1, -1, -1):
        others += [Ref(i, j) for j in range(len(run.seen[i]))]
    seen = [value]
    for other in others:
        found = run.get(other)
        is_tensor = isinstance(found, torch.Tensor)
        if not is_tensor or found.shape != value.shape or found.dtype != value.dtype:
            continue
        # zeros, as of a state at its start, are tried as such
        tells = bool(found.any()) or not found.is_floating_point()
        # views of one memory are one value
        if tells and not any(found.is_set_to(v) for v in seen):
            seen.append(found)
            yield other
        if len(seen) > OTHERS:
            return


def chosen_of_others(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that what tells nothing by itself, such as a count or an index, is of another value."""
    silent = (i for i in _choosing(search, place, 4) if search.matching.status[i] is None)
    yield from _before(search, silent, constants, other_values, rewired)


def _why_taken(search: CauseSearch, place: int, ref: Ref, other: Ref) -> str:
    """Return the cause of another value that is taken in place of one."""
    if not isinstance(other.kind, int):
        return _why_given(search, place, ref, other)
    calls = search.program.calls
    if calls[place].name in ("add", "add_"):
        mine = calls[ref.kind].where if isinstance(ref.kind, int) else ""
        # of another time step, or before or after a norm
        return "other-value" if mine == calls[other.kind].where else "residual"
    producers = [s.kind for s in search.matching.sources(ref)]
    if "state" in producers:
        return "weight-transposed"
    for producer in producers:
        if isinstance(producer, int):
            read = chain.from_iterable(map(search.matching.sources, calls[producer].refs))
            if other.kind in {s.kind for s in read}:
                return left_out_call(calls[producer], 0)
    return "other-value"


def _why_given(search: CauseSearch, place: int, ref: Ref, other: Ref) -> str:
    """Return the cause of a parameter or an input that is taken in place of a result."""
    calls = search.program.calls
    left_out = _between(search, ref, other)
    # a sum with a value from before is a residual, whatever was left out between
    if left_out and calls[place].name.rstrip("_") != "add":
        names = {calls[k].name.rstrip("_") for k in left_out}
        # a mean subtracted, and a division by the deviation or a product with its inverse
        if {"sub", "div"} <= names or {"sub", "mul"} <= names:
            return "missing-norm"
        return left_out_call(calls[left_out[0]], 0)
    return "other-value" if other.kind == "state" else "other-input"


def _between(search: CauseSearch, ref: Ref, other: Ref) -> list[int]:
    """Return the few calls that make one tensor of another, the last one first."""
    if not isinstance(ref.kind, int):
        return []
    calls = search.program.calls
    near = [ref.kind, *search.read_by([ref.kind], 4)]
    return near if any(other in calls[i].refs for i in near) and len(near) <= 6 else []


def starts(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that a recurrence starts elsewhere: an average at its first value for at zero, or at
    zero for at its first value.
    """
    calls = search.program.calls
    line = _line_that_repeats(search, place)
    if not line:
        return
    step = [place, *breadth_first([place], lambda i: _readers_in(search, i, line), 4)]
    ends = [i for i in step if calls[i].name.rstrip("_") == "add"][:1]
    body = [*step, *search.read_by(ends, 4, line.__contains__)]
    shape = search.matching.run.shape(place)
    read = dict.fromkeys(chain.from_iterable(calls[i].refs for i in body))
    alike = [r for r in read if search.matching.run.get(r).shape == shape]
    for start, first in permutations(alike, 2):
        # a start comes from outside of the loop, and the first value is given, not computed in it
        if start.kind in line or not _is_moved(search, first):
            continue
        if not search.matching.run.get(start).any():
            yield _started_at_first(search, start, first, line)
        elif ends and isinstance(start.kind, int):
            yield _started_at_zero(search, start, first, ends[0])


def _line_that_repeats(search: CauseSearch, place: int) -> set[int]:
    """Return the calls of the line of a place, none where it is not run again and again."""
    calls = search.program.calls
    own = calls[place].where, calls[place].path
    line = {i for i, c in enumerate(calls) if (c.where, c.path) == own}
    again = sum(calls[i].name == calls[place].name for i in line)
    # an operation of a loop is recorded once for each turn, at one line
    return line if own[0] and again > 1 else set()


def _readers_in(search: CauseSearch, index: int, inside: Collection[int]) -> list[int]:
    return [i for i in search.program.readers.get(Ref(index, 0), []) if i in inside]


def _is_moved(search: CauseSearch, ref: Ref) -> bool:
    """Return whether a tensor is given, or a part of another one."""
    return not isinstance(ref.kind, int) or search.matching.status[ref.kind] is None


def _ahead(
    search: CauseSearch, end: int, now: int, instead: Mapping[Ref, Any], get: Callable[[Any], Any]
) -> Any:
    """Return the result of a call before its turn, with other tensors in place of some.

    Args:
        search: of the program.
        end: index of the call.
        now: that of the call which is run: the results of later ones are computed for this.
        instead: the tensors that are others.
        get: of the run.
    """
    calls = search.program.calls
    later = {i for i in (end, *search.read_by([end], len(calls))) if i >= now}
    given = {ref.kind for ref in instead}
    return recomputed(
        search.program,
        end,
        later - given,
        lambda ref: instead[ref] if ref in instead else get(ref),
        {},
    )[0]


def _started_at_first(
    search: CauseSearch, start: Ref, first: Ref, line: Collection[int]
) -> Hypothesis:
    """Return that a recurrence starts at its first value where torch starts at zero."""
    readers = [i for i in search.program.readers[start] if i in line]

    def begun(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        is_given = not isinstance(first.kind, int)
        value = get(first) if is_given else _ahead(search, first.kind, min(readers), {}, get)
        own = lambda ref: value if ref == start else get(ref)  # noqa: E731 - one use
        return call.op(*with_tensors(call.args, own), **with_tensors(call.kwargs, own))

    words = "a recurrence that starts at its first value, not at zero"
    return Hypothesis("initial-accumulator", words, dict.fromkeys(readers, begun))


def _started_at_zero(search: CauseSearch, start: Ref, value: Ref, end: int) -> Hypothesis:
    """Return that a recurrence starts at zero, one step before the value at which torch starts."""
    made_by = int(start.kind)

    def stepped(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        outs = flat(call.op(*args, **kwargs))
        before = outs[start.index]
        # torch's start is the first value: with zeros before it, that value is the first step's
        # input
        instead = {start: torch.zeros_like(before), value: before}
        outs[start.index] = _ahead(
            search,
            end,
            made_by + 1,
            instead,
            get,
        )
        return outs

    words = "a recurrence that starts at zero, not at its first value"
    return Hypothesis(
        "initial-accumulator",
        words,
        {made_by: stepped},
        at=end,
    )


def gathered(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that an operand which is one of several results, such as the last state of a sequence,
    is their mean, their maximum or another one of them.
    """
    shape = search.matching.run.shape
    for i, ref in search.positions(place):
        for source in search.matching.sources(ref):
            for parts in _joined_with(search, source, place):
                if len(parts) > 1 and len({shape(int(r.kind)) for r in parts}) == 1:
                    for words, reduce in GATHERINGS.items():
                        said = f"{words} over all steps for {_named(search, ref)}"
                        change = {place: _gathering(i, parts, reduce)}
                        yield Hypothesis("reduction", said, change)


GATHERINGS: dict[str, Callable[[Any], Any]] = {
    "the mean": lambda v: v.mean(0),
    "the maximum": lambda v: v.amax(0),
    "the sum": lambda v: v.sum(0),
}
"""What is made of the results of all steps, of a tensor that has the steps in front."""


def _joined_with(search: CauseSearch, source: Ref, place: int) -> Iterator[list[Ref]]:
    """Yield the results that are joined with one before a place: the states of all steps."""
    calls = search.program.calls
    for k in search.program.readers.get(source, []):
        if calls[k].name in ("stack", "cat") and k < place:
            parts = calls[k].args[0]
            if all(isinstance(r, Ref) and isinstance(r.kind, int) for r in parts):
                yield parts


def _gathering(position: int, parts: Sequence[Ref], reduce: Callable[[Any], Any]) -> Change:
    def change(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        put = reduce(torch.stack([get(r) for r in parts]))
        return of_operand(position, lambda v: put.reshape(v.shape))(call, args, kwargs, get)

    return change


def exchanged_slices(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield the exchange of a slice of a tensor with another slice of it, among what the operands
    are moved from.
    """
    calls = search.program.calls
    run = search.matching.run
    for index in search.read_by([place], 6, lambda i: search.matching.status[i] is None):
        call = calls[index]
        if call.name not in ("slice", "select"):
            continue
        for k in search.program.readers.get(call.args[0], []):
            if calls[k].name == call.name and k != index and run.shape(k) == run.shape(index):
                words = f"the parts at {call.where} and {calls[k].where} exchanged"
                yield Hypothesis(
                    "parts-swapped", words, {index: _as_call(calls[k]), k: _as_call(call)}, at=index
                )
                if call.name == "slice" and call.args[1] == calls[k].args[1]:
                    yield from _interleaved(search, index, k)


def _interleaved(search: CauseSearch, i: int, k: int) -> Iterator[Hypothesis]:
    """Yield that two slices are the halves, or every other element, of what they have together."""
    one = search.program.calls[i]
    two = search.program.calls[k]
    dim = one.args[1]
    size = search.matching.run.get(one.args[0]).shape[dim]
    mine = [list(range(size))[slice(*c.args[2:])] for c in (one, two)]
    both = sorted({*mine[0], *mine[1]})
    # slices of different lengths, or that overlap, are no halves
    if len(both) != 2 * len(mine[0]):
        return
    half = len(both) // 2
    for words, parts in (
        ("halves", (both[:half], both[half:])),
        ("interleaved", (both[::2], both[1::2])),
    ):
        if list(parts[0]) not in mine:
            changes: dict[int, Change] = {}
            for index, part in zip((i, k), parts, strict=True):
                at = torch.as_tensor(part)
                changes[index] = lambda c, a, kw, g, at=at: [a[0].index_select(dim, at)]
            said = f"the parts at {one.where} and {two.where} as {words} elements of axis {dim}"
            yield Hypothesis("permuted", said, changes, at=i)


def _as_call(other: OperationCall) -> Change:
    return lambda c, a, k, g: other.op(a[0], *other.args[1:], **other.kwargs)


def _of(search: CauseSearch, place: int, ref: Ref, transform: Alteration) -> Hypothesis:
    """Return that a tensor of the program is transformed; `place` is the call where it shows."""
    words = f"{_named(search, ref)} {transform.words}"
    cause = _transformed_as(search, place, ref, transform.cause)
    if isinstance(ref.kind, int):
        change = {ref.kind: of_result(transform.make, ref.index)}
        # the place is where elements are moved, and not where that is seen first
        at = _moved_by(search, place, ref) if cause == "permuted" else None
        return Hypothesis(cause, words, change, at=at)
    leaves = {(ref.kind, ref.index): transform.make}
    if ref.kind != "state":
        return Hypothesis(
            cause,
            words,
            {},
            leaves,
        )
    path = str(ref.index).rpartition(".")[0]
    kind = "forward" if cause in _USED_OTHERWISE else "load"
    return Hypothesis(
        cause,
        words,
        {},
        leaves,
        kind=kind,
        path=path,
    )


def _moved_by(search: CauseSearch, place: int, ref: Ref) -> int | None:
    """Return the first call that moves the elements of a tensor before a place: it has the order.

    None where the place reads the tensor itself.
    """
    status = search.matching.status
    readers = search.program.readers.get(ref, [])
    return next((i for i in readers if i < place and status[i] is None), None)


_WEIGHTS = {
    "transposed": "weight-transposed",
    "permuted": "weight-permuted",
    "reversed": "weight-permuted",
    "shifted": "weight-permuted",
    "ones": "missing-scale",
    "zeros": "unused-parameter",
}
_OTHERS = {"ones": "constant"}
_USED_OTHERWISE = ("missing-bias", "missing-scale", "unused-parameter")


def _transformed_as(search: CauseSearch, place: int, ref: Ref, cause: str) -> str:
    """Return the name of a transformation of a tensor that a call reads."""
    if ref.kind == "state":
        bias = "bias" in str(ref.index) and cause in ("zeros", "ones")
        return "missing-bias" if bias else _WEIGHTS.get(cause, cause)
    call = search.program.calls[place]
    name = call.name.rstrip("_")
    # RMS norm squares what layer norm has centered before
    if cause == "extra-norm" and name == "pow" and call.args[1] == 2:
        return "layer-for-rms-norm"
    if cause == "unit-offset":
        return _offset_of(search, call, ref)
    if cause == "zeros" and name in ("add", "sub", "addcmul"):
        return "missing-term"
    if cause == "ones" and name in ("mul", "div"):
        return "missing-mask" if _is_mask(array(search.matching.run.get(ref))) else "missing-scale"
    return _OTHERS.get(cause, cause)


def _offset_of(search: CauseSearch, call: OperationCall, ref: Ref) -> str:
    """Return the cause of an operand that is one more or less: a count, or a position."""
    is_divisor = call.name.startswith("div") and call.args[1] == ref
    if is_divisor and _is_whole(search, ref):
        return "count"
    return "index-offset" if _is_count(search, ref) else "unit-offset"


def weights(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that a parameter which the call reads is transposed, permuted, or left at zeros or
    ones.
    """
    yield from _sources_transformed(search, place, lambda source: source.kind == "state")


def altered(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that an operand has its sign flipped, or 1 added, in this call or in all of its line."""
    yield from _operands(search, place, signs)


def transformed(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that an operand, or what it is moved from, is transformed."""
    yield from _operands(search, place, exchanges)
    yield from _operands(search, place, functions)
    operands = [ref for _, ref in search.positions(place)]
    yield from _sources_transformed(search, place, lambda source: source not in operands)


def read_off(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that an operand, or what it is moved from, is in another order along an axis, which is
    read off an array of the port with the same numbers.
    """
    operands = [ref for _, ref in search.positions(place)]
    moved = list(chain.from_iterable(map(search.matching.sources, operands)))
    # a parameter first: it is the same in all of its uses
    parameters = [ref for ref in moved if ref.kind == "state"]
    for ref in dict.fromkeys([*parameters, *operands, *moved]):
        value = search.matching.run.get(ref)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
            for turned in _orders_in_port(search, array(value)):
                yield _of(search, place, ref, turned)


def _orders_in_port(search: CauseSearch, mine: Any) -> Iterator[Alteration]:
    """Yield other orders along an axis in which the port has an array's numbers."""
    numbers = search.matching.side.numbers
    # few different numbers have many orders
    if variety(mine) < LEAST:
        return
    wanted = np.sort(mine.reshape(-1))
    seen = set[tuple[int, ...]]()
    for i in list(numbers.of_size(mine.size))[:READ]:
        if error(numbers.sorted(i), wanted) > numbers.tolerance:
            continue
        theirs = with_axes_aligned(numbers.arrays[i], mine)
        for axis in range(mine.ndim if theirs.shape == mine.shape else 0):
            order = _order_along(mine, theirs, axis)
            if order is None or (axis, *order) in seen:
                continue
            seen.add((axis, *order))
            shown = ", ".join(map(str, order[:8])) + (", ..." if len(order) > 8 else "")
            reorder = partial(torch.index_select, dim=axis, index=torch.as_tensor(order))
            yield Alteration("permuted", f"with axis {axis} in the order {shown}", reorder)


READ = 60
"""Arrays of the port with the same numbers that an order is read off."""


def _order_along(mine: Any, theirs: Any, axis: int) -> list[int] | None:
    """Return the order in which an array's slices along an axis make another array, None where they
    do not, or are in order.
    """
    rng = np.random.default_rng(0)
    rows, others = (np.moveaxis(a, axis, 0).reshape(a.shape[axis], -1) for a in (mine, theirs))
    # each slice is told by one random projection: to compare all pairs of slices would take their
    # square
    weights = rng.normal(size=rows.shape[1])
    own = rows @ weights
    wanted = others @ weights
    if not np.isfinite(own).all() or len(np.unique(own)) < len(own):
        return None
    order = [int(np.abs(own - w).argmin()) for w in wanted]
    if order == sorted(order) or len(set(order)) < len(order):
        return None
    return order if error(others, rows[order]) <= 1e-9 else None


def undone(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that what moves the elements of an operand is done backwards: the inverse shuffle."""
    program = search.program
    run = search.matching.run
    for i, ref in search.positions(place):
        value = run.get(ref)
        if not isinstance(value, torch.Tensor) or not isinstance(ref.kind, int):
            continue
        for source in _moves(search, ref):
            start = program.calls[source.kind].refs[0] if isinstance(source.kind, int) else source
            before = run.get(start)
            if not isinstance(before, torch.Tensor) or before.numel() != value.numel():
                continue
            # numbered elements are sent through the moves: where they come out is the permutation
            count = torch.arange(before.numel(), dtype=torch.float64).reshape(before.shape)
            moved = _with_others(program, ref.kind, {start: count}, run.get).reshape(-1).long()
            if moved.numel() != before.numel() or bool((moved == count.reshape(-1)).all()):
                continue
            back = torch.argsort(moved)

            def inverse(
                c: OperationCall,
                a: Any,
                k: Any,
                get: Any,
                i: int = i,
                start: Ref = start,
                back: Any = back,
            ) -> Any:
                put = get(start).reshape(-1)[back]
                return of_operand(i, lambda v: put.reshape(v.shape))(c, a, k, get)

            words = f"{_named(search, start)} moved the other way (the inverse permutation)"
            yield Hypothesis("permuted", words, {place: inverse}, at=ref.kind)


def _sources_transformed(
    search: CauseSearch, place: int, which: Callable[[Ref], bool]
) -> Iterator[Hypothesis]:
    operands = [ref for _, ref in search.positions(place)]
    sources = chain.from_iterable(map(search.matching.sources, operands))
    for source in filter(which, dict.fromkeys(sources)):
        for transform in transforms(search.matching.run.get(source)):
            yield _of(search, place, source, transform)


def _operands(
    search: CauseSearch, place: int, how: Callable[[Any], Iterator[Alteration]]
) -> Iterator[Hypothesis]:
    for i, ref in search.positions(place):
        value = search.matching.run.get(ref)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        for transform in how(value):
            changed = _of(search, place, ref, transform)
            for group in _groups(search, place, i, ref):
                yield replace(
                    changed,
                    changes={k: of_operand(j, transform.make) for k, j in group},
                    leaves={},
                    path=None,
                )


def _groups(
    search: CauseSearch, place: int, position: int, ref: Ref
) -> list[list[tuple[int, int]]]:
    """Return where a tensor is read: in a call, and in all calls of its line."""
    every = list[tuple[int, int]]()
    for k in _readers_of_a_line(search, place, ref):
        every += [(k, j) for j, r in search.positions(k) if r == ref]
    alone = [(place, position)]
    return [alone, every] if len(every) > 1 else [alone]


def _readers_of_a_line(search: CauseSearch, place: int, ref: Ref) -> list[int]:
    """Return the calls that read a tensor in the line and the module of a place."""
    calls = search.program.calls
    own = calls[place].where, calls[place].path
    return [i for i in search.program.readers[ref] if (calls[i].where, calls[i].path) == own]


def _up(search: CauseSearch, place: int) -> list[Ref]:
    """Return what a call depends on, the nearest first."""
    calls = search.program.calls
    near = chain([place], search.read_by([place], len(calls)))
    refs = chain.from_iterable(calls[i].refs for i in near)
    return list(dict.fromkeys(islice(refs, 90)))


def deep(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield exchanges of values further up, which are not seen until elements of different places
    meet.
    """
    for ref in _up(search, place)[:30]:
        for transform in transforms(search.matching.run.get(ref)):
            if transform.cause in PERMUTING or (
                transform.cause == "index-offset" and ref.kind == "input"
            ):
                changed = _of(search, place, ref, transform)
                yield replace(changed, at=ref.kind if isinstance(ref.kind, int) else None)


def exchanged_parameters(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield exchanges of parameters of equal shapes: of whole modules, of one tensor each, and
    within a module.
    """
    modules = _parameters_by_module(search)
    read = [str(r.index).rpartition(".")[0] for r in _up(search, place) if r.kind == "state"]
    near = list(dict.fromkeys(read))
    for path in near[:8]:
        yield from _exchanged_directions(path, modules.get(path, []))
    for number, path in enumerate(near[:8]):
        # of two modules that are both near, the pair is tried once
        others = [b for b in _nearest_modules(path, modules)[:24] if b not in near[:number]]
        for other in others:
            yield from _exchanged_modules(search, path, other, modules)
        for x, y in combinations(modules.get(path, []), 2):
            if _are_alike(search, x, y):
                yield _exchange([(x, y)], f"{x} and {y}", path)
        yield from _blocks_of_a_module(search, path, modules.get(path, []))


def _parameters_by_module(search: CauseSearch) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for name in search.program.names:
        value = search.matching.run.leaves["state", name]
        # a counter such as `num_batches_tracked` is no parameter
        if value.is_floating_point() and value.numel() > 1:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    return modules


def _are_alike(search: CauseSearch, x: str, y: str) -> bool:
    leaves = search.matching.run.leaves
    return bool(leaves["state", x].shape == leaves["state", y].shape)


def _exchange(pairs: Sequence[tuple[str, str]], words: str, path: str) -> Hypothesis:
    swapped: dict[Any, Any] = {}
    for x, y in pairs:
        swapped["state", x] = Ref("state", y)
        swapped["state", y] = Ref("state", x)
    return Hypothesis(
        "swapped-parameters", f"{words} exchanged", {}, swapped, kind="load", path=path
    )


def _exchanged_directions(path: str, names: Sequence[str]) -> Iterator[Hypothesis]:
    """Yield exchanges of the two directions of a recurrent layer, and one direction for both."""
    # torch's names of a bidirectional layer
    ways = [(x, f"{x}_reverse") for x in names if f"{x}_reverse" in names]
    if not ways:
        return
    yield _exchange(ways, f"the directions of {path}", path)
    for taken, (one, two) in (("forward", (0, 1)), ("backward", (1, 0))):
        shared = {("state", pair[two]): Ref("state", pair[one]) for pair in ways}
        words = f"the {taken} parameters of {path} in both directions"
        yield Hypothesis("swapped-parameters", words, {}, shared, kind="load", path=path)


def _exchanged_modules(
    search: CauseSearch, path: str, other: str, modules: Mapping[str, Sequence[str]]
) -> Iterator[Hypothesis]:
    """Yield the exchange of the parameters of two modules, together and one by one."""
    mine = modules.get(path, [])
    pairs = list(zip(mine, modules[other], strict=False))
    if len(mine) != len(modules[other]) or not all(_are_alike(search, x, y) for x, y in pairs):
        return
    at = min(path, other)
    yield _exchange(pairs, f"the parameters of {path} and {other}", at)
    # of a single pair the exchange of the modules is that of the pair
    if len(pairs) > 1:
        for pair in pairs:
            yield _exchange([pair], " and ".join(pair), at)


def _blocks_of_a_module(
    search: CauseSearch, path: str, names: Sequence[str]
) -> Iterator[Hypothesis]:
    """Yield exchanges of blocks of all rows of a module: of queries, keys and values, or of gates."""
    rows = {n: len(search.matching.run.leaves["state", n]) for n in names}
    for size in dict.fromkeys(rows.values()):
        both = [n for n in names if rows[n] == size]
        # queries, keys and values are three blocks, the gates of an LSTM four
        for k in (3, 4):
            if len(both) < 2 or size % k or size <= k:
                continue
            for i, j in combinations(range(k), 2):
                words = f"blocks {i} and {j} of {k} of {' and '.join(both)} exchanged"
                exchange = partial(swapped_blocks_of, dim=0, k=k, a=i, b=j)
                leaves = dict.fromkeys((("state", n) for n in both), exchange)
                yield Hypothesis("blocks-swapped", words, {}, leaves, kind="load", path=path)


def _nearest_modules(path: str, modules: Mapping[str, Any]) -> list[str]:
    parent, _, own = path.rpartition(".")
    others = [b for b in modules if b != path]
    return sorted(
        # siblings first, then the module of the same name in another layer
        others,
        key=lambda b: (b.rpartition(".")[0] != parent, b.rpartition(".")[2] != own),
    )


def rewired(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that two tensors, or two numbers, are exchanged in what a line computes."""
    line = _line_of(search, place)
    yield from _exchanged_numbers(search, line)
    calls = search.program.calls
    # the number of pairs grows with the square
    refs = list(dict.fromkeys(chain.from_iterable(calls[i].refs for i in line)))[:12]
    for u, v in combinations(refs, 2):
        if not _may_be_exchanged(search, u, v):
            continue
        change = _reading({u: v, v: u})
        changes = {i: change for i in line if not {u, v}.isdisjoint(calls[i].refs)}
        cause = "operands-swapped"
        if "input" in (u.kind, v.kind):
            cause = "other-input"
        elif calls[place].name in ("cat", "stack"):
            cause = "order-of-parts"
        words = f"{_named(search, u)} and {_named(search, v)} exchanged"
        yield Hypothesis(cause, words, changes)


def _line_of(search: CauseSearch, place: int) -> list[int]:
    """Return a call and those of its line that it reads."""
    calls = search.program.calls
    own = calls[place].where, calls[place].path

    def is_inside(i: int) -> bool:
        return (calls[i].where, calls[i].path) == own

    inside = dict.fromkeys([place, *search.read_by([place], 4, is_inside)])
    return [i for i in inside if is_inside(i)]


def _exchanged_numbers(search: CauseSearch, line: Sequence[int]) -> Iterator[Hypothesis]:
    calls = search.program.calls
    for i, k in combinations(line, 2):
        one = _number_in(calls[i])
        two = _number_in(calls[k])
        # whole numbers are axes and sizes
        are_real = isinstance(one, float) and isinstance(two, float)
        if are_real and calls[i].name == calls[k].name and one != two:
            changes = {i: of_operand(1, lambda v, n=two: n), k: of_operand(1, lambda v, n=one: n)}
            yield Hypothesis("operands-swapped", f"{one:g} and {two:g} exchanged", changes)


def _may_be_exchanged(search: CauseSearch, u: Ref, v: Ref) -> bool:
    """Return whether two tensors are of one shape and dtype, and not both parameters."""
    x = search.matching.run.get(u)
    y = search.matching.run.get(v)
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    # two parameters exchanged are `exchanged_parameters`
    return x.shape == y.shape and x.dtype == y.dtype and {u.kind, v.kind} != {"state"}


def _reading(instead: Mapping[Ref, Ref]) -> Change:
    """Return the change of a call that reads other tensors in place of some."""

    def change(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        other = lambda ref: get(instead.get(ref, ref))  # noqa: E731 - one use
        return call.op(*with_tensors(call.args, other), **with_tensors(call.kwargs, other))

    return change


def together(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that both operands of a product are permuted alike: heads and features exchanged,
    halves interleaved.
    """
    run = search.matching.run
    sources = search.matching.sources
    operands = [ref for _, ref in search.positions(place)]
    if len(operands) != 2 or search.program.calls[place].name not in ("bmm", "mm", "matmul"):
        return
    for u in sources(operands[0]):
        for v in sources(operands[1]):
            if u == v or not isinstance(u.kind, int) or not isinstance(v.kind, int):
                continue
            # alike: a product of two tensors is the same where both are permuted along the axis it
            # sums over
            second = {t.words: t for t in transforms(run.get(v)) if t.cause in PERMUTING}
            for first in transforms(run.get(u)):
                if first.cause in PERMUTING and first.words in second:
                    one, two = (
                        _of(search, place, r, t) for r, t in ((u, first), (v, second[first.words]))
                    )
                    yield replace(
                        one,
                        words=f"{one.words}, and {two.words}",
                        changes=one.changes | two.changes,
                    )


def swapped_blocks(search: CauseSearch, place: int) -> Iterator[Hypothesis]:
    """Yield that a call, or the whole module that it is in, is done after what comes behind it."""
    for block in ([place], *_modules_with(search.program, place)):
        yield from _done_later(search, place, block)


def _modules_with(program: TorchProgram, place: int) -> Iterator[list[int]]:
    """Yield the calls of a module, one after the other, that have a place among them."""
    calls = program.calls
    for path, grouped in groupby(range(len(calls)), lambda i: calls[i].path):
        own = list(grouped)
        if path and place in own and len(own) > 1:
            yield own


def _done_later(search: CauseSearch, place: int, block: Sequence[int]) -> Iterator[Hypothesis]:
    program = search.program
    calls = program.calls
    read = dict.fromkeys(chain.from_iterable(calls[i].refs for i in block))
    outside = [r for r in read if r.kind not in block and r.kind != "state"]
    # what goes through a block is numbers; masks and indices are beside it
    whole = [r for r in outside if search.matching.run.get(r).is_floating_point()]
    if not whole:
        return
    first = calls[block[0]]
    named = first.path if len(block) > 1 else first.label
    # a residual branch may be long: what stands further behind is another block's
    behind_it = breadth_first(list(block[-1:]), lambda i: program.readers.get(Ref(i, 0), []), 16)
    for end in islice(behind_it, 20):
        second = calls[end]
        # a call that writes to memory cannot be moved alone, and the loss comes last in any order
        if not second.mutates and second.path != LOSS:
            pairs = ((first, second), (second, first))
            is_epsilon = any("sqrt" in root.name and _adds_little(term) for root, term in pairs)
            cause = "eps-place" if is_epsilon else "order"
            change = {end: _exchanged(program, whole[0], Ref(block[-1], 0), end)}
            yield Hypothesis(cause, f"{second.label} before {named}", change, at=place)


def _exchanged(program: TorchProgram, before: Ref, after: Ref, end: int) -> Change:
    """Return the change of a call that is done before another one, which makes one tensor of
    another.

    What comes behind a reduction is done for each element of the axes that it takes away.
    """
    call = program.calls[after.kind]

    def change(last: OperationCall, a: Any, k: Any, get: Any) -> Any:
        def late(value: Any) -> Any:
            return _with_others(program, end, {after: value}, get)

        given = get(before)
        if before in call.refs and re.fullmatch(REDUCING, call.name):
            axes = over(CallArguments(call, *with_tensors((call.args, call.kwargs), get)))
            front = list(range(len(axes)))
            parts = given.movedim(axes, front)
            each = torch.vmap(lambda v: late(v.view_as(get(after))))(
                parts.flatten(0, len(axes) - 1)
            )
            moved = each.unflatten(0, parts.shape[: len(axes)]).movedim(front, axes)
        else:
            moved = late(given)
        return [
            _with_others(program, after.kind, {before: moved}, get).view_as(
                flat(last.op(*a, **k))[0]
            )
        ]

    return change


def _adds_little(call: OperationCall) -> bool:
    return (
        call.name in ("add", "add_") and isinstance(call.args[1], float) and 0 < call.args[1] < 1e-2
    )


def _with_others(
    program: TorchProgram, wanted: int, instead: Mapping[Ref, Any], get: Callable[[Any], Any]
) -> Any:
    """Return the first result of a call, computed again with other tensors in place of some."""
    given = [r.kind for r in instead]
    affected = downstream(
        program, (k for k in given if isinstance(k, int)), [(r.kind, r.index) for r in instead]
    )
    return recomputed(
        program,
        wanted,
        affected.difference(given),
        lambda r: instead[r] if r in instead else get(r),
        {},
    )[0]


FAMILIES: tuple[tuple[Family, str], ...] = (
    (smoothings, "region"),
    (reset_gates, "region"),
    (starts, "order"),
    (usual, "order"),
    (beyond_a_table, "order"),
    (ties, "order"),
    (chosen_before, "order"),
    (chosen_before, "last"),
    (weights, "order"),
    (exchanged_parameters, "first"),
    (swapped_blocks, "order"),
    (skipped, "order"),
    (scaled, "order"),
    (altered, "order"),
    (rewired, "order"),
    (ratios, "order"),
    (bases, "first"),
    (constants, "order"),
    (exchanged_slices, "order"),
    (gathered, "order"),
    (other_values, "order"),
    (chosen_of_others, "order"),
    (together, "first"),
    (undone, "order"),
    (transformed, "order"),
    (read_off, "order"),
    (further, "order"),
    (deep, "first"),
)
"""The families in the order in which they are tried, and where."""


def reordered(search: CauseSearch, ends: list[Ref]) -> FoundChange | None:
    """Return what happened to outputs of which the port has all numbers, in another order or at
    other positions.
    """
    before = search.test(0, Hypothesis("", ""))
    if before is None:
        return None

    def tried(hypothesis: Hypothesis) -> Explanation[FoundChange] | None:
        found = search.test(min(hypothesis.changes, default=0), hypothesis)
        if found is None:
            return None
        return Explanation(found, found.error <= search.close, -found.error)

    def explains_half(hypothesis: Hypothesis) -> Explanation[FoundChange] | None:
        found = tried(hypothesis)
        return found if found and found.value.error < 0.5 * before.error else None

    def explains_all(hypothesis: Hypothesis) -> Explanation[FoundChange] | None:
        found = tried(hypothesis)
        return found if found and found.is_whole else None

    last = [e.kind for e in ends if isinstance(e.kind, int)]
    moving = search.read_by(last, 6, lambda i: search.matching.status[i] is None)
    places = (*last, *moving)
    mistaken = chain.from_iterable(chain(ties(search, i), usual(search, i)) for i in places)
    best = best_explanation(mistaken, explains_half, search.budget)
    if best is None or (search.budget.stopped and not best.is_whole):
        best = best_explanation(_other_orders(search, ends), explains_all, search.budget)
    return None if best is None else best.value


def _other_orders(search: CauseSearch, ends: list[Ref]) -> Iterator[Hypothesis]:
    """Yield other orders of outputs, and of what they are moved from."""
    for end in ends:
        for source in dict.fromkeys([end, *search.matching.sources(end)]):
            place = source.kind if isinstance(source.kind, int) else 0
            for transform in transforms(search.matching.run.get(source)):
                yield _of(search, place, source, transform)


def _named(search: CauseSearch, ref: Ref) -> str:
    if isinstance(ref.kind, int):
        return f"the result of {search.program.calls[ref.kind].label}"
    if ref.kind == "constant":
        return "a constant tensor"
    return str(ref.index) if ref.kind == "state" else f"{ref.kind} {ref.index}"
