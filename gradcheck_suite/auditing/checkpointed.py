"""What torch's checkpoints compute again, compared with what the forward has computed.

A checkpoint throws away what its function has saved for the backward, and calls it once more to get
that again. torch compares shapes and dtypes alone. Here the values are compared: of a checkpoint
that is not reentrant each tensor that is saved, of a reentrant one what its function returns.
`RepeatedCalls` sees calls of modules alone, and those that return alone: torch ends a function as
soon as it has saved all.

Where the values differ, the cause is measured: what the checkpoint was given, the parameters of what
it calls, the plain attributes and names that it may read, and the generators are compared with what
they were in the forward.
"""

from __future__ import annotations

import math
import random
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as checkpoints

from gradcheck_suite.auditing.function_calls import reached
from gradcheck_suite.auditing.places import current_place, is_users, lines_that_write
from gradcheck_suite.auditing.program_state import PLAIN, names_in_code
from gradcheck_suite.auditing.repeated_calls import (
    OTHER,
    OTHER_COARSE,
    Marks,
    Source,
    marks_of,
    random_mark,
)
from gradcheck_suite.auditing.rules import Change, StepFault
from gradcheck_suite.auditing.samples import BatchedSampler, Raw, has_values, is_plain, read_samples
from gradcheck_suite.auditing.saved_values import MOST_BYTES, Written
from gradcheck_suite.auditing.vectors import distance

GENERATOR = "_checkpoint_without_reentrant_generator"
"""What runs around the function of a checkpoint that is not reentrant, in `torch.utils.checkpoint`."""
CHECKS = "_allowed_determinism_checks_to_fns"
"""There, what it notes of each tensor that is saved, to compare it with the one that is saved again."""
MOST_PARTS = 500
"""Modules whose attributes are compared."""
MOST_NAMED = 3
"""Values that a sentence names."""
LONGEST_VALUE = 30
"""Characters of a value that it says."""

Key = tuple[int, str]


@dataclass(frozen=True)
class Value:
    """A value that a function may read.

    Attributes:
        name: of the attribute or variable.
        owner: the class of the module that has it; empty for a variable.
        value: that it had.
    """

    name: str
    owner: str
    value: Any

    def differs(self, other: Value) -> bool:
        """Return whether it is another value; NaN is the same as NaN."""
        both = self.value, other.value
        is_nan = all(isinstance(one, float) and math.isnan(one) for one in both)
        return type(self.value) is not type(other.value) or (
            not is_nan and bool(self.value != other.value)
        )

    def __str__(self) -> str:
        return f"`{self.name}` of {self.owner}" if self.owner else f"`{self.name}`"

    def became(self, now: Value) -> str:
        """Say what it was and is."""
        then, after = (repr(one.value)[:LONGEST_VALUE] for one in (self, now))
        return f"{self} was {then} and is {after}"


@dataclass(frozen=True)
class ProgramValues:
    """What a function may read beside its arguments.

    Attributes:
        values: plain attributes of the modules that it may call, and plain variables of its own.
        tensors: the same of tensors and buffers, with a checksum as their value.
        parameters: a checksum of each parameter of these modules.
        memory: the addresses of what holds them.
        generators: name of a generator of random numbers -> a checksum of its state.
    """

    values: Mapping[Key, Value]
    tensors: Mapping[Key, Value]
    parameters: Marks
    memory: frozenset[int]
    generators: Mapping[str, int]

    @staticmethod
    def of(function: Any) -> ProgramValues:
        """Read them as they are now."""
        modules = reached([function]).modules
        found = [*_of_variables(function), *_of_modules(modules)]
        plain = {key: one for key, one in found if isinstance(one.value, PLAIN)}
        tensors = {key: one for key, one in found if is_plain(one.value)}
        marks = marks_of(one.value for one in tensors.values())
        parameters = [*chain.from_iterable(module.parameters() for module in modules)]
        return ProgramValues(
            plain,
            {
                key: replace(one, value=mark)
                for (key, one), mark in zip(tensors.items(), marks, strict=True)
            },
            marks_of(parameters),
            frozenset(StorageWeakRef(p.untyped_storage()).cdata for p in parameters if is_plain(p)),
            _generators(),
        )


