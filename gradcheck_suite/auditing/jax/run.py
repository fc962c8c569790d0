"""The audit of a run of JAX, from its beginning to its result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from gradcheck_suite.auditing.jax.ending import judge_end
from gradcheck_suite.auditing.jax.judge import JaxJudge
from gradcheck_suite.auditing.jax.recorder import JaxRecorder
from gradcheck_suite.auditing.jax.replay import MOST_STEPS, Event
from gradcheck_suite.auditing.jax.verdicts import Verdicts
from gradcheck_suite.auditing.schedule import Schedule
from gradcheck_suite.auditing.stopping import Terminated, in_words
from gradcheck_suite.core.findings import Occurrence, finding
from gradcheck_suite.core.options import DEFAULT_BUDGET, INSTRUMENTS, AuditOptions
from gradcheck_suite.core.results import Result, Violation
from gradcheck_suite.core.text import counted
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.run.private_names import expect_present

MOST_REASONS = 2
"""Reasons that the sentence for a run without a verdict names."""


class JaxAudit:
    """Judges the optimizer steps of a run of JAX.

    Args:
        options: of the audit.
        name: of the run in the result.
        tell: prints a violation when it is found.
        say: prints a line on the terminal.
    """

    def __init__(
        self,
        options: AuditOptions,
        name: str,
        tell: Callable[[Violation], None],
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._name = name
        self._tell = tell
        self._schedule = Schedule(options, on_ranks=False)
        self._recorder = JaxRecorder(
            self._receive,
            say,
            self._schedule,
            options.steps,
        )
        self._judge = JaxJudge(
            self._recorder.on_step,
            lambda: self._recorder.marking.has_updates,
            Verdicts(options.accumulation_steps, "weights" not in options.without),
            judges_sums="sums" not in options.without,
        )
        self._unsupported: str | None = None
        self._told: set[tuple[str, str | None]] = set()
        self._start = time.perf_counter()

    def open(self) -> None:
        """Begin to watch."""
        try:
            expect_present("audit", "jax")
        except CannotRunHere as error:  # the program goes on without the audit
            self._unsupported = str(error)
        if self._unsupported is None and not {*self._options.without} >= {*INSTRUMENTS}:
            self._recorder.open()

    def _receive(self, events: Sequence[Event]) -> None:
        before = self._judge.steps
        self._judge.take(events)
        if self._options.stop_on_violation and self._judge.steps > before:
            self.tell_all()

    def tell_all(self) -> None:
        """Print the violations that were not printed so far."""
        for violation in self._judge.verdicts.violations():
            key = violation.diagnosis, violation.where
            accepted = self._options.accepts(violation.diagnosis, violation.where)
            if key not in self._told and not accepted:
                self._told.add(key)
                self._tell(violation)

    @property
    def has_seen(self) -> bool:
        """Whether a gradient or an update was seen."""
        recorder = self._recorder
        return bool(recorder.counts.passes or recorder.counts.steps or recorder.marking.traced)

    def close(self, error: BaseException | None) -> Result:
        """Stop watching, and return the result.

        Args:
            error: that ended the run, or None.
        """
        was_open = self._recorder.is_open
        self._recorder.close()
        try:
            judge_end(self._judge, complete=was_open and error is None)
        except Exception as fault:
            self._recorder.switch_off(fault)
        return self.result(error)

    def result(self, error: BaseException | None) -> Result:
        """Return the result so far.

        Args:
            error: that ended the run, or None.
        """
        judge = self._judge
        recorder = self._recorder
        found = judge.verdicts.violations() if recorder.off is None else []
        accepts = self._options.accepts
        # an accepted violation stays in the result, so that a reader sees what was accepted
        violations = tuple(v for v in found if not accepts(v.diagnosis, v.where))
        accepted = tuple(v for v in found if accepts(v.diagnosis, v.where))
        unknown = judge.verdicts.all_unknown()
        notes = Counter({part.found: steps for part, steps in unknown.items()})
        notes += judge.verdicts.all_notes() + recorder.notes + self._of_unseen()
        if recorder.off is not None:
            said = f"JAX could not be observed ({recorder.off}); please report it"
            notes[finding("failed-instrument", said, remedy="")] += 1
        named = tuple(replace(one, steps=times) for one, times in notes.items())
        judged = judge.verdicts.weighed if "weights" not in self._options.without else judge.judged
        # a step that is violated was judged, whichever instrument has found that
        windows = len(judged | judge.verdicts.violated)
        skipped = {
            f"budget {self._options.budget or DEFAULT_BUDGET}": recorder.counts.counted,
            f"after the first {MOST_STEPS} of a scan": recorder.counts.cut,
        }
        unjudged = None if found else self._why_unjudged(windows, notes)
        return Result(
            loop=self._name,
            command="audit",
            seconds=time.perf_counter() - self._start,
            violations=violations,
            accepted=accepted,
            steps=recorder.counts.steps,
            windows=windows,
            windows_skipped={reason: number for reason, number in skipped.items() if number},
            findings=tuple(map(str, named)),
            named_findings=named,
            unknown=tuple(replace(part, steps=steps) for part, steps in unknown.items()),
            unjudged=None if unjudged is None else unjudged.words,
            unjudged_reason=None if unjudged is None else unjudged.name,
            interrupted=isinstance(error, KeyboardInterrupt | Terminated),
            raised=in_words(error) or None,
            files=tuple((file, None) for file in self._files()),
        )

    def _files(self) -> list[str]:
        lines = set[str]()
        for place in self._judge.places:
            lines.update((place.line, *place.path))
        return sorted({line.rpartition(":")[0] for line in lines})

    def _of_unseen(self) -> Counter[Occurrence]:
        """Return what gradients and updates could not be looked at."""
        found = Counter[Occurrence]()
        for place, times in self._recorder.marking.unseen.items():
            said = (
                "the gradient of a loss was not seen: it cannot be traced, since it looks at values or"
                " is no function of arrays"
            )
            found[finding("untraced-loss", said, place)] += times
        for mark in self._recorder.unseen():
            said = (
                "it was traced into a program whose calls were not looked at, as of a function that"
                " was compiled before the audit began"
            )
            if mark.place in self._recorder.marking.stepwise:
                said = (
                    "it stands in a `shard_map` outside of compiled functions, which is not looked"
                    " into: compile it with `jax.jit`"
                )
            found[finding("unobserved-program", said, mark.place)] += 1
        return found

    def _why_unjudged(self, windows: int, notes: Counter[Occurrence]) -> Occurrence | None:
        """Return why nothing could be judged, and what to do; None where something was."""
        recorder = self._recorder
        if self._unsupported is not None:
            return finding("unsupported-version", self._unsupported)
        if recorder.off is not None:
            said = f"JAX could not be observed ({recorder.off})"
            return finding("failed-instrument", said, remedy="")
        if {*self._options.without} >= {*INSTRUMENTS}:
            return finding("switched-off", "every instrument was switched off")
        if windows:
            return None
        reasons = "; ".join(map(str, [*notes][:MOST_REASONS]))
        if not recorder.counts.steps and recorder.counts.passes:
            passes = counted(recorder.counts.passes, "gradient")
            said = f"no optimizer's update was seen in {passes}"
            return finding("no-step", f"{said}: {reasons}" if reasons else said)
        if not recorder.counts.steps and not notes:
            said = (
                "no gradient of a loss and no optimizer's update was seen in this process: the script"
                " trains nothing, or it trains in another process"
            )
            return finding("nothing-trained", said)
        why = reasons or "no loss was differentiated"
        return finding("nothing-judged", f"no step could be judged: {why}")
