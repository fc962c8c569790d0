"""What each reset mode costs in time: the reset alone, the first backward, one whole window.

    pytest studies/properties/benchmarks/bench_modes.py [--bench-records DIR] [--bench-device
    cpu|cuda]

Each row becomes a record under `DIR/records/benchmark.jsonl`, with the copy bandwidth measured in
the same run. Every round starts with flushed caches on an idle device; a round of a reset also
starts with new gradients of ones, since a second reset would find zeros or None. `set_to_none`
moves its cost into the next backward, so modes are compared by their windows. A row holds the
device's time, between two events on CUDA; the host's, until the device has finished; on CUDA the
time in which kernels ran, by the profiler; and for a window its memory. The windows of JAX's reset
modes are rows beside them, with the memory that XLA reports of their compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

import jax
import pytest
import torch

from gradcheck_suite.loops.jax_modes import JAX_MODES
from studies.compiled_steps import compiled_window, flush_caches, memory_bytes
from studies.memory import Baseline, allocator_baseline, allocator_peak, window_memory
from studies.properties.benchmarks.timing import pedantic, time_rounds
from studies.reset_laws import Cost, uniform_window
from studies.reset_modes import BENCHMARKED, RESET_MODES, ResetMode
from studies.step_times import (
    LARGE,
    SMALL,
    Profile,
    cache_bytes,
    copy_bandwidth,
    fill_bandwidth,
    fill_launches,
    foreach_launches,
    memset_bandwidth,
    profiled,
    quartiles,
    regime,
    timer,
)
from studies.workload import Size, Workload, sized_workload

ROUNDS = {"cpu": 15, "cuda": 20}
# calls decide the time of few parameters in many tensors, bandwidth that of many in few
_PARAMETERS = {
    "cpu": {"many": (10**5, 10**6), "few": (10**6, 10**7)},
    "cuda": {"many": (10**5, 10**6, 10**7, 10**8), "few": (10**6, 10**7, 10**8, 10**9)},
}
SIZES = {
    device: [Size(n, layout) for layout, numbers in layouts.items() for n in numbers]
    for device, layouts in _PARAMETERS.items()
}
MICRO_BATCHES = (1, 4)
DTYPES = ("float32", "bfloat16")
JAX_PLATFORM = {"cpu": "cpu", "cuda": "gpu"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = metafunc.config.getoption("--bench-device")
    if "size" in metafunc.fixturenames:
        metafunc.parametrize("size", SIZES[device], ids=lambda size: size.name)
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", [device])


@cache
def _bandwidths(device: str) -> dict[str, float]:
    found = {
        "bytes_per_second": copy_bandwidth(device, timer(device)),
        "filled_per_second": fill_bandwidth(device, timer(device)),
    }
    return found if device == "cuda" else {**found, "memset_per_second": memset_bandwidth()}


_flush = cache(flush_caches)
"""The flush of a device of JAX, whose gigabyte of memory all rows share."""


def _measure(
    benchmark: Any,
    keep: Callable[..., None],
    device: str,
    run: Callable[[], Any],
    setup: Callable[[], Any],
    **about: Any,
) -> Profile:
    """Time, then profile: profiling slows a run down."""
    benchmark.extra_info.update(about, device=device, **_bandwidths(device))
    prepare = time_rounds(benchmark, run, device=device, rounds=ROUNDS[device], setup=setup)
    prepare()
    profile = profiled(run, device)
    benchmark.extra_info.update(
        profile=profile.operations, kernels=profile.kernels, busy_seconds=profile.busy
    )
    keep(benchmark)
    return profile


def _about(size: Size, dtype: str, device: str) -> dict[str, Any]:
    gradients = size.bytes(getattr(torch, dtype))
    return {
        "dtype": dtype,
        "parameters": size.total,
        "tensors": size.tensors,
        "layout": size.layout,
        "gradient_bytes": gradients,
        "regime": regime(gradients, cache_bytes(device)),
    }


def _memory(work: Workload, dtype: torch.dtype, baseline: Baseline) -> dict[str, Any]:
    """Return the bytes of one window: its peak and the gradients alive after it, by the ledger.

    The allocator's peaks. Earlier rows of the same process have used the allocator;
    `bench_memory_modes.py` measures in fresh processes.
    """
    work.window()
    allocator = allocator_peak(work, baseline)
    peak, window = window_memory(work)
    return {
        "memory": {
            "peak": peak,
            "gradients_between": window["gradients"][-1],
            "itemsize": dtype.itemsize,
            "allocator": None if allocator is None else asdict(allocator),
        }
    }


def _predicted(mode: ResetMode, size: Size, dtype: str, micro_batches: int) -> Cost:
    """Return what the mode's law predicts for a window that is not the first."""
    return mode.law(
        uniform_window(size.tensors, size.total, getattr(torch, dtype).itemsize, micro_batches)
    )


