"""Is `.grad` the sum of the window's passes? One table of rules, each with the question that it
asks of the evidence of a window.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from typing import Literal

import numpy as np

from gradcheck_suite.auditing.events import BY_HAND, FREE, PassRecord
from gradcheck_suite.auditing.evidence import (
    Columns,
    Mask,
    Numbers,
    WindowEvidence,
    are_near,
    columns_where,
    in_any_row,
)
from gradcheck_suite.auditing.places import (
    is_clipping,
    is_conditional,
    is_edit,
    is_given_up,
    is_mask,
    is_reset,
    is_skipped,
    is_tried,
    is_write,
    lines_between,
)
from gradcheck_suite.auditing.replay import (
    EARLIER,
    UNKNOWN,
    BackwardPass,
    Fit,
    Source,
    StepWindow,
    near,
)
from gradcheck_suite.auditing.rules import Change, Need, Rule, Sighting, in_order, names
from gradcheck_suite.auditing.vectors import size
from gradcheck_suite.core.text import counted

MOST_LINES = 3
"""Lines that a sentence names."""
MOST_LEFT = 0.25
"""The share of an edited `.grad` that no sum of the passes explains, from which on they are not told from chance."""
FEWEST_LOST = 6
"""Passes that windows of one pass lose in turn, from which on that is no decision for some steps."""
FEWEST_KEPT = 3
"""Gradients put together by hand whose coefficients may show a factor between neighbours: two tasks may have any."""

FEWEST_WINDOWS = 3
"""Windows that leave out the same micro-batches, from which on that is no choice of the program's."""

E = WindowEvidence
Found = Sighting | bool | None


# What stands in `.grad` beside the window's passes, or in place of them.


def _is_local(e: E) -> Found:
    """Ask whether `.grad` is each rank's own."""
    window = e.window
    if not window.local:
        return None
    reduced = [str(j) for j in range(len(e.indices)) if e.pass_of(j).reduced]
    which = f": micro-batch {', '.join(reduced)} of the window was, and the others were not"
    some = window.is_reduced and window.coefficients.keys() - {*window.local}
    return Sighting(more=which if reduced else "", keys=[*window.local] if some else ())


def _is_of_earlier_step(e: E) -> bool:
    """Ask whether `.grad` is not empty, without a backward since the previous step."""
    return not e.indices and any(e.window.coefficients.values())


def _is_empty(e: E) -> bool:
    """Ask whether nothing of the passes is left."""
    is_gone = bool(e.required) and not e.window.coefficients
    return e.window.edit == "all reset" or is_gone


def _is_handed_over_once(e: E) -> bool:
    """Return whether a copy of a parameter lacks the window, as long as nobody writes to it."""
    only_earlier = {EARLIER}
    return e.window.copies and all(
        {i for _, i in e.window.coefficients[key]} == only_earlier for key in e.stale
    )


def _of_copies(e: E) -> Found:
    """Ask whether copies of parameters still have the gradient of an earlier step."""
    if not e.stale or not _is_handed_over_once(e):
        return None
    some = e.stale if len(e.stale) < len(e.keys) else ()
    return Sighting(key=e.stale[0], keys=some)


def _of_buffer(e: E) -> Found:
    """Ask whether what the program puts into `.grad` has an earlier window in it."""
    return Sighting(key=e.stale[0]) if e.stale and e.window.edit == BY_HAND else None


def _of_earlier_windows(e: E) -> Found:
    """Ask whether passes of earlier windows stand in `.grad`."""
    return Sighting(key=e.stale[0]) if e.stale else None


def _of_another_optimizer(e: E) -> bool:
    """Ask whether a pass that another optimizer has stepped on is left in `.grad`."""
    left = [j for j in e.optional if e.in_sum[j]]
    return bool(left) and not e.places(left) & e.places(e.own)


def _is_moved_by_another(e: E) -> bool:
    """Ask whether another optimizer, which shares the passes of the window, steps between them on what
    a later one of them uses.
    """
    if e.own or len(e.required) < 2:
        return False
    *before, last = e.required
    window = e.window
    steps = list(chain.from_iterable(_other_steps(window, e.indices[j]) for j in before))
    between = any(at <= e.indices[last] for at in steps)
    if not between or not e.in_sum[before].any():
        return False
    # each task may step on a head of its own, which no other pass of the window uses
    return _is_moved_between([e.record(j) for j in e.required])


def _is_moved_between(passes: Sequence[PassRecord]) -> bool:
    """Return whether a parameter that several passes reach had other values in a later one."""
    values = dict[int, int | None]()
    for record in passes:
        for key in record.arrivals:
            value = record.points.get(key)
            if values.setdefault(key, value) != value:
                return True
    return False


def _other_steps(window: StepWindow, index: int) -> Sequence[int]:
    """Return at which numbers of passes other optimizers have stepped on one."""
    return [at for other, at in window.seen[index].items() if other != window.optimizer]


def _is_written_over(e: E) -> Found:
    """Ask whether a result of `torch.autograd.grad` is written over by the next one of its line:
    the last one alone is there.
    """
    found = _results(e)
    is_last_alone = len(found.there) == 1 and found.gone and max(found.gone) < found.there[0]
    return _at_places(e, found.gone) if is_last_alone else None


def _is_left_out(e: E) -> Found:
    """Ask whether some results of one line are put into `.grad`, and others are not."""
    found = _results(e)
    return _at_places(e, found.gone) if found.there and found.gone else None


@dataclass(frozen=True)
class _Results:
    """Results of `torch.autograd.grad`, of lines of which some are in `.grad` and some are not.

    Attributes:
        there: those in `.grad`.
        gone: the others.
    """

    there: Columns
    gone: Columns


def _results(e: E) -> _Results:
    is_there = np.abs(e.mean) > _least_there(e)
    there = columns_where(e.by_hand & is_there)
    gone = [j for j in columns_where(e.by_hand & ~is_there) if e.indices[j] not in e.window.hidden]
    both = e.places(there) & e.places(gone)
    return _Results(
        there=[j for j in there if e.places([j]) & both],
        gone=[j for j in gone if e.places([j]) & both],
    )


