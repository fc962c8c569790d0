"""What is said about each pair of the zoo, and what a comparison of outputs with a tolerance would
have said.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.compare import judge_function
from gradcheck_suite.port.pair import JaxModel, Port, flat_output, is_float
from gradcheck_suite.port.result import PortResult
from studies.ports.planted import Architecture, Truth

Array = npt.NDArray[Any]
USUAL = 1e-4


@dataclass(frozen=True)
class Row:
    """The verdict on one pair.

    Attributes:
        name: `architecture/variant`.
        truth: of the planted fault; None for a sound pair.
        result: the verdict, or why there is none.
        seconds: of the comparison.
        usual: whether the initial outputs are within 1e-4 of each other in float32.
    """

    name: str
    truth: Truth | None
    result: PortResult | str
    seconds: float
    usual: bool

    @property
    def differences(self) -> list[tuple[str, str]]:
        """Place and cause of each difference."""
        if isinstance(self.result, str):
            return []
        return [(finding.place, finding.cause) for finding in self.result.differences]

    @property
    def judged(self) -> bool:
        """Whether there is a verdict."""
        return not isinstance(self.result, str) and self.result.verdict != "unjudged"

    @property
    def found(self) -> bool:
        """Whether a difference is found."""
        return bool(self.differences)

    @property
    def placed(self) -> bool:
        """Whether some difference is where the fault is."""
        return self.truth is not None and any(
            self._at_place(place) for place, _ in self.differences
        )

    @property
    def named(self) -> bool:
        """Whether a difference at the fault's place has its cause, other than `unknown`."""
        return self.truth is not None and any(
            self._at_place(place) and cause in self.truth.causes and cause != "unknown"
            for place, cause in self.differences
        )

    @property
    def unknown(self) -> bool:
        """Whether all that is said of the cause is that it is unknown."""
        return self.found and all(cause == "unknown" for _, cause in self.differences)

    @property
    def misleading(self) -> bool:
        """Whether a cause is named, and none is the right one."""
        return self.found and not self.named and not self.unknown

    @property
    def passed(self) -> bool:
        """Whether a fault is found and not misnamed, or a sound pair holds."""
        return self.judged and (
            not self.found if self.truth is None else self.found and not self.misleading
        )

    def _at_place(self, place: str) -> bool:
        return self.truth is not None and any(fnmatchcase(place, one) for one in self.truth.places)

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        verdict = self.result if isinstance(self.result, str) else self.result.verdict
        said = {
            "found": self.found,
            "placed": self.placed,
            "named": self.named,
            "unknown": self.unknown,
        }
        return {
            "pair": self.name,
            "fault": self.truth is not None,
            "verdict": verdict,
            **said,
            "misleading": self.misleading,
            "usual_check_passes": self.usual,
            "findings": [list(one) for one in self.differences],
            "seconds": round(self.seconds, 2),
        }


def variants(
    architectures: Iterable[Architecture], only: Sequence[str] = ()
) -> Iterator[tuple[Architecture, str]]:
    """Return each architecture with each of its faults and forms, or those of some names."""
    for one in architectures:
        for variant in (*one.faults, *one.forms):
            if not only or one.name in only or label(one, variant) in only:
                yield one, variant


def label(one: Architecture, variant: str) -> str:
    """Return the name of a pair."""
    return f"{one.name}/{variant}"


def run(one: Architecture, variant: str) -> Row:
    """Judge one pair."""
    start = time.perf_counter()
    name = label(one, variant)
    result: PortResult | str
    try:
        result = judge_function(lambda: one.pair(variant), name)
    except UsageError as error:
        result = f"refused: {error}"
    except Exception as error:
        result = f"crashed: {type(error).__name__}: {error}"[:300]
    seconds = time.perf_counter() - start
    return Row(
        name,
        one.faults.get(variant),
        result,
        seconds,
        largest_difference(one, variant, "float32") <= USUAL,
    )


def outputs(one: Architecture, variant: str, dtype: str) -> list[tuple[Array, Array]]:
    """Return the outputs of both sides with initial parameters, computed in a dtype."""
    given = one.pair(variant)
    pair = Port(**given)
    torch_dtype = getattr(torch, dtype)
    module = pair.module.to(torch_dtype).train(pair.train)

    def cast(value: Any) -> Any:
        return value.astype(dtype) if is_float(value) else value

    tensors = [torch.as_tensor(np.asarray(a)) for a in pair.inputs]
    tensors = [a.to(torch_dtype) if a.is_floating_point() else a for a in tensors]
    outs = flat_output(module(*tensors, **pair.kwargs))  # a module may take gradients itself
    ours = [a.detach().double().numpy() for a in outs]
    model = JaxModel(pair)
    with jax.enable_x64(dtype == "float64"):
        theirs, _ = model.call(
            [cast(leaf) for leaf in model.leaves], [cast(jnp.asarray(a)) for a in pair.inputs]
        )
        arrays = [
            np.asarray(a.astype(jnp.float32) if dtype == "bfloat16" else a)
            for a in flat_output(theirs)
        ]
    arrays = arrays[: len(ours)]  # further ones are running statistics
    none = [np.zeros(0)] * (len(ours) - len(arrays))  # what is compared with nothing differs
    return [(a, b.astype(np.float64)) for a, b in zip(ours, [*arrays, *none], strict=True)]


