"""What the observer writes down at a step, and that it neither changes nor keeps anything live."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite.run.observer import StepObserver, TooManySteps
from gradcheck_suite.run.optimizers import NoOpOptimizer


def _model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    model[0].bias.requires_grad_(False)
    return model


def _observed(model, **options):
    optimizer = NoOpOptimizer([p for p in model.parameters() if p.requires_grad])
    return optimizer, StepObserver(model, optimizer, **{"limit": 10, **options})


def test_gradients_are_copied():
    model = _model()
    optimizer, observer = _observed(model)
    grad = model[0].weight.grad = torch.ones(1, 2)
    optimizer.step()
    grad.zero_()
    assert observer.observations[0].gradients["0.weight"].tolist() == [[1, 1]]
    assert model[0].weight.grad is grad


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_gradient_with_a_graph_is_copied_without_it():
    model = torch.nn.Linear(2, 1)
    optimizer, observer = _observed(model)
    (model.weight**2).sum().backward(create_graph=True)
    optimizer.step()
    copy = observer.observations[0].gradients["weight"]
    assert copy.grad_fn is None
    assert not copy.requires_grad
    model.weight.grad = None  # breaks the cycle that create_graph makes


def test_a_sparse_gradient_is_copied_dense_and_coalesced():
    model = torch.nn.Embedding(3, 2, sparse=True)
    optimizer, observer = _observed(model)
    for _ in range(2):
        model(torch.tensor([1, 1])).sum().backward()
    optimizer.step()
    assert observer.observations[0].gradients["weight"].tolist() == [[0, 0], [4, 4], [0, 0]]
    assert model.weight.grad.is_sparse


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_with_a_closure_is_seen_once_the_closure_has_run(by_name):
    model = torch.nn.Linear(1, 1)
    optimizer, observer = _observed(model)

    def closure():
        loss = model(torch.full((1, 1), 3.0)).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert torch.equal(loss, model(torch.full((1, 1), 3.0)).sum())
    assert [o.gradients["weight"].tolist() for o in observer.observations] == [[[3.0]]]


def test_values_and_settings_are_kept_for_a_trajectory():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    observer = StepObserver(model, optimizer, limit=10)
    before = model.weight.item()
    model.weight.grad = torch.ones(1, 1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    first, second = observer.observations
    assert first.parameters["weight"].item() == before
    assert second.parameters["weight"].item() == pytest.approx(before - 0.5)
    assert (first.settings[0]["lr"], second.settings[0]["lr"]) == (0.5, 0.25)
    assert "params" not in first.settings[0]
    assert first.groups == [["weight", "bias"]]


def test_too_many_steps_are_stopped_and_written_down():
    optimizer, observer = _observed(_model(), limit=3)
    for _ in range(3):
        optimizer.step()
    assert not observer.exceeded
    with pytest.raises(TooManySteps):
        optimizer.step()
    assert observer.exceeded
    assert len(observer.observations) == 3
    assert not issubclass(TooManySteps, Exception)


def test_a_closed_observer_sees_nothing():
    optimizer, observer = _observed(_model())
    observer.close()
    optimizer.step()
    assert observer.observations == []