def _least_there(e: E) -> float:
    """Return the coefficient up to which a result is not in `.grad`.

    In low precision it is known badly. A result that may be 0 is then taken for it where several
    others are alike: it is no small share of a task.
    """
    values = np.abs(e.mean[e.by_hand])
    unknown = 2 * e.window.error * size(values)
    others = values[values > unknown]
    are_alike = len(others) > 1 and np.ptp(others) <= unknown < others.min() / 2
    return max(1e-3, unknown) if are_alike else 1e-3


def _at_places(e: E, columns: Columns) -> Sighting:
    return Sighting(more=f" ({', '.join(sorted(map(str, e.places(columns))))})")


def _is_torn(e: E) -> Found:
    """Ask whether a pass that ended with an exception is in `.grad`."""
    for j in e.own:
        if e.in_sum[j] and _has_raised(e, j):
            row = np.nan_to_num(e.coefficients[:, j])
            return Sighting(keys=[e.keys[int(k)] for k in np.flatnonzero(row)])
    return None


def _has_raised(e: E, column: int) -> bool:
    return any(record.raised for record in e.pass_of(column).records)


def _is_scaled_unequally(e: E) -> Found:
    """Ask whether a GradScaler has divided by a scale by which not all losses of the window were
    multiplied.
    """
    scale = e.window.step.scale
    terms = list(chain.from_iterable(e.record(j).terms for j in e.required))
    if not scale or e.lost or len(terms) != len(e.required) or not all(t.factors for t in terms):
        return None
    # a scale is the last number by which a loss is multiplied, and the first one on its way back
    if len({(term.expression, term.factors[1:]) for term in terms}) > 1:
        return None
    scales = [term.factors[0] for term in terms]
    is_of_step = [near(one, scale, 1e-6) for one in scales]
    if all(is_of_step) or not any(is_of_step):
        return None
    listed = ", ".join(f"{one:g}" for one in dict.fromkeys(scales))
    return Sighting({"scales": listed, "scale": f"{scale:g}"})


# Gradients that the program has put together itself.


def _is_misplaced(e: E) -> Found:
    """Ask whether parameters have exchanged their gradients."""
    keys = [*e.window.misplaced]
    return Sighting(key=keys[0], keys=keys) if _are_exchanged(e) else None


def _is_copied(e: E) -> Found:
    """Ask whether parameters have a copy of another one's gradient, which this one has, too."""
    keys = [*e.window.misplaced]
    return Sighting(key=keys[0], keys=keys) if keys and not _are_exchanged(e) else None


def _are_exchanged(e: E) -> bool:
    of = e.window.misplaced
    return len(of) > 1 and len({*of.values()}) == len(of)


def _is_rescaled_by_program(e: E) -> Found:
    """Ask whether gradients that the program has kept are put together as a sum that is rescaled
    each time.

    The coefficients of tasks are the program's. Passes of one line that reach the same parameters
    are micro-batches, and of their coefficients 2, the number of passes, and one over these are
    what adding a buffer to itself or dividing it each time gives.
    """
    r = len(e.composed)
    if e.window.edit != BY_HAND or r < FEWEST_KEPT or not e.are_micro_batches:
        return None
    values = e.mean[e.composed]
    if not values.all() or not e.is_alike:
        return None
    tolerance = max(1e-3, 4 * e.window.error)
    ratios = values[:-1] / values[1:]
    # in low precision the coefficients may be known so badly that equal ones fit as well
    shares = np.array([1.0, 2.0, 0.5, r, 1 / r])
    is_equal, *others = [bool(are_near(ratios, share, tolerance).all()) for share in shares]
    if is_equal or not any(others):
        return None
    listed = ":".join(f"{value / np.abs(values).min():.3g}" for value in values)
    return Sighting(more=f" (the micro-batches weigh {listed})")


def _is_left_out_each_time(windows: Sequence[E]) -> Found:
    """Ask whether the same micro-batches of each window are not in what the program puts together.

    In one window a program may have chosen: another one tells.
    """
    first = windows[0]
    gone = _gone(first)
    if len(windows) < FEWEST_WINDOWS or not gone or any(_gone(one) != gone for one in windows):
        return None
    numbers = [str(first.composed.index(j)) for j in gone]
    return Sighting({"gone": ", ".join(numbers), "number": len(first.composed)})


def _gone(e: E) -> Columns:
    """Return the micro-batches that are not in a sum which has several others alike."""
    if e.window.edit != BY_HAND or not e.are_micro_batches:
        return []
    values = np.abs(e.mean[e.composed])
    least = max(1e-3, 4 * e.window.error) * values.max()
    there = values[values > least]
    gone = [j for j, value in zip(e.composed, values, strict=True) if value <= least]
    is_sum = len(there) > 1 and np.ptp(there) <= alike_within(e.window) * there.max()
    # what was moved between is of another point, as the first one of two
    last = e.composed[-1]
    return gone if is_sum and not any(e.moved(j, last) for j in gone) else []


def _is_added_twice_each_time(windows: Sequence[E]) -> Found:
    """Ask whether the first or the last micro-batch of each window weighs twice what the others do in
    what the program puts together.
    """
    places = {_doubled(one) for one in windows}
    if len(windows) < FEWEST_WINDOWS or len(places) > 1:
        return None
    place = places.pop()
    return None if place is None else Sighting({"which": "first" if place == 0 else "last"})


def _doubled(e: E) -> int | None:
    """Return the place of the one micro-batch that weighs twice what all others do, -1 for the last
    one; None where there is none at an end.
    """
    if e.window.edit != BY_HAND or len(e.composed) < FEWEST_KEPT or not e.are_micro_batches:
        return None
    tolerance = alike_within(e.window)
    values = e.mean[e.composed]
    if not values.all():
        return None  # what explains nothing of a window is 0, and twice 0
    for place, others in ((0, values[1:]), (-1, values[:-1])):
        is_twice = near(float(values[place]), 2 * float(others[0]), tolerance)
        if is_twice and np.ptp(others) <= tolerance * np.abs(others).max():
            return place
    return None


