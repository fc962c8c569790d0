"""Running statistics after a step in train mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import nn

from gradcheck_suite.port.budget import Budget
from gradcheck_suite.port.explanation import Explanation, best_explanation
from gradcheck_suite.port.number_sets import Array, error
from gradcheck_suite.port.pair import is_statistic
from gradcheck_suite.port.search import Repairs
from gradcheck_suite.port.sides import Sides
from gradcheck_suite.port.torch_program import Ref

MOMENTA = (0.1, 0.01, 0.05, 0.5, 0.001, 0.9, 0.99, 0.999)


StatisticFault = tuple[str, str, str, float]
"""A running statistic that the port has not: torch's buffer, the cause, what the port has, the relative difference from
the nearest array of its size."""


def statistic_faults(sides: Sides, allowed: float) -> Iterator[StatisticFault]:
    """Yield the running statistics that the port does not have after a forward in train mode."""
    extras = sides.jax_run(sides.given).extras
    after = sides.torch_program(sides.given).after

    def fits(other: tuple[str, str, Array]) -> Explanation[tuple[str, str, Array]] | None:
        return Explanation(other) if _nearest(other[2], extras) <= allowed else None

    for name, value in after.items():
        before = sides.state[name]
        if not is_statistic(name) or np.array_equal(before, value):
            continue
        nearest = _nearest(value, extras)
        if nearest <= allowed:
            continue
        others = _alternatives(sides, name, np.asarray(before), value)
        found = best_explanation(others, fits, Budget())
        cause, words = found.value[:2] if found is not None else ("unknown", "other values")
        yield name, cause, words, nearest


def _nearest(value: Array, extras: Sequence[Array]) -> float:
    alike = [e for e in extras if e.size == value.size and e.dtype.kind == "f"]
    return min((error(e.reshape(value.shape), value) for e in alike), default=float("inf"))


def _alternatives(
    sides: Sides, name: str, before: Array, after: Array
) -> Iterator[tuple[str, str, Array]]:
    """Yield what people write in place of torch's (1 - momentum) * old + momentum * new."""
    part = sides.pair.module.get_submodule(name.rpartition(".")[0])
    own = getattr(part, "momentum", None) or 0.1
    batch = (after - (1 - own) * before) / own
    n = _count(sides, name, part)
    options = [(batch, "")]
    options += (
        [(batch * (n - 1) / n, "the biased variance")] if name.endswith("running_var") else []
    )
    yield "not-updated", "no update", before
    for variance, words in options:
        if words:
            yield "variance-correction", words, (1 - own) * before + own * variance
        more = f" and {words}" if words else ""
        yield (
            "momentum-convention",
            f"the old value times {own:g}{more}",
            own * before + (1 - own) * variance,
        )
        for m in MOMENTA:
            if m != own:
                yield (
                    "momentum",
                    f"a momentum of {m:g} instead of {own:g}{more}",
                    (1 - m) * before + m * variance,
                )
        yield "momentum", f"the statistics of the batch alone{more}", variance
    if name.endswith("running_var"):
        yield (
            "variance-correction",
            "the variance corrected twice",
            (1 - own) * before + own * batch * n / (n - 1),
        )
        yield "eps-place", "the variance with eps", after + own * getattr(part, "eps", 1e-5)


def _count(sides: Sides, name: str, part: nn.Module) -> int:
    """Return the number of values of a channel in the batch."""
    program = sides.torch_program(sides.given)
    for call in program.calls:
        if "batch_norm" in call.name and any(r == Ref("state", name) for r in call.refs):
            x = Repairs().run(program).get(call.args[0])
            return max(int(x.numel() // x.shape[1]), 2)
    return 2
