"""Replaces the functions of JAX and optax that a script calls, and looks at what they mark.

An error of the audit's own ends the instrument, and never reaches the script.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from gradcheck_suite.auditing.jax import calls, functions, marks
from gradcheck_suite.auditing.jax.calls import Call, Compiled
from gradcheck_suite.auditing.jax.functions import Marking, observed, seen_by_optimizer
from gradcheck_suite.auditing.jax.losses import UNMARKED
from gradcheck_suite.auditing.jax.marks import Mark, PassMark, UpdateMark, summarized
from gradcheck_suite.auditing.jax.replay import (
    CannotReplayError,
    Contents,
    Cut,
    Event,
    MarkEvent,
    Replay,
    events_of,
    replay_program,
)
from gradcheck_suite.auditing.schedule import Schedule
from gradcheck_suite.core.findings import Found, finding

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options by which XLA compiles a program that runs a few times without most of its optimizations."""
LONG = 1.0
"""Seconds of compilation from which on it is said on the terminal."""
LARGE = 2**30
"""Bytes from which on the memory of a program beside the user's is said on the terminal."""
SLACK = 1.5
"""By which the memory that is free must exceed what a program beside the user's takes."""


class _TooLargeError(Exception):
    """The program beside the user's does not fit into memory."""


@dataclass
class Beside:
    """The program beside one of the user's.

    Attributes:
        closed: the user's program.
        run: evaluates it and returns its marks; None where it has none.
        replay: what was noted on the way.
        steps: optimizer steps that its last call showed; None before.
        compiled: shardings of the arguments -> what is called.
        compiling: seconds that its compilation took.
        running: seconds of its calls.
        is_quick: whether it is compiled without most optimizations.
    """

    closed: Any
    run: Any
    replay: Replay
    compiled: dict[Any, Any] = field(default_factory=dict)
    compiling: float = 0.0
    running: float = 0.0
    is_quick: bool = True


@dataclass
class Rate:
    """How often a compiled function steps: in one call of several under `MultiSteps`.

    Attributes:
        calls: that were looked at.
        steps: that they showed.
        owed: of calls that were not looked at, the part of a step that is not counted so far.
    """

    calls: int = 0
    steps: int = 0
    owed: float = 0.0

    def due(self) -> int:
        """Return how many steps to count for a call that is not looked at."""
        self.owed += self.steps / self.calls
        whole = int(self.owed + 1e-9)
        self.owed -= whole
        return whole