def _is_fitted(e: E) -> bool:
    """Ask whether a sum of what the passes have brought is `.grad`, as one that is put together."""
    return e.window.edit == BY_HAND


def _edited(e: E) -> Fit | None:
    """Return the fit of a `.grad` that is edited after the last pass."""
    return e.window.fit if e.window.edit == FREE else None


def is_hidden(fit: Fit) -> bool:
    """Return whether passes were reset, and most of what is left over is none of theirs."""
    return bool(fit.lost) and fit.left > MOST_LEFT


def _are_copies(e: E) -> bool:
    """Return whether passes that were reset are in `.grad`, as the program has kept copies."""
    fit = _edited(e)
    return fit is not None and fit.is_identifiable and bool(fit.lost) and fit.is_of_copies


def _is_of_copies(e: E) -> bool:
    """Ask whether `.grad` is put together from copies of what was reset."""
    return _are_copies(e)


def _is_like_by_chance(e: E) -> bool:
    """Return whether a `.grad` that looks put together from copies may be something else."""
    fit = _edited(e)
    if fit is None or not _are_copies(e) or not is_hidden(fit):
        return False
    return e.history.unlike or not fit.is_plausible


def _is_covered(e: E) -> bool:
    """Return whether something else covers what an edited `.grad` has of the passes."""
    fit = _edited(e)
    if fit is None or not e.lost or not fit.is_identifiable:
        return False
    return fit.is_blank or (is_hidden(fit) and (e.history.unlike or not fit.is_plausible))


def _is_too_small(e: E) -> bool:
    """Return whether an edited `.grad` has too few elements to tell its passes apart."""
    fit = _edited(e)
    return fit is not None and bool(e.lost) and not fit.is_identifiable


_UNLIKE = (
    "`.grad` is put together by hand, or was reset and edited: no sum of what the backward"
    " passes of the window have brought explains most of it"
)
LIKENESS = Need[E]("unlike-gradient", _UNLIKE, _is_like_by_chance)
UNCOVERED = Need[E]("unlike-gradient", _UNLIKE, _is_covered)
ENOUGH_ELEMENTS = Need[E](
    "too-few-elements",
    "`.grad` is put together by hand, or was reset and edited: the model has too few elements"
    " for so many micro-batches, or their gradients are too much alike in its dtype, to tell"
    " which of them are in it",
    _is_too_small,
)
TOLD_APART = (LIKENESS, UNCOVERED, ENOUGH_ELEMENTS)


# What was changed between the passes.


def _is_masked_in_some(e: E) -> Found:
    """Ask whether elements of a `.grad` are set to 0 after some passes, and stand there after others.

    The same elements each time are the program's decision: the gradient is that of the sum, masked.
    """
    keys = [key for key, is_fixed in e.window.masked.items() if not is_fixed]
    if not keys:
        return None
    some = keys if len(keys) < len(e.keys) else ()
    return Sighting(key=keys[0], keys=some, change=_masks(e))


def _is_left_of_last(e: E) -> Found:
    """Ask whether an edit has set to 0 what the last pass has not reached, and that is no mask of the
    program's: it is another one in other windows, or its line has left after an earlier pass what it
    then sets to 0.
    """
    left = e.window.left_of_last
    if not left or e.window.edit != FREE:
        return None
    keys = [key for key, one in left.items() if one.varies]
    change = _masks_after_last(e)
    if not keys and change is not None:
        between = _masks(e)
        is_one_line = between is not None and between.lines == change.lines
        keys = [key for key, one in left.items() if one.is_written and is_one_line]
    if not keys:
        return None
    some = keys if len(keys) < len(e.keys) else ()
    return Sighting(key=keys[0], keys=some, change=change)


def _is_masked(e: E) -> Found:
    """Ask whether elements of a `.grad` are set to 0 between the passes, and none of them stands there
    after another one.
    """
    if not e.window.masked:
        return None
    change = _masks(e)
    line = None if change is None else change.line
    parameters = counted(len(e.window.masked), "parameter")
    return Sighting({"parameters": parameters}, where=line or _at_step(e))


def _is_unknown(e: E) -> bool:
    """Return whether something that no event explains stands in `.grad`."""
    return any(index == UNKNOWN for _, index in chain.from_iterable(e.sums))


def _is_clipped_between(e: E) -> Found:
    """Ask whether clipping between the passes is what no fixed factor explains."""
    return Sighting(change=_edits(e)) if _is_unknown(e) and _is_clipping(e) else None


def _is_edited_between(e: E) -> Found:
    """Ask whether an edit between the passes is what no fixed factor explains."""
    return Sighting(change=_edits(e)) if _is_unknown(e) else None


# Passes that are not in `.grad`.


def _at_step(e: E) -> str:
    return str(e.window.step.place)


def _is_elsewhere(e: E) -> bool:
    """Return whether no pass of the lines whose passes are lost is in `.grad`."""
    return not e.places(e.lost) & e.places(e.kept)


def _comes_first(e: E) -> bool:
    """Return whether what is lost came before what is kept."""
    return bool(e.kept) and max(e.lost) < min(e.kept)


def _is_reset_non_finite(e: E) -> Found:
    lost = {e.indices[j] for j in e.lost}
    return Sighting(where=_at_step(e)) if e.window.not_finite & lost else None


def _is_reset_shared(e: E) -> Found:
    """Ask whether another optimizer steps on all that is lost."""
    if not e.lost or not _is_elsewhere(e):
        return None
    own = {e.window.optimizer}
    is_shared = all(e.pass_of(j).consumers.keys() - own for j in e.lost)
    return Sighting(where=_at_step(e)) if is_shared else None


