"""The recorder of a live run: what went backward, what stood in `.grad`, and when an optimizer
stepped, as plain data.

There is one choke point. Every way from Python into autograd calls
`Variable._execution_engine.run_backward`, which is replaced by a subclass; all else are public
hooks. No function of torch, of a trainer or of an optimizer is patched.

Nothing here judges, and no error of this module reaches the program: it switches its instrument
off, and that is said.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_suite.auditing import samples
from gradcheck_suite.auditing.clipping import ClippingWatch
from gradcheck_suite.auditing.clocks import Clocks, alive_of
from gradcheck_suite.auditing.declarations import Declarations
from gradcheck_suite.auditing.events import (
    BY_HAND,
    KEPT,
    LATE,
    NONE,
    TOUCHED,
    Event,
    Gap,
    HookedGradient,
    PassRecord,
    StepRecord,
)
from gradcheck_suite.auditing.gradient_hooks import (
    BeforeHooks,
    Change,
    Some,
    are_alike_on_device,
    compare_together,
    most_alike,
    ratio_on_device,
    some_of,
)
from gradcheck_suite.auditing.known_graphs import KnownGraphs, Made, Uses, uses_below
from gradcheck_suite.auditing.loss_values import rewritten_loss, rewritten_outside
from gradcheck_suite.auditing.masks import MaskWatch
from gradcheck_suite.auditing.modes import Apart, is_of_rows
from gradcheck_suite.auditing.parameter_points import ParameterPoints, Points
from gradcheck_suite.auditing.places import (
    NOWHERE,
    Place,
    current_place,
    is_written_loss,
    live_instances,
    loop_here,
)
from gradcheck_suite.auditing.samples import Raw
from gradcheck_suite.auditing.saved_values import Written, written_since
from gradcheck_suite.auditing.stacks import NodeStacks
from gradcheck_suite.auditing.terms import (
    MARK,
    Outside,
    Reader,
    edge_of,
    joined_share,
    leaves_below,
    outside_of_calls,
    read_numbers,
    used_at,
)
from gradcheck_suite.auditing.trainers import trainer_on_the_stack
from gradcheck_suite.auditing.unstepped import Unstepped
from gradcheck_suite.auditing.vectors import Vector, factor
from gradcheck_suite.core.comparison import dtype_name
from gradcheck_suite.core.findings import Occurrence, finding


@dataclass
class TrackedParameter:
    """What is known of a parameter.

    Attributes:
        reference: to the parameter.
        dtype: of its gradient.
        gradient: a reference to `.grad`, its version and a checksum of some elements, as the last
            arrival left them.
        grad_hook: the hook that tells of its gradients: none can be set on a parameter that is frozen.
        at_once: whether that one samples `.grad`, which is else done when the pass has ended, for
            all together.
        hooks: around those of the program on this parameter.
        raw: what arrived before the program's hooks.
        ratio: by which these changed some elements of it in the last pass.
        keeps_memory: whether a gradient has left these in the memory in which it came, as far as is
            known.
        is_changed: whether they have changed anything so far.
        times: how often one of them was on it then.
        owners: the optimizers that have listed it at their first step.
    """

    reference: weakref.ref[torch.Tensor]
    dtype: str
    gradient: tuple[Any, int, int | None] | None = None
    grad_hook: Any = None
    at_once: bool = False
    hooks: tuple[Any, Any] | None = None
    raw: BeforeHooks | None = None
    ratio: Some | None = None
    keeps_memory: bool = True
    is_changed: bool = False
    times: int = 0
    owners: tuple[int, ...] = ()

    @property
    def groups(self) -> Sequence[int | None]:
        """The optimizers whose gradients are reset with this one's, None where none is known."""
        return self.owners or (None,)

    def is_left(self, *, is_same: bool, is_alike: bool) -> bool:
        """Return whether the program's hooks have left its gradients as they came, in all passes so
        far.

        Args:
            is_same: whether they have in this pass.
            is_alike: whether the factors are those of the last pass.
        """
        return is_same and (is_alike or not self.is_changed)


@dataclass
class Lines:
    """Lines of one expression that one place sends backward.

    Attributes:
        losses: that compute it; several where that depends on the pass.
        divisions: that multiply or divide it by a number.
    """

    losses: set[str] = field(default_factory=set)
    divisions: set[str] = field(default_factory=set)


# The choke point.


_engine_class: Any = type(getattr(torch.autograd.Variable, "_execution_engine", object()))


_run_backward: Any = getattr(_engine_class, "run_backward", None)


class Engine(_engine_class):  # type: ignore[misc]
    """Autograd's engine, which tells a recorder of every pass."""

    recorder: Recorder | None = None

    def run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a pass; the arguments are those of torch's `_engine_run_backward`."""
        recorder = self.recorder
        if recorder is not None and not recorder.records:
            # of a run that is only counted each pass and step comes by here
            if kwargs.get("accumulate_grad", False):
                recorder.count_pass()
            return _run_backward(
                self,
                tensors,
                *args,
                **kwargs,
            )
        # dynamo traces Python that runs while it compiles, and a window that is computed again is
        # nobody's pass
        if recorder is None or recorder.is_silent or torch.compiler.is_dynamo_compiling():
            return super().run_backward(tensors, *args, **kwargs)
        inputs = args[3] if len(args) > 3 else ()
        accumulates = bool(kwargs.get("accumulate_grad", False))
        running = recorder.begin(tensors, args[0] if args else (), accumulates, inputs)
        try:
            result = super().run_backward(tensors, *args, **kwargs)
        except BaseException:
            if running is not None:
                running.record.raised = True
            raise
        finally:
            recorder.end(running)
        recorder.by_hand(running, inputs, result)
        return result


@dataclass
class ActivePass:
    """A pass that runs.

    Attributes:
        record: of the pass, or of the outer one.
        reader: of its terms.
        outer: the outermost pass, or None where this is it.
        tasks: the ids that autograd gave it.
        forwards: recorded calls of modules -> index of an output -> the gradient that arrived
            there.
        outside: what it passes outside of these, where its window is to be computed again.
        written: what it reads that was written since the forward, in such a window.
        resets: index of an optimizer -> where its gradients were let go before the pass.
        unrecorded: why no calls of it are there, where that is not for want of calls.
    """

    record: PassRecord
    reader: Reader
    outer: ActivePass | None = None
    tasks: list[int] = field(default_factory=list)
    forwards: dict[Any, dict[int, torch.Tensor]] = field(default_factory=dict)
    outside: Outside = field(default_factory=Outside)
    written: Written | None = None
    resets: dict[int | None, Place] = field(default_factory=dict)
    unrecorded: str = ""


PASSES = "backward passes"
WEIGHTS = "weights"
SUMS = "sums"
STEPS = "steps"
CLOCKS = "schedules and averages"
WRITES = "writes between forward and backward"
MOST_LINES = 64
"""Losses, each an expression at a line that sends it backward, whose own lines are looked for."""


def _task() -> int:
    # the public API does not tell; torch/utils/checkpoint.py reads the same. -1 outside of a
    # backward
    return torch._C._current_graph_task_id()


