"""The reset modes under `torch.compile` and in CUDA graphs: number of graphs, time, and gradients
after a replay.

    pytest studies/properties/benchmarks/bench_compiled.py [--bench-records DIR] [--bench-device
    cpu|cuda]

Each row becomes a record under `DIR/records/benchmark.jsonl`. CUDA graphs need a CUDA device.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from studies.compiled_steps import (
    EXPERTS,
    PARTS,
    PLACES,
    CapturedWindow,
    forget,
    graphs,
    graphs_needed,
    training,
)
from studies.properties.benchmarks.timing import time_rounds
from studies.reset_modes import BENCHMARKED, RESET_MODES, ResetMode
from studies.step_times import cache_bytes, profiled, regime
from studies.workload import Size

SIZE = Size(10**6, "few")
ABOUT = {
    "dtype": "float32",
    "parameters": SIZE.total,
    "tensors": SIZE.tensors,
    "layout": SIZE.layout,
}
MICRO_BATCHES = 4
ROUNDS = 15
NEVER = replace(RESET_MODES["zero_"], name="never", reset=lambda parameters, optimizer: None)
WARM = 2 * EXPERTS
"""Windows before timing: every expert runs twice, so that nothing is compiled during timing."""


needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None,
    reason="torch.compile needs a C++ compiler here",
)


@needs_compiler
# the compiler warns about its own imports and about the device
@pytest.mark.filterwarnings("ignore")
@pytest.mark.benchmark(group="compiled")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mode", BENCHMARKED, ids=lambda mode: mode.name)
@pytest.mark.parametrize("part", PARTS)
def test_compiled(
    benchmark: Any,
    keep: Callable[..., None],
    part: str,
    mode: ResetMode,
    compiled: bool,
    pytestconfig: pytest.Config,
) -> None:
    device = pytestconfig.getoption("--bench-device")
    forget()
    run = training(part, mode, SIZE, MICRO_BATCHES, device, compiled=compiled)
    for _ in range(WARM):
        run()
    time_rounds(benchmark, run, device=device, rounds=ROUNDS)
    made = graphs()
    profile = profiled(run, device)
    benchmark.extra_info.update(
        measures="compiled",
        part=part,
        compiled=compiled,
        graphs=made,
        kernels=profile.kernels,
        busy_seconds=profile.busy,
        regime=regime(4 * SIZE.total, cache_bytes(device)),
        mode=mode.name,
        **ABOUT,
        micro_batches=MICRO_BATCHES,
        device=device,
    )
    keep(benchmark)
    assert made == (graphs_needed(part, mode) if compiled else 0)


@pytest.mark.benchmark(group="captured")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", BENCHMARKED, ids=lambda mode: mode.name)
@pytest.mark.parametrize("micro_batches", [1, MICRO_BATCHES])
def test_captured(
    benchmark: Any,
    keep: Callable[..., None],
    mode: ResetMode,
    place: str,
    micro_batches: int,
    pytestconfig: pytest.Config,
) -> None:
    if pytestconfig.getoption("--bench-device") != "cuda":
        pytest.skip("CUDA graphs need --bench-device cuda")
    captured = CapturedWindow(mode, place, SIZE, micro_batches)
    # a replay is not profiled: torch warns that CUPTI may crash when it starts anew after a CUDA
    # graph
    time_rounds(benchmark, captured.replay, device="cuda", rounds=ROUNDS)
    found = captured.finding()
    benchmark.extra_info.update(
        measures="captured",
        place=place,
        finding=found,
        regime=regime(4 * SIZE.total, cache_bytes("cuda")),
        mode=mode.name,
        **ABOUT,
        micro_batches=micro_batches,
        device="cuda",
    )
    keep(benchmark)
    assert found == ("None" if mode.releases and place == PLACES[1] else "right")


def test_a_graph_that_is_never_reset_is_found_wrong(pytestconfig: pytest.Config) -> None:
    """Planted fault: without a reset the gradients of both replays are summed."""
    if pytestconfig.getoption("--bench-device") != "cuda":
        pytest.skip("CUDA graphs need --bench-device cuda")
    captured = CapturedWindow(NEVER, PLACES[1], SIZE, 1)
    assert torch.cuda.is_available()
    assert captured.finding() == "wrong"