class JaxRecorder:
    """Watches a run of JAX.

    Args:
        receive: takes what happened, in its order.
        say: prints a line on the terminal.
        schedule: tells which windows are judged.
        steps: after how many steps the run goes on without the audit; None for never.

    Attributes:
        off: why the instrument was switched off; None while it is on.
        notes: what could not be looked at, and why -> how often.
        steps_seen: optimizer steps, those that were only counted among them.
        counted: those of them that were only counted.
        cut: those of them that stand in a scan behind the iterations that were looked at.
        passes_seen: gradients of losses.
        seconds: that the audit has taken.
        is_open: whether it watches.
    """

    def __init__(
        self,
        receive: Callable[[Sequence[Event]], None],
        say: Callable[[str], None],
        schedule: Schedule,
        steps: int | None,
    ) -> None:
        self.off: str | None = None
        self.notes: Counter[Found] = Counter()
        self.steps_seen = self.counted = self.cut = self.passes_seen = 0
        self.seconds = 0.0
        self._receive = receive
        self._say = say
        self._schedule = schedule
        self._most = steps
        self.is_open = self._is_busy = self._is_paused = False
        self._contents = Contents()
        self._programs: dict[int, Beside] = {}
        self._rates: weakref.WeakKeyDictionary[Compiled, Rate] = weakref.WeakKeyDictionary()
        self._eager: dict[str, Any] = {}
        self._seen: set[int] = set()
        self._stack = contextlib.ExitStack()
        self.marking = Marking(self._marks_now, self.switch_off)

    # What is on.

    def open(self) -> None:
        """Begin to watch."""
        self.is_open = True
        self._stack.enter_context(_replaced(self.marking))
        self._stack.enter_context(functions.marking(self.marking))
        calls.OBSERVERS.append(self)
        self._stack.callback(calls.OBSERVERS.remove, self)
        marks.RECORD.append(self._on_eager)
        self._stack.callback(marks.RECORD.remove, self._on_eager)

    def close(self) -> None:
        """Stop watching, and put JAX's own functions back."""
        self.is_open = False
        self._stack.close()

    def switch_off(self, error: Exception) -> None:
        """Stop watching since the audit itself has failed."""
        if self.off is None:
            self.off = f"{type(error).__name__}: {error}"[:400]
        self.is_open = False

    def _marks_now(self, kind: type[Mark]) -> bool:
        # a function that is traced while windows are only counted is judged later on, and an update
        # outside of compiled functions is counted
        is_idle = self._is_paused and kind is PassMark and calls.is_eager()
        return self.is_open and not self._is_busy and not is_idle

    def wants_calls(self) -> bool:
        """Return whether calls are looked at now."""
        return self.is_open and not self._is_busy

    # What happens.

    def on_call(self, function: Compiled, look: Callable[[], Call]) -> None:
        """Look at a call of a compiled function."""
        if self._is_paused:
            rate = self._rates.get(function)
            self._count(0 if rate is None else rate.due())
            if self._is_paused:
                return
        call = self._traced(look)
        if call is None:
            return
        before = self.steps_seen
        with self._guarded(f"`{call.name}`"):
            beside = self._beside(call.closed)
            if beside.run is not None:
                found = self._computed(beside, call)
                for said in beside.replay.notes:
                    self.notes[finding("unobserved-program", said)] += 1
                beside.replay.notes.clear()
                self._take(list(events_of(found)))
        rate = self._rates.setdefault(function, Rate())
        rate.calls += 1
        rate.steps += self.steps_seen - before

    def _traced(self, look: Callable[[], Call]) -> Call | None:
        """Return a call with its program; None where that fails, which its own call will show."""
        start = time.perf_counter()
        try:
            return look()
        except Exception as error:
            self._is_busy = True  # without marks
            try:
                look()
            except Exception:
                return None  # the program's own error
            finally:
                self._is_busy = False
            self.switch_off(error)
            return None
        finally:
            self.seconds += time.perf_counter() - start

    def _on_eager(self, mark: Mark, values: Sequence[Any]) -> None:
        """Take a mark whose values are there, outside of any compiled function."""
        if not self.is_open or self._is_busy:
            return
        if self._is_paused:
            self._count(int(isinstance(mark, UpdateMark) and not mark.depth))
            return
        with self._guarded("a gradient outside of compiled functions"):
            found = self._summary(mark)(*values)
            self._take([MarkEvent(mark, jax.device_get(found), 0, copies=False)])

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Do something of the audit's own, in JAX's default modes, and count its time."""
        start = time.perf_counter()
        self._is_busy = True
        try:
            with (
                jax.debug_nans(False),
                jax.debug_infs(False),
                jax.numpy_dtype_promotion("standard"),
                jax.numpy_rank_promotion("allow"),
            ):
                yield
        except (CannotReplayError, _TooLargeError) as reason:
            self.notes[finding("unobserved-program", f"{what} was not judged: {reason}")] += 1
            self._receive([Cut()])
        except Exception as error:
            # the program's own errors come again in its own call; what is lost is said
            said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            said = f"{what} could not be looked into ({said})"
            self.notes[finding("unobserved-program", said)] += 1
            self._receive([Cut()])
        finally:
            self._is_busy = False
            self.seconds += time.perf_counter() - start

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Cut):
                self.cut += event.steps
                self.steps_seen += event.steps
                self._receive([event])
                continue
            self._seen.add(id(event.mark))
            if isinstance(event.mark, PassMark):
                self.passes_seen += 1
            self._receive([event])

    def on_step(self) -> None:
        """Count a step that was judged, and end or pause the audit where that is due."""
        self.steps_seen += 1
        if self._most is not None and self.steps_seen >= self._most:
            self.is_open = False
        elif not self._is_paused:
            passes = self.passes_seen
            seconds = self.seconds
            goes_on = self._schedule.after(0, passes, seconds, was_full=False)
            self._is_paused = not goes_on

    def _count(self, steps: int) -> None:
        """Count steps that are not judged, until it is time to judge again."""
        self.steps_seen += steps
        self.counted += steps
        for _ in range(steps):
            if self._schedule.resumes(0, self.passes_seen, self.seconds):
                self._is_paused = False
                self._receive([Cut()])

    # The program beside the user's.

    def _beside(self, closed: Any) -> Beside:
        key = id(closed.jaxpr)
        if key not in self._programs:
            run, replay = replay_program(closed, self._contents)
            inside = self._contents.marks(closed.jaxpr)
            lost = self._contents.without_effect(closed.jaxpr)
            for mark in inside:
                if isinstance(mark, UpdateMark):
                    mark.is_lost = id(mark) in lost
            has_marks = bool(inside)
            self._seen.update(map(id, inside))
            self._programs[key] = Beside(closed, run if has_marks else None, replay)
        return self._programs[key]

    def _computed(self, beside: Beside, call: Call) -> Any:
        """Return what the program beside a call keeps, as arrays."""
        key = tuple(getattr(one, "sharding", None) for one in call.leaves)
        if beside.is_quick and beside.running > beside.compiling > 0:
            beside.is_quick = False  # it has run for longer than its compilation took
            beside.compiled.clear()
        if key not in beside.compiled:
            beside.compiled[key] = self._compile(beside, call)
        start = time.perf_counter()
        found = jax.device_get(beside.compiled[key](*call.leaves))
        beside.running += time.perf_counter() - start
        return found

    def _compile(self, beside: Beside, call: Call) -> Any:
        start = time.perf_counter()
        lowered = beside.run.lower(*call.leaves)
        compiled = lowered.compile(QUICK if beside.is_quick else None)
        beside.compiling = time.perf_counter() - start
        if beside.compiling > LONG:
            self._say(
                f"gradcheck-suite audit: compiled the program beside `{call.name}` in"
                f" {beside.compiling:.1f} s"
            )
        needed = _memory_of(compiled)
        free = _free_memory(call.leaves)
        if needed > LARGE:
            self._say(
                f"gradcheck-suite audit: the program beside `{call.name}` takes"
                f" {needed / 2**30:.1f} GiB"
            )
        if free is not None and needed * SLACK > free:
            raise _TooLargeError(
                f"the program beside it takes {needed / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB"
                " are free"
            )
        return compiled

    def _summary(self, mark: Mark) -> Any:
        """Return the compiled summary of a mark; equal losses that are traced anew share one."""
        text = mark.program.signature() if isinstance(mark, PassMark) else ""
        key = f"{type(mark).__name__} {mark.shapes} {text} {_layout(mark)}"
        if key not in self._eager:
            self._eager[key] = UNMARKED.jit(
                lambda *values: summarized(mark, (), values), compiler_options=QUICK
            )
        return self._eager[key]

    # The end.

    def unseen(self) -> list[Mark]:
        """Return the marks of programs that were traced, and whose calls could not be looked at."""
        traced = self.marking.traced
        # what JAX has traced more than once was looked at once
        places = {mark.place for mark in traced if id(mark) in self._seen}
        return [mark for mark in traced if mark.place not in places]


def _layout(mark: Mark) -> str:
    if isinstance(mark, UpdateMark):
        return f"{mark.results} {mark.parameters}"
    return str(mark.scaled)


def _memory_of(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)


def _free_memory(leaves: Sequence[Any]) -> float | None:
    """Return the bytes that are free where arrays lie; None where that is not known."""
    devices = set[Any]()
    for one in leaves:
        if isinstance(one, jax.Array):
            devices.update(one.devices())
    free = list[float]()
    for device in devices:
        stats = device.memory_stats()
        if stats and "bytes_limit" in stats:
            free.append(stats["bytes_limit"] - stats["bytes_in_use"])
    if free:
        return min(free)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        row = next(line for line in lines if line.startswith("MemAvailable:"))
        return float(row.split()[1]) * 1024
    return None


# What is replaced. A module that the program imports later is changed when it is there.


@contextlib.contextmanager
def _replaced(now: Marking) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        replace(stack, jax, "value_and_grad", functions.value_and_grad)
        replace(stack, jax, "grad", functions.grad)
        replace(stack, jax, "vjp", functions.vjp)
        replace(stack, jax, "jit", calls.jit)
        replace(stack, jax, "pmap", calls.pmap)
        LATER.append((stack, now))
        try:
            for name in REPLACED_IN:
                if name in sys.modules:
                    on_import(name)
            yield
        finally:
            LATER.clear()


LATER: list[tuple[contextlib.ExitStack, Marking]] = []
"""Where replaced names of modules that are imported later are put back."""


def replace(stack: contextlib.ExitStack, holder: Any, name: str, value: Any) -> None:
    """Replace a name until a stack is closed."""
    kept = holder.__dict__[name] if isinstance(holder, type) else getattr(holder, name)
    setattr(holder, name, value)
    stack.callback(setattr, holder, name, kept)


def _in_optax(stack: contextlib.ExitStack, optax: ModuleType) -> None:
    """Mark the `update` of each transformation that is made from now on, and of `MultiSteps`."""
    multi_steps: Any = optax.MultiSteps
    real_update = multi_steps.update

    def update(self: Any, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        marked = self.__dict__.get("update_marked_by_audit")
        if marked is None:
            marked = observed(real_update.__get__(self), "MultiSteps", multi=True)
            self.__dict__["update_marked_by_audit"] = marked
        return marked(updates, state, params, **extra)

    replace(stack, multi_steps, "update", update)
    transformation = optax.GradientTransformation  # others inherit how they are made
    real_new = transformation.__new__

    def new(cls: Any, init: Any, update: Any) -> Any:
        is_multi = isinstance(getattr(update, "__self__", None), multi_steps)
        name = getattr(update, "__qualname__", "").partition(".")[0]
        return real_new(cls, init, update if is_multi else observed(update, name))

    replace(stack, transformation, "__new__", staticmethod(new))


def _in_examples(stack: contextlib.ExitStack, optimizers: ModuleType) -> None:
    """Mark what an optimizer of `jax.example_libraries` is given."""
    kind = optimizers.Optimizer
    real_new = kind.__new__

    def new(cls: Any, init: Any, update: Any, params: Any) -> Any:
        owner = LATER[-1][1].new_owner() if LATER else 0

        def marked(i: Any, gradient: Any, state: Any) -> Any:
            return update(i, seen_by_optimizer(gradient, owner), state)

        return real_new(cls, init, marked, params)

    replace(stack, kind, "__new__", staticmethod(new))


REPLACED_IN = {"optax": _in_optax, "jax.example_libraries.optimizers": _in_examples}
"""Modules that have optimizers, and what is replaced in each."""


def on_import(name: str) -> None:
    """Replace what is to be replaced in a module that was imported."""
    for stack, now in LATER[-1:]:
        try:
            REPLACED_IN[name](stack, sys.modules[name])
        except Exception as error:
            now.failed(error)