def _guarded(
    instrument: str, *, computes: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method return None where it or its instrument failed: nothing is raised into the
    program.

    Args:
        instrument: that is switched off where the method fails.
        computes: whether the method calls operations, which no mode of the program may see.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(self: Recorder, *args: Any) -> Any:
            if self.is_off(instrument):
                return None
            begun = self._begun
            self._begun = self._begun or time.perf_counter()
            try:
                if not computes:  # for each step of a run that is only counted
                    return function(self, *args)
                with Apart():
                    return function(self, *args)
            except Exception as error:
                self.switch_off(instrument, error)
                return None
            finally:
                if not begun:
                    self._spent += time.perf_counter() - self._begun
                    self._begun = 0.0
                    if self._due is not None:
                        self._do_what_is_due()

        inner._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `torch.compiler.disable` sets
        return inner

    return wrap


class Recorder:
    """Writes events.

    Args:
        receive: called with each pass and each step, in the order in which they end.
        full: tells whether the window that runs now is looked at in full.
        resumes: called with the optimizer of a step that is only counted, tells whether the next
            ones are recorded.
        again: tells whether the window that runs now is to be computed again.
        let_go_of: called with an optimizer that the program has let go.
        weights: whether the terms of losses are read.
        sums: whether what arrives at parameters is.
        objectives: `file:line` of a call of backward -> an expression of the names there: what the
            loss's mean divides by.

    Attributes:
        off: instrument -> the error that switched it off.
        parameters: key -> what is known of a parameter.
        muted: whether nothing is recorded, since a window is computed again.
        concurrent: whether two threads that are alive have called backward: their passes cannot be
            told apart.
        sparse: parameters whose gradients sampled elements alone do not show.
        unstepped: tells why no step may come, as long as none has.
        declarations: of the user's, of losses.
        records: whether passes and steps are recorded, or only counted.
        notes: what could not be seen -> how often.
        used_at: key of a parameter -> a line that uses it, where the first passes have shown one.
    """

    def __init__(
        self,
        receive: Callable[[Event], None],
        full: Callable[[], bool],
        resumes: Callable[[int], bool] = lambda _: True,
        again: Callable[[], bool] = lambda: False,
        let_go_of: Callable[[int], None] = lambda _: None,
        *,
        weights: bool,
        sums: bool,
        objectives: Mapping[str, str] | None = None,
    ) -> None:
        self.off: dict[str, str] = {}
        self.parameters: dict[int, TrackedParameter] = {}
        self.muted = self.concurrent = False
        self._threads: set[threading.Thread] = set()
        self.records = True
        self._spent = self._begun = 0.0
        self._due: Callable[[], None] | None = None
        self.steps_seen = 0
        self.passes_seen = 0
        self.unstepped = Unstepped()
        self.last: ActivePass | None = None
        self.notes: Counter[Occurrence] = Counter()
        self.used_at: dict[int, str] = {}
        self._receive = receive
        self._full = full
        self._resumes = resumes
        self._again = again
        self._let_go_of = let_go_of
        self.sparse: Set[int] = frozenset()
        self._sparse = frozenset[int]()
        self._paused_at: int | None = None
        self._weights = weights
        self._sums = sums
        self.declarations = Declarations(objectives or {})
        self._keys: dict[int, int] = {}
        self._next_key = 0
        self._wrapped: dict[int, bool] = {}
        self._optimizers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._stepped_at = 0
        self._next_optimizer = 0
        # steps that have begun, and not ended by themselves
        self._stepping = 0
        self._gone: list[tuple[int, int]] = []
        self._passes_at_step: dict[int, int] = {}
        self._passes_at_last_step = 0
        self._idle: dict[int, StepRecord] = {}
        self._running: dict[int, ActivePass] = {}
        self._unbound: list[ActivePass] = []
        self._lines: dict[tuple[Place, tuple[str, ...], int], Lines] = {}
        # two steps: Lightning switches anomaly mode off when it begins to fit
        self._stacks_until = 2
        self._stacks = NodeStacks()
        self._before: dict[int, str] = {}
        self._touched: dict[int, Raw] = {}
        self._masks = MaskWatch()
        self._masked: dict[int, Raw] = {}
        self._changes: dict[int, Change] = {}
        self._accumulated_into: list[torch.Tensor] = []
        self._unseen: set[int] = set()
        self._standing: dict[int, Raw] = {}
        self._graphs = KnownGraphs()
        self._shards: set[int] = set()
        self._groups: dict[int, weakref.ref[Any]] | None = None
        self._late: list[PassRecord] = []
        self._resets: dict[int | None, Place] = {}
        self._let_go_in_pass: set[int | None] = set()
        self._points_of = ParameterPoints()
        self._gradients_of = samples.BatchedSampler()
        self._clipped_of = samples.BatchedSampler()
        self._before_clipping = dict[int, Raw]()
        self._clipping = ClippingWatch(self._note_clipping)
        self._clocks = Clocks()
        self._handles: list[Any] = []
        self._engine: Any = None

    def open(self) -> None:
        """Begin to record."""
        _hide_from_dynamo()
        self._engine = torch.autograd.Variable._execution_engine
        self._mine = Engine()
        self._mine.recorder = self
        torch.autograd.Variable._execution_engine = self._mine
        self._handles = [
            register_optimizer_step_pre_hook(self._step_is_called),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        if self._sums:
            self._clipping.open()
        self._stacks.open()
        self._keep_stacks()

    @_guarded(SUMS)
    def _note_clipping(self) -> None:
        """Note what stands in `.grad` before it is clipped for the first time since the last pass."""
        if self.is_silent or not self.records or self._before_clipping or _task() != -1:
            return
        own = ((key, known.reference()) for key, known in self.parameters.items())
        stands = {key: p.grad for key, p in own if p is not None and p.grad is not None}
        found, _ = self._clipped_of.taken(
            [*stands.values()], whole=self._full(), sparse=self._sparse_of(stands)
        )
        self._before_clipping = dict(zip(stands, found, strict=True))

    def _keep_stacks(self) -> None:
        """Let every node keep the stack that made it where the line of a loss is not known yet."""
        if self._wants_stacks:
            self._stacks.keep()

    @property
    def _wants_stacks(self) -> bool:
        return self._weights and self.steps_seen < self._stacks_until

    def pause(self) -> None:
        """Count passes and steps from now on, without a hook on a parameter."""
        self.records = False
        self._paused_at = self.steps_seen
        self._unhook(2)
        for known in self.parameters.values():
            known.gradient = known.grad_hook = known.hooks = known.raw = known.ratio = None
        self._before.clear()
        self._touched.clear()
        self._masks = MaskWatch()
        self._masked.clear()
        self._changes.clear()
        self._unseen.clear()
        self._standing.clear()
        self._graphs.forget()
        self._graphs.end_window()
        self._late.clear()
        self._resets.clear()
        self.last = None

    def _unhook(self, begin: int = 0) -> None:
        for handle in self._handles[begin:]:
            handle.remove()
        del self._handles[begin:]
        self._accumulated_into.clear()

    @contextlib.contextmanager
    def mute(self) -> Iterator[None]:
        """Record nothing, since a window is computed again."""
        self.muted = True
        try:
            yield
        finally:
            self.muted = False
            self._accumulated_into.clear()

    def resume(self, step: int) -> None:
        """Record again from a step on, and tell which ones were only counted."""
        if self._paused_at is not None:
            self._receive(Gap(range(self._paused_at, step)))
        self.records = True
        self._paused_at = None

    @property
    def recorded_until(self) -> int:
        """The step from which on steps are only counted, that which follows where none is."""
        return self.steps_seen if self._paused_at is None else self._paused_at

    @property
    def since_step(self) -> int:
        """The number of passes that have gone backward since the last step."""
        return self.passes_seen - self._passes_at_last_step

    @property
    def seconds(self) -> float:
        """Seconds in which this recorder, and what it calls, has kept the program waiting."""
        return self._spent + (time.perf_counter() - self._begun if self._begun else 0.0)

    def close(self) -> None:
        """Stop: put the engine back and remove every hook."""
        if isinstance(torch.autograd.Variable._execution_engine, Engine):
            torch.autograd.Variable._execution_engine = self._engine
        # another tool that was opened meanwhile may put it back when it closes
        self._mine.recorder = None
        self._stacks.close()
        self._clipping.close()
        self._unhook()
        self.last = None
        self._running.clear()

    def when_idle(self, act: Callable[[], None]) -> None:
        """Call a function now, or when the work that a signal has interrupted here has ended."""
        self._due = act
        if not self._begun:
            self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        if self._due is not None:
            due = self._due
            self._due = None
            due()

    def count_pass(self) -> None:
        """Count a pass of a run of which passes and steps are only counted."""
        if not self.is_silent and _task() == -1 and not torch.compiler.is_dynamo_compiling():
            self.passes_seen += 1

    @property
    def is_silent(self) -> bool:
        """Whether nothing is recorded: a window is computed again, or threads train at once.

        To read a gradient to which torch writes in another thread, without Python's lock, can end
        the process.
        """
        return self.muted or self.concurrent

    def is_off(self, instrument: str) -> bool:
        """Return whether an instrument is switched off by an error."""
        return bool(self.off) and (PASSES in self.off or instrument in self.off)

    def switch_off(self, instrument: str, error: Exception) -> None:
        """Note the error that ends an instrument, with its place in the suite."""
        self.off.setdefault(instrument, _in_words(error))

    @contextlib.contextmanager
    def _beside_the_judgement(self, instrument: str) -> Iterator[None]:
        """Say what fails of an instrument without which all else is judged as well."""
        try:
            yield
        except Exception as error:
            said = f"{instrument} could not be observed ({_in_words(error)}); please report it"
            self.notes[finding("failed-instrument", said, remedy="")] += 1

    # Passes

    @_guarded(PASSES)
    def begin(
        self, tensors: Any, gradients: Any, accumulates: bool, inputs: Any
    ) -> ActivePass | None:
        """Note the beginning of a pass; a pass that runs inside another one belongs to that."""
        roots = [t for t in tensors if edge_of(t)[0] is not None]
        if self._is_no_pass(roots, gradients):
            return None
        task = _task()
        outer = self._running.get(task)
        if outer is not None:
            running = ActivePass(outer.record, Reader(), outer)
            if self._weights and accumulates:
                self._read_inside(running, roots)
        elif task == -1 and self._has_others():
            self._unhook(2)
            return None
        else:
            running = self._begin_outermost(roots, accumulates, inputs)
        for root in roots:
            # hooks run in the thread of a device: autograd's number of the pass tells which pass
            # they belong to
            self._bind_at(running, edge_of(root)[0])
        if accumulates:
            self._find_leaves(running, roots)
            if outer is None and self._sums:
                self._look_at_gradients()
        return running

    def _is_no_pass(self, roots: Sequence[Any], gradients: Iterable[Any]) -> bool:
        """Return whether what goes backward is none that trains."""
        own = [root for root in roots if isinstance(root, torch.Tensor)]
        if any(torch._C._functorch.is_functorch_wrapped_tensor(one) for one in own):
            # what a transformation returns is a value of the program's
            said = "a loss inside of torch.func is not seen: what it returns is no backward pass"
            self.notes[finding("functional-loss", said)] += 1
            return True
        if any(isinstance(g, torch.Tensor) and is_of_rows(g) for g in gradients):
            return True
        # operations are counted on the meta device or with fake tensors: nothing is trained
        return not all(map(samples.has_values, own))

    def _has_others(self) -> bool:
        """Return whether two threads go backward at once: a hook runs in the thread of a device."""
        self._note_thread()
        return self.concurrent

    def _begin_outermost(self, roots: list[Any], accumulates: bool, inputs: Any) -> ActivePass:
        """Note the beginning of a pass that is not inside of another one."""
        self._note_unseen()
        self._before_clipping = {}
        # what a pass computes itself, as an adjoint does, would take ten times as long with stacks
        self._stacks.end()
        is_kept = accumulates or any(isinstance(p, torch.nn.Parameter) for p in inputs)
        resets = dict[int | None, Place]()
        if is_kept:
            record = PassRecord(current_place(), accumulates, loop=loop_here())
            resets = self._resets
            self._resets = {}
            self._let_go_in_pass.clear()
        else:
            record = PassRecord(NOWHERE, False)  # of which nothing is kept
        running = ActivePass(record, Reader(), resets=resets)
        self._unbound.append(running)
        if self.declarations:
            self.declarations.declare(roots)
        if self._weights and is_kept:
            self._read(running, roots)
        return running

    def _note_thread(self) -> None:
        """Note which threads have called backward, and whether two of them may do so at once."""
        thread = threading.current_thread()
        others = {one for one in self._threads if one is not thread and one.is_alive()}
        self.concurrent |= bool(others)
        self._threads = {thread, *others}

    def _note_unseen(self) -> None:
        """Note what has arrived since the last pass, of one that was not entered from Python."""
        self._unseen |= {self._keys[id(parameter)] for parameter in self._accumulated_into}
        self._accumulated_into.clear()

    def _read_standing(self) -> None:
        """Note where something stood before the first pass that is known to reach a parameter."""
        values = samples.read_samples([*self._standing.values()])
        self._unseen |= {
            key for key, value in zip(self._standing, values, strict=True) if value.any()
        }
        self._standing = {}

    def _bind_at(self, running: ActivePass, node: Any) -> None:
        running.reader.keep(node.register_prehook(lambda _: self._bind(running)))

    def _bind(self, running: ActivePass) -> None:
        """Note autograd's number of a pass, by which the hooks of nodes and parameters find it."""
        if (task := _task()) not in self._running:
            outermost = self._running[task] = running.outer or running
            outermost.tasks.append(task)
        if running in self._unbound:
            self._unbound.remove(running)

    @_guarded(WEIGHTS)
    def _read(self, running: ActivePass, roots: list[Any]) -> None:
        running.reader.read(roots)
        self._mark(running)

    def _mark(self, running: ActivePass) -> None:
        if running.record.accumulates:
            for found in running.reader.found:
                found.term.repeated = MARK in found.node.metadata
                found.node.metadata[MARK] = True

    @_guarded(WEIGHTS)
    def _read_inside(self, running: ActivePass, roots: list[Any]) -> None:
        """Read the loss itself where a checkpoint computes it again: its terms replace the node of
        the checkpoint.
        """
        outer = running.outer.reader.found  # type: ignore[union-attr]
        checkpoints = [f for f in outer if f.term.opaque and "Checkpoint" in f.term.expression[-1]]
        if (
            checkpoints
            and len(roots) == 1
            and isinstance(roots[0], torch.Tensor)
            and roots[0].numel() == 1
        ):
            running.reader.read(roots)
            self._mark(running)
            # each checkpoint is computed again in a pass of its own
            outer[:] = [f for f in outer if f is not checkpoints[-1]] + running.reader.found

    @_guarded(PASSES)
    def _find_leaves(self, running: ActivePass, roots: list[Any]) -> None:
        """Look at what a pass reaches: at each graph where the window is to be computed again, else
        at one that is not known.
        """
        if self._again():
            self._look_outside(running, roots)
            if running.outer is None:
                self._note_written(running, roots)
        place = running.record.place
        apart = self._is_apart()
        # what is computed inside of another pass, or on several ranks, is walked each time
        if running.outer is None and not apart:
            own = [known.reference() for known in self.parameters.values()]
            if self._graphs.knows(place, Made.of(roots, own, self._living_optimizers())):
                running.record.uses = self._graphs.uses_at(place)
                return
        leaves, joins = leaves_below(edge_of(root)[0] for root in roots)
        self._watch_leaves(leaves, apart=apart)
        if self.steps_seen < 2 and self._full():  # nodes keep their stacks until then
            lines = used_at(edge_of(root)[0] for root in roots)
            self.used_at |= {self._keys[i]: line for i, line in lines.items() if i in self._keys}
        if joins:
            self._note_joins(running, leaves)
        if running.outer is None and not apart:
            keys = [self._keys[id(leaf)] for leaf in leaves]
            uses = running.record.uses = self._uses(roots)
            self._graphs.note(
                place,
                keys,
                uses,
                is_plain=not joins,
            )

    def _uses(self, roots: Sequence[Any]) -> dict[int, Uses]:
        """Return by which nodes a graph uses parameters, where several optimizers may share it."""
        if len(self._optimizers) < 2:  # a second walk, for which one optimizer has no need
            return {}
        uses = uses_below(edge_of(root)[0] for root in roots)
        return {self._keys[i]: one for i, one in uses.items() if i in self._keys}

    def _note_written(self, running: ActivePass, roots: Sequence[Any]) -> None:
        # without it a difference is told with fewer words, and is told
        with self._beside_the_judgement(WRITES):
            running.written = _written(
                roots, running.record.place.line, self._unmoved, self._stepped_at
            )

    def _unmoved(self) -> set[int]:
        """Return the ids of the parameters that nobody has written to since the last pass."""
        return self._points_of.unmoved(self._trained(), self.steps_seen)

    def _trained(self) -> dict[int, torch.Tensor]:
        found = ((key, known.reference()) for key, known in self.parameters.items())
        # a frozen copy may follow the trained ones
        return {key: p for key, p in found if p is not None and p.requires_grad}

    def _watch_leaves(self, leaves: Sequence[torch.Tensor], *, apart: bool) -> None:
        """Watch the parameters that a pass reaches."""
        if not self.parameters and _is_distributed():
            self._watch_all_of_optimizers()
        first = self._next_key
        standing = dict[int, torch.Tensor]()
        for leaf in leaves:
            key = self._watch(leaf)
            # before the first pass that is known to reach it; read at the step
            if key >= first and leaf.grad is not None:
                standing[key] = leaf.grad
            if self._shards and not getattr(leaf, "_fsdp_flattened", False):
                self._shards.discard(key)  # tensor parallelism: a shard that goes backward itself
            # a hook after ours may change `.grad` in this pass, as DDP and an optimizer in backward
            # do
            if apart or len(leaf._post_accumulate_grad_hooks) > 1:
                self._listen(key, leaf, at_once=True)
            if leaf._backward_hooks and self._sums:
                self._bracket_user_hooks(key, leaf)
        if standing:
            found, _ = samples.BatchedSampler().taken([*standing.values()], whole=False)
            self._standing |= dict(zip(standing, found, strict=True))

    def _watch_all_of_optimizers(self) -> None:
        """Watch what optimizers step on: FSDP gathers parameters, and the leaves are others."""
        for optimizer in live_instances(torch.optim.Optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._watch(parameter)

    def _note_joins(self, running: ActivePass, leaves: Sequence[torch.Tensor]) -> None:
        """Note which terms join items with and without a gradient."""
        for found in running.reader.found:
            below, own = leaves_below([found.node])
            outside = {id(leaf) for leaf in leaves_below([found.node], own)[0]}
            # what makes cached items is reached through a join alone; a recurrent layer, which
            # joins the states of some rows with the first state of others, computes on with the
            # parameters of these states
            if {id(leaf) for leaf in below} - outside:
                found.term.partial = joined_share(own[0])
                inside = {id(leaf) for leaf in leaves_below(own)[0]}
                running.record.whole = sorted(
                    self._keys[i] for i in outside - inside if i in self._keys
                )

    def _look_outside(self, running: ActivePass, roots: list[Any]) -> None:
        """See what a pass reaches outside of the recorded calls.

        What starts inside of a recorded call, as a checkpoint computes it again, is a part of that.
        """
        outermost = running.outer or running
        if running.outer is None or outermost.outside.reenters:
            outermost.outside += outside_of_calls(edge_of(root)[0] for root in roots)

    @_guarded(PASSES)
    def end(self, running: ActivePass | None) -> None:
        """Note the end of a pass."""
        if running is None:
            return
        running.reader.close()
        if running.outer is not None:
            return
        if running in self._unbound:
            self._unbound.remove(running)
        for task in running.tasks:
            self._running.pop(task, None)
        if self._changes:
            self._compare_changes()
        self._arrive_all(running)
        self._numbers(running)
        self._keep_stacks()
        if running.record.accumulates:
            self._finish(running)

    @_guarded(WEIGHTS)
    def _numbers(self, running: ActivePass) -> None:
        if running.reader.error is not None:
            raise running.reader.error
        place = running.record.place
        numbers = Counter[tuple[str, ...]]()
        running.record.unread = running.reader.measured()
        for term in (found.term for found in running.record.unread):
            # what one line sends backward was made where it was made before; what another line
            # does, an expression of the same operations, may be another loss
            key = place, term.expression, numbers[term.expression]
            numbers[term.expression] += 1
            if term.line is None and key not in self._lines and len(self._lines) < MOST_LINES:
                # this loss was made without a stack; those of the next passes, or of the next
                # window where it has one pass, are made with one
                self._stacks_until = max(self._stacks_until, self.steps_seen + 2)
            known = self._lines.setdefault(key, Lines())
            if term.line is not None:
                known.losses.add(term.line)
                known.divisions |= term.divisions
            elif len(known.losses) == 1:
                term.line = next(iter(known.losses))
                term.divisions = frozenset(known.divisions)
            running.record.terms.append(term)

    def read(self, events: Iterable[Event]) -> None:
        """Read what was left on a device when the passes ended; waits for it."""
        passes = [event for event in events if isinstance(event, PassRecord)]
        self._read_numbers(passes)
        self._read_hooks(passes)
        for record in passes:
            record.unread = []
            record.unread_hooks = []

    @_guarded(WEIGHTS)
    def _read_numbers(self, passes: Sequence[PassRecord]) -> None:
        read_numbers(list(chain.from_iterable(record.unread for record in passes)))

    @_guarded(SUMS)
    def _read_hooks(self, passes: Sequence[PassRecord]) -> None:
        changes = list(chain.from_iterable(record.unread_hooks for record in passes))
        if not changes:
            return
        values = samples.read_samples(list(chain.from_iterable(one.raw for one in changes)))
        for i, one in enumerate(changes):
            then, now, alike = values[3 * i : 3 * i + 3]
            known = self.parameters.get(one.key)
            if known is None:  # the program has let the parameter go since
                continue
            is_alike = bool(alike[0])
            is_same = bool(np.array_equal(then, now, equal_nan=True))
            if not known.is_left(is_same=is_same, is_alike=is_alike):
                self._judge_hook(one.record, one.key, then, now, is_alike=is_alike, times=one.times)

    def _finish(self, running: ActivePass) -> None:
        self.passes_seen += 1
        running.record.points = self._points()
        running.record.clocks = self._clocks.now(self._living_optimizers())
        self._hand_over_resets(running)
        self.last = running
        if not self.steps_seen:
            self.unstepped.on_pass(self.passes_seen)
        self._receive(running.record)

    def _hand_over_resets(self, running: ActivePass) -> None:
        """Give a pass the resets of the optimizers whose parameters it has reached; those of the
        others wait for a pass of theirs.
        """
        if not running.resets:
            return
        reached = set[int | None]()
        for key in running.record.arrivals:
            reached.update(self.parameters[key].groups)
            if reached >= running.resets.keys():
                break
        for optimizer, place in running.resets.items():
            if optimizer in reached:
                running.record.resets[optimizer] = place
            else:
                self._resets.setdefault(optimizer, place)

    @_guarded(SUMS)
    def by_hand(self, running: ActivePass | None, inputs: Any, results: Any) -> None:
        """Note the results of `torch.autograd.grad` for parameters, which the program may put into
        `.grad` itself.
        """
        if running is None or running.outer is not None or running.record.accumulates:
            return
        given = dict[int, torch.Tensor]()
        for parameter, gradient in zip(inputs, results or (), strict=False):
            known = isinstance(parameter, torch.nn.Parameter) or id(parameter) in self._keys
            has_values = known and gradient is not None and not gradient.requires_grad
            if has_values and not torch._C._functorch.is_functorch_wrapped_tensor(gradient):
                given[self._watch(parameter)] = gradient
        if given:
            found, _ = samples.BatchedSampler().taken([*given.values()], whole=self._full())
            running.record.arrivals |= dict.fromkeys(given, BY_HAND)
            running.record.now |= dict(zip(given, found, strict=True))
            self._finish(running)

    def running(self) -> ActivePass | None:
        """Return the pass that runs.

        None for one that is not recorded, as one that is entered from C++.
        """
        task = _task()
        if task not in self._running and len(self._unbound) == 1:
            # a hook on the tensor that goes backward comes before those of its node
            self._bind(self._unbound[0])
        return self._running.get(task)

    # Parameters

    def _watch(self, parameter: torch.Tensor) -> int:
        key = self._keys.get(id(parameter), -1)
        known = self.parameters.get(key)
        if known is None or known.reference() is not parameter:
            key = self._keys[id(parameter)] = self._next_key
            self._next_key += 1
            known = self.parameters[key] = TrackedParameter(
                weakref.ref(parameter), dtype_name(parameter.dtype)
            )
            if samples.is_shard(parameter):
                self._shards.add(key)
        if known.grad_hook is None and parameter.requires_grad and parameter.is_leaf:
            self._listen(key, parameter, at_once=self._is_apart())
        return key

    def _is_apart(self) -> bool:
        """Return whether wrappers may change a `.grad` as soon as a gradient has arrived there."""
        return _is_distributed() or bool(self._shards)

    def _listen(self, key: int, parameter: torch.Tensor, *, at_once: bool) -> None:
        """Listen to what arrives at a parameter, before all other hooks."""
        known = self.parameters[key]
        if known.grad_hook is not None:
            if known.at_once:
                return
            known.grad_hook.remove()
        # between two kernels Python is several times as slow: what can be done at the end of the
        # pass is
        hook = (
            functools.partial(self._accumulated, key) if at_once else self._accumulated_into.append
        )
        found = known.grad_hook = parameter.register_post_accumulate_grad_hook(hook)
        known.at_once = at_once
        self._handles.append(found)
        _arrange(parameter._post_accumulate_grad_hooks, [found.id], [])

    def _points(self) -> Points:
        """Return a checksum of each parameter's values, or its version where they lie on a device."""
        points = self._points_of.now(self._trained(), self.steps_seen)
        if self._points_of.has_versions_alone:
            said = (
                "parameters lie on a device, or have no memory in a row: writes to them through"
                " `.data` are not seen"
            )
            self.notes[finding("unseen-writes", said)] = 1
        return points

    @_guarded(SUMS)
    def _look_at_gradients(self) -> None:
        """See at the beginning of a pass what stands in each `.grad`: what the last arrival left,
        or something else.
        """
        same = dict[int, torch.Tensor]()
        given = dict[int, torch.Tensor]()
        for key, known in self.parameters.items():
            parameter = known.reference()
            if parameter is not None and (gradient := parameter.grad) is not None:
                # what is seen by its version alone is read once
                (same if _is_same(known, gradient) else given)[key] = gradient
        for key, mark in zip(
            same, self._gradients_of.marks([*same.values()]) if same else (), strict=True
        ):
            if mark != self.parameters[key].gradient[2]:  # type: ignore[index]
                given[key] = same[key]
        self._before = dict.fromkeys(same, KEPT) | dict.fromkeys(given, TOUCHED)
        found = (
            samples.BatchedSampler().taken(
                [*given.values()], whole=self._full(), sparse=self._sparse_of(given)
            )[0]
            if given
            else ()
        )
        self._touched = dict(zip(given, found, strict=True))
        self._masks.unchanged(same.keys() - given.keys())
        self._masked = self._masks.changed(given)
        self._unseen &= self._before.keys()
        self._standing = {key: raw for key, raw in self._standing.items() if key in self._before}

    @_guarded(SUMS)
    def _accumulated(self, key: int, parameter: torch.Tensor) -> None:
        if self.is_silent:
            return
        running = self.running()
        if running is None:
            self._unseen.add(key)
        if running is None or not running.record.accumulates or parameter.grad is None:
            return
        if key not in self._shards:
            self._arrived(running.record, {key: parameter})
        elif running.record not in self._late:
            # what stands here is reduced later in this pass or in another one
            self._late.append(running.record)

    def _arrived(self, record: PassRecord, parameters: Mapping[int, torch.Tensor]) -> None:
        """Note what has arrived at some parameters."""
        # in the order in which all other looks at them are, so that their places are found once
        gradients = {key: p.grad for key, p in sorted(parameters.items())}
        given = {key: gradient for key, gradient in gradients.items() if gradient is not None}
        record.now |= self._taken(given) if self._sums else dict.fromkeys(given, samples.NOTHING)
        # passes inside of this one: one arrival, from the first state to the last
        record.arrivals = {key: self._before.get(key, NONE) for key in given} | record.arrivals
        record.was |= {key: self._touched[key] for key in self._touched.keys() & given.keys()}
        record.masked |= {key: self._masked[key] for key in self._masked.keys() & given.keys()}
        if self._sums:
            self._masks.begun(key for key in given if key not in self._before)
            self._masks.arrived(given, full=self._full(), sparse=self._sparse)

    def _taken(
        self, gradients: Mapping[int, torch.Tensor], *, whole: bool = False
    ) -> dict[int, Raw]:
        """Sample the gradients of some parameters, and note that this is how they stand."""
        found, marks = self._gradients_of.taken(
            [*gradients.values()],
            whole=whole or self._full(),
            sparse=self._sparse_of(gradients),
        )
        for (key, gradient), mark in zip(gradients.items(), marks, strict=True):
            known = self.parameters[key]
            reference = known.gradient[0] if known.gradient is not None else None
            if reference is None or reference() is not gradient:
                reference = weakref.ref(gradient, functools.partial(self._let_go, key))
            known.gradient = reference, gradient._version, mark
        return dict(zip(gradients, found, strict=True))

    def _sparse_of(self, keys: Iterable[int]) -> set[int]:
        """Return the indices of parameters whose gradients are sampled as a whole in any window."""
        if not self._sparse:
            return set()
        return {i for i, key in enumerate(keys) if key in self._sparse}

    def _let_go(self, key: int, _: Any) -> None:
        known = self.parameters.get(key)
        if known is None or self.is_silent or not self._handles:
            return
        # called for each gradient, of which the first one of each optimizer tells: several may be
        # reset one after the other, and the line that throws away what is needed is that of one
        for optimizer in known.groups:
            if optimizer not in self._resets or optimizer in self._let_go_in_pass:
                self._note_reset(optimizer)

    @_guarded(SUMS)
    def _note_reset(self, optimizer: int | None) -> None:
        """Note where gradients of an optimizer are let go, as by `zero_grad`, which has no hook."""
        self._resets[optimizer] = current_place()
        # FSDP lets go of gathered gradients in the backward: a reset after it is what is looked for
        if self.running() is None:
            self._let_go_in_pass.discard(optimizer)
        else:
            self._let_go_in_pass.add(optimizer)

    @_guarded(SUMS)
    def _arrive_all(self, running: ActivePass) -> None:
        if self._accumulated_into and running.record.accumulates:
            arrived = {self._keys[id(parameter)]: parameter for parameter in self._accumulated_into}
            self._arrived(running.record, arrived)
            self._graphs.arrived(running.record.place, arrived.keys())
        self._accumulated_into.clear()
        if self._shards:
            self._arrive_at_shards(running.record)

    def _arrive_at_shards(self, record: PassRecord) -> None:
        """Note which shards have changed in a pass: FSDP reduces into them what has arrived at
        gathered parameters.
        """
        silent = self._shards - record.arrivals.keys()
        if record.arrivals and silent and record not in self._late:
            self._late.append(record)
        found = False
        for key in silent:
            known = self.parameters[key]
            parameter = known.reference()
            if (
                parameter is None
                or (gradient := parameter.grad) is None
                or parameter.is_leaf is False
            ):
                continue
            before = self._before.get(key, NONE)
            same = before == KEPT and _is_same(known, gradient)
            if same and samples.BatchedSampler().marks([gradient])[0] == known.gradient[2]:  # type: ignore[index]
                continue
            if before == TOUCHED and _equal(
                self._touched[key],
                samples.sample(gradient, whole=self._full() or key in self._sparse),
            ):
                continue
            found = True
            for earlier in self._late:
                earlier.arrivals.setdefault(key, LATE)
            record.arrivals.pop(key, None)
            self._arrived(record, {key: parameter})
            record.shards[key] = self._divisor(parameter)
        if found:
            self._late.clear()

    def _divisor(self, shard: torch.Tensor) -> float:
        """Return by what FSDP divides the sum of the ranks' gradients: their number, or what the
        program has set.
        """
        if self._groups is None:
            self._groups = _groups_of_shards()
        reference = self._groups.get(id(shard))
        ranks = float(torch.distributed.get_world_size())
        group: Any = None if reference is None else reference()
        divisor = float(getattr(group, "gradient_divide_factor", None) or ranks)
        if hasattr(group, "_gradient_postdivide_factor"):
            divisor = float(group._gradient_predivide_factor * group._gradient_postdivide_factor)
        what = "the mean" if divisor == ranks else f"the sum, divided by {divisor:g},"
        said = (
            f"gradients are sharded over the ranks: what is reduced into them is taken for {what}"
            " over all ranks"
        )
        self.notes[finding("sharded-gradients", said)] = 1
        return divisor

    def _bracket_user_hooks(self, key: int, parameter: torch.Tensor) -> None:
        """Look at a gradient before and after the program's own hooks on a parameter."""
        known = self.parameters[key]
        hooks = parameter._backward_hooks
        if known.hooks is None:
            known.hooks = (
                parameter.register_hook(lambda g, known=known: self._raw(known, g)),
                parameter.register_hook(lambda g, known=known: self._hooked(key, known, g)),
            )
            self._handles += known.hooks
        _arrange(hooks, [known.hooks[0].id], [known.hooks[1].id])

    @_guarded(SUMS)
    def _raw(self, known: TrackedParameter, gradient: torch.Tensor | None) -> None:
        known.raw = None
        # a function of one's own may return None for an input that requires a gradient
        if gradient is None or gradient.layout != torch.strided:
            return
        own = gradient.detach()
        some = some_of(own)
        whole = self._full()
        is_read = isinstance(some, np.ndarray)
        # hooks that return another tensor leave what came as it was, which is compared itself: to
        # sample both reads each of them several times
        is_held = whole and is_read and not known.keeps_memory
        is_sampled = _is_distributed() or not is_read or (whole and not is_held)
        known.raw = BeforeHooks(
            own if is_held else None,
            some,
            samples.sample(own, whole=whole) if is_sampled else None,
            own.data_ptr() if is_read else 0,
        )

    @_guarded(SUMS)
    def _hooked(self, key: int, known: TrackedParameter, gradient: torch.Tensor | None) -> None:
        """Note what the program's hooks have made of a gradient."""
        raw = known.raw
        known.raw = None
        running = self.running()
        if raw is None or gradient is None or gradient.layout != torch.strided or running is None:
            return
        own = gradient.detach()
        some = some_of(own)
        sampled = None
        if raw.sampled is not None:
            sampled = raw.sampled, samples.sample(own, whole=self._full())
        parameter = known.reference()
        hooks = () if parameter is None else (parameter._backward_hooks or {}).values()
        times = most_alike(hooks, len(known.hooks or ()))
        if isinstance(some, torch.Tensor) or isinstance(raw.some, torch.Tensor):
            self._hooked_on_device(key, known, raw.some, some, sampled, running.record, times)
            return
        known.keeps_memory = raw.address == own.data_ptr()
        # what was written in place may have been written to where no element was looked at
        is_other = raw.gradient is not None and (
            known.keeps_memory or not samples.are_equal(raw.gradient, own)
        )
        if key in self._changes:  # another pass inside of this one
            self._compare_changes()
        self._changes[key] = Change(
            key,
            running.record,
            raw.some,
            some,
            sampled,
            times,
            is_other,
        )

    def _hooked_on_device(
        self,
        key: int,
        known: TrackedParameter,
        before: Some,
        after: Some,
        sampled: tuple[Raw, Raw] | None,
        record: PassRecord,
        times: int,
    ) -> None:
        """Compare what a device has, which is read at the step."""
        last = known.ratio
        ratio = ratio_on_device(torch.as_tensor(after), torch.as_tensor(before))
        known.ratio = ratio
        if sampled is not None:
            then, now = sampled
            one = HookedGradient(key, record, then, now, are_alike_on_device(ratio, last), times)
            record.unread_hooks.append(one)

    @_guarded(SUMS)
    def _compare_changes(self) -> None:
        """Compare the factors by which the program's hooks change gradients with those of the last
        pass.
        """
        changes = self._changes
        self._changes = {}
        last = dict[int, Vector]()
        for key in changes:
            known = self.parameters.get(key)
            if known is not None and isinstance(known.ratio, np.ndarray):
                last[key] = known.ratio
        for found in compare_together(changes.values(), last):
            known = self.parameters.get(found.change.key)
            if known is None:  # the program has let the parameter go since
                continue
            # ratios of all elements, kept from pass to pass, would take the memory of the
            # parameters
            known.ratio = found.ratio
            if not known.is_left(is_same=found.is_same, is_alike=found.is_alike):
                one = found.change
                then, now = found.vectors()
                self._judge_hook(
                    one.record, one.key, then, now, is_alike=found.is_alike, times=one.times
                )

    def _judge_hook(
        self,
        record: PassRecord,
        key: int,
        then: Vector,
        now: Vector,
        *,
        is_alike: bool,
        times: int,
    ) -> None:
        """Note by what the program's hooks have changed a gradient.

        Args:
            record: of the pass.
            key: of the parameter.
            then: a sample of the gradient before the hooks.
            now: the same after them.
            is_alike: whether the factors are those of the last pass.
            times: how often one of the hooks is on the parameter.
        """
        known = self.parameters[key]
        fixed = is_alike or not known.is_changed
        known.is_changed = True
        record.hooked[key] = fixed
        if _is_distributed():
            record.raw[key] = then
        if 0 < known.times < times:
            record.again.add(key)
        known.times = times
        if (found := factor(now, then, 1e-3)) is not None:
            record.factors[key] = found

    def _forget_dead(self) -> None:
        dead = [
            (i, key) for i, key in self._keys.items() if self.parameters[key].reference() is None
        ]
        self._masks.begun(key for _, key in dead)
        for identity, key in dead:
            del self._keys[identity], self.parameters[key]

    # Steps

    def index(self, optimizer: Any) -> int:
        """Return the index of an optimizer."""
        identity = id(optimizer)
        known = self._optimizers.get(identity)
        if known is not None and known[0]() is optimizer:
            return known[1]
        index = self._next_optimizer
        self._next_optimizer = self._next_optimizer + 1
        # a program may make one for each of thousands of tasks. The collector calls this anywhere,
        # so what is kept of one that has gone is dropped at the next step
        gone = self._gone.append
        reference = weakref.ref(optimizer, lambda _: gone((identity, index)))
        self._optimizers[identity] = reference, index
        return index

    def _living_optimizers(self) -> Iterator[Any]:
        # one may begin to step in another thread
        for reference, _ in list(self._optimizers.values()):
            if (optimizer := reference()) is not None:
                yield optimizer

    def _find_clocks(self) -> None:
        # no finding of theirs is worth the judgement of the sums
        with self._beside_the_judgement(CLOCKS):
            self._clocks.find(alive_of(known.reference for known in self.parameters.values()))

    def _forget_optimizers(self) -> None:
        while self._gone:
            identity, index = self._gone.pop()
            if self._optimizers.get(identity, (None, None))[1] == index:
                del self._optimizers[identity]
            for kept in (self._passes_at_step, self._wrapped, self._idle):
                kept.pop(index, None)
            self._let_go_of(index)

    def _step_is_called(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Look at a step after all hooks of the program, which may write to `.grad`."""
        own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        if own is None:
            return self._step_begins(optimizer, args, kwargs)
        # torch has begun with those of all optimizers, and comes to this optimizer's own
        self._drop_last_hook(optimizer)
        own[MARK, id(self)] = self._step_begins
        return None

    def _drop_last_hook(self, optimizer: Any) -> None:
        getattr(optimizer, "_optimizer_step_pre_hooks", {}).pop((MARK, id(self)), None)

    @_guarded(STEPS, computes=False)
    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self.is_silent or not self._handles:
            return None
        nested = False
        if self._stepping:
            # a step that has raised has not ended, and nothing but the stack tells
            stepping = _optimizers_on_the_stack(optimizer)
            # a step of a subclass that calls the one of its base class is one step
            nested = len(stepping) > 1
            if nested and any(one is optimizer for one in stepping[1:]):
                self._stepping += 1
                return None
            self._stepping = self._stepping if nested else 0
        self._stepping += 1
        if self._gone:
            self._forget_optimizers()
        self.steps_seen += not nested
        if not self.records:
            if nested or not self._resumes(self.index(optimizer)):
                return None
            self.resume(self.steps_seen - 1)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.step(optimizer, True)
            return None

        def run(*arguments: Any, **keywords: Any) -> Any:
            value = closure(*arguments, **keywords)
            self.step(optimizer)
            return value

        return args[:1] + args[2:], {**kwargs, "closure": run}

    @_guarded(STEPS, computes=False)
    def _step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepping = max(self._stepping - 1, 0)
        self._drop_last_hook(optimizer)
        self._stepped_at = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if not self.records:
            self._passes_at_last_step = self.passes_seen
            return
        index = self.index(optimizer)
        if index in self._passes_at_step:  # those of a closure, too
            self._passes_at_step[index] = self._passes_at_last_step = self.passes_seen
        if (step := self._idle.pop(index, None)) is not None:
            self._idle_ends(step)

    @_guarded(STEPS)
    def _idle_ends(self, step: StepRecord) -> None:
        now = self._values(step.moved)
        then = [step.moved[key] for key in now]
        values = samples.read_samples([*now.values(), *then])
        with np.errstate(invalid="ignore"):
            for i, key in enumerate(now):
                step.moved[key] = values[i] - values[len(now) + i]
        self._receive(step)

    def _values(self, keys: Iterable[int]) -> dict[int, Raw]:
        """Return a sample of the values of some parameters."""
        found = {key: self.parameters[key].reference() for key in keys}
        return {
            key: samples.sample(parameter, whole=True)
            for key, parameter in found.items()
            if parameter is not None
        }

    def _overlaid(self, tensors: Mapping[int, torch.Tensor]) -> list[int]:
        """Return the keys of tensors that share memory, as `head.weight =
        Parameter(embedding.weight.data)` leaves.
        """
        found = set[int]()
        end = 0
        before = 0
        own = {
            k: t for k, t in tensors.items() if type(t) in samples.OWN and not samples.is_shard(t)
        }
        plain = {k: t for k, t in own.items() if t.layout == torch.strided and not t.is_meta}
        ranges = ((t.data_ptr(), t.numel() * t.element_size(), k) for k, t in plain.items())
        for begin, size, key in sorted(one for one in ranges if one[1]):
            if begin < end:
                found |= {before, key}
            if begin + size > end:
                end = begin + size
                before = key
        return sorted(found)

    @_guarded(STEPS)
    def step(self, optimizer: Any, is_whole: bool = False) -> None:
        """Note a step: what stands in `.grad`.

        Args:
            optimizer: that steps.
            is_whole: whether it steps once and for all when this returns, and not once for each
                call of a closure.
        """
        if not self.records:  # a closure that is called once more
            return
        self._let_stacks_end()
        own = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        if self._is_unlike_others(own):
            return
        self._note_unseen()
        self._read_standing()
        index = self.index(optimizer)
        is_first = index not in self._passes_at_step
        idle = is_whole and self._sums and self._passes_at_step.get(index) == self.passes_seen
        self._passes_at_step[index] = self._passes_at_last_step = self.passes_seen
        given, gradients, unwritten = self._look_at_step(own, idle=idle)
        if not self._clocks.are_found and self.passes_seen > 1:
            self._find_clocks()
        for earlier in self._late:  # never reduced
            for key in self._shards & gradients.keys():
                earlier.arrivals.setdefault(key, LATE)
        trainer, steps, scale = trainer_on_the_stack()
        # a fused optimizer divides inside of its step
        divisor = getattr(optimizer, "grad_scale", None)
        fused = isinstance(divisor, torch.Tensor)
        step = StepRecord(
            index,
            current_place(),
            gradients,
            self.steps_seen - 1,
            float(divisor) if isinstance(divisor, torch.Tensor) else scale,
            fused,
            steps,
            trainer,
            self._is_wrapped(index) or bool(self._late),
            unwritten=unwritten,
            has_unseen=not self._unseen.isdisjoint(gradients),
            masked=self._masks.stepped(given),
        )
        step.before_clipping = {
            key: one for key, one in self._before_clipping.items() if key in gradients
        }
        self._unseen -= gradients.keys()
        self._late.clear()
        if step.scale is None:
            self._clocks.note_scale(step, optimizer)
        step.frozen = frozenset(self._keys[id(p)] for p in own if not p.requires_grad)
        if is_first:
            for key in gradients:
                known = self.parameters[key]
                known.owners = (*known.owners, index)
            self._note_memory(step, own, given)
        if idle:
            step.moved = self._values(gradients)
            # until it has ended: only then is it known whether it has moved anything
            self._idle[index] = step
        else:
            self._receive(step)

    def _let_stacks_end(self) -> None:
        """Let nodes keep no stacks any more where the line of each loss is known."""
        is_last = self._stacks_until == self.steps_seen + 1
        if is_last and all(known.losses for known in self._lines.values()):
            self._stacks_until = self.steps_seen
        if not self._wants_stacks:
            self._stacks.end()

    def _is_unlike_others(self, own: Sequence[torch.Tensor]) -> bool:
        """Return whether a step is one that cannot be judged, and say so."""
        if _task() != -1:
            said = (
                "an optimizer steps inside of a backward pass, which has not ended: these steps"
                " were not judged"
            )
            self.notes[finding("step-inside-backward", said)] += 1
            return True
        if any(
            getattr(p, "_fsdp_flattened", False) and not getattr(p, "_is_flat_param", False)
            for p in own
        ):
            said = (
                "FSDP with use_orig_params=True takes `.grad` away while it computes: neither sums"
                " nor weights of these steps were judged; those of `fully_shard` and of"
                " use_orig_params=False can be"
            )
            self.notes[finding("original-parameters", said, remedy="")] += 1
            return True
        return False

    def _look_at_step(
        self, own: Sequence[torch.Tensor], *, idle: bool
    ) -> tuple[dict[int, torch.Tensor], dict[int, Raw | None], list[int]]:
        """Look at what stands in `.grad` at a step.

        Args:
            own: the parameters of the optimizer.
            idle: whether nothing has gone backward since its last step.

        Returns:
            the gradients; a sample of each, or None; the keys of those that nothing was written to
            since the last look.
        """
        gradients: dict[int, Raw | None] = {}
        given: dict[int, torch.Tensor] = {}
        self._forget_dead()
        first = self._next_key
        for parameter in own:
            key = self._watch(parameter)
            gradient = parameter.grad
            gradients[key] = None
            if gradient is not None and self._sums:
                given[key] = gradient
            if key >= first and gradient is not None and self._graphs.has_passed_by:
                self._unseen.add(key)  # it may have arrived from a graph that was not walked
        if self._next_key > first:
            self._graphs.forget()
        self._graphs.end_window()
        before = {key: self.parameters[key].gradient for key in given}
        # from a step on, so that a window is sampled in one way
        self._sparse = frozenset(self.sparse)
        gradients |= self._taken(dict(sorted(given.items())), whole=idle)
        unwritten = [
            key for key, was in before.items() if _is_unwritten(was, self.parameters[key].gradient)
        ]
        return given, gradients, unwritten

    def _is_wrapped(self, index: int) -> bool:
        """Return whether something may reduce the gradients of an optimizer over ranks."""
        if _is_distributed() and index not in self._wrapped:
            # a search through all objects, once for each optimizer
            self._wrapped[index] = bool(live_instances(torch.nn.parallel.DistributedDataParallel))
        return self._wrapped.get(index, False)

    def _note_memory(
        self, step: StepRecord, own: Sequence[torch.Tensor], given: Mapping[int, torch.Tensor]
    ) -> None:
        """Note at an optimizer's first step what it lists twice, what shares memory, and values."""
        times = Counter(map(id, own))
        step.twice = sorted(self._keys[i] for i, number in times.items() if number > 1)
        step.overlaid = self._overlaid({self._keys[id(p)]: p for p in own})
        step.overlapping = self._overlaid(given)
        reached = self.last.record.arrivals.keys() if self.last is not None else set[int]()
        if _is_distributed():
            step.values = self._values(step.gradients)
        elif reached.isdisjoint(step.gradients):
            # they may be copies, which have the values of their parameters
            step.values = self._values(self.parameters)


def _written(
    roots: Sequence[Any], line: str, unmoved: Callable[[], Set[int]], stepped_at: int
) -> Written | None:
    """Return what a pass that begins reads and that was written since the forward.

    Nothing is asked of a device, which would have to be waited for.

    Args:
        roots: of the pass.
        line: of its backward.
        unmoved: returns the ids of the parameters that are what they were at the forward.
        stepped_at: the number that autograd had for the next node when an optimizer stepped last.
    """
    tensors = [root for root in roots if isinstance(root, torch.Tensor)]
    if any(map(samples.is_on_device, tensors)):
        return None
    found = written_since(edge_of(root)[0] for root in roots)
    if found is None and len(roots) == 1 and isinstance(roots[0], torch.Tensor):
        # the program may have written to the loss itself, which no backward reads
        found = None if roots[0]._version else rewritten_loss(roots[0])
        if found is not None and is_written_loss(line):
            found = None
        found = found or rewritten_outside(roots[0], unmoved, stepped_at)
        # under a mode of the program's, operations may give something else than they do here
        if found is not None and _modes_of_program():
            found = None
    return found


def _modes_of_program() -> list[Any]:
    """Return the modes of the program's own classes, which change what operations do.

    A search through all objects, where something is about to be blamed.
    """
    modes = live_instances(TorchDispatchMode, TorchFunctionMode)
    own = ("torch.", __name__.partition(".")[0])
    return [one for one in modes if not type(one).__module__.startswith(own)]


def _is_same(known: TrackedParameter, gradient: torch.Tensor) -> bool:
    """Return whether nothing but its values tells that a gradient is another one than the last
    arrival left.
    """
    was = known.gradient
    return (
        was is not None
        and was[2] is not None
        and was[0]() is gradient
        and was[1] == gradient._version
    )


def _is_unwritten(was: Any, now: Any) -> bool:
    return was is not None and was[0] is now[0] and was[1:] == now[1:]


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _groups_of_shards() -> dict[int, weakref.ref[Any]]:
    """Return the id of each of FSDP's shards -> what reduces it and has the divisor.

    Torch documents none of this.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    found = dict[int, weakref.ref[Any]]()
    with contextlib.suppress(AttributeError):
        modules = live_instances(fsdp.FSDPModule) if fsdp else ()
        for module in modules:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                found |= {id(p.sharded_param): weakref.ref(group) for p in group.fsdp_params}
    with contextlib.suppress(AttributeError):
        wrapped = live_instances(fsdp.FullyShardedDataParallel) if fsdp else ()
        for module in wrapped:
            found[id(module._flat_param)] = weakref.ref(module)
    return found


def _equal(one: Raw | None, other: Raw) -> bool:
    """Return whether two samples on a CPU are the same."""
    return (
        isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and list(one) == list(other)
    )


def _in_words(error: Exception) -> str:
    """Return an error of the suite's, with its place there."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


def _hide_from_dynamo() -> None:
    """Let Dynamo run the suite's frames as they are: it compiles what is entered below a compiled
    function.

    `torch.compiler.disable` would import Dynamo, which takes a second.
    """
    evaluation: Any = torch._C._dynamo.eval_frame
    action = evaluation._FrameAction
    own = str(Path(__file__).parents[1])
    as_it_is = evaluation._FrameExecStrategy(action.SKIP, action.DEFAULT)
    # `gc.freeze()` hides functions from the collector, but not from their modules
    modules = [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.startswith("gradcheck_suite.")
    ]
    named = list(chain.from_iterable(list(namespace.values()) for namespace in modules))
    named += list(
        chain.from_iterable(list(vars(one).values()) for one in named if isinstance(one, type))
    )
    functions = [
        getattr(value, "fget", None) or getattr(value, "__wrapped__", value) for value in named
    ]
    functions += live_instances(FunctionType)
    codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    stack = [code for code in codes if code.co_filename.startswith(own)]
    while stack:
        code = stack.pop()
        evaluation.set_code_exec_strategy(code, as_it_is)
        stack += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _optimizers_on_the_stack(optimizer: Any) -> list[Any]:
    """Return the optimizers whose steps are on the stack, innermost first: one that begins to step,
    and those that step it.
    """
    frame: FrameType | None = sys._getframe(2)
    found: list[FrameType] = []
    while frame is not None:
        if frame.f_code is _STEP:
            found.append(frame)
        frame = frame.f_back
    # to ask a frame for its variables takes longer than the rest
    outer = [one.f_locals.get("args", ())[:1] for one in found[1:]]
    return [optimizer, *itertools.chain.from_iterable(outer)]


_STEP: CodeType = next(
    code
    for code in torch.optim.Optimizer.profile_hook_step.__code__.co_consts
    # since Python 3.14 what computes the wrapper's annotations is a code object, too (PEP 649)
    if isinstance(code, CodeType) and code.co_name != "__annotate__"
)
"""What runs around each step, and calls the hooks of steps."""


def _arrange(hooks: Any, first: Sequence[int], last: Sequence[int]) -> None:
    """Put hooks in order: autograd walks the OrderedDict as a plain dict, where `move_to_end`
    changes nothing.
    """
    if len(hooks) > len(first) + len(last):
        items = dict(hooks)
        keys = [*first, *(key for key in items if key not in first and key not in last), *last]
        if list(dict.keys(hooks)) != keys:
            hooks.clear()
            hooks.update((key, items[key]) for key in keys)
