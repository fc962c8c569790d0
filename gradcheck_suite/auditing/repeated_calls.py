"""Modules that a backward calls once more, as a checkpoint of any form does.

What is called again with the same inputs must give what it gave in the forward: with other random
numbers of whatever generator, in another mode, or with other state, the gradient is that of another
function. Results are compared, and where they differ the cause is measured: what the forward gave to
a checkpoint, or to the module, has other values now; the parameters or buffers of the module have;
its mode is another one. What remains is the fault of what computes again.

`checkpointed` asks the same of all that torch's own checkpoints compute, in modules and outside of
them. It does not know of an `autograd.Function` of the program's that calls a module again
(`faulty_own_checkpoint_of_the_script` in tests/auditing/evidence_scripts.py).
"""

from __future__ import annotations

import inspect
import sys
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.auditing.program_state import states_of_devices
from gradcheck_suite.auditing.samples import (
    BatchedSampler,
    Fingerprint,
    Raw,
    fingerprint,
    is_same_fingerprint,
    read_samples,
)
from gradcheck_suite.auditing.saved_values import Written
from gradcheck_suite.auditing.vectors import distance

CHECKPOINT = "torch.utils.checkpoint"
MOST_GIVEN = 64
"""Tensors that a checkpoint is given which are looked at."""
OTHER = {torch.float64: 2.0**-26, torch.float32: 2.0**-10, torch.float16: 2.0**-7}
"""Relative difference from which on outputs are others, and not rounded otherwise."""
OTHER_COARSE = 2.0**-4
"""The same of bfloat16 and what is coarser."""

Marks = tuple[int, ...]
"""A checksum of each of some tensors, or its version where it lies on a device."""


@dataclass(frozen=True)
class Source:
    """A tensor that the forward computed from.

    Attributes:
        tensor: a reference to it.
        held: a fingerprint of what it held.
        version: how often it had been written to as torch knows.
    """

    tensor: weakref.ref[torch.Tensor]
    held: Fingerprint
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Source:
        """Note what a tensor holds."""
        return Source(weakref.ref(tensor), fingerprint(tensor), *_versions([tensor]))

    def is_written(self, *, unseen: bool) -> bool:
        """Return whether it holds something else now, as far as it is still there.

        Args:
            unseen: whether writes count alone of which torch does not know.
        """
        now = self.tensor()
        if now is None or is_same_fingerprint(self.held, fingerprint(now)):
            return False
        return not unseen or [self.version] == _versions([now])


@dataclass(frozen=True)
class _Begun:
    """How things are when a call of the forward begins.

    Attributes:
        versions: how often each tensor of its arguments was written to in place.
        sources: what the checkpoint around it was given.
        buffers: a checksum of each buffer of the module.
        random: a checksum of the generators from which modules draw.
    """

    versions: list[int]
    sources: Sequence[Source]
    buffers: Marks
    random: int


@dataclass(frozen=True)
class _ModuleCall:
    """One call of a module.

    Attributes:
        inputs: a fingerprint of each tensor that it was given.
        given: samples of those with numbers that may be rounded.
        outputs: the same of what it has returned.
        dtypes: of `outputs`.
        training: its mode.
        point: a checksum of each parameter of the module.
        sources: the tensors that the checkpoint around it, and the module itself, were given.
        buffers: the same of its buffers; None where the call writes to them.
        passes: how many backward passes had begun.
        random: a checksum of the generators from which modules draw, when it began.
    """

    inputs: list[Fingerprint]
    given: list[Raw]
    outputs: list[Raw]
    dtypes: tuple[torch.dtype, ...]
    training: bool
    point: Marks = ()
    sources: Sequence[Source] = ()
    buffers: Marks | None = None
    passes: int = 0
    random: int = 0

    def is_of_written(self, *, unseen: bool) -> bool:
        """Return whether something that it was computed from was written, or was so unseen."""
        return any(source.is_written(unseen=unseen) for source in self.sources)

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
        if isinstance(one, torch.Tensor)
        and one.is_floating_point()
        and not one.is_nested  # its rows have no common shape to be sampled
        and one.numel()
    ]


def _call(module: torch.nn.Module, given: Any, output: Any) -> _ModuleCall:
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
        module.training,
        marks_of(module.parameters()),
        buffers=marks_of(module.buffers()),
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