def _first_point(e: E) -> Columns:
    """Return the lost passes at a first point, as of SAM, from which the parameters were moved.

    Empty where there is none.
    """
    if not e.lost or not all(e.moved(j) for j in e.lost):
        return []
    last = e.lost[-1]
    # another pass at the first point may have been discarded before: it did not stand there with
    # these
    groups = [group for group in e.window.kept_apart if (0, e.indices[last]) in group]
    together = {index for _, index in chain.from_iterable(groups)}
    return [
        j for j in e.lost if (not together or e.indices[j] in together) and not e.moved(j, last)
    ]


def _has_fewer_at_second_point(e: E) -> Found:
    first = len(_first_point(e))
    numbers = {"first": counted(first, "micro-batch"), "second": len(e.kept)}
    return Sighting(numbers) if 0 < len(e.kept) < first else None


def _has_two_points(e: E) -> Found:
    """Compare passes at two points: a step is on those at the second one, which the first ones led
    to.
    """
    first = _first_point(e)
    if not first:
        return None
    before = [items_of(e.pass_of(j)) for j in first]
    after = [items_of(e.pass_of(j)) for j in e.kept]
    mass = _mass(after)
    if len(first) < len(e.kept):
        number = counted(len(first), "micro-batch")
        said = f"{number} went backward at the first point, and {len(e.kept)} at the second one"
    elif mass and not near(_mass(before), mass, 1e-3):
        said = (
            f"the losses at the first point weigh {_mass(before) / mass:.4g} times those at the"
            " second one"
        )
    else:
        said = "what was reset is of their earlier values"
    return Sighting(more=said, weights=_of_first_point(e, first, before, after))


Items = Sequence[tuple[float, float]]
"""The weight of an item and the number of items, of each term of a pass."""


def _mass(passes: Sequence[Items]) -> float:
    return sum(weight * count for weight, count in chain.from_iterable(passes))


def _of_first_point(
    e: E, first: Columns, before: Sequence[Items], after: Sequence[Items]
) -> Mapping[Source, float]:
    """Return the passes at the first point, where they are the micro-batches of the second one."""
    counts = [[[count for _, count in items] for items in passes] for passes in (before, after)]
    if len(first) < 2 or counts[0] != counts[1]:
        return {}
    ranks = range(len(e.pass_of(first[0]).records))
    return dict.fromkeys(product(ranks, [e.indices[j] for j in first]), 1.0)


def _is_before_first_step(e: E) -> Found:
    is_first = bool(e.lost) and e.window.first and _is_elsewhere(e)
    return Sighting(where=_at_step(e)) if is_first else None


def _is_discarded(e: E) -> Found:
    """Ask whether what a line sends backward is reset.

    `.grad` alone cannot tell a pass that is discarded on purpose (statistics, a warm-up) from a
    slip.
    """
    if not e.lost or not _is_elsewhere(e):
        return None
    return Sighting(where=", ".join(sorted(place.line for place in e.places(e.lost))))


def _is_whole_window(e: E) -> Found:
    """Ask whether whole windows were reset, and a whole one is left."""
    k = e.history.typical_k
    if not e.lost or not k or len(e.kept) != k or len(e.lost) % k:
        return None
    if k == 1 and _is_lost_each_time(e):
        return None
    return Sighting(where=_at_step(e))


def _is_lost_each_time(e: E) -> bool:
    """Return whether each window loses as many passes since windows have several of them.

    A program that skips some steps of one micro-batch skips another number each time.
    """
    before = e.history.discards
    lost = len(e.lost)
    is_alike = before.is_steady and before.lost == lost
    return is_alike and (before.windows + 1) * lost >= FEWEST_LOST


def _is_begun_anew_after_exception(e: E) -> Found:
    if not e.lost or not _has_raised(e, max(e.lost)):
        return None
    is_whole = e.history.typical_k in (None, 0, len(e.kept))
    return Sighting(where=_at_step(e)) if is_whole else None


def _is_given_up_by_loop(e: E) -> Found:
    """Ask whether no step came in this round of the outer loop: then it is not the rest of an
    epoch, but a window that was given up.
    """
    if not e.lost or not _comes_first(e):
        return None
    begun = e.record(max(e.lost)).loop
    ended = e.record(min(e.kept)).loop
    stepped_in = e.history.stepped_in
    if begun is None or stepped_in is None or begun in (stepped_in, ended):
        return None
    return Sighting({"reset": where_reset(e, e.lost) or ""}, where=_at_step(e))


def _is_stopped(e: E) -> Found:
    """Ask whether a window was given up on purpose: its reset stands before a `break` or a
    `return`.
    """
    change = where_reset(e, e.lost) if e.lost and _comes_first(e) else None
    if change is None or change.line is None or not is_given_up(change.line):
        return None
    numbers = {"line": change.line, "lost": counted(len(e.lost), "micro-batch")}
    return Sighting(numbers, where=_at_step(e))


def _is_rest_of_epoch(e: E) -> Found:
    """Ask whether what is lost are the last passes of an epoch: those before what is there."""
    if not e.lost or not _comes_first(e) or not _is_rest(e):
        return None
    return Sighting(
        {"lost": counted(len(e.lost), "micro-batch")}, more=str(where_reset(e, e.lost) or "")
    )


def _is_rest(e: E) -> bool:
    begun = e.record(max(e.lost)).loop
    ended = e.record(min(e.kept)).loop
    if begun is not None and ended is not None:
        return begun != ended
    k = e.history.typical_k
    lost = len(e.lost)
    # the program may count on over the reset, so that fewer are there than in a whole window, which
    # a reset for each micro-batch never has
    return 1 < e.history.longest >= lost or bool(k and lost < k == len(e.kept))


def _is_begun_anew(e: E) -> Found:
    """Ask whether a window was begun anew on purpose.

    What is left is as many passes as windows have in which nothing is missing, or a whole mean: the
    rest of a window that is reset inside would be fewer, and weigh less.
    """
    if not e.lost or len(e.kept) < 2 or not _comes_first(e):
        return None
    if not _is_whole_after_condition(e) and not _is_whole_mean_after_leaving(e):
        return None
    return Sighting({"reset": where_reset(e, e.lost) or ""}, where=_at_step(e))


