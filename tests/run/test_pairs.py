"""Batches as pairs, for trainers that call `criterion(model(x), y)` themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch.utils.data import BatchSampler, DataLoader

from gradcheck_suite import CannotRunHere, Case, Plan, Problem, cases, check, verify
from gradcheck_suite.run.instance import generated_instance, user_instance
from gradcheck_suite.run.runner import run_loop
from tests.run.test_instance import SPEC

F = torch.nn.functional
PLAN = Plan((1, 3, 2), 2)


def trainer(divide):
    """Return a loop that never calls `run.loss`, as a trainer of (x, y) batches."""

    def train(run):
        for _ in range(run.epochs):
            batches = list(zip(run.pairs, run.loader, strict=True))
            for start in range(0, len(batches), run.accumulation_steps):
                window = batches[start : start + run.accumulation_steps]
                total = sum(run.count(batch) for _, batch in window)
                for (x, y), batch in window:
                    loss = run.criterion(run.model(x), y)
                    if run.reduction == "mean":
                        loss = loss / len(window) if divide else loss * run.count(batch) / total
                    loss.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()

    return train


@pytest.mark.share(4)
def test_a_trainer_of_pairs_is_verified_like_any_loop():
    assert verify(trainer(divide=False), examples=6).holds
    violation = verify(trainer(divide=True), examples=6).violation
    assert violation.diagnosis == "mean-of-means"


@given(cases())
def test_the_criterion_of_a_pair_is_the_loss_of_its_batch(case):
    run = generated_instance(case).run()
    for (x, y), batch in zip(run.pairs, run.loader, strict=True):
        loss = run.loss(run.model, batch)
        torch.testing.assert_close(
            run.criterion(run.model(x), y), loss, rtol=0, atol=0, equal_nan=True
        )


def linear(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 1)


def tuples(items, seed):
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(items, 2, generator=drawn), torch.randn(items, 1, generator=drawn)


def dicts(items, seed):
    return dict(zip("xy", tuples(items, seed), strict=True))


@pytest.mark.parametrize(
    ("batch", "loss"),
    [
        (tuples, lambda model, batch: F.mse_loss(model(batch[0]), batch[1])),
        (dicts, lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"])),
        # the target is a view of the input: y is the whole batch
        (
            lambda items, seed: tuples(items, seed)[0],
            lambda model, batch: F.mse_loss(model(batch), batch[:, :1]),
        ),
    ],
)
def test_pairs_of_a_users_problem(batch, loss):
    problem, case = Problem(linear, batch, loss), Case("mine", PLAN)
    assert check(trainer(divide=False), case, problem=problem).holds
    assert check(trainer(divide=True), case, problem=problem).violation.diagnosis == "mean-of-means"


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            lambda model, batch: (model(batch[0]) + model(batch[0])).mean(),
            "calls its model several times",
        ),
        (lambda model, batch: model(input=batch[0]).mean(), "passes other arguments"),
        (lambda model, batch: model.weight.mean(), "raises AttributeError"),
        (lambda model, batch: batch[0].mean(), "does not call it"),
    ],
)
def test_a_loss_that_cannot_be_taken_apart_is_refused(loss, says):
    problem = Problem(linear, tuples, loss)
    outcome = run_loop(trainer(divide=False), user_instance(Case("mine", PLAN), problem))
    assert says in outcome.refused
    assert "use run.loss(model, batch)" in outcome.refused
    if "several" in says:
        with pytest.raises(CannotRunHere, match=says):
            check(trainer(divide=False), Case("mine", PLAN), problem=problem)


def test_the_sampler_is_a_real_one():
    """A trainer reads `batch_size`, `drop_last` and `sampler`, and makes a loader of its own with
    them.
    """
    loader = generated_instance(Case(SPEC, PLAN)).run().loader
    sampler = loader.batch_sampler
    assert isinstance(sampler, BatchSampler)
    assert (len(sampler), sampler.batch_size, sampler.drop_last) == (3, 3, False)
    assert list(sampler.sampler) == list(range(6)) == list(range(len(loader.dataset)))
    again = DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=loader.collate_fn)
    for one, other in zip(again, loader, strict=True):
        assert torch.equal(one["x"], other["x"])
