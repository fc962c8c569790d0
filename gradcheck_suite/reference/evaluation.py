"""Who evaluates JAX's derivatives: numpy, which XLA checks, or XLA alone.

A program is compiled by XLA in 40 to 400 ms, and called a few times. On a CPU and in float64 numpy
evaluates JAX's equations instead (`gradcheck_suite.reference.tape`). That is no other derivative,
but an evaluation that nobody else uses, so XLA checks it: one call of each program is computed by
XLA too, in every run, and so is each gradient that a violation or a finding rests on, before it is
said.
"""

from __future__ import annotations

import gc
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.extend.core import jaxpr_as_fun

from gradcheck_suite.core.comparison import elementwise_error
from gradcheck_suite.core.options import NUMPY
from gradcheck_suite.core.text import error_text
from gradcheck_suite.reference.tape import Tape, UnknownPrimitiveError, drawn_rounding

Tree = Any
"""A numpy array, a JAX array or a shape, or a dict or tuple of trees."""
Array = npt.NDArray[Any]
SMALL_PROGRAM = 12_000
"""Number of elements of all arguments up to which numpy is as fast as XLA, and up to which XLA compiles a program
without optimisation. Compilation then takes a quarter of the time, that of a convolution a seventh, and each call up to
0.2 ms more, a convolution 0.7 ms."""


class ProgramRequest(NamedTuple):
    """What a program computes.

    Attributes:
        key: identifies function and shapes; its repr is the same in every process.
        function: pure; traced only where there is no compiled program.
        arguments: trees with the shapes and dtypes of the calls' arguments.
    """

    key: Hashable
    function: Callable[..., Tree]
    arguments: tuple[Tree, ...]

    @classmethod
    def of(cls, key: Hashable, function: Callable[..., Tree], *arguments: Tree) -> ProgramRequest:
        """Return the request for a function on arguments like these, of which only the shapes are
        kept.

        Args:
            key: identifies what `function` computes; its repr must be the same in every process.
            function: pure.
            arguments: trees of float64, integer or boolean numpy arrays.
        """
        structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
        return cls((key, shapes(arguments)), function, structs)

    @property
    def is_small(self) -> bool:
        """Whether numpy may evaluate it."""
        return sum(math.prod(leaf.shape) for leaf in leaves(self.arguments)) <= SMALL_PROGRAM


# `jax.tree` takes ten times as long, and these run for every layer of every case


def shapes(tree: Tree) -> Hashable:
    """Return the shapes and dtypes of a tree."""
    if type(tree) is dict:
        return tuple([(name, shapes(tree[name])) for name in sorted(tree)])
    if type(tree) is tuple:
        return tuple([shapes(branch) for branch in tree])
    return tree.shape, tree.dtype.str


def leaves(tree: Tree) -> list[Any]:
    """Return the arrays of a tree, in JAX's order."""
    if type(tree) is dict:
        return list(chain.from_iterable(leaves(tree[name]) for name in sorted(tree)))
    if type(tree) is tuple:
        return list(chain.from_iterable(map(leaves, tree)))
    return [tree]


def copied(tree: Tree) -> Tree:
    """Return a tree of copies of its arrays."""
    if type(tree) is dict:
        return {name: copied(branch) for name, branch in tree.items()}
    if type(tree) is tuple:
        return tuple([copied(branch) for branch in tree])
    return np.array(tree)


@contextmanager
def collector_off() -> Iterator[None]:
    """Leave the garbage collector off while JAX traces: it makes ten thousand objects and no cycle
    worth a walk over all that torch and JAX have imported.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Who evaluates.


_evaluator = NUMPY


def evaluator() -> str:
    """Return who evaluates JAX's derivatives here."""
    return _evaluator


@contextmanager
def evaluated_by(name: str) -> Iterator[None]:
    """Let `"numpy"` or `"xla"` evaluate inside the block."""
    global _evaluator
    before = _evaluator
    _evaluator = name
    try:
        yield
    finally:
        _evaluator = before


# Programs on tapes, and the calls of them that XLA is to check.


