"""What compiling and capturing change: how many graphs each reset mode needs, and where gradients cannot be None.

    pytest properties/benchmarks/bench_compiled.py [--bench-records DIR] [--bench-device cpu|cuda]

Each row becomes a record under `DIR/records/benchmark.jsonl`. CUDA graphs need a CUDA device.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradcheck_suite.measure.captured import PLACES, CapturedWindow
from gradcheck_suite.measure.clock import timer
from gradcheck_suite.measure.compiled import EXPERTS, PARTS, forget, graphs, graphs_needed, training
from gradcheck_suite.measure.models import Size
from gradcheck_suite.measure.resets import MODES, Mode

SIZE = Size(10**6, "few")
ABOUT = {"dtype": "float32", "parameters": SIZE.total, "tensors": SIZE.tensors, "layout": SIZE.layout}
MICRO_BATCHES = 4
ROUNDS = 15
WARM = 2 * EXPERTS
"""Windows before timing: every expert twice, so that nothing is compiled any more."""

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None,
    reason="torch.compile needs a C++ compiler here",
)


@needs_compiler
@pytest.mark.filterwarnings("ignore")  # the compiler's own, about its imports and the device
@pytest.mark.benchmark(group="compiled")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
@pytest.mark.parametrize("part", PARTS)
def test_compiled(
    benchmark: Any, keep: Callable[..., None], part: str, mode: Mode, compiled: bool, pytestconfig: pytest.Config
) -> None:
    device = pytestconfig.getoption("--bench-device")
    forget()
    run = training(part, mode, SIZE, MICRO_BATCHES, device, compiled=compiled)
    for _ in range(WARM):
        run()
    benchmark._timer = timer(device)
    benchmark.pedantic(run, rounds=ROUNDS)
    made = graphs()
    assert made == (graphs_needed(part, mode) if compiled else 0)
    benchmark.extra_info.update(
        measures="compiled",
        part=part,
        compiled=compiled,
        graphs=made,
        mode=mode.name,
        **ABOUT,
        micro_batches=MICRO_BATCHES,
        device=device,
    )
    keep(benchmark)


@pytest.mark.benchmark(group="captured")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
@pytest.mark.parametrize("micro_batches", [1, MICRO_BATCHES])
def test_captured(
    benchmark: Any, keep: Callable[..., None], mode: Mode, place: str, micro_batches: int, pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getoption("--bench-device") != "cuda":
        pytest.skip("CUDA graphs need --bench-device cuda")
    captured = CapturedWindow(mode, place, SIZE, micro_batches)
    benchmark._timer = timer("cuda")
    benchmark.pedantic(captured.replay, rounds=ROUNDS, warmup_rounds=3)
    found = captured.finding()
    benchmark.extra_info.update(
        measures="captured",
        place=place,
        finding=found,
        mode=mode.name,
        **ABOUT,
        micro_batches=micro_batches,
        device="cuda",
    )
    keep(benchmark)
    assert found == ("None" if not mode.keeps and place == PLACES[1] else "right")


def test_a_release_between_replays_is_what_the_finding_tells(pytestconfig: pytest.Config) -> None:
    """Planted: a graph that adds and is never reset sums its replays, and that is not called right."""
    if pytestconfig.getoption("--bench-device") != "cuda":
        pytest.skip("CUDA graphs need --bench-device cuda")
    captured = CapturedWindow(Mode("none", lambda parameters: None), PLACES[1], SIZE, 1)
    assert torch.cuda.is_available()
    assert captured.finding() == "wrong"
