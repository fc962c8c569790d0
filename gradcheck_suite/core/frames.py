"""Whose a source file is: a message names a line of the user's, and none of torch's or the suite's.

It is told from the file's name alone, so neither torch nor JAX is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sysconfig
from enum import Enum, auto
from functools import lru_cache


class Owner(Enum):
    """Who wrote the code of a source file."""

    USER = auto()
    LIBRARY = auto()
    """An installed package that is none of those below, such as a trainer."""
    FRAMEWORK = auto()
    """JAX, numpy, or what builds models and optimizers on JAX."""
    TORCH = auto()
    PYTHON = auto()
    """The standard library."""
    MACHINERY = auto()
    """What stands between a line and what it calls: imports, context managers, torch's traced code."""
    UNNAMED = auto()
    """Code without a file, as that of `exec`: a generated `__init__`, or a program of `python -c`."""
    SUITE = auto()


def _package_folder(package: str) -> str:
    """Return the folder of an installed package, without importing it, or what begins no name."""
    found = importlib.util.find_spec(package)
    # the folder of no file would be "/", which begins every name
    return os.path.join(os.path.dirname(found.origin), "") if found and found.origin else "\0"


def _folders(*names: str) -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) + os.sep for name in names})


_SUITE = _package_folder("gradcheck_suite")
_TORCH = _package_folder("torch")
_PACKAGES = _folders("purelib", "platlib")
_PYTHON = _folders("stdlib", "platstdlib")
# by the folder's name alone: importing JAX to ask where it is takes seconds
_FRAMEWORK = re.compile(
    r"[/\\](site|dist)-packages[/\\](jax|jaxlib|flax|equinox|optax|numpy|chex)[/\\]"
)


@lru_cache(maxsize=4096)
def owner_of(filename: str) -> Owner:
    """Return who wrote a source file, as a frame names it."""
    # `torch.fx` compiles its graphs under the name `<eval_with_key>`
    if filename.startswith(("<frozen", "<eval_with_key>")) or filename == contextlib.__file__:
        return Owner.MACHINERY
    # code made by `exec` belongs to whoever called it, which no name tells
    if filename.startswith("<"):
        return Owner.UNNAMED
    if filename.startswith(_SUITE):
        return Owner.SUITE
    if filename.startswith(_TORCH):
        return Owner.TORCH
    if _FRAMEWORK.search(filename):
        return Owner.FRAMEWORK
    # the packages of a Python that is no virtual environment lie in the folder of its library
    if filename.startswith(_PACKAGES):
        return Owner.LIBRARY
    return Owner.PYTHON if filename.startswith(_PYTHON) else Owner.USER


def is_users(filename: str) -> bool:
    """Return whether a source file is the user's own."""
    return owner_of(filename) is Owner.USER


def is_outside_torch(filename: str) -> bool:
    """Return whether a source file is the user's, or of a library other than torch."""
    return owner_of(filename) not in {
        Owner.MACHINERY,
        Owner.SUITE,
        Owner.TORCH,
        Owner.UNNAMED,
    }
