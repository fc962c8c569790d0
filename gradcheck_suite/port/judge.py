"""The judgement of a pair, in the order in which data flows: parameters, outputs, statistics, loss,
gradients, steps.

A difference that is explained is repaired in the torch program, and the judgement goes on behind
it: three faults of one model are three findings.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from gradcheck_suite.core.causes import CAUSES, is_cause, meaning
from gradcheck_suite.core.formats import Accepted, Judged
from gradcheck_suite.core.options import PortOptions
from gradcheck_suite.core.text import counted, suggestion
from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.budget import SECONDS, Budget
from gradcheck_suite.port.changes import RAISED, Hypothesis, of_ours
from gradcheck_suite.port.drawing import author_points, binding_points, described, resampled
from gradcheck_suite.port.drawn_inputs import DrawnInputs, loss_error, nonfinite, run_with, special
from gradcheck_suite.port.explanation import Explanation, best_explanation
from gradcheck_suite.port.families import FAMILIES, reordered
from gradcheck_suite.port.gradients import place_gradient, stops, wrong_gradients
from gradcheck_suite.port.mapping import StateMap
from gradcheck_suite.port.matching import Matching, array, outputs_error
from gradcheck_suite.port.mistakes import mistakes
from gradcheck_suite.port.number_sets import SAME, Array, error, with_axes_aligned
from gradcheck_suite.port.pair import (
    JaxModel,
    Port,
    default_dtype,
    is_neutral,
    is_statistic,
    set_state,
    shaped_as,
    state_of,
)
from gradcheck_suite.port.precision import precision_findings
from gradcheck_suite.port.rare_inputs import other_orders
from gradcheck_suite.port.result import Kind, MapRow, PortFinding, PortResult
from gradcheck_suite.port.running_statistics import statistic_faults
from gradcheck_suite.port.search import LEAST, PLACES, CauseSearch, FoundChange, Repairs
from gradcheck_suite.port.sides import Point, Sides, exchanged, input_name
from gradcheck_suite.port.sizes import expect_sizes
from gradcheck_suite.port.torch_program import (
    LOSS,
    Change,
    OperationCall,
    Ref,
    TorchProgram,
    TorchRun,
    flat,
    with_tensors,
)
from gradcheck_suite.port.updates import STEP, Updates

PLANTED = 16
"""Calls in which faults are planted."""
MOST = 12
"""Findings at most."""
PUT_IN = 40
"""Values of the port that are put in place of one of torch's whose cause is unknown."""
OPTIMIZER = "optimizer"
"""The place of a difference between optimizers."""


@dataclass(frozen=True)
class Repair:
    """A change of torch, and the finding that it explains."""

    hypothesis: Hypothesis
    finding: PortFinding


def _together(repaired: Sequence[Repair]) -> Repairs:
    found = Repairs()
    for repair in repaired:
        found = found.with_change(repair.hypothesis)
    return found


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


