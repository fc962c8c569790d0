"""How another process finds a loop or a user's problem: by the call that returns it there.

Ranks import what they run, as every distributed program does. What no module has under a name cannot be found.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradcheck_suite.errors import UsageError
from gradcheck_suite.schema.contract import Problem


@dataclass(frozen=True)
class Source:
    """A call that returns an object in any process of this machine.

    Attributes:
        module: that has the function.
        function: its name.
        arguments: of the call, plain data.
    """

    module: str
    function: str
    arguments: tuple[Any, ...]

    def load(self) -> Any:
        """Return the object; importing its module may raise anything."""
        return getattr(importlib.import_module(self.module), self.function)(*self.arguments)


_remembered: dict[int, tuple[Any, Source]] = {}


def remember(found: Any, source: Source) -> None:
    """Note where an object comes from that was loaded by a name which a user gave."""
    _remembered[id(found)] = (found, source)


def source_of(wanted: Any, what: str) -> Source:
    """Return how another process finds a loop or a problem.

    Args:
        wanted: the object.
        what: what it is, for the message.

    Raises:
        UsageError: no module has it under a name.
    """
    known = _remembered.get(id(wanted))
    if known is not None and known[0] is wanted:
        return known[1]
    name = _module_of(wanted)
    # a decorated loop says that it is of the module of the one inside
    beside = [place for place in sys.modules if place.partition(".")[0] == name.partition(".")[0]]
    for place in (name, *beside):
        module = sys.modules.get(place)
        for path, value in _named(module):
            if value is wanted:
                remember(wanted, Source(__name__, "found", (place, getattr(module, "__file__", None), path)))
                return _remembered[id(wanted)][1]
    shown = getattr(wanted, "__qualname__", type(wanted).__name__)
    raise UsageError(
        f"{what} {shown} of {name} cannot be imported in another process, as each rank must: define it at the top "
        "level of a module or of a file"
    )


def found(name: str, file: str | None, path: tuple[str, ...]) -> Any:
    """Return what a module has under a name, or under a name in a dictionary of its own.

    Args:
        name: of the module.
        file: that it was imported from, None for one without.
        path: the name, and the key in the dictionary where it is in one.
    """
    value: Any = vars(_module(name, file))[path[0]]
    for key in path[1:]:
        value = value[key] if isinstance(value, dict) else getattr(value, key)
    return value


def _module_of(wanted: Any) -> str:
    made = wanted.loss if isinstance(wanted, Problem) else wanted
    return str(getattr(made, "__module__", None) or type(made).__module__)


def _named(module: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the objects of a module with their paths: its names, entries of its dictionaries, loops of its records."""
    for name, value in list(getattr(module, "__dict__", {}).items()):
        yield (name,), value
        # isinstance would ask a lazy object for its class
        if issubclass(type(value), dict) and not name.startswith("__"):
            yield from (((name, key), entry) for key, entry in value.items() if isinstance(key, str))
        elif hasattr(type(value), "__dataclass_fields__"):
            yield from (((name, part), getattr(value, part, None)) for part in ("loop", "problem"))


def _module(name: str, file: str | None) -> Any:
    if name in sys.modules and name != "__main__":
        return sys.modules[name]
    if name != "__main__":
        try:
            module = importlib.import_module(name)
            if file is None or Path(getattr(module, "__file__", None) or "").resolve() == Path(file).resolve():
                return module
        except ModuleNotFoundError:
            if file is None:
                raise
    if file is None:
        raise UsageError(f"{name} has no file, so a rank cannot import it: put the loop into a file")
    # a script's own `if __name__ == "__main__"` must not run again in every rank
    own = "__gradcheck_suite_main__" if name == "__main__" else name
    if own not in sys.modules:
        spec = importlib.util.spec_from_file_location(own, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[own] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[own]
            raise
    return sys.modules[own]
