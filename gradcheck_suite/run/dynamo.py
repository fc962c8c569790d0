"""torch without its compiler, as long as nothing is compiled.

Three things of eager torch import `torch._dynamo` or sympy, which takes a second of the processor:

- The first optimizer that a process makes. Methods of `torch.optim.Optimizer` are to be left alone
  by the compiler, and their decorator asks Dynamo for a version of each that is
  (torch/_compile.py). It keeps the answer as an attribute of the method.
- The first dispatch mode, for the same reason (torch/utils/_python_dispatch.py). `Mode` of
  `gradcheck_suite.run.modes` declines.
- The first attention with a padding mask: `torch._check_with` imports sympy before it looks at the
  condition.

As long as Dynamo is not imported nothing compiles, so the right answers are the method itself, and
a condition that is True.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

_DYNAMO = "torch._dynamo"
_KEPT = "__dynamo_disable"
"""Where the decorator keeps the version of a method that the compiler leaves alone."""


class _Undoes:
    """Finds no module, but undoes what was put off when Dynamo is about to be imported."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo
        self._is_done = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Return None: another finder knows the module."""
        # it stays on the list, which is being walked: without it the next finder would be left out
        if name == _DYNAMO and not self._is_done:
            self._is_done = True
            self._undo()


def put_off_dynamo(torch: Any) -> None:
    """Let optimizers be made, and conditions be checked, without the import of Dynamo and sympy,
    until something else imports Dynamo.

    Args:
        torch: the package.
    """
    if _DYNAMO in sys.modules or any(isinstance(f, _Undoes) for f in sys.meta_path):
        return
    forget = _answered(vars(torch.optim.Optimizer).values())
    restore = _checked_first(torch)

    def undo() -> None:
        forget()
        restore()

    sys.meta_path.insert(0, _Undoes(undo))


def _answered(members: Iterable[Any]) -> Callable[[], None]:
    """Give decorated methods their answer; return what takes it back."""
    wrapped = (getattr(member, "__wrapped__", None) for member in members)
    methods = [method for method in wrapped if method is not None and not hasattr(method, _KEPT)]
    for method in methods:
        setattr(method, _KEPT, method)

    def forget() -> None:
        for method in methods:
            if vars(method).get(_KEPT) is method:
                delattr(method, _KEPT)

    return forget


def _checked_first(torch: Any) -> Callable[[], None]:
    """Let `torch._check_with` look at the condition before it imports sympy; return what puts
    torch's own back.
    """
    checked = getattr(torch, "_check_with", None)
    if checked is None:  # a release without it
        return lambda: None

    @functools.wraps(checked)
    def check_with(error_type: Any, cond: Any, message: Any) -> Any:
        # a condition of the compiler is symbolic, and needs what sympy says of it
        return None if cond is True else checked(error_type, cond, message)

    torch._check_with = check_with

    def restore() -> None:
        if torch._check_with is check_with:
            torch._check_with = checked

    return restore
