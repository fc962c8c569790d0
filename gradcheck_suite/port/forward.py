"""Whether outputs and loss of a port are torch's, and which change of torch makes them so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradcheck_suite.port.budget import Budget
from gradcheck_suite.port.changes import RAISED, Hypothesis
from gradcheck_suite.port.drawing import described
from gradcheck_suite.port.drawn_inputs import loss_error, nonfinite, run_with
from gradcheck_suite.port.explanation import Explanation, best_explanation
from gradcheck_suite.port.families import FAMILIES, reordered
from gradcheck_suite.port.judgement import Judgement, Opaque, Repair, lines, named, repairs_of
from gradcheck_suite.port.matching import Matching, array, outputs_error
from gradcheck_suite.port.number_sets import SAME, Array, error, with_axes_aligned
from gradcheck_suite.port.outputs import exchanged
from gradcheck_suite.port.rare_inputs import other_orders
from gradcheck_suite.port.result import Kind, PortFinding
from gradcheck_suite.port.search import LEAST, PLACES, CauseSearch, FoundChange
from gradcheck_suite.port.sides import Point
from gradcheck_suite.port.torch_program import Change, Ref, TorchRun, flat
from gradcheck_suite.port.witnesses import port_numbers, witnesses

MOST = 12
"""Findings at most."""
MOST_UNKNOWN = 2
"""Findings without a cause at most behind which the judgement goes on."""
PUT_IN = 40
"""Values of the port that are put in place of one of torch's whose cause is unknown."""


@dataclass(frozen=True)
class _Difference:
    """Outputs, or a loss, that differ at a point.

    Attributes:
        point: where.
        loss: whether the loss is compared.
        error: largest relative difference.
        allowed: what rounding explains of it.
        after: what its finding says at its end.
    """

    point: Point
    loss: bool
    error: float
    allowed: float
    after: str = ""

    @property
    def numbers(self) -> dict[str, Any]:
        """The two numbers of its finding."""
        return {"error": self.error, "allowed": self.allowed}


@dataclass(frozen=True)
class _Searched:
    """What a search has come to.

    Attributes:
        search: at the point.
        ends: outputs that differ.
        first: the first lost calls.
        found: the change that explains the difference, None where there is none.
    """

    search: CauseSearch
    ends: list[Ref]
    first: list[int]
    found: FoundChange | None


