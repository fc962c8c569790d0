"""Running statistics after a step in train mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from torch import nn

from gradcheck_suite.port.alterations import Alteration, AlterationFamily
from gradcheck_suite.port.budget import Budget
from gradcheck_suite.port.explanation import Explanation, best_explanation
from gradcheck_suite.port.number_sets import Array, error
from gradcheck_suite.port.pair import is_statistic
from gradcheck_suite.port.search import Repairs
from gradcheck_suite.port.sides import Sides
from gradcheck_suite.port.torch_program import Ref

MOMENTA = (0.1, 0.01, 0.05, 0.5, 0.001, 0.9, 0.99, 0.999)


@dataclass(frozen=True)
class StatisticFault:
    """A running statistic that the port has not.

    Attributes:
        name: torch's buffer.
        cause: a name of `core.causes.CAUSES`.
        words: what the port has.
        off: the relative difference from the nearest array of its size.
    """

    name: str
    cause: str
    words: str
    off: float


@dataclass(frozen=True)
class _StatisticsUpdate:
    """A step of a running statistic.

    Attributes:
        before: the statistic before it.
        batch: that of the batch, as torch takes it.
        biased: likewise, of a variance divided by the number of values.
        momentum: torch's.
        eps: of the layer.
        count: number of values of a channel in the batch.
    """

    before: Array
    batch: Array
    biased: Array
    momentum: float
    eps: float
    count: int

    def taken(self, share: float, batch: Array) -> Array:
        """Return the statistic after a step that takes a share of the batch."""
        return (1 - share) * self.before + share * batch


def _other_momenta(step: _StatisticsUpdate) -> list[float]:
    return [m for m in MOMENTA if m != step.momentum]


MOMENTUM = "a momentum of {:g} instead of {given.momentum:g}"
STATISTICS: tuple[AlterationFamily, ...] = (
    AlterationFamily("not-updated", ".*", "no update", lambda s, _: s.before),
    AlterationFamily(
        "momentum-convention",
        ".*",
        "the old value times {given.momentum:g}",
        lambda s, _: s.taken(1 - s.momentum, s.batch),
    ),
    AlterationFamily("momentum", ".*", MOMENTUM, lambda s, m: s.taken(m, s.batch), _other_momenta),
    AlterationFamily("momentum", ".*", "the statistics of the batch alone", lambda s, _: s.batch),
    AlterationFamily(
        "variance-correction",
        "running_var",
        "the biased variance",
        lambda s, _: s.taken(s.momentum, s.biased),
    ),
    AlterationFamily(
        "momentum-convention",
        "running_var",
        "the old value times {given.momentum:g} and the biased variance",
        lambda s, _: s.taken(1 - s.momentum, s.biased),
    ),
    AlterationFamily(
        "momentum",
        "running_var",
        f"{MOMENTUM} and the biased variance",
        lambda s, m: s.taken(m, s.biased),
        _other_momenta,
    ),
    AlterationFamily(
        "momentum",
        "running_var",
        "the statistics of the batch alone and the biased variance",
        lambda s, _: s.biased,
    ),
    AlterationFamily(
        "variance-correction",
        "running_var",
        "the variance corrected twice",
        lambda s, _: s.taken(s.momentum, s.batch * s.count / (s.count - 1)),
    ),
    AlterationFamily(
        "eps-place",
        "running_var",
        "the variance with eps",
        lambda s, _: s.taken(s.momentum, s.batch + s.eps),
    ),
)
"""What people write in place of torch's (1 - momentum) * old + momentum * new."""


def statistic_faults(sides: Sides, allowed: float) -> Iterator[StatisticFault]:
    """Yield the running statistics that the port does not have after a forward in train mode."""
    extras = sides.jax_run(sides.given).extras
    after = sides.torch_program(sides.given).after
    for name, value in after.items():
        before = np.asarray(sides.state[name])
        if not is_statistic(name) or np.array_equal(before, value):
            continue
        nearest = _nearest(value, extras)
        if nearest <= allowed:
            continue
        step = _step_of(sides, name, before, value)

        def fits(one: Alteration, step: _StatisticsUpdate = step) -> Explanation[Alteration] | None:
            return Explanation(one) if _nearest(one.make(step), extras) <= allowed else None

        own = name.rpartition(".")[2]
        others = chain.from_iterable(r.alterations(step) for r in STATISTICS if r.is_of(own))
        found = best_explanation(others, fits, Budget())
        if found is None:
            yield StatisticFault(name, "unknown", "other values", nearest)
        else:
            yield StatisticFault(name, found.value.cause, found.value.words, nearest)


def _nearest(value: Array, extras: Sequence[Array]) -> float:
    # by size alone: the port's order of statistics, and their names, are its own
    alike = [e for e in extras if e.size == value.size and e.dtype.kind == "f"]
    return min((error(e.reshape(value.shape), value) for e in alike), default=float("inf"))


def _step_of(sides: Sides, name: str, before: Array, after: Array) -> _StatisticsUpdate:
    part = sides.pair.module.get_submodule(name.rpartition(".")[0])
    momentum = getattr(part, "momentum", None) or 0.1
    # solved for what the batch must have been: old and new value are known
    batch = (after - (1 - momentum) * before) / momentum
    count = _count(sides, name, part)
    # flax divides by the number of values, torch by one less
    biased = batch * (count - 1) / count
    return _StatisticsUpdate(
        before,
        batch,
        biased,
        momentum,
        getattr(part, "eps", 1e-5),
        count,
    )


def _count(sides: Sides, name: str, part: nn.Module) -> int:
    """Return the number of values of a channel in the batch."""
    program = sides.torch_program(sides.given)
    for call in program.calls:
        if "batch_norm" in call.name and any(r == Ref("state", name) for r in call.refs):
            x = Repairs().run(program).get(call.args[0])
            # 2 at least, since torch's variance of one value is NaN
            return max(int(x.numel() // x.shape[1]), 2)
    return 2
