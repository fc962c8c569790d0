"""Naming a fault from weights: the pattern that fits all wrong steps, and whatever else fits them as well.

A name is given alone where the evidence refutes its rivals; where it does not, the name is "a or b".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gradcheck_suite.core.contract import MAX_RANKS
from gradcheck_suite.judge.patterns import (
    INSIDE,
    NEIGHBOURS,
    RANKS,
    Pattern,
    averaged,
    by_place,
    by_rank,
    outside,
    reordered,
    rescaled,
    rounded_to,
)
from gradcheck_suite.judge.weights import Diagnosis, Steps, Weights, listed, times_text

# Factors of a run by which every item of a window may be too heavy or too light, each with its remedy.


LEAST_LOSS_SCALE = 2**7
Value = Callable[[Weights], float | None]
MicroBatches = Callable[[Weights], tuple[int, ...] | None]


@dataclass(frozen=True)
class Factor:
    """A factor with a meaning.

    Attributes:
        value: the factor in a step, or None where the step does not have it.
        text: what it is in a step, as the end of a sentence.
        remedy: what to do about it.
        rare: 1 if it counts only where nothing simpler fits, 2 if two windows must tell it from a coincidence as well.
    """

    value: Value
    text: Callable[[Weights], str]
    remedy: str
    rare: int = 0


DIVIDE_ONCE = "divide each summed loss by the window's count, and by nothing else"
UNDIVIDED = f"a division is left out: {DIVIDE_ONCE}"
TWICE = f"something divides a second time: {DIVIDE_ONCE}"
SHORT = "a short window is divided as if it were whole: divide by its own count"
OTHER_COUNT = "divide by the count of the micro-batches whose gradients are in this step"


def _over_count(count: Callable[[Weights], float | None]) -> Value:
    """Return the window's count over another one; None where there is no such count, or counts do not matter."""

    def value(w: Weights) -> float | None:
        other = None if w.reduction == "sum" else count(w)
        return w.window_count / other if other and other > 0 else None

    return value


def _other_count(micro_batches: MicroBatches, times: Callable[[Weights], float] = lambda w: 1) -> Value:
    """Return the window's count over a multiple of that of other micro-batches; None where there are none."""
    return _over_count(lambda w: None if (chosen := micro_batches(w)) is None else times(w) * w.count_of(chosen))


def _neighbour(step: int) -> MicroBatches:
    """Return the window so many before or after, of the epoch before or after where necessary."""

    def window(w: Weights) -> tuple[int, ...] | None:
        if w.index is None:
            return None
        epoch, index = divmod(w.index + step, len(w.windows))
        return None if w.epoch + epoch < 0 else w.windows[index]

    return window


def _one_more(w: Weights) -> tuple[int, ...] | None:
    return (*w.window, w.window[-1] + 1) if w.window[-1] + 1 < len(w.counts) else None


def _epoch(w: Weights) -> tuple[int, ...] | None:
    return tuple(range(len(w.counts))) if w.windows else None


def _count_so_far(w: Weights) -> float | None:
    if w.index is None:
        return None
    return w.epoch * sum(w.counts) + sum(w.count_of(v) for v in w.windows[: w.index]) + w.window_count


def _items(w: Weights) -> float | None:
    """Return the window's items where they are not what is counted."""
    if not w.items or w.items == w.counts:
        return None
    return float(sum(w.items[j] for j in w.window))


def _with_empty(w: Weights) -> float | None:
    """Return the window's count with the items of each micro-batch without valid targets; None where there is none."""
    empty = [j for j in w.window if not w.counts[j]]
    return w.window_count + sum(w.items[j] for j in empty if w.items) if empty else None


def _k(w: Weights) -> int:
    return w.accumulation_steps


def _short(w: Weights) -> int | None:
    return len(w.window) if len(w.window) != w.accumulation_steps * w.world_size else None


def _part_of_rank(rank: int) -> MicroBatches:
    def part(w: Weights) -> tuple[int, ...] | None:
        own = tuple(j for j in w.window if w.owners and w.owners[j] == rank)
        return own if len(own) < len(w.window) else None

    return part


