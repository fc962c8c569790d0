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
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

from gradcheck_suite.auditing.jax import calls, functions, marks
from gradcheck_suite.auditing.jax.beside import BesidePrograms, TooLargeError
from gradcheck_suite.auditing.jax.calls import CompiledCall
from gradcheck_suite.auditing.jax.functions import Marking, observed, seen_by_optimizer
from gradcheck_suite.auditing.jax.marks import MappedAxis, Mark, PassMark, UpdateMark
from gradcheck_suite.auditing.jax.replay import (
    CannotReplayError,
    Event,
    UnreadMarks,
    events_of,
    kept_mark,
)
from gradcheck_suite.auditing.schedule import Schedule
from gradcheck_suite.core.findings import Occurrence, finding


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
        # three thirds of a step fall short of one by rounding
        whole = int(self.owed + 1e-9)
        self.owed -= whole
        return whole


@dataclass
class Counts:
    """What a run had so far.

    Attributes:
        steps: optimizer steps, those that were only counted among them.
        counted: those of them that were only counted.
        cut: those of them that stand in a scan behind the iterations that were looked at.
        passes: gradients of losses.
        seconds: that the audit has taken.
    """

    steps: int = 0
    counted: int = 0
    cut: int = 0
    passes: int = 0
    seconds: float = 0.0


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
        counts: what it has seen so far.
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
        self.notes: Counter[Occurrence] = Counter()
        self.counts = Counts()
        self._receive = receive
        self._schedule = schedule
        self._most = steps
        self.is_open = self._is_busy = self._is_paused = False
        self._programs = BesidePrograms(say)
        self._rates: weakref.WeakKeyDictionary[object, Rate] = weakref.WeakKeyDictionary()
        self._seen: set[int] = set()
        self._stack = contextlib.ExitStack()
        self.marking = Marking(self._marks_now, self.switch_off)

    # What is on.

    def open(self) -> None:
        """Begin to watch."""
        self.is_open = True
        self._stack.enter_context(_jax_replaced(self.marking))
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

    def on_call(self, function: object, look: Callable[[], CompiledCall]) -> None:
        """Look at a call of a compiled function."""
        if self._is_paused:
            rate = self._rates.get(function)
            self._count(0 if rate is None else rate.due())
            if self._is_paused:
                return
        call = self._traced(look)
        if call is None:
            return
        before = self.counts.steps
        with self._guarded(f"`{call.name}`"):
            beside = self._programs.of(call.closed)
            self._seen.update(map(id, beside.marks))
            if beside.run is not None:
                found = self._programs.compute(beside, call)
                for said in beside.replay.notes:
                    self.notes[finding("unobserved-program", said)] += 1
                beside.replay.notes.clear()
                self._take(list(events_of(found)))
        rate = self._rates.setdefault(function, Rate())
        rate.calls += 1
        rate.steps += self.counts.steps - before

    def _traced(self, look: Callable[[], CompiledCall]) -> CompiledCall | None:
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
            self.counts.seconds += time.perf_counter() - start

    def _on_eager(self, mark: Mark, values: Sequence[Any], axes: tuple[MappedAxis, ...]) -> None:
        """Take a mark whose values are there, outside of any compiled function."""
        if not self.is_open or self._is_busy:
            return
        if self._is_paused:
            self._count(int(isinstance(mark, UpdateMark) and not mark.depth))
            return
        with self._guarded("a gradient outside of compiled functions"):
            found = jax.device_get(self._programs.summary(mark, axes)(*values))
            self._take(list(events_of([kept_mark(mark, axes, found)])))

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Do something of the audit's own, in JAX's default modes, and count its time."""
        start = time.perf_counter()
        self._is_busy = True
        try:
            # the user's debug modes and strict promotion are for their own program: ours holds NaN
            # on purpose, and would stop at them
            with (
                jax.debug_nans(False),
                jax.debug_infs(False),
                jax.numpy_dtype_promotion("standard"),
                jax.numpy_rank_promotion("allow"),
            ):
                yield
        except (CannotReplayError, TooLargeError) as reason:
            self.notes[finding("unobserved-program", f"{what} was not judged: {reason}")] += 1
            self._receive([UnreadMarks()])
        except Exception as error:
            # the program's own errors come again in its own call; what is lost is said
            said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            said = f"{what} could not be looked into ({said})"
            self.notes[finding("unobserved-program", said)] += 1
            self._receive([UnreadMarks()])
        finally:
            self._is_busy = False
            self.counts.seconds += time.perf_counter() - start

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, UnreadMarks):
                self.counts.cut += event.steps
                self.counts.steps += event.steps
                self._receive([event])
                continue
            self._seen.add(id(event.mark))
            if isinstance(event.mark, PassMark):
                self.counts.passes += 1
            self._receive([event])

    def on_step(self) -> None:
        """Count a step that was judged, and end or pause the audit where that is due."""
        self.counts.steps += 1
        if self._most is not None and self.counts.steps >= self._most:
            self.is_open = False
        elif not self._is_paused:
            passes = self.counts.passes
            seconds = self.counts.seconds
            goes_on = self._schedule.after(
                0,
                passes,
                seconds,
                was_full=False,
            )
            self._is_paused = not goes_on

    def _count(self, steps: int) -> None:
        """Count steps that are not judged, until it is time to judge again."""
        self.counts.steps += steps
        self.counts.counted += steps
        for _ in range(steps):
            if self._schedule.resumes(0, self.counts.passes, self.counts.seconds):
                self._is_paused = False
                self._receive([UnreadMarks()])

    # The end.

    def unseen(self) -> list[Mark]:
        """Return the marks of programs that were traced, and whose calls could not be looked at."""
        traced = self.marking.traced
        # what JAX has traced more than once was looked at once
        places = {mark.place for mark in traced if id(mark) in self._seen}
        return [mark for mark in traced if mark.place not in places]


# What is replaced. A module that the program imports later is changed when it is there.


@contextlib.contextmanager
def _jax_replaced(now: Marking) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        replace(
            stack,
            jax,
            "value_and_grad",
            functions.value_and_grad,
        )
        replace(
            stack,
            jax,
            "grad",
            functions.grad,
        )
        replace(
            stack,
            jax,
            "vjp",
            functions.vjp,
        )
        replace(
            stack,
            jax,
            "jit",
            calls.jit,
        )
        replace(
            stack,
            jax,
            "pmap",
            calls.pmap,
        )
        for primitive in calls.LOOPS:
            replace(
                stack,
                primitive,
                "impl",
                calls.Loop(primitive, primitive.impl),
            )
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
    # `getattr` of a class unwraps a `staticmethod`: to put that back would change the class
    kept = holder.__dict__[name] if isinstance(holder, type) else getattr(holder, name)
    setattr(holder, name, value)
    stack.callback(setattr, holder, name, kept)


def _in_optax(stack: contextlib.ExitStack, optax: ModuleType) -> None:
    """Mark the `update` of each transformation that is made from now on, and of `MultiSteps`."""
    multi_steps: Any = optax.MultiSteps
    real_update = multi_steps.update

    def update(self: Any, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        # an instance that was made before the audit began is marked at its first update
        marked = self.__dict__.get("update_marked_by_audit")
        if marked is None:
            marked = observed(real_update.__get__(self), "MultiSteps", multi=True)
            self.__dict__["update_marked_by_audit"] = marked
        return marked(
            updates,
            state,
            params,
            **extra,
        )

    replace(
        stack,
        multi_steps,
        "update",
        update,
    )
    transformation = optax.GradientTransformation  # others inherit how they are made
    real_new = transformation.__new__

    def new(cls: Any, init: Any, update: Any) -> Any:
        # `MultiSteps.gradient_transformation` hands on its own `update`, which is marked already
        is_multi = isinstance(getattr(update, "__self__", None), multi_steps)
        name = getattr(update, "__qualname__", "").partition(".")[0]
        return real_new(cls, init, update if is_multi else observed(update, name))

    replace(
        stack,
        transformation,
        "__new__",
        staticmethod(new),
    )


def _in_examples(stack: contextlib.ExitStack, optimizers: ModuleType) -> None:
    """Mark what an optimizer of `jax.example_libraries` is given."""
    kind = optimizers.Optimizer
    real_new = kind.__new__

    def new(cls: Any, init: Any, update: Any, params: Any) -> Any:
        owner = LATER[-1][1].new_owner() if LATER else 0

        def marked(i: Any, gradient: Any, state: Any) -> Any:
            return update(i, seen_by_optimizer(gradient, owner), state)

        return real_new(cls, init, marked, params)

    replace(
        stack,
        kind,
        "__new__",
        staticmethod(new),
    )


REPLACED_IN = {"optax": _in_optax, "jax.example_libraries.optimizers": _in_examples}
"""Modules that have optimizers, and what is replaced in each."""


def on_import(name: str) -> None:
    """Replace what is to be replaced in a module that was imported."""
    for stack, now in LATER[-1:]:
        try:
            REPLACED_IN[name](stack, sys.modules[name])
        except Exception as error:
            now.failed(error)
