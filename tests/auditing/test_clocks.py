"""Schedules and averages are found whatever tensors a program has beside them."""

from __future__ import annotations

import pytest
import torch

import gradcheck_suite

BESIDE = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "without values": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Detected call of")
@pytest.mark.parametrize("beside", BESIDE)
def test_a_schedule_per_micro_batch_is_found_beside_any_tensor(beside):
    kept = BESIDE[beside]()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    with gradcheck_suite.audit(quiet=True) as audit:
        for _ in range(5):
            for _ in range(2):
                (model(torch.randn(6, 4)).square().mean() / 2).backward()
                schedule.step()
            optimizer.step()
            optimizer.zero_grad()
    assert kept is not None
    names = [one.name for one in audit.result.named_findings]
    assert "step-per-micro-batch" in names, audit.result
    assert "failed-instrument" not in names, audit.result


def test_a_search_that_fails_is_said(monkeypatch):
    def fails(self, parameters):
        raise RuntimeError("planted")

    monkeypatch.setattr("gradcheck_suite.auditing.clocks.Clocks.find", fails)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit(quiet=True) as audit:
        for _ in range(4):
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert audit.result.holds
    assert any(
        "schedules and averages could not be observed" in one for one in audit.result.findings
    )
