"""Real trainers as loops, by name.

A trainer's package is imported when its loop runs, never before.

To add a trainer, write its file in `adapters/`, its extra in `pyproject.toml` and its test in
`tests/loops/trainers/`: the command line, the report and the user guide read the records.
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from pkgutil import iter_modules

from gradcheck_suite.loops.trainers import adapters
from gradcheck_suite.loops.trainers.trainer import Trainer

__all__ = ["PACKAGES", "TRAINERS", "Trainer"]


# a new trainer is one new file: nothing else lists them
_MODULES = [
    import_module(f"{adapters.__name__}.{module.name}")
    for module in iter_modules(adapters.__path__)
]
TRAINERS: dict[str, Trainer] = {
    trainer.name: trainer for trainer in chain.from_iterable(module.TRAINERS for module in _MODULES)
}
"""Every trainer by name."""
PACKAGES = tuple(
    dict.fromkeys(chain.from_iterable(trainer.packages for trainer in TRAINERS.values()))
)
"""The distributions that trainers need."""
