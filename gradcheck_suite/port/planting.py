"""Whether the comparison is not blind: faults that are planted in the torch program are found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from gradcheck_suite.port.budget import Budget
from gradcheck_suite.port.changes import RAISED, Hypothesis, of_ours
from gradcheck_suite.port.explanation import Explanation, best_explanation
from gradcheck_suite.port.judgement import Judgement
from gradcheck_suite.port.matching import outputs_error
from gradcheck_suite.port.mistakes import mistakes
from gradcheck_suite.port.torch_program import LOSS, TorchProgram, with_tensors

PLANTED = 16
"""Calls in which faults are planted."""


@dataclass
class _Planted:
    """A fault that is planted in the torch program.

    Attributes:
        hypothesis: the change.
        words: what it is.
        is_last: whether nothing else is planted where this one is found.
        off: relative error that it makes.
    """

    hypothesis: Hypothesis
    words: str
    is_last: bool = False
    off: float = 0.0


def judge_planted(judgement: Judgement) -> None:
    """Plant usual faults in the torch program, and say which of them was found by how much."""
    report = judgement.report
    if report.findings:
        return
    given = judgement.sides.given
    program = judgement.program
    theirs = judgement.sides.jax_run(given).outs
    allowed = judgement.allowed(given)

    def tried(planted: _Planted) -> Explanation[_Planted] | None:
        try:
            changed = judgement.repairs.with_change(planted.hypothesis).run(program)
        except RAISED:
            return None
        except Exception as error:
            report.note(f"a fault could not be planted: {of_ours(error)}")
            return None
        planted.off = outputs_error(changed.outs, theirs)
        is_found = planted.off > allowed and np.isfinite(planted.off)
        # the smallest fault that is found says how exact the comparison is
        return Explanation(planted, planted.is_last, -planted.off) if is_found else None

    for faults in (_usual_faults(judgement, program), _moved_parameters(judgement, program)):
        found = best_explanation(faults, tried, Budget())
        if found is not None:
            off = f"off by {found.value.off:.2g} where {allowed:.1g} is allowed"
            report.planted = f"{found.value.words}: found, {off}"
            return
    report.unjudged = (
        report.unjudged or "no planted fault was found: the outputs do not depend on the parameters"
    )


def _usual_faults(judgement: Judgement, program: TorchProgram) -> Iterator[_Planted]:
    """Yield usual faults of some calls."""
    run = judgement.repairs.run(program)
    calls = [
        i
        for i in sorted(program.needed)
        if program.calls[i].path != LOSS and not program.calls[i].mutates
    ]
    rng = np.random.default_rng(judgement.options.seed)
    for index in map(int, rng.permutation(calls)[:PLANTED]):
        call = program.calls[index]
        outs = run.seen[index]
        if outs and isinstance(outs[0], torch.Tensor):
            args, kwargs = with_tensors((call.args, call.kwargs), run.get)
            for one in islice(mistakes(index, call, args, kwargs, outs[0]), 3):
                words = f"{one.cause} ({one.words}) at {call.path or 'the model'}"
                yield _Planted(one, words)


def _moved_parameters(judgement: Judgement, program: TorchProgram) -> Iterator[_Planted]:
    """Yield parameters that are a little off, for programs of which no usual fault is known."""
    for name in judgement.map.names:
        if name in program.parameters:
            scaled = Hypothesis("", "", leaves={("state", name): lambda v: v * (1 + 1e-6)})
            yield _Planted(scaled, f"{name} times 1 + 1e-6", is_last=True)
