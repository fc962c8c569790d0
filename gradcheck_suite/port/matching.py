"""Which results of torch the port has, and where the two part.

A result of torch is matched where each of its telling numbers is among the port's. The place is the
first call that is not matched though all that it reads is, on a path that leads to the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch

from gradcheck_suite.port.jax_program import FloatEquation
from gradcheck_suite.port.number_sets import (
    SAME,
    Array,
    Numbers,
    error,
    telling,
    variety,
    with_axes_aligned,
)
from gradcheck_suite.port.torch_program import (
    OperationCall,
    Ref,
    TorchProgram,
    TorchRun,
    with_tensors,
)


def array(value: Any) -> Array:
    """Return a tensor or an array as numpy, floats in float64, complex numbers as pairs."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        return (value.double() if value.is_floating_point() else value).numpy()
    found = np.asarray(value)
    if np.iscomplexobj(found):
        return np.stack([found.real, found.imag], -1)
    return found.astype(np.float64) if found.dtype.kind not in "iub" else found


@dataclass
class Side:
    """What the port computed.

    Attributes:
        values: all its numbers: intermediate values, constants and arguments.
        equations: of each value, None for constants and arguments.
        outs: the outputs.
        loss: the loss.
        tolerance: relative difference within which its numbers are torch's.
    """

    values: list[Array]
    equations: list[FloatEquation | None]
    outs: list[Array]
    loss: float
    tolerance: float = SAME

    @cached_property
    def numbers(self) -> Numbers:
        """All values."""
        return Numbers(self.values, self.tolerance)

    def has(self, outs: Sequence[Any]) -> bool | None:
        """Return whether the port has the first of some results; None where it tells nothing."""
        first = outs[0] if outs else None
        return self.numbers.holds(array(first)) if isinstance(first, torch.Tensor) else None


def only_moves(call: OperationCall, outs: Sequence[Any], run: TorchRun) -> bool:
    """Return whether a call's result has no other numbers than what it reads: a reshape, a mask, a
    maximum.

    Args:
        call: of the program.
        outs: its results.
        run: of the program.
    """
    first = outs[0] if outs else None
    if not isinstance(first, torch.Tensor):
        return True
    read = [telling(array(v)) for v in map(run.get, call.refs) if isinstance(v, torch.Tensor)]
    return bool(np.isin(telling(array(first)), np.concatenate([*read, np.zeros(0)])).all())


def outputs_error(expected: Sequence[Any], observed: Sequence[Any]) -> float:
    """Return the largest relative error of any output, axes permuted where shapes differ."""
    worst = 0.0
    for mine, other in zip(expected, observed, strict=False):
        wanted = array(mine)
        worst = max(worst, error(with_axes_aligned(array(other), wanted), wanted))
    return worst


