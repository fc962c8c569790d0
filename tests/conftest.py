"""What tests of several packages share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def ranks():
    """Ranks that start once for all tests that need them: it takes seconds to import torch."""
    from gradcheck_suite.execution.ranks.pool import kept_ranks

    with kept_ranks():
        yield
