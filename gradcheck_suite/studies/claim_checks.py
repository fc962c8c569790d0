"""What a claim is, and the measurements and loops by which claims are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch

from gradcheck_suite.catalogue.description import describe_case
from gradcheck_suite.core.contract import EQUAL_MICRO_BATCHES, WHOLE_WINDOWS, Loop, TrainingRun
from gradcheck_suite.core.results import Result, json_number
from gradcheck_suite.loops.reset_modes import RESET_MODES, bytes_saved_by_releasing
from gradcheck_suite.strategies.plans import plans
from gradcheck_suite.studies.ledger import Ledger
from gradcheck_suite.studies.report.faster import answer
from gradcheck_suite.studies.step_times import (
    ITEMS,
    MICRO_BATCHES,
    PAIRS,
    PARAMETERS,
    copy_bandwidth,
    time_paired_steps,
    timer,
)
from gradcheck_suite.studies.workload import Size
from gradcheck_suite.verification.verify import verify

# A claim, and the finding of its check.


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


@dataclass(frozen=True)
class Claim:
    """One statement about gradient zeroing, and the check that tests it.

    Attributes:
        number: the source's number and the claim's, such as `"C1.1"`.
        text: the claim.
        how: how the check tests it.
        check: runs the test and returns its finding. Every figure comes from the run.
        short: the claim in at most 42 characters, for a list of one line each.
    """

    number: str
    text: str
    how: str
    check: Callable[[], Finding]
    short: str


SOURCES = {
    1: 'a blog post, "Why zeroing gradients isn\'t enough?"',
    2: 'an answer, "When using PyTorch\'s grad.zero_(), should gradient tracking be enabled?"',
    3: 'an answer, "When should I call optimizer.zero_grad() in PyTorch mini-batch training?"',
}


# The loops that the three sources print, as training loops of this suite, and what each relies on.


def plain_reset_last(run: TrainingRun) -> None:
    """1a: one reset before training; then forward, backward, step, reset."""
    run.optimizer.zero_grad()
    for _ in range(run.epochs):
        for batch in run.loader:
            run.loss(run.model, batch).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()


def accumulate_over_steps(run: TrainingRun) -> None:
    """1b: loss over accumulation_steps; step and reset after that many micro-batches of the epoch."""
    run.optimizer.zero_grad()
    for _ in range(run.epochs):
        for step_idx, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch) / run.accumulation_steps
            loss.backward()
            if (step_idx + 1) % run.accumulation_steps == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()


def three_iterations(run: TrainingRun) -> None:
    """2a: three iterations without a reset."""
    for batch in islice(run.loader, 3):
        run.loss(run.model, batch).backward()
        run.optimizer.step()


def reset_first(run: TrainingRun) -> None:
    """2b: optimizer.zero_grad() first in each iteration."""
    for _ in range(run.epochs):
        for batch in run.loader:
            run.optimizer.zero_grad()
            run.loss(run.model, batch).backward()
            run.optimizer.step()


def zero_by_hand(run: TrainingRun) -> None:
    """2c: p.grad.zero_() for each parameter whose gradient is not None."""
    for _ in range(run.epochs):
        for batch in run.loader:
            for p in run.model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
            run.loss(run.model, batch).backward()
            run.optimizer.step()


def reset_forward_backward_step(run: TrainingRun) -> None:
    """3a: zero_grad, forward, backward, step."""
    for _ in range(run.epochs):
        for batch in run.loader:
            run.optimizer.zero_grad()
            loss = run.loss(run.model, batch)
            loss.backward()
            run.optimizer.step()


def never_reset(run: TrainingRun) -> None:
    """3b: forward, backward, step, and no zero_grad."""
    for _ in range(run.epochs):
        for batch in run.loader:
            run.loss(run.model, batch).backward()
            run.optimizer.step()


def accumulate_and_divide(run: TrainingRun) -> None:
    """3c: loss over the number of steps; step and reset when (i + 1) % steps == 0."""
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            loss = run.loss(run.model, batch)
            loss = loss / run.accumulation_steps
            loss.backward()
            if (i + 1) % run.accumulation_steps == 0:
                run.optimizer.step()
                run.optimizer.zero_grad()


@dataclass(frozen=True)
class PrintedLoop:
    """A loop as a source prints it.

    Attributes:
        number: the loop's number, such as `"1b"`.
        loop: the loop; `run.accumulation_steps` replaces the 4 that the source prints.
        assumes: assumptions under which `verify` finds that it holds.
        plan: further limits of the drawn plans, as arguments of `plans`.
        needs: the assumptions and limits in words; None where the loop holds without any.
    """

    number: str
    loop: Loop
    assumes: tuple[str, ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None


_NO_ACCUMULATION = {"max_accumulation_steps": 1}
_EVERY_STEP = "accumulation_steps = 1: it steps at every micro-batch"
_EQUAL = "a mean over equal micro-batches, whole windows"

PRINTED = (
    PrintedLoop("1a", plain_reset_last, plan=_NO_ACCUMULATION, needs=_EVERY_STEP),
    PrintedLoop("1b", accumulate_over_steps, (EQUAL_MICRO_BATCHES, WHOLE_WINDOWS), needs=_EQUAL),
    PrintedLoop(
        "2a",
        three_iterations,
        plan={"max_accumulation_steps": 1, "max_windows": 1, "max_epochs": 1},
        needs="a single step: from the second on, earlier gradients are still there",
    ),
    PrintedLoop("2b", reset_first, plan=_NO_ACCUMULATION, needs=_EVERY_STEP),
    PrintedLoop("2c", zero_by_hand, plan=_NO_ACCUMULATION, needs=_EVERY_STEP),
    PrintedLoop("3a", reset_forward_backward_step, plan=_NO_ACCUMULATION, needs=_EVERY_STEP),
    PrintedLoop(
        "3b",
        never_reset,
        plan={"max_accumulation_steps": 1, "max_windows": 1, "max_epochs": 1},
        needs="a single step: from the second on, earlier gradients are still there",
    ),
    PrintedLoop("3c", accumulate_and_divide, (EQUAL_MICRO_BATCHES, WHOLE_WINDOWS), needs=_EQUAL),
)


# Verify the loops that the sources print, as they stand and under what they rely on.


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
            "says": (self.printed.loop.__doc__ or "").strip(),
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


# A plain model trained for a few windows under the ledger, for the claims about memory and traffic.


DEPTH = 4


def train(
    mode: str,
    *,
    width: int,
    items: int,
    micro_batches: int,
    windows: int = 3,
) -> tuple[Ledger, int]:
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


# Claims about size: the traffic of a very large model (C1.7), when zeroing suffices (C1.8), and memory (C3.4).


VERY_LARGE = 405e9
"""Parameters of the model that C1.7 speaks of."""
STATED_BANDWIDTH = 2e12
"""Bandwidth that the claim states, in bytes per second."""
FLOPS = 4e14
"""Floating-point operations per second of a device in training: 40% of the 989e12 that NVIDIA states for an H100 in
bfloat16 (data sheet, dense)."""
OPERATIONS_PER_PARAMETER = 6
"""Operations per parameter in one token's forward and backward (Kaplan et al. 2020, Scaling Laws for Neural Language
Models, section 2.1)."""
PASSES = bytes_saved_by_releasing(1)
"""Number of times that zero mode moves the gradients' bytes per step beyond a release; see C1.6."""