class NumpyProgram:
    """A small program, evaluated by numpy."""

    def __init__(self, request: ProgramRequest) -> None:
        """Trace it.

        Raises:
            UnknownPrimitiveError: numpy has no operation for one of its equations.
        """
        with collector_off():
            closed, out = jax.make_jaxpr(request.function, return_shape=True)(*request.arguments)
        self._closed = closed
        self._tape = Tape(closed)
        self._structure = jax.tree.structure(out)

    def traced(self, *arguments: Tree) -> Tree:
        """Return what the program's equations give, for XLA to compile.

        JAX has derived them once. To derive them again takes most of what it takes to lower the
        program, and gives the same equations.
        """
        return self.tree(jaxpr_as_fun(self._closed)(*leaves(arguments)))

    def results(self, arguments: Tree) -> list[Array]:
        """Return the arrays that the program returns."""
        with np.errstate(all="ignore"):  # as in XLA
            return [np.asarray(result) for result in self._tape(*leaves(arguments))]

    def tree(self, results: Sequence[Array]) -> Tree:
        """Return the arrays in the structure that the program's function returns."""
        return jax.tree.unflatten(self._structure, results)


@dataclass(frozen=True)
class Sample:
    """A call of a program that XLA is to check.

    Attributes:
        request: the program.
        program: as numpy evaluates it.
        arguments: copies of those of the call.
        is_telling: whether an error could show; not where a cotangent of zeros makes every gradient
            zero.
    """

    request: ProgramRequest
    program: NumpyProgram
    arguments: tuple[Tree, ...]
    is_telling: bool


DRAWS = 6
"""Number of draws of rounding errors that a difference from XLA is held to."""
BEYOND_DRAWS = 16.0
"""Factor of the largest of these draws that is allowed: functions of XLA have larger errors than those of numpy."""
RESOLUTION = 64 * 2.0**-53
"""Relative to the largest element, what is not looked for: draws of an element may all be 0."""
UNDERFLOW = 2.0**-500
"""What is not looked for either: XLA takes numbers below 2**-1022 for 0, and these are about their square roots."""


def _drawn(sample: Sample) -> list[list[Array]]:
    """Return numpy's results of a call with drawn rounding errors, for each draw."""
    drawn: list[list[Array]] = []
    for seed in range(DRAWS):
        with drawn_rounding(seed):
            drawn.append(sample.program.results(sample.arguments))
    return drawn


def difference(sample: Sample, by_xla: Sequence[Array]) -> str | None:
    """Say how far numpy's results are from those of XLA, if that is more than rounding.

    Args:
        sample: the call.
        by_xla: what XLA returns for it.
    """
    by_numpy = sample.program.results(sample.arguments)
    drawn: list[list[Array]] = []
    for place, (mine, theirs) in enumerate(zip(by_numpy, by_xla, strict=True)):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"{mine.dtype}{mine.shape} and {theirs.dtype}{theirs.shape} in result {place}"
        # integers and truth values have no rounding error
        if mine.dtype.kind != "f":
            count = int((mine != theirs).sum())
            if count:
                return f"{count} of {mine.size} elements of result {place}"
            continue
        with np.errstate(all="ignore"):
            flat = mine.reshape(-1)
            error = elementwise_error(flat, theirs.reshape(-1))
            size = float(np.abs(flat[np.isfinite(flat)]).max(initial=0.0))
            resolution = RESOLUTION * size + UNDERFLOW
            # the draws could only allow more: nine programs of ten need none
            if not (error > resolution).any():
                continue
            drawn = drawn or _drawn(sample)
            moved = [elementwise_error(each[place].reshape(-1), flat) for each in drawn]
            allowed = np.maximum(BEYOND_DRAWS * np.max(moved, axis=0), resolution)
            above = error > allowed
        if above.any():
            worst = int(np.argmax(np.where(above, error, 0.0)))
            return (
                f"result {place} by {error_text(float(error[worst]), float(allowed[worst]))} in"
                f" {int(above.sum())} of {mine.size} elements"
            )
    return None


