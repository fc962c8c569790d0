"""One optimizer step that is judged, and what its optimizer's earlier windows showed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from gradcheck_suite.live.judging.reading import History
from gradcheck_suite.live.judging.window_again import Part
from gradcheck_suite.live.judging.words import SENTENCES
from gradcheck_suite.live.recording.passes import Pass, Watched
from gradcheck_suite.live.recording.places import NOWHERE, Place
from gradcheck_suite.schema.live_results import LiveViolation


@dataclass
class Judged:
    """What one step showed.

    Attributes:
        violation: the fault, or None.
        weights: whether the weights of a recognised loss were judged.
        sums: whether the sum was judged.
        handmade: whether the gradient was put together by the user, in a way that says nothing about weights.
        edited: whether `.grad` was edited after the last backward pass.
        again: how the window was computed again, or None where it was not.
        error: relative error of the gradient, where the window was computed again.
        copies: whether inputs must be copied for that, since they were changed in place.
        parts: the recorded calls of a window that was computed again.
        findings: what is worth knowing.
    """

    violation: LiveViolation | None = None
    weights: bool = False
    sums: bool = False
    handmade: bool = False
    edited: bool = False
    again: str | None = None
    error: float | None = None
    copies: bool = False
    parts: Sequence[Part] = ()
    findings: list[str] = field(default_factory=list)


@dataclass
class Memory:
    """What the windows of one optimizer showed so far.

    Attributes:
        histories: of each objective.
        lengths: how often each number of micro-batches made a window.
        unclear: a fault of the sum that may be an edit after the last backward; the next window tells.
        singles: number of windows of one micro-batch in a row.
        windows: number of windows whose sum was judged.
        lines: `file:line` of a call of backward -> number of these windows in which it is.
        functions: classes of custom functions that were judged.
    """

    histories: dict[Hashable, History] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    unclear: LiveViolation | None = None
    singles: int = 0
    windows: int = 0
    lines: Counter[str] = field(default_factory=Counter)
    functions: set[type] = field(default_factory=set)

    def strays(self) -> list[str]:
        """Return what there is to say of calls of backward that only some windows have, beside one that all have."""
        if self.windows not in self.lines.values():
            return []
        return [
            f"{line}: backward is called here in {n} of {self.windows} windows, and what it computes is in the gradient"
            for line, n in self.lines.items()
            if n < self.windows
        ]

    def steps(self, given: int | None) -> int | None:
        """Return the number of micro-batches in a whole window: as given, else the most frequent one so far."""
        if given is not None:
            return given
        return self.lengths.most_common(1)[0][0] if self.lengths else None


@dataclass(frozen=True)
class Step:
    """One step of an optimizer.

    Attributes:
        state: the optimizer and the passes since its last step.
        place: of the call of `step`.
        number: of the step, among all.
        memory: of earlier windows.
        given: the accumulation steps that the user states, or None.
        configured: those of the trainer that runs, or None.
    """

    state: Watched
    place: Place
    number: int
    memory: Memory
    given: int | None = None
    configured: int | None = None

    @property
    def passes(self) -> list[Pass]:
        """The backward passes since the last step."""
        return self.state.pending

    @property
    def whole(self) -> int | None:
        """The number of micro-batches in a whole window, where it is known."""
        return self.memory.steps(self.given or self.configured)

    @property
    def backward(self) -> str | None:
        """`file:line` of the last call of backward, where it was seen."""
        return self.passes[-1].place.line if self.passes and self.passes[-1].place is not NOWHERE else None

    def violation(self, name: str, sentence: str | None = None) -> LiveViolation:
        """Return a violation of some name at this step."""
        where = next((r.call.place.line for p in reversed(self.passes) for r in p.received), None)
        return LiveViolation(
            "gradient",
            name,
            SENTENCES[name] if sentence is None else sentence,
            step=self.number,
            where=where or (self.passes[-1].place.line if self.passes else self.place.line),
            backward=self.backward,
            stepped=self.place.line,
        )
