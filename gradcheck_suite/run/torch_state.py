"""Functions, methods and hooks of torch that everything in the process uses, and what a loop has
changed of them.

A reference that is computed under such a change is wrong as well, so a change is a violation by
itself, and is undone. Looked at: functions and classes of `torch`, `torch.nn`, `torch.optim`,
`torch.autograd` and the namespaces of functions beside them; methods of modules, optimizers and
tensors; hooks on every module or optimizer; kernels of ATen. A change by an installed package is
its own affair, and that package is part of what is verified.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from operator import is_not
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as _modules
from torch.optim import optimizer as _optimizers

from gradcheck_suite.core.frames import is_users
from gradcheck_suite.core.text import file_text

_SPACES = (
    "torch",
    "torch.nn",
    "torch.autograd",
    "torch.amp",
    "torch.linalg",
    "torch.special",
    "torch.fft",
    "torch.func",
)
"""Modules whose functions and classes are looked at, beside those of `torch.nn` and `torch.optim`."""
_KERNELS = ("CPU", "CUDA", "Autograd", "AutogradCPU", "AutogradCUDA")
"""Keys of the dispatcher; torch itself registers kernels under others when a part of it is first used."""
_HOOKS = [
    (name, hooks)
    for name, hooks in (*vars(_modules).items(), *vars(_optimizers).items())
    if name.startswith("_global_") and isinstance(hooks, dict)
]
_MISSING = object()


@cache
def _watched_owners() -> dict[Any, dict[str, Any]]:
    """Return modules and classes of torch, each with a copy of what it had when it was last looked
    at.
    """
    own = [
        module
        for name, module in sys.modules.items()
        if name in _SPACES or name.startswith(("torch.nn.", "torch.optim", "torch.autograd."))
    ]
    classes: list[type] = []
    for module in own:
        if module.__name__.startswith(("torch.nn.modules.", "torch.optim.")):
            kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
            classes += [kind for kind in kinds if kind.__module__ == module.__name__]
    return {
        owner: {}
        for owner in (*own, *classes, torch.Tensor, torch.nn.Parameter, torch.autograd.Function)
    }


def _changed_owners() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield what is not as it was when it was last looked at, with what it had."""
    for owner, before in _watched_owners().items():
        now = vars(owner)
        # by identity, without looking at names: this is asked around every run of a loop
        if len(now) != len(before) or any(map(is_not, now.values(), before.values())):
            yield owner, before


def _look() -> None:
    for owner, before in list(_changed_owners()):
        before.clear()
        before.update(vars(owner))


def _definition_place(value: Any) -> tuple[str, str]:
    """Return the file in which a function, a method or a class is defined, if any, and the place in
    words.
    """
    # of a bound method, a property and a `functools.partial`, what they wrap
    for attribute in ("__func__", "fget", "func"):
        value = getattr(value, attribute, value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    code = getattr(value, "__code__", None) or getattr(
        vars(type(value)).get("__call__"), "__code__", None
    )
    if code is not None:
        return (
            code.co_filename,
            f"{name} ({Path(file_text(code.co_filename)).name}, line {code.co_firstlineno})",
        )
    file = (
        getattr(sys.modules.get(value.__module__), "__file__", None)
        if isinstance(value, type)
        else None
    )
    return file or "", f"{getattr(value, '__module__', None) or 'torch'}.{name}"


def _is_users(value: Any) -> bool:
    file, _ = _definition_place(value)
    return bool(file) and is_users(file)


def _public_name(owner: Any) -> str:
    spaces = (torch.nn, torch.optim, torch)
    # users know `torch.nn.Linear`, not the private module that defines it
    public = next((s.__name__ for s in spaces if vars(s).get(owner.__name__) is owner), "")
    if not isinstance(owner, type):
        return str(owner.__name__)
    return f"{public or owner.__module__}.{owner.__name__}"


def _replaced_names(
    owner: Any, before: dict[str, Any], known: set[int]
) -> Iterator[tuple[str, Any]]:
    """Yield each name of which the user's code, or another function of torch, has taken the place,
    and what it was.
    """
    for name, new in vars(owner).items():
        old = before.get(name, _MISSING)
        # torch wraps some of its own methods when they are first used, as it does `Optimizer.step`
        # to profile it
        if new is old or not (_is_users(new) or (callable(new) and id(new) in known)):
            continue
        # a new name changes what is there already only in a class, where it hides that of a base
        if old is not _MISSING or (
            isinstance(owner, type) and any(name in vars(base) for base in owner.__mro__[1:])
        ):
            yield name, old


def _undo(owner: Any, name: str, old: Any) -> None:
    if old is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, old)


def _patches() -> Iterator[str]:
    """Yield what has taken the place of functions and methods, in words, and undo it."""
    changed = list(_changed_owners())
    values = chain.from_iterable(before.values() for _, before in changed)
    # a loop may put one function of torch in the place of another
    known = {id(value) for value in values if inspect.isroutine(value)}
    for owner, before in changed:
        for name, old in list(_replaced_names(owner, before, known)):
            yield f"{_public_name(owner)}.{name} is {_definition_place(vars(owner)[name])[1]}"
            _undo(owner, name, old)


def _kernels() -> set[str]:
    return set(torch.library._impls)


def _destroy(kernels: set[str]) -> None:
    # a kernel has no public way back: the `torch.library.Library` that registered it takes it along
    for library in gc.get_objects():
        if isinstance(library, torch.library.Library) and kernels & getattr(
            library, "_op_impls", set()
        ):
            library._destroy()


@contextmanager
def changes_undone() -> Iterator[list[str]]:
    """Undo at the end what the block changes of torch for the whole process.

    Yields:
        A list that has the changes afterwards, in words.
    """
    _look()
    hooks = [{*hooks} for _, hooks in _HOOKS]
    kernels = _kernels()
    found = list[str]()
    try:
        yield found
    finally:
        found += _patches()
        for (name, after), before in zip(_HOOKS, hooks, strict=True):
            for key in [
                key for key, hook in after.items() if key not in before and _is_users(hook)
            ]:
                found.append(
                    f"{name.strip('_').replace('_', ' ')} of torch have {_definition_place(after.pop(key))[1]}"
                )
        added = sorted(
            k
            for k in _kernels() - kernels
            if k.startswith("aten/") and k.rpartition("/")[2] in _KERNELS
        )
        if added:
            found += [f"the kernel {key} is another" for key in added]
            _destroy({*added})


BY_IMPORT: dict[str, list[str]] = {}
"""Name of a loop's module -> what it changed when it was imported, in words."""
