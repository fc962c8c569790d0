"""The search for the change of the torch program that makes the port's numbers appear.

Families of hypotheses are tried one after the other at all places, the usual mistakes first. What
is believed is decided here and nowhere else: the rule of evidence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.port.budget import Budget
from gradcheck_suite.port.changes import RAISED, Hypothesis, dense, of_ours
from gradcheck_suite.port.explanation import Explanation, best_explanation
from gradcheck_suite.port.matching import Matching, Side, array, outputs_error
from gradcheck_suite.port.number_sets import variety, with_axes_aligned
from gradcheck_suite.port.torch_program import (
    Change,
    OperationCall,
    Ref,
    TorchProgram,
    TorchRun,
    flat,
    with_tensors,
)

MORE = 1500
"""Candidates among which a change that explains all is looked for, where one is known that explains much."""
MANY = 5
"""Calls that a change explains where it explains much."""
PLACES = 16
"""Calls of the lost region that hypotheses are tried at."""
LAST = 8
"""Lost calls before the outputs that a change is tried at which has to explain all."""
PASSED = 30
"""Hypotheses of a family with evidence at their place that are run to the end."""
LEAST = 3
"""Calls, and numbers in their results, that a change has to explain where it does not explain all: fewer may be equal
by chance."""
SPARE = 100
"""Changes that are run to the end on the evidence of numbers that both sides have."""
CANDIDATES = 10_000
"""Candidates of one search. The zoo of ports needs up to 5,000."""
FLAT = frozenset(
    [
        "zeros",
        "constant",
        "count",
        "missing-bias",
        "missing-mask",
        "missing-scale",
        "missing-term",
        "unused-parameter",
    ]
)
"""Causes that say themselves that a tensor has one number everywhere."""


@dataclass
class FoundChange:
    """A change that explains something.

    Attributes:
        hypothesis: the change.
        place: index of the call at which its effect is seen.
        error: of the outputs, or of the loss, after the change.
        new: calls whose results the port has after the change only.
        run: torch, changed.
    """

    hypothesis: Hypothesis
    place: int
    error: float
    new: list[int]
    run: TorchRun

    @property
    def gained(self) -> int:
        """The number of calls that are explained."""
        return len(self.new)

    def is_better_than(self, other: FoundChange) -> bool:
        """Return whether it leaves a smaller error, or explains more calls."""
        return self.error < other.error or self.gained > other.gained


def both(first: Change, second: Change) -> Change:
    """Return two changes of one call, done one after the other."""

    def change(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        class Changed:
            _schema = call.op._schema

            def __call__(self, *a: Any, **k: Any) -> Any:
                outs = flat(first(call, a, k, get))
                return outs if len(outs) > 1 else outs[0]

        return second(replace(call, op=Changed()), args, kwargs, get)

    return change


@dataclass
class Repairs:
    """The changes that were found so far."""

    changes: dict[int, Change] = field(default_factory=dict)
    leaves: dict[Any, Any] = field(default_factory=dict)

    def with_change(self, hypothesis: Hypothesis) -> Repairs:
        """Return these with one more."""
        changes = dict(self.changes)
        leaves = dict(self.leaves)
        for index, change in hypothesis.changes.items():
            changes[index] = both(changes[index], change) if index in changes else change
        for key, function in hypothesis.leaves.items():
            before = leaves.get(key)
            # a leaf that is another one is not changed further: the later change is about the other
            # one
            if before is None or isinstance(function, Ref) or isinstance(before, Ref):
                leaves[key] = function
            else:
                leaves[key] = lambda v, f=function, b=before: f(b(v))
        return Repairs(changes, leaves)

    def run(self, program: TorchProgram, *, grad: bool = False, inputs: Any = None) -> TorchRun:
        """Run the program, changed."""
        start = program.leaves(grad) | (inputs or {})
        leaves = dict(start)
        for key, how in ((k, f) for k, f in self.leaves.items() if k in start):
            with torch.set_grad_enabled(grad):
                new = (
                    start[how.kind, how.index] if isinstance(how, Ref) else dense(how(leaves[key]))
                )
            # tied names have one tensor, and change together
            for other, value in start.items():
                if value is start[key] and other[0] == key[0]:
                    leaves[other] = new
        run = program.run(self.changes, leaves, grad)
        if grad:  # gradients are by the tensors before the change
            run.leaves = {**leaves, **{k: v for k, v in start.items() if k[0] == "state"}}
        return run


@dataclass
class Witness:
    """Both sides at other parameters or inputs, with the same calls: what explains a difference
    explains it here, too.

    Attributes:
        program: torch's, with its own state and inputs.
        side: the port's values.
        allowed: relative error of the ends that rounding explains.
        same_inputs: whether only the parameters are others.
    """

    program: TorchProgram
    side: Side
    allowed: float
    same_inputs: bool = True


Family = Callable[["CauseSearch", int], Iterator[Hypothesis]]


class CauseSearch:
    """Tries hypotheses in a lost region.

    Args:
        program: the torch program.
        matching: its run beside the port's values.
        repairs: the changes found before.
        loss: whether the loss is compared, not the outputs.
        close: relative error of the ends that needs no explanation.
        budget: of the judgement.
        witnesses: what a change has to explain besides.
    """

    def __init__(
        self,
        program: TorchProgram,
        matching: Matching,
        repairs: Repairs,
        loss: bool,
        close: float,
        budget: Budget,
        witnesses: Iterable[Witness] = (),
    ) -> None:
        self.program = program
        self.matching = matching
        self.repairs = repairs
        self.loss = loss
        self.close = close
        self._witnesses = witnesses
        self.budget = budget.of(CANDIDATES)
        self._affected: dict[Any, set[int]] = {}
        self._spare = SPARE
        self.odd: list[str] = []
        self.region: list[int] = []
        self._inside: set[int] = set()
        self._runs_before: dict[int, TorchRun | None] = {}

    def find(
        self, families: Sequence[tuple[Family, str]], region: list[int], first: list[int]
    ) -> FoundChange | None:
        """Return the best explanation, or None.

        Args:
            families: with the calls that each is tried at: `region`, `order` (first lost calls,
                then their readers), `first`, or `last` (before the outputs, which may read another
                value than the lost ones).
            region: the lost calls that lead to the difference.
            first: those among them that read no lost result.
        """
        self.region = region
        self._inside = set(region)
        order = self._order(first)[:PLACES]
        places = {
            # the calls before a lost region may be what is wrong with it
            "region": [*self.read_by(first, 3), *region],
            "order": order,
            "first": first[:3],
            "last": [i for i in reversed(region) if i not in order][:LAST],
        }
        known = list[FoundChange]()

        def tried(row: tuple[Family, str]) -> Explanation[FoundChange] | None:
            family, where = row
            found = self._of_family(family, places[where])
            # a later family is less usual: it has to explain all, as what is tried last has to
            if found is None or (not found.is_whole and (known or where == "last")):
                return None
            known.append(found.value)
            # results of several calls are not equal by chance: what explains all is near
            if not found.is_whole and found.value.gained >= MANY:
                self.budget.left = min(self.budget.left, MORE)
            return found

        found = best_explanation(families, tried, Budget())
        # a part that is explained before the budget ran out may not be the best part
        if found is None or (self.budget.stopped and not found.is_whole):
            return None
        return found.value

    def _of_family(self, family: Family, places: list[int]) -> Explanation[FoundChange] | None:
        """Return what a family explains best."""
        passed = list[Hypothesis]()

        def candidates() -> Iterator[tuple[int, Hypothesis]]:
            for place in places:
                for hypothesis in self._hypotheses(family, place):
                    if len(passed) >= PASSED:
                        return
                    yield place, hypothesis

        def tried(candidate: tuple[int, Hypothesis]) -> Explanation[FoundChange] | None:
            at = self._seen_at(*candidate)
            if not self._has_evidence(at, candidate[1]):
                return None
            passed.append(candidate[1])
            return self._explained(at, candidate[1])

        return best_explanation(candidates(), tried, self.budget, self.is_confirmed)

    def _seen_at(self, place: int, hypothesis: Hypothesis) -> int:
        """Return the call at which a change shows: the place, or a call behind it that is changed."""
        return (
            place
            if place in self._affected_by(hypothesis)
            else max(hypothesis.changes, default=place)
        )

    def _hypotheses(self, family: Family, place: int) -> Iterator[Hypothesis]:
        try:
            yield from family(self, place)
        except RAISED:
            return  # a family that a place does not fit has no more
        except Exception as error:
            self._note_odd(error)

    def _note_odd(self, error: Exception) -> None:
        """Note an exception that is no answer: a change is left out, and the others are tried."""
        if (words := of_ours(error)) not in self.odd:
            self.odd.append(words)

    def _ran(self, repairs: Repairs, program: TorchProgram) -> TorchRun | None:
        """Return a changed run, None where the change does not fit."""
        try:
            return repairs.run(program)
        except RAISED:
            return None
        except Exception as error:
            self._note_odd(error)
            return None

    # evidence

    def _has_evidence(self, place: int, hypothesis: Hypothesis) -> bool:
        """Return whether a change gives numbers that the port alone had, at a place or at the next
        one.

        The port may compute the same in another order, so that the result itself is not among its
        values, or have the changed result elsewhere too: then the results of the calls that read it
        are looked at.
        """
        value = self.local(place, hypothesis)
        # one number everywhere is found in many places of a port
        if value is None or (hypothesis.cause not in FLAT and self._flattens(hypothesis)):
            return False
        if self.matching.is_new(value, self.matching.run.seen[place]):
            return True
        has = self.matching.side.has(value) is not False
        if has and self._explains_all(place, hypothesis):
            return True
        readers = self._lost_readers(place)[: 3 if has else 1]
        return any(self._is_new_at(reader, hypothesis) for reader in readers)

    def _explains_all(self, place: int, hypothesis: Hypothesis) -> bool:
        """Return whether a change explains all, which is tried for a few changes whose numbers both
        sides have: these explain nothing by themselves.
        """
        is_small = len(self.region) < 4 or place in self.region[-4:]
        # near the end of a small region a run to the end costs little
        if self._spare <= 0 and not is_small:
            return False
        self._spare -= 1
        found = self.test(place, hypothesis)
        # of a state that starts at zero the first step tells nothing
        return found is not None and self._everywhere(found).error <= self.close

    def _is_new_at(self, reader: int, hypothesis: Hypothesis) -> bool:
        after = self.local(reader, hypothesis)
        return after is not None and self.matching.is_new(after, self.matching.run.seen[reader])

    def _flattens(self, hypothesis: Hypothesis) -> bool:
        """Return whether a change gives one number everywhere, of whatever it reads: it explains no
        more than that.
        """
        for index in hypothesis.changes:
            before = (self.matching.run.seen[index] or [None])[0]
            after = self.local(index, hypothesis)
            was_many = (
                torch.is_tensor(before) and before.is_floating_point() and not _is_flat(before)
            )
            if was_many and after and _is_flat(after[0]):
                return True
        return False

    def _lost_readers(self, place: int) -> list[int]:
        """Return the lost calls that read a result, directly or through a call or two that are
        matched.
        """

        def behind_matched(i: int) -> Iterator[int]:
            return self.readers(i) if i == place or i not in self._inside else iter(())

        return [i for i in breadth_first([place], behind_matched, 3) if i in self._inside]

    def _explained(self, place: int, hypothesis: Hypothesis) -> Explanation[FoundChange] | None:
        found = self.test(place, hypothesis)
        found = found and self._everywhere(found)
        if found is None:
            return None
        is_whole = found.error <= self.close
        # what explains all needs no further reason
        if not is_whole and (self._hides(found) or self._is_scanty(found)):
            return None
        return Explanation(found, is_whole, found.gained)

    def _hides(self, found: FoundChange) -> bool:
        """Return whether a change puts a zero in a place: that hides whatever else is wrong behind
        it.

        A term that starts at zero is missing in the first time step, whatever it is in the others.
        """
        if found.hypothesis.cause not in ("missing-term", "other-value"):
            return found.hypothesis.cause in ("zeros", "unused-parameter")
        # calls of one name, line and module are the turns of a loop
        kinds = [(c.name, c.where, c.path) for c in self.program.calls]
        mine = kinds[min(found.hypothesis.changes, default=found.place)]
        return any(kinds[i] == mine and i not in found.new for i in self.region)

    def _is_scanty(self, found: FoundChange) -> bool:
        """Return whether all that is explained is a number or two, which the port may have from
        another layer.
        """
        if self.loss:  # the terms of a loss are single numbers
            return False
        return sum(variety(array(found.run.seen[i][0])) for i in found.new) < LEAST

    def is_confirmed(self, found: FoundChange) -> bool:
        """Return whether a change gives the port's values at other parameters and inputs, too."""
        for number, witness in enumerate(self._witnesses):
            if number not in self._runs_before:
                self._runs_before[number] = self._ran(self.repairs, witness.program)
            before = self._runs_before[number]
            if before is None:
                continue
            run = self._ran(self.repairs.with_change(found.hypothesis), witness.program)
            side = witness.side
            if run is None:
                return False
            ends = self._off(run, side)
            # a witness is at other numbers, whose rounding may be a few times as large
            close = max(10 * witness.allowed, self.close)
            if found.error <= self.close and ends <= close:
                continue
            # what comes behind may be the port's by chance, where one more difference changes it
            if any(side.has(run.seen[i]) is False for i in found.new[:1]):
                return False
            # with other inputs another fault may show, too: then this change explains a part
            better = not witness.same_inputs and ends < self._off(before, side)
            if found.error <= self.close and not better:
                return False
        return True

    def _off(self, run: TorchRun, side: Side) -> float:
        if self.loss:
            return abs(float(run.loss) - side.loss) / max(abs(side.loss), 1e-300)
        return outputs_error(run.outs, side.outs)

    def test(self, place: int, hypothesis: Hypothesis) -> FoundChange | None:
        """Run the program to its end with a hypothesis.

        Return None where it raises, or where its outputs have other shapes: the port's are known to
        have torch's.
        """
        side = self.matching.side
        run = self._ran(self.repairs.with_change(hypothesis), self.program)
        if run is None or _shapes(run) != _shapes(self.matching.run):
            return None
        if any(_is_nan_alone(a, b) for a, b in zip(run.outs, side.outs, strict=False)):
            return None  # what is NaN is not compared
        error = self._off(run, side)
        # the first lost calls say most, and each is compared with all values of the port
        looked = sorted({place, *self.region[:60]})
        new = {i: self.matching.is_new(run.seen[i], self.matching.run.seen[i]) for i in looked}
        return FoundChange(
            hypothesis,
            place,
            error,
            [i for i in looked if new[i]],
            run,
        )

    def _everywhere(self, found: FoundChange) -> FoundChange:
        """Return a change also at the other calls of its line: those of other time steps, and of
        repeated modules.
        """
        best = found
        leaves = in_every_layer(self.program.names, found.hypothesis.leaves)
        # a weight that is loaded wrongly is loaded so in each layer
        if len(leaves) > len(found.hypothesis.leaves) and found.error > self.close:
            words = f"{found.hypothesis.words}, in every layer"
            every = self.test(found.place, replace(found.hypothesis, leaves=leaves, words=words))
            if every is not None and every.is_better_than(best):
                return every
        tried = [set(found.hypothesis.changes)]
        # the narrowest likeness first: a change that fits fewer calls is undone by fewer of them
        for alike in ALIKE:
            if best.error <= self.close:
                return best
            changes = at_every_call(self.program, found.hypothesis, alike)
            if changes.keys() in tried:
                continue
            tried.append(set(changes))
            every = self.test(found.place, replace(found.hypothesis, changes=changes))
            if (
                every is not None
                and _keeps_matched(self.matching, every)
                and every.is_better_than(best)
            ):
                best = every
        return best

    # the neighbourhood of a place

    def read_by(
        self, todo: list[int], depth: int, through: Callable[[int], bool] = lambda i: True
    ) -> Iterator[int]:
        """Yield the calls that some calls read, directly or through others, where a rule lets them
        through.
        """

        def reads(i: int) -> Iterator[int]:
            return (
                r.kind
                for r in self.program.calls[i].refs
                if isinstance(r.kind, int) and through(r.kind)
            )

        yield from breadth_first(todo, reads, depth)

    def _order(self, first: list[int]) -> list[int]:
        """Return the calls to look at: the first lost ones in turn, each with those that read it."""

        def lost_readers(i: int) -> Iterator[int]:
            return (r for r in self.readers(i) if r in self._inside)

        chains = [
            [start, *islice(breadth_first([start], lost_readers, PLACES), PLACES)]
            for start in first[:PLACES]
        ]
        # by turns, so that a long chain behind one call does not use up the places of the others
        turns = zip_longest(*(one[:PLACES] for one in chains))
        return [i for i in dict.fromkeys(chain.from_iterable(turns)) if i is not None]

    def readers(self, index: int) -> Iterator[int]:
        """Yield the calls that read a result, past those that only move it."""
        for j in range(len(self.matching.run.values[index])):
            for reader in self.program.readers.get(Ref(index, j), []):
                if self.matching.status[reader] is None:
                    yield from self.readers(reader)
                else:
                    yield reader

    def local(self, place: int, hypothesis: Hypothesis) -> list[Any] | None:
        """Return a call's results under a hypothesis, or None where it does not fit."""
        run = self.matching.run

        def get(ref: Ref) -> Any:
            function = hypothesis.leaves.get((ref.kind, ref.index))
            if isinstance(function, Ref):
                return run.get(function)
            return run.get(ref) if function is None else dense(function(run.get(ref)))

        changes = self.repairs.with_change(hypothesis).changes
        try:
            with torch.no_grad():
                return recomputed(
                    self.program,
                    place,
                    self._affected_by(hypothesis),
                    get,
                    changes,
                )
        except RAISED:
            return None
        except Exception as error:
            self._note_odd(error)
            return None

    def _affected_by(self, hypothesis: Hypothesis) -> set[int]:
        """Return the calls that a hypothesis changes, or that read what is changed."""
        key = (*hypothesis.changes, *hypothesis.leaves)
        if key not in self._affected:
            self._affected[key] = downstream(self.program, hypothesis.changes, hypothesis.leaves)
        return self._affected[key]

    def positions(self, place: int) -> Iterator[tuple[int, Ref]]:
        """Yield the tensors that a call reads, with their places among all arguments, those in
        lists one by one.
        """
        for i, arg in enumerate(pytree.tree_leaves(self.program.calls[place].args)):
            if isinstance(arg, Ref):
                yield i, arg


