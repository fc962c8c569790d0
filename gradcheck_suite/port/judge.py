"""The judgement of a pair, in the order in which data flows: parameters, outputs, statistics, loss,
gradients, steps.

A difference that is explained is repaired in the torch program, and the judgement goes on behind
it: three faults of one model are three findings.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from gradcheck_suite.core.causes import CAUSES, is_cause
from gradcheck_suite.core.formats import Accepted
from gradcheck_suite.core.options import PortOptions
from gradcheck_suite.core.text import counted, suggestion
from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.backward import judge_gradients
from gradcheck_suite.port.budget import SECONDS, Budget
from gradcheck_suite.port.changes import is_refusal, of_ours
from gradcheck_suite.port.drawing import author_points, binding_points, resampled
from gradcheck_suite.port.drawn_inputs import DrawnInputs
from gradcheck_suite.port.forward import ForwardComparison
from gradcheck_suite.port.judgement import Judgement
from gradcheck_suite.port.loading import judge_loading, judge_ties
from gradcheck_suite.port.mapping import StateMap
from gradcheck_suite.port.pair import (
    JaxModel,
    Port,
    default_dtype,
    is_statistic,
    set_state,
    state_of,
)
from gradcheck_suite.port.planting import judge_planted
from gradcheck_suite.port.precision import precision_findings
from gradcheck_suite.port.report import PortReport
from gradcheck_suite.port.result import PortResult
from gradcheck_suite.port.running_statistics import statistic_faults
from gradcheck_suite.port.search import Repairs
from gradcheck_suite.port.sides import Point, Sides
from gradcheck_suite.port.sizes import expect_sizes
from gradcheck_suite.port.updates import STEP, Updates

OPTIMIZER = "optimizer"
"""The place of a difference between optimizers."""


@dataclass(frozen=True)
class _Stage:
    """A part of a judgement.

    Attributes:
        name: what is said not to be judged where it fails or the time is over.
        run: the part.
    """

    name: str
    run: Callable[[], None]


class PairJudge:
    """Runs the stages of the judgement of one pair.

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
        self._pair = pair
        self._options = options
        self._budget = Budget()
        expect_sizes(pair.sizes)
        for name in pair.accept:
            if not is_cause(name):
                raise UsageError(f"accept: {name!r} is no cause{suggestion(name, CAUSES)}")
        entries = [
            *baseline,
            *(Accepted.read(text, "--accept") for text in options.accept),
            *(Accepted.read(name, "accept of the pair") for name in pair.accept),
        ]
        self.report = PortReport(entries, notes)

    def run(self) -> None:
        """Judge the pair.

        Raises:
            UsageError: it cannot be judged.
        """
        for stage in self._stages():
            if self._budget.late:
                late = f"not judged from {stage.name} on: {SECONDS:.0f} s were over"
                self.report.leave_out(late)
                return
            if not self._is_done(stage):
                return

    def _stages(self) -> Iterator[_Stage]:
        """Yield the stages; of the first two each needs the one before it, and all others both."""
        yield _Stage("map", self._make_map)
        yield _Stage("both_sides", self._make_sides)
        judgement = self._judgement
        if not judgement.program.outs:
            return
        forward = ForwardComparison(judgement)
        yield _Stage("loading", partial(judge_loading, judgement))
        yield _Stage("outputs", forward.judge_outputs)
        yield _Stage("statistics", partial(_judge_statistics, judgement))
        yield _Stage("loss", forward.judge_loss)
        yield _Stage("gradients", partial(judge_gradients, judgement))
        yield _Stage("untied", partial(judge_ties, judgement))
        yield _Stage("updates", partial(_judge_updates, judgement))
        yield _Stage("drawn", partial(_judge_drawn, judgement, forward))
        yield _Stage("plant", partial(judge_planted, judgement))
        yield _Stage("precision", partial(_judge_precision, judgement))

    def _is_done(self, stage: _Stage) -> bool:
        """Run a stage; return whether the next ones can be run.

        An exception of this package, or of a framework where nobody expected it, ends its stage
        alone: what is missing is said, and the rest is judged.
        """
        try:
            stage.run()
        except UsageError:
            raise
        except Exception as error:
            self.report.leave_out(f"the stage {stage.name!r} was not judged: {of_ours(error)}")
            return stage.name not in ("map", "both_sides")
        return True

    def _make_map(self) -> None:
        self._model = JaxModel(self._pair)
        self._map = StateMap(self._pair, self._model)
        self.report.map_rows = self._map.rows()

    def _make_sides(self) -> None:
        """Trace both sides, and choose the points at which they are compared."""
        sides = Sides(self._pair, self._model, self._map, 101 + self._options.seed)
        self._judgement = Judgement(self._pair, sides, self._options, self.report, self._budget)
        for note in sides.outputs.notes:
            self.report.note(note)
        for words in sides.outputs.unmatched:
            self.report.add("forward", "", "shape", words)
        base = sides.given
        rng = np.random.default_rng(7 + self._options.seed)
        if self._pair.draw is not None:  # what the author draws is the domain
            sides.points += author_points(base, self._pair.draw, 2, self._options.seed)
            return
        for kind in ("other", "narrow"):
            inputs = tuple(resampled(x, rng, kind) for x in base.inputs)
            sides.points.append(Point(inputs, tuple(resampled(x, rng) for x in base.targets)))
        sides.points += binding_points(
            base, sides.torch_program(base), sides.points[1:], self._options.seed
        )


