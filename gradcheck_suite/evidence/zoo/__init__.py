"""The zoo: real accumulation and reset bugs, each in one small file under `bugs/`, by which the suite is judged."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from gradcheck_suite.evidence.zoo import bugs
from gradcheck_suite.evidence.zoo.record import Bug

__all__ = ["BUGS", "NOT_EXPRESSED", "Bug"]

NOT_EXPRESSED: dict[int, str] = {
    23: "the gradient's values are right; that it hangs on a graph is held by properties/test_graph_hygiene.py",
    38: "a scheduler that steps too often changes the next step's size, not the gradient; optimizers are replayed with "
    "the settings that each step had",
    43: "a loss that is 0/0 on a micro-batch breaks the Problem's contract: it is refused before any loop runs",
    46: "None and zeros are both right by the contract; properties/test_modes_agree.py holds what differs",
}
"""Entries of the corpus that no loop or Problem can show as a violation of the contract, and why."""


def _collected() -> dict[str, Bug]:
    found: dict[str, Bug] = {}
    for module in sorted(iter_modules(bugs.__path__), key=lambda module: module.name):
        bug: Bug = import_module(f"{bugs.__name__}.{module.name}").BUG
        assert bug.name not in found, f"two bugs are called {bug.name}"
        found[bug.name] = bug
    return dict(sorted(found.items(), key=lambda item: item[1].number))


BUGS = _collected()
"""The known bugs by name, in the corpus' order."""
