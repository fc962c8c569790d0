"""The laws of the reset modes hold exactly: operations and bytes, window by window.

For P parameters that get gradients of G bytes together, and K micro-batches in a window:

- Zeroing writes every gradient once per window (P `zero_`, or one call for all) and adds P K times.
  A release adds P (K - 1) times, since autograd takes the first micro-batch's gradients as they
  are. Each `add_` reads two operands and writes one. So a window of zeroing moves (1 + 3 K) G
  bytes, and a window of a release 3 (K - 1) G.
- A run's first window finds no gradients: there zeroing costs what a release does.
- Between a reset and the next backward all G bytes are alive, or none.
- The bytes alive differ by G less the gradients already taken in this window: a release saves all
  of G where a window of one micro-batch peaks in its forward, and nothing where it peaks in the
  step. In a window of several equal micro-batches it saves nothing, since the second one finds all
  gradients in place in either mode.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from gradcheck_suite import (
    Case,
    Input,
    Layer,
    Loss,
    Plan,
    Problem,
    ProblemSpec,
    TrainingRun,
    cases,
    plans,
    problems,
)
from gradcheck_suite.core.contract import Loop
from gradcheck_suite.loops.reset_modes import (
    MODES,
    Parameters,
    after_step,
    backward_window,
    windows,
)
from gradcheck_suite.reference.large_batch import gradients_of
from gradcheck_suite.run.instance import Instance, generated_instance, user_instance
from properties.assertions import assert_equal
from properties.devices import DEVICES
from properties.helpers import scaled
from properties.routed import routed_instance
from studies.compiled_steps import record
from studies.ledger import Ledger
from studies.reset_laws import (
    MemoryTraffic,
    ParameterUse,
    WindowUse,
    bytes_saved_by_releasing,
    uniform_window,
)
from studies.reset_modes import RESET_MODES, ResetMode


def window_uses(instance: Instance) -> list[WindowUse]:
    """Return how every window uses every parameter, by autograd alone."""
    model, plan = instance.model(), instance.case.plan
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    reached = [
        {
            name
            for name, gradient in gradients_of(instance, model, plan.items(j)).items()
            if gradient is not None
        }
        for j in range(len(plan.micro_batches))
    ]
    found, last, before = [], set[str](), set[str]()
    for index in range(plan.steps):
        members = plan.windows[index % len(plan.windows)]
        uses = (
            ParameterUse(
                bytes=p.numel() * p.itemsize,
                itemsize=p.itemsize,
                reached=sum(name in reached[j] for j in members),
                reached_in_last_window=name in last,
                reached_before=name in before,
            )
            for name, p in parameters.items()
        )
        found.append(WindowUse(tuple(uses), first=index == 0))
        last = set().union(*(reached[j] for j in members))
        before |= last
    return found


def moved(traffic: MemoryTraffic) -> tuple[int, int, int]:
    """Return operations, bytes read and bytes written."""
    return traffic.operations, traffic.read, traffic.written


def assert_law(*, mode: ResetMode, loop: Loop, instance: Instance, uses: list[WindowUse]) -> Ledger:
    """Fail unless every window of a loop does to gradients exactly what the mode's law says.

    Return the ledger.
    """
    __tracebackhide__ = True
    ledger, case = record(loop, instance), instance.case
    costs = [mode.law(use) for use in uses]

    def check(what: str, observed: object, expected: object) -> None:
        __tracebackhide__ = True
        assert_equal(what=f"{mode.name}, {what}", observed=observed, expected=expected, case=case)

    phases = ("reset", "accumulate", "handling")
    if not mode.steps:  # no step ends the ledger's windows
        for phase in phases:
            total = sum((getattr(cost, phase) for cost in costs), MemoryTraffic())
            check(f"{phase} (operations, read, written)", moved(ledger.total(phase)), moved(total))
        check("gradient bytes at the end", ledger.live["gradients"], costs[-1].kept)
        return ledger
    check("windows", ledger.window, case.plan.steps)
    for w, cost in enumerate(costs):
        for phase in phases:
            seen, law = ledger.total(phase, window=w), getattr(cost, phase)
            check(f"window {w}, {phase} (operations, read, written)", moved(seen), moved(law))
        check(
            f"window {w}, bytes freed by the reset",
            ledger.total("reset", window=w).freed,
            cost.reset.freed,
        )
        check(
            f"window {w}, gradient bytes after the reset", ledger.starts[w]["gradients"], cost.kept
        )
    return ledger


def assert_every_law(
    instance: Instance, modes: Iterable[ResetMode] = RESET_MODES.values()
) -> dict[str, Ledger]:
    """Check the laws of all modes on one instance; return the ledgers by mode."""
    __tracebackhide__ = True
    uses = window_uses(instance)
    return {
        mode.name: assert_law(mode=mode, loop=mode.loop, instance=instance, uses=uses)
        for mode in modes
    }


small = plans(max_windows=3, max_accumulation_steps=4, max_epochs=2)
routes = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=6)
STEPPING = [mode for mode in RESET_MODES.values() if mode.steps]


@pytest.mark.share(4)
@pytest.mark.parametrize("device", DEVICES)
@scaled(4)
@given(data=st.data())
def test_every_window_costs_what_the_law_of_its_mode_says(device, data):
    case = data.draw(cases(problem=problems(sparse=False), plan=small, device=device))
    ledgers = assert_every_law(generated_instance(case), STEPPING)
    gradients = {
        name: ledger.total("reset", "accumulate").moved for name, ledger in ledgers.items()
    }
    least = min(gradients.values())
    assert_equal(
        what="bytes that a release moves",
        observed=gradients["set_to_none"],
        expected=least,
        case=case,
    )


@pytest.mark.full
@scaled(4)
@given(routes=routes, accumulation_steps=st.integers(1, 3), epochs=st.integers(1, 2))
def test_parameters_that_only_some_micro_batches_reach(routes, accumulation_steps, epochs):
    assert_every_law(routed_instance(routes, accumulation_steps, epochs=epochs), STEPPING)


class Tensors(torch.nn.Module):
    """Parameters of given shapes and nothing else."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList([torch.ones(shape) for shape in shapes])


