"""A loss compiled by Inductor: its weights are hidden and reported so, its sums are judged, and a declaration helps."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

import gradcheck_suite

SIZES = (4, 2, 7, 1)


def _trained(*, counted, declared=False, reset=True):
    """Return the audit's result on two windows of a loss that Inductor compiles."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="inductor", dynamic=True)
    with gradcheck_suite.audit() as audit:
        for _ in range(2):
            for size in SIZES:
                loss = compiled(torch.randn(size, 5), torch.randint(0, 3, (size,)))
                if declared:
                    loss = gradcheck_suite.objective(loss, count=size)
                (loss * (size / sum(SIZES) if counted else 1 / len(SIZES))).backward()
            optimizer.step()
            if reset:
                optimizer.zero_grad()
    return audit.result


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_loss_that_inductor_compiles_hides_its_weights_alone():
    hidden = _trained(counted=False)
    assert (hidden.verdict, hidden.windows) == ("unjudged", 0), hidden
    assert "was computed inside torch.compile" in hidden.unjudged
    assert "gradcheck_suite.objective(loss, count=n)" in hidden.unjudged
    leaked = _trained(counted=True, reset=False).violation
    assert (leaked.diagnosis, leaked.step) == ("stale-window", 1)
    assert _trained(counted=False, declared=True).violation.diagnosis == "mean-of-means"
    assert _trained(counted=True, declared=True).holds
