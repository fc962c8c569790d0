"""What a window of a built-in loop for several ranks communicates: counted, and by the law of its
wrapper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from gradcheck_suite.core.case import Case
from gradcheck_suite.loops.ranks import RANK_LOOPS
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.ranks import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    ITEMS,
    OF_ACTIVATIONS,
    PLAIN,
    REDUCE_SCATTER,
    Kinds,
    kept_ranks,
    plan_of_windows,
    traffic_per_window,
)

# The laws of the wrappers: which collectives a window takes.
#
# The laws assume a small dense model whose gradients fit into one bucket.


INTEGER, FLAG = 8, 4
"""Bytes of the number of micro-batches that are left, and of whether a parameter is used."""


@dataclass(frozen=True)
class Sharing:
    """What ranks share in a window.

    Attributes:
        shapes: the shapes of the trainable parameters, none of them scalar.
        itemsize: bytes of an element.
        ranks: number of ranks.
        accumulation_steps: micro-batches of each rank.
        items: the number of items of each micro-batch.
    """

    shapes: Sequence[Sequence[int]]
    itemsize: int
    ranks: int
    accumulation_steps: int
    items: int

    @property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return self._bytes(1)

    @property
    def shard(self) -> int:
        """Bytes of a rank's part of all parameters: rows are dealt out evenly, and padded."""
        return self._bytes(self.ranks)

    def _bytes(self, parts: int) -> int:
        total = 0
        for rows, *others in self.shapes:
            size = ceil(rows / parts)
            for other in others:
                size *= other
            total += size * self.itemsize
        return total


Law = Callable[[Sharing], Kinds]


def _reduced_at_once(s: Sharing) -> Kinds:
    return {ALL_REDUCE: (1, s.gradients)}


def _reduced_with_flags(s: Sharing) -> Kinds:
    return {ALL_REDUCE: (2, s.gradients + FLAG * len(s.shapes))}


def _gathered(times: int) -> Law:
    def law(s: Sharing) -> Kinds:
        gathers = times * s.accumulation_steps
        return {ALL_GATHER: (gathers, gathers * s.shard), REDUCE_SCATTER: (1, s.ranks * s.shard)}

    return law


def _sent_after_the_step(s: Sharing) -> Kinds:
    return {**_reduced_with_flags(s), BROADCAST: (len(s.shapes), s.gradients)}


def _added_up_activations(s: Sharing) -> Kinds:
    """Return what one linear layer takes, split by columns: each rank has a part of every output, a
    sum over inputs.
    """
    outputs, inputs = s.shapes[0]
    if inputs % s.ranks:
        return {}
    micro_batches = s.ranks * s.accumulation_steps
    return {OF_ACTIVATIONS: (micro_batches, micro_batches * s.items * outputs * s.itemsize)}


LAWS: dict[str, Law] = {
    "all_reduce": _reduced_at_once,
    "ddp": _reduced_with_flags,
    "ddp_all_used": _reduced_at_once,
    "ddp_bucket_view": _reduced_with_flags,
    "ddp_static_graph": _reduced_at_once,
    "fsdp2": _gathered(1),
    "fsdp2_bfloat16": _gathered(1),
    "fsdp2_resharded": _gathered(2),
    "tensor_parallel": _added_up_activations,
    "zero_redundancy": _sent_after_the_step,
}
"""Wrapper -> what it communicates in a window."""


def predicted(wrapper: str, sharing: Sharing) -> Kinds:
    """Return what a window of a built-in loop takes: the wrapper's, and two all-reduces of the
    loop's own.

    The loop adds up whether micro-batches are left, and the counts. Under tensor parallelism each
    rank has them all.
    """
    if wrapper == "tensor_parallel":
        return LAWS[wrapper](sharing)
    found = Counter({ALL_REDUCE: 2}), Counter({ALL_REDUCE: INTEGER + sharing.itemsize})
    for kind, amounts in LAWS[wrapper](sharing).items():
        for total, amount in zip(found, amounts, strict=True):
            total[kind] += amount  # type: ignore[assignment]
    return {kind: (found[0][kind], found[1][kind]) for kind in found[0]}


# The rows: every loop, counted beside its law.


@dataclass(frozen=True)
class TrafficRow:
    """What a window of a built-in loop communicates, on the model `PLAIN`.

    Attributes:
        loop: its name.
        ranks: number of ranks.
        accumulation_steps: micro-batches of each rank in a window.
        observed: counted on rank 0.
        predicted: what the wrapper's law predicts.
    """

    loop: str
    ranks: int
    accumulation_steps: int
    observed: Kinds
    predicted: Kinds


def traffic_rows(
    names: Iterable[str] = tuple(RANK_LOOPS), *, ranks: int = 2, time_limit_s: float | None = 60.0
) -> list[TrafficRow]:
    """Return the communication of built-in loops for several ranks, counted and predicted.

    Args:
        names: names of loops, from `RANK_LOOPS`.
        ranks: number of ranks.
        time_limit_s: seconds after which a loop is stopped.

    Raises:
        CannotRunHere: so many ranks cannot start.
    """
    rows = []
    model = generated_instance(Case(PLAIN, plan_of_windows(1, 1, ranks))).run().model
    shapes = [tuple(p.shape) for p in model.parameters()]
    with kept_ranks():
        for name in names:
            loop, wrapper = RANK_LOOPS[name], name.partition("/")[0]
            found = traffic_per_window(
                loop, lambda plan: generated_instance(Case(PLAIN, plan)), ranks, time_limit_s
            )
            for traffic in found:
                sharing = Sharing(shapes, 8, ranks, traffic.accumulation_steps, ITEMS)
                expected = predicted(wrapper, sharing)
                rows.append(
                    TrafficRow(
                        name, ranks, traffic.accumulation_steps, dict(traffic.kinds), expected
                    )
                )
    return rows
