"""Judging one loop on one case: what divergence, drift and a broken large batch are, and are not."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from gradcheck_suite import (
    Case,
    Input,
    Layer,
    Loss,
    Plan,
    Problem,
    ProblemSpec,
    cases,
    check,
    verify,
)
from gradcheck_suite.loops.reset_modes import BUILT_IN, MODES, part_of_window, window_count, windows
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import generated_instance, user_instance
from gradcheck_suite.strategies.drawing import draw_cases
from studies.zoo.bug import train_with_weights
from tests.training import accumulating, trains

CASE = Case(
    ProblemSpec(
        Input("vector", size=3),
        (Layer("linear", bias=True, features=2),),
        Loss("mse", reduction="mean"),
    ),
    Plan((1, 2), 2),
)


def _refused_by_autocast(model, batch):
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError("unsafe to autocast")  # as `binary_cross_entropy` on CUDA
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


def _weight_of_one(seed):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


REFUSED_BY_AUTOCAST = Problem(
    model=_weight_of_one,
    batch=lambda items, seed: {"x": torch.ones(items, 1), "y": torch.zeros(items, 1)},
    loss=_refused_by_autocast,
)


@pytest.mark.parametrize(("autocast", "blamed"), [("bfloat16", False), (None, True)])
def test_a_loop_that_declares_autocast_is_not_blamed_for_a_loss_that_autocast_refuses(
    autocast, blamed
):
    verdict = check(
        _under_autocast,
        Case("REFUSED", Plan((1, 2), 2)),
        problem=REFUSED_BY_AUTOCAST,
        autocast=autocast,
    )
    assert (verdict.violation is not None) == blamed
    if not blamed:
        assert (
            verdict.skipped
            == "the plain large batch fails under autocast bfloat16: unsafe to autocast"
        )


def _under_autocast(run):
    for batch in run.loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run.loss(run.model, batch).backward()


SATURATED = Case(
    ProblemSpec(
        Input("sequence", length=3, padded=True, size=4),
        (
            Layer("residual", Layer("attention", causal=True, heads=1)),
            Layer("max_over_time", shared=False),
            Layer("unused", features=1),
        ),
        Loss("l1", reduction="sum"),
    ),
    Plan((5, 5, 8, 4, 8, 2, 1, 1, 4, 8, 8), accumulation_steps=3, epochs=2),
    seed=9592350,
    optimizer="nesterov",
)
"""The last step finds parameters near 1,000: torch's softmax gradient is exactly 0 there, JAX's a rounding of 1e6."""


def test_rounding_of_a_saturated_softmax_is_not_blamed():
    assert check(MODES["zero_"], SATURATED).violation is None


def test_a_dropped_micro_batch_at_saturation_is_still_found():
    def drops_the_last(run):
        for step in range(len(run.loader) // 3 * 2 + 2):
            run.optimizer.zero_grad()
            batches = list(run.loader)
            first = step % 4 * 3
            window = batches[first : first + 3]
            for batch in window[:-1] if step == 7 else window:
                run.loss(run.model, batch).backward()
            run.optimizer.step()

    # while shrinking, the fault is not named
    verdict = check(drops_the_last, SATURATED, shrinking=True)
    assert verdict.violation is not None
    assert (verdict.violation.epoch, verdict.violation.window) == (1, 3)


# Whatever a loop is run on, probe or drawn case, is within what the loop assumes.


def noted(facts):
    """Return a sound loop that notes what each of its runs has."""

    def loop(run):
        batches = list(run.loader)
        counts = [float(run.count(batch)) for batch in batches]
        items = [len(next(iter(batch.values()))) for batch in batches]
        fact = {"epochs": run.epochs, "reduction": run.reduction, "counts": counts, "items": items}
        facts.append({**fact, "sparse": False, "steps": run.accumulation_steps})

        def note(*_):
            if any(p.grad is not None and p.grad.is_sparse for p in run.model.parameters()):
                facts[-1]["sparse"] = True

        handle = run.optimizer.register_step_pre_hook(note)
        BUILT_IN["plain"](run)
        handle.remove()

    return loop


def within(counts):
    return max(counts) - min(counts) <= 1e-12 * max(counts)


HOLDS = {
    "one-epoch": lambda fact: fact["epochs"] == 1,
    "mean-reduction": lambda fact: fact["reduction"] == "mean",
    "sum-reduction": lambda fact: fact["reduction"] == "sum",
    "equal-batches": lambda fact: len(set(fact["items"])) == 1 and within(fact["counts"]),
    "plain-counts": lambda fact: within(
        [c / n for c, n in zip(fact["counts"], fact["items"], strict=True)]
    ),
    "whole-windows": lambda fact: len(fact["items"]) % fact["steps"] == 0,
    "dense-gradients": lambda fact: not fact["sparse"],
}


@pytest.fixture(scope="module")
def free():
    """The runs of a loop that assumes nothing, on drawn cases."""
    facts = []
    for case in draw_cases(cases(), examples=40, seed_value=0):
        noted(facts)(generated_instance(case).run())
    return facts


@pytest.mark.parametrize(
    "assumed",
    [
        pytest.param(name, marks=[pytest.mark.full] * (place % 3 > 0))
        for place, name in enumerate(HOLDS)
    ],
)
def test_runs_are_within_an_assumption_that_others_leave(assumed, free):
    facts = []
    assert verify(noted(facts), examples=8, assumes=(assumed,)).holds
    assert all(map(HOLDS[assumed], facts))
    assert not all(map(HOLDS[assumed], free))


# Objectives that are a function of the whole window: loops are held to the window in one batch.


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


@accumulating
def grad_cache(run, window):
    """Compute embeddings without a graph, the window's loss on them, and each micro-batch again
    with a graph.
    """
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


def _concatenated(run, window):
    """Concatenate the embeddings of a window's micro-batches, with their graphs."""
    embeddings = [[run.model(batch[name]) for batch in window] for name in ("query", "answer")]
    contrast(*(torch.cat(parts) for parts in embeddings)).backward()


