"""The optimizers a loop is handed."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import UsageError
from gradcheck_suite.run.optimizers import (
    FOR_ANY_LOOP,
    OPTIMIZERS,
    TAKES_SPARSE,
    optimizer_of,
)


def _loss():
    return torch.ones(())


def _model(name):
    """Return a model that the named optimizer trains."""
    if name == "sparseadam":
        return torch.nn.Embedding(1, 1, sparse=True)
    return torch.nn.Linear(1, 1, bias=name != "muon")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_named_optimizer_moves_the_parameters_against_the_gradient(name):
    model = _model(name)
    optimizer = optimizer_of(name, model)
    before = model.weight.item()
    for p in model.parameters():
        p.grad = torch.ones_like(p).to_sparse(1) if name == "sparseadam" else torch.ones_like(p)
    optimizer.step(_loss)
    assert model.weight.item() < before


@pytest.mark.parametrize(
    ("name", "model", "says"),
    [
        (
            "muon",
            torch.nn.Linear(2, 3),
            r"two dimensions .*; the model's bias of shape \(3,\) is none",
        ),
        ("muon", torch.nn.Embedding(2, 3, sparse=True), "two dimensions .*; the model's weight"),
        ("sparseadam", torch.nn.Linear(2, 3), "sparse gradients alone: .*; the model's weight"),
        ("sparseadam", torch.nn.Embedding(2, 3), "sparse gradients alone: .*; the model's weight"),
    ],
)
def test_a_model_that_an_optimizer_cannot_train_is_refused(name, model, says):
    with pytest.raises(UsageError, match=says):
        optimizer_of(name, model)
    assert optimizer_of("adam", model)
    model.requires_grad_(False)
    model.head = _model(name)
    assert optimizer_of(name, model)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's own Adagrad
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_which_take_sparse_gradients(name):
    model = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    model(torch.tensor([1])).sum().backward()
    if name in TAKES_SPARSE:
        optimizer.step(_loss)
    else:
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()


def test_frozen_parameters_are_left_out_and_settings_are_there_to_read():
    model = torch.nn.Linear(2, 1)
    for name in ("momentum", "adamw"):
        assert (
            optimizer_of(name, model).defaults.keys() <= optimizer_of(None, model).defaults.keys()
        )
    model.bias.requires_grad_(False)
    (group,) = optimizer_of(None, model).param_groups
    assert [p is model.weight for p in group["params"]] == [True]


@pytest.mark.parametrize("name", [None, *FOR_ANY_LOOP])
def test_groups_share_the_parameters_and_differ_in_their_learning_rate(name):
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    first, second, third = optimizer_of(name, model, 3).param_groups
    weight, bias, other_weight, other_bias = model.parameters()
    dealt = [[weight, other_bias], [bias], [other_weight]]
    assert [[id(p) for p in g["params"]] for g in (first, second, third)] == [
        [id(p) for p in ps] for ps in dealt
    ]
    assert first["lr"] == 2 * second["lr"] == pytest.approx(3 * third["lr"])
    assert len(optimizer_of(name, torch.nn.Linear(1, 1, bias=False), 3).param_groups) == 1


def test_l_bfgs_keeps_its_one_group():
    (group,) = optimizer_of("lbfgs", torch.nn.Linear(1, 1), 3).param_groups
    assert len(group["params"]) == 2
