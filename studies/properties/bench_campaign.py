"""How much faster two workers of a campaign are than one, and what a shard and the start of Ray
cost beside the cases.

Run it by itself on at least two processors, since it takes minutes: `pytest -s
studies/properties/bench_campaign.py`. A line says whether other processes ran. Programs are
compiled before anything is timed. Campaigns of few shards gain less by a second worker, since the
driver and the workers take seconds to start; that share is printed.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from gradcheck_suite.cli import run
from gradcheck_suite.cli.campaign import CASES

SHARDS = int(os.environ.get("GRADCHECK_SUITE_BENCH_SHARDS", "60"))
LOOPS = ("zero_", "zero_grad", "set_to_none", "grad_none")
LEAST_SPEEDUP = 1.8
MOST_FIXED_S = 3.0
"""Seconds that a shard may take beside its cases."""
MOST_ENGINE_S = 15.0
"""Seconds that the start and the end of Ray may take."""
LOAD = os.getloadavg()[0]


def _seconds(
    folder: Path, workers: int, *asked: str, engine: str = "processes"
) -> tuple[float, list[str]]:
    """Return how long a campaign of `verify` takes, and its verdicts."""
    folder.mkdir(exist_ok=True)
    result = folder / "result.json"
    options = [
        "--engine",
        engine,
        "--workers",
        str(workers),
        "--reports",
        str(folder),
        "--json",
        str(result),
    ]
    began = time.perf_counter()
    assert run(["campaign", *options, "verify", *asked]) == 0
    seconds = time.perf_counter() - began
    return seconds, [
        f"{r['loop']} {r['verdict']} {r['judged']}"
        for r in json.loads(result.read_text())["results"]
    ]


@pytest.fixture(scope="module")
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    _seconds(tmp_path_factory.mktemp("compiled"), 2, "zero_", "--examples", str(SHARDS * CASES))


@pytest.mark.usefixtures("_compiled")
def test_two_workers_are_nearly_twice_as_fast_as_one(tmp_path: Path) -> None:
    asked = "zero_", "--examples", str(SHARDS * CASES)
    start, _ = _seconds(tmp_path / "start", 1, "zero_", "--examples", "1")
    (one, first), (two, second) = (_seconds(tmp_path / str(n), n, *asked) for n in (1, 2))
    print(
        f"\n{SHARDS} shards of {CASES} cases: 1 worker {one:.1f} s, 2 workers {two:.1f} s, {one / two:.2f} times"
    )
    print(
        f"a campaign of one case takes {start:.1f} s: {start / one:.0%} and {start / two:.0%} of these are the start"
    )
    print(
        f"{1000 * one / (SHARDS * CASES):.1f} ms a case; {LOAD:.1f} other processes ran in the minute before"
    )
    assert first == second
    assert one / two >= LEAST_SPEEDUP


@pytest.mark.usefixtures("_compiled")
def test_a_shard_costs_little_beside_its_cases(tmp_path: Path) -> None:
    (one, _), (many, _) = (
        _seconds(tmp_path / str(len(loops)), 1, *loops, "--examples", "1")
        for loops in (LOOPS[:1], LOOPS)
    )
    fixed = (many - one) / (len(LOOPS) - 1)
    print(
        f"\na shard of one case takes {fixed:.2f} s, the first one {one:.1f} s with the start of its worker"
    )
    assert fixed <= MOST_FIXED_S


@pytest.mark.usefixtures("_compiled")
def test_ray_costs_little_beside_its_shards(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'gradcheck-suite[ray]'")
    (own, _), (rays, _) = (
        _seconds(tmp_path / engine, 1, "zero_", "--examples", "1", engine=engine)
        for engine in ("processes", "ray")
    )
    print(
        f"\na shard of one case takes {own:.1f} s in a process of one's own, {rays:.1f} s with the start of Ray"
    )
    assert rays - own <= MOST_ENGINE_S