def _loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    weight = batch["x"].mean()
    return torch.stack([(p * weight).sum() for p in model.parameters()]).sum()


def _tensors_instance(
    shapes: list[tuple[int, ...]], plan: Plan, dtype: str, device: str = "cpu"
) -> Instance:
    problem = Problem(
        lambda seed: Tensors(shapes), lambda items, seed: {"x": torch.ones(items)}, _loss
    )
    return user_instance(
        Case("studies/properties/test_cost_laws.py:TENSORS", plan, dtype=dtype, device=device),
        problem,
    )


shape_lists = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=6)


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@scaled(4)
@given(
    shapes=shape_lists,
    plan=small,
    dtype=st.sampled_from(["float64", "float32", "bfloat16", "float16"]),
)
def test_the_laws_hold_in_every_dtype(device, shapes, plan, dtype):
    instance = _tensors_instance(shapes, plan, dtype, device)
    assert_every_law(instance)
    sizes = [p.numel() for p in instance.model().parameters()]
    itemsize = getattr(torch, dtype).itemsize
    for use, members in zip(window_uses(instance), plan.windows * plan.epochs, strict=True):
        uniform = uniform_window(len(sizes), sum(sizes), itemsize, len(members), first=use.first)
        for mode in RESET_MODES.values():
            what = f"{mode.name}, the law of equal parameters"
            assert_equal(
                what=what, observed=mode.law(uniform), expected=mode.law(use), case=instance.case
            )


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter"),
    [
        ("zero_", 4 * (1 + 3 * 8)),
        ("set_to_none", 4 * 3 * 7),
        ("flat_buffer", 4 * (1 + 3 * 8)),
        ("main_gradients", 4 * (1 + 3 * 8)),
    ],
)
def test_the_laws_at_one_size(name, bytes_per_parameter):
    """A million float32 parameters and K = 8, by hand: zeroing moves 100 bytes per parameter, a
    release 84.
    """
    assert (
        RESET_MODES[name].law(uniform_window(10, 10**6, 4, 8)).moved == bytes_per_parameter * 10**6
    )


@given(gradient_bytes=st.integers(1, 10**12), micro_batches=st.integers(1, 100))
def test_a_release_saves_four_times_the_gradients_bytes(gradient_bytes, micro_batches):
    assert bytes_saved_by_releasing(gradient_bytes, micro_batches) == 4 * gradient_bytes


# --- planted faults: each breaks a law, and the gradients alone would not show it


