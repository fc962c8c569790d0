"""Objectives that are a function of the whole window: loops are held to the window in one batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from gradcheck_suite import Case, Plan, Problem, check, verify
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops import MODES
from gradcheck_suite.loops.windows import windows


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def pairs(items, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(items, 3, generator=generator) for name in ("query", "answer")}


def contrast(queries, answers):
    scores = queries @ answers.T
    return functional.cross_entropy(scores, torch.arange(len(scores)))


def contrastive(model, batch):
    return contrast(model(batch["query"]), model(batch["answer"]))


IN_BATCH_NEGATIVES = Problem(model, pairs, contrastive, reduction="batch")


def grad_cache(run):
    """Compute embeddings without a graph, the window's loss on them, and each micro-batch again with a graph."""
    for window in windows(run):
        run.optimizer.zero_grad()
        with torch.no_grad():
            kept = {name: torch.cat([run.model(batch[name]) for batch in window]) for name in window[0]}
        for embedding in kept.values():
            embedding.requires_grad_()
        contrast(kept["query"], kept["answer"]).backward()
        first = 0
        for batch in window:
            for name, items in batch.items():
                run.model(items).backward(kept[name].grad[first : first + len(items)])
            first += len(batch["query"])
        run.optimizer.step()


def cached_negatives(run):
    """Concatenate the embeddings of a window's micro-batches, with their graphs."""
    for window in windows(run):
        run.optimizer.zero_grad()
        embeddings = [[run.model(batch[name]) for batch in window] for name in ("query", "answer")]
        contrast(*(torch.cat(parts) for parts in embeddings)).backward()
        run.optimizer.step()


def accumulates(run):
    for window in windows(run):
        run.optimizer.zero_grad()
        for batch in window:
            (run.loss(run.model, batch) / len(window)).backward()
        run.optimizer.step()


def doubles_the_bias(run):
    for window in windows(run):
        run.optimizer.zero_grad()
        embeddings = [[run.model(batch[name]) for batch in window] for name in ("query", "answer")]
        contrast(*(torch.cat(parts) for parts in embeddings)).backward()
        run.model.bias.grad.mul_(2)
        run.optimizer.step()


@pytest.mark.parametrize("loop", [grad_cache, cached_negatives])
def test_a_loop_that_computes_the_window_together_holds(loop):
    result = verify(loop, examples=8, problem=IN_BATCH_NEGATIVES, second_opinion_s=0)
    assert result.holds, result.violation
    assert result.judged == 8


@pytest.mark.parametrize(
    ("loop", "diagnosis", "says"),
    [
        (accumulates, "plain-accumulation", "the mean of those of the micro-batches' own losses"),
        (
            MODES["set_to_none"],
            "plain-accumulation",
            "the mean, weighted by items, of those of the micro-batches",
        ),
        (doubles_the_bias, "wrong-scale", "in bias alone, while weight is right: every element is 2 times"),
    ],
)
def test_a_loop_that_does_not_is_violated_and_named(loop, diagnosis, says):
    violation = check(loop, Case("pairs.py:PAIRS", Plan((2, 3, 4), 2)), problem=IN_BATCH_NEGATIVES).violation
    assert violation is not None
    assert (violation.kind, violation.diagnosis) == ("gradient", diagnosis)
    assert says in violation.explanation


def test_the_same_objective_as_a_mean_over_items_is_not_accumulable_by_plain_accumulation():
    problem = Problem(model, pairs, contrastive)
    violation = check(cached_negatives, Case("pairs.py:PAIRS", Plan((2, 3), 2)), problem=problem).violation
    assert violation is not None
    assert violation.kind == "not-accumulable"
    assert 'Problem(reduction="batch")' in violation.explanation
    assert "no plain accumulation" in violation.explanation


def test_batch_statistics_of_the_window_are_held_to_the_window():
    """Batch normalization in train mode: a loop that concatenates the window holds, one that accumulates does not."""

    def normalized(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

    problem = Problem(
        normalized,
        lambda items, seed: torch.randn(items, 3, generator=torch.Generator().manual_seed(seed)),
        lambda model, x: model(x).pow(3).mean(),
        reduction="batch",
    )

    def together(run):
        for window in windows(run):
            run.optimizer.zero_grad()
            run.loss(run.model, torch.cat(window)).backward()
            run.optimizer.step()

    case = Case("norm.py:NORM", Plan((2, 3, 4), 2))
    assert check(together, case, problem=problem).holds
    assert not check(accumulates, case, problem=problem).holds


def test_an_unknown_reduction_is_refused():
    with pytest.raises(UsageError, match="reduction must be one of mean, sum, batch; got 'max'"):
        Problem(model, pairs, contrastive, reduction="max")
