"""The record of one torch optimizer's step in optax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Counterpart:
    """One optimizer of `torch.optim`, and the optax transformation that takes the same steps.

    Attributes:
        torch: name of the class in `torch.optim`.
        optax: the transformations that it is made of.
        differs: where the formulas differ by definition, one phrase each; `make` maps every one of them exactly.
        source: where the two formulas are written.
        make: settings by torch's names -> a transformation whose updates are added to the parameters. JAX traces them,
            but for those that are annotated as `bool` or `int`.
        variants: settings that are worth trying, beside the defaults; the first is none.
        implementations: torch's implementations of the step: some of `single`, `foreach` and `fused`.
        decoupled: whether decay always bypasses the direction; where a setting says so, False.
        coarse: (optax state after a step, settings) -> what a lower precision than that of the parameters does to each
            element of the update, as a bound; None where torch uses none.
        scalars: unit roundoff of the scalars of an update, for implementations that compute them in a lower precision.
    """

    torch: str
    optax: str
    differs: tuple[str, ...]
    source: str
    make: Callable[..., Any]
    variants: tuple[Settings, ...] = ({},)
    implementations: tuple[str, ...] = ("single", "foreach")
    outside: str | None = None
    decoupled: bool = False
    coarse: Callable[[Any, Settings], Any] | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The class's name in lower case."""
        return self.torch.lower()
