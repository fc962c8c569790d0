"""The author's own derivatives: each result of a `torch.autograd.Function` as an operation.

What its forward computes is recorded below autograd, and has the gradient that autograd gives to
these operations. The author's backward is another one, which is why the Function exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

CHECKPOINTED = "CheckpointFunction"
"""torch's Function that computes its forward again: its gradient is that of what it calls."""
_BELOW = torch.autograd.function._SingleLevelFunction


@dataclass(frozen=True)
class Given:
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
    def of(cls, args: Any, kwargs: Any) -> Given:
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

    def __init__(self, kind: Any, given: Given, number: int, start: int) -> None:
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


Begin = Callable[[Any, Given], Callable[[Any], Any]]
"""(the Function, its arguments), before a call -> what is done with its results."""


@contextmanager
def watched_calls(begin: Begin) -> Iterator[None]:
    """Tell of each call of a Function.

    An author may have kept `Function.apply` under a name before. It calls that of the class below
    it, which is replaced here.
    """

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        end = begin(kind, Given.of(args, kwargs))
        return end(super(_BELOW, kind).apply(*args, **kwargs))

    below: Any = _BELOW
    below.apply = classmethod(apply)
    try:
        yield
    finally:
        del below.apply
