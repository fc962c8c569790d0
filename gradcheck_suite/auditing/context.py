"""`with gradcheck_suite.audit() as audit:`, and `gradcheck_suite.objective`."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Unpack

import torch

from gradcheck_suite.auditing.judge import (
    UNCLEAR,
    JaxOpinion,
    KeptCall,
    ask_jax,
    dropped_tail,
    judge,
    kept_calls,
    why_unjudged,
)
from gradcheck_suite.auditing.losses import DECLARED, Call, Counted, Place, here
from gradcheck_suite.auditing.options import AuditFields, AuditOptions
from gradcheck_suite.auditing.passes import Watched
from gradcheck_suite.auditing.ranks import Ranks, RankWriter, died_before, gather, judge_together
from gradcheck_suite.auditing.recorder import Patches, Recorder, configured_steps
from gradcheck_suite.auditing.sums import KNOWN, Judged, Memory, Step
from gradcheck_suite.core.results import LiveResult, LiveViolation
from gradcheck_suite.errors import UsageError

_open: list[audit] = []


def _shown(error: BaseException | None) -> str:
    """Return the exception that ended a run in words, `""` where none of the program's did."""
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else ""


class StoppedOnViolation(BaseException):
    """Ends a run at its first violation. No `Exception`, so that a program that catches those ends all the same."""

    gradcheck_suite_passes = True


