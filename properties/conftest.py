"""Options of the properties, and the number of cases that a run executed.

The profiles are in `conftest.py` above.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from gradcheck_suite.run.environment import set_precision

# torch warns until sparse checks are switched on or off (Adagrad makes sparse tensors), and
# warnings are errors here
torch.sparse.check_sparse_tensor_invariants.enable()


def pytest_configure() -> None:
    """Set the precision flags of both frameworks, whose defaults differ."""
    set_precision()


_executed = {"cases": 0}


def _counted(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        _executed["cases"] += 1  # not reached by an example that `assume` rejects, or that fails
        return result

    run.counts_cases = True
    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Count every example: the ones Hypothesis draws, and a test without Hypothesis as none."""
    for item in items:
        handle = getattr(getattr(item, "obj", None), "hypothesis", None)
        if handle is not None and not hasattr(handle.inner_test, "counts_cases"):
            handle.inner_test = _counted(handle.inner_test)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the count to the main process when pytest-xdist spreads the run over several."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["cases"] = _executed["cases"]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up what a worker of pytest-xdist executed."""
    _executed["cases"] += getattr(node, "workeroutput", {}).get("cases", 0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the number of executed cases."""
    terminalreporter.write_line(f"cases: {_executed['cases']}")