class ForwardComparison:
    """Compares what a forward pass gives, and repairs torch by what explains a difference.

    Args:
        judgement: of the pair.
    """

    def __init__(self, judgement: Judgement) -> None:
        self._judgement = judgement
        self._sides = judgement.sides
        self._report = judgement.report

    def judge_outputs(self) -> None:
        """Compare the outputs at every point."""
        self._judgement.is_explained = self.is_explained(loss=False)
        self._report.judged.append("outputs")

    def judge_loss(self) -> None:
        """Compare the loss at every point."""
        if self._judgement.is_explained and self._judgement.pair.torch_loss is not None:
            self._judgement.is_explained = self.is_explained(loss=True)
            self._report.judged.append("loss")

    def is_explained(self, *, loss: bool) -> bool:
        """Compare outputs, or the loss, at every point, and name the differences.

        Return whether all is explained.
        """
        return all(self._is_explained_at(point, loss) for point in self._sides.points)

    def _is_explained_at(self, point: Point, loss: bool) -> bool:
        before = len(self._judgement.repaired)
        for _ in range(MOST):
            try:
                run = self._judgement.run(point)
            except RAISED:
                if point is self._sides.given:
                    raise
                return True
            off = self._off(point, run, loss)
            allowed = self._judgement.allowed(point)
            if off > allowed and self._is_other_order(point, run, loss):
                return True
            is_drawn = point is not self._sides.given and self._judgement.pair.draw is None
            if off <= allowed or (is_drawn and _is_out_of_domain(run)):
                if any(r.finding.cause == "unknown" for r in self._judgement.repaired[before:]):
                    self._withdraw_idle(point, loss, before)
                return True
            if self._judgement.budget.late:
                break
            if not self._explain(_Difference(point, loss, off, allowed)):
                break
        self._withdraw_idle(point, loss, before)
        return False

    # repairs that do nothing

    def _withdraw_idle(self, point: Point, loss: bool, before: int) -> None:
        """Withdraw causes that repair nothing of a difference that is left.

        A change that was believed because of results in between, and without which what is compared
        is no farther off, is no cause. What was found behind it counts on it, and goes too: the
        place is left, with `unknown`.

        Args:
            point: at which outputs differ.
            loss: whether the loss is compared.
            before: number of repairs before the difference was looked at.
        """
        repaired = self._judgement.repaired
        # the port's value in place of torch's repairs whatever comes before it
        known = [r for r in repaired if r.finding.cause != "unknown"]
        with_all = self._distance(point, loss, known)
        for number, repair in enumerate(repaired[before:], before):
            if repair.finding.cause == "unknown":
                continue
            others = [r for r in known if r is not repair]
            if self._distance(point, loss, others) > with_all * (1 + 1e-6):
                continue
            gone = [r.finding for r in repaired[number:]]
            self._report.withdraw(gone)
            self._judgement.keep_repairs(number)
            plain = re.sub(r", observed .*", "", gone[0].words)
            words = f"{plain}, observed other numbers, of which no single change explains all"
            self._report.findings.append(gone[0].renamed("unknown", words))
            return

    def _distance(self, point: Point, loss: bool, repaired: Sequence[Repair]) -> float:
        """Return the root mean square of the relative differences that some repairs leave."""
        theirs = self._sides.jax_run(point)
        try:
            run = run_with(repairs_of(repaired), self._sides, point)
        except RAISED:
            return float("inf")
        if loss:
            return loss_error(run, theirs.loss)
        squares = [
            float(np.mean(np.square(off)))
            for off in map(_relative, run.outs, theirs.outs[: len(run.outs)])
        ]
        total = float(np.sqrt(sum(squares)))
        return total if np.isfinite(total) else float("inf")

    # differences

    def _off(self, point: Point, run: TorchRun, loss: bool) -> float:
        theirs = self._sides.jax_run(point)
        return loss_error(run, theirs.loss) if loss else outputs_error(run.outs, theirs.outs)

    def _is_other_order(self, point: Point, run: TorchRun, loss: bool) -> bool:
        """Return whether the port has equal elements in another order, of which torch promises
        none; torch is then given the port's.
        """
        allowed = self._judgement.allowed(point)
        program = self._sides.torch_program(point)
        for hypothesis in other_orders(program, run):
            repairs = self._judgement.repairs.with_change(hypothesis)
            if self._off(point, repairs.run(program), loss) <= allowed:
                self._judgement.repairs = repairs
                self._report.note(
                    "equal elements are in another order than torch's, which promises none"
                )
                return True
        return False

    def _searched(self, difference: _Difference) -> _Searched:
        """CauseSearch for the change that explains a difference."""
        point = difference.point
        program = self._sides.torch_program(point)
        run = self._judgement.run(point)
        matching = Matching(program, run, port_numbers(self._sides, point))
        ends = matching.ends(difference.loss, difference.allowed)
        region, first = matching.region(ends)
        is_by_arrays = not region
        if is_by_arrays:
            region, first = matching.region_by_arrays(ends)
        # the port's value in place of torch's, where the cause is unknown, is that of one point
        # alone
        others = () if self._judgement.opaque else tuple(witnesses(self._sides, point))
        search = CauseSearch(
            program,
            matching,
            self._judgement.repairs,
            difference.loss,
            difference.allowed,
            self._judgement.budget,
            others,
        )
        found = search.find(FAMILIES, region, first) if region else None
        if found is None and is_by_arrays:
            found = reordered(search, ends)
        for words in search.odd:
            self._report.note(f"a change could not be tried: {words}")
        return _Searched(search, ends, first, found)

    def _explain(self, difference: _Difference) -> bool:
        """Add a finding; return whether it is repaired."""
        point = difference.point
        is_untouched = not difference.loss and not self._judgement.repairs.changes
        if is_untouched and self._are_outputs_exchanged(difference):
            return True
        searched = self._searched(difference)
        if point is not self._sides.given:
            self._report.smallest = point.words or described(point)
            after = self._judgement.if_no_input(point)
            difference = _Difference(
                point, difference.loss, difference.error, difference.allowed, after
            )
        matching = searched.search.matching
        if searched.found is not None:
            self._add_explained(matching, searched.found, difference)
            return True
        if self._sides.jax_program(point).random and not self._judgement.pair.train:
            self._add_dropout(difference)
            return False
        is_reordered = not difference.loss and _has_same_outputs(matching)
        if not searched.first or is_reordered:
            self._add_elsewhere(matching, searched.ends, difference, is_reordered=is_reordered)
            return False
        return self._add_unknown(searched, difference)

    def _are_outputs_exchanged(self, difference: _Difference) -> bool:
        """Return whether the port has torch's outputs at each other's places or names, which is
        added as a finding, and is put right.
        """
        sides = self._sides
        mine = self._judgement.run(difference.point).outs
        order = exchanged(mine, sides.jax_run(difference.point).outs, difference.allowed)
        if order is None:
            return False
        names = sides.outputs.labels()
        moved = [i for i, k in enumerate(order) if i != k]
        listed = " and ".join(names[i] for i in moved)
        words = f"expected the outputs {listed}, observed each other's numbers under these names"
        self._report.add("forward", "", "swapped-outputs", words, **difference.numbers)
        sides.exchange_outputs(order)
        return True

    # what is said of one

    def _add_dropout(self, difference: _Difference) -> None:
        modules = self._judgement.pair.module.named_modules()
        names = [n for n, m in modules if "Dropout" in type(m).__name__]
        words = "expected no random numbers in evaluation, observed the port drawing some"
        place = names[0] if names else ""
        self._report.add("forward", place, "dropout-active", words, **difference.numbers)

    def _add_elsewhere(
        self,
        matching: Matching,
        ends: list[Ref],
        difference: _Difference,
        *,
        is_reordered: bool,
    ) -> None:
        """Add a finding of outputs that differ though no result of torch is lost."""
        program = matching.program
        call = next((program.calls[e.kind] for e in ends if isinstance(e.kind, int)), None)
        differ = nonfinite(matching.run.outs, matching.side.outs)
        cause = "unknown"
        if is_reordered and not differ:
            cause = "order-of-elements"
            words = "expected torch's output, observed its numbers in another order"
        else:
            wanted = named(call) if call is not None else "torch's output"
            words = f"expected {wanted}, observed other numbers{f': {differ}' if differ else ''}"
        self._report.add(
            "forward",
            "" if call is None else call.path,
            cause,
            words,
            difference.after,
            **lines(None if call is None else call.where),
            **difference.numbers,
        )

    def _add_explained(
        self, matching: Matching, found: FoundChange, difference: _Difference
    ) -> None:
        hypothesis = found.hypothesis
        calls = matching.program.calls
        call = calls[hypothesis.at if hypothesis.at is not None else found.place]
        jax_at = (
            matching.where_in_jax(found.run.seen[found.place][0])
            or matching.nearest_in_jax(found.place)[0]
        )
        words = f"expected {named(call)}, observed {hypothesis.words}"
        if hypothesis.changes.keys() & self._judgement.repairs.changes.keys():
            words += " beside what is said above"
        # calls of one line, of which others could not be explained, have one fault
        same = self._unknown_at(call.where or None, jax_at or None)
        if same is not None:
            self._judgement.repair(hypothesis, same)
            return
        kind: Kind = "load" if hypothesis.kind == "load" else "forward"
        finding = self._report.add(
            kind,
            call.path if hypothesis.path is None else hypothesis.path,
            hypothesis.cause,
            words,
            difference.after,
            **lines(call.where, jax_at),
            **difference.numbers,
        )
        self._judgement.repair(hypothesis, finding)

    def _unknown_at(self, torch: str | None, jax: str | None) -> PortFinding | None:
        """Return the finding without a cause at a line of both sides, if there is one."""
        if not torch:
            return None
        for repair in self._judgement.repaired:
            finding = repair.finding
            if finding.cause == "unknown" and (finding.torch, finding.jax) == (torch, jax):
                return finding
        return None

    def _add_unknown(self, searched: _Searched, difference: _Difference) -> bool:
        """Add a finding without a cause.

        Return whether the port's value could be put in its place.
        """
        search = searched.search
        matching = search.matching
        index = searched.first[0]
        call = matching.program.calls[index]
        where, value = matching.nearest_in_jax(index)
        differ = nonfinite(matching.run.outs, matching.side.outs)
        words = f"expected {named(call)}, observed other numbers"
        words += _shown(matching.run.seen[index][0], value)
        words += f": {differ}" if differ else ""
        words += search.budget.words
        finding = self._report.add(
            "forward",
            call.path,
            "unknown",
            words,
            difference.after,
            **lines(call.where, where),
            **difference.numbers,
        )
        best = _value_put_in(search, index)
        unknown = sum(f.cause == "unknown" for f in self._report.findings)
        if best is None or unknown > MOST_UNKNOWN:
            return False
        # the port's value is a constant: gradients do not pass through it
        opaque = self._judgement.opaque
        before = opaque.calls if opaque is not None else ()
        self._judgement.opaque = Opaque(difference.point, (*before, *best.changes))
        self._judgement.repair(best, finding)
        return True


