"""The programs beside those of the user: compiled once, called before each call that is looked at."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from gradcheck_suite.auditing.jax.calls import CompiledCall
from gradcheck_suite.auditing.jax.losses import UNMARKED
from gradcheck_suite.auditing.jax.marks import (
    MappedAxis,
    Mark,
    PassMark,
    UpdateMark,
    summarized,
)
from gradcheck_suite.auditing.jax.replay import MarkedEvaluation, ProgramContents, replay_program

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options by which XLA compiles a program that runs a few times without most of its optimizations."""
LONG = 1.0
"""Seconds of compilation from which on it is said on the terminal."""
LARGE = 2**30
"""Bytes from which on the memory of a program beside the user's is said on the terminal."""
SLACK = 1.5
"""By which the memory that is free must exceed what a program beside the user's takes."""


class TooLargeError(Exception):
    """The program beside the user's does not fit into memory."""


@dataclass
class Beside:
    """The program beside one of the user's.

    Attributes:
        closed: the user's program.
        run: evaluates it and returns its marks; None where it has none.
        replay: what was noted on the way.
        marks: that are in it.
        compiled: shardings of the arguments -> what is called.
        compiling: seconds that its compilation took.
        running: seconds of its calls.
        is_quick: whether it is compiled without most optimizations.
    """

    closed: Any
    run: Any
    replay: MarkedEvaluation
    marks: list[Mark]
    compiled: dict[Any, Any] = field(default_factory=dict)
    compiling: float = 0.0
    running: float = 0.0
    is_quick: bool = True


class BesidePrograms:
    """Makes them, and keeps them.

    Args:
        say: prints a line on the terminal.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._contents = ProgramContents()
        self._programs: dict[int, Beside] = {}
        self._eager: dict[str, Any] = {}

    def of(self, closed: Any) -> Beside:
        """Return the program beside one of the user's."""
        key = id(closed.jaxpr)
        if key not in self._programs:
            run, replay = replay_program(closed, self._contents)
            inside = self._contents.marks(closed.jaxpr)
            lost = self._contents.without_effect(closed.jaxpr)
            for mark in inside:
                if isinstance(mark, UpdateMark):
                    mark.is_lost = id(mark) in lost
            has_marks = bool(inside)
            self._programs[key] = Beside(
                closed,
                run if has_marks else None,
                replay,
                inside,
            )
        return self._programs[key]

    def compute(self, beside: Beside, call: CompiledCall) -> Any:
        """Return what the program beside a call keeps, as arrays."""
        # a compiled program takes arguments of the shardings that it was compiled for, and no
        # others
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

    def _compile(self, beside: Beside, call: CompiledCall) -> Any:
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
        # an allocation that fails would end the user's training; a program that is not run costs
        # the verdict on its steps
        if free is not None and needed * SLACK > free:
            raise TooLargeError(
                f"the program beside it takes {needed / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB"
                " are free"
            )
        return compiled

    def summary(self, mark: Mark, axes: tuple[MappedAxis, ...]) -> Any:
        """Return the compiled summary of a mark; equal losses that are traced anew share one."""
        text = mark.program.signature() if isinstance(mark, PassMark) else ""
        key = f"{type(mark).__name__} {mark.shapes} {text} {_layout(mark)} {axes}"
        if key not in self._eager:
            self._eager[key] = UNMARKED.jit(
                lambda *values: summarized(mark, axes, values), compiler_options=QUICK
            )
        return self._eager[key]


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
        # a CPU's device has no such statistics, and returns None
        stats = device.memory_stats()
        if stats and "bytes_limit" in stats:
            free.append(stats["bytes_limit"] - stats["bytes_in_use"])
    if free:
        # the fullest device is the one that would fail
        return min(free)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        row = next(line for line in lines if line.startswith("MemAvailable:"))
        return float(row.split()[1]) * 1024
    return None
