"""Is `.grad` the sum of the window's passes? The first question that is answered yes names the
fault.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from statistics import median
from typing import Literal

from gradcheck_suite.auditing.events import BY_HAND, PassRecord
from gradcheck_suite.auditing.places import (
    Loop,
    Place,
    is_clipping,
    is_edit,
    is_given_up,
    is_reset,
    is_tried,
    lines_between,
)
from gradcheck_suite.auditing.replay import (
    EARLIER,
    NEGLIGIBLE,
    UNKNOWN,
    Seen,
    Source,
    StepWindow,
    near,
)
from gradcheck_suite.core.findings import Found, finding
from gradcheck_suite.core.text import counted

MOST_LINES = 3
"""Lines that a sentence names."""


@dataclass(frozen=True)
class Change:
    """What changed `.grad`, and where.

    Attributes:
        what: a `reset` or an `edit`.
        lines: that may have done it, a few at most; the one of a single line is known.
    """

    what: Literal["reset", "edit", "division"]
    lines: Sequence[str]

    @property
    def line(self) -> str | None:
        """The line, where it is known; it may begin with a library's for one of the user's."""
        return self.lines[0] if len(self.lines) == 1 else None

    def __str__(self) -> str:
        done = "reset" if self.what == "reset" else "changed"
        lines = " or ".join(line.partition(" < ")[0] for line in self.lines)
        return f" (`.grad` was {done} at {lines})"


@dataclass(frozen=True)
class StepFault:
    """What is wrong with a window.

    Attributes:
        name: the diagnosis.
        sentence: what is wrong.
        key: of a parameter that shows it, or None.
        keys: of the parameters that are hit, where others are not.
        kind: the part of the promise.
        causes: of the fault, for which the table of faults has remedies of their own.
        change: what is to be changed, and where.
    """

    name: str
    sentence: str
    key: int | None = None
    keys: Sequence[int] = ()
    kind: str = "gradient"
    causes: tuple[str, ...] = ()
    change: Change | None = None


OF_SUMS = {
    "earlier window": StepFault("stale-window", "the gradient of an earlier step is still in it"),
    "buffer": StepFault(
        "stale-window",
        "what the program has put into `.grad` has the gradient of an earlier step in it, too",
        causes=("buffer",),
    ),
    "empty window": StepFault(
        "stale-window",
        "nothing went backward since the last step, and `.grad` is not empty: the gradient of an"
        " earlier step is still in it",
    ),
    "handed over once": StepFault(
        "stale-window",
        "`.grad` is still the tensor of an earlier step, and nothing of this window was handed"
        " over",
        causes=("handed-over",),
    ),
    "another optimizer's pass": StepFault(
        "stale-window",
        "`.grad` still has the gradient of a backward pass that belonged to another optimizer's"
        " step",
        causes=("other-optimizer",),
    ),
    "all reset": StepFault(
        "no-gradient",
        "nothing of the window is in the gradient: it was reset between backward and the step",
    ),
    "last passes": StepFault(
        "reset-inside-window", "only the last backward passes of the window are in the gradient"
    ),
    "written over": StepFault(
        "reset-inside-window", "results of `torch.autograd.grad` are written over"
    ),
    "dropped": StepFault(
        "dropped-micro-batch", "some backward passes of the window are not in the gradient"
    ),
    "repeated": StepFault(
        "repeated-micro-batch", "a loss goes backward more than once in the window"
    ),
    "torn": StepFault(
        "repeated-micro-batch",
        "a backward pass ended with an exception, and what had arrived by then is in the gradient",
        causes=("exception",),
    ),
    "running sum": StepFault(
        "repeated-micro-batch",
        "earlier losses go backward several times, as when the running sum of the losses goes"
        " backward each time",
    ),
    "rescaled": StepFault(
        "rescaled-accumulator", "the running sum itself is rescaled at every micro-batch"
    ),
    "not a sum": StepFault(
        "not-linear",
        "something else changes `.grad` between the backward passes, such as clipping, noise or a"
        " shared buffer",
        causes=("between-passes",),
    ),
    "clipped": StepFault(
        "clipped",
        "`.grad` is clipped between the backward passes of the window, so that micro-batches that"
        " are in it already weigh less",
        causes=("in-audit",),
    ),
    "hook": StepFault(
        "not-linear",
        "a hook on a parameter changes the gradient of each micro-batch in a way that is no fixed"
        " factor of its elements (clipping, noise, normalization)",
        causes=("between-passes",),
    ),
    "hook again": StepFault(
        "wrong-scale",
        "a hook is on a parameter once more than before, and changes its gradient once more",
        causes=("growing",),
    ),
    "step per pass": StepFault(
        "step-per-micro-batch",
        "the optimizer steps after every micro-batch, where accumulation_steps = {steps}",
        kind="step-count",
    ),
    "step on zeros": StepFault(
        "repeated-step",
        "nothing went backward since the last step and `.grad` is 0, and this step moves parameters"
        " once more (by momentum, averages or decay)",
        kind="step-count",
        causes=("zeros",),
    ),
    "tail": StepFault(
        "tail-dropped",
        "{lost} went backward and never reached a step",
        kind="step-count",
        causes=("in-audit",),
    ),
    "moved": StepFault(
        "stale-parameters",
        "parameters were written between the backward passes of the window, so its micro-batches"
        " were computed with different ones",
    ),
    "moved by another": StepFault(
        "stale-parameters",
        "another optimizer, which trains on the same passes, steps between the micro-batches of"
        " this window",
    ),
    "local": StepFault(
        "not-reduced",
        "only each rank's own gradient is in `.grad` at the step, not reduced over the ranks",
    ),
}
"""What was seen -> the fault of a sum."""


@dataclass(frozen=True)
class Sums:
    """What `.grad` is made of at a step.

    Attributes:
        fault: what is wrong, or None.
        excuse: a finding that says why passes that are missing are no fault, or None.
        removed: parameters whose gradient was taken away after the last pass.
        may_be_right: whether the passes have unequal coefficients, with which the losses may weigh
            rightly.
        by_hand: whether the program put it together itself, from what arrived and was kept
            elsewhere.
        untold: whether it cannot be told if it did, or reset and edited it.
        unlike: whether that is since no sum of what arrived explains most of it.
        first_point: where the same micro-batches went backward at two points, as of SAM, the passes
            at the first one.
    """

    fault: StepFault | None = None
    excuse: Found | None = None
    removed: Sequence[int] = ()
    may_be_right: bool = False
    by_hand: bool = False
    untold: bool = False
    unlike: bool = False
    first_point: Mapping[Source, float] = field(default_factory=dict)


def _fault(
    seen: str,
    key: int | None = None,
    *,
    keys: Sequence[int] = (),
    where: str = "",
    change: Change | None = None,
) -> Sums:
    fault = replace(OF_SUMS[seen], key=key, keys=keys, change=change)
    return Sums(replace(fault, sentence=f"{fault.sentence}{where}{change or ''}"))


def _excuse(name: str, sentence: str, window: StepWindow) -> Sums:
    return Sums(excuse=finding(name, sentence, window.step.place))


class Members:
    """The passes of a window, sorted by what may be asked of them.

    Attributes:
        mean: index of a pass -> its coefficient in `.grad`, the median over parameters.
        own: passes that the window must have.
        optional: passes that another optimizer has stepped on.
        by_hand: passes whose results the program puts into `.grad` itself.
    """

    def __init__(self, window: StepWindow) -> None:
        self.window = window
        self.by_parameter: dict[int, list[tuple[int, float]]] = {i: [] for i in window.passes}
        for index, seen in window.passes.items():
            reached = [
                record.arrivals.keys() & window.coefficients.keys() for record in seen.records
            ]
            for rank, keys in enumerate(reached if window.null else ()):
                keys -= {key for key in keys if (rank, index, key) in window.null}
            for key, coefficients in window.coefficients.items():
                own = [
                    coefficients.get((rank, index), 0.0)
                    for rank, keys in enumerate(reached)
                    if key in keys
                ]
                if own:
                    self.by_parameter[index].append((key, max(own, key=abs)))
        self.mean = {
            i: median(c for _, c in found) if found else 0.0
            for i, found in self.by_parameter.items()
        }
        told = [i for i, found in self.by_parameter.items() if found or not self.is_null(i)]
        self.by_hand = [i for i in told if window.passes[i].by_hand]
        rest = [i for i in told if i not in self.by_hand]
        self.own = [
            i
            for i in rest
            if not window.seen[i] and (self.is_in(i) or not any(window.seen.values()))
        ]
        self.optional = [i for i in rest if window.seen[i]] if self.own else []
        if not self.own:
            rest = [i for i in rest if self.is_in(i)] or rest
        self.required = [i for i in rest if i not in self.optional]

    def is_null(self, index: int) -> bool:
        """Return whether what arrived from a pass was exactly 0, which tells nothing."""
        window = self.window
        records = self.window.passes[index].records
        if not window.null:
            return False
        reached = [
            (rank, index, k)
            for rank, r in enumerate(records)
            for k in r.arrivals
            if k in window.coefficients
        ]
        return bool(reached) and all(place in window.null for place in reached)

    def is_in(self, index: int) -> bool:
        """Return whether a pass is in `.grad`."""
        # a coefficient that is fitted is never exactly 0, and one that was clipped several times
        # may be as small
        return abs(self.mean[index]) > (NEGLIGIBLE if self.window.edit == BY_HAND else 0.0)

    def places(self, indices: Sequence[int]) -> set[Place]:
        """Return where these passes were called."""
        return {self.window.passes[i].site for i in indices}

    def missing_parameters(self) -> list[int]:
        """Return the parameters that a pass reached and that have no gradient."""
        window = self.window
        missing = {
            key
            for index, seen in window.passes.items()
            for rank, record in enumerate(seen.records)
            for key in record.arrivals.keys() - window.coefficients.keys()
            if key in window.keys and (rank, index, key) not in window.null
        }
        return sorted(missing)

    def moved(self, index: int, other: int | None = None) -> bool:
        """Return whether parameters had other values in this pass than in another one, or in the
        window's last one.
        """
        last = self.required[-1] if other is None else other
        points = [self.window.passes[i].records[0].points for i in (index, last)]
        return any(
            points[0].get(k) != points[1].get(k)
            for k in self.window.keys
            if k in points[0] and k in points[1]
        )


def is_alike(window: StepWindow) -> bool:
    """Return whether each pass has one coefficient in all the parameters that it has reached."""
    members = Members(window)
    return all(
        near(c, members.mean[i], 1e-2)
        for i, found in members.by_parameter.items()
        for _, c in found
    )


def judge_sums(
    members: Members, typical_k: int | None, longest: int, stepped_in: Loop | None = None
) -> Sums:
    """Judge whether `.grad` is the sum of the window's passes.

    The first question that is answered yes names the fault.

    Args:
        members: the passes of the window.
        typical_k: the number of passes of most windows in which nothing is missing, where it is
            known.
        longest: the number of passes of the longest of them; 0 where there was none.
        stepped_in: where in its outer loops the program was at the optimizer's last step; None
            where that is not known.
    """
    window = members.window
    if window.local:
        reduced = [str(j) for j, seen in enumerate(window.passes.values()) if seen.reduced]
        which = f": micro-batch {', '.join(reduced)} of the window was, and the others were not"
        some = window.is_reduced and window.coefficients.keys() - {*window.local}
        return _fault("local", keys=[*window.local] if some else (), where=which if reduced else "")
    if not window.passes and any(window.coefficients.values()):
        return _fault("empty window")
    if window.edit == "all reset" or (members.required and not window.coefficients):
        return _fault("all reset")
    if others := _judge_others(members) or _judge_by_hand(members):
        return others
    if torn := [
        i
        for i in members.own
        if members.is_in(i) and any(r.raised for r in window.passes[i].records)
    ]:
        return _fault("torn", keys=[key for key, c in members.by_parameter[torn[0]] if c])
    if window.edit == BY_HAND:
        return _judge_kept(members) or Sums()
    if any(source[1] == UNKNOWN for cs in window.coefficients.values() for source in cs):
        change = _edits(members)
        return _fault("clipped" if _is_clipping(members) else "not a sum", change=change)
    lost = [i for i in members.required if not members.is_in(i)]
    edited = window.fit if window.edit == "free" else None
    is_hidden = edited is not None and bool(edited.lost) and edited.left > MOST_LEFT
    if edited is not None and edited.tells and edited.lost and edited.is_of_copies:
        is_unlike = is_hidden and not edited.is_plausible
        return Sums(untold=True, unlike=True) if is_unlike else Sums(by_hand=True)
    if lost:
        found = _judge_lost(members, lost, typical_k, longest, stepped_in)
        is_untold = (
            found.fault
            and edited
            and ((is_hidden and not edited.is_plausible) or edited.is_blank or not edited.tells)
        )
        return Sums(untold=True, unlike=edited.tells) if is_untold and edited else found
    if unequal := _judge_parameters(members):
        return unequal
    if len(members.required) > 1 and any(members.moved(i) for i in members.required):
        return _fault("moved")
    return Sums()


def _judge_others(members: Members) -> Sums | None:
    """Judge what is in `.grad` of earlier windows, or of another optimizer."""
    window = members.window
    stale = [
        key
        for key, coefficients in window.coefficients.items()
        if any(
            abs(c) > NEGLIGIBLE and (i == EARLIER or 0 <= i < window.before)
            for (_, i), c in coefficients.items()
        )
    ]
    if stale:
        # a copy of a parameter lacks the window as long as nobody writes to it
        of_copies = window.copies and all(
            {i for _, i in window.coefficients[key]} == {EARLIER} for key in stale
        )
        some = stale if of_copies and len(stale) < len(window.coefficients) else ()
        seen = (
            "handed over once"
            if of_copies
            else "buffer"
            if window.edit == BY_HAND
            else "earlier window"
        )
        return _fault(seen, stale[0], keys=some)
    left = [i for i in members.optional if members.is_in(i)]
    if left and not members.places(left) & members.places(members.own):
        return _fault("another optimizer's pass")
    *before, last = members.required or [0]
    between = any(
        at <= last
        for i in before
        for other, at in window.seen[i].items()
        if other != window.optimizer
    )
    if not members.own and between and any(members.is_in(i) for i in before):
        return _fault("moved by another")
    return None


def _judge_by_hand(members: Members) -> Sums | None:
    """Judge a gradient that the program put together: a pass that is written over by the next one
    of the same place.
    """
    places = {True: set[Place](), False: set[Place]()}
    for i in members.by_hand:
        places[abs(members.mean[i]) > 1e-3].add(members.window.passes[i].site)
    if both := places[True] & places[False]:
        return _fault("written over", where=f" ({', '.join(sorted(map(str, both)))})")
    return None


MOST_LEFT = 0.25
"""The share of an edited `.grad` that no sum of the passes explains, from which on they are not told from chance."""
FEWEST_KEPT = 3
"""Gradients put together by hand whose coefficients may show a factor between neighbours: two tasks may have any."""


def _judge_kept(members: Members) -> Sums | None:
    """Judge gradients that the program has kept and put together: a sum that is rescaled each time.

    The coefficients of tasks are the program's. Passes of one line that reach the same parameters
    are micro-batches, and of their coefficients 2, the number of passes, and one over these are
    what adding a buffer to itself or dividing it each time gives.
    """
    window = members.window
    r = len(members.required)
    terms = {
        tuple(term.expression for term in record.terms)
        for i in members.required
        for record in window.passes[i].records
    }
    reached = {
        frozenset(record.arrivals) for i in members.required for record in window.passes[i].records
    }
    if r < FEWEST_KEPT or len(members.places(members.required)) > 1 or len(terms | reached) > 2:
        return None
    values = [members.mean[i] for i in members.required]
    if not all(values) or not is_alike(window):
        return None
    tolerance = max(1e-3, 4 * window.error)
    ratios = [a / b for a, b in pairwise(values)]
    fitting = [
        one
        for one in (1.0, 2.0, 0.5, float(r), 1.0 / r)
        if all(near(ratio, one, tolerance) for ratio in ratios)
    ]
    # in low precision the coefficients may be known so badly that equal ones fit as well
    if not fitting or 1.0 in fitting:
        return None
    listed = ":".join(f"{value / min(map(abs, values)):.3g}" for value in values)
    return _fault("rescaled", where=f" (the micro-batches weigh {listed})")


def _judge_lost(
    members: Members,
    lost: Sequence[int],
    typical_k: int | None,
    longest: int,
    stepped_in: Loop | None,
) -> Sums:
    """Judge passes that are not in `.grad`: discarded on purpose, dropped, or reset."""
    window = members.window
    kept = [i for i in members.required if i not in lost]
    elsewhere = not members.places(lost) & members.places(kept)
    if window.not_finite & set(lost):
        return _excuse("reset-non-finite", "gradients were not finite, and were reset", window)
    if elsewhere and all(set(window.passes[i].consumers) - {window.optimizer} for i in lost):
        said = "passes that another optimizer steps on were reset"
        return _excuse("reset-shared-pass", said, window)
    if all(members.moved(i) for i in lost):
        # another pass at the first point may have been discarded before: it did not stand there
        # with these
        together = {
            i for group in window.kept_apart for _, i in group if (0, lost[-1]) in group
        } or {*lost}
        first = [i for i in lost if i in together and not members.moved(i, lost[-1])]
        return _judge_points(members, first, kept)
    if elsewhere and window.first:
        said = "what other lines sent backward was reset before the first step"
        return _excuse("reset-before-first-step", said, window)
    if elsewhere:
        # `.grad` alone cannot tell a pass that is discarded on purpose (statistics, a warm-up) from
        # a slip
        lines = ", ".join(sorted(place.line for place in members.places(lost)))
        said = "what goes backward here was reset, and is in no step"
        return Sums(excuse=finding("discarded-pass", said, lines))
    if kept and typical_k and len(kept) == typical_k and len(lost) % typical_k == 0:
        return _excuse("discarded-window", "a whole window was reset without a step", window)
    if any(r.raised for r in window.passes[max(lost)].records) and len(kept) == (
        typical_k or len(kept)
    ):
        said = "a window was begun anew after an exception in backward"
        return _excuse("window-begun-anew", said, window)
    begun, ended = (
        window.passes[i].records[0].loop for i in (max(lost), min(kept, default=max(lost)))
    )
    if (
        None not in (stepped_in, begun)
        and begun not in (stepped_in, ended)
        and max(lost) < min(kept)
    ):
        # no step came in this round of the outer loop: not the rest of an epoch, but a window that
        # was given up
        said = (
            f"a window was given up before its end{_resets(members, lost) or ''}: its micro-batches"
            " are in no step"
        )
        return _excuse("window-given-up", said, window)
    if stopped := _stopped(members, lost, kept):
        return _excuse("window-given-up", stopped, window)
    if _is_rest_of_epoch(window, lost, kept, typical_k, longest):
        fault = tail_dropped(len(lost))
        return Sums(replace(fault, sentence=f"{fault.sentence}{_resets(members, lost) or ''}"))
    anew = len(kept) > 1 and max(lost) < min(kept) and weigh_one(window, used_of(window))
    if anew and is_tried(window.passes[max(lost)].site):
        # what is left is a whole mean: the rest of a window that is reset inside would weigh less
        said = (
            f"a window was begun anew{_resets(members, lost) or ''}: what went backward before is in"
            " no step"
        )
        return _excuse("window-begun-anew", said, window)
    hit = {k for i in lost for k, c in members.by_parameter[i] if abs(c) < NEGLIGIBLE}
    whole = all(abs(c) < NEGLIGIBLE for i in lost for _, c in members.by_parameter[i])
    seen = "dropped" if kept and max(lost) > min(kept) else "last passes"
    reset = _resets(members, lost)
    if reset is None and _is_clipping(members):
        # of what clipping by value has cut off, nothing of the earlier passes may be left
        return _fault("clipped", change=_edits(members))
    return _fault(seen, keys=() if whole else [*hit], change=reset)


def _stopped(members: Members, lost: Sequence[int], kept: Sequence[int]) -> str | None:
    """Say that a window was given up on purpose: its reset stands before a `break` or a `return`."""
    if not kept or max(lost) > min(kept):
        return None
    change = _resets(members, lost)
    if change is None or change.line is None or not is_given_up(change.line):
        return None
    return (
        f"an update was stopped before its end (`.grad` was reset at {change.line}, and its loop was"
        f" left): {counted(len(lost), 'micro-batch')} of it are in no step"
    )


def tail_dropped(lost: int) -> StepFault:
    """Return the fault of so many micro-batches that went backward and reached no step."""
    fault = OF_SUMS["tail"]
    return replace(fault, sentence=fault.sentence.format(lost=counted(lost, "micro-batch")))


def _judge_points(members: Members, first: Sequence[int], kept: Sequence[int]) -> Sums:
    """Compare passes at two points, as of SAM: a step is on those at the second one, which the
    first ones led to.
    """
    numbers = f"{counted(len(first), 'micro-batch')} went backward at the first point"
    if 0 < len(kept) < len(first):
        return _fault(
            "dropped",
            where=f" ({numbers}, and {len(kept)} at the point whose gradient is stepped on)",
        )
    passes = members.window.passes
    before, after = ([items_of(passes[i]) for i in at] for at in (first, kept))
    first_mass, mass = (
        sum(weight * count for of_pass in at for weight, count in of_pass) for at in (before, after)
    )
    if len(first) < len(kept):
        said = f"{numbers}, and {len(kept)} at the second one"
    elif mass and not near(first_mass, mass, 1e-3):
        said = (
            f"the losses at the first point weigh {first_mass / mass:.4g} times those at the"
            " second one"
        )
    else:
        said = "what was reset is of their earlier values"
    counts = [[[count for _, count in of_pass] for of_pass in at] for at in (before, after)]
    alike = first if len(first) > 1 and counts[0] == counts[1] else ()
    point = dict.fromkeys(product(range(len(passes[first[0]].records)), alike), 1.0)
    excuse = finding("two-points", f"parameters were written between the passes: {said}")
    return Sums(excuse=excuse, first_point=point)


def weigh_one(window: StepWindow, coefficients: Mapping[Source, float]) -> bool:
    """Return whether some term of the losses weighs 1 in the whole window."""
    weights = defaultdict[tuple[str, ...], float](float)
    for (rank, index), c in coefficients.items():
        for term in window.passes[index].records[rank].terms:
            weights[term.expression] += c * abs(term.weight or 0.0) * term.counts.get(term.own, 0.0)
    return any(near(abs(weight), window.step.scale or 1.0, 1e-2) for weight in weights.values())


def items_of(seen: Seen) -> list[tuple[float, float]]:
    """Return the weight of an item and the number of items of each term of a pass."""
    return [
        (abs(t.weight or 0.0), t.counts.get(t.own, 0.0))
        for record in seen.records
        for t in record.terms
    ]


def _is_rest_of_epoch(
    window: StepWindow,
    lost: Sequence[int],
    kept: Sequence[int],
    typical_k: int | None,
    longest: int,
) -> bool:
    """Return whether passes that were lost are the last ones of an epoch: those before what is
    there.
    """
    if not kept or max(lost) > min(kept):
        return False
    loops = [window.passes[i].records[0].loop for i in (max(lost), min(kept))]
    if None not in loops:
        return loops[0] != loops[1]
    # the program may count on over the reset, so that fewer are there than in a whole window, which
    # a reset for each micro-batch never has
    return 1 < longest >= len(lost) or bool(typical_k and len(lost) < typical_k == len(kept))


def _resets(members: Members, lost: Sequence[int]) -> Change | None:
    """Return where the gradient that was lost was reset: where it was let go, or the lines that may
    have done it.
    """
    window = members.window
    number = max(lost)
    after = next((seen.records[0] for i, seen in window.passes.items() if i > number), None)
    if after is None:
        return None
    if after.reset:
        return Change("reset", [str(after.reset)])
    return _between(window, number, after, is_reset, "reset")


def _edits(members: Members) -> Change | None:
    """Return where `.grad` may have been edited between the passes."""
    window = members.window
    passes = members.required
    if len(passes) < 2:
        return None
    return _between(window, passes[0], window.passes[passes[-1]].records[0], is_edit, "edit")


def _is_clipping(members: Members) -> bool:
    """Return whether clipping is all that may have changed `.grad` between the passes."""
    window = members.window
    passes = members.required
    if len(passes) < 2:
        return False
    last = window.passes[passes[-1]].records[0]
    edits, clips = (
        _between(window, passes[0], last, is_one, "edit") for is_one in (is_edit, is_clipping)
    )
    return edits is not None and clips is not None and edits.lines == clips.lines


def _between(
    window: StepWindow,
    number: int,
    after: PassRecord,
    is_one: Callable[[ast.AST], bool],
    what: Literal["reset", "edit"],
) -> Change | None:
    before = window.passes[number].records[0]
    same_loop = before.loop is not None and before.loop == after.loop
    lines = lines_between(is_one, before.place, after.place, window.step.place, same_loop=same_loop)
    return Change(what, lines) if 0 < len(lines) <= MOST_LINES else None


def _judge_parameters(members: Members) -> Sums | None:
    """Judge passes whose coefficients differ between parameters, or between each other."""
    off = {
        k: c
        for i in members.required
        for k, c in members.by_parameter[i]
        if not near(c, members.mean[i], 1e-3)
    }
    if off:
        key = next(iter(off))
        if any(abs(c) < NEGLIGIBLE for c in off.values()):
            lost = [
                i
                for i in members.required
                if any(abs(c) < NEGLIGIBLE for _, c in members.by_parameter[i])
            ]
            keys = [key for key, c in off.items() if abs(c) < NEGLIGIBLE]
            reset = _resets(members, lost)
            if reset is None and _is_clipping(members):
                return _fault("clipped", key, change=_edits(members))
            return _fault("last passes", key, keys=keys, change=reset)
        seen = "clipped" if _is_clipping(members) else "rescaled"
        return _fault(seen, key, change=_edits(members))
    # what was set to None after the last pass lacks all passes alike, as what was zeroed there does
    missing = members.missing_parameters()
    if missing or members.window.removed:
        return Sums(removed=[*missing, *members.window.removed])
    values = [members.mean[i] for i in members.required if members.by_parameter[i]]
    if values and max(values) - min(values) > 1e-3 * max(map(abs, values)):
        ratios = [a / b for a, b in pairwise(values)]
        listed = ", ".join(f"{ratio:.3g}" for ratio in ratios[:6])
        is_constant = max(ratios) - min(ratios) < 2e-3 * max(ratios)
        seen = "rescaled" if is_constant else "not a sum"
        fault = OF_SUMS["clipped" if _is_clipping(members) and max(ratios) <= 1 else seen]
        change = _edits(members)
        sentence = f"{fault.sentence} (factors between the passes: {listed}){change or ''}"
        # a running mean rescales the sum on purpose: what the losses weigh together decides
        return Sums(replace(fault, sentence=sentence, change=change), may_be_right=True)
    return None


def used_of(window: StepWindow) -> dict[Source, float]:
    """Return the coefficient of each pass, the factor of the program's own hooks on parameters
    included.
    """
    return {
        (rank, index): c * _of_hooks(record, window.keys)
        for index, seen in window.passes.items()
        for rank, record in enumerate(seen.records)
        if (c := window.of_pass((rank, index))) is not None
    }


def _of_hooks(record: PassRecord, keys: Sequence[int]) -> float:
    """Return the factor by which hooks multiply what arrives, 1 where parameters differ."""
    of_keys = record.arrivals.keys() & keys if record.factors else ()
    factors = [record.factors.get(key, 1.0) for key in of_keys]
    return factors[0] if factors and all(near(f, factors[0], 1e-6) for f in factors) else 1.0