def _is_whole_after_condition(e: E) -> bool:
    """Return whether the reset came under a condition, and as many passes follow it as in windows in
    which nothing is missing.

    One that comes each time is that of an epoch, whose rest is lost.
    """
    change = where_reset(e, e.lost)
    if change is None or change.line is None or not is_conditional(change.line):
        return False
    return len(e.kept) == e.history.typical_k


def _is_whole_mean_after_leaving(e: E) -> bool:
    """Return whether the program goes on elsewhere after the reset, and what it then steps on weighs
    as a whole mean.
    """
    change = where_reset(e, e.lost)
    leaves = change is not None and change.line is not None and is_skipped(change.line)
    if not leaves and not is_tried(e.pass_of(max(e.lost)).site):
        return False
    return weigh_one(e.window, pass_coefficients(e.window))


def _is_cut_off(e: E) -> Found:
    """Ask whether clipping by value has cut off all of the earlier passes."""
    is_cut = bool(e.lost) and where_reset(e, e.lost) is None and _is_clipping(e)
    return Sighting(change=_edits(e)) if is_cut else None


def _is_dropped(e: E) -> Found:
    """Ask whether passes are missing that came after some which are there."""
    return _missing(e) if e.lost and e.kept and max(e.lost) > min(e.kept) else None


def _has_only_last(e: E) -> Found:
    return _missing(e) if e.lost else None


def _missing(e: E) -> Sighting:
    """Return in which parameters passes are missing, and what has reset them."""
    missing = e.missing[:, e.lost]
    is_whole = bool((missing == e.reached[:, e.lost]).all())
    hit = [e.keys[int(k)] for k in np.flatnonzero(missing.any(1))]
    return Sighting(keys=() if is_whole else hit, change=where_reset(e, e.lost))


# Coefficients that differ between parameters, or between passes.


def _first_off(e: E) -> int:
    """Return the parameter that shows it first."""
    return e.keys[int(np.argwhere(e.off.T)[0][1])]


def _is_lost_in_some(e: E) -> Mask:
    """Return (rows, columns), where a pass is missing that is there in other parameters."""
    return e.off & e.missing


def _lost_columns(e: E) -> Columns:
    """Return the required passes that are missing in some parameters."""
    is_missing = in_any_row(e.missing)
    return [j for j in e.required if is_missing[j]]


def _is_reset_in_some(e: E) -> Found:
    """Ask whether passes are missing in some parameters."""
    missing = _is_lost_in_some(e)
    reset = where_reset(e, _lost_columns(e)) if missing.any() else None
    # clipping may have cut them off
    if not missing.any() or (reset is None and _is_clipping(e)):
        return None
    keys = [e.keys[int(k)] for k in np.flatnonzero(missing.any(1))]
    return Sighting(key=_first_off(e), keys=keys, change=reset)


def _is_clipped_in_some(e: E) -> Found:
    return _is_rescaled_in_some(e) if e.off.any() and _is_clipping(e) else None


def _is_rescaled_in_some(e: E) -> Found:
    """Ask whether a pass weighs another number in some parameters."""
    return Sighting(key=_first_off(e), change=_edits(e)) if e.off.any() else None


def _is_taken_away(e: E) -> Found:
    """Ask whether parameters have lost their gradient after the last pass.

    What was set to None there lacks all passes alike, as what was zeroed there does.
    """
    keys = [*e.missing_parameters(), *e.window.removed]
    return Sighting(keys=keys) if keys else None


def _ratios(e: E) -> Numbers | None:
    """Return what each pass weighs of the next one, where they weigh different numbers.

    A running mean rescales the sum on purpose: what the losses weigh together decides.
    """
    is_known = in_any_row(e.reached)
    values = e.mean[[j for j in e.required if is_known[j]]]
    if not len(values) or np.ptp(values) <= 1e-3 * np.abs(values).max() or e.weighs_rightly():
        return None
    return values[:-1] / values[1:]


def _unequal(e: E, ratios: Numbers) -> Sighting:
    listed = ", ".join(f"{ratio:.3g}" for ratio in ratios[:6])
    return Sighting(more=f" (factors between the passes: {listed})", change=_edits(e))


def _is_clipped_each_time(e: E) -> Found:
    ratios = _ratios(e)
    if ratios is None or ratios.max() > 1 or not _is_clipping(e):
        return None
    return _unequal(e, ratios)


def _is_rescaled_each_time(e: E) -> Found:
    ratios = _ratios(e)
    if ratios is None or np.ptp(ratios) >= 2e-3 * ratios.max():
        return None
    return _unequal(e, ratios)


def _is_changed_each_time(e: E) -> Found:
    ratios = _ratios(e)
    return None if ratios is None else _unequal(e, ratios)


def _is_moved(e: E) -> Found:
    """Ask whether the passes had different parameters when they began.

    A write between a forward and its backward is one, too, also where it is taken back before the
    next forward.
    """
    pairs = list(pairwise(e.required))
    moved = next((pair for pair in pairs if e.moved(*pair)), None)
    if moved is None:
        return None
    first, last = moved
    # what a line writes to is not known: it is no place of the fault
    return Sighting(more=str(_between(e, first, e.record(last), is_write, "write") or ""))


# Hooks of the program, and edits after the last pass.


@dataclass(frozen=True)
class Hooked:
    """A parameter whose gradient a hook changes.

    Attributes:
        key: of the parameter.
        is_fixed: whether by the same factors in each pass of the window.
        is_new: whether by other factors than before, with one more hook than before.
    """

    key: int
    is_fixed: bool
    is_new: bool