def _very_large() -> Finding:
    here = copy_bandwidth("cpu", timer("cpu"))
    figures = {}
    for name, itemsize in (("float32", 4), ("bfloat16", 2)):
        size = VERY_LARGE * itemsize
        figures[f"{name}: one gradient of 405e9 parameters"] = f"{size / 1e12:.2f} TB"
        figures[f"{name}: moved once at 2 TB/s"] = f"{size / STATED_BANDWIDTH:.2f} s"
        figures[f"{name}: zero mode's {PASSES} passes at 2 TB/s"] = f"{PASSES * size / STATED_BANDWIDTH:.2f} s"
        figures[f"{name}: moved once at this machine's measured {here / 1e9:.1f} GB/s"] = f"{size / here:.0f} s"
    once, shares = VERY_LARGE * 4 / STATED_BANDWIDTH, {}
    for tokens in (1024, 16384, 131072, 1048576):
        traffic = PASSES * VERY_LARGE * 4 / STATED_BANDWIDTH
        compute = OPERATIONS_PER_PARAMETER * VERY_LARGE * tokens / FLOPS
        shares[tokens] = traffic / (traffic + compute)
        figures[f"share of a step of {tokens:,} tokens per replica (float32, 2 TB/s, 4e14 op/s)"] = (
            f"{100 * shares[tokens]:.3g}%"
        )
    assert shares[1024] > 0.2
    assert shares[1048576] < 0.001
    return Finding(
        "conditional",
        f"Moving {VERY_LARGE * 4 / 1e12:.2f} TB of float32 gradients once takes {once:.2f} s at 2 TB/s; the {PASSES} "
        f"passes of zero mode take {PASSES * once:.2f} s. Devices share traffic and work alike, so the share of a step "
        f"depends only on the tokens that a replica processes per step: {100 * shares[1024]:.2g}% of the step at 1,024 "
        f"tokens, {100 * shares[131072]:.2g}% at 131,072.",
        condition="few tokens per replica and step, below about 10,000",
        figures=figures,
        counterexample=f"131,072 tokens per replica and step: {100 * shares[131072]:.2g}% of the step",
    )