class Matching:
    """A run of torch beside the port's values.

    Attributes:
        status: of each call, whether the port has its result; None where it moves numbers, or is
            not needed.
        lost: indices of the port's values that torch has not.
    """

    def __init__(self, program: TorchProgram, run: TorchRun, side: Side) -> None:
        self.program = program
        self.run = run
        self.side = side
        self._sources: dict[Ref, list[Ref]] = {}
        self.status = [self._status(i) for i in range(len(program.calls))]
        every = chain.from_iterable(run.seen)
        mine = [array(v) for v in every if isinstance(v, torch.Tensor)]
        # what torch has anywhere is not the port's alone
        mine += [array(v) for v in run.leaves.values()]
        known = Numbers([*mine, *self._inside_of_calls()], side.tolerance)
        self.lost = [
            # None, of a value without telling numbers, is no sign of a difference
            i
            for i, v in enumerate(side.values)
            if v.dtype.kind == "f" and known.holds(v) is False
        ]
        self.lost_numbers = Numbers([side.values[i] for i in self.lost], side.tolerance)
        alone = [telling(side.values[i]) for i in self.lost]
        self._alone = Numbers([a[~known.has(a)] for a in alone], side.tolerance)

    def _status(self, index: int) -> bool | None:
        if index not in self.program.needed or only_moves(
            self.program.calls[index], self.run.seen[index], self.run
        ):
            return None
        return self.side.has(self.run.seen[index])

    def _inside_of_calls(self) -> list[Array]:
        """Return values inside of fused calls: products without their bias, norms without their
        scale.
        """
        found = []
        for index, call in enumerate(self.program.calls):
            outs = self.run.seen[index]
            if outs and isinstance(outs[0], torch.Tensor):
                args, _ = with_tensors((call.args, call.kwargs), self.run.get)
                found += [array(v) for v in _inside(call, args, outs[0])]
        return found

    def is_new(self, outs: Sequence[Any], before: Sequence[Any]) -> bool:
        """Return whether a changed result is one that the port alone had.

        All its numbers are the port's, and of those that the change has changed at least half are
        the port's alone: a change that returns what both sides have explains nothing. One that
        leaves far fewer different numbers than there were may fit by chance.
        """
        first = outs[0] if outs else None
        old = before[0] if before else None
        if not isinstance(first, torch.Tensor):
            return False
        value = array(first)
        if not self.side.numbers.holds(value):
            return False
        changed = value
        if isinstance(old, torch.Tensor):
            was = array(old)
            if (
                # a change that gives NaN where the port has none explains nothing, and NaN is left
                # out of comparisons
                np.isnan(value).any()
                and not np.isnan(was).any()
                and not any(np.isnan(o).any() for o in self.side.outs)
            ):
                return False
            if was.shape == value.shape:
                with np.errstate(invalid="ignore"):
                    changed = value[~(np.abs(value - was) <= self.side.tolerance * np.abs(was))]
            if variety(value) < variety(was) // 2:
                return False
        numbers = telling(changed)
        return bool(len(numbers) and self._alone.has(numbers).mean() >= 0.5)

    def sources(self, ref: Ref) -> list[Ref]:
        """Return what a tensor consists of, with operations that only move numbers undone."""
        if ref not in self._sources:
            found = [ref]
            if isinstance(ref.kind, int) and self.status[ref.kind] is None:
                found = list(dict.fromkeys(self._sources_of(self.program.calls[ref.kind].refs)))
            self._sources[ref] = found
        return self._sources[ref]

    def _sources_of(self, refs: Iterable[Ref]) -> Iterator[Ref]:
        return chain.from_iterable(map(self.sources, refs))

    def is_lost(self, ref: Ref) -> bool:
        """Return whether a tensor has numbers that the port has not."""
        return any(
            isinstance(s.kind, int) and self.status[s.kind] is False for s in self.sources(ref)
        )

    def region(self, ends: Sequence[Ref]) -> tuple[list[int], list[int]]:
        """Return the calls between the last matched ones and some ends, and the first among them."""
        # from the ends backwards, and not beyond what the port has: the difference lies in between
        todo = list(self._sources_of(ends))
        seen: set[int] = set()
        while todo:
            ref = todo.pop()
            if (
                isinstance(ref.kind, int)
                and ref.kind not in seen
                and self.status[ref.kind] is False
            ):
                seen.add(ref.kind)
                todo += self._sources_of(self.program.calls[ref.kind].refs)
        first = [
            i for i in sorted(seen) if not any(self.is_lost(r) for r in self.program.calls[i].refs)
        ]
        return sorted(seen), first

    def region_by_arrays(self, ends: Sequence[Ref]) -> tuple[list[int], list[int]]:
        """Return the calls before some ends whose results are no whole array of the port's, and the
        first among them.

        This is for outputs of which the port has every number: another row of a table, an element
        more or less that is masked. A call that only moves numbers is then lost as well.
        """
        todo = [e.kind for e in ends]
        seen = set[int]()
        while todo:
            index = todo.pop()
            if isinstance(index, int) and index not in seen:
                seen.add(index)
                todo += [r.kind for r in self.program.calls[index].refs]
        lost = {i for i in seen if self._is_no_array(self.run.seen[i])}
        first = [
            i for i in sorted(lost) if not any(r.kind in lost for r in self.program.calls[i].refs)
        ]
        for i in lost:
            self.status[i] = False
        # what only moves numbers was passed through so far, and now is lost itself
        self._sources.clear()
        return sorted(lost), first

    def _is_no_array(self, outs: Sequence[Any]) -> bool:
        """Return whether no array of the port has the numbers of a result, each as often."""
        out = outs[0] if outs else None
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not out.numel():
            return False
        wanted = np.sort(array(out).reshape(-1))
        numbers = self.side.numbers
        # zeros and ones may be made in another way
        if not len(telling(wanted)):
            return False
        return not any(
            error(numbers.sorted(i), wanted) <= numbers.tolerance
            for i in numbers.of_size(len(wanted))
        )

    def ends(self, loss: bool, close: float) -> list[Ref]:
        """Return the loss, or the outputs that differ by more than a relative error.

        What a single number of these comes from is noted as lost.
        """
        found = [self.program.loss]
        if not loss:
            outs = zip(self.program.outs, self.run.outs, self.side.outs, strict=False)
            found = [ref for ref, mine, other in outs if outputs_error([mine], [other]) > close]
        found = [ref for ref in found if isinstance(ref, Ref)]
        for source in self._sources_of(ref for ref in found if self.run.get(ref).numel() == 1):
            # one number is in no other order: the port has it elsewhere, by chance
            if isinstance(source.kind, int):
                self.status[source.kind] = False
        return (
            found
            if loss
            else found + [e for e in self.program.ends[len(self.program.outs) + 1 :] if found]
        )

    def where_in_jax(self, value: Any) -> str:
        """Return `file:line` of the port's equation that alone has a value."""
        found = (
            self.lost_numbers.owner_of(array(value)) if isinstance(value, torch.Tensor) else None
        )
        equation = self.side.equations[self.lost[found]] if found is not None else None
        return equation.where if equation is not None else ""

    def nearest_in_jax(self, call: int) -> tuple[str, Array | None]:
        """Return the first value of the port alone that is as large as a call's result: `file:line`
        and the value.
        """
        out = self.run.seen[call][0]
        # the first in the order of the program, so the earliest that may stand in the result's
        # place
        for i in self.lost_numbers.of_size(out.numel() if isinstance(out, torch.Tensor) else 0):
            equation = self.side.equations[self.lost[self.lost_numbers.whole[i]]]
            if equation is not None and equation.where:
                return equation.where, self.lost_numbers.arrays[i]
        return "", None


def _inside(call: OperationCall, args: Any, out: torch.Tensor) -> list[torch.Tensor]:
    across = [1, -1, *[1] * (out.dim() - 2)]
    if call.name == "addmm":
        return [out - args[0]]
    if call.name == "convolution" and args[2] is not None:
        return [out - args[2].reshape(across)]
    # a port often computes the square first
    if call.name in ("linalg_vector_norm", "norm", "std"):
        return [out**2]
    if call.name == "native_layer_norm":
        x, shape, weight, _, eps = args[:5]
        plain = torch.nn.functional.layer_norm(x, shape, None, None, eps)
        centred = x - x.mean(tuple(range(-len(shape), 0)), keepdim=True)
        return [plain, centred, *([] if weight is None else [plain * weight])]
    if "batch_norm" in call.name or call.name == "native_group_norm":
        weight = args[1]
        bias = args[2]
        scaled = out if bias is None else out - bias.reshape(across)
        return [scaled, *([] if weight is None else [scaled / weight.reshape(across)])]
    return []
