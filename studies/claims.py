"""Widely read claims about resetting gradients, each with a check that returns a verdict.

Must not import the command line.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean, median
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy, mse_loss

from gradcheck_suite.core.case import Case
from gradcheck_suite.core.contract import (
    EQUAL_MICRO_BATCHES,
    WHOLE_WINDOWS,
    Batch,
    Loop,
    TrainingRun,
)
from gradcheck_suite.core.options import XLA
from gradcheck_suite.core.results import Result, json_number
from gradcheck_suite.core.text import counted
from gradcheck_suite.loops.reset_modes import part_of_window, window_count, windows, zero_by_hand
from gradcheck_suite.run.functions import ancestors
from gradcheck_suite.strategies.plans import plans
from studies import step_times
from studies.ledger import Ledger
from studies.report.faster import answer
from studies.reset_laws import bytes_saved_by_releasing
from studies.reset_modes import RESET_MODES
from studies.step_times import median_seconds, time_paired_steps, timer
from studies.workload import Size


def verify(loop: Loop, **options: Any) -> Result:
    """Verify a loop without progress; what a report says rests on XLA alone.

    Imported at the first call, since the report reads claims without JAX.
    """
    from gradcheck_suite.verification.verify import verify as verified

    return verified(loop, quiet=True, jax=XLA, **options)


def describe_case(case: Case) -> list[str]:
    """Return a case in words; imported at the first call, as above."""
    from gradcheck_suite.catalogue.description import describe_case as described

    return described(case)


# The finding of a claim's check, and the measurements and loops by which claims are checked.


Verdict = Literal["confirmed", "refuted", "conditional", "always", "never", "sometimes"]
ANSWERS: dict[Verdict, Verdict] = {
    "confirmed": "always",
    "conditional": "sometimes",
    "refuted": "never",
}
"""Verdict on a claim -> the answer where the source does not claim but ask."""


@dataclass(frozen=True)
class Finding:
    """The result of a claim's check.

    Attributes:
        verdict: `"confirmed"`, `"refuted"`, or `"conditional"` (true under `condition`).
        sentence: one to three sentences on what holds.
        condition: condition under which the claim is true; empty unless conditional.
        figures: name (with its unit) -> value measured or counted in this run.
        counterexample: smallest case in which the claim fails, in words or code; empty where there
            is none.
        rows: measurements behind the figures that are kept as benchmark records too.
    """

    verdict: Verdict
    sentence: str
    condition: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    counterexample: str = ""
    rows: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        mixed = self.verdict in ("conditional", "sometimes")
        assert bool(self.condition) == mixed, "only a mixed finding has a condition"


def judged(
    cases: Mapping[str, bool],
    sentence: str,
    *,
    fails: Collection[str] = (),
    condition: str = "",
    figures: Mapping[str, Any],
    counterexample: str = "",
) -> Finding:
    """Return the finding on a claim: confirmed if it holds in all cases, refuted if in none, else
    conditional.

    Args:
        cases: what was tried -> whether the claim holds there, as measured in this run.
        sentence: what holds if the claim fails in `fails` alone; like `condition` and
            `counterexample` it is replaced by the names of the cases where others fail, as under
            another version of torch.
        fails: names of the cases in which the claim was known to fail when the sentence was
            written.
        condition: condition under which the claim is then true.
        figures: figures of this run.
        counterexample: the smallest case against the claim.
    """
    good, bad = (
        [name for name, holds in cases.items() if holds is wanted] for wanted in (True, False)
    )
    if set(bad) != set(fails):
        lists = [
            f"{verb} for: {'; '.join(names)}"
            for verb, names in (("holds", good), ("fails", bad))
            if names
        ]
        sentence = f"Other cases fail than were known to. The claim {', and '.join(lists)}."
        condition, counterexample = "; ".join(good) if good and bad else "", "; ".join(bad)
    verdict: Verdict = "conditional" if good and bad else "confirmed" if good else "refuted"
    return Finding(verdict, sentence, condition, figures, counterexample)


SOURCES = {
    1: 'a blog post, "Why zeroing gradients isn\'t enough?" (gitlostmurali.com)',
    2: 'an answer, "When using PyTorch\'s grad.zero_(), should gradient tracking be enabled?"',
    3: 'an answer, "When should I call optimizer.zero_grad() in PyTorch mini-batch training?"',
}


def _loop(
    *,
    at_start: bool = False,
    first: bool = False,
    last: bool = False,
    accumulates: bool = False,
    by_hand: bool = False,
) -> Loop:
    """Return a loop of forward, backward and step.

    Args:
        at_start: whether it resets the gradients once before training.
        first: whether it resets them first in each iteration.
        last: whether it resets them after each step.
        accumulates: whether it divides the loss by `accumulation_steps`, and steps after that many
            micro-batches.
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
    if result.violation is None:
        return f"{result.verdict} over {counted(result.cases, 'case')}"
    return f"violated, found after {counted(result.violation.found_after or 0, 'case')}"


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