def _judge_statistics(judgement: Judgement) -> None:
    """Compare running statistics after a forward in train mode."""
    if not judgement.pair.train:
        return
    sides = judgement.sides
    report = judgement.report
    after = judgement.program.after
    before = sides.state
    updated = [n for n, v in after.items() if is_statistic(n) and not np.array_equal(v, before[n])]
    if not updated:
        return
    if not sides.jax_run(sides.given).extras:
        report.note(
            f"running statistics are not compared: the port returns no update of {updated[0]}"
        )
        return
    report.judged.append("running statistics")
    allowed = judgement.allowed(sides.given)
    alike: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for one in statistic_faults(sides, allowed):
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
        place = name.rpartition(".")[0]
        report.add("state", place, cause, words, error=off, allowed=allowed)


def _judge_updates(judgement: Judgement) -> None:
    """Compare the steps of the optimizers on torch's gradients."""
    pair = judgement.pair
    sides = judgement.sides
    report = judgement.report
    if pair.torch_optimizer is None:
        return
    _, gradient = sides.torch_gradients(judgement.program, Repairs())
    set_state(pair.module, sides.state)
    updates = Updates(
        judgement.map,
        sides.state,
        sides.leaves,
        gradient,
        judgement.budget,
    )
    if not updates.leaves:
        report.unjudged = (
            "the updates could not be judged: no leaf is a copy of a parameter that torch trains"
        )
        return
    report.judged.append("updates")
    fault = updates.fault()
    for words in updates.odd:
        report.note(f"a setting could not be tried: {words}")
    if fault is None:
        return
    source = judgement.map.sources(fault.leaf)
    place = source[0].rpartition(".")[0] if fault.partial and source else OPTIMIZER
    words = f"expected the steps of {fault.expected}, observed {fault.words}"
    after = f"; most at {fault.leaf.path}"
    report.add("update", place, fault.cause, words, after, error=fault.error, allowed=STEP)


def _judge_drawn(judgement: Judgement, forward: ForwardComparison) -> None:
    """Search for other inputs on which the sides differ, where they agree at the given ones."""
    sides = judgement.sides
    report = judgement.report
    if report.findings or judgement.opaque:
        return
    base = sides.given
    drawn = DrawnInputs(
        sides,
        judgement.repairs,
        judgement.options,
        judgement.budget,
    )
    found = drawn.search()
    for note in drawn.notes:
        report.note(note)
    if drawn.asked:
        report.judged.append(drawn.words)
    if found is None:
        return
    report.smallest = found.point.words
    if found.cause:
        words = f"expected torch's function at these sizes, too, observed {found.words}"
        report.add("forward", "", found.cause, words, judgement.if_no_input(found.point))
        return
    sides.points[1:] = [found.point]
    explained = forward.is_explained(loss=False)
    same = found.point.shapes == base.shapes and judgement.pair.torch_loss is not None
    if explained and same and not report.findings:
        forward.is_explained(loss=True)


def _judge_precision(judgement: Judgement) -> None:
    """Report what is computed in a lower precision; it changes no verdict."""
    report = judgement.report
    if report.findings:
        return
    dtype = judgement.options.dtype
    try:
        for one in precision_findings(judgement.sides, dtype):
            if one.error <= one.allowed:
                report.note(one.words)
                continue
            report.add(
                *("precision", "", "low-precision", one.words),
                jax=one.line,
                error=one.error,
                allowed=one.allowed,
            )
    except Exception as problem:  # not every model runs in every dtype
        said = f"{type(problem).__name__}: {problem}".splitlines()[0]
        why = said if is_refusal(problem) else of_ours(problem)
        report.note(f"{dtype} was not compared: {why}"[:200])


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
            # changed programs overflow, and frameworks warn about their own internals
            warnings.simplefilter("ignore")
            judge.run()
    finally:
        torch.set_num_threads(threads)
        set_state(pair.module, state)
    return judge.report.result(label, time.monotonic() - start)
