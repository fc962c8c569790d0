"""Hypothesis strategies for problems, plans and cases.

They return specs, which shrink and print, never modules or tensors. Cases shrink towards the smallest model, the fewest
windows, and the fewest and smallest micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import cycle
from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from gradcheck_suite.catalogue import (
    CROSS_SAMPLE_LOSSES,
    INPUTS,
    LAYERS,
    LOSSES,
    input_signal,
    loss_definition,
    out_signal,
    output_signal,
)
from gradcheck_suite.catalogue.definitions import LayerDefinition
from gradcheck_suite.catalogue.signals import Options, Signal, vector
from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.optimizers import TAKES_SPARSE, checked_optimizer
from gradcheck_suite.schema.case import DEVICES, DTYPES, MAX_SEED, Case
from gradcheck_suite.schema.contract import EQUAL_MICRO_BATCHES, SUM_REDUCTION, WHOLE_WINDOWS, checked_assumptions
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.spec import REDUCTIONS, Input, Layer, Loss, ProblemSpec, Reduction

ACCUMULATION_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 11)
SIZES = (1, 2, 3, 4, 5, 8)
MAX_MICRO_BATCHES = 24
MAX_INNER_LAYERS = 2
SMALL_MICRO_BATCHES = 3
CHOOSY_WEIGHT = 2
"""Additional places among the choices for a loss that accepts few signals, where it fits."""
MASKABLE_WEIGHT = 8
"""Additional places for a loss that can ignore targets: it is the case in which counts differ from numbers of items."""


Choices = st.SearchStrategy[tuple[Any, st.SearchStrategy[Options]]]
"""A strategy of pairs: a kind, and a strategy of its options."""


def _checked_range(low: Any, high: Any, name: str) -> None:
    if not isinstance(low, int) or not isinstance(high, int) or not 1 <= low <= high:
        raise InvalidArgument(f"expected 1 <= min_{name} <= max_{name}, got {low!r} and {high!r}")


def _assumptions(assumes: Iterable[str]) -> frozenset[str]:
    try:
        return checked_assumptions(assumes)
    except UsageError as error:
        raise InvalidArgument(str(error)) from None


def reductions_within(assumes: frozenset[str]) -> tuple[Reduction, ...]:
    """Return the reductions that are drawn for a loop with these assumptions.

    A loop that assumes equal counts is tested with means only, since counts do not matter to a sum.
    """
    if SUM_REDUCTION in assumes:
        return ("sum",)
    return ("mean",) if EQUAL_MICRO_BATCHES in assumes else REDUCTIONS


@cache
def _sampled(choices: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Return a cached strategy: building one costs Hypothesis more time than drawing from it."""
    return st.sampled_from(choices)


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    min_epochs: int = 1,
    max_epochs: int = 3,
    min_windows: int = 1,
    max_windows: int = 4,
    min_accumulation_steps: int = 1,
    max_accumulation_steps: int = max(ACCUMULATION_STEPS),
    max_items: int = max(SIZES),
    maskable: bool = False,
    assumes: Iterable[str] = (),
) -> Plan:
    """Draw plans: micro-batches of 1 to `max_items` items, windows of K, short last windows, several epochs.

    Args:
        draw: given by Hypothesis.
        min_epochs: smallest number of passes.
        max_epochs: largest number of passes.
        min_windows: smallest number of windows in an epoch.
        max_windows: largest number of windows in an epoch; it is lower for a K with which an epoch would exceed 24
            micro-batches.
        min_accumulation_steps: smallest K.
        max_accumulation_steps: largest K.
        max_items: largest number of items in a micro-batch.
        maskable: whether some micro-batches may have no valid targets, which only some losses support.
        assumes: assumptions of the loop, names from `ASSUMPTIONS`.
    """
    _checked_range(min_epochs, max_epochs, "epochs")
    _checked_range(min_windows, max_windows, "windows")
    _checked_range(min_accumulation_steps, max_accumulation_steps, "accumulation_steps")
    _checked_range(1, max_items, "items")
    chosen = _assumptions(assumes)
    epochs = draw(st.integers(min_epochs, max_epochs))
    steps = sorted({min_accumulation_steps, max_accumulation_steps, *ACCUMULATION_STEPS})
    k = draw(_sampled(tuple(k for k in steps if min_accumulation_steps <= k <= max_accumulation_steps)))
    most = max(min_windows, min(max_windows, MAX_MICRO_BATCHES // k))
    windows = draw(st.integers(min_windows, most))
    missing = 0 if k == 1 or WHOLE_WINDOWS in chosen else draw(st.integers(0, k - 1))
    count = windows * k - missing
    sizes = _sampled(tuple(n for n in SIZES if n <= max_items))
    if EQUAL_MICRO_BATCHES in chosen:
        per_window = [draw(sizes) for _ in range(windows)]
        return Plan(tuple(per_window[j // k] for j in range(count)), k, epochs)
    if not (maskable and draw(_sampled((False, True, True, True)))):
        return Plan(tuple(draw(sizes) for _ in range(count)), k, epochs)
    # size and mask are adjacent draws, so that shrinking deletes a whole micro-batch
    drawn = [draw(_with_mask(sizes)) for _ in range(count)]
    masked = {j for j, (_, mask) in enumerate(drawn) if mask}
    plan = Plan(tuple(n for n, _ in drawn), k, epochs)
    # a window without valid targets is outside the contract
    masked -= {window[0] for window in plan.windows if masked.issuperset(window)}
    return plan.replace(masked=tuple(masked))


@cache
def _with_mask(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, bool]]:
    return st.tuples(sizes, st.booleans())


def _choices(found: Iterable[tuple[Any, Sequence[Options]]]) -> Choices | None:
    """Return a strategy of the kinds that have variants, or None if none has."""
    kinds = [(kind, st.sampled_from(variants)) for kind, variants in found if variants]
    return st.sampled_from(kinds) if kinds else None


@cache
def _layers(
    signal: Signal, *, trainable: bool = False, keeps_shape: bool = False, sparse: bool = False
) -> Choices | None:
    """Return a strategy of the layer kinds that accept a signal.

    Every kind has the same place for every signal, so that shrinking may change the layers before it. The places of
    kinds that do not fit go to layers that mix features or positions, and twice as often to layers that change the
    signal's form. Otherwise the many pointwise activations would dominate.
    """
    places: list[tuple[LayerDefinition, list[Options]]] = []
    for kind in LAYERS.values():
        variants = [o for o in kind.variants(signal) if sparse or not o.get("sparse")]
        if (trainable and not kind.trainable) or (keeps_shape and kind.wraps):
            variants = []
        if keeps_shape:
            variants = [o for o in variants if out_signal(Layer(kind.name, **o), signal) == signal]
        places.append((kind, variants))
    fitting = [(kind, variants) for kind, variants in places if variants]
    if not fitting:
        return None
    mixing = [(kind, variants) for kind, variants in fitting if kind.axes != 0]
    leading = [
        (k, v) for k, v in mixing if not k.wraps and out_signal(Layer(k.name, **v[0]), signal).form != signal.form
    ]
    others = cycle(leading + mixing or fitting)
    return _choices([place if place[1] else next(others) for place in places])


@st.composite
def _any_layer(draw: st.DrawFn, signal: Signal, *, trainable: bool, keeps_shape: bool, sparse: bool) -> Layer:
    choices = _layers(signal, trainable=trainable, keeps_shape=keeps_shape, sparse=sparse)
    assert choices is not None, f"no layer takes {signal}"
    kind, variants = draw(choices)
    inner: list[Layer] = []
    if kind.wraps:
        count = draw(st.integers(1, MAX_INNER_LAYERS))
        inner = [draw(_layer(signal, keeps_shape=True, sparse=sparse)) for _ in range(count)]
    return Layer(kind.name, *inner, **draw(variants))


@cache
def _layer(
    signal: Signal, *, trainable: bool = False, keeps_shape: bool = False, sparse: bool = False
) -> st.SearchStrategy[Layer]:
    return _any_layer(signal, trainable=trainable, keeps_shape=keeps_shape, sparse=sparse)


@cache
def _losses(signal: Signal, *, uniform: bool) -> Choices | None:
    """Return a strategy of the losses that accept a signal.

    Losses that accept few signals, such as classification losses, are drawn more often where they fit.
    """
    kinds = [kind for kind in LOSSES.values() if kind.drawn and kind.variants(signal)]
    choosy = [kind for kind in kinds if not kind.variants(vector(1))]
    places = [(kind, list(kind.variants(signal))) for kind in kinds + choosy * CHOOSY_WEIGHT]
    ignoring = [(kind, [o for o in kind.variants(signal) if kind.maskable(o)]) for kind in kinds]
    places += [place for place in ignoring if place[1]] * MASKABLE_WEIGHT
    return _choices(
        (kind.name, [o for o in variants if not uniform or kind.uniform(signal, o)]) for kind, variants in places
    )


@cache
def _inputs() -> Choices | None:
    """Return a strategy of the inputs that some trainable layer accepts."""
    return _choices(
        (kind.name, [o for o in kind.variants if _layers(kind.signal(o), trainable=True) is not None])
        for kind in INPUTS.values()
        if kind.drawn
    )


def _drawn(draw: st.DrawFn, choices: Choices | None, what: str) -> tuple[Any, Options]:
    assert choices is not None, what
    kind, variants = draw(choices)
    return kind, draw(variants)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    min_layers: int = 1,
    max_layers: int = 5,
    sparse: bool = True,
    accumulable: bool = True,
    assumes: Iterable[str] = (),
) -> ProblemSpec:
    """Draw problems: an input, a chain of layers that ends with a trainable one, a loss that accepts its output.

    Args:
        draw: given by Hypothesis.
        min_layers: smallest number of layers in the chain.
        max_layers: largest number of layers in the chain.
        sparse: whether embeddings may have sparse gradients, which some optimizers do not support.
        accumulable: whether the objective is a sum over items. If not, one layer is batch normalisation in train mode,
            or the loss is not separable over samples; no loop can be right then.
        assumes: assumptions of the loop, names from `ASSUMPTIONS`.
    """
    _checked_range(min_layers, max_layers, "layers")
    chosen = _assumptions(assumes)
    name, options = _drawn(draw, _inputs(), "no input")
    source = Input(name, **options)
    signal = input_signal(source)
    layers = []
    for left in reversed(range(draw(st.integers(min_layers, max_layers)))):
        layers.append(draw(_layer(signal, trainable=left == 0, sparse=sparse)))
        signal = out_signal(layers[-1], signal)
    reductions = _sampled(reductions_within(chosen))
    if not accumulable and (signal.form != "vector" or draw(st.booleans())):
        # after a layer, since the input may be tokens
        at = draw(st.integers(1, len(layers)))
        layers.insert(at, Layer("batch_norm_train"))
    elif not accumulable:
        kind = draw(_sampled(tuple(CROSS_SAMPLE_LOSSES)))
        return ProblemSpec(source, tuple(layers), Loss(kind, reduction=draw(reductions)))
    loss, options = _drawn(draw, _losses(signal, uniform=EQUAL_MICRO_BATCHES in chosen), f"no loss takes {signal}")
    return ProblemSpec(source, tuple(layers), Loss(loss, **options, reduction=draw(reductions)))


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    problem: st.SearchStrategy[ProblemSpec] | str | None = None,
    plan: st.SearchStrategy[Plan] | None = None,
    dtype: str = "float64",
    device: str = "cpu",
    optimizer: str | None = None,
    assumes: Iterable[str] = (),
    small: bool = False,
) -> Case:
    """Draw cases.

    Args:
        draw: given by Hypothesis.
        problem: a strategy of problems, or the `FILE.py:NAME` of a user's problem; `problems()` if None.
        plan: a strategy of plans; `plans()` if None.
        dtype: dtype of every case, one of `DTYPES`.
        device: device of every case, `"cpu"` or `"cuda"`.
        optimizer: optimizer of every case; None for one whose step changes nothing.
        assumes: assumptions of the loop, names from `ASSUMPTIONS`.
        small: whether to draw only one layer and at most `SMALL_MICRO_BATCHES` micro-batches.
    """
    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if device not in DEVICES:
        raise InvalidArgument(f"device must be one of {', '.join(DEVICES)}; got {device!r}")
    try:
        # torch cannot add sparse float16 gradients on the CPU
        sparse = dtype != "float16" and (optimizer is None or checked_optimizer(optimizer) in TAKES_SPARSE)
    except UsageError as error:
        raise InvalidArgument(str(error)) from None
    chosen = tuple(sorted(_assumptions(assumes)))
    if not isinstance(problem, st.SearchStrategy | str | None):
        raise InvalidArgument(f"problem must be a strategy or the name of a user's problem, got {problem!r}")
    if not isinstance(plan, st.SearchStrategy | None):
        raise InvalidArgument(f"plan must be a strategy, such as just(Plan(...)), got {plan!r}")
    if problem is None:
        problem = problems(sparse=sparse, assumes=chosen, max_layers=1 if small else 5)
    spec = problem if isinstance(problem, str) else draw(problem)
    if plan is None:
        maskable = isinstance(spec, ProblemSpec) and loss_definition(spec.loss).maskable(spec.loss.o)
        plan = plans(assumes=chosen, maskable=maskable)
        if small:
            few = plans(max_windows=2, max_accumulation_steps=SMALL_MICRO_BATCHES, assumes=chosen, maskable=maskable)
            plan = few.filter(lambda plan: len(plan.micro_batches) <= SMALL_MICRO_BATCHES)
    seed = draw(st.integers(0, MAX_SEED))
    return Case(spec, draw(plan), dtype=dtype, device=device, seed=seed, optimizer=optimizer)


def size_of(case: Case) -> tuple[int, ...]:
    """Return the size of a case, for comparison with another: layers, micro-batches, epochs, K, items, features."""
    plan = case.plan
    shape: tuple[int, ...] = (0, 0)
    if isinstance(case.problem, ProblemSpec):
        signal, out = input_signal(case.problem.input), output_signal(case.problem)
        shape = (_depth(case.problem.layers), sum(signal.size) + sum(out.size))
    layers, features = shape
    options = len(repr(case.problem))
    return layers, len(plan.micro_batches), plan.epochs, plan.accumulation_steps, plan.total_items, features, options


def _depth(layers: Sequence[Layer]) -> int:
    return sum(1 + _depth(layer.layers) for layer in layers)