def _is_flat(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.numel() > 1
        and bool((value == value.reshape(-1)[0]).all())
    )


def breadth_first(
    start: list[int], following: Callable[[int], Iterable[int]], depth: int
) -> Iterator[int]:
    """Yield the calls that follow some calls, the nearest first."""
    seen = set(start)
    level = start
    for _ in range(depth):
        found = chain.from_iterable(map(following, level))
        level = [k for k in dict.fromkeys(found) if k not in seen]
        seen.update(level)
        yield from level


def downstream(
    program: TorchProgram, calls: Iterable[int], leaves: Collection[Any] = ()
) -> set[int]:
    """Return some calls, and those that read their results, or some leaves, directly or through
    others.
    """
    found = set(calls)
    for index, call in enumerate(program.calls):
        if any(r.kind in found or (r.kind, r.index) in leaves for r in call.refs):
            found.add(index)
    return found


def recomputed(
    program: TorchProgram,
    index: int,
    affected: Collection[int],
    get: Callable[[Ref], Any],
    changes: Mapping[int, Change],
) -> list[Any]:
    """Return the results of a call, for which calls are run again.

    Args:
        program: whose call it is.
        index: of the call.
        affected: calls that are run again; all other results are kept.
        get: Ref -> the tensor that is kept.
        changes: index of a call -> what is done in its place.
    """
    made: dict[int, list[Any]] = {}

    def value(ref: Any) -> Any:
        if not isinstance(ref, Ref):
            return ref
        return results(ref.kind)[ref.index] if ref.kind in affected else get(ref)

    def results(i: int) -> list[Any]:
        if i not in made:
            call = program.calls[i]
            args = with_tensors(call.args, value)
            kwargs = with_tensors(call.kwargs, value)
            # the recorded tensors stay as they are for the next hypothesis
            if call.mutates:
                args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            change = changes.get(i)
            made[i] = flat(
                call.op(*args, **kwargs) if change is None else change(call, args, kwargs, value)
            )
        return made[i]

    return results(index)