def train(
    mode: str, *, width: int, items: int, micro_batches: int, windows: int = 3
) -> tuple[Ledger, int]:
    """Train `DEPTH` linear layers with tanh between them, float32, plain SGD, a reset after each
    step.

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
        text: the claim as published, hedged as it was.
        how: what is judged of it, and by which measurement.
        check: runs the test and returns its finding. Every figure comes from the run.
        short: the claim in at most 42 characters, for a list of one line each.
    """

    number: str
    text: str
    how: str
    check: Callable[[], Finding]
    short: str


CLAIMS: dict[str, Claim] = {}
"""The claims by number, in the order of their sources, and the question (C2.6) that one of them answers."""


Check = Callable[[], Finding]


def claim(number: str, text: str, how: str, *, short: str) -> Callable[[Check], Check]:
    """Make a function the check of a claim, which joins `CLAIMS`.

    The arguments are those of `Claim`.
    """

    def join(check: Check) -> Check:
        CLAIMS[number] = Claim(number, text, how, check, short)
        return check

    return join


def _parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


def _gradient(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


# Claims of the blog post (C1.1 to C1.9): memory and traffic counted exactly, steps timed on this
# machine.


_SMALL = {"width": 32, "items": 8, "micro_batches": 1}


@claim(
    "C1.1",
    "Zeroing keeps the gradient buffers allocated: it frees no significant memory.",
    "bytes of gradients that a reset frees, and that are alive when the next forward begins,"
    " counted by the ledger",
    short="Zeroing keeps gradient buffers allocated",
)
def _kept() -> Finding:
    (zeroed, size), (released, _) = train("zero_", **_SMALL), train("set_to_none", **_SMALL)
    alive = [ledger.starts[1]["gradients"] for ledger in (zeroed, released)]
    freed = [ledger.total("reset", window=1).freed for ledger in (zeroed, released)]
    return judged(
        {
            "bytes alive at the next forward": alive[0] == size,
            "bytes freed by the reset": freed[0] == 0,
        },
        "zero_ frees nothing: all gradients are still allocated when the next forward begins.",
        figures={
            "bytes of all gradients": size,
            "alive when the next forward begins, zero_ / None": f"{alive[0]} / {alive[1]}",
            "freed by the reset, zero_ / None": f"{freed[0]} / {freed[1]}",
        },
    )


def _additions(micro_batches: int) -> tuple[int, int]:
    arguments = {**_SMALL, "micro_batches": micro_batches}
    found = [
        train(mode, **arguments)[0].operations("accumulate", window=1)
        for mode in ("zero_", "set_to_none")
    ]
    return found[0].get("add_", 0), found[1].get("add_", 0)


@claim(
    "C1.2",
    "After zeroing, the next backward adds the new gradient to 0: a redundant operation. Even"
    " without accumulation every step pays it.",
    "whether a step under zero_ has one addition for each parameter more than one under None, with"
    " K micro-batches",
    short="After zeroing, backward adds to 0 in vain",
)
def _redundant() -> Finding:
    found = {k: _additions(k) for k in (1, 4)}
    return judged(
        {f"K = {k}": zeroed == released + DEPTH for k, (zeroed, released) in found.items()},
        "After zero_, autograd adds each parameter's first gradient of a window to zeros: one"
        " addition per parameter and step that a release avoids, with or without accumulation.",
        figures={
            f"additions per step, {DEPTH} parameters, K = {k}: zero_ / None": (
                f"{zeroed} / {released}"
            )
            for k, (zeroed, released) in found.items()
        },
    )


def _accumulated(p: torch.nn.Parameter, loss: Callable[[], torch.Tensor]) -> str:
    """Return what a backward does with the gradient of a parameter: `"taken"`, `"copied"` or
    `"added"`.
    """
    ledger = Ledger()
    with ledger:
        loss().backward()
    found = ledger.operations("accumulate")
    return "added" if {"add", "add_"} & found.keys() else "copied" if found else "taken"


@claim(
    "C1.3",
    "After a release (set_to_none=True) backward assigns instead of adding.",
    "which operations accumulation runs in the first and the second backward after"
    " zero_grad(set_to_none=True)",
    short="After a release, backward assigns",
)
def _assigned() -> Finding:
    p, other = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(2, 3))
    losses = {
        "a gradient of its own": lambda: (p * torch.ones(2, 3)).sum(),
        "a gradient with other strides": lambda: (p.T * torch.ones(3, 2)).sum(),
        "a gradient that another parameter gets too": lambda: (p + other).square().sum(),
    }
    found = {}
    for name, loss in losses.items():
        p.square().sum().backward()
        torch.optim.SGD([p, other], lr=0.1).zero_grad(set_to_none=True)
        found[f"first backward, {name}"] = _accumulated(p, loss)
    found["second backward"] = _accumulated(p, losses["a gradient of its own"])
    return judged(
        {name: done != "added" for name, done in found.items()},
        "The first gradient after a release is not added to anything: autograd takes the tensor"
        " that backward made, or copies it where its strides are not the parameter's or something"
        " else refers to it. The second micro-batch's gradient is added.",
        fails=["second backward"],
        condition="for the first backward after the release",
        figures={
            **found,
            "additions per step, K = 4: zero_ / None": "{} / {}".format(*_additions(4)),
        },
        counterexample="the second backward of a window adds, under either mode",
    )