def _decision() -> Finding:
    sizes = [Size(parameters, "few") for parameters in PARAMETERS["cpu"]]
    rows = tuple(
        time_paired_steps(size, items, k, pairs=PAIRS).to_row(size, "cpu")
        for size in sizes
        for items in ITEMS
        for k in MICRO_BATCHES
    )
    return Finding("conditional", rows=rows, **answer(rows))


def _limited_memory() -> Finding:
    total = 1024
    peaks = {}
    for k in (1, 2, 4, 8, 16):
        ledger, size = train("set_to_none", width=32, items=total // k, micro_batches=k)
        peaks[k] = ledger.peak(window=1).bytes
    ordered = [peaks[k] for k in sorted(peaks)]
    assert ordered == sorted(ordered, reverse=True)
    assert peaks[16] < peaks[1] / 4
    return Finding(
        "confirmed",
        "With a fixed batch, the peak falls with the number of micro-batches, as the activations do, towards the "
        "memory of parameters and gradients. The bytes were counted; nothing was run on a GPU.",
        figures={
            "bytes of parameters, and of gradients": size,
            **{f"peak bytes, 1024 items in K = {k} micro-batches": peak for k, peak in peaks.items()},
        },
    )


CLAIMS = (
    Claim(
        "C1.7",
        "Even at 2 TB/s, transferring the gradients of a very large model (405 B parameters) is significant.",
        "arithmetic from the ledger's law of C1.6; the copy bandwidth of this machine is measured",
        _very_large,
        short="Gradients of 405 B parameters take long",
    ),
    Claim(
        "C1.8",
        "For small models, or when memory is no constraint, zeroing suffices; model size, hardware, batch size and "
        "update frequency decide.",
        "steps under both modes in turn, timed on this machine's CPU",
        _decision,
        short="For small models zeroing suffices",
    ),
)
MEMORY_CLAIMS = (
    Claim(
        "C3.4",
        "Accumulation helps where GPU memory is limited.",
        "the ledger's peak for 1,024 items cut into 1 to 16 micro-batches",
        _limited_memory,
        short="Accumulation helps if memory is short",
    ),
)