def _hooks(e: E) -> Sequence[Hooked]:
    """Return the parameters with hooks, in the order in which they were seen."""
    # a reduction is no fixed factor
    passes = [seen for seen in e.window.passes.values() if not seen.by_hooks]
    hooked = [seen for seen in passes if any(record.hooked for record in seen.records)]
    if not hooked:
        return []
    found: dict[tuple[int, int], Hooked] = {}
    own = {*e.window.keys}
    for seen in hooked:
        for rank, record in enumerate(seen.records):
            for key in record.hooked.keys() & own:
                same = record.hooked[key]
                before = found.get((rank, key))
                # between windows a factor may change, as one that warms up does
                is_fixed = before is None or (before.is_fixed and same)
                is_new = key in record.again and not same
                was_new = before is not None and before.is_new
                found[rank, key] = Hooked(key, is_fixed, is_new or was_new)
    return [*found.values()]


def _is_hooked_again(e: E) -> Found:
    return next((Sighting(key=one.key) for one in _hooks(e) if one.is_new), None)


def _is_hook_changing(e: E) -> Found:
    return next((Sighting(key=one.key) for one in _hooks(e) if not one.is_fixed), None)


def _is_hooked(e: E) -> Found:
    keys = sorted({one.key for one in _hooks(e)})
    if not keys:
        return None
    return Sighting({"parameters": counted(len(keys), "parameter")}, keys=keys)


def _is_written(e: E) -> bool:
    """Ask whether results of `torch.autograd.grad` are beside an edit that nothing explains."""
    return e.window.edit == FREE and bool(e.by_hand.any())


def _is_edited(e: E) -> Found:
    return Sighting(where=_at_step(e)) if e.window.edit == FREE else None


# Where `.grad` was changed.


def where_reset(e: E, lost: Columns) -> Change | None:
    """Return where the gradient that was lost was reset: where it was let go, or the lines that may
    have done it.
    """
    last = max(lost)
    if last + 1 == len(e.indices):
        return None
    after = e.record(last + 1)
    # of parameters that no optimizer has stepped on yet, and of those of master copies, it is not
    # known whose they are
    reset = after.resets.get(e.window.optimizer) or after.resets.get(None)
    if reset:
        return Change("reset", [str(reset)])
    return _between(e, last, after, is_reset, "reset")


def _edits(e: E) -> Change | None:
    """Return where `.grad` may have been edited between the passes."""
    if len(e.required) < 2:
        return None
    return _between(
        e,
        e.required[0],
        e.record(e.required[-1]),
        is_edit,
        "edit",
    )


def _masks(e: E) -> Change | None:
    """Return where elements of a `.grad` may have been set to 0 between the passes."""
    if len(e.indices) < 2:
        return None
    return _between(
        e,
        0,
        e.record(len(e.indices) - 1),
        is_mask,
        "edit",
    )


def _masks_after_last(e: E) -> Change | None:
    """Return where elements of a `.grad` may have been set to 0 after the last pass."""
    last = e.record(len(e.indices) - 1)
    step = e.window.step.place
    lines = lines_between(
        is_mask,
        last.place,
        step,
        step,
        same_loop=False,
    )
    return Change("edit", lines) if len(lines) == 1 else None


def _is_clipping(e: E) -> bool:
    """Return whether clipping is all that may have changed `.grad` between the passes."""
    edits = _edits(e)
    if edits is None:
        return False
    clips = _between(
        e,
        e.required[0],
        e.record(e.required[-1]),
        is_clipping,
        "edit",
    )
    return clips is not None and edits.lines == clips.lines


def _between(
    e: E,
    first: int,
    after: PassRecord,
    is_one: Callable[[ast.AST], bool],
    what: Literal["reset", "edit", "write"],
) -> Change | None:
    before = e.record(first)
    same_loop = before.loop is not None and before.loop == after.loop
    step = e.window.step.place
    lines = lines_between(
        is_one,
        before.place,
        after.place,
        step,
        same_loop=same_loop,
    )
    return Change(what, lines) if 0 < len(lines) <= MOST_LINES else None


# What the losses weigh with the coefficients of their passes.


def alike_within(window: StepWindow) -> float:
    """Return by how much coefficients that a program has put together may differ where they are one
    number.

    In low precision a sum rounds each of its terms.
    """
    return max(1e-2, min(window.error, ROUGHLY))


ROUGHLY = 5e-2
"""Difference of coefficients from which on they are a program's own, however badly they are known."""


def weigh_one(window: StepWindow, coefficients: Mapping[Source, float]) -> bool:
    """Return whether some term of the losses weighs 1 in the whole window."""
    weights = defaultdict[tuple[str, ...], float](float)
    for (rank, index), c in coefficients.items():
        for term in window.passes[index].records[rank].terms:
            weights[term.expression] += c * abs(term.weight or 0.0) * term.counts.get(term.own, 0.0)
    return any(near(abs(weight), window.step.scale or 1.0, 1e-2) for weight in weights.values())


def items_of(seen: BackwardPass) -> list[tuple[float, float]]:
    """Return the weight of an item and the number of items of each term of a pass."""
    terms = list(chain.from_iterable(record.terms for record in seen.records))
    return [(abs(term.weight or 0.0), term.counts.get(term.own, 0.0)) for term in terms]


def pass_coefficients(window: StepWindow) -> dict[Source, float]:
    """Return the coefficient of each pass, the factor of the program's own hooks on parameters
    included.
    """
    found: dict[Source, float] = {}
    unknown = list[Source]()
    for index, seen in window.passes.items():
        for rank, record in enumerate(seen.records):
            coefficient = window.coefficient_of((rank, index))
            if coefficient is not None:
                found[rank, index] = coefficient * _of_hooks(record, window.keys)
            elif _is_zero(window, rank, index):
                unknown.append((rank, index))
    return {**found, **_of_zero(window, unknown, found)} if unknown else found


def _is_zero(window: StepWindow, rank: int, index: int) -> bool:
    """Return whether all that has arrived in a pass of backward was exactly 0."""
    record = window.passes[index].records[rank]
    keys = record.arrivals.keys() & {*window.keys}
    is_known = bool(keys) and not record.by_hand
    return is_known and all((rank, index, key) in window.null for key in keys)