@claim(
    "C1.4",
    "A release frees memory for other use between steps: larger batches or models fit.",
    "whether the peak falls by half of the gradients' bytes or more, with more activations than"
    " gradients and with fewer",
    short="A release frees memory between steps",
)
def _frees_for_others() -> Finding:
    figures: dict[str, object] = {}
    cases = {}
    for what, arguments in (
        ("many activations", {"width": 16, "items": 2048, "micro_batches": 1}),
        ("few activations", {"width": 256, "items": 4, "micro_batches": 1}),
    ):
        (zeroed, size), (released, _) = (
            train("zero_", **arguments),
            train("set_to_none", **arguments),
        )
        peaks = zeroed.peak(window=1), released.peak(window=1)
        saved = (peaks[0].bytes - peaks[1].bytes) / size
        cases[what] = saved >= 0.5
        figures[f"{what}: peak under zero_ / None, bytes"] = (
            f"{peaks[0].bytes:,} / {peaks[1].bytes:,}"
        )
        figures[f"{what}: phase of the peak"] = f"{peaks[0].phase} / {peaks[1].phase}"
        figures[f"{what}: saved, in gradients' bytes"] = saved
    return judged(
        cases,
        "Between steps the memory is free, and a forward whose activations make the peak can use"
        " it. Where the peak occurs late in the backward, all gradients are allocated again, and a"
        " release saves little or nothing.",
        fails=["few activations"],
        condition=(
            "the peak occurs in the forward or early in the backward: activations outweigh"
            " gradients"
        ),
        figures=figures,
        counterexample=(
            "width 256, 4 items: the peak occurs at the end of the backward, and releasing saves"
            " less than half of the gradients' bytes"
        ),
    )


CONFIGURATIONS = 24
"""Number of models and splits that C1.5 draws."""


@claim(
    "C1.5",
    "A release allocates and deallocates more often, and is still the better use of memory"
    " overall.",
    "bytes freed by the reset, and in a whole step, and the peak, under both modes, for drawn"
    " widths and splits",
    short="A release reallocates, and is still better",
)
def _more_allocations() -> Finding:
    draw = random.Random(0)
    rows = []
    for _ in range(CONFIGURATIONS):
        arguments = {
            "width": draw.randint(1, 96),
            "items": draw.randint(1, 96),
            "micro_batches": draw.randint(1, 4),
        }
        ledgers = [train(mode, **arguments)[0] for mode in ("zero_", "set_to_none")]
        totals = [[ledger.total(*phases, window=1).freed for ledger in ledgers]
                  for phases in (("reset",), ("reset", "accumulate"))]  # fmt: skip
        rows.append((*totals, [ledger.peak(window=1).bytes for ledger in ledgers]))
    resets, steps, peaks = zip(*rows, strict=True)
    saved = [100 * (zeroed - released) / zeroed for zeroed, released in peaks]
    return judged(
        {
            "the reset frees more": all(released > zeroed for zeroed, released in resets),
            "the step frees more": all(released > zeroed for zeroed, released in steps),
            "the peak is not higher": all(released <= zeroed for zeroed, released in peaks),
        },
        "The reset frees all gradients, which zeroing keeps. But under zeroing each backward"
        " allocates a new gradient too, adds it and frees it, so a whole step allocates and frees"
        f" as much. The peak was not higher under a release in any of {CONFIGURATIONS} drawn models"
        " and splits.",
        fails=["the step frees more"],
        condition=(
            "only deallocations between steps count; a whole step allocates as much in both modes"
        ),
        figures={
            "models and splits drawn": CONFIGURATIONS,
            "of these with a higher peak under None": sum(
                released > zeroed for zeroed, released in peaks
            ),
            "peak saved by a release, least and most, %": [min(saved), max(saved)],
        },
        counterexample=(
            "under zero_ every backward still allocates each gradient, to add it and free it again"
        ),
    )


