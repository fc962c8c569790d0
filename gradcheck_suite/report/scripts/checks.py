"""The part of a script that says what is right and finds out whether it is."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from gradcheck_suite.execution.runner import run_loop
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.references.reference import Reference, Window
from gradcheck_suite.report.scripts.literals import table
from gradcheck_suite.report.scripts.sources import Sources
from gradcheck_suite.report.scripts.subjects import CARRIED
from gradcheck_suite.schema.contract import Loop
from gradcheck_suite.schema.results import Violation
from gradcheck_suite.schema.spec import ProblemSpec

AT_A_STEP = ("gradient", "none-pattern", "non-finite")
"""Kinds of violation that show in the gradients at one step."""
MOST_SHOWN = 4096
"""Elements of a gradient up to which a script holds what was observed: a user's model may be large."""


def step_of(violation: Violation) -> int:
    """Return the index of the step that a violation is about."""
    return (violation.epoch or 0) * len(violation.case.plan.windows) + (violation.window or 0)


def has_literal(violation: Violation) -> bool:
    """Return whether the right gradient stands in the script as numbers.

    With a real optimizer it depends on where the loop has taken the parameters, and a user's model may be large: there
    the script computes it.
    """
    return isinstance(violation.case.problem, ProblemSpec) and violation.case.optimizer is None


def numbers_text(loop: Loop, reference: Reference, violation: Violation, time_limit_s: float | None) -> str:
    """Return the tables `EXPECTED`, `OBSERVED` and `ALLOWED` of a step's gradients."""
    layout, window = reference.layout, reference.window(violation.window or 0)
    observations = run_loop(loop, reference.instance, time_limit_s=time_limit_s).observations
    step = step_of(violation)
    seen = observations[step].gradients if step < len(observations) else {}
    own = isinstance(violation.case.problem, ProblemSpec)
    names = [n for n in layout.names if own or n == violation.parameter]
    tables = []
    if has_literal(violation):
        tables.append(table("EXPECTED", {n: layout.part(window.expected, n).tolist() for n in names}))
    small = {n: g for n, g in seen.items() if n in names and (g is None or g.numel() <= MOST_SHOWN)}
    tables.append(table("OBSERVED", {n: None if g is None else g.double().tolist() for n, g in small.items()}))
    allowed: dict[str, Any] = dict.fromkeys(names, violation.allowed)
    if own:
        bound = _allowed(window)
        allowed = {n: _short(layout.part(bound, n)) for n in names}
    tables.append(table("ALLOWED", allowed))
    return "\n\n".join(tables)


def _allowed(window: Window) -> Vector:
    """Return what rounding allows at each element, asked for with that one element off."""
    expected = window.expected
    allowed = np.empty_like(expected)
    for i in range(len(expected)):
        off = expected.copy()
        off[i] = np.inf if expected[i] != np.inf else 0.0
        allowed[i] = window.compare(off).worst.allowed
    return allowed


def _short(allowed: Vector) -> Any:
    """Return one number where all elements are allowed the same."""
    return allowed.flat[0].item() if np.ptp(allowed) == 0 else allowed.tolist()


def large_batch_text(violation: Violation, sources: Sources) -> str:
    """Return `large_batch`, which computes the right gradient of the violated window."""
    plan, index = violation.case.plan, violation.window or 0
    members, items = plan.windows[index], plan.window_items(index)
    sources.add(CARRIED, "gradient_of", "as_float64")
    lines = ["model = make_model().double()"]
    if violation.case.optimizer is not None:
        lines.append("model.load_state_dict(parameters, strict=False)")
    if isinstance(violation.case.problem, ProblemSpec):
        lines += [
            f"window = MICRO_BATCHES[{members[0]}:{members[-1] + 1}]",
            "batch = {name: as_float64(torch.cat([micro[name] for micro in window])) for name in window[0]}",
        ]
    else:
        lines.append(f"batch = map_leaves(as_float64, items({items.start}, {items.stop}))")
    lines.append("return gradient_of(loss(model, batch), model)")
    arguments = "" if violation.case.optimizer is None else "parameters"
    return "\n".join(
        [
            f"def large_batch({arguments}):",
            f'    """Return the gradient of window {index}\'s items in one batch, in float64."""',
            *(f"    {line}" for line in lines),
        ]
    )


