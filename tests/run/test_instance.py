"""A case brought to life: the loader keeps to the plan, counts are floats, a user's problem is on
equal terms.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from torch.utils.data import DataLoader

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec, UsageError, cases
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.run.instance import (
    generated_instance,
    map_leaves,
    tensor_leaves,
    user_instance,
)

SPEC = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", features=1, bias=True),),
    Loss("mse", reduction="mean"),
)
PLAN = Plan((1, 3, 2), 2)
MASKABLE = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", features=3, bias=False),),
    Loss(
        "cross_entropy",
        ignore_index=True,
        label_smoothing=0.0,
        class_weights=False,
        reduction="mean",
    ),
)


class Pair(NamedTuple):
    """A batch as some users have it."""

    x: torch.Tensor
    y: torch.Tensor


def _users(batch, **options):
    return Problem(
        model=lambda seed: torch.nn.Linear(1, 1),
        batch=batch,
        loss=lambda model, b: torch.zeros(()),
        **options,
    )


def test_a_pass_yields_the_plans_micro_batches_in_order():
    run = generated_instance(probe_case(PLAN)).run()
    assert isinstance(run.loader, DataLoader)
    for _ in range(2):
        assert [batch["x"].reshape(-1).tolist() for batch in run.loader] == [[0], [1, 2, 3], [4, 5]]
    assert len(run.loader) == 3


@given(cases())
def test_the_loader_has_the_sizes_of_the_plan(case):
    instance = generated_instance(case)
    sizes = [{len(t) for t in batch.values()} for batch in instance.loader()]
    assert sizes == [{n} for n in case.plan.micro_batches]
    assert instance.run().accumulation_steps == case.plan.accumulation_steps
    assert instance.run().epochs == case.plan.epochs


def test_batches_are_copies():
    instance = generated_instance(Case(SPEC, PLAN))
    for batch in instance.loader():
        for tensor in batch.values():
            tensor.fill_(99)
    assert all((tensor != 99).any() for tensor in instance.data.values())
    assert all((tensor != 99).any() for tensor in next(iter(instance.loader())).values())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float64", torch.float64),
        ("float32", torch.float32),
        ("bfloat16", torch.float32),
        ("float16", torch.float32),
    ],
)
def test_counts_are_floats_that_hold_them_exactly(dtype, expected):
    instance = generated_instance(Case(SPEC, PLAN, dtype=dtype))
    counts = [instance.count(batch) for batch in instance.loader()]
    assert [c.item() for c in counts] == [1, 3, 2]
    assert {c.dtype for c in counts} == {expected}
    assert {c.shape for c in counts} == {torch.Size()}


def test_a_users_integer_count_becomes_a_float64_in_a_float64_run():
    """The quotient of two integer tensors is float32 in torch, whatever the run."""
    problem = _users(
        lambda items, seed: torch.ones(items, 1), count=lambda batch: torch.tensor(len(batch))
    )
    instance = user_instance(Case("p.py:P", PLAN), problem)
    one, three = (instance.count(batch) for batch in list(instance.loader())[:2])
    assert (one / three).item() == 1 / 3
    assert (torch.tensor(1) / torch.tensor(3)).item() != 1 / 3


def test_without_a_count_items_are_counted():
    instance = user_instance(
        Case("p.py:P", PLAN), _users(lambda items, seed: {"a": [torch.ones(items, 4)], "b": "name"})
    )
    assert [instance.count(batch).item() for batch in instance.loader()] == [1, 3, 2]


def test_a_masked_micro_batch_counts_nothing_and_the_others_do():
    instance = generated_instance(Case(MASKABLE, Plan((2, 3, 1), 3, masked=(1,))))
    counts = [instance.count(batch).item() for batch in instance.loader()]
    assert counts[1] == 0
    assert counts[0] > 0
    assert counts[2] > 0


def test_masking_is_refused_for_a_loss_that_cannot_ignore():
    with pytest.raises(
        UsageError, match=r"plan masks micro-batches \(1,\), but the loss .* cannot ignore targets"
    ):
        generated_instance(Case(SPEC, Plan((2, 3, 1), 3, masked=(1,))))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_parameters_and_items_have_the_cases_dtype_and_the_references_share_their_values(dtype):
    instance = generated_instance(Case(SPEC, PLAN, dtype=dtype))
    wanted = getattr(torch, dtype)
    assert {p.dtype for p in instance.model().parameters()} == {wanted}
    assert instance.data["x"].dtype is wanted
    assert torch.equal(instance.data["x"].double(), torch.from_numpy(instance.arrays["x"]))
    for low, high in zip(
        instance.model().parameters(), instance.model(torch.float64).parameters(), strict=True
    ):
        assert high.dtype is torch.float64
        assert torch.equal(low.double(), high)


def test_the_seed_alone_decides_on_values_and_items():
    def values(case):
        instance = generated_instance(case)
        return [t.tolist() for t in (*instance.model().parameters(), *instance.data.values())]

    case = Case(SPEC, PLAN, seed=1)
    assert (
        values(case)
        == values(case.replace(plan=Plan((2, 2, 2), 3)))
        != values(case.replace(seed=2))
    )


def test_pytrees_are_walked_and_rebuilt():
    batch = {
        "a": [torch.ones(2), "text"],
        "b": (torch.zeros(2),),
        "c": Pair(torch.ones(2), torch.zeros(2)),
        "d": 3,
    }
    doubled = map_leaves(lambda t: 2 * t, batch)
    assert [t.tolist() for t in tensor_leaves(doubled)] == [[2, 2], [0, 0], [2, 2], [0, 0]]
    assert isinstance(doubled["b"], tuple)
    assert isinstance(doubled["c"], Pair)
    assert (doubled["a"][1], doubled["d"]) == ("text", 3)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (
            lambda items, seed: {"name": "none"},
            "must return tensors, in dicts, lists or tuples; got dict with none",
        ),
        (
            lambda items, seed: [torch.ones(2 + i) for i in range(items)],
            "pad items of different lengths to one tensor",
        ),
        (
            lambda items, seed: torch.ones(2, 1),
            "Problem.batch(6, seed) must return tensors of leading dimension 6",
        ),
        (lambda items, seed: (torch.ones(items), torch.tensor(1.0)), "got one of shape ()"),
    ],
)
def test_a_users_batch_of_the_wrong_shape_is_refused(batch, says):
    with pytest.raises(UsageError) as error:
        user_instance(Case("p.py:P", PLAN), _users(batch))
    assert says in str(error.value)


def test_a_case_of_a_users_problem_needs_it():
    with pytest.raises(
        UsageError, match=r"is about the user's problem 'p.py:P': pass --problem p.py:P"
    ):
        generated_instance(Case("p.py:P", PLAN))
