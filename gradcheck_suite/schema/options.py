"""How a loop is verified: the options that the command line, the pytest plugin and Python share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from gradcheck_suite.errors import UsageError
from gradcheck_suite.schema.case import DEVICES, DTYPES
from gradcheck_suite.schema.contract import checked_assumptions, checked_autocast

OPTIMIZER_NAMES = (
    *("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "adadelta", "adamax", "nadam", "radam"),
    *("rprop", "asgd", "adafactor", "lbfgs", "muon", "sparseadam", "normalized"),
)
"""The names of `optimizers.OPTIMIZERS`, which cannot be imported without torch; a test holds the two equal."""
MAX_RANKS = 4
"""Ranks that a verification may start on one machine."""
DEFAULT_TIME_LIMIT = 30.0
"""Seconds that the loop may take on one case; a generated case takes milliseconds."""
SECOND_OPINION_S = 60.0
"""Seconds that one verification spends on JAX's second opinion."""


@dataclass(frozen=True)
class VerifyOptions:
    """What one verification draws, and how long it may take.

    Attributes:
        examples: number of cases to draw, at least 1.
        seed: seed of the drawn cases; the same seed and versions draw the same cases.
        dtype: dtype of parameters and data, one of `DTYPES`.
        device: `"cpu"` or `"cuda"`.
        ranks: number of processes of `torch.distributed` that train together, 1 to `MAX_RANKS`.
        optimizer: one of `OPTIMIZER_NAMES`, or None for one whose step changes nothing, in some cases `normalized`.
        assumes: names from `ASSUMPTIONS`, in addition to those that the loop declares.
        autocast: dtype in which the loop may compute its losses under `torch.autocast`, one of `AUTOCAST_DTYPES`; None
            for what the loop declares.
        time_limit_s: time limit of the loop on one case, in seconds; None for no limit.
        quiet_loop: whether to discard what the loop prints.
        second_opinion_s: seconds after which JAX computes no further window of a user's problem. It computes at least
            one window.

    Raises:
        UsageError: a value is out of range.
    """

    examples: int = 200
    seed: int = 0
    dtype: str = "float64"
    device: str = "cpu"
    optimizer: str | None = None
    assumes: tuple[str, ...] = ()
    autocast: str | None = None
    time_limit_s: float | None = DEFAULT_TIME_LIMIT
    second_opinion_s: float = SECOND_OPINION_S
    quiet_loop: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "assumes", tuple(sorted(checked_assumptions(self.assumes))))
        checked_autocast(self.autocast)
        if not isinstance(self.quiet_loop, bool):
            raise UsageError(f"quiet_loop must be True or False, got {self.quiet_loop!r}")
        if not _is_integer(self.examples) or self.examples < 1:
            raise UsageError(f"examples must be a positive integer, got {self.examples!r}")
        if not _is_integer(self.ranks) or not 1 <= self.ranks <= MAX_RANKS:
            raise UsageError(f"ranks must be a number from 1 to {MAX_RANKS}, got {self.ranks!r}")
        if not _is_integer(self.seed):
            raise UsageError(f"seed must be an integer, got {self.seed!r}")
        for name, allowed in (("dtype", DTYPES), ("device", DEVICES), ("optimizer", (None, *OPTIMIZER_NAMES))):
            if (value := getattr(self, name)) not in allowed:
                raise UsageError(f"{name} must be one of {', '.join(filter(None, allowed))}; got {value!r}")
        if self.time_limit_s is not None and not (_is_number(self.time_limit_s) and self.time_limit_s > 0):
            raise UsageError(f"time_limit_s must be a positive number of seconds or None, got {self.time_limit_s!r}")
        if not (_is_number(self.second_opinion_s) and self.second_opinion_s >= 0):
            raise UsageError(f"second_opinion_s must be a number of seconds, 0 or more, got {self.second_opinion_s!r}")

    def replace(self, **changes: Any) -> VerifyOptions:
        """Return the options with some fields changed; `UsageError` names a field that does not exist."""
        names = [field.name for field in fields(self)]
        if unknown := sorted(changes.keys() - set(names)):
            raise UsageError(f"expected some of {', '.join(names)}; got {', '.join(unknown)}")
        return replace(self, **changes)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)
