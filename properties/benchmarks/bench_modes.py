"""What each reset mode costs in time: the reset by itself, one backward, one whole window.

    pytest properties/benchmarks/bench_modes.py [--bench-records DIR] [--bench-device cpu|cuda]

Each row becomes a record under `DIR/records/benchmark.jsonl`, with the copy bandwidth measured in the same run as the
floor. A reset is timed with a fresh set of non-zero gradients for every round, since the second reset in a row does
nothing, and with the caches flushed. `set_to_none` moves its cost into the next backward: look at the window.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import jax
import pytest
import torch

from gradcheck_suite.measure.clock import timer
from gradcheck_suite.measure.floors import copy_bandwidth, fill_bandwidth, flush, memset_bandwidth
from gradcheck_suite.measure.jax_window import compiled_window, memory_bytes, runner
from gradcheck_suite.measure.models import Size, build, micro_batch
from gradcheck_suite.measure.profile import profiled
from gradcheck_suite.measure.resets import MODES, Mode, prepare, window

ROUNDS = {"cpu": 15, "cuda": 50}
HOST_ROUNDS = 9
PARAMETERS = {"cpu": (10**5, 10**6, 10**7), "cuda": (10**5, 10**6, 10**7, 10**8, 10**9)}
MICRO_BATCHES = (1, 4)
DTYPES = ("float32", "bfloat16")
JAX_PLATFORM = {"cpu": "cpu", "cuda": "gpu"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    device = metafunc.config.getoption("--bench-device")
    sizes = [Size(n, layout) for n in PARAMETERS[device] for layout in ("many", "few")]
    if "size" in metafunc.fixturenames:
        metafunc.parametrize("size", sizes, ids=lambda size: size.name)
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", [device])


@cache
def _bandwidths(device: str) -> dict[str, float]:
    found = {
        "bytes_per_second": copy_bandwidth(device, timer(device)),
        "filled_per_second": fill_bandwidth(device, timer(device)),
    }
    return found if device == "cuda" else {**found, "memset_per_second": memset_bandwidth()}


@cache
def _flush(device: str) -> Callable[[], None]:
    return flush(device)


def _measure(
    benchmark: Any,
    keep: Callable[..., None],
    device: str,
    run: Callable[[], Any],
    setup: Callable[[], Any],
    **about: Any,
) -> None:
    flush_caches = _flush(device)

    def prepared() -> None:
        setup()
        flush_caches()

    benchmark._timer = timer(device)
    benchmark.extra_info.update(about, device=device, **_bandwidths(device))
    benchmark.pedantic(run, setup=prepared, rounds=ROUNDS[device], warmup_rounds=3)
    if device == "cuda":  # where the host is busier than the device, the device's own events do not show it
        benchmark.extra_info["host_seconds"] = _host_seconds(run, prepared)
    keep(benchmark)


def _host_seconds(run: Callable[[], Any], setup: Callable[[], Any]) -> float:
    clock = timer("cuda", "host")
    seconds = []
    for _ in range(HOST_ROUNDS):
        setup()
        start = clock()
        run()
        seconds.append(clock() - start)
    return median(seconds)


@pytest.mark.benchmark(group="reset")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_reset(benchmark: Any, keep: Callable[..., None], mode: Mode, size: Size, dtype: str, device: str) -> None:
    kind = getattr(torch, dtype)
    parameters = list(build(size, device, kind).parameters())
    prepare(mode, parameters)
    benchmark.extra_info["profile"] = profiled(lambda: mode.reset(parameters), device)
    _measure(
        benchmark,
        keep,
        device,
        run=lambda: mode.reset(parameters),
        setup=lambda: prepare(mode, parameters),
        measures="reset",
        mode=mode.name,
        dtype=dtype,
        parameters=size.total,
        tensors=size.tensors,
        layout=size.layout,
        micro_batches=0,
        predicted_bytes=size.bytes(kind) if mode.keeps else 0,
    )


@pytest.mark.benchmark(group="backward")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [MODES["zero_"], MODES["set_to_none"]], ids=lambda mode: mode.name)
def test_first_backward(
    benchmark: Any, keep: Callable[..., None], mode: Mode, size: Size, dtype: str, device: str
) -> None:
    kind = getattr(torch, dtype)
    model = build(size, device, kind)
    parameters, batch = list(model.parameters()), micro_batch(size, device, kind)
    losses: list[torch.Tensor] = []

    def setup() -> None:
        prepare(mode, parameters)
        mode.reset(parameters)
        losses[:] = [model(batch).sum()]

    _measure(
        benchmark,
        keep,
        device,
        run=lambda: losses[0].backward(),
        setup=setup,
        measures="backward",
        mode=mode.name,
        dtype=dtype,
        parameters=size.total,
        tensors=size.tensors,
        layout=size.layout,
        micro_batches=1,
        predicted_bytes=3 * size.bytes(kind) if mode.keeps else 0,
    )


@pytest.mark.benchmark(group="window")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_window(
    benchmark: Any,
    keep: Callable[..., None],
    mode: Mode,
    size: Size,
    micro_batches: int,
    dtype: str,
    device: str,
) -> None:
    kind = getattr(torch, dtype)
    model = build(size, device, kind)
    parameters = list(model.parameters())
    batches = [micro_batch(size, device, kind, j) for j in range(micro_batches)]
    prepare(mode, parameters)
    additions = micro_batches if mode.keeps else micro_batches - 1
    _measure(
        benchmark,
        keep,
        device,
        run=lambda: window(mode, model, parameters, batches),
        setup=lambda: None,
        measures="window",
        mode=mode.name,
        dtype=dtype,
        parameters=size.total,
        tensors=size.tensors,
        layout=size.layout,
        micro_batches=micro_batches,
        predicted_bytes=(3 * additions + (1 if mode.keeps else 0)) * size.bytes(kind),
    )


@pytest.mark.benchmark(group="window")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_window_in_jax(
    benchmark: Any, keep: Callable[..., None], size: Size, micro_batches: int, dtype: str, device: str
) -> None:
    program, arguments = compiled_window(size, micro_batches, dtype, jax.devices(JAX_PLATFORM[device])[0])
    run = runner(program, arguments)
    benchmark.extra_info.update(
        measures="window",
        mode="jax_scan",
        dtype=dtype,
        parameters=size.total,
        tensors=size.tensors,
        layout=size.layout,
        micro_batches=micro_batches,
        device=device,
        **_bandwidths(device),
        xla_memory_bytes=memory_bytes(program),
    )
    benchmark.pedantic(run, setup=_flush(device), rounds=ROUNDS[device], warmup_rounds=3)
    keep(benchmark)