OF_RANKS = (
    *(
        Factor(
            lambda w, power=power: float(w.world_size) ** power if w.owners else None,  # type: ignore[misc]
            lambda w, what=what: f"{what}, {w.world_size}",  # type: ignore[misc]
            "DistributedDataParallel and fully_shard average gradients over ranks, and all_reduce adds them up: "
            "multiply each rank's share of the loss (summed loss / count of all ranks) by the number of ranks where "
            "gradients are averaged, and leave it as it is where they are added",
        )
        for power, what in (
            (1, "the number of ranks"),
            (-1, "one over the number of ranks"),
            (2, "the square of the number of ranks"),
            (-2, "one over the square of the number of ranks"),
        )
    ),
    *(
        Factor(
            _other_count(_part_of_rank(rank), lambda w, times=times: w.world_size**times),  # type: ignore[misc]
            lambda w, times=times, rank=rank: (  # type: ignore[misc]
                f"the window's count over {'the number of ranks times ' * times}that of rank {rank}, "
                f"{w.window_count:g}/{w.count_of(_part_of_rank(rank)(w) or ()) * w.world_size**times:g}"
            ),
            "add up the counts of all ranks",
        )
        for times in (0, 1)
        for rank in range(MAX_RANKS)
    ),
)

OTHER_COUNTS: tuple[tuple[MicroBatches, Callable[[Weights], float], str], ...] = (
    (_neighbour(-1), lambda w: 1, "the previous window's, {}"),
    (_neighbour(1), lambda w: 1, "the next window's, {}"),
    (lambda w: w.windows[0] if w.windows else None, lambda w: 1, "the first window's, {}"),
    (_epoch, lambda w: 1, "the whole epoch's, {}"),
    (_epoch, lambda w: 1 / len(w.windows), "the mean count of the epoch's windows"),
    (_one_more, lambda w: 1, "that of one micro-batch more, {}"),
    (lambda w: w.window[:-1] if len(w.window) > 1 else None, lambda w: 1, "that without its last micro-batch, {}"),
    (lambda w: w.window[1:] if len(w.window) > 1 else None, lambda w: 1, "that without its first micro-batch, {}"),
)
"""Micro-batches whose count, times a number, a loop may divide by in place of the window's, and what that is, with a
place for the quotient."""

