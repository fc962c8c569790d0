"""Optimizers of torch without Dynamo, as long as nothing is compiled.

The first optimizer that a process makes imports `torch._dynamo`, and with it sympy, which takes a
second: methods of `torch.optim.Optimizer` are to be left alone by the compiler, and their decorator
asks Dynamo for a version of each that is (torch/_compile.py). It keeps the answer as an attribute
of the method. As long as Dynamo is not imported nothing compiles, so the right answer is the method
itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

_DYNAMO = "torch._dynamo"
_KEPT = "__dynamo_disable"
"""Where the decorator keeps the version of a method that the compiler leaves alone."""


class _ForgetsAnswers:
    """Finds no module, but drops the answers when Dynamo is about to be imported."""

    def __init__(self, methods: Iterable[Callable[..., Any]]) -> None:
        self._methods = list(methods)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Return None: another finder knows the module."""
        if name == _DYNAMO:
            sys.meta_path.remove(self)
            for method in self._methods:
                if vars(method).get(_KEPT) is method:
                    delattr(method, _KEPT)


def put_off_dynamo(optimizer: type[Any]) -> None:
    """Let optimizers be made without the import of Dynamo, until something else imports it.

    Args:
        optimizer: the class `torch.optim.Optimizer`.
    """
    if _DYNAMO in sys.modules or any(isinstance(f, _ForgetsAnswers) for f in sys.meta_path):
        return
    wrapped = (getattr(method, "__wrapped__", None) for method in vars(optimizer).values())
    methods = [method for method in wrapped if method is not None and not hasattr(method, _KEPT)]
    for method in methods:
        setattr(method, _KEPT, method)
    sys.meta_path.insert(0, _ForgetsAnswers(methods))