def _of_zero(
    window: StepWindow, sources: Sequence[Source], others: Mapping[Source, float]
) -> Mapping[Source, float]:
    """Return the coefficient of passes in which exactly 0 has arrived, as of a saturated loss.

    Nothing shows it, and any would give this gradient. But such a pass is a micro-batch of its
    window, by whose length the others are divided: it has the coefficient of those of its line,
    where these have one.
    """
    found: dict[Source, float] = {}
    for rank, index in sources:
        site = window.passes[index].site
        alike = [c for (_, other), c in others.items() if window.passes[other].site == site]
        if alike and all(near(c, alike[0], 1e-3) for c in alike):
            found[rank, index] = alike[0]
    return found


def _of_hooks(record: PassRecord, keys: Sequence[int]) -> float:
    """Return the factor by which hooks multiply what arrives, 1 where parameters differ."""
    of_keys = record.arrivals.keys() & keys if record.factors else ()
    factors = [record.factors.get(key, 1.0) for key in of_keys]
    return factors[0] if factors and all(near(f, factors[0], 1e-6) for f in factors) else 1.0


# The table.


_REPEATED_RESCALING = "the running sum itself is rescaled at every micro-batch"
_CHANGED = (
    "something else changes `.grad` between the backward passes, such as clipping, noise or a"
    " shared buffer"
)
_CLIPPED = (
    "`.grad` is clipped between the backward passes of the window, so that micro-batches that"
    " are in it already weigh less"
)
_ONLY_LAST = "only the last backward passes of the window are in the gradient"
_DROPPED = "some backward passes of the window are not in the gradient"


def _clipped(name: str, holds: Callable[[E], Found], needs: Sequence[Need[E]] = ()) -> Rule[E]:
    return Rule(
        name,
        "clipped",
        holds,
        _CLIPPED,
        needs,
        causes=("in-audit",),
    )


def _rescaled(name: str, holds: Callable[[E], Found], needs: Sequence[Need[E]] = ()) -> Rule[E]:
    return Rule(
        name,
        "rescaled-accumulator",
        holds,
        _REPEATED_RESCALING,
        needs,
    )


def _changed(name: str, holds: Callable[[E], Found], needs: Sequence[Need[E]] = ()) -> Rule[E]:
    return Rule(
        name,
        "not-linear",
        holds,
        _CHANGED,
        needs,
        causes=("between-passes",),
    )


