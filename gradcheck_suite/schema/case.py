"""Cases: everything that a run depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from gradcheck_suite.errors import UsageError
from gradcheck_suite.schema.plan import Plan, plan_from_json
from gradcheck_suite.schema.spec import ProblemSpec, problem_from_json

SCHEMA = 1
DTYPES = ("float64", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
MAX_SEED = 2**32 - 1


@dataclass(frozen=True, repr=False)
class Case:
    """Everything that one run depends on.

    Attributes:
        problem: a generated problem, or the `FILE.py:NAME` of a user's problem.
        plan: the split of the items into micro-batches, windows and epochs.
        dtype: dtype of parameters and floating-point inputs, one of `DTYPES`.
        device: device of model and data, one of `DEVICES`.
        seed: seed of parameter values and data, 0 to 2**32 - 1.
        optimizer: name of the optimizer, or None for one whose step leaves the parameters unchanged.
        groups: number of parameter groups of the optimizer; each has a learning rate of its own.
    """

    problem: ProblemSpec | str
    plan: Plan
    dtype: str = "float64"
    device: str = "cpu"
    seed: int = 0
    optimizer: str | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.problem, ProblemSpec | str):
            raise UsageError(f"Case: problem must be a ProblemSpec or 'FILE.py:NAME', got {self.problem!r}")
        if not isinstance(self.plan, Plan):
            raise UsageError(f"Case: plan must be a Plan, got {self.plan!r}")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if self.device not in DEVICES:
            raise UsageError(f"device must be one of {', '.join(DEVICES)}; got {self.device!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed must be an integer from 0 to {MAX_SEED}, got {self.seed!r}")
        if self.optimizer is not None and not isinstance(self.optimizer, str):
            raise UsageError(f"optimizer must be a name or None, got {self.optimizer!r}")
        if not isinstance(self.groups, int) or isinstance(self.groups, bool) or self.groups < 1:
            raise UsageError(f"groups must be a positive integer, got {self.groups!r}")

    def __repr__(self) -> str:
        written = [field.name for field in fields(self) if field.name != "groups" or self.groups != 1]
        return f"Case({', '.join(f'{name}={getattr(self, name)!r}' for name in written)})"

    @property
    def spec(self) -> ProblemSpec | None:
        """The generated problem; None where the case is about a user's."""
        return None if isinstance(self.problem, str) else self.problem

    @property
    def problem_name(self) -> str | None:
        """The file and name of the user's problem, as on the command line; None for a generated one."""
        return self.problem if isinstance(self.problem, str) else None

    @cached_property
    def digest(self) -> str:
        """The id of the case: the first 12 hexadecimal digits of the SHA-256 of its canonical JSON."""
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def replace(self, **changes: Any) -> Case:
        """Return a copy of the case with other values of these fields."""
        return replace(self, **changes)

    def _content(self) -> dict[str, Any]:
        problem = self.problem if isinstance(self.problem, str) else self.problem.to_json()
        return {
            "schema": SCHEMA,
            "problem": problem,
            "plan": self.plan.to_json(),
            "dtype": self.dtype,
            "device": self.device,
            "seed": self.seed,
            "optimizer": self.optimizer,
            # left out where there is one, so that the digests of stored cases stay
            **({"groups": self.groups} if self.groups != 1 else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the case as JSON-ready data, with its digest."""
        return {**self._content(), "digest": self.digest}


def case_from_json(data: Any) -> Case:
    """Return the case of JSON data.

    Raises:
        UsageError: the data is not a case, has another schema version, or was edited (its digest does not match).
    """
    if not isinstance(data, Mapping) or "problem" not in data or "plan" not in data:
        raise UsageError("not a gradcheck-suite case: expected an object with 'problem', 'plan' and 'digest'")
    if data.get("schema") != SCHEMA:
        raise UsageError(f"case schema must be {SCHEMA}, got {data.get('schema')!r}: it comes from another version")
    unknown = data.keys() - {"schema", "problem", "plan", "dtype", "device", "seed", "optimizer", "groups", "digest"}
    if unknown:
        raise UsageError(f"case has unknown fields {sorted(unknown)}: it comes from another version or was edited")
    problem = data["problem"]
    case = Case(
        problem=problem if isinstance(problem, str) else problem_from_json(problem),
        plan=plan_from_json(data["plan"]),
        dtype=data.get("dtype", "float64"),
        device=data.get("device", "cpu"),
        seed=data.get("seed", 0),
        optimizer=data.get("optimizer"),
        groups=data.get("groups", 1),
    )
    if "digest" in data and data["digest"] != case.digest:
        raise UsageError(
            f"case was edited: its digest is {data['digest']!r} but its content has {case.digest!r}; "
            "remove the 'digest' field to accept the edit"
        )
    return case