def marks_of(tensors: Iterable[torch.Tensor]) -> Marks:
    """Return a checksum of each tensor, or its version where it lies on a device."""
    own = list(tensors)
    marks = BatchedSampler().marks(own)
    return tuple(
        version if mark is None else mark
        for version, mark in zip(_versions(own), marks, strict=True)
    )


def _given_to(frame: FrameType) -> list[torch.Tensor]:
    """Return the tensors among the arguments of a running function.

    Parameters are compared where a module is called.
    """
    code = frame.f_code
    flags = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
    rest = sum(bool(code.co_flags & flag) for flag in flags)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + rest]
    leaves = pytree.tree_leaves([frame.f_locals.get(name) for name in names])
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    return [one for one in tensors if not isinstance(one, torch.nn.Parameter)][:MOST_GIVEN]


def _repeating_frame() -> FrameType | None:
    """Return the frame of a checkpoint that runs; None for none.

    It is torch's own, or the `forward` of an `autograd.Function`, whose first argument is `ctx` by
    torch's convention.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_own = code.co_name == "checkpoint" and frame.f_globals.get("__name__") == CHECKPOINT
        if is_own or code.co_varnames[:1] == ("ctx",):
            return frame
        frame = frame.f_back
    return None


def random_mark() -> int:
    """Return a checksum of the generators from which modules draw."""
    mark = zlib.crc32(bytes(torch.get_rng_state().numpy()))
    for state in states_of_devices():
        mark = zlib.crc32(bytes(state.numpy()), mark)
    return mark


def may_be_repeated() -> bool:
    """Return whether what computes now may be computed once more by a backward.

    A checkpoint calls without a gradient, or under hooks on what is saved, or in the `forward` of an
    `autograd.Function`. To note all other calls costs a small transformer a hundredth of 160 windows.
    """
    if not torch.is_grad_enabled():
        return True
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return True
    return _repeating_frame() is not None


class RepeatedCalls:
    """Compares what a backward calls once more with what the forward has called.

    Attributes:
        found: what the first module does otherwise, and the name of the fault; None for nothing.
    """

    def __init__(self) -> None:
        self.found: Written | None = None
        self._calls: defaultdict[int, list[_ModuleCall]] = defaultdict(list)
        self._begun: defaultdict[int, list[_Begun]] = defaultdict(list)
        self._sources = dict[tuple[tuple[int, int], ...], list[Source]]()
        self._passes = 0
        self._at_begin = 0
        self._entered = dict[int, int]()

    def forget(self) -> None:
        """Forget the calls of a window that is over."""
        self._calls.clear()
        self._begun.clear()
        self._sources.clear()
        self.found = None

    def pass_begins(self) -> None:
        """Note that a backward pass begins."""
        self._passes += 1
        self._at_begin = random_mark() if self._calls else 0
        # the program may write the next batch to the same memory
        self._sources.clear()

    def begin(self, module: torch.nn.Module, arguments: Any) -> None:
        """Note that a call of the forward begins, where a backward may make it once more."""
        if not may_be_repeated():
            return
        begun = _Begun(
            _versions(arguments),
            self.around(),
            marks_of(module.buffers()),
            random_mark(),
        )
        self._begun[id(module)].append(begun)

    def around(self) -> Sequence[Source]:
        """Return what the checkpoint that runs was given; all modules in it share that."""
        frame = _repeating_frame()
        if frame is None:
            return ()
        tensors = _given_to(frame)
        key = tuple(zip(map(id, tensors), _versions(tensors), strict=True))
        known = self._sources.get(key)
        # the id of a tensor that is gone may be another one's now
        if known is None or any(one.tensor() is None for one in known):
            known = self._sources[key] = [Source.of(one) for one in tensors]
        return known

    def note(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        """Note a call of the forward whose beginning was noted.

        One that writes to its input, as `ReLU(inplace=True)` does, is left out: what it was given is
        known no more when it has returned.
        """
        noted = self._begun.get(id(module))
        if not noted:
            return
        begun = noted.pop()
        # keyword arguments come last, and are not told when a call begins
        if begun.versions != _versions(given)[: len(begun.versions)]:
            return
        call = _call(module, given, output)
        tensors = [one for one in pytree.tree_leaves(given) if isinstance(one, torch.Tensor)]
        own = [
            Source(weakref.ref(one), held, *_versions([one]))
            for one, held in zip(tensors, call.inputs, strict=True)
            if not isinstance(one, torch.nn.Parameter)
        ]
        self._calls[id(module)].append(
            replace(
                call,
                sources=[*begun.sources, *own],
                buffers=call.buffers if call.buffers == begun.buffers else None,
                passes=self._passes,
                random=begun.random,
            )
        )

    def enter(self, module: torch.nn.Module, given: Any) -> None:
        """Compare what a checkpoint gives to a module inside of a backward with the forward.

        It may end before the module returns: when it has all that the backward reads. A function of
        one's own may call a module at other inputs on purpose, and may write to what it was given,
        as a search for a fixed point does; writes of which torch does not know are none of its own.
        """
        known = self._calls.get(id(module))
        if not known or self.found:
            return
        self._entered[id(module)] = random_mark()
        # a pass has the calls since the one before, but where all forwards come first
        latest = [then for then in known if then.passes == known[-1].passes]
        is_of_torch = _is_in_checkpoint()
        is_written = any(then.is_of_written(unseen=not is_of_torch) for then in latest)
        if not is_of_torch and not is_written:
            return
        now = _call(module, given, None).given
        rough = [OTHER_COARSE] * len(now)
        if any(_are_near(now, then.given[: len(now)], rough) for then in known):
            return
        name = type(module).__name__
        if is_written:
            self.found = Written("changed-batch", INPUT_WRITTEN.format(module=name))
        else:
            self.found = Written("wrong-backward", OTHER_INPUTS.format(module=name))

    def compare(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        """Compare a call inside of a backward with those of the forward.

        With other inputs a function of one's own may call on purpose. What it has drawn before is
        then to be what the forward had drawn, unless it draws without a gradient.
        """
        known = self._calls.get(id(module))
        if not known or self.found:
            return
        name = type(module).__name__
        now = _call(module, given, output)
        random = self._entered.get(id(module), 0)
        same = [then for then in known if now.has_inputs_of(then)]
        if not same:
            has_drawn = random != self._at_begin
            if has_drawn and all(then.random != random for then in known):
                self.found = Written("wrong-backward", REDRAWN.format(module=name))
        elif not any(now.has_outputs_of(then) for then in same):
            self.found = _explained(name, now, same)


def _explained(name: str, now: _ModuleCall, same: Sequence[_ModuleCall]) -> Written:
    """Say why a module gives other outputs with the inputs of some calls of the forward.

    Args:
        name: of the module's class.
        now: the call inside of the backward.
        same: those of the forward with the same inputs.
    """
    if all(then.training != now.training for then in same):
        modes = "eval", "train"
        was = modes[same[0].training]
        why = f"it was in {was} mode, and is in {modes[now.training]} mode now"
        return Written("wrong-backward", OTHER_OUTPUTS.format(module=name, why=why))
    if all(then.point != now.point for then in same):
        return Written("stale-parameters", WRITTEN.format(module=name, what="parameters"))
    if all(then.buffers not in (None, now.buffers) for then in same):
        return Written("changed-batch", WRITTEN.format(module=name, what="buffers"))
    why = "it uses other random numbers or other state"
    return Written("wrong-backward", OTHER_OUTPUTS.format(module=name, why=why))


REDRAWN = (
    "what computes again inside of the backward, as a checkpoint does, draws other random numbers"
    " before it calls a module ({module}) than in the forward, and gives it other inputs"
)
OTHER_INPUTS = (
    "a checkpoint calls a module ({module}) again inside of the backward with other inputs than in"
    " the forward: what it computes before that call is not the same again (random numbers, a mode,"
    " other state)"
)
OTHER_OUTPUTS = (
    "a module ({module}) is called again inside of the backward, as by a checkpoint, and with the"
    " inputs of the forward it gives other outputs: {why}"
)
INPUT_WRITTEN = (
    "a tensor that a checkpoint was given was written between the forward and the backward, which"
    " computes again from it: a module ({module}) is called with other inputs than in the forward"
)
WRITTEN = (
    "a module ({module}) is called again inside of the backward, as by a checkpoint, and its {what}"
    " were written since the forward: with the same inputs it gives other outputs"
)