def _role(program: TorchProgram, index: int) -> Any:
    refs = program.calls[index].refs
    return [
        (program.calls[r.kind].name, r.index) if isinstance(r.kind, int) else r.kind for r in refs
    ]


def _parameters(program: TorchProgram, index: int) -> Any:
    """Return the nearest parameters that a call depends on: those of one layer are the same at
    every time step.
    """
    level = {index}
    # an affine map and its bias are a few calls away; what is further off is another layer
    for _ in range(8):
        refs = list(chain.from_iterable(program.calls[i].refs for i in level))
        if found := frozenset(r.index for r in refs if r.kind == "state"):
            return found
        level = {r.kind for r in refs if isinstance(r.kind, int)}
    return frozenset()


def _role_in_layer(program: TorchProgram, index: int) -> Any:
    return _parameters(program, index), _role(program, index)


Alike = Callable[[TorchProgram, int], Any]
ALIKE: tuple[Alike, ...] = (
    _role_in_layer,
    _parameters,
    lambda program, i: program.calls[i].path,
    _role,
    lambda *_: None,
)
"""What calls of one line have in common where the same change is made at all of them."""


def at_every_call(
    program: TorchProgram, hypothesis: Hypothesis, alike: Alike = _role
) -> dict[int, Change]:
    """Return the changes of a hypothesis, made at all calls of their line that have something in
    common.
    """
    if not hypothesis.changes:
        return {}
    calls = program.calls
    mine = min(hypothesis.changes)
    together = Repairs().with_change(hypothesis)
    for index, call in enumerate(calls):
        by = index - mine
        if (
            not by
            or not call.where
            or (call.name, call.where) != (calls[mine].name, calls[mine].where)
        ):
            continue
        # a hypothesis of several calls moves as a whole
        moved = [i + by for i in hypothesis.changes]
        fits = all(0 <= i < len(calls) and calls[i].name == calls[i - by].name for i in moved)
        fits = fits and alike(program, index) == alike(program, mine)
        if fits and not any(i in together.changes for i in moved):
            together = together.with_change(hypothesis.shifted(by))
    return together.changes