def pass_seconds(elements: int) -> float:
    """Return the seconds on this CPU of what zero mode does beyond a release to one gradient:
    `zero_` and `add_`.
    """
    held, new = torch.zeros(elements), torch.ones(elements)
    calls = max(1, 10**4 // elements)  # a single call on few elements is too short for the clock

    def passes() -> None:
        for _ in range(calls):
            held.zero_()
            held.add_(new)

    return median_seconds(passes, timer("cpu")) / calls


@claim(
    "C1.6",
    "Operations: zero mode = load new gradient, load zero gradient, add, store; None mode = store."
    " The transfers are often the bottleneck on a GPU.",
    "bytes read and written and operations run by reset and accumulation, counted by the ledger;"
    " that transfers are the bottleneck where zero_ and add_ take twice as long as on one element,"
    " timed on this CPU",
    short="Zeroing loads twice, adds, stores",
)
def _traffic() -> Finding:
    (zeroed, size), (released, _) = train("zero_", **_SMALL), train("set_to_none", **_SMALL)
    figures: dict[str, object] = {"bytes of all gradients (G)": size}
    moved, launched = {}, {}
    for name, ledger in (("zero_", zeroed), ("None", released)):
        reset, added = ledger.total("reset", window=1), ledger.total("accumulate", window=1)
        moved[name] = [
            total / size for total in (reset.read + reset.written, added.read, added.written)
        ]
        launched[name] = sum(ledger.operations("reset", "accumulate", window=1).values())
        figures[f"{name}: reset moves, accumulation reads, writes, in G"] = moved[name]
    seconds = {elements: pass_seconds(elements) for elements in (1, 100, 10**7)}
    figures |= {
        f"zero_ and add_ of {n:,} elements on this CPU": f"{s * 1e6:.3g} us"
        for n, s in seconds.items()
    }
    figures[f"operations per step, {DEPTH} parameters, zero_ / None"] = (
        f"{launched['zero_']} / {launched['None']}"
    )
    return judged(
        {
            "zero mode loads twice and stores once in accumulation": moved["zero_"][1:] == [2, 1],
            "zero mode moves nothing else": sum(moved["zero_"]) == 3,
            "None mode moves nothing beyond the store that makes the gradient": (
                sum(moved["None"]) == 0
            ),
            **{
                f"transfers are the bottleneck at {n:,} elements": seconds[n] > 2 * seconds[1]
                for n in (100, 10**7)
            },
        },
        "Zeroing moves four times the gradients' bytes per step with K = 1: it writes the zeros,"
        " reads them and the new gradient, and writes the sum. The claim omits the write of the"
        " zeros. A release moves nothing beyond the store that makes the gradient, which both modes"
        " need. Zeroing also runs two operations per parameter, which for few elements take as long"
        " as for one. Nothing was timed on a GPU.",
        fails=["zero mode moves nothing else", "transfers are the bottleneck at 100 elements"],
        condition="gradients are large, and the write of the zeros is counted too",
        figures=figures,
        counterexample="load, load, add, store is 3 G; zero_ itself writes one more",
    )


VERY_LARGE = 405e9
"""Parameters of the model that C1.7 speaks of."""
DEVICES = {"A100 80GB": (2.0e12, 312e12), "H100 SXM": (3.35e12, 989e12)}
"""Device -> bytes per second of its memory, and operations per second in bfloat16 (data sheets, dense)."""
UTILISATION = 0.4
"""Share of the operations per second that training reaches (Llama 3 with 405 B parameters: 38 to 43%)."""
OPERATIONS_PER_PARAMETER = 6
"""Operations per parameter in one token's forward and backward (Kaplan et al. 2020, Scaling Laws for Neural Language
Models, section 2.1)."""
PASSES = bytes_saved_by_releasing(1)
"""Number of times that zero mode moves the gradients' bytes per step beyond a release; see C1.6."""
SIGNIFICANT = 0.05
"""Share of a step from which C1.7 calls a transfer significant."""
LAYER = 2048
"""Inputs and outputs of the linear layer in which C1.7 measures that share."""


def layer_seconds(tokens: int) -> float:
    """Return the seconds on this CPU of the forward and backward of a linear layer of `LAYER`**2
    parameters.
    """
    x, weight = (
        torch.ones(tokens, LAYER, requires_grad=True),
        torch.ones(LAYER, LAYER, requires_grad=True),
    )
    return median_seconds(
        lambda: torch.autograd.grad((x @ weight.T).sum(), (x, weight)), timer("cpu")
    )


@claim(
    "C1.7",
    "Even at 2 TB/s, transferring the gradients of a very large model (405 B parameters) is"
    " significant.",
    f"whether zero_ and add_ take {SIGNIFICANT:.0%} of a step or more, for few and for many tokens"
    " per replica and step: timed in one layer on this machine, since devices share traffic and"
    " work alike; the same share from the data sheets of two devices",
    short="Gradients of 405 B parameters take long",
)
def _very_large() -> Finding:
    figures: dict[str, object] = {}
    for name, itemsize in (("float32", 4), ("bfloat16", 2)):
        seconds = VERY_LARGE * itemsize / DEVICES["A100 80GB"][0]
        figures[f"{name}: one gradient of 405e9 parameters"] = (
            f"{VERY_LARGE * itemsize / 1e12:.2f} TB"
        )
        figures[f"{name}: moved once, {PASSES} times at 2 TB/s"] = (
            f"{seconds:.2f} s, {PASSES * seconds:.2f} s"
        )
    cases, once = {}, VERY_LARGE * 4 / DEVICES["A100 80GB"][0]
    traffic = pass_seconds(LAYER**2)
    for tokens in (1, 1024):
        share = traffic / (traffic + layer_seconds(tokens))
        figures[f"share of a step of {tokens:,} tokens, measured here"] = f"{share:.2%}"
        cases[f"{tokens:,} tokens"] = share >= SIGNIFICANT
    for name, (bandwidth, operations) in DEVICES.items():
        for tokens in (1024, 16384, 131072):
            moved = 4 * PASSES / bandwidth
            share = moved / (moved + OPERATIONS_PER_PARAMETER * tokens / (UTILISATION * operations))
            figures[f"share of a step of {tokens:,} tokens per replica, {name}, float32"] = (
                f"{share:.2%}"
            )
    return judged(
        cases,
        f"Moving one float32 gradient takes {once:.2f} s at 2 TB/s, and the {PASSES} passes of zero"
        f" mode take {PASSES * once:.2f} s. Devices share traffic and work alike, so the share of a"
        " step depends only on the tokens that a replica processes per step: significant for few,"
        " negligible for many.",
        fails=["1,024 tokens"],
        condition="few tokens per replica and step",
        figures=figures,
        counterexample=(
            "1,024 tokens in one layer on this machine, 131,072 tokens per replica on an A100"
        ),
    )


@claim(
    "C1.8",
    "For small models, or when memory is no constraint, zeroing might be sufficient; what decides:"
    " model size, hardware, batch size, update frequency.",
    "in which settings a step is not faster under a release: steps under both modes in turn, timed"
    " on this machine's CPU",
    short="For small models zeroing might suffice",
)
def _decision() -> Finding:
    sizes = [Size(parameters, "few") for parameters in step_times.PARAMETERS["cpu"]]
    rows = tuple(
        time_paired_steps(size, items, k, pairs=step_times.PAIRS).to_row(size, "cpu")
        for size in sizes
        for items in step_times.ITEMS
        for k in step_times.MICRO_BATCHES
    )
    return Finding(rows=rows, **answer(rows))


@claim(
    "C1.9",
    "By the end of 4 steps the buffer holds the sum of the 4 gradients.",
    "four backwards with numbers that float64 holds exactly",
    short="4 backwards add up 4 gradients",
)
def _sum_of_four() -> Finding:
    gradients = [torch.tensor([float(2**i), -float(3 * i)], dtype=torch.float64) for i in range(4)]
    w = _parameter(0.0, 0.0)
    for gradient in gradients:
        (w * gradient / 4).sum().backward()
    return judged(
        {"four backwards": torch.equal(_gradient(w), torch.stack(gradients).sum(dim=0) / 4)},
        "After four backwards the buffer holds the sum of the four gradients; with the loss divided"
        " by 4, as in the loop, that sum is their mean.",
        figures={
            "gradients of the losses divided by 4": [(g / 4).tolist() for g in gradients],
            "held: the sum of these": _gradient(w).tolist(),
        },
    )


# Claims of the answer about `grad.zero_()` and gradient tracking (C2.1 to C2.5), and the question
# it answers (C2.6).


SEEDS = 200
"""Number of models and inputs on which C2.1 runs the source's loop."""


def _three_iterations_of(seed: int, *, same: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run loop 2a on a linear layer.

    Return the bias's gradient after each iteration, and of each iteration alone.

    Args:
        seed: seed of the layer and the inputs.
        same: whether all iterations get the same input and target, as in the source.
    """
    torch.manual_seed(seed)
    model = torch.nn.Linear(10, 5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(3, 2, 10, dtype=torch.float64)
    held, alone = [], []
    for x, target in data[[0, 0, 0]] if same else data:
        loss = mse_loss(model(x), target[:5])
        alone.append(torch.autograd.grad(loss, model.bias, retain_graph=True)[0])
        loss.backward()
        optimizer.step()
        held.append(_gradient(model.bias).clone())
    return held, alone


@claim(
    "C2.1",
    "Without a reset gradients accumulate over iterations: the bias gradient keeps growing.",
    "the source's own loop of three iterations on the same input, then on another input in each:"
    " whether the bias's gradient is the sum of the single ones, and whether each component grows"
    " each time",
    short="Without a reset, gradients keep growing",
)
def _not_reset() -> Finding:
    summed, grown = [], {}
    for same, name in (
        (True, "the source's own loop, the same input each time"),
        (False, "another input each time"),
    ):
        runs = [_three_iterations_of(seed, same=same) for seed in range(SEEDS)]
        grown[name] = sum(bool((held[0].abs() < held[1].abs()).all() and (held[1].abs() < held[2].abs()).all())
                          for held, _ in runs)  # fmt: skip
        summed += [torch.equal(held[2], alone[0] + alone[1] + alone[2]) for held, alone in runs]
    return judged(
        {
            "gradients add up": all(summed),
            **{name: count > 0.9 * SEEDS for name, count in grown.items()},
        },
        "Without a reset, the gradient is the sum of all gradients so far. In the source's own"
        " loop, which repeats its input, it grows in every component. In general it accumulates but"
        " need not grow: where inputs differ, gradients of different signs cancel.",
        fails=["another input each time"],
        condition="gradients keep their sign from one iteration to the next, as on the same input",
        figures={
            f"every component grows, {name}": f"{count} of {SEEDS} seeds"
            for name, count in grown.items()
        },
        counterexample="one bias, three items with gradients -4, 4 and 5: bias.grad is -4, 0 and 5",
    )


@claim(
    "C2.2",
    "grad.zero_() must be used whenever gradients are tracked.",
    "whether three iterations without zero_() go wrong: under None, with no reset between steps,"
    " and where the sum is wanted",
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

    seen = {reset: train(reset) for reset in ("zero_()", "None", "none at all")}
    each, total = [1.0, 2.0, 3.0], 6.0
    return judged(
        {
            "no reset between steps": seen["none at all"] != each,
            "gradients set to None": seen["None"] != each,
            "a sum over micro-batches is wanted": (
                seen["none at all"][-1] != total and seen["zero_()"][-1] == total
            ),
        },
        "Training needs one reset per optimizer step. `p.grad = None` resets as well as `zero_()`."
        " Between the micro-batches of one step there must be no reset, since their gradients are"
        " to be summed.",
        fails=["gradients set to None", "a sum over micro-batches is wanted"],
        condition=(
            "between two steps, where gradients are not set to None and accumulation is not"
            " intended"
        ),
        figures={f"gradients under {reset}": values for reset, values in seen.items()},
        counterexample=(
            "w.grad = None before each backward: the gradients equal those under zero_(), which is"
            " never called"
        ),
    )


def _operations(foreach: bool | None, **arguments: bool) -> str:
    """Return what `optimizer.zero_grad` leaves of two gradients, and the operations that it runs."""
    parameters = [_parameter(2.0), _parameter(3.0)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=foreach)
    sum(((p**2).sum() for p in parameters), torch.zeros(())).backward()
    ledger = Ledger(torch.nn.ParameterList(parameters))
    with ledger:
        optimizer.zero_grad(**arguments)
    ran = ", ".join(f"{count} {name}" for name, count in ledger.operations("reset").items())
    return f"{ran or 'no operation'}; grad {_listed(parameters[0].grad)}"


@claim(
    "C2.3",
    "optimizer.zero_grad() calls .grad.zero_() on each parameter.",
    "the operations that zero_grad() runs on two gradients, counted by the ledger, under each value"
    " of `foreach`",
    short="optimizer.zero_grad() calls zero_()",
)
def _what_zero_grad_does() -> Finding:
    by_default = {f"foreach={foreach}": _operations(foreach) for foreach in (None, False, True)}
    kept = {
        f"set_to_none=False, foreach={f}": _operations(f, set_to_none=False)
        for f in (None, False, True)
    }
    return judged(
        {name: said.startswith("2 zero_;") for name, said in by_default.items()},
        "`optimizer.zero_grad()` sets every gradient to None, its default since torch 2.0. With"
        " `set_to_none=False` it calls `zero_()` on each gradient, as the claim says; with"
        " `foreach=True` besides, one `_foreach_zero_` on all.",
        fails=list(by_default),
        figures={**by_default, **kept, "torch": torch.__version__},
        counterexample="p.grad after optimizer.zero_grad() is None, not a tensor of zeros",
    )


@claim(
    "C2.4",
    "The `is not None` check can be useful, above all in early iterations.",
    "in which of three iterations p.grad.zero_() raises without the check, with one of two"
    " parameters unused",
    short="The `is not None` check can be useful",
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
    return judged(
        {
            "it raises without the check": sum(raised) > 0,
            "most in the first iteration": raised[0] > max(raised[1:]),
        },
        "Before the first backward every gradient is None, and `p.grad.zero_()` raises"
        " AttributeError. This happens not only in early iterations: a frozen parameter, or a"
        " parameter that no item reaches, keeps None.",
        figures={"of two parameters, one unused: AttributeErrors in iterations 1, 2, 3": raised},
    )


@claim(
    "C2.5",
    "Manual zero_() is equivalent to optimizer.zero_grad().",
    "whether both leave the same gradient, the same graph, the same gradient outside the"
    " optimizer's groups and the same step of an unused parameter under momentum",
    short="zero_() is the same as zero_grad()",
)
def _manual_is_equivalent() -> Finding:
    plain, outside, momentum = _plain_difference(), _outside(), _momentum()
    graphs = [_graph_nodes(by_hand=by_hand) for by_hand in (False, True)]
    cases = {
        "gradient afterwards": plain[0] == plain[1],
        "graph afterwards, create_graph=True, set_to_none=False": graphs[0] == graphs[1],
        "a parameter outside the optimizer": outside[0] == outside[1],
        "momentum on an unused parameter": momentum[0] == momentum[1],
    }
    return judged(
        cases,
        "Since torch 2.0 `zero_grad()` releases gradients and `zero_()` keeps them. `zero_()` by"
        " hand differs from `zero_grad(set_to_none=False)` for a gradient with a graph, which it"
        " keeps and which grows, and for parameters outside the optimizer. Under a release the"
        " optimizer skips an unused parameter; under zeros momentum and weight decay move it.",
        fails=list(cases),
        figures={
            "after zero_grad() / after the loop by hand": plain,
            "graph nodes held after 1, 2, 3 resets by hand, create_graph=True": graphs[1],
            "the same with optimizer.zero_grad(set_to_none=False)": graphs[0],
            "parameter outside the optimizer: grad after zero_grad() / by hand over model.parameters()": (
                outside
            ),
            "momentum on an unused parameter: value after zero_grad() / by hand": momentum,
            "stored rows of a sparse gradient after zero_grad() / by hand": _sparse(),
        },
        counterexample=(
            "SGD(lr=0.1, momentum=0.9), a parameter used only in the first window: it keeps moving"
            " under zero_() and stops under zero_grad()"
        ),
    )


def _clear(
    optimizer: torch.optim.Optimizer, *parameters: torch.Tensor, by_hand: bool, keep: bool = False
) -> None:
    """Reset by `zero_()` over some parameters, or by the optimizer, which releases gradients unless
    they are kept.
    """
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
    return shown


def _sparse() -> list[str]:
    shown = []
    for by_hand in (False, True):
        table = torch.nn.Embedding(8, 2, sparse=True)
        table(torch.tensor([1, 2])).sum().backward()
        _clear(
            torch.optim.SGD(table.parameters(), lr=0.1), table.weight, by_hand=by_hand, keep=True
        )
        shown.append(str(_gradient(table.weight)._nnz()))
    return shown


@claim(
    "C2.6",
    "Does it matter whether gradient tracking is enabled while zero_() runs?",
    "zero_() inside and outside no_grad between two backwards of w^3 at 2, with and without"
    " create_graph: whether the gradient (12) or its own derivative (12) differs",
    short="Does tracking matter while zero_() runs?",
)
def _tracking() -> Finding:
    figures, found = {}, {}
    for create_graph in (False, True):
        for tracked in (True, False):
            w = _parameter(2.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (w**3).sum().backward(create_graph=create_graph)
                with torch.set_grad_enabled(tracked):
                    _gradient(w).zero_()
                (w**3).sum().backward(create_graph=create_graph)
                seen = [_gradient(w).item()]
                if create_graph:
                    seen.append(torch.autograd.grad(_gradient(w).sum(), w)[0].item())
            w.grad = None  # torch warns of the cycle of a gradient and its graph
            found[create_graph, tracked] = seen
            name = f"create_graph={create_graph}, {'tracking on' if tracked else 'under no_grad'}"
            figures[f"{name}: gradient{' and its derivative' * create_graph}"] = seen
    finding = judged(
        {f"create_graph={flag}": found[flag, True] != found[flag, False] for flag in (False, True)},
        "An ordinary gradient does not require grad, so autograd tracks nothing while it is zeroed."
        " After `backward(create_graph=True)` the gradient has a graph. With tracking on, `zero_()`"
        " cuts it off; under `no_grad` the zeros keep it, and the next gradient's own derivative is"
        " 24 in place of 12. Release such a gradient, or detach it first, as `optimizer.zero_grad`"
        " does.",
        fails=["create_graph=False"],
        condition="the gradient has a graph, from `backward(create_graph=True)`",
        figures=figures,
        counterexample=(
            "without create_graph, the next gradient is the same inside and outside no_grad"
        ),
    )
    return replace(finding, verdict=ANSWERS[finding.verdict])


# Claims of the answer about when to call `zero_grad` (C3.1 to C3.5).


CASES = 60
"""Number of cases for each loop that a claim verifies."""


@claim(
    "C3.1",
    "Worked numbers: gradients {-0.1, 0.2, -0.05}, then {0.05, -0.1, 0.1} without a reset: the"
    " optimizer sees {-0.05, 0.1, 0.05}.",
    "two backwards with these gradients in float64, to 1e-16",
    short="Without a reset the step sees the sum",
)
def _worked_numbers() -> Finding:
    first = torch.tensor([-0.1, 0.2, -0.05], dtype=torch.float64)
    second = torch.tensor([0.05, -0.1, 0.1], dtype=torch.float64)
    w = _parameter(0.0, 0.0, 0.0)
    for gradient in (first, second):
        (w * gradient).sum().backward()
    right = torch.tensor([-0.05, 0.1, 0.05], dtype=torch.float64)
    off = (_gradient(w) - right).abs().max().item()
    return judged(
        {"two backwards": off < 1e-16},
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


PLACES = (
    "before the forward",
    "between forward and backward",
    "after the step",
    "between backward and step",
)


@claim(
    "C3.2",
    "zero_grad must come before backward, so that each mini-batch's gradients stand alone; its"
    " place is crucial.",
    "verify on five loops that differ only in the place of the reset: whether a loop holds exactly"
    " if its reset comes before backward, in the same iteration",
    short="zero_grad must come before backward",
)
def _place() -> Finding:
    results = {where: verify(_reset(where), examples=CASES) for where in (*PLACES, "nowhere")}
    wrong = results["between backward and step"]
    return judged(
        {
            f"reset {where}": result.holds == (where in PLACES[:2])
            for where, result in results.items()
        },
        "Three places are equivalent: before the forward, after the step, and between a window's"
        " first forward and its first backward. A reset between backward and step is wrong, and so"
        " is no reset.",
        fails=["reset after the step"],
        condition=(
            "a reset after the step counts as one before the next backward; the place in between"
            " makes no difference"
        ),
        figures={f"reset {where}": _outcome(result) for where, result in results.items()},
        counterexample="" if wrong.holds else _smallest(wrong),
    )


@claim(
    "C3.3",
    "In accumulation, zero_grad comes only after the step, and dividing the loss by the number of"
    " steps keeps the learning rate's meaning.",
    "verify on the loop with and without equal counts and whole windows",
    short="Accumulation: reset only after the step",
)
def _keeps_the_learning_rate() -> Finding:
    results = {
        name: verify(accumulate_and_divide, examples=CASES, assumes=assumes)
        for name, assumes in (
            ("equal counts, whole windows", (EQUAL_MICRO_BATCHES, WHOLE_WINDOWS)),
            ("unequal counts, whole windows", (WHOLE_WINDOWS,)),
            ("equal counts, short last window", (EQUAL_MICRO_BATCHES,)),
        )
    }
    _, unequal, _ = results.values()
    return judged(
        {name: result.holds for name, result in results.items()},
        "Dividing by the number of steps gives the large batch's gradient where all micro-batches"
        " of a window have the same count and no window is short. Otherwise the mean of means is"
        " not the mean, and a short last window gets no step and leaks into the next epoch. Divide"
        " the summed loss by the window's count instead.",
        fails=list(results)[1:],
        condition="equal counts and whole windows",
        figures={name: _outcome(result) for name, result in results.items()},
        counterexample="" if unequal.holds else _smallest(unequal),
    )


@claim(
    "C3.4",
    "Accumulation serves limited GPU memory.",
    "whether the ledger's peak for 1,024 items falls with each doubling of the number of"
    " micro-batches; nothing was run on a GPU",
    short="Accumulation helps if memory is short",
)
def _limited_memory() -> Finding:
    total = 1024
    peaks = {}
    for k in (1, 2, 4, 8, 16):
        ledger, size = train("set_to_none", width=32, items=total // k, micro_batches=k)
        peaks[k] = ledger.peak(window=1).bytes
    return judged(
        {f"K = {k}": peaks[k] < peaks[k // 2] for k in list(peaks)[1:]},
        "With a fixed batch, the peak falls with the number of micro-batches, as the activations"
        " do, towards the memory of parameters and gradients.",
        figures={
            "bytes of parameters, and of gradients": size,
            **{
                f"peak bytes, 1024 items in K = {k} micro-batches": peak
                for k, peak in peaks.items()
            },
        },
    )


PROBLEMS, STEPS = 20, 1000
"""Number of random problems on which C3.5 trains with and without resets, and of steps on each."""
EXCESSIVE = 10
"""From how many times the largest gradient with resets on C3.5 calls one excessively large."""


def _trained(seed: int, *, resets: bool) -> tuple[list[float], list[float]]:
    """Train a random model by SGD on random mini-batches.

    Returns:
        The largest gradients of the first tenth of the steps and of all, and the mean losses of the
        first and the last tenth.
    """
    draw = random.Random(seed)
    features, items, lr = (
        draw.randint(1, 8),
        draw.choice((1, 4, 16, 32)),
        10 ** draw.uniform(-3, -1),
    )
    classes, deep = draw.random() < 0.5, draw.random() < 0.5
    outputs = 3 if classes else 1
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(features, 8), torch.nn.Tanh()] if deep else []
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8 if deep else features, outputs)).double()
    truth = torch.randn(features, outputs, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    largest: list[float] = []
    losses: list[float] = []
    for _ in range(STEPS):
        x = torch.randn(items, features, dtype=torch.float64)
        y = x @ truth + torch.randn(items, outputs, dtype=torch.float64)
        out = model(x)
        loss = cross_entropy(out, y.argmax(dim=1)) if classes else mse_loss(out, y)
        if resets:
            optimizer.zero_grad()
        loss.backward()
        largest.append(max(_gradient(p).abs().max().item() for p in model.parameters()))
        losses.append(loss.item())
        optimizer.step()
    tenth = STEPS // 10
    return [max(largest[:tenth]), max(largest)], [fmean(losses[:tenth]), fmean(losses[-tenth:])]


@claim(
    "C3.5",
    "Not resetting typically lets gradients grow excessively large, and training may become"
    " unstable.",
    f"SGD on {PROBLEMS} random problems with mini-batches (regression or classification, linear or"
    f" with a hidden layer, learning rates from 0.001 to 0.1), {STEPS} steps with and without"
    f" resets: whether in most of them the largest gradient is {EXCESSIVE} times that with resets"
    " or more, and whether the loss of any rises above where it started",
    short="Without a reset, training may be unstable",
)
def _grows_without_bound() -> Finding:
    reset, kept = (
        [_trained(seed, resets=resets) for seed in range(PROBLEMS)] for resets in (True, False)
    )
    times = [
        without[1] / largest[1] for (largest, _), (without, _) in zip(reset, kept, strict=True)
    ]
    grown = [without[1] / without[0] for without, _ in kept]
    excessive = sum(ratio >= EXCESSIVE for ratio in times)
    unstable = sum(
        end > max(start, 2 * right)
        for (_, (_, right)), (_, (start, end)) in zip(reset, kept, strict=True)
    )
    return judged(
        {
            "gradients typically excessively large": excessive > PROBLEMS / 2,
            "training unstable in some": unstable > 0,
        },
        "Without a reset, SGD behaves like momentum without decay: the noise of mini-batches adds"
        f" up, and nothing damps it. In {excessive} of {PROBLEMS} problems gradients become"
        f" excessively large, and in {unstable} training is unstable.",
        figures={
            f"problems whose largest gradient is {EXCESSIVE} times that with resets": (
                f"{excessive} of {PROBLEMS}"
            ),
            "largest gradient without resets / with them: least, median, most": [
                min(times),
                median(times),
                max(times),
            ],
            f"largest gradient in {STEPS} steps without resets / in {STEPS // 10}: least, median, most": [
                min(grown),
                median(grown),
                max(grown),
            ],
            "problems whose loss ends above its start, and above twice that with resets": (
                f"{unstable} of {PROBLEMS}"
            ),
        },
    )


def _smallest(result: Result) -> str:
    assert result.violation is not None
    return "\n".join([result.violation.explanation, *describe_case(result.violation.case)])
