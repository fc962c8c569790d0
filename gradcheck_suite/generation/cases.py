"""The Hypothesis strategy for cases, and how large a case is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from gradcheck_suite.catalogue import (
    CROSS_SAMPLE_LAYERS,
    CROSS_SAMPLE_LOSSES,
    LAYERS,
    LOSSES,
    input_signal,
    loss_definition,
    output_signal,
)
from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.optimizers import TAKES_SPARSE, checked_optimizer
from gradcheck_suite.generation.focus import FOCUS
from gradcheck_suite.generation.plans import hashable, integers, plans, sampled, valid_assumptions
from gradcheck_suite.generation.problems import problems
from gradcheck_suite.schema.case import DEVICES, DTYPES, MAX_SEED, Case
from gradcheck_suite.schema.plan import Plan
from gradcheck_suite.schema.spec import ProblemSpec

SMALL_MICRO_BATCHES = 3
MOVING_STEPS = range(2, 7)
"""Numbers of steps of a case whose optimizer may be drawn: at one step nothing has moved, many are expensive."""
SOMETIMES_MOVING: st.SearchStrategy[str | None] = st.sampled_from((*[None] * 5, "normalized"))
"""The optimizer where no other is asked for. It moves parameters in some cases, so that gradients of earlier parameters
are found."""
GROUPS = (1, 1, 1, 1, 1, 2, 3)
"""Numbers of parameter groups, as often as they are drawn."""
_PLACES = {
    name: place
    for kinds in (LAYERS, LOSSES, CROSS_SAMPLE_LAYERS, CROSS_SAMPLE_LOSSES)
    for place, name in enumerate(kinds)
}


def _takes_sparse(dtype: str, optimizer: str | None) -> bool:
    """Return whether gradients may be sparse; `InvalidArgument` where there is no such optimizer."""
    try:
        # torch on the CPU cannot add sparse gradients in float16, nor in bfloat16 if their values are not contiguous
        return dtype not in ("float16", "bfloat16") and (
            optimizer is None or checked_optimizer(optimizer) in TAKES_SPARSE
        )
    except UsageError as error:
        raise InvalidArgument(str(error)) from None


@cache
def _plans(assumes: str | tuple[str, ...], maskable: bool, small: bool, ranks: int) -> st.SearchStrategy[Plan]:
    if not small:
        return plans(assumes=assumes, maskable=maskable, ranks=ranks)
    few = plans(
        max_windows=2, max_accumulation_steps=SMALL_MICRO_BATCHES, assumes=assumes, maskable=maskable, ranks=ranks
    )
    return few.filter(lambda plan: len(plan.micro_batches) <= SMALL_MICRO_BATCHES * plan.world_size)


@cache
def _problems(
    assumes: str | tuple[str, ...], dtype: str, optimizer: str | None, small: bool
) -> st.SearchStrategy[ProblemSpec]:
    return problems(sparse=_takes_sparse(dtype, optimizer), assumes=assumes, max_layers=1 if small else 5)


def _check(problem: object, plan: object, dtype: str, device: str) -> None:
    """Raise `InvalidArgument` where an argument of `cases` is wrong."""
    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if device not in DEVICES:
        raise InvalidArgument(f"device must be one of {', '.join(DEVICES)}; got {device!r}")
    if not isinstance(problem, st.SearchStrategy | str | None):
        raise InvalidArgument(f"problem must be a strategy or the name of a user's problem, got {problem!r}")
    if not isinstance(plan, st.SearchStrategy | None):
        raise InvalidArgument(f"plan must be a strategy, such as just(Plan(...)), got {plan!r}")


@st.composite
def _cases(
    draw: st.DrawFn,
    problem: st.SearchStrategy[ProblemSpec] | str | None,
    plan: st.SearchStrategy[Plan] | None,
    assumes: str | tuple[str, ...],
    small: bool,
    ranks: int,
    optimizer: st.SearchStrategy[str | None] | None,
    fixed: Mapping[str, Any],
) -> Case:
    _check(problem, plan, fixed["dtype"], fixed["device"])
    valid_assumptions(assumes)
    if problem is None:
        problem = _problems(assumes, fixed["dtype"], fixed["optimizer"], small)
    else:
        _takes_sparse(fixed["dtype"], fixed["optimizer"])
    if isinstance(problem, str):
        draw(FOCUS)  # of no use here, but the first draw of every case is its focus
    drawn = problem if isinstance(problem, str) else draw(problem)
    if plan is None:
        maskable = not isinstance(drawn, str) and loss_definition(drawn.loss).maskable(drawn.loss.o)
        plan = _plans(assumes, maskable, small, ranks)
    seed = draw(integers(0, MAX_SEED))
    case = Case(drawn, draw(plan), seed=seed, **fixed, groups=draw(sampled(GROUPS)))
    if optimizer is not None and case.plan.steps in MOVING_STEPS:
        return case.replace(optimizer=draw(optimizer))
    return case


def cases(
    *,
    problem: st.SearchStrategy[ProblemSpec] | str | None = None,
    plan: st.SearchStrategy[Plan] | None = None,
    dtype: str = "float64",
    device: str = "cpu",
    optimizer: str | st.SearchStrategy[str | None] | None = None,
    assumes: Iterable[str] = (),
    small: bool = False,
    ranks: int = 1,
) -> st.SearchStrategy[Case]:
    """Return a strategy of cases.

    Args:
        problem: a strategy of problems, or the `FILE.py:NAME` of a user's problem; `problems()` if None.
        plan: a strategy of plans; `plans()` if None.
        dtype: dtype of every case, one of `DTYPES`.
        device: device of every case, `"cpu"` or `"cuda"`.
        optimizer: optimizer of every case; None for one whose step changes nothing. It may be a strategy of optimizers
            that take sparse gradients, such as `SOMETIMES_MOVING`.
        assumes: assumptions of the loop, names from `ASSUMPTIONS`.
        small: whether to draw only one layer and at most `SMALL_MICRO_BATCHES` micro-batches
            in each rank.
        ranks: largest number of ranks of the plans that are drawn.

    Raises:
        InvalidArgument: at the first draw, where an argument is wrong.
    """
    drawn, same = (optimizer, None) if isinstance(optimizer, st.SearchStrategy) else (None, optimizer)
    fixed = {"dtype": dtype, "device": device, "optimizer": same}
    return _cases(problem, plan, hashable(assumes), small, ranks, drawn, fixed)


def size_of(case: Case) -> tuple[int, ...]:
    """Return the size of a case, for comparison with another.

    It is the number of layers, micro-batches, epochs, K, items and features, then the places of the kinds in the
    catalogue, where plain ones come first, then parameter groups and the length of the options.
    """
    plan = case.plan
    shape: tuple[int, ...] = (0, 0, 0)
    if (spec := case.spec) is not None:
        features = sum(input_signal(spec.input).size) + sum(output_signal(spec).size)
        shape = (len(spec.layer_kinds), features, sum(map(_PLACES.__getitem__, [*spec.layer_kinds, spec.loss.kind])))
    layers, features, kinds = shape
    split = len(plan.micro_batches), plan.epochs, plan.accumulation_steps, plan.total_items
    return layers, *split, features, kinds, case.groups, len(repr(case.problem))
