"""The finding of a claim's check, and the measurements and loops by which claims are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch

from gradcheck_suite.catalogue.description import describe_case
from gradcheck_suite.core.contract import EQUAL_MICRO_BATCHES, WHOLE_WINDOWS, Loop, TrainingRun
from gradcheck_suite.core.results import Result, json_number
from gradcheck_suite.loops.reset_modes import RESET_MODES, zero_by_hand
from gradcheck_suite.strategies.plans import plans
from gradcheck_suite.studies.ledger import Ledger
from gradcheck_suite.verification.verify import verify

Verdict = Literal["confirmed", "refuted", "conditional"]


@dataclass(frozen=True)
class Finding:
    """The result of a claim's check.

    Attributes:
        verdict: `"confirmed"`, `"refuted"`, or `"conditional"` (true under `condition`).
        sentence: one to three sentences on what holds.
        condition: condition under which the claim is true; empty unless conditional.
        figures: name (with its unit) -> value measured or counted in this run.
        counterexample: smallest case in which the claim fails, in words or code; empty where there is none.
        rows: measurements behind the figures that are kept as benchmark records too.
    """

    verdict: Verdict
    sentence: str
    condition: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    counterexample: str = ""
    rows: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.condition) == (self.verdict == "conditional"), "only a `conditional` finding has a condition"


SOURCES = {
    1: 'a blog post, "Why zeroing gradients isn\'t enough?"',
    2: 'an answer, "When using PyTorch\'s grad.zero_(), should gradient tracking be enabled?"',
    3: 'an answer, "When should I call optimizer.zero_grad() in PyTorch mini-batch training?"',
}


def _loop(
    *, at_start: bool = False, first: bool = False, last: bool = False, accumulates: bool = False, by_hand: bool = False
) -> Loop:
    """Return a loop of forward, backward and step.

    Args:
        at_start: whether it resets the gradients once before training.
        first: whether it resets them first in each iteration.
        last: whether it resets them after each step.
        accumulates: whether it divides the loss by `accumulation_steps`, and steps after that many micro-batches.
        by_hand: whether a reset is `p.grad.zero_()` for each parameter whose gradient is not None.
    """

    def reset(run: TrainingRun) -> None:
        if by_hand:
            zero_by_hand(list(run.model.parameters()), run.optimizer)
        else:
            run.optimizer.zero_grad()

    def loop(run: TrainingRun) -> None:
        if at_start:
            reset(run)
        for _ in range(run.epochs):
            for i, batch in enumerate(run.loader):
                if first:
                    reset(run)
                loss = run.loss(run.model, batch)
                (loss / run.accumulation_steps if accumulates else loss).backward()
                if accumulates and (i + 1) % run.accumulation_steps:
                    continue
                run.optimizer.step()
                if last:
                    reset(run)

    return loop


def _three_iterations(run: TrainingRun) -> None:
    for batch in islice(run.loader, 3):
        run.loss(run.model, batch).backward()
        run.optimizer.step()


accumulate_and_divide = _loop(last=True, accumulates=True)


@dataclass(frozen=True)
class PrintedLoop:
    """A loop as a source prints it.

    Attributes:
        number: the loop's number, such as `"1b"`.
        says: what it does, after its number.
        loop: the loop; `run.accumulation_steps` replaces the 4 that the source prints.
        assumes: assumptions under which `verify` finds that it holds.
        plan: further limits of the drawn plans, as arguments of `plans`.
        needs: the assumptions and limits in words; None where the loop holds without any.
    """

    number: str
    says: str
    loop: Loop
    assumes: tuple[str, ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None


_EVERY_STEP: dict[str, Any] = {
    "plan": {"max_accumulation_steps": 1},
    "needs": "accumulation_steps = 1: it steps at every micro-batch",
}
_SINGLE_STEP: dict[str, Any] = {
    "plan": {"max_accumulation_steps": 1, "max_windows": 1, "max_epochs": 1},
    "needs": "a single step: from the second on, earlier gradients are still there",
}
_EQUAL: dict[str, Any] = {
    "assumes": (EQUAL_MICRO_BATCHES, WHOLE_WINDOWS),
    "needs": "a mean over equal micro-batches, whole windows",
}
PRINTED = tuple(
    PrintedLoop(says[:2], says, loop, **needs)
    for says, loop, needs in (
        ("1a: one reset before training; then forward, backward, step, reset.", _loop(at_start=True, last=True),
         _EVERY_STEP),
        ("1b: loss over accumulation_steps; step and reset after that many micro-batches of the epoch.",
         _loop(at_start=True, last=True, accumulates=True), _EQUAL),
        ("2a: three iterations without a reset.", _three_iterations, _SINGLE_STEP),
        ("2b: optimizer.zero_grad() first in each iteration.", _loop(first=True), _EVERY_STEP),
        ("2c: p.grad.zero_() for each parameter whose gradient is not None.", _loop(first=True, by_hand=True),
         _EVERY_STEP),
        ("3a: zero_grad, forward, backward, step.", _loop(first=True), _EVERY_STEP),
        ("3b: forward, backward, step, and no zero_grad.", _loop(), _SINGLE_STEP),
        ("3c: loss over the number of steps; step and reset when (i + 1) % steps == 0.", accumulate_and_divide, _EQUAL),
    )
)  # fmt: skip


@dataclass(frozen=True)
class PrintedResult:
    """The results of verifying one printed loop twice.

    Attributes:
        printed: the loop.
        bare: result without assumptions.
        within: result under what the loop relies on.
    """

    printed: PrintedLoop
    bare: Result
    within: Result

    @property
    def as_expected(self) -> bool:
        """Whether the loop holds under what it relies on, and is violated without."""
        return self.within.holds and not self.bare.holds

    def to_json(self) -> dict[str, object]:
        """Return JSON-ready data for a record."""
        violation = self.bare.violation
        return {
            "loop": self.printed.number,
            "says": self.printed.says,
            "needs": self.printed.needs,
            "assumes": list(self.printed.assumes),
            "within": _outcome(self.within),
            "bare": _outcome(self.bare),
            "diagnosis": None if violation is None else f"{violation.kind}: {violation.diagnosis}",
            "why": None if violation is None else violation.explanation,
            "smallest": [] if violation is None else describe_case(violation.case),
            "error": None if violation is None else json_number(violation.error),
        }


def _outcome(result: Result) -> str:
    if result.holds:
        return f"holds over {result.cases} cases"
    return f"violated, found after {result.found_after} case{'s' * (result.found_after != 1)}"


def verify_printed(printed: PrintedLoop, *, examples: int = 200) -> PrintedResult:
    """Verify one printed loop without assumptions, and under what it relies on."""
    name = printed.number
    bare = verify(printed.loop, name=name, examples=examples)
    within = verify(
        printed.loop,
        name=name,
        examples=examples,
        assumes=printed.assumes,
        plan=plans(**printed.plan) if printed.plan else None,
    )
    return PrintedResult(printed, bare, within)


DEPTH = 4


def train(mode: str, *, width: int, items: int, micro_batches: int, windows: int = 3) -> tuple[Ledger, int]:
    """Train `DEPTH` linear layers with tanh between them, float32, plain SGD, a reset after each step.

    Args:
        mode: name of the reset mode.
        width: inputs and outputs of each layer.
        items: number of items in each micro-batch.
        micro_batches: number of micro-batches in each window.
        windows: number of windows; the ledger's window 1 is the first that starts after a reset.

    Returns:
        The closed ledger, and the bytes of one gradient of all parameters.
    """
    reset = RESET_MODES[mode].reset
    assert reset is not None
    layers: list[torch.nn.Module] = []
    for _ in range(DEPTH):
        layers += [torch.nn.Linear(width, width, bias=False), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers[:-1])
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, foreach=False)
    x = torch.ones(items, width)
    ledger = Ledger(model, optimizer)
    with ledger:
        for _ in range(windows):
            for _ in range(micro_batches):
                with ledger.phase("forward"):
                    loss = model(x).square().mean() / micro_batches
                loss.backward()
                del loss
            optimizer.step()
            reset(parameters, optimizer)
    return ledger, sum(p.numel() * p.element_size() for p in parameters)