def main_text(violation: Violation, reduction: str, time_limit_s: float | None, sources: Sources) -> str:
    """Return `main`, which checks the very thing that was violated."""
    if violation.kind == "not-accumulable":
        body = _objective(violation, reduction, sources)
    else:
        sources.add(CARRIED, "completes", "watch", "trainable", "loader_of")
        body = _run(violation, reduction) + _check(violation, time_limit_s, sources)
    return "\n".join(
        [
            "def main():",
            '    """Return 1 while the fault is there and 0 when it is gone."""',
            textwrap.indent("\n".join(body), "    "),
            '    print("the fault is gone" if right else "the fault is there")',
            "    return 0 if right else 1",
            "",
            "",
            'if __name__ == "__main__":',
            "    raise SystemExit(main())",
        ]
    )


def _run(violation: Violation, reduction: str) -> list[str]:
    plan = violation.case.plan
    return [
        "loop, model = load_loop(), make_model()",
        "optimizer = make_optimizer(list(trainable(model).values()))",
        "run = TrainingRun(",
        "    model=model,",
        "    optimizer=optimizer,",
        "    loader=loader_of(MICRO_BATCHES),",
        "    loss=loss,",
        "    count=count,",
        f"    accumulation_steps={plan.accumulation_steps},",
        f"    epochs={plan.epochs},",
        f'    reduction="{reduction}",',
        "    device=DEVICE,",
        "    dtype=DTYPE,",
        ")",
        f"steps = watch(model, optimizer, most={plan.step_limit})",
    ]


def _check(violation: Violation, time_limit_s: float | None, sources: Sources) -> list[str]:
    plan, seed = violation.case.plan, f"torch.manual_seed({violation.case.seed})"
    if violation.kind in AT_A_STEP:
        sources.add(CARRIED, "steps_are_right", "gradient_is_right", "largest_difference")
        return [seed, *_gradient(violation)]
    if violation.kind == "step-count":
        sources.add(CARRIED, "steps_are_right")
        return [seed, f"right = completes(loop, run) and steps_are_right(steps, {plan.steps})"]
    if violation.kind == "raised":
        limit = f", seconds={time_limit_s:g}" if violation.diagnosis == "timed-out" and time_limit_s else ""
        return [seed, f"right = completes(loop, run{limit})"]
    if violation.diagnosis == "changed-model":
        sources.add(CARRIED, "structure", "is_unchanged")
        return ["before = structure(model)", seed, "right = completes(loop, run) and is_unchanged(before, model)"]
    sources.add(CARRIED, "parameters_are_right")
    start = "start = {name: p.detach().clone() for name, p in trainable(model).items()}"
    where = "start"
    if violation.case.optimizer is not None:
        sources.add(CARRIED, "stepped")
        where = "stepped(make_optimizer, start, steps)"
    return [start, seed, f"right = completes(loop, run) and parameters_are_right(model, {where}, {plan.steps})"]


def _gradient(violation: Violation) -> list[str]:
    plan, step = violation.case.plan, step_of(violation)
    members = list(plan.windows[violation.window or 0])
    at = "" if violation.case.optimizer is None else f'steps[{step}]["parameters"]'
    lines = [
        f"right = completes(loop, run) and steps_are_right(steps, {plan.steps})",
        "if right:",
        f'    print("at step {step}, window {violation.window or 0} of epoch {violation.epoch or 0} '
        f'(micro-batches {members}):")',
        f'    seen, large = steps[{step}]["gradients"], large_batch({at})',
    ]
    expected = "large"
    if has_literal(violation):
        expected = "EXPECTED"
        lines.append(
            '    print(f"torch\'s large batch is off EXPECTED by at most {largest_difference(EXPECTED, large):.3g}")'
        )
    return [
        *lines,
        f"    right = gradient_is_right(seen, {expected}, ALLOWED)",
        '    print(f"the gradient is off the recorded one by at most {largest_difference(OBSERVED, seen):.3g}")',
    ]


def _objective(violation: Violation, reduction: str, sources: Sources) -> list[str]:
    sources.add(CARRIED, "is_sum_over_items", "as_float64")
    sources.add("gradcheck_suite.execution.instance", "map_leaves")
    total = violation.case.plan.total_items
    weight = "count" if reduction == "mean" else "lambda batch: 1.0"
    own = isinstance(violation.case.problem, ProblemSpec)
    whole = (
        "{name: torch.cat([micro[name] for micro in MICRO_BATCHES]) for name in MICRO_BATCHES[0]}"
        if own
        else f"items(0, {total})"
    )
    return [
        "model = make_model().double()",
        f"whole = {whole}",
        "whole, *parts = (map_leaves(as_float64, batch) for batch in (whole, *MICRO_BATCHES))",
        f"right = is_sum_over_items(lambda batch: loss(model, batch), {weight}, whole, parts)",
    ]