ALL_RESET = Rule[E](
    "all reset",
    "no-gradient",
    _is_empty,
    "nothing of the window is in the gradient: it was reset between backward and the step",
)
LEFT_OUT = Rule[Sequence[E]](
    "left out each time",
    "dropped-micro-batch",
    _is_left_out_each_time,
    "what the program puts into `.grad` lacks some of the micro-batches that it has sent backward:"
    " number {gone} of {number} in each window, counted from 0",
)
ADDED_TWICE = Rule[Sequence[E]](
    "added twice each time",
    "repeated-micro-batch",
    _is_added_twice_each_time,
    "what the program puts into `.grad` has the {which} micro-batch of each window twice",
)
TAIL = Rule[E](
    "rest of an epoch",
    "tail-dropped",
    _is_rest_of_epoch,
    "{lost} went backward and never reached a step",
    TOLD_APART,
    causes=("in-audit",),
    kind="step-count",
)
_EDITS = in_order(
    Rule[E](
        "masked",
        "edited-gradient",
        _is_masked,
        "elements of `.grad` are set to 0 between the backward passes, in {parameters}, and nothing"
        " stands in them at the step, which is the program's decision",
    ),
    Rule[E]("results written", "composed-gradient", _is_written, is_silent=True),
    Rule[E](
        "edited",
        "edited-gradient",
        _is_edited,
        "`.grad` is edited between the last backward pass and the step, which is the program's"
        " decision",
    ),
)
_HOOKS = in_order(
    Rule[E](
        "hook again",
        "wrong-scale",
        _is_hooked_again,
        "a hook is on a parameter once more than before, and changes its gradient once more",
        causes=("growing",),
    ),
    Rule[E](
        "changing hook",
        "not-linear",
        _is_hook_changing,
        "a hook on a parameter changes the gradient of each micro-batch in a way that is no fixed"
        " factor of its elements (clipping, noise, normalization)",
        causes=("between-passes",),
    ),
    Rule[E](
        "fixed hook",
        "hook-factor",
        _is_hooked,
        "a hook changes what arrives at {parameters}, by the same factors in each pass",
    ),
    of_faults=names(_EDITS),
)
_AFTER = (*names(_HOOKS), *names(_EDITS))
_UNEQUAL = in_order(
    Rule[E]("reset in some", "reset-inside-window", _is_reset_in_some, _ONLY_LAST, TOLD_APART),
    _clipped("clipped in some", _is_clipped_in_some, TOLD_APART),
    _rescaled("rescaled in some", _is_rescaled_in_some, TOLD_APART),
    Rule[E]("taken away", "removed-gradient", _is_taken_away, needs=TOLD_APART, is_silent=True),
    _clipped("clipped each time", _is_clipped_each_time, TOLD_APART),
    _rescaled("rescaled each time", _is_rescaled_each_time, TOLD_APART),
    _changed("changed each time", _is_changed_each_time, TOLD_APART),
    Rule[E](
        "moved",
        "stale-parameters",
        _is_moved,
        "parameters had other values when one backward pass of the window began than when another one"
        " did: they were written between the micro-batches, or between a forward and its backward",
        TOLD_APART,
        causes=("between-passes",),
    ),
    of_faults=_AFTER,
)
_LOST = in_order(
    Rule[E](
        "not finite",
        "reset-non-finite",
        _is_reset_non_finite,
        "gradients were not finite, and were reset",
        (LIKENESS,),
    ),
    Rule[E](
        "another's passes",
        "reset-shared-pass",
        _is_reset_shared,
        needs=(LIKENESS,),
        is_silent=True,
    ),
    Rule[E](
        "fewer at the second point",
        "dropped-micro-batch",
        _has_fewer_at_second_point,
        f"{_DROPPED} ({{first}} went backward at the first point, and {{second}} at the point whose"
        " gradient is stepped on)",
        TOLD_APART,
    ),
    Rule[E](
        "two points",
        "two-points",
        _has_two_points,
        "parameters were written between the passes: ",
        (LIKENESS,),
    ),
    Rule[E](
        "before the first step",
        "reset-before-first-step",
        _is_before_first_step,
        "what other lines sent backward was reset before the first step",
        (LIKENESS,),
    ),
    Rule[E](
        "discarded pass",
        "discarded-pass",
        _is_discarded,
        "what goes backward here was reset, and is in no step",
        (LIKENESS,),
    ),
    Rule[E](
        "whole window",
        "discarded-window",
        _is_whole_window,
        "a whole window was reset without a step",
        (LIKENESS,),
    ),
    Rule[E](
        "begun anew after an exception",
        "window-begun-anew",
        _is_begun_anew_after_exception,
        "a window was begun anew after an exception in backward",
        (LIKENESS,),
    ),
    Rule[E](
        "given up",
        "window-given-up",
        _is_given_up_by_loop,
        "a window was given up before its end{reset}: its micro-batches are in no step",
        (LIKENESS,),
    ),
    Rule[E](
        "stopped",
        "window-given-up",
        _is_stopped,
        "an update was stopped before its end (`.grad` was reset at {line}, and its loop was"
        " left): {lost} of it are in no step",
        (LIKENESS,),
    ),
    TAIL,
    Rule[E](
        "begun anew",
        "window-begun-anew",
        _is_begun_anew,
        "a window was begun anew{reset}: what went backward before is in no step",
        (LIKENESS,),
    ),
    _clipped("clipped off", _is_cut_off, TOLD_APART),
    Rule[E]("dropped", "dropped-micro-batch", _is_dropped, _DROPPED, TOLD_APART),
    Rule[E]("last passes", "reset-inside-window", _has_only_last, _ONLY_LAST, TOLD_APART),
    below=names(_UNEQUAL),
    of_faults=_AFTER,
)
_WHOLE = in_order(
    Rule[E](
        "local",
        "not-reduced",
        _is_local,
        "only each rank's own gradient is in `.grad` at the step, not reduced over the ranks",
    ),
    Rule[E](
        "empty window",
        "stale-window",
        _is_of_earlier_step,
        "step() was called without a backward() since the previous step, and `.grad` is not empty:"
        " the gradient of an earlier step is still in it",
    ),
    ALL_RESET,
    Rule[E](
        "handed over once",
        "stale-window",
        _of_copies,
        "`.grad` is still the tensor of an earlier step, and nothing of this window was handed"
        " over",
        causes=("handed-over",),
    ),
    Rule[E](
        "buffer",
        "stale-window",
        _of_buffer,
        "what the program has put into `.grad` has the gradient of an earlier step in it, too",
        causes=("buffer",),
    ),
    Rule[E](
        "earlier window",
        "stale-window",
        _of_earlier_windows,
        "the gradient of an earlier step is still in it",
    ),
    Rule[E](
        "another optimizer's pass",
        "stale-window",
        _of_another_optimizer,
        "`.grad` still has the gradient of a backward pass that belonged to another optimizer's"
        " step",
        causes=("other-optimizer",),
    ),
    Rule[E](
        "moved by another",
        "stale-parameters",
        _is_moved_by_another,
        "another optimizer, which trains on the same passes, steps between the micro-batches of"
        " this window",
    ),
    Rule[E](
        "written over",
        "reset-inside-window",
        _is_written_over,
        "results of `torch.autograd.grad` are written over",
    ),
    Rule[E](
        "left out",
        "dropped-micro-batch",
        _is_left_out,
        "some results of `torch.autograd.grad` are not in the gradient that is put together from them",
    ),
    Rule[E](
        "torn",
        "repeated-micro-batch",
        _is_torn,
        "a backward pass ended with an exception, and what had arrived by then is in the gradient",
        causes=("exception",),
    ),
    Rule[E](
        "scaled unequally",
        "step-per-micro-batch",
        _is_scaled_unequally,
        "the losses of the window are multiplied by {scales}, and a GradScaler divides their sum by"
        " {scale}: its scale has changed between the micro-batches, as by `update()`",
        causes=("scaler",),
    ),
    Rule[E](
        "misplaced",
        "misplaced-gradient",
        _is_misplaced,
        "parameters have exchanged their gradients: what arrived at each of them in the backward"
        " passes is in the `.grad` of another one",
    ),
    Rule[E](
        "copied",
        "misplaced-gradient",
        _is_copied,
        "`.grad` is what arrived at another parameter in the backward passes, and has nothing of its"
        " own",
    ),
    _rescaled("rescaled by the program", _is_rescaled_by_program),
    Rule[E]("fitted", "composed-gradient", _is_fitted, is_silent=True),
    Rule[E](
        "masked in some",
        "reset-inside-window",
        _is_masked_in_some,
        "elements of `.grad` are set to 0 after a backward pass of the window and not after each of"
        " them, so that they lack micro-batches",
    ),
    Rule[E](
        "left of the last",
        "reset-inside-window",
        _is_left_of_last,
        "what the last backward pass of the window has not reached is set to 0 in `.grad`, so that"
        " these elements lack the micro-batches before it",
    ),
    _clipped("clipped between", _is_clipped_between),
    _changed("edited between", _is_edited_between),
    Rule[E]("copies", "composed-gradient", _is_of_copies, needs=(LIKENESS,), is_silent=True),
    below=(*names(_LOST), *names(_UNEQUAL), *names(_EDITS)),
    of_faults=names(_HOOKS),
)
RULES: Sequence[Rule[E]] = (*_WHOLE, *_LOST, *_UNEQUAL, *_HOOKS, *_EDITS)
"""What the sum of a window may show."""
