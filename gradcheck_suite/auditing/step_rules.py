"""What a step shows by itself and beside the step before it: a step without passes, replaced
parameters, gradients over one memory, steps after every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from gradcheck_suite.auditing.replay import BackwardPass, StepWindow
from gradcheck_suite.auditing.rules import Need, Rule, Sighting
from gradcheck_suite.auditing.vectors import size

FEWEST_SINGLES = 3
"""Windows of one pass in turn that show an optimizer which steps after every micro-batch."""


@dataclass(frozen=True)
class StepEvidence:
    """A step, and what came before it.

    Attributes:
        window: as it was replayed.
        last: the optimizer's window before it, or None.
        since: the passes since then, of all optimizers.
        has_unseen: whether gradients arrived from a pass that was not entered from Python.
        is_stepped: whether an optimizer has stepped on some of these parameters.
        given: the accumulation steps that the user states.
        singles: windows of one pass in turn, this one included.
    """

    window: StepWindow
    last: StepWindow | None
    since: Sequence[BackwardPass]
    has_unseen: bool
    is_stepped: Callable[[Collection[int]], bool]
    given: int | None = None
    singles: int = 0

    @cached_property
    def is_empty(self) -> bool:
        """Whether nothing went backward to the step, and it is not of an earlier window's."""
        window = self.window
        stands = any(window.coefficients.values()) and window.edit != "all reset"
        return not window.passes and not stands

    @cached_property
    def gradients(self) -> Sequence[np.ndarray]:
        """What stands in the `.grad` of the parameters."""
        found = self.window.step.gradients.values()
        return [one for one in found if isinstance(one, np.ndarray)]

    @cached_property
    def has_gradient(self) -> bool:
        """Whether something other than 0 stands there."""
        return any(map(size, self.gradients))

    @cached_property
    def reached(self) -> Collection[int]:
        """The parameters that passes have reached since the step before."""
        return set(chain.from_iterable(seen.records[0].arrivals for seen in self.since))

    @cached_property
    def is_replaced(self) -> bool:
        """Whether parameters were replaced between backward and the step."""
        if self.last is None or {*self.window.keys} <= {*self.last.keys}:
            return False
        # a layer that is only added or frozen has no pass of the parameters that went
        old = {*self.last.keys} - {*self.window.keys}
        return any(seen.has(old) for seen in self.since)


E = StepEvidence
Found = Sighting | bool | None


# Why a step cannot be judged.


def _is_of_zero(e: E) -> bool:
    # ZeRO fills the `.grad` of its flat copies itself: no pass of autograd arrives there
    return e.is_empty and e.has_gradient and (e.window.step.trainer or "").startswith("deepspeed")


def _is_frozen(e: E) -> bool:
    return _is_idle(e) and e.window.step.frozen.issuperset(e.window.keys)


def _is_orphaned(e: E) -> bool:
    return _is_idle(e) and bool(e.reached) and not e.is_stepped(e.reached)


def _is_idle(e: E) -> bool:
    """Return whether a step has no pass and no gradient, and moves nothing."""
    return e.is_empty and not e.has_gradient and not e.is_replaced and not _on_zeros(e)


SEEN_PASSES = Need[E](
    "unseen-pass",
    "`.grad` has a gradient that no backward pass started from Python has brought: the program"
    " has put it there (from another copy of the model, from a checkpoint), it came from C++"
    " (TorchScript, an extension), or stood there when the audit began",
    lambda e: e.has_unseen,
)
OWN_PARAMETERS = Need[E](
    "flat-copies",
    "DeepSpeed's ZeRO steps on flat copies of its own, which no backward pass reaches",
    _is_of_zero,
)
BROUGHT = Need[E](
    "written-gradient",
    "the gradients of this step were written by hand to parameters that no backward pass"
    " reaches (master copies, `torch.func`, forward mode, a backward that is called in C++)",
    lambda e: e.is_empty and e.has_gradient,
    "where they are copies, give each one the gradient of one parameter (`copy.grad ="
    " p.grad.float()`), or step on the module's own parameters while the script is audited; in"
    " place of `torch.func.grad` call `torch.autograd.grad`",
)
UNFROZEN = Need[E](
    "frozen-parameters",
    "every parameter of the optimizer is frozen (`requires_grad` is False)",
    _is_frozen,
)
STEPPED = Need[E](
    "unstepped-parameters",
    "no parameter that backward reached is in an optimizer that steps: was the model copied, moved"
    " or replaced after the optimizer was made?",
    _is_orphaned,
    "",
)
PASSES = Need[E]("no-pass", "nothing went backward to this optimizer since its last step", _is_idle)
NEEDS = (SEEN_PASSES, OWN_PARAMETERS, BROUGHT, UNFROZEN, STEPPED, PASSES)
"""What each rule of a step needs, the surest reason first."""
OF_COPIES = (OWN_PARAMETERS, BROUGHT)
"""The reasons of a step on copies of the parameters."""
STEP_ALONE = (UNFROZEN, STEPPED, PASSES)
"""The reasons that are said of the step alone, without a line."""


# What a step shows.


def _on_zeros(e: E) -> bool:
    """Ask whether a step on gradients of 0 moves parameters."""
    if not e.is_empty or not e.gradients or e.has_gradient:
        return False
    # momentum, Adam's averages and weight decay move a parameter on a gradient of 0, plain SGD does
    # not
    moved = [one for one in e.window.step.moved.values() if isinstance(one, np.ndarray)]
    return any(map(size, moved))


def _is_replaced(e: E) -> Found:
    """Ask whether parameters were replaced between backward and the step."""
    if not e.is_replaced:
        return None
    assert e.last is not None
    new = min({*e.window.keys} - {*e.last.keys})
    return Sighting(key=new, where=e.since[-1].site)


def _is_overlapping(e: E) -> Found:
    """Ask whether the `.grad` of parameters lie over the same memory."""
    overlapping = e.window.step.overlapping
    # where gradients lie is looked at in an optimizer's first step
    return Sighting(keys=overlapping) if overlapping and e.last is None else None


def _is_per_pass(e: E) -> Found:
    """Ask whether the optimizer steps after every micro-batch, where the user states a window."""
    # `!=` and not `<`: it is said once, by the window that completes the row
    if e.given is None or e.given < 2 or e.singles != FEWEST_SINGLES:
        return None
    return Sighting({"steps": e.given})


STEP_RULES: Sequence[Rule[E]] = (
    Rule[E](
        "step on zeros",
        "repeated-step",
        _on_zeros,
        "step() was called without a backward() since the previous step: `.grad` is 0, and the step"
        " moves parameters once more (by momentum, averages or decay)",
        NEEDS,
        ("replaced",),
        causes=("zeros",),
        kind="step-count",
    ),
    Rule[E](
        "replaced",
        "no-gradient",
        _is_replaced,
        "parameters were replaced between backward and the step, and their gradient is on the old"
        " ones",
        NEEDS,
    ),
    Rule[E](
        "overlapping gradients",
        "not-linear",
        _is_overlapping,
        "their `.grad` lie over the same memory, so that what arrives at one is added to the others",
        NEEDS,
        causes=("between-passes",),
    ),
)
"""What a step shows beside the sum of its window."""
PER_PASS = Rule[E](
    "step per pass",
    "step-per-micro-batch",
    _is_per_pass,
    "the optimizer steps after every micro-batch, where accumulation_steps = {steps}",
    kind="step-count",
)
"""What several windows show, each of which is right."""