cached_negatives = trains(backward=_concatenated)
doubles_the_bias = trains(
    backward=_concatenated, before=lambda run, step: run.model.bias.grad.mul_(2)
)


accumulates = trains(
    backward=lambda run, window: [
        (run.loss(run.model, batch) / len(window)).backward() for batch in window
    ]
)


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
        (
            doubles_the_bias,
            "wrong-scale",
            "in bias alone, while weight is right: every element is 2 times",
        ),
    ],
)
def test_a_loop_that_does_not_is_violated_and_named(loop, diagnosis, says):
    violation = check(
        loop, Case("pairs.py:PAIRS", Plan((2, 3, 4), 2)), problem=IN_BATCH_NEGATIVES
    ).violation
    assert violation is not None
    assert (violation.kind, violation.diagnosis) == ("gradient", diagnosis)
    assert says in violation.explanation


def test_the_same_objective_as_a_mean_over_items_is_not_accumulable_by_plain_accumulation():
    problem = Problem(model, pairs, contrastive)
    violation = check(
        cached_negatives, Case("pairs.py:PAIRS", Plan((2, 3), 2)), problem=problem
    ).violation
    assert violation is not None
    assert violation.kind == "not-accumulable"
    assert 'Problem(reduction="batch")' in violation.explanation
    assert "no plain accumulation" in violation.explanation


def test_batch_statistics_of_the_window_are_held_to_the_window():
    """Batch normalization in train mode: a loop that concatenates the window holds, one that
    accumulates does not.
    """

    def normalized(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

    problem = Problem(
        normalized,
        lambda items, seed: torch.randn(items, 3, generator=torch.Generator().manual_seed(seed)),
        lambda model, x: model(x).pow(3).mean(),
        reduction="batch",
    )

    together = trains(
        backward=lambda run, window: run.loss(run.model, torch.cat(window)).backward()
    )
    case = Case("norm.py:NORM", Plan((2, 3, 4), 2))
    assert check(together, case, problem=problem).holds
    assert not check(accumulates, case, problem=problem).holds


# Parts of a gradient that cancel, to exactly zero in one order of summation and not in another, are
# no fault.


ONE_FEATURE = Layer("linear", bias=False, features=1)
# the softmax of one feature is 1, so the last gradient is a sum of +1/N and -1/N, which the large
# batch adds up to 0
CANCELLING = Case(
    ProblemSpec(
        Input("vector", size=2),
        (ONE_FEATURE, Layer("softmax"), ONE_FEATURE, ONE_FEATURE),
        Loss("l1", reduction="mean"),
    ),
    Plan((1, 2, 3, 4, 1, 1, 1, 1, 1, 2, 2, 1, 2, 2, 3, 5), 4),
)


@pytest.mark.parametrize("name", ["zero_", "set_to_none"])
def test_parts_that_cancel_are_not_blamed(name):
    verdict = check(MODES[name], CANCELLING)
    assert verdict.violation is None
    assert verdict.finding is None


def test_a_wrong_weight_among_cancelling_parts_is_still_found():
    def off_by_a_millionth(run):
        train_with_weights(
            run,
            lambda window, b: (
                (1 + 1e-6 * (b is window[0])) * run.count(b) / window_count(run, window)
            ),
        )

    assert check(off_by_a_millionth, CANCELLING).violation is not None


NORMED = (Layer("weight_norm", features=1, whole=False),)
NORM_CANCELS = Case(
    ProblemSpec(Input("vector", size=1), NORMED, Loss("l1", reduction="mean")),
    Plan((3, 2, 4, 1), 2),
)
"""The direction of a single weight is 1 or -1: its gradient is 0, of products that cancel."""


def _by_functional_grad(run):
    for window in windows(run):
        total = window_count(run, window)
        named = {name: p.detach() for name, p in run.model.named_parameters()}
        for batch in window:

            def part(values, batch=batch, total=total):
                model = partial(torch.func.functional_call, run.model, values)
                return part_of_window(
                    SimpleNamespace(**{**vars(run), "model": model}), batch, total
                )

            for name, gradient in torch.func.grad(part)(named).items():
                p = run.model.get_parameter(name)
                p.grad = gradient if p.grad is None else p.grad + gradient
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_products_that_cancel_inside_a_layer_are_not_blamed(dtype):
    for seed in range(5):
        verdict = check(_by_functional_grad, NORM_CANCELS.replace(dtype=dtype, seed=seed))
        assert verdict.violation is None
        assert verdict.finding is None


def test_preactivations_that_cancel_are_no_fault_of_the_problem():
    """The sum of a row is 0 or a rounding error, by the order of the sum, and ReLU passes a
    gradient or does not.
    """

    def model(seed):
        torch.manual_seed(seed)
        linear = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
        return torch.nn.Sequential(linear, torch.nn.ReLU(), torch.nn.Linear(2, 1))

    def batch(items, seed):
        return torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64).repeat(items, 1)

    problem = Problem(model, batch, lambda model, batch: model(batch).square().mean())
    for sizes in ((1, 3), (2, 7), (5, 16), (17, 1)):
        verdict = check(MODES["zero_"], Case("cancelling", Plan(sizes, 2)), problem=problem)
        assert verdict.violation is None, sizes