class audit:  # noqa: N801 - it is used as a function, as `open` is
    """Judge every optimizer step of the code that runs while it is open, unchanged.

    Example::

        with gradcheck_suite.audit(steps=20) as audit:
            trainer.train()
        audit.result

    Args:
        steps: number of optimizer steps to judge; all by default.
        every: the first window and every `every`-th after it are computed again.
        accept: diagnoses that the project lives with, such as `"mean-of-means"`.
        accumulation_steps: micro-batches per window, where it is to be held to that; else it is read off the run.
        without: instruments to switch off: `"weights"`, `"sums"`, `"batch"`.
        stop_on_violation: whether the first violation raises `StoppedOnViolation` in `optimizer.step()`.
        jax: whether JAX computes the first window that is computed again, of a model with at most a million parameters,
            when the run is over.
        name: of the run in the result.
        quiet: whether the first violation is not printed on standard error when it is found.

    Raises:
        UsageError: an option is wrong, or another audit is open.
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        quiet: bool = True,
        **options: Unpack[AuditFields],
    ) -> None:
        self.options = AuditOptions(**options)
        if wrong := sorted(set(self.options.accept) - KNOWN):
            raise UsageError(f"audit: accept takes diagnoses ({', '.join(sorted(KNOWN))}); got {wrong[0]!r}")
        self._name, self._quiet = name or here().line, quiet
        self._memories: dict[int, Memory] = {}
        self._violations: dict[str, LiveViolation] = {}
        self._findings: Counter[str] = Counter()
        self._windows = 0
        self._again: Counter[str] = Counter()
        self._calls: list[KeptCall] | str | None = None
        self._opinion: JaxOpinion | None = None
        self._result: LiveResult | None = None
        self._opened = False
        self._observing = False
        self._process = os.getpid()
        self._ranks = Ranks.of()
        self._writer: RankWriter | None = None
        self._recorder = Recorder(
            self._judge,
            weights="weights" not in self.options.without,
            sums="sums" not in self.options.without,
            every=None if "batch" in self.options.without or self._ranks is not None else self.options.every,
        )
        self._patches = Patches(self._recorder)

    def __enter__(self) -> audit:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(error)

    def open(self, *, scan: bool = True) -> audit:
        """Begin to observe.

        Args:
            scan: whether to look for optimizers that exist already.

        Raises:
            UsageError: this audit was open before, or another one is.
        """
        if self._opened:
            raise UsageError("audit: this audit was closed; make a new one with gradcheck_suite.audit()")
        if _open:
            raise UsageError("audit: another audit is open in this process; close it first")
        if self._ranks is not None:
            self._writer = RankWriter(self._ranks)
        self._opened = self._observing = True
        _open.append(self)
        self._start = time.perf_counter()
        self._patches.install()
        self._recorder.open(scan=scan)
        return self

    def _detach(self) -> None:
        if self._observing:
            self._observing = False
            self._patches.remove()
            self._recorder.close()

    def close(self, error: BaseException | None = None) -> LiveResult:
        """Stop observing and return the result; a second call returns the same.

        Args:
            error: the exception that ended the run, if any.
        """
        if self._result is not None:
            return self._result
        if not self._opened:
            raise UsageError("audit: the audit was never opened: use `with gradcheck_suite.audit() as audit:`")
        complete = self._observing and error is None
        self._detach()
        if self in _open:
            _open.remove(self)
        if self._ranks is not None and self._writer is not None:
            given = self.options.accumulation_steps
            tail = self._writer.tail(self._recorder.watched, given) if complete else None
            self._writer.end(self._recorder.findings, _shown(error), tail)
            self._result = self._of_all_ranks(self._ranks, error)
            return self._result
        if complete:
            self._at_the_end()
        if self.options.jax and not isinstance(error, KeyboardInterrupt):
            calls = self._calls or []
            self._opinion = JaxOpinion(refusal=calls) if isinstance(calls, str) else ask_jax(calls)
        self._result = self._finished(error)
        return self._result

    def _of_all_ranks(self, ranks: Ranks, error: BaseException | None) -> LiveResult:
        """Judge the run from what all ranks have written, in the first rank that has not died."""
        if ranks.rank and not died_before(ranks):
            reason = f"rank {ranks.rank} of {ranks.size}: rank 0 judges the steps of all ranks"
            return replace(self._finished(error), unjudged=reason, rank=ranks.rank, ranks=ranks.size)
        files = gather(ranks)
        together = judge_together(files, self.options.accumulation_steps)
        self._violations, self._windows = together.violations, together.windows
        self._findings, self._recorder.findings = together.findings, Counter()
        for file in files:
            if file.ended is None:
                wrote = "it died, or runs on another machine" if file.writer else "it wrote nothing on this machine"
                self._findings[f"rank {file.rank} has not ended: {wrote}"] += 1
            elif file.ended:
                self._findings[f"rank {file.rank} ended with {file.ended}"] += 1
            if file.tail:
                self._violations.setdefault(file.tail.diagnosis, file.tail)
        if "batch" not in self.options.without:
            self._findings["windows are not computed again where there are several ranks"] += 1
        result = replace(self._finished(error), rank=ranks.rank, ranks=ranks.size)
        shutil.rmtree(ranks.folder, ignore_errors=True)
        return result

    @property
    def result(self) -> LiveResult:
        """The result so far, or the final one where the audit is closed."""
        return self._result if self._result is not None else self._finished(None)

    @property
    def observing(self) -> bool:
        """Whether steps are still judged in this process."""
        return self._observing and self._process == os.getpid()

    def declare(self, loss: torch.Tensor, count: float | torch.Tensor, reduction: str, place: Place) -> None:
        """Note a loss that `objective` declares."""
        with self._recorder.guarded("a declared loss"):
            if loss.requires_grad and self.options.without != ("weights",):
                items = float(count) if not isinstance(count, torch.Tensor) else count.detach()
                number = int(items) if not isinstance(items, torch.Tensor) else 1
                counted = Counted(reduction, items, number, number)
                self._recorder.declare(loss, Call(DECLARED, place, counted, None))

    # Judging

    def _judge(self, state: Watched, place: Place) -> None:
        if self._process != os.getpid():
            return
        if self._writer is not None:
            state.detail = True
            self._writer.step(state, self._recorder.watched.index(state), place, configured_steps())
            self._windows += 1
            if self.options.steps is not None and self._windows >= self.options.steps:
                self._detach()
            return
        memory = self._memories.setdefault(id(state), Memory())
        given = self.options.accumulation_steps
        step = Step(state, place, self._recorder.steps_seen - 1, memory, given, configured_steps())
        recorder = self._recorder
        judged = judge(step, weights=recorder.weights, sums=recorder.sums, batch=recorder.due(state))
        known = self._violations.get(judged.violation.diagnosis) if judged.violation is not None else None
        self._recorder.forwards.copies |= judged.copies
        state.measure = judged.copies or (judged.violation is not None and judged.error is None and known is None)
        self._note(judged)
        if self.options.steps is not None and self._windows >= self.options.steps:
            self._detach()

    def _note(self, judged: Judged) -> None:
        self._findings.update(judged.findings)
        if (
            judged.weights
            or judged.violation is not None
            or ((judged.sums or judged.again) and not self._recorder.weights)
        ):
            self._windows += 1
        if judged.again is not None:
            self._again[judged.again] += 1
            if self.options.jax and self._calls is None:
                self._calls = kept_calls(judged.parts)
        if judged.violation is not None:
            self._violate(judged.violation)

    def _violate(self, violation: LiveViolation) -> None:
        known = self._violations.get(violation.diagnosis)
        self._violations[violation.diagnosis] = violation if known is None else known.again(violation)
        if known is None and violation.diagnosis not in self.options.accept:
            if not self._quiet:
                from gradcheck_suite.core.text import violation_lines

                print("\n".join(violation_lines(violation)), file=sys.stderr, flush=True)
            if self.options.stop_on_violation:
                raise StoppedOnViolation

    def _at_the_end(self) -> None:
        """Judge what is left when the run is over: micro-batches without a step, and what stayed unclear."""
        for state in self._recorder.watched:
            memory = self._memories.get(id(state), Memory())
            self._findings.update(memory.strays())
            if memory.unclear is not None and "not-linear" not in self._violations:
                self._findings[UNCLEAR] += 1
            if dropped := dropped_tail(state, memory.steps(self.options.accumulation_steps)):
                self._violate(dropped)

    def _finished(self, error: BaseException | None) -> LiveResult:
        accepted = tuple(v for name, v in self._violations.items() if name in self.options.accept)
        violations = tuple(v for name, v in self._violations.items() if name not in self.options.accept)
        findings = self._findings + self._recorder.findings
        return LiveResult(
            script=self._name,
            windows=self._windows,
            steps=self._recorder.steps_seen,
            seconds=time.perf_counter() - self._start if self._opened else 0.0,
            violations=violations,
            accepted=accepted,
            again=dict(self._again),
            findings=tuple(f"{text} ({n} times)" if n > 1 else text for text, n in findings.items()),
            second_opinion=self._opinion.summary() if self._opinion else None,
            disagreements=tuple(self._opinion.findings) if self._opinion else (),
            unjudged=None if violations or accepted else why_unjudged(self._recorder, self._windows, self._findings),
            interrupted=isinstance(error, KeyboardInterrupt),
            raised=_shown(error) or None,
        )


def objective(
    loss: torch.Tensor, *, count: float | torch.Tensor, reduction: Literal["mean", "sum"] = "mean"
) -> torch.Tensor:
    """Declare what a loss is a mean of, where it is no loss function of torch; return the loss.

    Without an open audit this does nothing.

    Args:
        loss: a scalar tensor.
        count: what its mean divides by; for `"sum"`, the number of items.
        reduction: `"mean"` or `"sum"`.

    Raises:
        UsageError: `reduction` is neither, or `loss` is no scalar tensor.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(f"objective: reduction must be 'mean' or 'sum', got {reduction!r}")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError("objective: expected a scalar tensor, the loss of one micro-batch")
    if _open and _open[-1].observing and not torch.compiler.is_compiling():
        _open[-1].declare(loss, count, reduction, here())
    return loss


# Callbacks for trainers that open an audit when training begins and close it when it ends; they do no more.


def transformers_callback(**options: Any) -> Any:
    """Return a callback for transformers' `Trainer(callbacks=[...])`; its `.audit.result` has the verdict.

    Args:
        options: of `gradcheck_suite.audit`.
    """
    from transformers import TrainerCallback

    class AuditCallback(TrainerCallback):  # type: ignore[misc]
        audit = audit(**{"name": "transformers.Trainer", **options})

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.audit.open()

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.audit.close()

    return AuditCallback()


def lightning_callback(**options: Any) -> Any:
    """Return a callback for Lightning's `Trainer(callbacks=[...])`; its `.audit.result` has the verdict.

    Args:
        options: of `gradcheck_suite.audit`.
    """
    from lightning.pytorch.callbacks import Callback

    class AuditCallback(Callback):  # type: ignore[misc]
        audit = audit(**{"name": "lightning.Trainer", **options})

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.audit.open()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.audit.close()

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            self.audit.close(exception)

    return AuditCallback()