def _launches(mode: ResetMode, size: Size, dtype: str) -> set[int]:
    """Return the numbers of kernels that a reset may launch: one per operation, more where an
    operation is cut up.
    """
    if mode.name == "zero_grad_foreach":
        elements = [size.width**2] * size.tensors
        return {foreach_launches(elements, limits) for limits in (SMALL, LARGE)}
    operations = _predicted(mode, size, dtype, 1).reset.operations
    each = size.total // operations if operations else 0
    return {operations, operations * fill_launches(each, getattr(torch, dtype).itemsize)}


@pytest.mark.benchmark(group="reset")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", BENCHMARKED, ids=lambda mode: mode.name)
def test_reset(
    benchmark: Any, keep: Callable[..., None], mode: ResetMode, size: Size, dtype: str, device: str
) -> None:
    work = sized_workload(mode, size, 0, device=device, dtype=getattr(torch, dtype))
    about = {"measures": "reset", "mode": mode.name, "micro_batches": 0}
    predicted = _predicted(mode, size, dtype, 1).reset.moved
    profile = _measure(benchmark, keep, device, work.reset, work.fill_gradients, **about,
                       **_about(size, dtype, device), predicted_bytes=predicted)  # fmt: skip
    if device == "cuda":
        assert profile.kernels in _launches(mode, size, dtype), f"{mode.name}: {profile}"


@pytest.mark.benchmark(group="backward")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "mode", [RESET_MODES["zero_"], RESET_MODES["set_to_none"]], ids=lambda mode: mode.name
)
def test_first_backward(
    benchmark: Any, keep: Callable[..., None], mode: ResetMode, size: Size, dtype: str, device: str
) -> None:
    work = sized_workload(mode, size, 1, device=device, dtype=getattr(torch, dtype))
    losses: list[torch.Tensor] = []

    def setup() -> None:
        work.fill_gradients()
        work.reset()
        losses[:] = [work.model(work.batches[0]).sum()]

    about = {"measures": "backward", "mode": mode.name, "micro_batches": 1}
    predicted = _predicted(mode, size, dtype, 1).accumulate.moved
    _measure(benchmark, keep, device, lambda: losses[0].backward(), setup, **about, **_about(size, dtype, device),
             predicted_bytes=predicted)  # fmt: skip


@pytest.mark.benchmark(group="window")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("mode", BENCHMARKED, ids=lambda mode: mode.name)
def test_window(
    benchmark: Any,
    keep: Callable[..., None],
    mode: ResetMode,
    size: Size,
    micro_batches: int,
    dtype: str,
    device: str,
) -> None:
    baseline = allocator_baseline(mode, size, device, getattr(torch, dtype))
    work = sized_workload(mode, size, micro_batches, device=device, dtype=getattr(torch, dtype))
    about: dict[str, Any] = {
        "measures": "window",
        "mode": mode.name,
        "micro_batches": micro_batches,
    }
    predicted = _predicted(mode, size, dtype, micro_batches).moved
    about |= _memory(work, getattr(torch, dtype), baseline)
    _measure(benchmark, keep, device, work.window, lambda: None, **about, **_about(size, dtype, device),
             predicted_bytes=predicted)  # fmt: skip


@pytest.mark.benchmark(group="window")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("mode", JAX_MODES)
def test_window_in_jax(
    benchmark: Any,
    keep: Callable[..., None],
    mode: str,
    size: Size,
    micro_batches: int,
    dtype: str,
    device: str,
) -> None:
    """Time JAX on the host's clock, as it has no events, with the flush on JAX's own stream."""
    where = jax.devices(JAX_PLATFORM[device])[0]
    program, run = compiled_window(mode, size, micro_batches, dtype, where)
    benchmark.extra_info.update(
        measures="window",
        mode=mode,
        **_about(size, dtype, device),
        micro_batches=micro_batches,
        device=device,
        **_bandwidths(device),
        xla_memory_bytes=memory_bytes(program),
    )
    pedantic(benchmark, run, _flush(where), ROUNDS[device], device)
    benchmark.extra_info["host"] = asdict(quartiles(benchmark.stats.stats.data))
    keep(benchmark)