class _Normed(torch.nn.Module):
    """A weight of length `length` and direction `v`.

    The gradient of one direction is a number minus itself.
    """

    def __init__(self, wrong_by: float = 0.0) -> None:
        super().__init__()
        self.v, self.length = (
            torch.nn.Parameter(torch.rand(1) + 0.1),
            torch.nn.Parameter(torch.rand(1) + 1),
        )
        self._wrong_by = wrong_by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = _WrongInFloat32.apply(self.v, self._wrong_by)
        return x * (v * (self.length / v.norm()))


class _WrongInFloat32(torch.autograd.Function):
    """The identity; its backward adds a number in float32, as a fault of torch in that precision
    would.
    """

    @staticmethod
    def forward(ctx, v, wrong_by):
        ctx.wrong_by = wrong_by
        return v.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + ctx.wrong_by * (gradient.dtype is torch.float32), None


def _opposed(wrong_by: float = 0.0) -> Problem:
    """Return a problem whose items have gradients of 5, 11, -16, 5, ... by the weight."""

    def model(seed):
        torch.manual_seed(seed)
        return _Normed(wrong_by)

    def batch(items, seed):
        return torch.tensor([[5.0], [11.0], [-16.0]], dtype=torch.float64).repeat(items, 1)[:items]

    return Problem(model, batch, lambda model, batch: model(batch).sum(), reduction="sum")


OPPOSED = Case("opposed", Plan((1, 1, 1), 3))


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        *(
            pytest.param(dtype, marks=pytest.mark.full)
            for dtype in ("float64", "float32", "float16")
        ),
    ],
)
def test_micro_batches_that_cancel_each_other_have_rounding_errors_of_their_own_size(dtype):
    """The large batch's gradient of the weight is 0, and so is its rounding error.

    No micro-batch's is.
    """
    largest = 0.0
    for seed in range(4):
        case = OPPOSED.replace(dtype=dtype, seed=seed)
        window = Reference(user_instance(case, _opposed())).window(0)
        accumulated = np.sum(window.bound.contributions, axis=0)
        largest = max(
            largest, float(np.max(np.abs(accumulated - window.expected) / window.allowed()))
        )
        verdict = check(MODES["zero_"], case, problem=_opposed())
        assert (verdict.violation, verdict.finding, verdict.skipped) == (None, None, None)
    assert largest > 1, "the errors of the large batch alone would allow it"


def test_a_fault_of_float32_among_micro_batches_that_cancel_is_a_finding():
    for size, found in ((1e-3, True), (1e-9, False)):
        verdict = check(MODES["zero_"], OPPOSED.replace(dtype="float32"), problem=_opposed(size))
        assert verdict.violation is None
        assert ("the float32 computation of torch is wrong" in str(verdict.finding)) == found
