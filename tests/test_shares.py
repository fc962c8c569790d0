"""Which tests run by default: each case of a thinned test has its commit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

EVERY = 4


@dataclass(frozen=True)
class Item:
    """A collected test, as far as the selection asks."""

    nodeid: str
    every: int | None = EVERY

    def get_closest_marker(self, _: str) -> Any:
        return None if self.every is None else SimpleNamespace(args=(self.every,))


@pytest.fixture(scope="module")
def left_out(pytestconfig):
    """What a commit leaves out."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(pytestconfig.rootpath / "conftest.py"))
    return conftest._beyond_their_share


def test_each_case_runs_once_in_so_many_commits(left_out):
    items = [Item(f"a.py::test[{number}]") for number in range(10)]
    runs = Counter[str]()
    for commit in range(EVERY):
        dropped = left_out(items, commit)
        runs.update(item.nodeid for item in items if item not in dropped)
        assert 10 - len(dropped) in {2, 3}
    assert set(runs.values()) == {1}
    assert len(runs) == 10


def test_tests_of_one_case_are_spread_over_the_commits(left_out):
    items = [Item(f"a.py::test_{number}") for number in range(200)]
    for commit in range(EVERY):
        assert 30 < 200 - len(left_out(items, commit)) < 70


def test_what_is_not_marked_runs_always(left_out):
    items = [Item(f"a.py::test_{number}", None) for number in range(3)]
    assert not any(left_out(items, commit) for commit in range(EVERY))
