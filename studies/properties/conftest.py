"""The precision flags under which the properties of the studies run."""

from __future__ import annotations

import torch

from gradcheck_suite.run.environment import set_precision

# torch warns until sparse checks are switched on or off (Adagrad makes sparse tensors), and
# warnings are errors here
torch.sparse.check_sparse_tensor_invariants.enable()


def pytest_configure() -> None:
    """Set the precision flags of both frameworks, whose defaults differ."""
    set_precision()