def _changes(then: Mapping[Key, Value], now: Mapping[Key, Value]) -> list[tuple[Value, Value]]:
    """Return the values that are other ones now."""
    pairs = [(value, now[key]) for key, value in then.items() if key in now]
    return [(before, after) for before, after in pairs if before.differs(after)]


def _of_modules(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[Key, Value]]:
    """Yield the attributes and buffers of modules and of their parts."""
    every = chain.from_iterable(module.modules() for module in modules)
    parts = {id(part): part for part in every}
    for key, part in [*parts.items()][:MOST_PARTS]:
        kind = type(part).__name__
        for name, value in chain(vars(part).items(), part._buffers.items()):
            yield (key, name), Value(name, kind, value)


def _of_variables(function: Any) -> Iterator[tuple[Key, Value]]:
    """Yield the variables around a function of the user's, and those of its file."""
    own = getattr(function, "__func__", function)
    if not isinstance(own, types.FunctionType) or not is_users(own.__code__.co_filename):
        return
    for name, cell in zip(own.__code__.co_freevars, own.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            yield (id(cell), name), Value(name, "", cell.cell_contents)
    scope = own.__globals__
    for name in sorted(names_in_code(own.__code__) & scope.keys()):
        yield (id(scope), name), Value(name, "", scope[name])


def _generators() -> dict[str, int]:
    state = np.random.get_state(legacy=False)["state"]
    parts = [one.tobytes() if isinstance(one, np.ndarray) else one for one in state.values()]
    return {
        "torch": random_mark(),
        "numpy": hash(tuple(parts)),
        "Python's `random`": hash(random.getstate()),
    }


@dataclass(frozen=True)
class _Sampled:
    """A tensor that a function has saved or returned.

    Attributes:
        storage: a reference to its memory.
        sampled: linear functions of its values.
        dtype: its dtype.
    """

    storage: StorageWeakRef
    sampled: Raw
    dtype: torch.dtype

    @staticmethod
    def of(value: Any) -> _Sampled | None:
        """Sample a tensor; None for what is compared with nothing.

        What lies in the memory of a parameter is no result of the function.
        """
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return None
        is_parameter = value.is_leaf and value.requires_grad
        if is_parameter or not has_values(value) or value.is_nested:
            return None
        if not value.numel() or not value.is_floating_point():
            return None
        is_small = value.numel() * value.element_size() <= MOST_BYTES
        (sampled,), _ = BatchedSampler().taken([value.detach()], whole=is_small)
        return _Sampled(StorageWeakRef(value.untyped_storage()), sampled, value.dtype)

    def off(self, now: _Sampled) -> float | None:
        """Return by how much other values differ, relative to their size; None where rounding may
        explain it.

        One tensor of the program's, as the statistics of a batch norm, may be saved and not be read.
        """
        return None if self.storage.cdata == now.storage.cdata else self._distance(now)

    def rewritten(self, now: _Sampled, memory: Collection[int]) -> float | None:
        """Return by how much what lies in some memory differs; None where it lies elsewhere, or
        rounding may explain it.
        """
        is_there = self.storage.cdata == now.storage.cdata and self.storage.cdata in memory
        return self._distance(now) if is_there else None

    def _distance(self, now: _Sampled) -> float | None:
        if self.dtype != now.dtype:
            return None
        then, after = read_samples([self.sampled, now.sampled])
        off = distance(after, then)
        return off if off > OTHER.get(self.dtype, OTHER_COARSE) else None


class _Noted:
    """What torch notes of a tensor, which its checkpoint compares and may print, and what it held."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, noted: Any, held: _Sampled | None, region: Region) -> None:
        self.noted = noted
        self.held = held
        self.region = region

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Noted):
            return bool(self.noted == other)
        if self.held is not None and other.held is not None:
            self.region.compares(self.held, other.held)
        return bool(self.noted == other.noted)

    def __str__(self) -> str:
        return str(self.noted)

    __repr__ = __str__


class Region:
    """One call of a checkpoint.

    Args:
        watch: of the audit.
        function: that it calls.
        sources: what it was given.
    """

    def __init__(
        self, watch: CheckpointWatch, function: Callable[..., Any], sources: Sequence[Source]
    ) -> None:
        self._watch = weakref.ref(watch)
        self._sources = sources
        self._then = ProgramValues.of(function)
        self._line = current_place().line
        self._after = self._then
        self._now: ProgramValues | None = None
        self._outputs: list[_Sampled | None] | None = None
        self.function = function

    def ends(self) -> None:
        """Note how things are after the forward, which may have written to buffers itself."""
        self._after = ProgramValues.of(self.function)

    def begins_again(self) -> None:
        """Note how things are when the function is called once more."""
        self._now = ProgramValues.of(self.function)

    def returned(self, output: Any) -> None:
        """Note what a reentrant checkpoint has computed, or compare it."""
        sampled = [_Sampled.of(one) for one in pytree.tree_leaves(output)]
        if self._outputs is None:
            self._outputs = sampled
            self.ends()
            return
        for then, now in zip(self._outputs, sampled, strict=False):
            if then is not None and now is not None:
                self.compare(then, now)

    def compares(self, then: _Sampled, now: _Sampled) -> None:
        """Compare two tensors, and raise nothing into the program."""
        watch = self._watch()
        if watch is not None:
            watch.attempt(self.compare, then, now)

    def compare(self, then: _Sampled, now: _Sampled) -> None:
        """Compare a tensor of the forward with the one that was computed again."""
        watch = self._watch()
        if watch is None or self._now is None or watch.found is not None:
            return
        off = then.off(now)
        if off is not None:
            watch.found = self._explained(off, self._now)
            return
        written = then.rewritten(now, self._then.memory)
        if written is not None:
            said = READ_AGAIN.format(line=self._line, off=written)
            watch.found = OtherAgain(Written("stale-parameters", said), self._at_itself())

    def _explained(self, off: float, now: ProgramValues) -> OtherAgain:
        """Say why something else was computed."""
        said = OTHERWISE.format(line=self._line, off=off)
        if any(source.is_written(unseen=False) for source in self._sources):
            return OtherAgain(Written("changed-batch", said + GIVEN), self._at_itself())
        if self._then.parameters != now.parameters:
            return OtherAgain(Written("stale-parameters", said + MOVED), self._at_itself())
        written = _changes(self._after.tensors, now.tensors)
        if written:
            names = ", ".join(map(str, dict.fromkeys(then for then, _ in written[:MOST_NAMED])))
            return OtherAgain(
                Written("changed-batch", f"{said}{names} was written in between"),
                self._at_itself(),
            )
        changed = _changes(self._then.values, now.values)
        drawn = self._drawn_otherwise(now)
        if changed:
            why = ", ".join(one.became(after) for one, after in changed[:MOST_NAMED])
        elif drawn:
            why = f"it draws other random numbers of {' and '.join(drawn)}"
        else:
            why = NOT_KNOWN
        fault = Written("wrong-backward", said + why)
        return OtherAgain(fault, self._written(changed), is_written=bool(changed))

    def _drawn_otherwise(self, now: ProgramValues) -> list[str]:
        """Return the generators from which the forward has drawn, and that have another state."""
        then = self._then.generators
        after = self._after.generators
        return [n for n in then if then[n] != after[n] and then[n] != now.generators[n]]

    def _at_itself(self) -> Change:
        return Change("checkpoint", [self._line])

    def _written(self, changed: Sequence[tuple[Value, Value]]) -> Change:
        """Return the one line that writes to what was changed, or that of the checkpoint."""
        lines_of_user = (self._line, *current_place().path)
        files = {line.rpartition(":")[0] for line in lines_of_user}
        names = {then.name for then, _ in changed}
        lines = [*chain.from_iterable(lines_that_write(file, names) for file in sorted(files))]
        return Change("write", lines) if len(lines) == 1 else self._at_itself()


@dataclass(frozen=True)
class OtherAgain:
    """Something that a checkpoint has computed otherwise.

    Attributes:
        written: the name of the fault, and the sentence.
        change: what is to be changed, and where.
        is_written: whether a value that it reads is another one.
    """

    written: Written
    change: Change
    is_written: bool = True

    @property
    def fault(self) -> StepFault:
        """What is wrong with the window."""
        causes = ("written",) if self.is_written else ()
        said = self.written.sentence
        return StepFault(self.written.name, said, causes=causes, change=self.change)


class _Again:
    """The function of a checkpoint.

    Args:
        region: the call.
        attempt: lets our own work raise nothing into the program.
        is_reentrant: whether it is the function of the forward, too.
    """

    def __init__(self, region: Region, attempt: Callable[..., None], *, is_reentrant: bool) -> None:
        self._region = region
        self._attempt = attempt
        self._is_reentrant = is_reentrant
        self._has_run = not is_reentrant
        # what walks through all that a function leads to finds it here
        self.function = region.function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self._has_run:
            self._attempt(self._region.begins_again)
        self._has_run = True
        output = self.function(*arguments, **keywords)
        if self._is_reentrant:
            self._attempt(self._region.returned, output)
        return output


class CheckpointWatch:
    """Watches the checkpoints of torch while it is open.

    Args:
        wanted: whether the call that begins is compared.
        around: gives the tensors that the checkpoint that runs was given.
        attempt: lets our own work raise nothing into the program.

    Attributes:
        found: what the first checkpoint has computed otherwise.
    """

    def __init__(
        self,
        wanted: Callable[[], bool],
        around: Callable[[], Sequence[Source]],
        attempt: Callable[..., None],
    ) -> None:
        self.found: OtherAgain | None = None
        self.attempt = attempt
        self._wanted = wanted
        self._around = around
        self._undo = list[Callable[[], None]]()

    def open(self) -> None:
        """Begin to watch."""
        plain = getattr(checkpoints, GENERATOR, None)
        if plain is not None and hasattr(checkpoints, CHECKS):
            self._replace(checkpoints, GENERATOR, self._generator_of(plain))
        own = getattr(checkpoints, "CheckpointFunction", None)
        if own is not None:
            self._replace(own, "apply", self._apply_of(own))

    def close(self) -> None:
        """Stop watching."""
        while self._undo:
            self._undo.pop()()

    def forget(self) -> None:
        """Forget what was found in a window that is over."""
        self.found = None

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, value)

        def put_back() -> None:
            # what another tool has put there since stays, and goes on through ours
            if vars(owner).get(name) is not value:
                return
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(put_back)

    def _begin(self, function: Callable[..., Any]) -> Region | None:
        """Note a checkpoint that begins; None for one that is not compared."""
        made = list[Region]()
        is_forward = torch._C._current_graph_task_id() == -1 and torch.is_grad_enabled()
        if is_forward and self._undo and self._wanted():
            self.attempt(lambda: made.append(Region(self, function, self._around())))
        return made[0] if made else None

    def _generator_of(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def generator(*given: Any, **keywords: Any) -> Iterator[None]:
            region = self._begin(given[0]) if given else None
            if region is None:
                yield from plain(*given, **keywords)
                return
            # torch calls it in the backward alone
            again = _Again(region, self.attempt, is_reentrant=False)
            inner = plain(again, *given[1:], **keywords)
            with self._noting(region):
                next(inner)
            try:
                yield
            except BaseException as error:
                with suppress(StopIteration):
                    inner.throw(error)
                return
            next(inner, None)
            self.attempt(region.ends)

        return generator

    @contextmanager
    def _noting(self, region: Region) -> Iterator[None]:
        """Let torch note values where it notes shapes, in a checkpoint that begins here."""
        checks = getattr(checkpoints, CHECKS)

        def noting(check: Callable[[Any], Any]) -> Callable[[Any], _Noted]:
            def noted(tensor: Any) -> _Noted:
                held = list[_Sampled | None]()
                self.attempt(lambda: held.append(_Sampled.of(tensor)))
                return _Noted(check(tensor), held[0] if held else None, region)

            return noted

        with mock.patch.dict(checks, {name: noting(check) for name, check in checks.items()}):
            yield

    def _apply_of(self, own: Any) -> Any:
        def apply(cls: Any, *given: Any, **keywords: Any) -> Any:
            plain = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
            region = self._begin(given[0]) if cls is own and given else None
            if region is not None:
                given = (_Again(region, self.attempt, is_reentrant=True), *given[1:])
            return plain(cls, *given, **keywords)

        return classmethod(apply)


OTHERWISE = (
    "the checkpoint at {line} computes again inside of the backward what is not what it has computed"
    " in the forward (by {off:.2g} of its size): "
)
READ_AGAIN = (
    "the checkpoint at {line} reads parameters again inside of the backward, which were written since"
    " the forward (by {off:.2g} of their size)"
)
GIVEN = "what it was given was written in between"
MOVED = "parameters of what it calls were written in between"
NOT_KNOWN = (
    "its inputs, parameters, buffers and plain attributes of what it calls, and the generators of torch,"
    " numpy and Python are as they were, so that it reads another state"
)
