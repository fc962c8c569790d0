"""Changes of a torch program, as hypotheses of what a port does in place of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.core.frames import Owner, owner_of
from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.torch_program import Change, OperationCall, Ref, flat, with_tensors


class NoArgumentError(AttributeError):
    """An overload of an operation does not have an argument that a row of a table reads."""


RAISED = (RuntimeError, IndexError, ValueError, NoArgumentError)
"""What torch raises where a hypothesis does not fit the shapes, and a row that does not fit an overload. Nothing else
is expected: a mistake of this package, such as a misspelt name, is said."""

REFUSED = (*RAISED, TypeError, UsageError)
"""What a call of somebody's code raises, at the call itself, where it does not take what it is given."""


def is_refusal(error: Exception) -> bool:
    """Return whether somebody's code refuses what it was given: a module an input, an optimizer a
    setting.

    That code may raise whatever it likes. A mistake of this package is raised by a line of this
    package: it is no answer, and must be said.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_theirs = bool(frames) and owner_of(frames[-1].filename) is not Owner.SUITE
    return is_theirs or isinstance(error, REFUSED)


def of_ours(error: Exception) -> str:
    """Return an exception that is nobody's but this package's in words, with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    said = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}{place}: {said}"[:300] + "; please report it"


@dataclass
class Hypothesis:
    """One change of a torch program.

    Attributes:
        cause: a name of `core.causes.CAUSES`.
        words: what the port does, as a clause.
        changes: index of a call -> what is done in its place.
        leaves: leaf of the state or of the inputs -> function of its value, or the `Ref` of the
            leaf in its place.
        at: index of the call that is the place, where it is not the one at which the difference is
            seen.
        kind: `load` for a change of a parameter.
        path: the place, where it is not that of a call.
    """

    cause: str
    words: str
    changes: dict[int, Change] = field(default_factory=dict)
    leaves: dict[Any, Any] = field(default_factory=dict)
    at: int | None = None
    kind: str = "forward"
    path: str | None = None

    def shifted(self, by: int) -> Hypothesis:
        """Return the same change of calls further on in the program."""

        def moved(ref: Any, by: int) -> Any:
            return (
                Ref(ref.kind + by, ref.index)
                if isinstance(ref, Ref) and isinstance(ref.kind, int)
                else ref
            )

        def shifted(change: Change) -> Change:
            def there(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
                # the change speaks of tensors by their places in the first call
                own = with_tensors((call.args, call.kwargs), lambda ref: moved(ref, -by))
                return change(
                    replace(call, args=own[0], kwargs=own[1]),
                    args,
                    kwargs,
                    lambda ref: get(moved(ref, by)),
                )

            return there

        changes = {i + by: shifted(c) for i, c in self.changes.items()}
        return replace(
            self, changes=changes, leaves={}, at=None if self.at is None else self.at + by
        )


def dense(value: Any) -> Any:
    """Return a tensor as kernels expect it that check no strides."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value


class CallArguments:
    """The arguments of a call by their names in ATen's schema, with defaults."""

    def __init__(self, call: OperationCall, args: Sequence[Any], kwargs: Any) -> None:
        self.call = call
        self._args = list(args)
        self._kwargs = dict(kwargs)
        self.values = {a.name: a.default_value for a in call.op._schema.arguments}
        self.values |= dict(zip(call.names, self._args, strict=False)) | self._kwargs

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise NoArgumentError(name) from None

    @property
    def first(self) -> torch.Tensor:
        """The first tensor."""
        tensors = (v for v in self.values.values() if isinstance(v, torch.Tensor))
        found = next(tensors, None)
        if found is None:
            raise NoArgumentError("no tensor")
        return found

    def out(self, /, **others: Any) -> Any:
        """Return the first result, with other values for some arguments."""
        return self.every(**others)[0]

    def every(self, /, **others: Any) -> list[Any]:
        """Return all results, with other values for some arguments."""
        args = list(self._args)
        kwargs = dict(self._kwargs)
        schema = self.call.op._schema.arguments
        for name, value in others.items():
            place = self.call.names.index(name)
            if name in kwargs or schema[place].kwarg_only:
                kwargs[name] = dense(value)
                continue
            args += [a.default_value for a in schema[len(args) : place + 1]]
            args[place] = dense(value)
        return flat(self.call.op(*args, **kwargs))


def in_place_of(function: Callable[[CallArguments], Any]) -> Change:
    """Return the change of a call's first result, or of a list of them, to a function of its
    arguments.
    """

    def change(call: OperationCall, args: Any, kwargs: Any, get: Any) -> list[Any]:
        value = function(CallArguments(call, args, kwargs))
        if isinstance(value, list) or (not call.mutates and len(call.op._schema.returns) == 1):
            return flat(value)
        return [value, *flat(call.op(*args, **kwargs))[1:]]

    return change


def of_operand(position: int, function: Callable[[Any], Any]) -> Change:
    """Return the change of an operand, by its place among all arguments, those in lists one by one."""

    def change(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        new, structure = pytree.tree_flatten(args)
        new[position] = dense(function(new[position]))
        return call.op(*pytree.tree_unflatten(new, structure), **kwargs)

    return change


def other_operand(position: int, other: Ref) -> Change:
    """Return the change of an operand to another tensor of the program."""
    return lambda call, args, kwargs, get: of_operand(position, lambda v: get(other))(
        call, args, kwargs, get
    )


def of_result(function: Callable[[Any], Any], number: int = 0) -> Change:
    """Return the change of a result."""

    def change(call: OperationCall, args: Any, kwargs: Any, get: Any) -> Any:
        outs = flat(call.op(*args, **kwargs))
        outs[number] = dense(function(outs[number]))
        return outs

    return change