FACTORS = (
    Factor(
        lambda w: (n := _short(w)) and n / _k(w),
        lambda w: f"the short window's micro-batches over accumulation_steps, {len(w.window)}/{_k(w)}",
        SHORT,
    ),
    Factor(
        lambda w: (n := _short(w)) and _k(w) / n,
        lambda w: f"accumulation_steps over the short window's micro-batches, {_k(w)}/{len(w.window)}",
        f"{OTHER_COUNT}, and not by its number of micro-batches",
    ),
    Factor(_k, lambda w: f"accumulation_steps = {_k(w)}", UNDIVIDED),
    *OF_RANKS,
    Factor(lambda w: 1 / _k(w), lambda w: f"1/accumulation_steps = 1/{_k(w)}", TWICE),
    Factor(
        lambda w: len(w.window),
        lambda w: f"the {'short ' if _short(w) else ''}window's micro-batches, {len(w.window)}",
        UNDIVIDED,
        rare=1,
    ),
    Factor(
        lambda w: 1 / len(w.window),
        lambda w: f"one over the {'short ' if _short(w) else ''}window's micro-batches, 1/{len(w.window)}",
        TWICE,
        rare=1,
    ),
    Factor(lambda w: w.window_count, lambda w: f"the window's count, {w.window_count:g}", UNDIVIDED),
    Factor(
        lambda w: 1 / w.window_count,
        lambda w: f"one over the window's count, 1/{w.window_count:g}",
        "a sum is divided by the count, or a mean is divided twice: divide the summed losses by the window's count "
        "once if run.reduction is 'mean', and not at all if it is 'sum'",
    ),
    *(
        Factor(
            _other_count(chosen, times),
            lambda w, words=words, chosen=chosen: (  # type: ignore[misc]
                f"the window's count over {words.format(_over(w, chosen))}"
            ),
            OTHER_COUNT,
            rare=2,
        )
        for chosen, times, words in OTHER_COUNTS
    ),
    Factor(
        _over_count(_count_so_far),
        lambda w: "the window's count over that of all windows up to it",
        "set the count to 0 when a window begins",
        rare=2,
    ),
    *(
        Factor(
            _other_count(lambda w, chosen=chosen: (chosen(w),), times),  # type: ignore[misc]
            lambda w, word=word, named=named: f"the window's count over {named} times that of its {word} micro-batch",  # type: ignore[misc]
            "add up the counts of the window's micro-batches: they are not all alike",
            rare=2,
        )
        for chosen, word in (
            (lambda w: w.window[0], "first"),
            (lambda w: w.window[-1], "last"),
            (lambda w: max(w.window, key=w.counts.__getitem__), "largest"),
        )
        for times, named in ((_k, "accumulation_steps"), (lambda w: len(w.window), "its micro-batches"))
    ),
    Factor(
        _over_count(_items),
        lambda w: f"the window's count over its items, {w.window_count:g}/{_items(w):g}",
        "divide by run.count(batch), which is not the number of items",
    ),
    Factor(
        _over_count(lambda w: (n := _items(w)) and w.window_count + n),
        lambda w: (
            f"the window's count over that and its items together, {w.window_count:g}/({w.window_count:g} + "
            f"{_items(w):g}): one target too many is counted for every item"
        ),
        "count the targets that are not ignored",
    ),
    *(
        Factor(
            _over_count(lambda w, by=by: w.window_count + by * len(w.window)),  # type: ignore[misc]
            lambda w, how=how: f"the window's count over one with {how} for each micro-batch",  # type: ignore[misc]
            "count the targets that the loss divides by, no first or last one more or less",
            rare=2,
        )
        for by, how in ((-1, "one target too few"), (1, "one target too many"))
    ),
    Factor(
        _over_count(lambda w: sum(max(w.counts[j], 1.0) for j in w.window)),
        lambda w: "the window's count over one in which every micro-batch counts at least 1",
        "do not raise the count of a micro-batch: one without valid targets counts 0",
    ),
    *(
        Factor(
            _over_count(count),
            lambda w: f"its count, {w.window_count:g}, over the same made a whole number",
            "a count may be a fraction, as a sum of class weights is: do not make it a whole number",
            rare=1,
        )
        for whole in (math.floor, round, math.ceil)
        for count in (
            lambda w, whole=whole: whole(w.window_count),
            lambda w, whole=whole: sum(whole(w.counts[j]) for j in w.window),
        )
    ),
    *(
        Factor(
            lambda w, power=power: float(_k(w)) ** power,  # type: ignore[misc]
            lambda w, said=said: f"{said}accumulation_steps**0.5, with {_k(w)} accumulation steps",  # type: ignore[misc]
            DIVIDE_ONCE,
            rare=1,
        )
        for power, said in ((0.5, ""), (-0.5, "1/"))
    ),
    Factor(
        _over_count(_with_empty),
        lambda w: "the window's count over that and the items of micro-batches without valid targets",
        "a micro-batch without valid targets counts 0",
    ),
)


def _over(w: Weights, micro_batches: MicroBatches) -> str:
    return f"{w.window_count:g}/{w.count_of(micro_batches(w) or ()):g}"


def fitting_factors(steps: list[Weights], ratios: list[float]) -> Iterator[Factor]:
    """Yield the factors that every step's ratio of observed to right weights is."""
    found = False
    for factor in FACTORS:
        # where something simpler explains the weights, a rare factor is the same number
        if (factor.rare and found) or (factor.rare == 2 and len({w.window_count for w in steps}) < 2):
            continue
        values = [factor.value(w) for w in steps]
        if all(
            v is not None and not w.close(v, 1.0) and w.close(r, v)
            for w, r, v in zip(steps, ratios, values, strict=True)
        ):
            found = True
            yield factor


def constant_meaning(factor: float) -> tuple[str, str]:
    """Return what a factor that is the same in all windows means, and a remedy; empty where it says nothing."""
    if factor == -1:
        return "the sign is wrong", "subtract where you add, or maximise the right quantity"
    exponent = float(np.log2(abs(factor))) if factor else 0.5
    if exponent == round(exponent) and 2 ** abs(exponent) >= LEAST_LOSS_SCALE:
        what = "never divided out" if exponent > 0 else "divided out twice"
        return f"2**{exponent:.0f}, such as a loss scale that is {what}", "unscale the gradients once before the step"
    return "", ""