def in_every_layer(names: Sequence[str], leaves: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return changes of parameters also for those of other layers: their names differ in numbers
    alone.
    """
    made = dict(leaves)
    for (kind, name), change in leaves.items():
        pattern = re.escape(str(name)) if kind == "state" else ""
        for other in names:
            if (
                not re.fullmatch(re.sub(r"\d+", r"\\d+", pattern), other)
                or ("state", other) in made
            ):
                continue
            # an exchange with another tensor is one with the tensor of the same layer
            numbers = dict(zip(re.findall(r"\d+", name), re.findall(r"\d+", other), strict=True))
            if not isinstance(change, Ref):
                made["state", other] = change
            elif (
                partner := re.sub(r"\d+", lambda m, n=numbers: n.get(m[0], m[0]), str(change.index))
            ) in names:
                made["state", other] = Ref("state", partner)
    return made


def _keeps_matched(matching: Matching, found: FoundChange) -> bool:
    """Return whether each changed call whose result the port has still has a result of the port's."""
    matched = [i for i in found.hypothesis.changes if matching.status[i]]
    return all(matching.side.has(found.run.seen[i]) is not False for i in matched)


def _shapes(run: TorchRun) -> list[torch.Size]:
    return [o.shape for o in run.outs]


def _is_nan_alone(mine: Any, theirs: Any) -> bool:
    """Return whether torch has NaN where the port has none."""
    wanted = array(mine)
    return bool((np.isnan(wanted) & ~np.isnan(with_axes_aligned(theirs, wanted))).any())
