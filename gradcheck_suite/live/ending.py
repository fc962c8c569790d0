"""What is said when an audit ends: micro-batches without a step, and why nothing could be judged."""

from __future__ import annotations

from collections.abc import Iterable

from gradcheck_suite.live.judging.weight_judge import DECLARE
from gradcheck_suite.live.judging.words import SENTENCES
from gradcheck_suite.live.recording.passes import Watched
from gradcheck_suite.live.recording.recorder import Recorder
from gradcheck_suite.schema.live_results import LiveViolation

UNCLEAR = (
    "at a step, `.grad` was not the sum of the window's backward passes, and it is unclear why: "
    "it was edited before the step, or other code writes to `.grad`"
)
WRAP = (
    "Call what writes to the parameters (an extension in C++, a loop over them) in the step() of a subclass of "
    "torch.optim.Optimizer"
)


def dropped_tail(state: Watched, accumulation_steps: int | None) -> LiveViolation | None:
    """Return the violation of a short last window that was accumulated and never stepped, or None.

    Args:
        state: of an optimizer, when the run is over.
        accumulation_steps: micro-batches of its windows; None where that is not known.
    """
    left = [p for p in state.pending if p.accumulates and not p.consumers and p.received]
    if not left or accumulation_steps is None or not len(left) < accumulation_steps > 1 or not state.steps:
        return None
    return LiveViolation(
        "step-count",
        "tail-dropped",
        SENTENCES["tail-dropped"].format(lost=len(left)).replace("reset without", "left without"),
        where=left[-1].received[-1].call.place.line,
        backward=min({p.place.line for p in left}),
    )


def why_unjudged(recorder: Recorder, windows: int, findings: Iterable[str]) -> str | None:
    """Return why nothing could be judged, or None where something was.

    Args:
        recorder: of the run.
        windows: number of windows that were judged.
        findings: of the audit so far, beside the recorder's own.
    """
    if not recorder.weights and not recorder.sums and recorder.every is None:
        return "every instrument was switched off"
    if not recorder.steps_seen and recorder.passes_seen:
        return (
            f"no optimizer.step() was seen, and {recorder.passes_seen} call(s) of backward were: the script trains "
            f"without a torch.optim optimizer. {WRAP}"
        )
    if not recorder.steps_seen:
        return (
            "no backward pass and no optimizer.step() was seen in this process: the script trains nothing here, or in "
            "another process"
        )
    if windows:
        return None
    for line, node in recorder.unrecognised.items():
        made = "was computed inside torch.compile" if node.startswith("Compiled") else f"comes from {node}"
        return f"the loss that goes backward at {line} {made} and was not recognised: {DECLARE}"
    reasons = [*findings, *recorder.findings][:2] or ["no loss went backward"]
    return f"no step could be judged: {'; '.join(reasons)}"
