"""Widely read claims about resetting gradients, each with a check that returns a verdict.

Must not import the command line.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch

from gradcheck_suite.catalogue.description import describe_case
from gradcheck_suite.core.contract import EQUAL_MICRO_BATCHES, WHOLE_WINDOWS, Batch, Loop, TrainingRun
from gradcheck_suite.core.results import Result, json_number
from gradcheck_suite.loops.laws import bytes_saved_by_releasing
from gradcheck_suite.loops.reset_modes import RESET_MODES, part_of_window, window_count, windows, zero_by_hand
from gradcheck_suite.run.observer import ancestors
from gradcheck_suite.strategies.plans import plans
from gradcheck_suite.studies import step_times
from gradcheck_suite.studies.ledger import Ledger
from gradcheck_suite.studies.report.reading import answer
from gradcheck_suite.studies.step_times import copy_bandwidth, time_paired_steps, timer
from gradcheck_suite.studies.workload import Size
from gradcheck_suite.verification import verify as verification

verify = partial(verification.verify, quiet=True)

# The finding of a claim's check, and the measurements and loops by which claims are checked.


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


# Widely read claims about resetting gradients, each with a check that returns a verdict.
#
# Must not import the report or the command line.


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


CLAIMS: dict[str, Claim] = {}
"""The claims by number, in the order of their sources."""


Check = Callable[[], Finding]


def claim(number: str, text: str, how: str, *, short: str) -> Callable[[Check], Check]:
    """Make a function the check of a claim, which joins `CLAIMS`; the arguments are those of `Claim`."""

    def join(check: Check) -> Check:
        CLAIMS[number] = Claim(number, text, how, check, short)
        return check

    return join


def _gradient(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


# Claims of the blog post (C1.1 to C1.6 and C1.9): memory and traffic, counted exactly.


_SMALL = {"width": 32, "items": 8, "micro_batches": 1}


@claim(
    "C1.1",
    "Zeroing keeps the gradient buffers allocated: it frees no significant memory.",
    "bytes of gradients alive when the next forward begins, counted by the ledger",
    short="Zeroing keeps gradient buffers allocated",
)
def _kept() -> Finding:
    (zeroed, size), (released, _) = train("zero_", **_SMALL), train("set_to_none", **_SMALL)
    alive = {name: ledger.starts[1]["gradients"] for name, ledger in (("zero_", zeroed), ("None", released))}
    freed = {name: ledger.total("reset", window=1).freed for name, ledger in (("zero_", zeroed), ("None", released))}
    assert alive == {"zero_": size, "None": 0}
    assert freed == {"zero_": 0, "None": size}
    return Finding(
        "confirmed",
        "zero_ frees nothing: all gradients are still allocated when the next forward begins.",
        figures={
            "bytes of all gradients": size,
            "alive when the next forward begins, zero_ / None": f"{alive['zero_']} / {alive['None']}",
            "freed by the reset, zero_ / None": f"{freed['zero_']} / {freed['None']}",
        },
    )


def _additions(micro_batches: int) -> tuple[int, int]:
    arguments = {**_SMALL, "micro_batches": micro_batches}
    found = [train(mode, **arguments)[0].operations("accumulate", window=1) for mode in ("zero_", "set_to_none")]
    return found[0].get("add_", 0), found[1].get("add_", 0)


@claim(
    "C1.2",
    "After zeroing, the next backward adds the new gradient to 0: a redundant operation, which every step does "
    "even without accumulation.",
    "additions of accumulation per step, counted by the ledger",
    short="After zeroing, backward adds to 0 in vain",
)
def _redundant() -> Finding:
    figures = {}
    for k in (1, 4):
        zeroed, released = _additions(k)
        assert (zeroed, released) == (DEPTH * k, DEPTH * (k - 1))
        figures[f"additions per step, {DEPTH} parameters, K = {k}: zero_ / None"] = f"{zeroed} / {released}"
    return Finding(
        "confirmed",
        "After zero_, autograd adds each parameter's first gradient of a window to zeros: one addition per parameter "
        "and step that a release avoids, with or without accumulation.",
        figures=figures,
    )


@claim(
    "C1.3",
    "After a release (set_to_none=True) backward assigns instead of adding.",
    "whether .grad is the tensor that backward made; additions per step",
    short="After a release, backward assigns",
)
def _assigned() -> Finding:
    w = torch.nn.Parameter(torch.ones(3))
    seen: list[int] = []
    handle = w.register_hook(lambda g: seen.append(g.data_ptr()))
    (w * torch.arange(3.0)).sum().backward()
    first = _gradient(w).data_ptr()
    taken = first == seen[0]
    (w * torch.arange(3.0)).sum().backward()
    added = _gradient(w).data_ptr() == first
    handle.remove()
    transposed = torch.nn.Parameter(torch.ones(2, 3))
    (transposed.T * torch.ones(3, 2)).sum().backward()
    assert taken
    assert added
    return Finding(
        "conditional",
        "The first gradient after a release is not added to anything: autograd takes the tensor that backward made, "
        "without a copy. It adds the second micro-batch's gradient in place.",
        condition="for the first backward after the release; autograd copies a dense gradient that something else "
        "refers to, or whose strides are not those that it wants for `.grad`",
        figures={
            "first: .grad is the tensor that backward made": taken,
            "second: added in place to the first": added,
            "additions per step, K = 4: zero_ / None": "{} / {}".format(*_additions(4)),
        },
        counterexample="the second backward of a window adds, under either mode",
    )


@claim(
    "C1.4",
    "A release frees memory for other use between steps: larger batches or models fit.",
    "peaks under both modes, once with more activations than gradients and once with fewer",
    short="A release frees memory between steps",
)
def _frees_for_others() -> Finding:
    figures: dict[str, object] = {}
    savings = {}
    for what, arguments in (
        ("many activations", {"width": 16, "items": 2048, "micro_batches": 1}),
        ("few activations", {"width": 256, "items": 4, "micro_batches": 1}),
    ):
        (zeroed, size), (released, _) = train("zero_", **arguments), train("set_to_none", **arguments)
        peaks = zeroed.peak(window=1), released.peak(window=1)
        savings[what] = (peaks[0].bytes - peaks[1].bytes) / size
        figures[f"{what}: peak under zero_ / None, bytes"] = f"{peaks[0].bytes:,} / {peaks[1].bytes:,}"
        figures[f"{what}: phase of the peak"] = f"{peaks[0].phase} / {peaks[1].phase}"
        figures[f"{what}: saved, in gradients' bytes"] = savings[what]
    assert savings["few activations"] < 0.5 < savings["many activations"]
    return Finding(
        "conditional",
        "Between steps the memory is free, and a forward whose activations make the peak can use it. Where the peak "
        "occurs late in the backward, all gradients are allocated again, and a release saves little or nothing.",
        condition="the peak occurs in the forward or early in the backward: activations outweigh gradients",
        figures=figures,
        counterexample="width 256, 4 items: the peak occurs at the end of the backward, and releasing saves less than "
        "half of the gradients' bytes",
    )


@claim(
    "C1.5",
    "A release allocates and deallocates more often, and is still the better use of memory overall.",
    "bytes freed per step, and the peak, under both modes",
    short="A release reallocates, and is still better",
)
def _more_allocations() -> Finding:
    (zeroed, size), (released, _) = train("zero_", **_SMALL), train("set_to_none", **_SMALL)
    freed = [ledger.total("reset", "accumulate", window=1).freed for ledger in (zeroed, released)]
    peaks = [ledger.peak(window=1).bytes for ledger in (zeroed, released)]
    assert freed[0] == freed[1] == size
    assert peaks[1] <= peaks[0]
    return Finding(
        "conditional",
        "Each step frees all gradients once and allocates them again, where zeroing keeps them. But under zeroing "
        "each backward allocates a new gradient too, adds it and frees it, so allocations per step are the same. The "
        "peak is never higher under a release.",
        condition="only deallocations between steps count; backward allocates equally often in both modes",
        figures={
            "bytes of all gradients": size,
            "freed per step by reset and accumulation, zero_ / None": f"{freed[0]} / {freed[1]}",
            "peak, zero_ / None": f"{peaks[0]} / {peaks[1]}",
        },
        counterexample="under zero_ every backward still allocates each gradient, to add it and free it again",
    )


@claim(
    "C1.6",
    "Operations: zero mode = load new gradient, load zero gradient, add, store; None mode = store. The transfers "
    "are the bottleneck on a GPU.",
    "bytes read and written by reset and accumulation per step, counted by the ledger",
    short="zero_ moves more bytes than None",
)
def _traffic() -> Finding:
    (zeroed, size), (released, _) = train("zero_", **_SMALL), train("set_to_none", **_SMALL)
    figures: dict[str, object] = {"bytes of all gradients (G)": size}
    moved = {}
    for name, ledger in (("zero_", zeroed), ("None", released)):
        reset, added = ledger.total("reset", window=1), ledger.total("accumulate", window=1)
        moved[name] = reset.read + reset.written + added.read + added.written
        figures[f"{name}: reset writes, accumulation reads, writes, in G"] = (
            f"{reset.written / size:g}, {added.read / size:g}, {added.written / size:g}"
        )
    assert moved == {"zero_": 4 * size, "None": 0}
    return Finding(
        "conditional",
        "Zeroing moves four times the gradients' bytes per step with K = 1: it writes the zeros, reads them and the "
        "new gradient, and writes the sum. The claim omits the write of the zeros. A release moves nothing beyond the "
        "store that makes the gradient, which both modes need. The bytes were counted; nothing was timed on a GPU.",
        condition="gradients are large; for small gradients the kernel launches cost more than the bytes",
        figures=figures,
        counterexample="load, load, add, store is 3 G; zero_ itself writes one more",
    )


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


@claim(
    "C1.7",
    "Even at 2 TB/s, transferring the gradients of a very large model (405 B parameters) is significant.",
    "arithmetic from the ledger's law of C1.6; the copy bandwidth of this machine is measured",
    short="Gradients of 405 B parameters take long",
)
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


@claim(
    "C1.8",
    "For small models, or when memory is no constraint, zeroing suffices; model size, hardware, batch size and "
    "update frequency decide.",
    "steps under both modes in turn, timed on this machine's CPU",
    short="For small models zeroing suffices",
)
def _decision() -> Finding:
    sizes = [Size(parameters, "few") for parameters in step_times.PARAMETERS["cpu"]]
    rows = tuple(
        time_paired_steps(size, items, k, pairs=step_times.PAIRS).to_row(size, "cpu")
        for size in sizes
        for items in step_times.ITEMS
        for k in step_times.MICRO_BATCHES
    )
    return Finding("conditional", rows=rows, **answer(rows))


@claim(
    "C1.9",
    "By the end of 4 steps the buffer holds the sum of the 4 gradients.",
    "four backwards with numbers that float64 holds exactly",
    short="4 backwards add up 4 gradients",
)
def _sum_of_four() -> Finding:
    gradients = [torch.tensor([float(2**i), -float(3 * i)], dtype=torch.float64) for i in range(4)]
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    for gradient in gradients:
        (w * gradient / 4).sum().backward()
    assert torch.equal(_gradient(w), torch.stack(gradients).sum(dim=0) / 4)
    return Finding(
        "confirmed",
        "After four backwards the buffer holds the sum of the four gradients; with the loss divided by 4, as in the "
        "loop, that sum is their mean.",
        figures={
            "gradients of the losses divided by 4": [(g / 4).tolist() for g in gradients],
            "held: the sum of these": _gradient(w).tolist(),
        },
    )


# Claims of the answer about `grad.zero_()` and gradient tracking (C2.1 to C2.6).


def _parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


@claim(
    "C2.1",
    "Without a reset gradients accumulate over iterations: the bias gradient keeps growing.",
    "three iterations without a reset; the gradient compared with the exact sum of the single gradients",
    short="Without a reset, gradients keep growing",
)
def _not_reset() -> Finding:
    weight, bias = _parameter(1.0), _parameter(0.0)
    x = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    target = torch.tensor([3.0, -3.0, -2.0], dtype=torch.float64)
    held: list[float] = []
    alone: list[float] = []
    for i in range(3):
        loss = ((weight * x[i] + bias - target[i]) ** 2).sum()
        (own,) = torch.autograd.grad(loss, bias, retain_graph=True)
        loss.backward()
        alone.append(own.item())
        held.append(_gradient(bias).item())
    sums = [math.fsum(alone[: i + 1]) for i in range(3)]
    assert held == sums
    assert abs(held[1]) < abs(held[0])
    return Finding(
        "conditional",
        "Without a reset, the gradient is the sum of all gradients so far, to the bit. It accumulates but need not "
        "grow, since gradients of different signs cancel.",
        condition="gradients keep their sign from one iteration to the next",
        figures={"bias.grad of each iteration alone": alone, "bias.grad after each iteration": held},
        counterexample="one bias, three items with gradients -4, 4 and 5: bias.grad is -4, 0 and 5",
    )


@claim(
    "C2.2",
    "grad.zero_() must be used whenever gradients are tracked.",
    "three iterations under zero_(), under None and with no reset",
    short="zero_() is needed where tracking is on",
)
def _whenever_tracked() -> Finding:
    def train(reset: str) -> list[float]:
        w = _parameter(1.0)
        seen = []
        for x in (1.0, 2.0, 3.0):
            if reset == "zero_()" and w.grad is not None:
                w.grad.zero_()
            elif reset == "None":
                w.grad = None
            (w * x).sum().backward()
            seen.append(_gradient(w).item())
        return seen

    zeroed, released, summed = train("zero_()"), train("None"), train("none at all")
    assert zeroed == released == [1.0, 2.0, 3.0]
    assert summed == [1.0, 3.0, 6.0]
    return Finding(
        "conditional",
        "Training needs one reset per optimizer step. `p.grad = None` resets as well as `zero_()`. Between the "
        "micro-batches of one step there must be no reset, since their gradients are to be summed.",
        condition="between two steps, where gradients are not set to None and accumulation is not intended",
        figures={
            "gradients under zero_()": zeroed,
            "gradients under None": released,
            "gradients accumulated on purpose": summed,
        },
        counterexample="w.grad = None before each backward: the gradients equal those under zero_(), which is never "
        "called",
    )


@claim(
    "C2.3",
    "optimizer.zero_grad() calls .grad.zero_() on each parameter.",
    "the signature's default, and the gradient before and after the call",
    short="optimizer.zero_grad() calls zero_()",
)
def _what_zero_grad_does() -> Finding:
    default = inspect.signature(torch.optim.Optimizer.zero_grad).parameters["set_to_none"].default
    w = _parameter(2.0)
    optimizer = torch.optim.SGD([w], lr=0.1)
    (w**2).sum().backward()
    held = w.grad
    optimizer.zero_grad()
    by_default = w.grad
    assert held is not None
    assert held.item() == 4.0, "the gradient itself is released, not zeroed"
    (w**2).sum().backward()
    kept = w.grad
    optimizer.zero_grad(set_to_none=False)
    assert kept is not None
    assert w.grad is kept
    assert kept.item() == 0.0
    return Finding(
        "refuted" if default is True and by_default is None else "confirmed",
        "`optimizer.zero_grad()` sets every gradient to None, its default since torch 2.0. With `set_to_none=False` it "
        "calls `zero_()` on each gradient, as the claim says.",
        figures={
            "default of set_to_none": str(default),
            "grad after zero_grad()": str(by_default),
            "grad after zero_grad(set_to_none=False)": kept.tolist(),
            "torch": torch.__version__,
        },
        counterexample="p.grad after optimizer.zero_grad() is None, not a tensor of zeros",
    )


@claim(
    "C2.4",
    "The `is not None` check is needed, above all in early iterations.",
    "p.grad.zero_() without the check, over three iterations, one of two parameters unused",
    short="The `is not None` check is needed",
)
def _none_check() -> Finding:
    first, unused = _parameter(1.0), _parameter(1.0)
    raised = []
    for _ in range(3):
        failed = 0
        for p in (first, unused):
            try:
                p.grad.zero_()  # type: ignore[union-attr]
            except AttributeError:
                failed += 1
        raised.append(failed)
        first.sum().backward()
    assert raised == [2, 1, 1]
    return Finding(
        "confirmed",
        "Before the first backward every gradient is None, and `p.grad.zero_()` raises AttributeError. This happens "
        "not only in early iterations: a frozen parameter, or a parameter that no item reaches, keeps None.",
        figures={"of two parameters, one unused: AttributeErrors in iterations 1, 2, 3": raised},
    )


@claim(
    "C2.5",
    "Manual zero_() is equivalent to optimizer.zero_grad().",
    "both on plain, graph-attached and sparse gradients, outside the optimizer's groups, and under momentum",
    short="zero_() is the same as zero_grad()",
)
def _manual_is_equivalent() -> Finding:
    figures = {
        "after zero_grad() / after the loop by hand": _plain_difference(),
        "graph nodes held after 1, 2, 3 resets by hand, create_graph=True": _graph_nodes(by_hand=True),
        "the same with optimizer.zero_grad(set_to_none=False)": _graph_nodes(by_hand=False),
        "parameter outside the optimizer: grad after zero_grad() / by hand over model.parameters()": _outside(),
        "momentum on an unused parameter: value after zero_grad() / by hand": _momentum(),
        "stored rows of a sparse gradient after zero_grad() / by hand": _sparse(),
    }
    return Finding(
        "refuted",
        "Since torch 2.0 `zero_grad()` releases gradients and `zero_()` keeps them. `zero_()` by hand differs from "
        "`zero_grad(set_to_none=False)` for a gradient with a graph, which it keeps and which grows, and for "
        "parameters outside the optimizer. Under a release the optimizer skips an unused parameter; under zeros "
        "momentum and weight decay move it.",
        figures=figures,
        counterexample="SGD(lr=0.1, momentum=0.9), a parameter used only in the first window: it keeps moving under "
        "zero_() and stops under zero_grad()",
    )


def _clear(optimizer: torch.optim.Optimizer, *parameters: torch.Tensor, by_hand: bool, keep: bool = False) -> None:
    """Reset by `zero_()` over some parameters, or by the optimizer, which releases gradients unless they are kept."""
    if by_hand:
        with torch.no_grad():
            for p in parameters:
                _gradient(p).zero_()
    else:
        optimizer.zero_grad(set_to_none=not keep)


def _listed(gradient: torch.Tensor | None) -> str:
    return "None" if gradient is None else str(gradient.tolist())


def _plain_difference() -> list[str]:
    shown = []
    for by_hand in (False, True):
        w = _parameter(3.0)
        (w**2).sum().backward()
        _clear(torch.optim.SGD([w], lr=0.1), w, by_hand=by_hand)
        shown.append(_listed(w.grad))
    assert shown == ["None", "[0.0]"]
    return shown


def _graph_nodes(*, by_hand: bool) -> list[int]:
    w = _parameter(2.0)
    optimizer = torch.optim.SGD([w], lr=0.1)
    held = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the reference cycle, the subject here
        for _ in range(3):
            (w**3).sum().backward(create_graph=True)
            _clear(optimizer, w, by_hand=by_hand, keep=True)
            held.append(sum(1 for _ in ancestors([_gradient(w)])))
    w.grad = None
    return held


def _outside() -> list[str]:
    shown = []
    for by_hand in (False, True):
        inside, outside = _parameter(1.0), _parameter(1.0)
        (inside * outside * 5).sum().backward()
        _clear(torch.optim.SGD([inside], lr=0.1), inside, outside, by_hand=by_hand)
        shown.append(_listed(outside.grad))
    assert shown == ["[5.0]", "[0.0]"]
    return shown


def _momentum() -> list[float]:
    shown = []
    for by_hand in (False, True):
        w = _parameter(1.0)
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        w.sum().backward()
        optimizer.step()
        _clear(optimizer, w, by_hand=by_hand)
        optimizer.step()
        shown.append(round(w.item(), 12))
    assert shown == [0.9, 0.81]
    return shown


def _sparse() -> list[str]:
    shown = []
    for by_hand in (False, True):
        table = torch.nn.Embedding(8, 2, sparse=True)
        table(torch.tensor([1, 2])).sum().backward()
        _clear(torch.optim.SGD(table.parameters(), lr=0.1), table.weight, by_hand=by_hand, keep=True)
        shown.append(str(_gradient(table.weight)._nnz()))
    return shown


@claim(
    "C2.6",
    "Whether gradient tracking is enabled while zero_() runs makes no difference (the question itself).",
    "zero_() inside and outside no_grad, with and without create_graph; the next gradient against 3 w^2",
    short="Tracking during zero_() changes nothing",
)
def _tracking() -> Finding:
    figures = {}
    for create_graph in (False, True):
        for tracked in (True, False):
            w = _parameter(2.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (w**3).sum().backward(create_graph=create_graph)
                left = _gradient(w)
                with torch.set_grad_enabled(tracked):
                    left.zero_()
                (w**3).sum().backward(create_graph=create_graph)
            assert _gradient(w).item() == 12.0, "the next gradient is right either way"
            name = f"create_graph={create_graph}, {'tracking on' if tracked else 'under no_grad'}"
            figures[name] = f"requires_grad {left.requires_grad}, next gradient {_gradient(w).item()}"
            attached = bool(left.requires_grad)
            assert attached == create_graph
            w.grad = None
    return Finding(
        "confirmed",
        "It makes no difference. An ordinary gradient does not require grad, so autograd tracks nothing while it is "
        "zeroed. After `backward(create_graph=True)` the gradient has a graph, and `zero_()` keeps that graph inside "
        "`no_grad` as well as outside: detach the gradient, as `optimizer.zero_grad` does, or release it. The values "
        "are right in every case.",
        figures=figures,
    )


# Claims of the answer about when to call `zero_grad` (C3.1 to C3.5).


CASES = 60
"""Number of cases for each loop that a claim verifies."""


@claim(
    "C3.1",
    "Gradients {-0.1, 0.2, -0.05}, then {0.05, -0.1, 0.1} without a reset: the optimizer sees {-0.05, 0.1, 0.05}.",
    "two backwards with exactly these gradients",
    short="Without a reset the step sees the sum",
)
def _worked_numbers() -> Finding:
    first = torch.tensor([-0.1, 0.2, -0.05], dtype=torch.float64)
    second = torch.tensor([0.05, -0.1, 0.1], dtype=torch.float64)
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    for gradient in (first, second):
        (w * gradient).sum().backward()
    right = torch.tensor([-0.05, 0.1, 0.05], dtype=torch.float64)
    off = (_gradient(w) - right).abs().max().item()
    assert off < 1e-16
    return Finding(
        "confirmed",
        "The optimizer sees the sum of both gradients.",
        figures={"gradient seen": _gradient(w).tolist(), "largest difference from the claim": off},
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


@claim(
    "C3.2",
    "zero_grad must come before backward, so that each mini-batch has its own gradients; its place is crucial.",
    "verify on five loops that differ only in the place of the reset",
    short="zero_grad must come before backward",
)
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


@claim(
    "C3.3",
    "In accumulation zero_grad comes only after the step, and dividing the loss by the number of steps keeps the "
    "learning rate's meaning.",
    "verify on the loop with and without equal counts and whole windows",
    short="Accumulation: reset only after the step",
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


@claim(
    "C3.4",
    "Accumulation helps where GPU memory is limited.",
    "the ledger's peak for 1,024 items cut into 1 to 16 micro-batches",
    short="Accumulation helps if memory is short",
)
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


@claim(
    "C3.5",
    "Not resetting makes gradients excessively large and training unstable.",
    "SGD on a parabola with and without a reset, at three learning rates, and on a linear loss",
    short="Without a reset, training is unstable",
)
def _grows_without_bound() -> Finding:
    """Minimise (w - 1)^2 / 2 from w = 0. The gradient is w - 1, and its size stays below 1 while training converges."""

    def largest(lr: float, *, reset: bool, steps: int = 1000) -> tuple[float, float]:
        w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([w], lr=lr)
        seen, last = 0.0, 0.0
        for step in range(steps):
            ((w - 1) ** 2 / 2).sum().backward()
            seen = max(seen, _gradient(w).abs().item())
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
        if step in (10, 100, 1000):
            held.append(_gradient(w).item())
    return held


def _smallest(result: Result) -> str:
    assert result.violation is not None
    return "\n".join([result.violation.explanation, *describe_case(result.violation.case)])