def _name(key: Any) -> str:
    """Return what a program computes, such as `layer linear`, from its key."""
    own = key[0] if isinstance(key, tuple) and key else key
    parts = own[:2] if isinstance(own, tuple) else (own,)
    return " ".join(part for part in parts if isinstance(part, str)) or "a program"


class Tapes:
    """Programs by numpy, and a call of each that XLA has not checked.

    Attributes:
        checked: number of programs that XLA has checked.
        differences: what XLA computes otherwise, in words.
        of_gradient: the first whole gradient that XLA evaluates otherwise, in words; empty for
            none.
    """

    def __init__(self, maximum: int) -> None:
        """Have no program yet.

        Args:
            maximum: number of programs that are kept, and of calls that wait for a check.
        """
        self._maximum = maximum
        self._programs: OrderedDict[Hashable, NumpyProgram | None] = OrderedDict()
        self._samples: OrderedDict[Hashable, Sample] = OrderedDict()
        self._telling: dict[Hashable, bool] = {}
        self.checked = 0
        self.differences = dict[str, None]()
        self.of_gradient = ""
        self._in_check = 0
        self._taking = Lock()

    def program(self, request: ProgramRequest) -> NumpyProgram | None:
        """Return a program as numpy evaluates it.

        None where XLA has to.
        """
        if request.key in self._programs:
            self._programs.move_to_end(request.key)
            return self._programs[request.key]
        found: NumpyProgram | None = None
        if request.is_small:
            try:
                found = NumpyProgram(request)
            except UnknownPrimitiveError:
                found = None
        self._programs[request.key] = found
        if len(self._programs) > self._maximum:
            self._programs.popitem(last=False)
        return found

    def is_left_to_xla(self, request: ProgramRequest) -> bool:
        """Return whether XLA computes a program, as far as is known before it is traced."""
        return not request.is_small or self._programs.get(request.key, request) is None

    def keep_sample(
        self,
        request: ProgramRequest,
        program: NumpyProgram,
        arguments: tuple[Tree, ...],
        *,
        is_telling: bool,
    ) -> None:
        """Note a call for a check, unless one that tells as much was noted."""
        # -1, of a key that was never noted, is less than False, and False less than True
        if self._telling.get(request.key, -1) >= is_telling:
            return
        self._telling[request.key] = is_telling
        sample = Sample(
            request,
            program,
            copied(arguments),
            is_telling,
        )
        with self._taking:
            self._samples[request.key] = sample
            if len(self._samples) > self._maximum:
                # it is noted again at its next call
                del self._telling[self._samples.popitem(last=False)[0]]

    @property
    def waiting(self) -> int:
        """Number of calls that XLA has not checked, those included that it checks now."""
        return len(self._samples) + self._in_check

    def requests(self) -> list[ProgramRequest]:
        """Return the programs whose calls wait."""
        return [sample.request for sample in list(self._samples.values())]

    @property
    def is_any_left(self) -> bool:
        """Whether there is a call that no thread checks yet."""
        return bool(self._samples)

    def check(self, most: int, by_xla: Callable[[Sequence[Sample]], Sequence[Tree]]) -> bool:
        """Check some of the calls that wait, and return whether there were any.

        Several threads may call it at the same time.

        Args:
            most: how many.
            by_xla: returns what XLA computes for each of some calls.
        """
        taken: dict[Hashable, Sample] = {}
        with self._taking:
            while self._samples and len(taken) < most:
                key, sample = self._samples.popitem(last=False)
                taken[key] = sample
            self._in_check += len(taken)
        if not taken:
            return False
        for (key, sample), tree in zip(taken.items(), by_xla([*taken.values()]), strict=True):
            found = difference(sample, [np.asarray(a) for a in leaves(tree)])
            with self._taking:
                self._note_check(key, found)
                self._in_check -= 1
        return True

    def _note_check(self, key: Hashable, found: str | None) -> None:
        self.checked += 1
        if found is not None:
            self._programs[key] = None  # XLA computes it from now on
            self.differences[
                f"numpy and XLA evaluate JAX's {_name(key)} differently, {found}: no loop is to"
                " blame; --jax xla has XLA alone compute"
            ] = None
