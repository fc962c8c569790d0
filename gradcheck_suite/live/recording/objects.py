"""The modules and optimizers of a program that were made before it was watched."""

from __future__ import annotations

import gc
from typing import Any


def _subclasses(kind: type) -> set[type]:
    children: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_subclasses, children))


def living(kind: type) -> list[Any]:
    """Return every object of a class that the garbage collector knows; lazy proxies are not touched."""
    kinds = _subclasses(kind)
    return [thing for thing in gc.get_objects() if type(thing) in kinds]