def _value_put_in(search: CauseSearch, index: int) -> Hypothesis | None:
    """Return the port's value in place of the result of the first lost call or of one behind it, if
    what follows agrees then.
    """
    numbers = search.matching.lost_numbers
    behind = [i for i in search.region if i > index]

    def candidates() -> Iterator[tuple[int, Array]]:
        for place in (index, *behind[:PLACES]):
            out = search.matching.run.seen[place][0]
            if isinstance(out, torch.Tensor):
                for i in numbers.of_size(out.numel())[:PUT_IN]:
                    yield place, with_axes_aligned(numbers.arrays[i], array(out))

    def tried(candidate: tuple[int, Array]) -> Explanation[Hypothesis] | None:
        place, theirs = candidate
        fixed = torch.as_tensor(np.array(theirs))
        if fixed.shape != search.matching.run.seen[place][0].shape:
            return None
        put: Change = lambda c, a, k, g: [fixed.clone(), *flat(c.op(*a, **k))[1:]]  # noqa: E731 - typed
        hypothesis = Hypothesis("unknown", "", {place: put})
        found = search.test(place, hypothesis)
        if found is None or not (found.error <= search.close or found.gained >= LEAST):
            return None
        return Explanation(hypothesis, found.error <= search.close, found.gained)

    best = best_explanation(candidates(), tried, Budget())
    return None if best is None else best.value