def _twice(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Zero twice."""
    optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad(set_to_none=False)


def _zeros_for_none(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Put fresh zeros where the mode promises None."""
    for p in parameters:
        p.grad = torch.zeros_like(p)


def _replaced_by_zeros(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Allocate fresh zeros instead of zeroing the gradients in place."""
    for p in parameters:
        if p.grad is not None:
            p.grad = p.grad.new_zeros(p.grad.shape)


def _one_forgotten(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Keep one gradient at zero where the mode promises None."""
    first, *others = parameters
    for p in others:
        p.grad = None
    if first.grad is not None:
        first.grad.zero_()


def _cloned(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Copy each gradient, as for logging, before zeroing it."""
    for p in parameters:
        if p.grad is not None:
            p.grad.clone()
            p.grad.zero_()


def _never(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Do nothing."""


def _kept_elsewhere(run: TrainingRun) -> None:
    """Release the gradients, but hold on to them."""
    kept = []
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        kept[:] = [p.grad for p in run.model.parameters()]
        run.optimizer.zero_grad()


def _per_micro_batch(run: TrainingRun) -> None:
    """Sum by hand: release after every micro-batch."""
    for window in windows(run):
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for batch in window:
            backward_window(run, [batch])
            for p in run.model.parameters():
                sums[p] = p.grad if p not in sums else sums[p] + p.grad
                p.grad = None
        for p, total in sums.items():
            p.grad = total
        run.optimizer.step()
        run.optimizer.zero_grad()


RESET, ADDED = r"reset \(operations, read, written\)", r"accumulate \(operations, read, written\)"
PLANTED = {
    "reset twice": (
        "zero_grad",
        after_step(_twice),
        rf"{RESET}=\(8, 0, 208\), but should be \(4, 0, 104\)",
    ),
    "fresh zeros for None": (
        "set_to_none",
        after_step(_zeros_for_none),
        rf"{ADDED}=\(8, 416, 208\), but",
    ),
    "fresh zeros": (
        "zero_",
        after_step(_replaced_by_zeros),
        rf"{RESET}=\(0, 0, 0\), but should be \(4, 0, 104\)",
    ),
    "one forgotten": (
        "set_to_none",
        after_step(_one_forgotten),
        rf"{RESET}=\(1, 0, 48\), but should be \(0, 0, 0\)",
    ),
    "cloned": (
        "zero_",
        after_step(_cloned),
        r"handling \(operations, read, written\)=\(4, 104, 104\), but",
    ),
    "kept elsewhere": (
        "set_to_none",
        _kept_elsewhere,
        "bytes freed by the reset=0, but should be 104",
    ),
    "summed by hand": (
        "set_to_none",
        _per_micro_batch,
        rf"{ADDED}=\(0, 0, 0\), but should be \(4, 208, 104\)",
    ),
    "no reset": ("zero_", after_step(_never), rf"{RESET}=\(0, 0, 0\), but should be \(4, 0, 104\)"),
    "one call for many": (
        "zero_grad",
        MODES["zero_grad_foreach"],
        rf"{RESET}=\(1, 0, 104\), but should be \(4, 0",
    ),
    "flat where separate": (
        "zero_",
        MODES["flat_buffer"],
        rf"{ADDED}=\(8, 416, 208\), but should be \(4, 208",
    ),
    "released for flat": ("flat_buffer", MODES["set_to_none"], "but should be"),
    "released for main": ("main_gradients", MODES["set_to_none"], "but should be"),
    "zeroed for in-backward": ("optimizer_in_backward", MODES["zero_"], "but should be"),
}


def _chain(*widths: int) -> ProblemSpec:
    """Return linear layers from width to width, tanh between them."""
    layers: list[Layer] = []
    for width in widths[1:]:
        layers += [Layer("tanh"), Layer("linear", features=width, bias=True)]
    return ProblemSpec(
        Input("vector", size=widths[0]), tuple(layers[1:]), Loss("mse", reduction="mean")
    )


def _chain_sizes(*widths: int) -> list[int]:
    """Return the bytes of each of a chain's gradients, in float64."""
    return [8 * n for a, b in pairwise(widths) for n in (a * b, b)]


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_breaks_a_law(fault):
    name, loop, message = PLANTED[fault]
    instance = generated_instance(Case(_chain(2, 3, 1), Plan((2, 2, 2, 2), 2)))
    assert sum(_chain_sizes(2, 3, 1)) == 104
    mode, uses = RESET_MODES[name], window_uses(instance)
    assert_law(mode=mode, loop=mode.loop, instance=instance, uses=uses)
    with pytest.raises(AssertionError, match=message):
        assert_law(mode=mode, loop=loop, instance=instance, uses=uses)


# --- parameters that are used several times


@scaled(4)
@given(depth=st.integers(0, 3), plan=small, mode=st.sampled_from(["zero_", "set_to_none"]))
def test_uses_of_one_parameter_are_summed_before_they_reach_the_gradient(depth, plan, mode):
    """With u uses: u - 1 additions inside each backward, and one `add_`, or none, to the gradient
    as for any other.
    """
    layer = Layer("linear", features=2, bias=True)
    for _ in range(depth):
        layer = Layer("shared", layer)
    case = Case(ProblemSpec(Input("vector", size=2), (layer,), Loss("mse", reduction="mean")), plan)
    ledger = record(MODES[mode], case)
    uses, parameters, backwards = 2**depth, 2, plan.epochs * len(plan.micro_batches)
    sums = ledger.operations("backward").get("add", 0)
    assert sums == parameters * (uses - 1) * backwards
    taken = parameters * (1 if mode == "zero_" else plan.steps)
    assert ledger.operations("accumulate").get("add_", 0) == parameters * backwards - taken


# --- peaks: what a release saves, and where it saves nothing

TRAINING = ("forward", "backward", "accumulate", "step")
widths = st.lists(st.integers(1, 8), min_size=2, max_size=4)


def _peaks(case: Case, window: int, *phases: str) -> tuple[int, int]:
    """Return the peak of zeroing and of a release in some phases of a window."""
    zero, none = (record(MODES[mode], case) for mode in ("zero_", "set_to_none"))
    return zero.peak(*phases, window=window).bytes, none.peak(*phases, window=window).bytes


@scaled(5)
@given(
    widths=widths, items=st.integers(1, 8), optimizer=st.sampled_from(["sgd", "momentum", "adam"])
)
def test_with_one_micro_batch_a_release_saves_what_is_not_yet_taken(widths, items, optimizer):
    gradients = _chain_sizes(*widths)
    case = Case(_chain(*widths), Plan((items,) * 3, 1), optimizer=optimizer)
    zero, none = (record(MODES[mode], case) for mode in ("zero_", "set_to_none"))

    def saved(*phases: str) -> int:
        return zero.peak(*phases, window=2).bytes - none.peak(*phases, window=2).bytes

    assert saved("forward") == sum(gradients)
    assert saved("step") == 0
    assert min(gradients) <= saved("backward", "accumulate") <= sum(gradients)
    peak = zero.peak(*TRAINING, window=2).phase
    event(f"the peak of zeroing is in the {peak}")
    assert 0 <= saved(*TRAINING) <= sum(gradients)


@scaled(5)
@given(
    widths=widths,
    items=st.integers(1, 8),
    accumulation_steps=st.integers(2, 4),
    optimizer=st.sampled_from(["sgd", "momentum", "adam"]),
)
def test_with_several_equal_micro_batches_a_release_saves_nothing_at_the_peak(
    widths, items, accumulation_steps, optimizer
):
    plan = Plan((items,) * 3 * accumulation_steps, accumulation_steps)
    zero, none = _peaks(Case(_chain(*widths), plan, optimizer=optimizer), 2, *TRAINING)
    assert zero == none


@scaled(5)
@given(widths=widths, items=st.integers(1, 8), accumulation_steps=st.integers(1, 3))
def test_no_mode_peaks_below_parameters_and_gradients(widths, items, accumulation_steps):
    gradients = _chain_sizes(*widths)
    plan = Plan((items,) * 2 * accumulation_steps, accumulation_steps)
    zero, none = _peaks(Case(_chain(*widths), plan), 1, *TRAINING)
    # a gradient that is added stands beside its sum, and the last one beside all sums
    added = zero if accumulation_steps == 1 else min(zero, none)
    assert none >= 2 * sum(gradients)
    assert added >= 2 * sum(gradients) + max(gradients)


def test_a_peak_in_the_forward_is_saved_in_full():
    """Sixty-four items through widths 2, 3, 1 (104 bytes of gradients): activations are most of
    what is alive.
    """
    zero, none = _peaks(Case(_chain(2, 3, 1), Plan((64, 64), 1)), 1, "forward")
    assert zero - none == 104


def test_a_peak_in_the_step_is_not_saved_at_all():
    """One item through widths 1, 8, 8 under Adam: weights, their state and the step's temporaries
    outweigh the rest.
    """
    case = Case(_chain(1, 8, 8), Plan((1, 1), 1), optimizer="adam")
    zero, none = (record(MODES[mode], case) for mode in ("zero_", "set_to_none"))
    assert zero.peak(window=1).phase == none.peak(window=1).phase == "step"
    assert zero.peak(window=1).bytes == none.peak(window=1).bytes


def test_the_same_window_in_two_micro_batches_saves_nothing():
    """Splitting 64 items in two halves lowers the peak of either mode, and makes the two equal."""
    whole = _peaks(Case(_chain(2, 3, 1), Plan((64, 64), 1)), 1, *TRAINING)
    halves = _peaks(Case(_chain(2, 3, 1), Plan((32, 32, 32, 32), 2)), 1, *TRAINING)
    assert whole[0] > whole[1]
    assert halves[0] == halves[1] < whole[1]


def test_a_gradient_that_is_held_breaks_the_law_of_the_peak():
    """Planted: a release that keeps the old gradients alive saves nothing, where it should save
    all.
    """
    case = Case(_chain(2, 3, 1), Plan((2, 2, 2), 1), optimizer="sgd")
    zero, held = record(MODES["zero_"], case), record(_kept_elsewhere, case)
    assert zero.peak("forward", window=2).bytes - held.peak("forward", window=2).bytes == 0


def test_the_ledger_of_a_loop_is_closed():
    ledger = record(MODES["zero_"], Case(_chain(1, 1), Plan((1,), 1)))
    assert isinstance(ledger, Ledger)
    torch.ones(3)
    assert "ones" not in ledger.operations()
