"""False alarms: verdicts of sound loops, counted where the suite or another rule blames one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gradcheck_suite.evidence.calibration.drawing import Drawn
from gradcheck_suite.evidence.calibration.styles import LOOPS
from gradcheck_suite.evidence.calibration.tally import Tally
from gradcheck_suite.evidence.rivals import failed_rules
from gradcheck_suite.execution.autocast import AutocastRecorder
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.references.errors import CannotJudgeError
from gradcheck_suite.references.reference import REFERENCES, Reference
from gradcheck_suite.schema.contract import Loop, TrainingRun, assumptions_of, autocast_of
from gradcheck_suite.schema.results import Verdict, json_number
from gradcheck_suite.verification.check import check


@dataclass
class _Noted:
    """A loop that keeps the gradients that its optimizer's steps used."""

    loop: Loop
    reference: Reference
    gradients: list[Vector] = field(default_factory=list)
    compute: str | None = None

    @property
    def autocast(self) -> str | None:
        """The dtype of the autocast that the loop declares."""
        return autocast_of(self.loop)

    def __call__(self, run: TrainingRun) -> None:
        trainable = {name: p for name, p in run.model.named_parameters() if p.requires_grad}

        def note(*_: Any) -> None:
            dense = {n: p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
                     for n, p in trainable.items()}  # fmt: skip
            self.gradients.append(self.reference.flat({n: g if g is None else g.detach() for n, g in dense.items()}))

        # after the step, since a closure computes its gradients during it
        handle: torch.utils.hooks.RemovableHandle = run.optimizer.register_step_post_hook(note)
        try:
            self.loop(run)
        finally:
            handle.remove()
            self.compute = run.loss.compute if isinstance(run.loss, AutocastRecorder) else None


class Judge:
    """Judges sound loops on one case and counts the verdicts; bitwise equal gradients are compared once."""

    def __init__(self, drawn: Drawn, loops: Mapping[str, Loop] = LOOPS) -> None:
        self._drawn, self._tally = drawn, Tally(cases=1)
        self._loops = {name: loop for name, loop in loops.items() if assumptions_of(loop) <= drawn.within}
        self._reference = REFERENCES.get(drawn.case, None)
        self._seen: dict[tuple[int, str | None, bytes], tuple[float | None, frozenset[str]]] = {}
        spec = drawn.case.spec
        assert spec is not None
        self._layers, self._loss = frozenset(spec.layer_kinds), spec.loss.kind

    def run(self, limit: int, progress: Callable[[], None]) -> Tally:
        """Judge the loops whose assumptions hold in the case, at most `limit` of them."""
        for name, loop in list(self._loops.items())[:limit]:
            noted = _Noted(loop, self._reference)
            self._note(name, noted, check(noted, self._drawn.case))
            progress()
        return self._tally

    def _note(self, name: str, noted: _Noted, verdict: Verdict) -> None:
        tally = self._tally
        tally.checks += 1
        if verdict.skipped is not None:
            tally.skipped[" ".join(verdict.skipped.split())] += 1
            return
        tally.loops[name] += 1
        tally.layers.update(self._layers)
        tally.losses[self._loss] += 1
        tally.autocast += noted.compute is not None
        if verdict.finding is not None:
            tally.findings[verdict.finding] += 1
            return
        tally.elements += sum(map(len, noted.gradients))
        if (violation := verdict.violation) is not None:
            ratio = violation.error / violation.allowed if violation.error and violation.allowed else None
            found = violation.to_json() | {"loop": name, "ratio": json_number(ratio)}
            tally.alarms.append({key: value for key, value in found.items() if value is not None})
            return
        tally.note_ratio(self._layers, verdict.ratio)
        self._look_closer(noted)

    def _look_closer(self, noted: _Noted) -> None:
        """Count the gradients that needed the Monte Carlo part of the bound, and the rules that would blame them."""
        rivals: set[str] = set()
        for index, observed in enumerate(noted.gradients):
            key = index, noted.compute, observed.tobytes()
            if key not in self._seen:
                window = self._reference.window(index, None, noted.compute)
                try:
                    beyond = window.compare_quickly(observed).ratio > 1
                    ratio = window.compare(observed).ratio if beyond else None
                except CannotJudgeError:  # this window alone: others of the case were judged
                    self._seen[key] = None, frozenset()
                    continue
                found = failed_rules(window, self._reference.layout, observed, self._drawn.case.dtype)
                self._seen[key] = ratio, found
            ratio, found = self._seen[key]
            rivals |= found
            if ratio is not None:
                self._tally.drawn_on.note(ratio)
        (self._tally.rivals if noted.compute is None else self._tally.rivals_autocast).update(rivals)