def largest_difference(one: Architecture, variant: str, dtype: str) -> float:
    """Return the largest difference of the initial outputs.

    Infinite where one side is not finite.
    """
    found = [
        np.abs(a - b).max() if a.shape == b.shape else np.inf
        for a, b in outputs(one, variant, dtype)
    ]
    return float(np.nan_to_num(max(found, default=0.0), nan=np.inf))


def divergence(one: Architecture, variant: str) -> float:
    """Return the mean KL divergence of the port's distribution from torch's, in float32, over rows
    of logits.
    """
    ((ours, theirs),) = outputs(one, variant, "float32")
    p, q = (jax.nn.log_softmax(jnp.asarray(a), -1) for a in (ours, theirs))
    return float((jnp.exp(p) * (p - q)).sum(-1).mean())


HEADER = f"{'pair':<42} {'seconds':>7}  {'1e-4':<6} {'verdict':<12} findings"


def line(row: Row) -> str:
    """Return a pair's line."""
    if not row.judged:
        said = "NO VERDICT"
    elif row.truth is None:
        said = "BLAMED" if row.found else "holds"
    elif not row.found:
        said = "MISSED"
    elif row.named:
        said = "named"
    else:
        said = ("MISLEADING" if row.misleading else "unknown") + ("" if row.placed else ", place?")
    result = row.result
    details = result if isinstance(result, str) else result.unjudged or ""
    found = "; ".join(f"{place or 'the model'}: {cause}" for place, cause in row.differences)
    usual = "passes" if row.usual else "fails"
    return f"{row.name:<42} {row.seconds:>7.1f}  {usual:<6} {said:<12} {found or details}".rstrip()


def summary(rows: Sequence[Row]) -> str:
    """Return the last lines: what is found, placed and named, and whether a sound pair is blamed."""
    faults = [row for row in rows if row.truth is not None]
    sound = [row for row in rows if row.truth is None]
    kinds = ("found", "placed", "named", "unknown", "misleading")
    said = ", ".join(f"{sum(getattr(row, kind) for row in faults)} {kind}" for kind in kinds)
    blamed = [row.name for row in sound if row.found]
    silent = [row.name for row in rows if not row.judged]
    lines = [
        f"{len(faults)} planted faults: {said}",
        (
            "a float32 comparison of the initial outputs at 1e-4 passes"
            f" {sum(r.usual for r in faults)} of them"
        ),
        f"{len(sound) - len(blamed)} of {len(sound)} sound pairs not blamed"
        + (f"; blamed: {', '.join(blamed)}" if blamed else ""),
    ]
    lines += [f"no verdict: {', '.join(silent)}"] if silent else []
    times = sorted(row.seconds for row in rows)
    lines += (
        [f"median {times[len(times) // 2]:.1f} s a pair, longest {times[-1]:.1f} s"]
        if times
        else []
    )
    return "\n".join(lines)


# What tolerances let pass.


CHECKS: tuple[tuple[str, str, float], ...] = (
    ("outputs in float32, 1e-5", "float32", 1e-5),
    ("outputs in float32, 1e-4", "float32", 1e-4),
    ("outputs in float32, 1e-3", "float32", 1e-3),
    ("outputs in bfloat16, 1e-2", "bfloat16", 1e-2),
    ("outputs in bfloat16, 3e-2", "bfloat16", 3e-2),
    ("KL of logits in float32, 3e-3", "KL", 3e-3),
)


@dataclass(frozen=True)
class Tolerated:
    """What one tolerance says of the zoo.

    Attributes:
        check: what is compared, and the tolerance.
        passes: planted faults that pass.
        faults: planted faults that it can be asked of.
        blamed: sound pairs that fail.
        sound: sound pairs that it can be asked of.
    """

    check: str
    passes: int
    faults: int
    blamed: int
    sound: int


def tolerances(chosen: Sequence[tuple[Architecture, str]]) -> list[Tolerated]:
    """Return what each tolerance in use lets pass of some pairs, and which sound ones it blames."""
    measured: dict[str, list[tuple[bool, float]]] = {}
    for one, variant in chosen:
        for kind in ("float32", "bfloat16", *(["KL"] if one.logits else [])):
            try:
                size = (
                    divergence(one, variant)
                    if kind == "KL"
                    else largest_difference(one, variant, kind)
                )
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                continue  # an operation that one side has not in bfloat16, or shapes that differ
            measured.setdefault(kind, []).append((variant in one.faults, size))
    rows = []
    for check, kind, limit in CHECKS:
        sizes = measured.get(kind, [])
        faulty, right = [s for fault, s in sizes if fault], [s for fault, s in sizes if not fault]
        passes, blamed = sum(s <= limit for s in faulty), sum(not s <= limit for s in right)
        rows.append(Tolerated(check, passes, len(faulty), blamed, len(right)))
    return rows


def tolerance_lines(rows: Sequence[Tolerated]) -> list[str]:
    """Return the table of tolerances."""
    head = f"{'check':<32} {'faults that pass':>18} {'sound pairs that fail':>23}"
    faults, sound = (lambda r: f"{r.passes} of {r.faults}"), (lambda r: f"{r.blamed} of {r.sound}")
    return [head, *(f"{row.check:<32} {faults(row):>18} {sound(row):>23}" for row in rows)]
