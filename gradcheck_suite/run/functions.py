"""The graph of autograd under some tensors: its nodes, and the custom functions in it.

Must not import what judges or observes a loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction

Forward = Callable[..., Any]
GENERATED = "GeneratedBackwardFor_"
"""How torch names the class that it makes of a `torch.library.custom_op`, from torch 2.4 on
(torch/_library/autograd.py, no public API)."""


def is_of_program(kind: type) -> bool:
    """Return whether the backward of a custom function is the program's or a library's, and not of
    torch's own code.
    """
    return not kind.__module__.startswith("torch.") or kind.__name__.startswith(GENERATED)


def ancestors(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield every node of the graph of some tensors, once."""
    return nodes_from(output.grad_fn for output in outputs)


def nodes_from(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield some nodes and every node below them, once; None is none."""
    seen: set[Any] = set()
    pending: list[Any] = list(nodes)
    while pending:
        node = pending.pop()
        # a graph is no tree: a tensor that is used twice is reached twice
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(parent for parent, _ in node.next_functions)


def kinds_of(outputs: Iterable[torch.Tensor]) -> frozenset[type]:
    """Return the classes of custom functions in the graph of some tensors, those of torch's own
    code included.
    """
    return frozenset(
        vars(type(node))["_forward_cls"]
        for node in ancestors(outputs)
        if isinstance(node, BackwardCFunction)
    )


@contextlib.contextmanager
def replaced_forwards(
    replacements: Iterable[tuple[type, Callable[[Forward, int], Forward]]],
) -> Iterator[None]:
    """Replace the forwards of custom functions while this is open.

    Args:
        replacements: pairs of a class and of what makes the new forward: a function of the old one
            and of the number of its first argument that the function is applied to, 1 where a
            context comes before it and 0 otherwise.
    """
    with contextlib.ExitStack() as stack:
        for kind, made in replacements:
            function: Any = kind
            # with `setup_context` of its own the forward gets no context
            # (https://docs.pytorch.org/docs/stable/notes/extending.html)
            first = int(function.setup_context is torch.autograd.Function.setup_context)
            stack.enter_context(replaced_method(kind, "forward", partial(_given, made, first)))
        yield


def _given(made: Callable[[Forward, int], Forward], first: int, forward: Forward) -> Forward:
    return made(forward, first)


@contextlib.contextmanager
def replaced_method(
    kind: type, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a static method of a custom function while this is open.

    Args:
        kind: the class.
        name: of the method.
        made: makes the new method of the old one.
    """
    # an inherited method is inherited again afterwards: `patch.object` removes what it has added
    with mock.patch.object(kind, name, staticmethod(made(getattr(kind, name)))):
        yield
