"""The atlas: its rows on this machine are those on file, and the judge that compares two rows is
right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradcheck_suite.__main__ import main
from gradcheck_suite.catalogue.rows import KINDS
from gradcheck_suite.run import environment
from studies.atlas import DTYPES, ROUNDING, agrees, run
from studies.atlas_points import POINTS, Point
from studies.commands import PROGRAM

EXPECTED = Path(__file__).with_name("conventions.json")
"""Point -> dtype -> [whether torch and JAX agree, convention], as torch 2.13.0 and jax 0.10.2 gave them on a CPU."""
CATALOGUE = {
    "logsigmoid": "log_sigmoid",
    "gelu (exact)": "gelu",
    "gelu (tanh)": "gelu_tanh",
    "elu (alpha 0.5)": "elu",
    "celu (alpha 2)": "celu",
}
"""Operation of the atlas -> kind of the catalogue, where their names differ."""
OPTIONS = {
    "elu": {"alpha": 1.0},
    "elu (alpha 0.5)": {"alpha": 0.5},
    "celu (alpha 2)": {"alpha": 2.0},
    "leaky_relu": {"negative_slope": 0.01},
    "softplus": {"beta": 1.0, "threshold": 20.0},
}
environment.set_precision()
RELU = next(point for point in POINTS if point.operation == "relu")


def conventions(
    dtypes: tuple[str, ...], points: Sequence[Point] = POINTS
) -> dict[str, dict[str, list[object]]]:
    """Return what the file holds of some points, computed now."""
    found: dict[str, dict[str, list[object]]] = {}
    for row in run(points, dtypes):
        found.setdefault(f"{row.point.operation} | {row.point.at}", {})[row.dtype] = [
            row.agree,
            row.convention,
        ]
    return found


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
def test_every_row_is_what_the_tested_versions_gave(dtype: str) -> None:
    """A new version of torch or JAX that changes a row is a finding: understand it, then write the
    file anew.
    """
    expected = json.loads(EXPECTED.read_text())
    assert len(expected) == len(POINTS)
    for name, rows in conventions((dtype,)).items():
        assert rows[dtype] == expected[name][dtype], name


def test_no_point_occurs_twice() -> None:
    names = [(point.operation, point.at) for point in POINTS]
    assert len(names) == len(set(names)) >= 80


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_sided_derivatives_are_those_of_difference_quotients(side: str) -> None:
    """The one-sided derivatives are written from mathematics.

    A quotient of torch's values is another way to them.
    """
    step, held = (-1e-6 if side == "left" else 1e-6), 0
    for point in POINTS:
        if point.sides is None:
            continue
        slope = point.sides[side == "right"]
        if not math.isfinite(slope) or not math.isfinite(point.inputs[0]) or abs(slope) > 1e3:
            continue
        x = torch.tensor(point.inputs[0], dtype=torch.float64)
        value, beside = (float(point.torch(at).sum()) for at in (x, x + step))
        if not math.isfinite(value) or not math.isfinite(beside) or abs(beside - value) > 0.25:
            continue  # an overflow, or a jump
        assert (beside - value) / step == pytest.approx(slope, abs=1e-4), (
            point.operation,
            point.at,
        )
        held += 1
    assert held > 60


@pytest.mark.full
def test_the_catalogue_follows_torch_at_every_point() -> None:
    """Drawn inputs hit kinks, so the catalogue's JAX side must take torch's derivative there."""
    kinds, planted = {kind.name: kind for kind in KINDS if kind.axes == 0}, []
    for point in POINTS:
        kind = kinds.get(CATALOGUE.get(point.operation, point.operation))
        if kind is None or not math.isfinite(point.inputs[0]):
            continue
        apply = kind.jax_apply
        assert apply is not None
        options = OPTIONS.get(point.operation, {})
        planted.append(
            replace(point, jax=lambda x, apply=apply, options=options: apply(options, {}, x, {}))
        )
    assert len(planted) >= 25
    assert [row for row in run(planted, ("float64",)) if not row.agree] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_comparison_allows_rounding_and_no_more(dtype: str) -> None:
    unit = ROUNDING * float(np.finfo(dtype).eps)
    for scale in (1.0, 1e6):
        assert agrees(np.array([scale]), np.array([scale * (1 + unit / 2)]), dtype)
        assert not agrees(np.array([scale]), np.array([scale * (1 + 2 * unit)]), dtype)
    assert agrees(np.array([0.0]), np.array([unit / 2]), dtype)
    assert not agrees(np.array([0.0]), np.array([2 * unit]), dtype)


@pytest.mark.parametrize(
    ("mine", "other", "same"),
    [
        (math.nan, math.nan, True),
        (math.nan, 0.0, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (math.inf, 1e300, False),
    ],
)
def test_values_that_are_not_finite_agree_only_with_themselves(
    mine: float, other: float, same: bool
) -> None:
    assert agrees(np.array([mine]), np.array([other]), "float64") is same


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda x: jnp.where(x >= 0, x, 0.0),
            "torch: the left derivative, 0; JAX: the right derivative, 1",
        ),
        (
            lambda x: jnp.maximum(x, 0.0),
            "torch: the left derivative, 0; JAX: the mean of both sides, 0.5",
        ),
        (
            lambda x: jnp.where(x > 0, x, 0.0) + 1e-9,
            "both: the left derivative, 0, but the numbers differ",
        ),
        (lambda x: 0.3 * x, "torch: the left derivative, 0; JAX: 0.3, neither side"),
        (lambda x: jnp.sqrt(x * x) * jnp.nan, "torch: the left derivative, 0; JAX: NaN"),
    ],
)
def test_another_derivative_or_value_is_seen_and_named(wrong: object, words: str) -> None:
    planted = replace(RELU, jax=wrong)  # type: ignore[arg-type]
    (row,) = run([planted], ("float64",))
    assert not row.agree
    assert row.convention == words


def test_a_share_of_a_tie_is_named_by_where_it_goes() -> None:
    def share(*parts: float) -> str:
        weights = torch.tensor(parts, dtype=torch.float64)
        point = Point(
            "planted",
            "",
            ([1.0] * len(parts),),
            lambda x: (x * weights).sum(),
            lambda x: x.sum(),
            tied=tuple(range(len(parts))),
        )
        return run([point], ("float64",))[0].convention.split(";")[0].removeprefix("torch: ")

    assert share(1.0, 0.0, 0.0) == "all to the first of the tied elements"
    assert share(0.0, 1.0, 0.0) == "all to the 2nd of the tied elements"
    assert share(0.0, 0.0, 1.0) == "all to the last of the tied elements"
    assert share(0.5, 0.5) == "split evenly among ties"
    assert share(0.0, 0.0) == "zero to every tied element"
    assert share(0.75, 0.25) == "shares [0.75, 0.25]"


def test_the_command_prints_and_writes_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path, reports = tmp_path / "rows.json", tmp_path / "reports"
    assert main(["atlas", "abs", "--json", str(json_path), "--reports", str(reports)], PROGRAM) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "abs, x = 0  differ  torch: the mean of both sides, 0; JAX: the right derivative, 1",
        "points: 1, each in float64 and float32; torch and JAX differ at 1",
    ]
    rows = json.loads(json_path.read_text())["rows"]
    assert [row["dtype"] for row in rows] == list(DTYPES)
    # the mathematics: |x| has the slopes -1 and 1 at 0, of which torch takes the mean and JAX the
    # right one
    assert rows[0] == {
        "operation": "abs",
        "point": "x = 0",
        "dtype": "float64",
        "device": "cpu",
        "torch": {"value": [0.0], "gradient": [[0.0]]},
        "jax": {"value": [0.0], "gradient": [[1.0]]},
        "agree": False,
        "convention": "torch: the mean of both sides, 0; JAX: the right derivative, 1",
    }
    assert len((reports / "records" / "atlas.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rellu"], "expected an operation of the atlas, got 'rellu': did you mean relu"),
        (["abs", "--device", "tpu"], "--device: expected one of cpu, cuda; got 'tpu'"),
    ],
)
def test_a_word_that_is_no_operation_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["atlas", *arguments, "--reports", str(tmp_path)], PROGRAM) == 2
    assert message in capsys.readouterr().err
