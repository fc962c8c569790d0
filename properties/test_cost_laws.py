"""What each reset mode costs, as laws that hold exactly: operations and bytes, window by window.

For P parameters that get gradients of G bytes together, and K micro-batches in a window:

- zeroing writes every gradient once per window (P `zero_`, or one call for all) and adds P K times; a release adds
  P (K - 1) times, since the first micro-batch's gradients are taken as they are. Each `add_` reads two operands and
  writes one. So a window of zeroing moves (1 + 3 K) G bytes and one of a release 3 (K - 1) G.
- A run's first window finds no gradients: there zeroing costs what a release does.
- Between a reset and the next backward all G bytes are alive, or none.
- What is alive differs by G less the bytes of gradients already taken in this window: a release saves all of G where a
  window of one micro-batch peaks in its forward, nothing where it peaks in the step, and nothing at all in a window of
  several equal micro-batches, whose second one finds all gradients in place in either mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec, TrainingRun, cases, plans, problems
from gradcheck_suite.execution.instance import Instance, generated_instance, user_instance
from gradcheck_suite.loops import MODES
from gradcheck_suite.loops.costs import COSTS, MEASURED
from gradcheck_suite.loops.modes import after_step
from gradcheck_suite.loops.windows import backward_window, windows
from gradcheck_suite.measure.ledger import Ledger, Traffic, cost_table, record
from gradcheck_suite.references.torch_reference import gradients_of
from gradcheck_suite.schema.contract import Loop
from properties.helpers import DEVICES, scaled
from properties.routed import routed_instance
from properties.tally import TALLY

LOOPS = {**MODES, **COSTS}
RELEASES = ("set_to_none", "grad_none")
AT_ONCE = ("zero_grad_foreach", "foreach_zero")
"""Modes that zero all gradients of one dtype and device in one call."""

Moved = tuple[int, int, int]
"""Operations, bytes read, bytes written."""


def moved(traffic: Traffic) -> Moved:
    return traffic.operations, traffic.read, traffic.written


def reached_by(instance: Instance) -> list[set[str]]:
    """Return, for every micro-batch of an epoch, the parameters that its loss reaches."""
    model, plan = instance.model(), instance.case.plan
    found = [gradients_of(instance, model, plan.items(j)) for j in range(len(plan.micro_batches))]
    return [{name for name, gradient in gradients.items() if gradient is not None} for gradients in found]


def law(mode: str, instance: Instance) -> Iterator[tuple[Moved, Moved, int]]:
    """Yield what each window's reset and accumulation must move, and the gradients' bytes alive between them.

    Worked out from which parameters each micro-batch reaches; a parameter that none reaches costs nothing.
    """
    sizes = {n: p.numel() * p.itemsize for n, p in instance.model().named_parameters() if p.requires_grad}
    reached, plan = reached_by(instance), instance.case.plan
    have: set[str] = set(sizes) if mode == "flat_buffer" else set()
    before: set[str] = set()
    for index in range(plan.steps):
        if mode in RELEASES:
            have = set()
        zeroed = before if mode == "main_gradients" else have
        if index == 0 or mode in RELEASES:
            zeroed = set()
        size = sum(sizes[name] for name in zeroed)
        calls = min(1, len(zeroed)) if mode in (*AT_ONCE, "flat_buffer") else len(zeroed)
        kept = sum(sizes[name] for name in have)
        added: list[str] = []
        before = set()
        for j in plan.windows[index % len(plan.windows)]:
            added += reached[j] if mode == "main_gradients" else reached[j] & have
            have = have | reached[j]
            before |= reached[j]
        each = sum(sizes[name] for name in added)
        yield (calls, 0, size), (len(added), 2 * each, each), kept


def assert_laws(mode: str, loop: Loop, instance: Instance) -> None:
    """Assert that every window of a loop costs what its mode must cost, and nothing beside."""
    __tracebackhide__ = True
    ledger = record(loop, instance)
    steps = instance.case.plan.steps
    assert ledger.window == steps, f"{ledger.window} windows, should be {steps}"
    for window, (reset, accumulated, kept) in enumerate(law(mode, instance)):
        where = f"window {window} of {instance.case!r}"
        seen = moved(ledger.total("reset", window=window))
        assert seen == reset, f"the reset took (operations, read, written) {seen}, should be {reset}: {where}"
        seen = moved(ledger.total("accumulate", window=window))
        assert seen == accumulated, f"accumulation took {seen}, should be {accumulated}: {where}"
        alive = ledger.starts[window]["gradients"]
        if mode != "main_gradients":  # its sums are told from other tensors once something was added to them
            assert alive == kept, f"{alive} bytes of gradients alive after the reset, should be {kept}: {where}"
    handled = ledger.operations("handling")
    assert not handled, f"the loop did {handled} to gradients, should be nothing: {instance.case!r}"


small = plans(max_windows=3, max_accumulation_steps=4, max_epochs=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", LOOPS)
@scaled(2)
@given(data=st.data())
def test_every_window_costs_what_its_mode_must_cost(mode, device, data):
    case = data.draw(cases(problem=problems(sparse=False), plan=small, device=device))
    assert_laws(mode, LOOPS[mode], generated_instance(case))


routes = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=6)


@pytest.mark.parametrize("mode", LOOPS)
@scaled(2)
@given(routes=routes, accumulation_steps=st.integers(1, 3), epochs=st.integers(1, 2))
def test_parameters_that_only_some_micro_batches_reach(mode, routes, accumulation_steps, epochs):
    instance = routed_instance(routes, accumulation_steps, epochs=epochs)
    assert_laws(mode, LOOPS[mode], instance)


# --- planted faults: each breaks a law, and gradients alone would not show it


def _twice(run: TrainingRun) -> None:
    """Zero twice."""
    run.optimizer.zero_grad(set_to_none=False)
    run.optimizer.zero_grad(set_to_none=False)


def _zeros_for_none(run: TrainingRun) -> None:
    """Put fresh zeros where None was promised."""
    for p in run.model.parameters():
        p.grad = torch.zeros_like(p)


def _replaced_by_zeros(run: TrainingRun) -> None:
    """Allocate fresh zeros instead of zeroing what is there."""
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad = p.grad.new_zeros(p.grad.shape)


def _one_forgotten(run: TrainingRun) -> None:
    """Keep one gradient at zero where None was promised."""
    first, *others = run.model.parameters()
    for p in others:
        p.grad = None
    if first.grad is not None:
        first.grad.zero_()


def _cloned(run: TrainingRun) -> None:
    """Copy each gradient, as for logging, before it is zeroed."""
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.clone()
            p.grad.zero_()


def _kept_elsewhere(run: TrainingRun) -> None:
    """Release the gradients, but hold on to them."""
    kept = []
    for window in windows(run):
        backward_window(run, window)
        run.optimizer.step()
        kept[:] = [p.grad for p in run.model.parameters()]
        run.optimizer.zero_grad()


def _never(run: TrainingRun) -> None:
    """Do nothing."""


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


PLANTED = {
    "reset twice": ("zero_grad", after_step(_twice), r"reset took .*\(8, 0, 208\), should be \(4, 0, 104\)"),
    "fresh zeros for None": ("set_to_none", after_step(_zeros_for_none), "accumulation took .*(8, 416, 208)"),
    "fresh zeros": ("zero_", after_step(_replaced_by_zeros), r"reset took .*\(0, 0, 0\), should be \(4, 0, 104\)"),
    "one forgotten": ("set_to_none", after_step(_one_forgotten), r"reset took .*\(1, 0, 48\), should be \(0, 0, 0\)"),
    "cloned": ("zero_", after_step(_cloned), "the loop did {'clone': 8} to gradients, should be nothing"),
    "kept elsewhere": ("set_to_none", _kept_elsewhere, "104 bytes of gradients alive after the reset, should be 0"),
    "summed by hand": ("set_to_none", _per_micro_batch, r"accumulation took \(0, 0, 0\), should be \(4, 208, 104\)"),
    "no reset": ("zero_", after_step(_never), r"reset took .*\(0, 0, 0\), should be \(4, 0, 104\)"),
    "one call for many": ("zero_grad", MODES["zero_grad_foreach"], r"\(1, 0, 104\), should be \(4, 0, 104\)"),
    "flat where separate": ("zero_", MODES["flat_buffer"], r"accumulation took \(8, 416, 208\), should be \(4, 208"),
}


def _chain(*widths: int) -> ProblemSpec:
    """Return linear layers from width to width, tanh between them."""
    layers: list[Layer] = []
    for width in widths[1:]:
        layers += [Layer("tanh"), Layer("linear", features=width, bias=True)]
    return ProblemSpec(Input("vector", size=widths[0]), tuple(layers[1:]), Loss("mse", reduction="mean"))


def _chain_sizes(*widths: int) -> list[int]:
    """Return the bytes of each of a chain's gradients, in float64."""
    return [8 * n for a, b in pairwise(widths) for n in (a * b, b)]


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_breaks_a_law(fault):
    mode, loop, message = PLANTED[fault]
    instance = generated_instance(Case(_chain(2, 3, 1), Plan((2, 2, 2, 2), 2)))
    assert sum(_chain_sizes(2, 3, 1)) == 104
    assert_laws(mode, MODES[mode], instance)
    with pytest.raises(AssertionError, match=message):
        assert_laws(mode, loop, instance)