MOST_NAMES = 3
SEVERAL = "windows of several micro-batches"
NO_COUNT = ", which no usual count or quotient of counts gives"
OF_SEVERAL = f" (only in {SEVERAL})"
NOT_A_SUM = (
    "; or the micro-batches' gradients are combined by a median, a minimum or an agreement of signs in place of a sum: "
    "on the weight probe each element is nonzero in one micro-batch only, so such a combination gives 0"
)
"""What a probe shows as a missing gradient as well."""


def diagnose(violated: Weights, others: Sequence[Weights] = (), *, known_only: bool = False) -> Diagnosis:
    """Name the fault that gives such weights; `unrecognised-weights` where no known one does.

    Args:
        violated: the weights of the step that is violated.
        others: those of other steps, of this run or of another one, in the order of a run.
        known_only: whether factors that change from window to window and are none of the run's are no name.
    """
    steps = [violated, *others]
    wrong = [w for w in steps if not w.is_right]
    fitting = [
        p for p in _fitting(violated, steps, wrong) if not (known_only and p.name == "wrong-scale" and p.priority)
    ]
    # what predicts the steps that are right, too, is preferred
    complete = [p for p in fitting if all(p.fits(w) for w in steps)]
    chosen = _most_special(complete or fitting, wrong)
    if not chosen:
        return _unrecognised(violated)
    names = list(dict.fromkeys(pattern.name for pattern in chosen))[:MOST_NAMES]
    first = {name: next(p.text(violated, wrong) for p in chosen if p.name == name) for name in names}
    rare = _alike(steps) or ("" if complete else _where(violated, steps))
    if rare == OF_SEVERAL and names == ["no-gradient"]:
        rare += NOT_A_SUM
    return Diagnosis(" or ".join(names), "; or: ".join(first.values()) + rare)


def names_nothing(diagnosis: Diagnosis) -> bool:
    """Return whether a diagnosis says no more than that the weights are wrong."""
    return diagnosis.name == "unrecognised-weights"


def _fitting(violated: Weights, steps: Steps, wrong: Steps) -> list[Pattern]:
    if not wrong:
        return []
    scaled = (*_scales(steps, wrong), *rescaled(wrong), *by_place(wrong))
    ranks = (*RANKS, *by_rank(wrong)) if violated.owners else ()
    others = (*outside(violated.accumulation_steps), *averaged(steps), *reordered(steps))
    patterns = (*ranks, *others, *scaled, *INSIDE, *NEIGHBOURS)
    return [p for p in patterns if all(p.fits(w) for w in wrong) and any(p.informs(w) for w in wrong)]


def _most_special(fitting: Sequence[Pattern], wrong: Steps) -> list[Pattern]:
    """Return the patterns of the lowest priority number, with those of the next where nothing tells them apart."""
    if not fitting:
        return []
    lowest = min(p.priority for p in fitting)
    chosen = [p for p in fitting if p.priority == lowest]
    if not any(p.tells(w) for p in chosen for w in wrong):
        chosen += [p for p in fitting if p.priority == lowest + 1]
    return chosen


