"""A case, a violation and a result in words that a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradcheck_suite.catalogue.definitions import Signal
from gradcheck_suite.catalogue.tables import chain_signal, input_signal, out_signal, walk
from gradcheck_suite.core.case import ALWAYS_WRITTEN, Case, Loss, Plan, ProblemSpec
from gradcheck_suite.core.results import Violation
from gradcheck_suite.core.text import aligned, counted, split_text

SPLIT = (*ALWAYS_WRITTEN, "ranks")
"""The fields of a plan that its split shows."""


def describe_plan(plan: Plan) -> list[str]:
    """Return the split of a run: one line for its counts and one for the meaning of `*` where it
    occurs.

    A field of the plan that is not in the split is stated by its name where it differs from its
    default.
    """
    windows = counted(len(plan.windows), "window")
    short = ", the last one short" if plan.has_short_window else ""
    lines = [
        f"{split_text(plan)} items; accumulation_steps = {plan.accumulation_steps},"
        f" {windows}{short}; {counted(plan.epochs, 'epoch')}"
        + "".join(
            f"; {name} = {value}" for name, value in plan.to_json().items() if name not in SPLIT
        )
        + (f"; {plan.world_size} ranks, between which / stands" if plan.ranks else "")
    ]
    if plan.masked:
        lines.append("* a micro-batch without valid targets: all of them are ignored")
    return lines


def describe_problem(problem: ProblemSpec | str) -> list[tuple[str, str]]:
    """Return a problem as (place, description) pairs, shapes for n items.

    Places: `input`, `0`, `1.0`, `loss`.
    """
    if isinstance(problem, str):
        return [("problem", f"{problem} (a user's)")]
    signal = input_signal(problem.input)
    lines = [("input", f"{_signal(signal)}  {_options(problem.input.o)}".rstrip())]
    for name, layer, given in walk(problem.layers, signal):
        shapes = f"{_shape(given)} -> {_shape(out_signal(layer, given))}"
        lines.append((name, f"{layer.kind:<12} {shapes}  {_options(layer.o)}".rstrip()))
    lines += [("tied", f"{name} is {original}") for name, original in problem.ties]
    out = chain_signal(problem.layers, signal)
    lines.append(("loss", _loss(problem.loss, out)))
    return lines


def describe_case(case: Case) -> list[str]:
    """Return a case in words: one line per part, in two aligned columns."""
    optimizer = (
        "an optimizer whose step changes nothing"
        if case.optimizer is None
        else f"optimizer {case.optimizer}"
    )
    if case.groups > 1:
        optimizer += f" with {case.groups} parameter groups"
    pairs = [
        *describe_problem(case.problem),
        *zip(("split", ""), describe_plan(case.plan), strict=False),
    ]
    if case.distinct_items:
        distinct = counted(case.distinct_items, "different one")
        pairs.append(("items", f"{distinct}, repeated in turn"))
    pairs.append(("run", f"{case.dtype} on {case.device}, seed {case.seed}, {optimizer}"))
    return aligned(pairs)


def with_case_described(violation: Violation) -> Violation:
    """Return a violation on a case with that case in words, and with the decorator that makes
    Hypothesis try it.
    """
    lines = [f"  {line}" for line in describe_case(violation.case)]
    return replace(violation, described=("the case", *lines, example_text(violation.case)))


def example_text(case: Case) -> str:
    """Return the decorator that makes Hypothesis try this case first."""
    return f"@example({case!r})"


def _loss(loss: Loss, out: Signal) -> str:
    options = {name: value for name, value in loss.o.items() if name != "reduction"}
    return f"{loss.kind:<12} {_shape(out)} -> scalar, reduction {loss.reduction}  {_options(options)}".rstrip()


def _signal(signal: Signal) -> str:
    padded = ", padded" if signal.padded else ""
    vocabulary = f" of {signal.vocabulary} ids" if signal.form == "tokens" else ""
    return f"{signal.form}{vocabulary} {_shape(signal)}{padded}"


def _shape(signal: Signal) -> str:
    return f"({', '.join(('n', *map(str, signal.size)))})"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
