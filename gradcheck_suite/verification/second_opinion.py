"""JAX's second opinion on a user's problem: large-batch gradients by the bridge, compared with
torch's.

It is computed after the loop was judged, because it is about the problem and not about the loop,
and because each set of shapes needs a program that takes seconds to translate and compile. The most
common shapes come first, within a time budget.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

import torch

from gradcheck_suite.bridge import BridgeError, Lowered, arguments_of, lower, wrong_backwards
from gradcheck_suite.core.case import Case
from gradcheck_suite.core.comparison import Vector
from gradcheck_suite.core.contract import Batch, Problem
from gradcheck_suite.core.options import SECOND_OPINION_S
from gradcheck_suite.loops.reset_modes import plain
from gradcheck_suite.reference.large_batch import (
    REFERENCES,
    Reference,
    WindowReference,
    disagreement,
)
from gradcheck_suite.run.instance import map_leaves, tensor_leaves
from gradcheck_suite.run.runner import run_loop

Shapes = tuple[Any, ...]
MOVED_EVERY = 5
"""One case in so many is also computed at parameters that an optimizer has moved, where it has several steps: a fault
of torch may show there alone."""


@dataclass
class SecondOpinion:
    """The result of the second opinion.

    Attributes:
        budget_s: seconds after which no further window is computed.
        windows: number of windows.
        answered: number of windows with a gradient from JAX.
        moved: number of these at parameters that an optimizer has moved.
        shapes: number of sets of shapes that these windows have.
        findings: windows on which JAX's gradient differs from torch's by more than rounding, one
            line each.
        refused: number of windows that the bridge cannot translate.
        refusal: why it cannot translate the first of them, or None.
        rewrite: lines of Python that help there; empty where none are known.
    """

    budget_s: float = SECOND_OPINION_S
    windows: int = 0
    answered: int = 0
    moved: int = 0
    shapes: int = 0
    findings: list[str] = field(default_factory=list)
    refused: int = 0
    refusal: str | None = None
    rewrite: str = ""

    def summary(self) -> str:
        """Return a sentence about the windows that JAX computed, and the lines that help where it
        could not.
        """
        return (
            f"{self._sentence()}:\n{indent(self.rewrite, '    ')}"
            if self.rewrite
            else self._sentence()
        )

    def _sentence(self) -> str:
        if not self.answered:
            return (
                "JAX gives no second opinion on the problem:"
                f" {self.refusal or 'no window was judged'}"
            )
        shapes = "1 shape" if self.shapes == 1 else f"{self.shapes} shapes"
        text = (
            f"JAX gave a second opinion on {self.answered} of {self.windows} windows, of {shapes}"
        )
        if self.moved:
            text += f", {self.moved} of them at parameters that an optimizer has moved"
        if not self.findings:
            text += ", and agrees with torch"
        if self.refusal is not None:
            text += f"; {self.refused} cannot be translated: {self.refusal}"
        if self.answered + self.refused < self.windows:
            text += f"; for the others the {self.budget_s:g} s that this may take did not suffice"
        return text


@dataclass(frozen=True)
class _Asked:
    """A window on which JAX is asked: of the initial parameters, or the last one of a run that
    moves them.
    """

    reference: Reference
    index: int
    moves: bool

    def window(self) -> WindowReference | None:
        """Return the window; None where the run that should move the parameters fails."""
        if not self.moves:
            return self.reference.window(self.index)
        observations = run_loop(plain, self.reference.instance).observations
        if len(observations) < self.reference.instance.case.plan.steps:
            return None
        return self.reference.window(self.index, observations[-1].parameters)


def _asked(cases: Iterable[Case], problem: Problem) -> Iterator[_Asked]:
    """Yield every window of the cases, and the last one of some after the steps of an optimizer."""
    for number, case in enumerate(cases):
        reference = REFERENCES.get(case, problem)
        last = len(case.plan.windows) - 1
        yield from (_Asked(reference, index, moves=False) for index in range(last + 1))
        if number % MOVED_EVERY == 0 and case.plan.steps > 1:
            moving = case.replace(optimizer=case.optimizer or "normalized")
            yield _Asked(REFERENCES.get(moving, problem), last, moves=True)


def second_opinion(
    cases: Iterable[Case], problem: Problem, *, budget_s: float = SECOND_OPINION_S
) -> SecondOpinion:
    """Compute the large-batch gradients of a user's problem in JAX, for every window of some cases.

    Loops are judged by torch's gradient alone. A difference is a finding about the problem, torch,
    JAX or the bridge.
    """
    opinion = SecondOpinion(budget_s)
    started = time.perf_counter()
    groups: dict[Shapes, list[_Asked]] = defaultdict(list)
    for asked in _asked(cases, problem):
        window = asked.reference.window(asked.index)
        groups[_shapes(window.model(), _batch(window))].append(asked)
        opinion.windows += 1
    for group in sorted(groups.values(), key=len, reverse=True):
        lowered: Lowered | None = None
        functions: tuple[type, ...] = ()
        before = opinion.answered
        for asked in group:
            # one answer at least, however short the budget: a summary of nothing helps nobody
            if time.perf_counter() - started > budget_s and (opinion.answered or opinion.refused):
                return opinion
            found = asked.window()
            # the run that should have moved the parameters failed, which is no window of the
            # opinion
            if found is None:
                opinion.windows -= 1
                continue
            try:
                if lowered is None:
                    functions = _wrong_backwards(found, opinion)
                    lowered = _lowered(found, functions)
                finding = _compare(found, lowered, functions)
            except BridgeError as error:
                # other shapes may be translated all the same
                if opinion.refusal is None:
                    opinion.refusal = error.reason
                    opinion.rewrite = error.rewrite
                opinion.refused += len(group) - (opinion.answered - before)
                break
            opinion.answered += 1
            opinion.moved += asked.moves
            if finding:
                opinion.findings.append(finding)
        else:
            opinion.shapes += 1
    return opinion


def _wrong_backwards(window: WindowReference, opinion: SecondOpinion) -> tuple[type, ...]:
    """Note the custom functions whose backward is not the derivative, each as one finding, and
    return them.

    The windows are then compared with these backwards in place, so that another fault shows beside
    them.
    """
    found = wrong_backwards(window.model(), window.reference.instance.problem.loss, _batch(window))
    for wrong in found:
        name = f"{wrong.function.__name__}.backward "
        # once for each function, though every shape meets it
        if not any(finding.startswith(name) for finding in opinion.findings):
            opinion.findings.append(str(wrong))
    return tuple(wrong.function for wrong in found)


def _compare(window: WindowReference, lowered: Lowered, functions: tuple[type, ...]) -> str | None:
    if disagreement(window, _gradient(window, lowered)) is None:
        return None
    # a model's constants may depend on its seed: a difference counts only with this model's own
    # program
    return disagreement(window, _gradient(window, _lowered(window, functions)))


def _lowered(window: WindowReference, functions: tuple[type, ...]) -> Lowered:
    return lower(
        window.model(),
        window.reference.instance.problem.loss,
        _batch(window),
        own_backwards=functions,
    )


def _gradient(window: WindowReference, lowered: Lowered) -> Vector:
    _, gradient, _ = lowered.value_and_gradient(*arguments_of(window.model(), _batch(window)))
    return window.reference.join(gradient)


def _batch(window: WindowReference) -> Batch:
    return window.reference.instance.batch(window.items, torch.float64)


def _shapes(model: torch.nn.Module, batch: Batch) -> Shapes:
    """Return what a program is specialised on: shapes, dtypes and the parts of the batch that are
    not tensors.
    """
    data = tuple((tuple(t.shape), t.dtype) for t in tensor_leaves(batch))
    parameters = tuple(
        (name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()
    )
    return data, repr(map_leaves(lambda _: None, batch)), parameters
