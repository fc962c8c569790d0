"""The check of a script: tables of the expected, observed and allowed values, the large batch, and `main`.

The values are read from the violation's evidence; no loop is run.
"""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from gradcheck_suite.execution.batches import loader_over, to_dtype
from gradcheck_suite.execution.observer import Observer
from gradcheck_suite.execution.pairs import Pairs
from gradcheck_suite.execution.parameters import structure
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.references.torch_reference import parameter_gradients
from gradcheck_suite.report.scripts import runtime
from gradcheck_suite.report.scripts.copied_source import CopiedSource
from gradcheck_suite.report.scripts.tensor_literals import table
from gradcheck_suite.schema.results import Violation

AT_A_STEP = ("gradient", "none-pattern", "non-finite")
"""Kinds of violation that show in the gradients at one step."""
MOST_SHOWN = 4096
"""Largest number of elements of a parameter whose observed gradient a script contains."""
HANGS = ("timed-out", "endless")
"""Diagnoses for which a script limits the loop's time. A loop may catch the exception that should stop it."""
MAIN = '''\
def main():
    """Return 1 while the fault is there and 0 when it is gone."""
{body}
    print("the fault is gone" if right else "the fault is there")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(exit_status(main))'''
RUN = """\
loop, model, loader, pairs = load_loop(), make_model(), loader_over(DATA, MICRO_BATCHES), Pairs(loss)
optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
run = TrainingRun(
    model=model,
    optimizer=optimizer,
    loader=loader,
    loss=loss,
    pairs=pairs.over(loader),
    criterion=pairs.criterion,
    count=count,
    accumulation_steps={plan.accumulation_steps},
    epochs={plan.epochs},
    reduction="{reduction}",
    device=DEVICE,
    dtype=DTYPE,
)
observer = Observer(model, optimizer, limit={plan.step_limit})
torch.manual_seed({seed})"""


def allowed_text(violation: Violation) -> str:
    """Return the table `ALLOWED` of the parameter with the largest error."""
    evidence = violation.evidence
    assert evidence is not None
    name = violation.parameter or ""
    return table("ALLOWED", {name: _short(evidence.layout.part(evidence.allowed, name))})


def has_literal(violation: Violation) -> bool:
    """Return whether the script compares with the expected gradient as numbers.

    Otherwise it compares with the large batch that it computes: the expected gradient depends on the parameters where
    the loop has changed them, and the gradient of a user's model may be large.
    """
    return violation.case.spec is not None and not _moves(violation)


def _moves(violation: Violation) -> bool:
    """Whether the parameters at the step may depend on the loop: under a real optimizer, or where it edits them."""
    return violation.moved or violation.case.optimizer is not None


def numbers_text(violation: Violation) -> str:
    """Return the tables `EXPECTED`, `OBSERVED` and `ALLOWED` of a step's gradients."""
    evidence = violation.evidence
    assert evidence is not None, f"a violation of kind {violation.kind} comes with the gradients that show it"
    layout, tables = evidence.layout, []
    names, allowed = [violation.parameter or ""], {violation.parameter or "": violation.allowed}
    if violation.case.spec is not None:
        names = list(layout.names)
        allowed = {name: _short(layout.part(evidence.allowed, name)) for name in names}
    if has_literal(violation):
        tables.append(table("EXPECTED", {name: layout.part(evidence.expected, name).tolist() for name in names}))
    seen = {name: evidence.seen(name) for name in names}
    observed = {n: None if g is None else g.tolist() for n, g in seen.items() if g is None or g.size <= MOST_SHOWN}
    return "\n\n".join([*tables, table("OBSERVED", observed), table("ALLOWED", allowed)])


def _short(allowed: Vector) -> Any:
    """Return the bounds of a parameter's elements as nested lists, or as one number where all are equal."""
    return allowed.flat[0].item() if np.ptp(allowed) == 0 else allowed.tolist()


def large_batch_text(violation: Violation, sources: CopiedSource) -> str:
    """Return `large_batch`, which computes the expected gradient of the violated window in torch."""
    sources.copy(parameter_gradients, to_dtype)
    index, moved = violation.window or 0, _moves(violation)
    lines = [
        f"def large_batch({'parameters' if moved else ''}):",
        f'    """Return the gradient of window {index}\'s items in one batch, in float64."""',
        "    model = make_model().double()",
        *(["    model.load_state_dict(parameters, strict=False)"] if moved else []),
        f"    batch = to_dtype(batch_of({violation.case.plan.window_items(index)}), torch.float64)",
        "    return parameter_gradients(loss(model, batch), model)",
    ]
    return "\n".join(lines)