def _relative(expected: Any, observed: Array) -> Array:
    """Return the differences of an output relative to its largest number, infinite where one is no
    number.
    """
    wanted = array(expected).astype(np.float64)
    found = with_axes_aligned(array(observed), wanted).astype(np.float64)
    if found.shape != wanted.shape:
        return np.full(1, np.inf)
    off = np.where((found == wanted) | (np.isnan(found) & np.isnan(wanted)), 0.0, found - wanted)
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0) or 1.0
    return np.where(np.isfinite(off), off, np.inf) / largest


def _is_out_of_domain(run: TorchRun) -> bool:
    """Return whether torch gives NaN at a drawn input, which it does not at the given one."""
    return any(bool(torch.isnan(o).any()) for o in run.outs if o.is_floating_point())


def _has_same_numbers(expected: Any, observed: Array) -> bool:
    """Return whether an output of the port has torch's numbers, in whatever order."""
    wanted = np.sort(array(expected).reshape(-1))
    found = np.sort(array(observed).reshape(-1))
    return wanted.shape == found.shape and error(found, wanted) <= SAME


def _has_same_outputs(matching: Matching) -> bool:
    pairs = zip(matching.run.outs, matching.side.outs, strict=False)
    return all(_has_same_numbers(mine, other) for mine, other in pairs)


def _shown(expected: Any, observed: Array | None) -> str:
    """Return the largest number of torch's beside the port's, nothing where they do not fit."""
    wanted = array(expected).reshape(-1) if isinstance(expected, torch.Tensor) else np.zeros(0)
    if observed is None or observed.size != wanted.size or not wanted.size:
        return ""
    at = int(np.argmax(np.where(np.isfinite(wanted), np.abs(wanted), 0)))
    return f" (such as {observed.reshape(-1)[at]:.6g} for {wanted[at]:.6g})"