class PairJudge:
    """Judges one pair.

    Args:
        pair: in float64.
        notes: of what was ignored.
        options: of the comparison.
        baseline: what the project accepts.
    """

    def __init__(
        self,
        pair: Port,
        notes: list[str],
        options: PortOptions,
        baseline: Sequence[Accepted] = (),
    ) -> None:
        self.pair = pair
        self.notes = notes
        self._options = options
        self._seed = options.seed
        self.findings: list[PortFinding] = []
        self.accepted: list[PortFinding] = []
        self.judged: list[str] = []
        self.planted = ""
        self.unjudged: str | None = None
        self.smallest: tuple[str, ...] = ()
        self.repairs = Repairs()
        self._repaired: list[Repair] = []
        self._is_over = False
        self._opaque: _Opaque | None = None
        self._is_explained = False
        self.map_rows: tuple[MapRow, ...] = ()
        self._budget = Budget()
        self._unloaded: set[str] = set()
        expect_sizes(pair.sizes)
        for name in pair.accept:
            if not is_cause(name):
                raise UsageError(f"accept: {name!r} is no cause{suggestion(name, CAUSES)}")
        self._entries = [
            *baseline,
            *(Accepted.read(text, "--accept") for text in options.accept),
            *(Accepted.read(name, "accept of the pair") for name in pair.accept),
        ]

    def run(self) -> None:
        """Judge the pair.

        Raises:
            UsageError: it cannot be judged.
        """
        for stage in (
            self._map,
            self._both_sides,
            self._loading,
            self._outputs,
            self._statistics,
            self._loss,
            self._gradients,
            self._untied,
            self._updates,
            self._drawn,
            self._plant,
            self._precision,
        ):
            if self._budget.late:
                late = f"not judged from {stage.__name__[1:]} on: {SECONDS:.0f} s were over"
                self._leave_out(late)
                return
            if not self._is_done(stage) or self._is_over:
                return

    def _is_done(self, stage: Callable[[], None]) -> bool:
        """Run a stage; return whether the next ones can be run.

        An exception of this package, or of a framework where nobody expected it, ends its stage
        alone: what is missing is said, and the rest is judged.
        """
        name = stage.__name__[1:]
        try:
            stage()
        except UsageError:
            raise
        except Exception as error:
            self._leave_out(f"the stage {name!r} was not judged: {of_ours(error)}")
            return name not in ("map", "both_sides")
        return True

    def _leave_out(self, words: str) -> None:
        """Say what was not judged; without a difference that was found there is no verdict then."""
        self._note(words)
        self.unjudged = self.unjudged or words

    def _map(self) -> None:
        self.model = JaxModel(self.pair)
        self.map = StateMap(self.pair, self.model)
        self.map_rows = self.map.rows()

    def _both_sides(self) -> None:
        self.sides = Sides(
            self.pair,
            self.model,
            self.map,
            101 + self._seed,
        )
        for note in self.sides.notes:
            self._note(note)
        for words in self.sides.unmatched:
            self._add("forward", "", "shape", words)
        self._is_over = not self.sides.torch_program(self.sides.given).outs
        base = self.sides.given
        rng = np.random.default_rng(7 + self._seed)
        if self.pair.draw is not None:  # what the author draws is the domain
            self.sides.points += author_points(base, self.pair.draw, 2, self._seed)
            return
        for kind in ("other", "narrow"):
            inputs = tuple(resampled(x, rng, kind) for x in base.inputs)
            self.sides.points.append(Point(inputs, tuple(resampled(x, rng) for x in base.targets)))
        self.sides.points += binding_points(
            base, self.sides.torch_program(base), self.sides.points[1:], self._seed
        )

    def _add(
        self, kind: Kind, place: str | None, cause: str, words: str, after: str = "", **more: Any
    ) -> PortFinding:
        """Add a finding, and return it; what its cause means stands behind the words."""
        means = f" ({meaning(cause)})" if meaning(cause) else ""
        finding = PortFinding.of(
            kind,
            place or "",
            cause,
            f"{words}{means}{after}",
            **more,
        )
        known = {(f.kind, f.place, f.cause) for f in (*self.findings, *self.accepted)}
        if (finding.kind, finding.place, finding.cause) in known:
            return finding
        accepting = finding.accepted_by(self._entries)
        if accepting:
            finding = replace(finding, reason=accepting[0].reason)
            self.accepted.append(finding)
        else:
            self.findings.append(finding)
        return finding

    # parameters

    def _loading(self) -> None:
        """Judge that every tensor of torch that matters reaches a leaf."""
        used = self.map.used()
        parameters = self.sides.torch_program(self.sides.given).parameters
        for name in self.map.names:
            gone = (used[self.map.part(name)] == 0).reshape(self.map.base[name].shape)
            # other buffers may be tables that the port computes
            is_start = is_statistic(name) and not self.pair.train
            is_start |= not is_statistic(name) and is_neutral(self.map.base[name])
            is_wanted = name in parameters or (is_start and gone.all())
            if gone.any() and is_wanted and self._matters(name, gone):
                self._not_loaded(name, gone)

    def _matters(self, name: str, elements: Array) -> bool:
        """Return whether the outputs or the loss depend on some elements of torch's state."""
        program = self.sides.torch_program(self.sides.given)
        run = Repairs().run(program)
        # not by the same number everywhere, which a norm or a softmax takes away again
        step = 0.1 * elements * (1 + np.arange(elements.size).reshape(elements.shape) % 3)
        moved = Repairs(leaves={("state", name): lambda v: v + shaped_as(step, v)}).run(program)
        off = outputs_error([*run.outs, run.loss], [*moved.outs, moved.loss])
        return off > self.sides.bounds(self.sides.given).outputs

    def _not_loaded(self, name: str, gone: Array) -> None:
        whole = bool(gone.all())
        start = self._start_of_leaf(gone.size)
        what = "no element of it" if whole else f"{int((~gone).sum())} of its {gone.size} elements"
        words = f"expected {name} {gone.shape} in the JAX parameters, observed {what}"
        words += f"; {start.path} stays at {start.values[0]:g}" if start is not None else ""
        cause = self._why_not_loaded(name, start)
        finding = self._add("load", name.rpartition(".")[0], cause, words)
        mask = torch.as_tensor(gone)
        fixed = torch.as_tensor(self._without_parameter(name, gone, start))
        self._unloaded.add(name)
        leaves = {("state", name): lambda v: torch.where(mask, fixed, v)}
        self._repair(Hypothesis(cause, "", leaves=leaves), finding)

    def _start_of_leaf(self, size: int) -> _Start | None:
        """Return the last leaf of a size that comes from nothing of torch's."""
        found = None
        for leaf, value in zip(self.map.leaves, self.sides.leaves, strict=True):
            if leaf is not None and leaf.is_constant and leaf.index.size == size:
                found = _Start(leaf.path, np.asarray(value).reshape(-1))
        return found

    def _why_not_loaded(self, name: str, start: _Start | None) -> str:
        parameters = self.sides.torch_program(self.sides.given).parameters
        if start is not None or name not in parameters:
            return "not-loaded"
        return "missing-bias" if "bias" in name.rpartition(".")[2] else "unused-parameter"

    def _without_parameter(self, name: str, gone: Array, start: _Start | None) -> Array:
        """Return what the port has in place of elements of torch's state."""
        own = name.rpartition(".")[2]
        whole = bool(gone.all())
        if whole and is_neutral(self.map.base[name]):
            return self.map.base[name]
        if start is not None and np.ptp(start.values) == 0:
            return np.full(gone.shape, start.values[0])
        is_scale = "weight" in own or own == "running_var"
        return (
            np.ones(gone.shape) if whole and gone.ndim == 1 and is_scale else np.zeros(gone.shape)
        )

    def _untied(self) -> None:
        """Judge that what torch ties is one leaf: each of two is stepped by its own part of the
        gradient.
        """
        copies: dict[int, list[str]] = {}
        for leaf in self.map.leaves:
            if leaf is not None and leaf.known:
                for start in {self.map.offsets[n] for n in self.map.sources(leaf)}:
                    copies.setdefault(start, []).append(leaf.path)
        parameters = self.sides.torch_program(self.sides.given).parameters
        for start, paths in copies.items():
            names = [n for n in self.map.names if self.map.offsets[n] == start and n in parameters]
            if (
                len(paths) > 1
                and len(names) > 1
                and (self.map.used()[self.map.part(names[0])] > 1).any()
            ):
                words = (
                    f"expected one parameter for {' and '.join(names)}, observed"
                    f" {' and '.join(paths)}"
                )
                words += ", each with its own gradient"
                self._add("load", names[-1].rpartition(".")[0], "untied-weights", words)

    # outputs and loss

    def _outputs(self) -> None:
        self._is_explained = self._values(loss=False)
        self.judged.append("outputs")

    def _loss(self) -> None:
        if self._is_explained and self.pair.torch_loss is not None:
            self._is_explained = self._values(loss=True)
            self.judged.append("loss")

    def _values(self, *, loss: bool) -> bool:
        """Compare outputs, or the loss, at every point, and name the differences.

        Return whether all is explained.
        """
        return all(self._values_at(point, loss) for point in self.sides.points)

    def _values_at(self, point: Point, loss: bool) -> bool:
        before = len(self._repaired)
        for _ in range(MOST):
            try:
                run = self._run(point)
            except RAISED:
                if point is self.sides.given:
                    raise
                return True
            off = self._off(point, run, loss)
            if off > self.sides.bounds(point).outputs and self._is_other_order(point, run, loss):
                return True
            is_drawn = point is not self.sides.given and self.pair.draw is None
            if off <= self.sides.bounds(point).outputs or (
                is_drawn and self._is_out_of_domain(run)
            ):
                if any(r.finding.cause == "unknown" for r in self._repaired[before:]):
                    self._withdraw_idle(point, loss, before)
                return True
            if self._budget.late or not self._explain(point, loss, off):
                break
        self._withdraw_idle(point, loss, before)
        return False

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
        # the port's value in place of torch's repairs whatever comes before it
        named = [r for r in self._repaired if r.finding.cause != "unknown"]
        with_all = self._distance(point, loss, named)
        for number in range(before, len(self._repaired)):
            repair = self._repaired[number]
            if repair.finding.cause == "unknown":
                continue
            others = [r for r in named if r is not repair]
            if self._distance(point, loss, others) > with_all * (1 + 1e-6):
                continue
            gone = [r.finding for r in self._repaired[number:]]
            later = (
                self.findings[self.findings.index(gone[0]) :] if gone[0] in self.findings else []
            )
            self.findings = [f for f in self.findings if f not in later and f not in gone]
            self.accepted = [f for f in self.accepted if f not in gone]
            self._repaired = self._repaired[:number]
            self.repairs = _together(self._repaired)
            plain = re.sub(r", observed .*", "", gone[0].words)
            words = f"{plain}, observed other numbers, of which no single change explains all"
            self.findings.append(gone[0].renamed("unknown", words))
            return

    def _distance(self, point: Point, loss: bool, repaired: Sequence[Repair]) -> float:
        """Return the root mean square of the relative differences that some repairs leave."""
        theirs = self.sides.jax_run(point)
        try:
            run = run_with(_together(repaired), self.sides, point)
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

    def _run(self, point: Point) -> TorchRun:
        return run_with(self.repairs, self.sides, point)

    def _off(self, point: Point, run: TorchRun, loss: bool) -> float:
        theirs = self.sides.jax_run(point)
        return loss_error(run, theirs.loss) if loss else outputs_error(run.outs, theirs.outs)

    def _is_other_order(self, point: Point, run: TorchRun, loss: bool) -> bool:
        """Return whether the port has equal elements in another order, of which torch promises
        none; torch is then given the port's.
        """
        allowed = self.sides.bounds(point).outputs
        program = self.sides.torch_program(point)
        for hypothesis in other_orders(program, run):
            repairs = self.repairs.with_change(hypothesis)
            if self._off(point, repairs.run(program), loss) <= allowed:
                self.repairs = repairs
                self._note("equal elements are in another order than torch's, which promises none")
                return True
        return False

    def _is_out_of_domain(self, run: TorchRun) -> bool:
        """Return whether torch gives NaN at a drawn input, which it does not at the given one."""
        return any(bool(torch.isnan(o).any()) for o in run.outs if o.is_floating_point())

    def _searched(
        self, point: Point, loss: bool
    ) -> tuple[CauseSearch, list[Ref], list[int], FoundChange | None]:
        """Return the search at a point, the ends that differ, the first lost calls, and what was
        found.
        """
        program = self.sides.torch_program(point)
        allowed = self.sides.bounds(point).outputs
        matching = Matching(program, self._run(point), self.sides.side(point))
        ends = matching.ends(loss, allowed)
        region, first = matching.region(ends)
        is_by_arrays = not region
        if is_by_arrays:
            region, first = matching.region_by_arrays(ends)
        # the port's value in place of torch's, where the cause is unknown, is that of one point
        # alone
        witnesses = () if self._opaque else tuple(self.sides.witnesses(point))
        search = CauseSearch(
            program,
            matching,
            self.repairs,
            loss,
            allowed,
            self._budget,
            witnesses,
        )
        found = search.find(FAMILIES, region, first) if region else None
        if found is None and is_by_arrays:
            found = reordered(search, ends)
        for words in search.odd:
            self._note(f"a change could not be tried: {words}")
        return search, ends, first, found

    def _explain(self, point: Point, loss: bool, off: float) -> bool:
        """Add a finding; return whether it is repaired."""
        numbers: dict[str, Any] = {"error": off, "allowed": self.sides.bounds(point).outputs}
        if not loss and not self.repairs.changes and self._are_outputs_exchanged(point, numbers):
            return True
        search, ends, first, found = self._searched(point, loss)
        matching = search.matching
        after = ""
        if point is not self.sides.given:
            self.smallest = point.words or described(point)
            after = self._if_no_input(point)
        if found is not None:
            self._explained(matching, found, numbers, after)
            return True
        if self.sides.jax_program(point).random and not self.pair.train:
            names = [
                n for n, m in self.pair.module.named_modules() if "Dropout" in type(m).__name__
            ]
            words = "expected no random numbers in evaluation, observed the port drawing some"
            self._add(
                "forward",
                names[0] if names else "",
                "dropout-active",
                words,
                **numbers,
            )
            return False
        if not first or (not loss and _has_same_outputs(matching)):
            is_reordered = not loss and _has_same_outputs(matching)
            return self._elsewhere(
                matching,
                ends,
                numbers,
                after,
                is_reordered=is_reordered,
            )
        return self._unknown(
            search,
            point,
            first[0],
            numbers,
            after,
        )

    def _are_outputs_exchanged(self, point: Point, numbers: Mapping[str, Any]) -> bool:
        """Return whether the port has torch's outputs at each other's places or names, which is
        added as a finding, and is put right.
        """
        sides = self.sides
        mine = self._run(point).outs
        order = exchanged(mine, sides.jax_run(point).outs, sides.bounds(point).outputs)
        if order is None:
            return False
        names = sides.output_names()
        moved = [i for i, k in enumerate(order) if i != k]
        listed = " and ".join(names[i] for i in moved)
        words = f"expected the outputs {listed}, observed each other's numbers under these names"
        self._add(
            "forward",
            "",
            "swapped-outputs",
            words,
            **numbers,
        )
        sides.exchange_outputs(order)
        return True

    def _elsewhere(
        self,
        matching: Matching,
        ends: list[Ref],
        numbers: Mapping[str, Any],
        after: str,
        *,
        is_reordered: bool,
    ) -> bool:
        """Add a finding of outputs that differ though no result of torch is lost; return False."""
        program = matching.program
        call = next((program.calls[e.kind] for e in ends if isinstance(e.kind, int)), None)
        differ = nonfinite(matching.run.outs, matching.side.outs)
        cause = "unknown"
        if is_reordered and not differ:
            cause = "order-of-elements"
            words = "expected torch's output, observed its numbers in another order"
        else:
            wanted = _named(call) if call is not None else "torch's output"
            words = f"expected {wanted}, observed other numbers{f': {differ}' if differ else ''}"
        place = call.path if call is not None else ""
        where = call.where or None if call is not None else None
        self._add(
            "forward",
            place,
            cause,
            words,
            after,
            torch=where,
            **numbers,
        )
        return False

    def _explained(
        self, matching: Matching, found: FoundChange, numbers: Mapping[str, Any], after: str
    ) -> None:
        hypothesis = found.hypothesis
        calls = matching.program.calls
        call = calls[hypothesis.at if hypothesis.at is not None else found.place]
        jax_at = (
            matching.where_in_jax(found.run.seen[found.place][0])
            or matching.nearest_in_jax(found.place)[0]
        )
        place = call.path if hypothesis.path is None else hypothesis.path
        words = f"expected {_named(call)}, observed {hypothesis.words}"
        words += (
            " beside what is said above"
            if hypothesis.changes.keys() & self.repairs.changes.keys()
            else ""
        )
        # calls of one line, of which others could not be explained, have one fault
        same = self._unknown_at(call.where or None, jax_at or None)
        if same is not None:
            self._repair(hypothesis, same)
            return
        kind: Kind = "load" if hypothesis.kind == "load" else "forward"
        finding = self._add(
            kind,
            place,
            hypothesis.cause,
            words,
            after,
            torch=call.where or None,
            jax=jax_at or None,
            **numbers,
        )
        self._repair(hypothesis, finding)

    def _unknown_at(self, torch: str | None, jax: str | None) -> PortFinding | None:
        """Return the finding without a cause at a line of both sides, if there is one."""
        found = (repair.finding for repair in self._repaired)
        return next(
            (
                one
                for one in found
                if one.cause == "unknown" and torch and (one.torch, one.jax) == (torch, jax)
            ),
            None,
        )

    def _unknown(
        self,
        search: CauseSearch,
        point: Point,
        index: int,
        numbers: Mapping[str, Any],
        after: str,
    ) -> bool:
        """Add a finding without a cause.

        Return whether the port's value could be put in its place.
        """
        matching = search.matching
        call = matching.program.calls[index]
        where, value = matching.nearest_in_jax(index)
        differ = nonfinite(matching.run.outs, matching.side.outs)
        words = (
            f"expected {_named(call)}, observed other"
            f" numbers{_shown(matching.run.seen[index][0], value)}"
        )
        words += f": {differ}" if differ else ""
        words += search.budget.words
        finding = self._add(
            "forward",
            call.path,
            "unknown",
            words,
            after,
            torch=call.where or None,
            jax=where or None,
            **numbers,
        )
        best = self._value_put_in(search, index)
        if best is None or sum(f.cause == "unknown" for f in self.findings) > 2:
            return False
        # the port's value is a constant: gradients do not pass through it
        before = self._opaque.calls if self._opaque is not None else ()
        self._opaque = _Opaque(point, (*before, *best.changes))
        self._repair(best, finding)
        return True

    def _repair(self, hypothesis: Hypothesis, finding: PortFinding) -> None:
        """Repair torch by what explains a finding."""
        self._repaired.append(Repair(hypothesis, finding))
        self.repairs = self.repairs.with_change(hypothesis)

    def _value_put_in(self, search: CauseSearch, index: int) -> Hypothesis | None:
        """Return the port's value in place of the result of the first lost call or of one behind
        it, if what follows agrees then.
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

    def _statistics(self) -> None:
        if not self.pair.train:
            return
        after = self.sides.torch_program(self.sides.given).after
        before = self.sides.state
        updated = [
            n for n, v in after.items() if is_statistic(n) and not np.array_equal(v, before[n])
        ]
        if not updated:
            return
        if not self.sides.jax_run(self.sides.given).extras:
            self.notes.append(
                f"running statistics are not compared: the port returns no update of {updated[0]}"
            )
            return
        self.judged.append("running statistics")
        allowed = self.sides.bounds(self.sides.given).outputs
        alike: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for one in statistic_faults(self.sides, allowed):
            own = one.name.rpartition(".")[2]
            known = alike.setdefault((one.cause, f"{own} {one.words}"), [])
            known.append((one.name, one.off))
        # one line of the port updates those of all layers
        for (cause, observed), faults in alike.items():
            name = faults[0][0]
            off = max(off for _, off in faults)
            observed = observed.partition(" ")[2]
            words = f"expected {name} after the step as torch has it, observed {observed}"
            if others := [other for other, _ in faults[1:]]:
                shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
                words += f", as of {counted(len(others), 'more buffer')}: {shown}"
            self._add(
                "state",
                name.rpartition(".")[0],
                cause,
                words,
                error=off,
                allowed=allowed,
            )

    # gradients and updates

    def _gradients(self) -> None:
        if not self._is_explained:
            return
        points = self.sides.points
        skip = {str(key[1]) for key in self.repairs.leaves if key[0] == "state"} | self._unloaded
        if self._opaque is not None:
            # the values that were put in are those of one input
            points = [self._opaque.point]
            skip |= self._before(self._opaque)
            self._note(
                "gradients were compared of what comes behind the unknown difference alone: those of"
                " what comes before it go through it"
            )
        self.judged.append("gradients")
        for point in points:
            try:
                program = self.sides.torch_program(point)
                self._run(point)
                run, expected = self.sides.torch_gradients(program, self.repairs)
            except RAISED:
                if point is self.sides.given:
                    raise
                continue
            if not torch.isfinite(run.loss):
                continue
            wrong = wrong_gradients(self.sides, point, expected, skip)
            for _ in range(4):
                if wrong:
                    wrong = self._gradient_fault(point, wrong, skip)
            if self.findings:
                return

    def _before(self, opaque: _Opaque) -> set[str]:
        """Return the parameters and inputs on which calls depend whose results were put in."""
        program = self.sides.torch_program(opaque.point)
        upstream = {*opaque.calls}
        todo = list(opaque.calls)
        found = set[str]()
        while todo:
            for ref in program.calls[todo.pop()].refs:
                if ref.kind == "state":
                    found.add(str(ref.index))
                elif ref.kind == "input":
                    found.add(input_name(int(ref.index)))
                elif isinstance(ref.kind, int) and ref.kind not in upstream:
                    upstream.add(ref.kind)
                    todo.append(ref.kind)
        # a tied parameter has its gradient from both of its places
        tied = {self.map.offsets[n] for n in found if n in self.map.offsets}
        return found | {n for n, start in self.map.offsets.items() if start in tied}

    def _gradient_fault(
        self, point: Point, wrong: dict[str, float], skip: set[str]
    ) -> dict[str, float]:
        fault = place_gradient(self.sides, point, self.repairs, wrong, skip, self._budget)
        program = self.sides.torch_program(point)
        call = program.calls[fault.index] if fault.index is not None else None
        names = ", ".join(sorted(wrong, key=lambda n: -wrong[n])[:3])
        if fault.cause == "unknown" and fault.index in self.repairs.changes:
            # two forms have one value and different gradients, such as a mask that is added or put
            # in place
            self._note(
                f"the gradient of {names} is not judged: it differs where a value does, which is"
                " reported above"
            )
            return {}
        what = (
            f"expected the gradient of {_named(call)}"
            if call is not None
            else "expected another gradient"
        )
        after = f"{stops(self.sides.jax_program(point))}; off at {names}"
        place = call.path if call is not None else next(iter(wrong)).rpartition(".")[0]
        where = call.where or None if call is not None else None
        words = f"{what}, observed {fault.words}"
        off = max(wrong.values())
        self._add(
            "gradient",
            place,
            fault.cause,
            words,
            after,
            torch=where,
            error=off,
        )
        if fault.repairs is not None:
            self.repairs = fault.repairs
        return fault.left

    def _updates(self) -> None:
        pair = self.pair
        if pair.torch_optimizer is None:
            return
        _, gradient = self.sides.torch_gradients(
            self.sides.torch_program(self.sides.given), Repairs()
        )
        set_state(pair.module, self.sides.state)
        updates = Updates(
            self.map,
            self.sides.state,
            self.sides.leaves,
            gradient,
            self._budget,
        )
        if not updates.leaves:
            self.unjudged = (
                "the updates could not be judged: no leaf is a copy of a parameter that torch"
                " trains"
            )
            return
        self.judged.append("updates")
        if (fault := updates.fault()) is None:
            return
        source = self.map.sources(fault.leaf)
        place = source[0].rpartition(".")[0] if fault.partial and source else OPTIMIZER
        words = f"expected the steps of {fault.expected}, observed {fault.words}"
        after = f"; most at {fault.leaf.path}"
        self._add(
            "update",
            place,
            fault.cause,
            words,
            after,
            error=fault.error,
            allowed=STEP,
        )

    # drawn inputs

    def _drawn(self) -> None:
        if self.findings or self._opaque:
            return
        base = self.sides.given
        drawn = DrawnInputs(
            self.sides,
            self.repairs,
            self._options,
            self._budget,
        )
        found = drawn.search()
        for note in drawn.notes:
            self._note(note)
        if drawn.asked:
            self.judged.append(drawn.words)
        if found is None:
            return
        self.smallest = found.point.words
        if found.cause:
            words = f"expected torch's function at these sizes, too, observed {found.words}"
            self._add(
                "forward",
                "",
                found.cause,
                words,
                self._if_no_input(found.point),
            )
            return
        self.sides.points[1:] = [found.point]
        explained = self._values(loss=False)
        same = found.point.shapes == base.shapes and self.pair.torch_loss is not None
        if explained and same and not self.findings:
            self._values(loss=True)

    def _if_no_input(self, point: Point) -> str:
        """Return what is special in a drawn input, and how to exclude it."""
        own = special(point, self.sides.given)
        key = "draw" if point.shapes == self.sides.given.shapes else "sizes"
        words = "; both sides agree at the given inputs, and differ at drawn ones"
        words += f": {own}" if own else ""
        if self.pair.draw is not None:
            return words
        return f"{words}. If these are no inputs of the model, exclude them by `{key}`"

    def _precision(self) -> None:
        """Report what is computed in a lower precision; it changes no verdict."""
        if self.findings:
            return
        dtype = self._options.dtype
        try:
            for one in precision_findings(self.sides, dtype):
                if one.error <= one.allowed:
                    self._note(one.words)
                    continue
                self._add(
                    *("precision", "", "low-precision", one.words),
                    jax=one.line,
                    error=one.error,
                    allowed=one.allowed,
                )
        except Exception as problem:  # not every model runs in every dtype
            self._note(
                f"{dtype} was not compared: {type(problem).__name__}: {problem}".splitlines()[0][
                    :200
                ]
            )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # not blind

    def _plant(self) -> None:
        """Plant usual faults in the torch program, and say which of them was found by how much."""
        if self.findings:
            return
        program = self.sides.torch_program(self.sides.given)
        side = self.sides.jax_run(self.sides.given).outs
        allowed = self.sides.bounds(self.sides.given).outputs

        def tried(planted: _Planted) -> Explanation[_Planted] | None:
            try:
                changed = self.repairs.with_change(planted.hypothesis).run(program)
            except RAISED:
                return None
            except Exception as error:
                self._note(f"a fault could not be planted: {of_ours(error)}")
                return None
            planted.off = outputs_error(changed.outs, side)
            is_found = planted.off > allowed and np.isfinite(planted.off)
            # the smallest fault that is found says how exact the comparison is
            return Explanation(planted, planted.is_last, -planted.off) if is_found else None

        for faults in (self._usual_faults(program), self._moved_parameters(program)):
            found = best_explanation(faults, tried, Budget())
            if found is not None:
                off = f"off by {found.value.off:.2g} where {allowed:.1g} is allowed"
                self.planted = f"{found.value.words}: found, {off}"
                return
        self.unjudged = (
            self.unjudged
            or "no planted fault was found: the outputs do not depend on the parameters"
        )

    def _usual_faults(self, program: TorchProgram) -> Iterator[_Planted]:
        """Yield usual faults of some calls."""
        run = self.repairs.run(program)
        calls = [
            i
            for i in sorted(program.needed)
            if program.calls[i].path != LOSS and not program.calls[i].mutates
        ]
        rng = np.random.default_rng(self._seed)
        for index in map(int, rng.permutation(calls)[:PLANTED]):
            call = program.calls[index]
            outs = run.seen[index]
            if outs and isinstance(outs[0], torch.Tensor):
                args, kwargs = with_tensors((call.args, call.kwargs), run.get)
                for one in islice(mistakes(index, call, args, kwargs, outs[0]), 3):
                    words = f"{one.cause} ({one.words}) at {call.path or 'the model'}"
                    yield _Planted(one, words)

    def _moved_parameters(self, program: TorchProgram) -> Iterator[_Planted]:
        """Yield parameters that are a little off, for programs of which no usual fault is known."""
        for name in self.map.names:
            if name in program.parameters:
                scaled = Hypothesis("", "", leaves={("state", name): lambda v: v * (1 + 1e-6)})
                yield _Planted(scaled, f"{name} times 1 + 1e-6", is_last=True)


@dataclass(frozen=True)
class _Opaque:
    """An input at which the port's values were put in place of torch's, and the calls where."""

    point: Point
    calls: tuple[int, ...]


@dataclass(frozen=True)
class _Start:
    """A leaf that stays at its initial value: its path, and its numbers."""

    path: str
    values: Array


@dataclass
class _Planted:
    """A fault that is planted in the torch program.

    Attributes:
        hypothesis: the change.
        words: what it is.
        is_last: whether nothing else is planted where this one is found.
        off: relative error that it makes.
    """

    hypothesis: Hypothesis
    words: str
    is_last: bool = False
    off: float = 0.0


def _has_same_numbers(expected: Any, observed: Array) -> bool:
    """Return whether an output of the port has torch's numbers, in whatever order."""
    wanted = np.sort(array(expected).reshape(-1))
    found = np.sort(array(observed).reshape(-1))
    return wanted.shape == found.shape and error(found, wanted) <= SAME