def main_text(violation: Violation, reduction: str, time_limit_s: float | None, sources: CopiedSource) -> str:
    """Return `main`, which checks what the violation says was wrong."""
    if violation.kind == "not-accumulable":
        body = _objective(violation, reduction, sources)
    else:
        sources.copy(loader_over, Pairs, Observer, runtime.completes)
        case, further = violation.case, ""
        if violation.diagnosis in HANGS and time_limit_s:
            further = f", seconds={time_limit_s:g}"
        elif violation.kind == "raised":
            further = ", may_raise=True"
        run = RUN.format(plan=case.plan, reduction=reduction, seed=case.seed)
        body = [run, *_check(violation, f"right = completes(loop, run, observer{further})", sources)]
    sources.copy(runtime.exit_status)
    return MAIN.format(body=textwrap.indent("\n".join(body), "    "))


def _check(violation: Violation, completes: str, sources: CopiedSource) -> list[str]:
    """Return the statements that run the loop and decide what `right` is.

    Args:
        violation: what was wrong.
        completes: the statement that runs the loop.
        sources: gets the functions that the statements call.
    """
    plan = violation.case.plan
    if violation.kind == "raised":
        return [completes]
    if violation.kind == "step-count" or violation.kind in AT_A_STEP:
        sources.copy(runtime.steps_are_right)
        steps = [f"{completes} and steps_are_right(observer, {plan.steps})"]
        return steps if violation.kind == "step-count" else [*steps, *_gradient(violation, sources)]
    if violation.diagnosis == "changed-model":
        sources.copy(structure, runtime.structure_is_kept)
        return ["before = structure(model)", f"{completes} and structure_is_kept(before, model)"]
    sources.copy(runtime.parameters_are_right)
    make = "None" if violation.case.optimizer is None else "make_optimizer"
    return [f"{completes} and parameters_are_right(observer, {make})"]


def _gradient(violation: Violation, sources: CopiedSource) -> list[str]:
    sources.copy(runtime.gradient_is_right, runtime.largest_difference)
    plan, window, epoch = violation.case.plan, violation.window or 0, violation.epoch or 0
    step = epoch * len(plan.windows) + window
    where = f"step {step}, window {window} of epoch {epoch} (micro-batches {list(plan.windows[window])}):"
    moved = "" if not _moves(violation) else f"observer.observations[{step}].parameters"
    expected, beside = "large", []
    if has_literal(violation):
        expected = "EXPECTED"
        beside = [
            'print(f"torch\'s large batch differs from EXPECTED by at most {largest_difference(EXPECTED, large):.3g}")'
        ]
    lines = [
        f'print("{where}")',
        f"observed, large = observer.observations[{step}].gradients, large_batch({moved})",
        *beside,
        f"right = gradient_is_right(observed, {expected}, ALLOWED)",
        'print(f"the gradient differs from OBSERVED by at most {largest_difference(OBSERVED, observed):.3g}")',
    ]
    return ["if right:", *(f"    {line}" for line in lines)]


def _objective(violation: Violation, reduction: str, sources: CopiedSource) -> list[str]:
    sources.copy(to_dtype)
    plan, counted = violation.case.plan, "count" if reduction == "mean" else None
    items, members, window = range(plan.total_items), range(len(plan.micro_batches)), violation.window
    if window is None:
        sources.copy(runtime.is_sum_over_items)
        right = f"is_sum_over_items(model, loss, {counted}, whole, parts)"
    else:
        sources.copy(runtime.gradient_accumulates)
        items, members = plan.window_items(window), range(plan.windows[window][0], plan.windows[window][-1] + 1)
        right = f"gradient_accumulates(model, loss, {counted}, whole, parts, ALLOWED)"
    return [
        "model = make_model().double()",
        f"whole = to_dtype(batch_of({items}), torch.float64)",
        f"parts = [to_dtype(batch_of(MICRO_BATCHES[j]), torch.float64) for j in {members}]",
        f"right = {right}",
    ]
