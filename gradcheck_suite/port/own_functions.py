"""The author's own derivatives: each result of a `torch.autograd.Function` as an operation.

What its forward computes is recorded below autograd, and has the gradient that autograd gives to
these operations. The author's backward is another one, which is why the Function exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.run.functions import Forward, replaced_forwards

CHECKPOINTED = "CheckpointFunction"
"""torch's Function that computes its forward again: its gradient is that of what it calls."""
_BELOW = torch.autograd.function._SingleLevelFunction


@dataclass(frozen=True)
class FunctionArguments:
    """The arguments of a Function.

    Attributes:
        leaves: all arguments, tensors too.
        structure: of the arguments and keyword arguments.
        places: of the tensors among the leaves.
    """

    leaves: tuple[Any, ...]
    structure: Any
    places: tuple[int, ...]

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> FunctionArguments:
        """Return the arguments of a call."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        return cls(tuple(leaves), structure, tuple(places))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors."""
        return [self.leaves[i] for i in self.places]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return arguments and keyword arguments with other tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.structure)


class OwnFunction:
    """One result of a Function, as an operation: (its value, the Function's tensors) -> the value,
    with the gradient of the author's backward.

    Args:
        kind: the author's class.
        given: its arguments where it was recorded.
        number: of the result among its results.
        start: index of the first call of its forward.
    """

    tags = ()

    def __init__(self, kind: Any, given: FunctionArguments, number: int, start: int) -> None:
        self.start = start
        self._kind = kind
        self._given = given
        self._number = number
        names = ["value", *(f"input{i}" for i in range(len(given.places)))]
        arguments = [
            SimpleNamespace(
                name=name, default_value=None, kwarg_only=False, has_default_value=lambda: False
            )
            for name in names
        ]
        self._schema = SimpleNamespace(
            name=kind.__name__, arguments=arguments, returns=[None], is_mutable=False
        )

    def __call__(self, value: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the value, which the operations of the forward have computed."""
        if not torch.is_grad_enabled():
            return value
        args, kwargs = self._given.with_tensors(tensors)
        outs = self._kind.apply(*args, **kwargs)
        out = (outs if isinstance(outs, tuple | list) else [outs])[self._number]
        return out if out.requires_grad else value


Begin = Callable[[Any, FunctionArguments], Callable[[Any], Any]]
"""(the Function, its arguments), before a call -> what is done with its results."""


IS_IN_C = not isinstance(vars(torch.autograd.Function)["apply"], classmethod)
"""Whether `Function.apply` is that of C, as from torch 2.15 on. Before, it is written in Python and
calls that of the class below, also where an author has kept it under a name."""


@contextmanager
def watched_calls(begin: Begin) -> Iterator[Callable[[], None]]:
    """Tell of each call of a Function, also where an author has kept its `apply` under a name before.

    Yields:
        A function to be called before each operation: it tells of calls that have ended since.
    """
    watched = _WatchedCalls(begin)
    with watched.from_c() if IS_IN_C else watched.from_python():
        yield watched.tell
    watched.tell()


@dataclass(frozen=True)
class _UntoldCall:
    """A call of a Function in C that may not have ended.

    Attributes:
        kind: the Function.
        results: of its forward.
        end: what is done with its results.
    """

    kind: Any
    results: Any
    end: Callable[[Any], Any]

    @property
    def has_ended(self) -> bool:
        """Whether its results have their node in autograd's graph."""
        nodes = (getattr(one, "grad_fn", None) for one in pytree.tree_leaves(self.results))
        return any(getattr(type(node), "_forward_cls", None) is self.kind for node in nodes)


class _WatchedCalls:
    """Sees calls of Functions while one of its contexts is open."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._told: list[Any] = []
        self._untold: list[_UntoldCall] = []

    @contextmanager
    def from_python(self) -> Iterator[None]:
        """See what `Function.apply` calls."""
        below: Any = _BELOW
        below.apply = classmethod(self._apply_above(_BELOW))
        try:
            yield
        finally:
            del below.apply

    @contextmanager
    def from_c(self) -> Iterator[None]:
        """See what calls `Function.apply` now, and the forwards of those that was kept before."""
        function: Any = torch.autograd.Function
        before = vars(function)["apply"]
        kinds = [kind for kind in _below(function) if "forward" in vars(kind)]
        with replaced_forwards((kind, partial(self._forward_of, kind)) for kind in kinds):
            function.apply = classmethod(self._apply_above(function))
            try:
                yield
            finally:
                function.apply = before

    def tell(self) -> None:
        """Tell of calls in C that have ended."""
        ended = [call for call in self._untold if call.has_ended]
        for call in ended:
            self._untold.remove(call)
            call.end(call.results)

    def _apply_above(self, owner: Any) -> Callable[..., Any]:
        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            end = self._begin(kind, FunctionArguments.of(args, kwargs))
            self._told.append(kind)
            try:
                results = super(owner, kind).apply(*args, **kwargs)
            finally:
                self._told.pop()
            return end(results)

        return apply

    def _forward_of(self, kind: Any, forward: Forward, first: int) -> Forward:
        def seen(*args: Any, **kwargs: Any) -> Any:
            if kind in self._told:
                return forward(*args, **kwargs)
            end = self._begin(kind, FunctionArguments.of(args[first:], kwargs))
            results = forward(*args, **kwargs)
            self._untold.append(_UntoldCall(kind, results, end))
            return results

        return seen


def _below(kind: Any) -> Iterator[Any]:
    """Yield the classes below a class."""
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)