# --- parameters that are used several times


@scaled(4)
@given(depth=st.integers(0, 3), plan=small, mode=st.sampled_from(["zero_", "set_to_none"]))
def test_uses_of_one_parameter_are_summed_before_they_reach_the_gradient(depth, plan, mode):
    """With u uses: u - 1 additions inside each backward, and one `add_`, or none, to the gradient as for any other."""
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


# --- the formulas


class Tensors(torch.nn.Module):
    """Parameters of given shapes and nothing else."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList([torch.ones(shape) for shape in shapes])


def _loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    weight = batch["x"].mean()
    return torch.stack([(p * weight).sum() for p in model.parameters()]).sum()


def _tensors_instance(shapes: list[tuple[int, ...]], plan: Plan, dtype: str, device: str = "cpu") -> Instance:
    problem = Problem(lambda seed: Tensors(shapes), lambda items, seed: {"x": torch.ones(items)}, _loss)
    return user_instance(Case("properties/test_cost_laws.py:TENSORS", plan, dtype=dtype, device=device), problem)


def assert_as_predicted(mode: str, loop: Loop, instance: Instance) -> None:
    """Assert that the formula of a mode gives what the ledger of a loop measures, window by window."""
    __tracebackhide__ = True
    parameters = list(instance.model().parameters())
    elements, itemsize = sum(p.numel() for p in parameters), parameters[0].itemsize
    plan = instance.case.plan
    ledger = record(loop, instance)
    costs = [
        cost_table(len(parameters), elements, itemsize, len(plan.windows[w % len(plan.windows)]), first=w == 0)[mode]
        for w in range(plan.steps)
    ]
    if mode in MEASURED:  # no step ends its windows
        for phase in ("reset", "accumulate", "handling"):
            wanted = sum((getattr(cost, phase) for cost in costs), Traffic())
            assert moved(ledger.total(phase)) == moved(wanted), f"{phase}: {ledger.total(phase)}, predicted {wanted}"
        assert ledger.live["gradients"] == costs[-1].kept
        return
    for w, cost in enumerate(costs):
        for phase in ("reset", "accumulate", "handling"):
            seen, wanted = ledger.total(phase, window=w), getattr(cost, phase)
            assert moved(seen) == moved(wanted), f"window {w}, {phase}: {seen}, predicted {wanted}"
        freed = ledger.total("reset", window=w).freed
        assert freed == cost.reset.freed, f"window {w}: reset freed {freed}, predicted {cost.reset.freed}"
        if w or mode != "main_gradients":
            kept = ledger.starts[w]["gradients"]
            assert kept == cost.kept, f"window {w}: kept {kept}, predicted {cost.kept}"


shape_lists = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", {**LOOPS, **MEASURED})
@scaled(2)
@given(shapes=shape_lists, plan=small, dtype=st.sampled_from(["float64", "float32", "bfloat16", "float16"]))
def test_the_formulas_predict_the_ledger(mode, device, shapes, plan, dtype):
    assert_as_predicted(mode, {**LOOPS, **MEASURED}[mode], _tensors_instance(shapes, plan, dtype, device))


def test_every_measured_loop_has_a_formula():
    assert set(cost_table(1, 1, 4, 1)) == {*LOOPS, *MEASURED}


@pytest.mark.parametrize("mode", ["zero_grad", "flat_buffer", "main_gradients", "optimizer_in_backward"])
def test_another_modes_loop_is_not_what_was_predicted(mode):
    instance = _tensors_instance([(2, 3), (4,)], Plan((1,) * 4, 2), "bfloat16")
    with pytest.raises(AssertionError, match="predicted"):
        assert_as_predicted(mode, LOOPS["set_to_none" if mode != "optimizer_in_backward" else "zero_"], instance)


@pytest.mark.parametrize(
    ("mode", "bytes_per_parameter"),
    [
        ("zero_", 4 * (1 + 3 * 8)),
        ("set_to_none", 4 * 3 * 7),
        ("flat_buffer", 4 * (1 + 3 * 8)),
        ("main_gradients", 4 * (1 + 3 * 8)),
    ],
)
def test_the_formulas_at_one_size(mode, bytes_per_parameter):
    """A million float32 parameters and K = 8, by hand: zeroing moves 100 bytes per parameter, a release 84."""
    assert cost_table(10, 10**6, 4, 8)[mode].moved == bytes_per_parameter * 10**6


@scaled(5)
@given(case=cases(problem=problems(sparse=False), plan=small))
def test_on_one_case_every_mode_moves_what_its_law_says_and_no_release_moves_more(case):
    moved = {}
    for mode, loop in MODES.items():
        ledger = record(loop, generated_instance(case))
        TALLY.weigh(mode, ledger)
        traffic = ledger.total("reset", "accumulate")
        moved[mode] = traffic.read + traffic.written
    for mode in MODES.keys() - {*RELEASES}:
        assert moved["set_to_none"] <= moved[mode], f"set_to_none moves more than {mode}: {moved}"


# --- the peak: what a release does not save

TRAINING = ("forward", "backward", "accumulate", "step")
widths = st.lists(st.integers(1, 8), min_size=2, max_size=4)


def _peaks(case: Case, window: int, *phases: str) -> tuple[int, int]:
    """Return the peak of zeroing and of a release in some phases of a window."""
    zero, none = (record(MODES[mode], case) for mode in ("zero_", "set_to_none"))
    return zero.peak(*phases, window=window).bytes, none.peak(*phases, window=window).bytes


@scaled(2)
@given(widths=widths, items=st.integers(1, 8), optimizer=st.sampled_from(["sgd", "momentum", "adam"]))
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


@scaled(2)
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


@scaled(2)
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
    """Sixty-four items through widths 2, 3, 1 (104 bytes of gradients): activations are most of what is alive."""
    zero, none = _peaks(Case(_chain(2, 3, 1), Plan((64, 64), 1)), 1, "forward")
    assert zero - none == 104


def test_a_peak_in_the_step_is_not_saved_at_all():
    """One item through widths 1, 8, 8 under Adam: weights, their state and the step's temporaries outweigh the rest."""
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
    """Planted: a release that keeps the old gradients alive saves nothing, where it should save all."""
    case = Case(_chain(2, 3, 1), Plan((2, 2, 2), 1), optimizer="sgd")
    zero, held = record(MODES["zero_"], case), record(_kept_elsewhere, case)
    assert zero.peak("forward", window=2).bytes - held.peak("forward", window=2).bytes == 0


def test_the_ledger_of_a_loop_is_closed():
    ledger = record(MODES["zero_"], Case(_chain(1, 1), Plan((1,), 1)))
    assert isinstance(ledger, Ledger)
    torch.ones(3)
    assert "ones" not in ledger.operations()
