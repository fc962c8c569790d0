"""Claims of the answer about when to call `zero_grad` (C3.1 to C3.5)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradcheck_suite.evidence.claims import sizes
from gradcheck_suite.evidence.claims.claim import Claim, Finding
from gradcheck_suite.evidence.claims.loops import accumulate_and_divide
from gradcheck_suite.loops.windows import part_of_window, window_count, windows
from gradcheck_suite.records.description import describe_case
from gradcheck_suite.schema.contract import EQUAL_MICRO_BATCHES, WHOLE_WINDOWS, Batch, TrainingRun
from gradcheck_suite.schema.results import Result
from gradcheck_suite.verification.verify import verify

CASES = 60
"""Number of cases for each loop that a claim verifies."""


def _worked_numbers() -> Finding:
    first = torch.tensor([-0.1, 0.2, -0.05], dtype=torch.float64)
    second = torch.tensor([0.05, -0.1, 0.1], dtype=torch.float64)
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    for gradient in (first, second):
        (w * gradient).sum().backward()
    assert w.grad is not None
    right = torch.tensor([-0.05, 0.1, 0.05], dtype=torch.float64)
    off = (w.grad - right).abs().max().item()
    assert off < 1e-16
    return Finding(
        "confirmed",
        "The optimizer sees the sum of both gradients.",
        figures={"gradient seen": w.grad.tolist(), "largest difference from the claim": off},
    )


def _reset(where: str) -> Callable[[TrainingRun], None]:
    """Return a loop that is sound except for the place of its reset."""

    def loop(run: TrainingRun) -> None:
        for window in windows(run):
            if where == "before the forward":
                run.optimizer.zero_grad()
            _backward(run, window, between=where == "between forward and backward")
            if where == "between backward and step":
                run.optimizer.zero_grad()
            run.optimizer.step()
            if where == "after the step":
                run.optimizer.zero_grad()

    loop.__name__ = where.replace(" ", "_")
    return loop


def _backward(run: TrainingRun, window: list[Batch], *, between: bool) -> None:
    total = window_count(run, window)
    for j, batch in enumerate(window):
        part = part_of_window(run, batch, total)
        if between and j == 0:
            run.optimizer.zero_grad()
        part.backward()


PLACES = ("before the forward", "between forward and backward", "after the step", "between backward and step")


def _place() -> Finding:
    results = {where: verify(_reset(where), examples=CASES) for where in (*PLACES, "nowhere")}
    holding = [where for where, result in results.items() if result.holds]
    assert holding == list(PLACES[:3])
    return Finding(
        "conditional",
        "Three places are equivalent: before the forward, after the step, and between a window's first forward and its "
        "first backward. A reset between backward and step is wrong, and so is no reset.",
        condition="the reset is after a step and before the next window's first backward; the place in between makes "
        "no difference",
        figures={f"reset {where}": _outcome(result) for where, result in results.items()},
        counterexample=_smallest(results["between backward and step"]),
    )


def _keeps_the_learning_rate() -> Finding:
    both = verify(accumulate_and_divide, examples=CASES, assumes=(EQUAL_MICRO_BATCHES, WHOLE_WINDOWS))
    unequal = verify(accumulate_and_divide, examples=CASES, assumes=(WHOLE_WINDOWS,))
    short = verify(accumulate_and_divide, examples=CASES, assumes=(EQUAL_MICRO_BATCHES,))
    assert both.holds
    assert not unequal.holds
    assert not short.holds
    return Finding(
        "conditional",
        "Dividing by the number of steps gives the large batch's gradient where all micro-batches of a window have "
        "the same count and no window is short. Otherwise the mean of means is not the mean, and a short last window "
        "gets no step and leaks into the next epoch. Divide the summed loss by the window's count instead.",
        condition="equal counts and whole windows",
        figures={
            "equal counts, whole windows": _outcome(both),
            "unequal counts, whole windows": _outcome(unequal),
            "equal counts, short last window": _outcome(short),
        },
        counterexample=_smallest(unequal),
    )


def _grows_without_bound() -> Finding:
    """Minimise (w - 1)^2 / 2 from w = 0. The gradient is w - 1, and its size stays below 1 while training converges."""

    def largest(lr: float, *, reset: bool, steps: int = 1000) -> tuple[float, float]:
        w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([w], lr=lr)
        seen, last = 0.0, 0.0
        for step in range(steps):
            ((w - 1) ** 2 / 2).sum().backward()
            assert w.grad is not None
            seen = max(seen, w.grad.abs().item())
            optimizer.step()
            if step >= steps - 100:
                last = max(last, abs(w.item() - 1))
            if reset:
                optimizer.zero_grad()
        return seen, last

    figures: dict[str, object] = {}
    for lr in (0.01, 0.1, 1.0):
        for reset in (True, False):
            gradient, distance = largest(lr, reset=reset)
            figures[f"lr {lr}, {'reset' if reset else 'no reset'}"] = (
                f"largest gradient {gradient:.3g}, then within {distance:.3g} of the minimum in the last 100 of 1000 "
                f"steps"
            )
    with_reset, without = largest(0.01, reset=True), largest(0.01, reset=False)
    assert with_reset[1] < 1e-3 < 0.5 < without[1]
    steady = _never_reset_on_one_sign()
    figures["gradients of one sign, no reset: accumulated after 10, 100, 1000 steps"] = steady
    assert steady == [10.0, 100.0, 1000.0]
    return Finding(
        "conditional",
        "Without a reset, SGD behaves like momentum without decay: near a minimum the accumulated gradient stays "
        "bounded, by 1/sqrt(lr) here, and training oscillates around the minimum without end. Where gradients keep "
        "one sign, the accumulated gradient grows with every step.",
        condition="gradients keep their sign over many steps; otherwise training does not converge, but no gradient "
        "becomes excessively large",
        figures=figures,
        counterexample="(w - 1)^2 / 2, SGD with lr 0.01, 1000 steps without a reset: no gradient above "
        f"{without[0]:.3g}, and no convergence",
    )


def _never_reset_on_one_sign() -> list[float]:
    w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    held = []
    for step in range(1, 1001):
        w.sum().backward()
        assert w.grad is not None
        if step in (10, 100, 1000):
            held.append(w.grad.item())
    return held


def _outcome(result: Result) -> str:
    if result.violation is None:
        return f"holds over {result.cases} cases"
    return f"violated: {result.violation.diagnosis}, after {result.found_after} cases"


def _smallest(result: Result) -> str:
    assert result.violation is not None
    return "\n".join([result.violation.explanation, *describe_case(result.violation.case)])


CLAIMS = (
    Claim(
        "C3.1",
        "Gradients {-0.1, 0.2, -0.05}, then {0.05, -0.1, 0.1} without a reset: the optimizer sees {-0.05, 0.1, 0.05}.",
        "two backwards with exactly these gradients",
        _worked_numbers,
        short="Without a reset the step sees the sum",
    ),
    Claim(
        "C3.2",
        "zero_grad must come before backward, so that each mini-batch has its own gradients; its place is crucial.",
        "verify on five loops that differ only in the place of the reset",
        _place,
        short="zero_grad must come before backward",
    ),
    Claim(
        "C3.3",
        "In accumulation zero_grad comes only after the step, and dividing the loss by the number of steps keeps the "
        "learning rate's meaning.",
        "verify on the loop with and without equal counts and whole windows",
        _keeps_the_learning_rate,
        short="Accumulation: reset only after the step",
    ),
    *sizes.MEMORY_CLAIMS,
    Claim(
        "C3.5",
        "Not resetting makes gradients excessively large and training unstable.",
        "SGD on a parabola with and without a reset, at three learning rates, and on a linear loss",
        _grows_without_bound,
        short="Without a reset, training is unstable",
    ),
)