def _scales(steps: Steps, wrong: Steps) -> list[Pattern]:
    """Return the pattern of weights that are right but for one factor in each window, where they are like that."""
    if any(w.foreign or not len(w.inside) or not np.any(w.ratio) for w in wrong):
        return []
    ratios = [float(w.ratio.mean()) for w in wrong]
    if not all(w.close(w.ratio, ratio) for w, ratio in zip(wrong, ratios, strict=True)):
        return []
    factors = list(fitting_factors(list(wrong), ratios))
    if len(wrong) == 1:
        # one number may be anything: the steps that are right must agree with what it is
        right = [w for w in steps if w.is_right]
        factors = [f for f in factors if all((v := f.value(w)) is None or w.close(v, 1.0) for w in right)]
    constant = wrong[0].close(ratios, ratios[0])
    meaning, remedy = constant_meaning(ratios[0]) if constant else ("", "")
    power = _power_of_steps(wrong, ratios)
    known = bool(factors or constant or power is not None)
    if not known and all(rounded_to(w) for w in wrong):
        return []

    def sentence(w: Weights, wrong: Steps) -> str:
        scale = float(w.ratio.mean())
        said = f"every item of the window weighs {times_text(scale)} what it should"
        if meaning:
            return f"{said}: {meaning}; {remedy}"
        if factors:
            alternatives: dict[str, list[str]] = {}
            for factor in factors[:MOST_NAMES]:
                alternatives.setdefault(factor.remedy, []).append(factor.text(w))
            each = [f"{' or '.join(dict.fromkeys(texts))}: {remedy}" for remedy, texts in alternatives.items()]
            return f"{said}, which is {'; or '.join(each)}"
        if power is not None:
            return (
                f"{said}, and that of each step is {power:.6g} times that of the step before it: something is applied "
                "once more in every step, such as a hook that is registered anew and never removed"
            )
        if len(wrong) == 1:
            return f"{said}{NO_COUNT}: look for a coefficient, a schedule, a hook"
        if constant:
            return (
                f"{said}, in every wrong window alike, whatever its counts: look for a constant, such as a number of "
                "ranks or a coefficient"
            )
        shown = listed([f"{ratio:.6g}" for ratio in ratios], 4)
        look = "look for a schedule, a coefficient, or a count that other windows take part in"
        return f"{said}; over the wrong windows the factors are {shown}{NO_COUNT}: {look}"

    def fits(w: Weights) -> bool:
        if any(w is v for v in wrong):
            return True
        values = [factor.value(w) for factor in factors]
        return w.is_right and any(value is None or w.close(value, 1.0) for value in values)

    return [Pattern("wrong-scale", fits, sentence, 0 if known else 1)]


def _power_of_steps(wrong: Steps, ratios: Sequence[float]) -> float | None:
    """Return the number whose powers the ratios are, by the number of steps before each; None where there is none."""
    before = [w.epoch * len(w.windows) + (w.index or 0) for w in wrong]
    if len(set(before)) < 2 or not all(before) or not min(ratios) > 0:
        return None
    bases = [ratio ** (1 / steps) for ratio, steps in zip(ratios, before, strict=True)]
    return bases[0] if wrong[0].close(bases, bases[0]) else None


KINDS_OF_STEPS: tuple[tuple[str, Callable[[Weights], bool]], ...] = (
    ("short windows", lambda w: len(w.window) < w.accumulation_steps),
    ("whole windows", lambda w: len(w.window) == w.accumulation_steps),
    ("epochs after the first", lambda w: w.epoch > 0),
    ("the first epoch", lambda w: w.epoch == 0),
    ("the first window of the run", lambda w: not w.epoch and not w.index),
    ("windows after the first of the run", lambda w: bool(w.epoch or w.index)),
    ("the first window of an epoch", lambda w: w.index == 0),
    ("windows after the first of an epoch", lambda w: bool(w.index)),
    (SEVERAL, lambda w: len(w.inside) > 1),
    ("windows with a micro-batch without valid targets", lambda w: any(not w.counts[j] for j in w.window)),
)
"""What steps may have in common that are wrong."""


def _alike(steps: Steps) -> str:
    """Return what all wrong steps are and no right one is, as the end of a sentence; empty where there is no such."""
    if all(w.is_right == steps[0].is_right for w in steps) or not all(w.windows for w in steps):
        return ""
    found = (kind for kind, is_one in KINDS_OF_STEPS if all(is_one(w) != w.is_right for w in steps))
    kind = next(found, None)
    return "" if kind is None else f" (only in {kind})"


def _where(violated: Weights, steps: Steps) -> str:
    """Return which steps of the violated run are right, as the end of a sentence."""
    own = [w for w in steps if w.windows == violated.windows and w.counts == violated.counts]
    right = [w for w in own if w.is_right]
    if not right or len(own) == 1:
        return ""
    shown = listed([f"window {w.index} of epoch {w.epoch}" for w in own if not w.is_right])
    return f" (only {shown} of this run; {len(right)} of {len(own)} steps are right)"


def _unrecognised(w: Weights) -> Diagnosis:
    shown = ", ".join(f"{weight:.6g}" for weight in w.observed[w.inside])
    also = f", and micro-batches {w.foreign} of other windows are in the gradient" if w.foreign else ""
    return Diagnosis(
        "unrecognised-weights",
        f"the window's micro-batches weigh {shown} per count, where {w.expected:.6g} is right for each{also}",
    )
