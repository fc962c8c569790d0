"""The pytest fixture `audit_training`."""

from __future__ import annotations

import pytest
import torch


def _train(*, reset):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        torch.nn.functional.cross_entropy(model(torch.randn(3, 2)), torch.tensor([0, 1, 1])).backward()
        optimizer.step()
        if reset:
            optimizer.zero_grad()


def test_the_fixture_fails_a_test_whose_training_is_violated_or_not_seen(audit_training):
    with audit_training() as audit:
        _train(reset=True)
    assert audit.result.windows == 3
    with pytest.raises(pytest.fail.Exception, match="stale-window"), audit_training():
        _train(reset=False)
    with pytest.raises(pytest.fail.Exception, match=r"no optimizer\.step\(\) was seen"), audit_training():
        pass
