"""Modules that a backward calls once more, as a checkpoint of any form does.

What is called again with the same inputs must give what it gave in the forward: with other random
numbers of whatever generator, in another mode, or with other state, the gradient is that of another
function. Results are compared, and not the causes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.auditing.samples import (
    BatchedSampler,
    Fingerprint,
    Raw,
    fingerprint,
    is_same_fingerprint,
    read_samples,
)
from gradcheck_suite.auditing.vectors import distance

CHECKPOINT = "torch.utils.checkpoint"
OTHER = {torch.float64: 2.0**-26, torch.float32: 2.0**-10, torch.float16: 2.0**-7}
"""Relative difference from which on outputs are others, and not rounded otherwise."""
OTHER_COARSE = 2.0**-4
"""The same of bfloat16 and what is coarser."""


@dataclass(frozen=True)
class _ModuleCall:
    """One call of a module.

    Attributes:
        inputs: a fingerprint of each tensor that it was given.
        given: samples of those with numbers that may be rounded.
        outputs: the same of what it has returned.
        dtypes: of `outputs`.
        training: its mode.
    """

    inputs: list[Fingerprint]
    given: list[Raw]
    outputs: list[Raw]
    dtypes: tuple[torch.dtype, ...]
    training: bool

    def has_inputs_of(self, other: _ModuleCall) -> bool:
        """Return whether both were given the same, to the bit."""
        return len(self.inputs) == len(other.inputs) and all(
            map(is_same_fingerprint, self.inputs, other.inputs)
        )

    def has_outputs_of(self, other: _ModuleCall) -> bool:
        """Return whether both have returned the same, but for rounding."""
        allowed = [OTHER.get(dtype, OTHER_COARSE) for dtype in self.dtypes]
        return self.dtypes == other.dtypes and _are_near(self.outputs, other.outputs, allowed)


def _are_near(one: Sequence[Raw], other: Sequence[Raw], allowed: Sequence[float]) -> bool:
    """Return whether samples differ by no more than is allowed, relative to their sizes."""
    if len(one) != len(other):
        return False
    values = read_samples([*one, *other])
    pairs = zip(values[: len(one)], values[len(one) :], allowed, strict=True)
    # what is not finite is compared with nothing
    return not any(distance(now, then) > most for now, then, most in pairs)


def _numbers(values: Iterable[Any]) -> list[torch.Tensor]:
    return [
        one.detach()
        for one in values
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel()
    ]


def _call(training: bool, given: Any, output: Any) -> _ModuleCall:
    values = pytree.tree_leaves(given)
    inputs = [fingerprint(one) for one in values if isinstance(one, torch.Tensor)]
    numbers = _numbers(values)
    outputs = _numbers(pytree.tree_leaves(output))
    found, _ = BatchedSampler().taken([*numbers, *outputs], whole=True)
    return _ModuleCall(
        inputs,
        found[: len(numbers)],
        found[len(numbers) :],
        tuple(one.dtype for one in outputs),
        training,
    )


def _versions(values: Any) -> list[int]:
    """Return how often each tensor was written to in place."""
    tensors = [one for one in pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]
    return [0 if one.is_inference() else one._version for one in tensors]


def _is_in_checkpoint() -> bool:
    """Return whether torch's own checkpoint computes something again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def may_be_repeated() -> bool:
    """Return whether what computes now may be computed once more by a backward.

    A checkpoint calls without a gradient, or under hooks on what is saved, or in the `forward` of an
    `autograd.Function`, whose first argument is `ctx` by torch's convention. To note all other calls
    costs a small transformer a hundredth of 160 windows.
    """
    if not torch.is_grad_enabled():
        return True
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",):
            return True
        frame = frame.f_back
    return False


class RepeatedCalls:
    """Compares what a backward calls once more with what the forward has called.

    Attributes:
        said: what the first module does otherwise; empty for nothing.
    """

    def __init__(self) -> None:
        self.said = ""
        self._calls: defaultdict[int, list[_ModuleCall]] = defaultdict(list)
        self._versions: defaultdict[int, list[list[int]]] = defaultdict(list)

    def forget(self) -> None:
        """Forget the calls of a window that is over."""
        self._calls.clear()
        self._versions.clear()
        self.said = ""

    def begin(self, module: torch.nn.Module, arguments: Any) -> None:
        """Note that a call of the forward begins, where a backward may make it once more."""
        if may_be_repeated():
            self._versions[id(module)].append(_versions(arguments))

    def note(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        """Note a call of the forward whose beginning was noted.

        One that writes to its input, as `ReLU(inplace=True)` does, is left out: what it was given is
        known no more when it has returned.
        """
        began = self._versions.get(id(module))
        if not began:
            return
        then = began.pop()
        # keyword arguments come last, and are not told when a call begins
        if then == _versions(given)[: len(then)]:
            self._calls[id(module)].append(_call(module.training, given, output))

    def enter(self, module: torch.nn.Module, given: Any) -> None:
        """Compare what a checkpoint gives to a module inside of a backward with the forward.

        It may end before the module returns: when it has all that the backward reads. A function of
        one's own may call a module at other inputs on purpose.
        """
        known = self._calls.get(id(module))
        if not known or self.said or not _is_in_checkpoint():
            return
        now = _call(module.training, given, None).given
        rough = [OTHER_COARSE] * len(now)
        if not any(_are_near(now, then.given[: len(now)], rough) for then in known):
            name = type(module).__name__
            self.said = (
                f"a checkpoint calls a module ({name}) again inside of the backward with other"
                " inputs than in the forward: what it computes before that call is not the same"
                " again (random numbers, a mode, other state)"
            )

    def compare(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        """Compare a call inside of a backward with those of the forward."""
        known = self._calls.get(id(module))
        if not known or self.said:
            return
        now = _call(module.training, given, output)
        same = [then for then in known if now.has_inputs_of(then)]
        name = type(module).__name__
        if not same:
            return
        if any(now.has_outputs_of(then) for then in same):
            return
        why = "it uses other random numbers or other state"
        if all(then.training != now.training for then in same):
            modes = "eval", "train"
            was = modes[same[0].training]
            why = f"it was in {was} mode, and is in {modes[now.training]} mode now"
        self.said = (
            f"a module ({name}) is called again inside of the backward, as by a checkpoint, and with"
            f" the inputs of the forward it gives other outputs: {why}"
        )
