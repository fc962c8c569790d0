"""Every planted fault is found and named on a small case; a search finds it among drawn cases and shrinks it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from gradcheck_suite import Case, cases, check, verify
from gradcheck_suite.strategies.drawing import draw_cases
from gradcheck_suite.studies.zoo.bugs.micro_batches import mean_of_means
from properties.devices import DEVICES
from tests.faults.loops import WANTED, updates_by_hand_as_well
from tests.faults.small_cases import diagnoses, until

EXAMPLES = 200
SEARCHED = (updates_by_hand_as_well,)
"""Searched for in every run of the tests, as are faults of gradients in `tests/studies/zoo`."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loop", WANTED, ids=lambda loop: loop.__name__)
def test_a_fault_is_found_and_named_on_a_small_case(loop, device):
    names = list(until(WANTED[loop], diagnoses(loop, device=device)))
    assert WANTED[loop].intersection(names), names


@pytest.mark.parametrize(
    "loop",
    [pytest.param(loop, marks=() if loop in SEARCHED else pytest.mark.full) for loop in WANTED],
    ids=lambda loop: loop.__name__,
)
def test_a_fault_is_found_named_and_shrunk(loop):
    result = verify(loop, examples=EXAMPLES)
    violation = result.violation
    assert violation is not None, "not found"
    assert result.found_after is not None
    assert result.found_after <= EXAMPLES
    assert f"{violation.kind}/{violation.diagnosis}" in WANTED[loop], violation.explanation

    case = violation.case
    assert len(case.plan.windows) <= 2, case
    assert len(case.plan.micro_batches) <= 3, case
    assert len(case.problem.layer_kinds) == 1, case

    again = check(loop, case).violation
    assert again is not None
    assert (again.kind, again.diagnosis) == (violation.kind, violation.diagnosis)


@pytest.mark.full
def test_the_same_seed_finds_the_same_smallest_case():
    first, second = (verify(mean_of_means, examples=EXAMPLES) for _ in range(2))
    assert first.violation.case == second.violation.case
    assert first.found_after == second.found_after


# Loops that are wrong for some parameters or some models only: a few hundred drawn cases hold one that shows it.


LOSS_SCALE = 4.0
Parameters = Callable[[torch.nn.Module], list[torch.nn.Parameter]]


def _every(model):
    return list(model.parameters())


def _once_for_each_name(model):
    return [p for _, p in model.named_parameters(remove_duplicate=False)]


def _with_dimensions(model):
    return [p for p in model.parameters() if p.ndim]


def _of_matrices_and_vectors(model):
    return [p for p in model.parameters() if p.ndim <= 2]


def _the_first_twelve(model):
    return list(model.parameters())[:12]


def _dense(model):
    return [p for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]


def loop_that_divides(parameters: Parameters, *, training: bool = True, keys: frozenset[str] | None = None):
    """Return the loop with the parameters that it divides, the mode it trains in, and the keys it keeps of a batch."""

    def loop(run):
        run.model.train(training)
        for _ in range(run.epochs):
            batches = list(run.loader)
            for start in range(0, len(batches), run.accumulation_steps):
                total = 0.0
                for batch in batches[start : start + run.accumulation_steps]:
                    if not (count := float(run.count(batch))):
                        continue
                    if keys is not None:
                        batch = {k: v if k in keys else torch.zeros_like(v) for k, v in batch.items()}
                    total += count
                    loss = run.loss(run.model, batch)
                    (loss * (count if run.reduction == "mean" else LOSS_SCALE)).backward()
                for p in parameters(run.model):
                    if p.grad is not None:
                        p.grad /= total if run.reduction == "mean" else LOSS_SCALE
                run.optimizer.step()
                run.optimizer.zero_grad()

    return loop


def _has_tie(case: Case) -> bool:
    return bool(case.problem.ties)


def _has(*kinds: str) -> Callable[[Case], bool]:
    return lambda case: not set(kinds).isdisjoint(case.problem.layer_kinds)


def _has_many(case: Case) -> bool:
    return case.problem.layer_kinds.count("linear") > 6


def _is_sparse(case: Case) -> bool:
    return any(layer.kind == "embedding" and layer.o["sparse"] for layer in case.problem.layers)


def _of_the_first_group(run):
    return run.optimizer.param_groups[0]["params"]


def loop_that_resets(parameters):
    """Return the loop with the parameters of a run whose gradients it resets."""

    def loop(run):
        for _ in range(run.epochs):
            batches = list(run.loader)
            for start in range(0, len(batches), run.accumulation_steps):
                window = batches[start : start + run.accumulation_steps]
                total = sum(run.count(batch) for batch in window)
                for batch in window:
                    if count := float(run.count(batch)):
                        loss = run.loss(run.model, batch)
                        (loss * count / total if run.reduction == "mean" else loss).backward()
                run.optimizer.step()
                for p in parameters(run):
                    p.grad = None

    return loop


FAULTS = {
    "resets the first parameter group only": (loop_that_resets(_of_the_first_group), lambda case: case.groups > 1),
    "divides a tied parameter once for each name": (loop_that_divides(_once_for_each_name), _has_tie),
    "skips parameters without dimensions": (loop_that_divides(_with_dimensions), _has("scale")),
    "skips parameters of more than two axes": (loop_that_divides(_of_matrices_and_vectors), _has("conv1d", "conv2d")),
    "divides the first twelve parameters only": (loop_that_divides(_the_first_twelve), _has_many),
    "skips sparse gradients": (loop_that_divides(_dense), _is_sparse),
    "trains in eval mode": (loop_that_divides(_every, training=False), _has("train_scale")),
    "drops the second input": (loop_that_divides(_every, keys=frozenset({"x", "target"})), _has("second_input")),
}


@cache
def _run(number: int) -> tuple[Case, ...]:
    return tuple(draw_cases(cases(), examples=EXAMPLES, seed_value=number))


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 6))])
@pytest.mark.parametrize("fault", FAULTS)
def test_cases_of_one_run_show_the_fault(fault, number):
    loop, concerned = FAULTS[fault]
    chosen = [case for case in _run(number) if concerned(case)]
    assert any(check(loop, case, shrinking=True).violation for case in chosen), f"none of {len(chosen)} cases shows it"
    for case in chosen[:3]:
        for sound in (loop_that_divides(_every), loop_that_resets(lambda run: run.model.parameters())):
            verdict = check(sound, case)
            assert verdict.holds, verdict
