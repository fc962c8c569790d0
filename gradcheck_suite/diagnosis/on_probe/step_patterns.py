"""Which micro-batches each step of a wrong number of steps held, and which fault gives that.

A known fault is a simulation: what its steps would hold under a plan. It fits where the loop's steps held the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, zip_longest

from gradcheck_suite.diagnosis.on_probe.probe_weights import held_by
from gradcheck_suite.numerics.comparison import Vector
from gradcheck_suite.schema.plan import Plan

Held = list[frozenset[int]]
"""For each step the indices of the micro-batches that its gradient holds."""
SHOWN = 8
"""Number of steps whose micro-batches are printed."""


def held_by_steps(plan: Plan, steps: Sequence[Vector]) -> Held:
    """Return which micro-batches each step holds, given the weight of each item, (total items,) for each step."""
    return [frozenset(held_by(plan, items)) for items in steps]


def shown(held: Held) -> str:
    """Return what the steps held, in words."""
    texts = [str(sorted(step)) if step else "nothing" for step in held[:SHOWN]]
    return ", ".join(texts) + (f" and {len(held) - SHOWN} more" if len(held) > SHOWN else "")


def fitting_faults(plan: Plan, held: Held) -> dict[str, str]:
    """Return name -> account of the faults whose steps would hold the same, the most special first."""
    found: dict[str, str] = {}
    for name, simulated, account in _simulated(plan):
        if simulated == held:
            found.setdefault(name, account)
    if not held:
        found["never-stepped"] = ": run.optimizer was never stepped"
    if found:
        return found
    return dict(_general(plan, held))


def _right(plan: Plan, epochs: int | None = None) -> Held:
    return [frozenset(window) for window in plan.windows] * (plan.epochs if epochs is None else epochs)


def _simulated(plan: Plan) -> Iterator[tuple[str, Held, str]]:
    """Yield name, what the steps hold, and account of each known fault under a plan that it shows under."""
    k, count, right = plan.accumulation_steps, len(plan.micro_batches), _right(plan)
    if plan.ranks:
        yield from _simulated_over_ranks(plan)
        return
    if plan.has_short_window:
        whole, tail = [w for w in _right(plan, 1) if len(w) == k], frozenset(plan.windows[-1])
        said = f": the short last window (micro-batches {list(plan.windows[-1])}) is never stepped"
        yield "tail-dropped", whole * plan.epochs, f"{said}: its items contribute to no step"
        leaking = [whole[0] | tail, *whole[1:]] if whole else []
        leak = f"{said}, and its gradient leaks into the next epoch's first window"
        yield "tail-leak", whole + leaking * (plan.epochs - 1), leak
        said = f": windows run on from one epoch into the next, {k} micro-batches each; step at the end of every "
        said += "epoch and start the next one's windows anew"
        running_on = _chunks(range(count), plan.epochs, k, across=True, dropped=True)
        yield "windows-across-epochs", running_on, said
        yield "windows-across-epochs", _chunks(range(count), plan.epochs, k, across=True, dropped=False), said
        # transformers 4.45 asks for as many steps as the epochs have whole windows
        whole_windows = plan.epochs * (count // k)
        ended = f"{said}; it ends after {whole_windows} steps, the number of whole windows of its epochs"
        yield "windows-across-epochs", running_on[:whole_windows], ended
    yield from _wrong_epochs(plan)
    singles = [frozenset({j}) for j in range(count)] * plan.epochs
    growing = [frozenset(window[: i + 1]) for window in plan.windows for i in range(len(window))] * plan.epochs
    never_reset = [frozenset(range(min(i + 1, count))) for i in range(count * plan.epochs)]
    for steps in (singles, growing, never_reset):
        if steps != right:
            yield "step-per-micro-batch", steps, ": it stepped once per micro-batch"
    yield (
        "inverted-condition",
        _stepping(plan, lambda i: (i + 1) % k != 0),
        ": it steps after the micro-batches that do not end a window; step where (i + 1) % accumulation_steps == 0",
    )
    for size in sorted({n for n in (*range(2, 9), k - 1, k + 1, 2 * k, k // 2) if n > 1} - {k}):
        said = f": its windows have {size} micro-batches, where accumulation_steps is {k}"
        for across in (False, True):
            for dropped in (False, True):
                steps = _chunks(range(count), plan.epochs, size, across=across, dropped=dropped)
                yield "wrong-window-size", steps, said


def _simulated_over_ranks(plan: Plan) -> Iterator[tuple[str, Held, str]]:
    """Yield the same as `_simulated` for a plan of several ranks, whose windows have micro-batches of each."""
    k, ranks = plan.accumulation_steps, range(plan.world_size)

    def dealt(size: int) -> list[list[frozenset[int]]]:
        """Return each rank's windows of a size."""
        return [_chunks(plan.of_rank(rank), 1, size, across=False, dropped=False) for rank in ranks]

    busy = list(zip(*dealt(k), strict=False))
    yield (
        "dropped-window",
        _united(busy) * plan.epochs,
        ": it stops as soon as one rank has no micro-batch left, while others have some; a rank that has run out of "
        "micro-batches adds zeros, until no rank has any left",
    )
    whole = [parts for parts in busy if all(len(part) == k for part in parts)]
    if len(whole) < len(busy):
        said = f": a window in which some rank has fewer than {k} micro-batches is never stepped"
        yield "tail-dropped", _united(whole) * plan.epochs, f"{said}: its items contribute to no step"
    yield from _wrong_epochs(plan)
    if k > 1:
        said = ": it stepped once per micro-batch"
        yield "step-per-micro-batch", _united(zip_longest(*dealt(1), fillvalue=frozenset())) * plan.epochs, said
    for size in sorted({*range(2, 9), k - 1, k + 1, 2 * k, k // 2} - {0, 1, k}):
        said = f": its windows have {size} micro-batches of each rank, where accumulation_steps is {k}"
        steps = _united(zip_longest(*dealt(size), fillvalue=frozenset()))
        yield "wrong-window-size", steps * plan.epochs, said


def _united(steps: Iterable[Sequence[frozenset[int]]]) -> Held:
    """Return what steps hold, given each rank's part of each."""
    return [frozenset().union(*parts) for parts in steps]


def _wrong_epochs(plan: Plan) -> Iterator[tuple[str, Held, str]]:
    for epochs in range(1, plan.epochs + 3):
        if epochs != plan.epochs:
            said = f": it makes {epochs} pass(es); pass over run.loader run.epochs times"
            yield "wrong-epochs", _right(plan, epochs), said


def _chunks(epoch: Iterable[int], epochs: int, size: int, *, across: bool, dropped: bool) -> Held:
    """Return windows of a size, over the ends of epochs or not, with the shorter rest or without it."""
    passes = [list(epoch) * epochs] if across else [list(epoch)] * epochs
    cut = [one[first : first + size] for one in passes for first in range(0, len(one), size)]
    return [frozenset(chunk) for chunk in cut if len(chunk) == size or not dropped]


def _stepping(plan: Plan, condition: Callable[[int], bool]) -> Held:
    """Return what steps hold that come after micro-batch `i` of an epoch, with a reset after each."""
    held, gathered = [], set()
    for _ in range(plan.epochs):
        for i in range(len(plan.micro_batches)):
            gathered.add(i)
            if condition(i):
                held.append(frozenset(gathered))
                gathered = set()
    return held


def _general(plan: Plan, held: Held) -> Iterator[tuple[str, str]]:
    """Yield name and account of what can be said of steps that no simulation gives."""
    right, kept = _right(plan), [step for step in held if step]
    if len(kept) < len(held) and kept == right:
        yield (
            "empty-step",
            f": {len(held) - len(kept)} of its steps came right after a reset and held nothing; step only where a "
            "window has been accumulated",
        )
    runs = [(step, len(list(group))) for step, group in groupby(held)]
    if len(runs) < len(held) and [step for step, _ in runs] == [step for step, _ in groupby(right)]:
        times = max(n for _, n in runs)
        yield "repeated-step", f": it stepped up to {times} times on the gradient of one window; step once"
    if held and len(held) < len(right) and _is_part(held, right):
        per_epoch = len(plan.windows)
        place = [i for i in range(len(right)) if i not in _places(held, right)]
        missing = ", ".join(f"window {i % per_epoch} of epoch {i // per_epoch}" for i in place[:3])
        yield "dropped-window", f": no step has the gradient of {missing}{' and others' if len(place) > 3 else ''}"


def _places(held: Held, right: Held) -> list[int]:
    """Return where the steps are in the right sequence, as late as possible: what is missing is then the first."""
    places, end = [], len(right)
    for step in reversed(held):
        end = next((i for i in range(end - 1, -1, -1) if right[i] == step), -1)
        places.append(end)
    return places


def _is_part(held: Held, right: Held) -> bool:
    remaining = iter(right)
    return all(step in remaining for step in held)