def _has_same_outputs(matching: Matching) -> bool:
    pairs = zip(matching.run.outs, matching.side.outs, strict=False)
    return all(_has_same_numbers(mine, other) for mine, other in pairs)


def _named(call: OperationCall) -> str:
    return f"{call.label} as at {call.where}" if call.where else call.label


def _shown(expected: Any, observed: Array | None) -> str:
    wanted = array(expected).reshape(-1) if isinstance(expected, torch.Tensor) else np.zeros(0)
    if observed is None or observed.size != wanted.size:
        return ""
    at = int(np.argmax(np.where(np.isfinite(wanted), np.abs(wanted), 0))) if wanted.size else 0
    return f" (such as {observed.reshape(-1)[at]:.6g} for {wanted[at]:.6g})" if wanted.size else ""


def judged(
    pair: Port,
    notes: list[str],
    label: str,
    options: PortOptions,
    baseline: Sequence[Accepted] = (),
) -> PortResult:
    """Return the verdict on a pair; its module's state is put back.

    Args:
        pair: in float64.
        notes: of what was ignored.
        label: the pair's name.
        options: of the comparison.
        baseline: what the project accepts.

    Raises:
        UsageError: the pair cannot be judged.
    """
    start = time.monotonic()
    state = state_of(pair.module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the programs are small
    judge = PairJudge(
        pair,
        notes,
        options,
        baseline,
    )
    try:
        # recorded calls such as zeros(2, 3) take the default dtype each time that they run
        with warnings.catch_warnings(), np.errstate(all="ignore"), default_dtype():
            warnings.simplefilter(
                "ignore"
            )  # changed programs overflow, and frameworks warn about their own internals
            judge.run()
    finally:
        torch.set_num_threads(threads)
        set_state(pair.module, state)
    found = judge.findings
    return PortResult(
        label,
        violations=tuple(one for one in found if one.kind != "precision"),
        precision=tuple(one for one in found if one.kind == "precision"),
        accepted=tuple(judge.accepted),
        map=judge.map_rows,
        seconds=time.monotonic() - start,
        judged=tuple(judge.judged),
        notes=tuple(judge.notes),
        planted=judge.planted,
        unjudged=judge.unjudged,
        smallest=judge.smallest,
        files=_files(label, [*found, *judge.accepted]),
    )


def _files(label: str, findings: Sequence[PortFinding]) -> tuple[Judged, ...]:
    """Return the files that a verdict speaks of: the pair's own, and those of the lines."""
    places = [label] + [one.where for one in findings if one.where]
    files = dict.fromkeys(place.rpartition(":")[0] for place in places)
    return tuple((file, None) for file in files if file)
