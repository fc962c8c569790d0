"""The zoo: accumulation and reset bugs, reported in public or planted, a file per family in
`bugs/`.

The suite must find each of them and name its fault. To add a bug, write its loop under `@bug` into
its family's file.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from gradcheck_suite.script.writer import OWN
from studies.zoo import bugs
from studies.zoo.bug import DECLARED, Bug

__all__ = ["BUGS", "Bug"]

PLANTED = 1000
"""Planted bugs come after the numbers of the corpus."""

OWN.add(__name__)  # the script of a violation has copies of a bug's definitions
for _family in iter_modules(bugs.__path__):
    import_module(f"{bugs.__name__}.{_family.name}")

BUGS = {
    bug.name: bug for bug in sorted(DECLARED, key=lambda bug: (bug.number or PLANTED, bug.name))
}
"""The known bugs by name, in the corpus' order."""
