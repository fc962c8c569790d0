"""Parameters under several names that are wrong: done once per name, or with only one of their uses in the gradient."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gradcheck_suite.diagnosis.weight_patterns.weights import Diagnosis
from gradcheck_suite.diagnosis.wrong_elements.moved_elements import part_of
from gradcheck_suite.numerics.comparison import Comparison
from gradcheck_suite.references.torch_reference import gradients_of
from gradcheck_suite.references.window import Window


def with_second_names(
    found: Diagnosis | None, window: Window, comparison: Comparison, wrong: Sequence[str]
) -> Diagnosis | None:
    """Return a diagnosis that says so where parameters under several names are wrong, and they alone.

    Args:
        found: the diagnosis, if there is one.
        window: whose gradient is wrong.
        comparison: of that gradient with the right one.
        wrong: names of the wrong parameters.
    """
    names: dict[int, list[str]] = {}
    for name, p in window.model().named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    several = [own for own in names.values() if len(own) > 1]
    if not wrong or any(not any(name in own for own in several) for name in wrong):
        return found
    own = next(own for own in several if wrong[0] in own)
    if lost := _lost_use(window, comparison, [own for own in several if own[0] in wrong]):
        untying = (
            f"{' and '.join(own)} are one parameter, and its use as {lost} is not in the gradient: look for a copy or "
            "a functional call in which they are two"
        )
        if found is None or found.name != "no-gradient":
            return Diagnosis("untied-weights", untying)
        # the other use has a gradient of 0
        return Diagnosis(f"{found.name} or untied-weights", f"{found.sentence}; or: {untying}")
    if found is None:
        return None
    said = (
        f"; {' and '.join(own)} are one parameter: what is done once per name is done {len(own)} times to it, as where "
        "a loop goes over named_parameters(remove_duplicate=False) or a list of names"
    )
    return replace(found, sentence=found.sentence + said)


def untied(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model in which every name has a parameter of its own."""
    model = copy.deepcopy(model)
    seen: set[int] = set()
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        if id(module) in seen:
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, copy.deepcopy(module))
        seen.add(id(module))
    for name, p in [*model.named_parameters(remove_duplicate=False)]:
        if id(p) in seen:
            above, _, last = name.rpartition(".")
            setattr(model.get_submodule(above), last, torch.nn.Parameter(p.detach().clone()))
        seen.add(id(p))
    return model


def _lost_use(window: Window, comparison: Comparison, tied: Sequence[Sequence[str]]) -> str | None:
    """Return the name as which parameters are used without a share in their gradients, or None."""
    instance, model = window.reference.instance, untied(window.model())
    items = [instance.case.plan.items(j) for j in window.members]
    rows = [gradients_of(instance, model, part, summed=True, dtype=torch.float64) for part in items]
    summed = instance.problem.reduction == "sum"
    right = 1.0 if summed else 1.0 / sum(float(instance.count(instance.batch(part))) for part in items)
    lost: set[int] = set()
    for own in tied:
        _, observed, allowed, _ = part_of(comparison, own[0])
        found = [[g.numpy() for row in rows if (g := row.get(name)) is not None] for name in own]
        uses = [right * np.sum(parts, axis=0) for parts in found if parts]
        if len(uses) != 2:
            continue
        kept = [i for i, use in enumerate(uses) if (np.abs(use - observed) <= 8 * allowed).all()]
        if len(kept) != 1:
            return None
        lost.add(1 - kept[0])
    return tied[0][lost.pop()] if len(lost) == 1 else None
