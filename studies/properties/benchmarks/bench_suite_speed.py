"""How fast the suite is, against the plain way and against the floor, over the same drawn cases.

Run it by itself, since it takes minutes: `pytest
studies/properties/benchmarks/bench_suite_speed.py`. Other processes slow the plain way most: the
last line says whether there were any.

- suite: `verify` as the command line calls it, drawing and judging included, with a second process
  that judges: with nothing on disk (cold), with compiled programs on disk (warm) or in memory
  (steady). "In one process" is steady without the second one. What processes import is not timed.
- careful: what a careful user would write without the suite: the loop, and `jax.jit` of the whole
  model's gradient, one function for all cases of the same model, with JAX's persistent compilation
  cache: with nothing on disk, and with the programs of the same cases on disk.
- plain: the same with a new `jax.jit` for each case and no cache.
- floor: the bare torch loop on a model just built, and the plain way's gradients, compiled by then;
  nothing compared.

Where an optimizer moves the parameters, each of its steps has a gradient of its own, for the suite
and the plain way.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.experimental.compilation_cache import compilation_cache

from gradcheck_suite import Case, ProblemSpec
from gradcheck_suite.catalogue.tables import jax_output, objective
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.reference import programs
from gradcheck_suite.reference.large_batch import REFERENCES
from gradcheck_suite.run import environment
from gradcheck_suite.run.instance import Instance, generated_instance
from gradcheck_suite.strategies import drawing
from gradcheck_suite.strategies.cases import SOMETIMES_MOVING, cases
from gradcheck_suite.verification import judge_process
from gradcheck_suite.verification.verify import verify

CASES = int(os.environ.get("GRADCHECK_SUITE_BENCH_CASES", "500"))
LOOP = MODES["set_to_none"]
SECONDS: dict[str, float] = {}
SHARES: dict[str, float] = {}
"""Seconds of the processor over those of the clock, of what runs in this process alone; below 1
where others kept it waiting. Nothing is said of the suite's own, which has a second process.
"""
RATIOS: dict[str, float] = {}
"""Seconds over those of the floor at the same time."""
ALTERNATED = 5
"""Rounds of what is timed beside the floor."""
LOAD = os.getloadavg()[0]
"""Processes that ran or waited on average in the minute before."""
ALONE_SHARE, ALONE_LOAD = 0.95, 1.0
PERSISTENT = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
"""Options of JAX's persistent compilation cache that keep every program."""


def drawn(count: int) -> list[Case]:
    """Return the cases that `verify` draws for seed 0."""
    return drawing.draw_cases(cases(optimizer=SOMETIMES_MOVING), examples=count, seed_value=0)


@pytest.fixture(scope="module")
def same_cases() -> list[Case]:
    return drawn(CASES)


@pytest.fixture(scope="module")
def compiled() -> list[Any]:
    return []


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what torch and JAX import at first use, such as `torch._dynamo`: whoever runs first
    would pay for it.
    """
    torch.optim.SGD([torch.zeros(1)])
    jax.block_until_ready(jax.jit(jax.numpy.negative)(1.0))


def _forget_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the drawn cases and their references, which a run shares between its loops."""
    monkeypatch.setattr(drawing, "_KEPT", type(drawing._KEPT)())
    monkeypatch.setattr(REFERENCES, "_kept", type(REFERENCES._kept)())


@pytest.fixture(scope="module")
def second() -> Iterator[ExitStack]:
    """Keep the second process of a test until the next one starts its own."""
    with ExitStack() as kept:
        yield kept


def _fresh(monkeypatch: pytest.MonkeyPatch, store: Path, second: ExitStack) -> None:
    """Forget everything in memory, and start a second process; keep what is stored."""
    second.close()
    jax.clear_caches()
    monkeypatch.setenv(environment.CACHE_VARIABLE, str(store))
    monkeypatch.setattr(programs, "PROGRAMS", programs.CompiledPrograms())
    _forget_cases(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(
            judge_process, "SERVE", "studies.properties.benchmarks.judge_with_few_references"
        )
        process = second.enter_context(judge_process.second_process())
    assert process is not None
    process.wait()


def _nothing() -> None:
    pass


def _suite() -> None:
    result = verify(LOOP, examples=CASES, quiet=True)
    assert result.holds
    assert result.cases == CASES


def _measure(
    benchmark: Any, name: str, run: Callable[[], None], setup: Callable[[], None], rounds: int
) -> None:
    """Time some rounds of a run.

    Note the share of the processor in the round that had least of it.
    """

    def timed() -> None:
        clock, began = time.perf_counter(), time.process_time()
        run()
        share = (time.process_time() - began) / (time.perf_counter() - clock)
        if not name.startswith("suite"):
            SHARES[name] = min(share, SHARES.get(name, share))

    benchmark.pedantic(timed, setup=setup, rounds=rounds)
    SECONDS[name] = statistics.median(benchmark.stats.stats.data)
    benchmark.extra_info["milliseconds per case"] = round(1e3 * SECONDS[name] / CASES, 2)


def _others() -> str | None:
    """Return a warning if other processes slowed this one down, or None."""
    worst = min(SHARES, key=SHARES.__getitem__)
    if SHARES[worst] >= ALONE_SHARE and LOAD <= ALONE_LOAD:
        return None
    return (
        f"NOT ALONE: the process had the processor for {SHARES[worst]:.0%} of the time ({worst}), and the machine's "
        f"load was {LOAD:.1f} before. The ratios are not those of an idle machine."
    )


def test_suite_cold(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, store: Path, second: ExitStack
) -> None:
    _measure(benchmark, "suite, cold", _suite, lambda: _fresh(monkeypatch, store, second), rounds=1)


def test_suite_warm(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, store: Path, second: ExitStack
) -> None:
    _measure(benchmark, "suite, warm", _suite, lambda: _fresh(monkeypatch, store, second), rounds=3)


def _values(model: torch.nn.Module) -> dict[str, Any]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {n: t.detach().numpy().copy() for n, t in tensors if t.is_floating_point()}


def _whole(spec: ProblemSpec) -> Any:
    """Return the gradient of the whole model's loss, to be compiled."""

    def value(values: Any, batch: Any) -> Any:
        return objective(
            spec.loss, jax_output(spec, values, batch), batch, np.ones(len(batch["x"]))
        )

    return jax.grad(value)


def _trained(instance: Instance) -> list[Any]:
    """Run the loop; return the arguments of each gradient to be compared: the parameters of a step
    and its window.

    Where the optimizer leaves the parameters as they are, the windows of all epochs are those of
    the first.
    """
    assert instance.arrays is not None
    run, plan, arrays = instance.run(), instance.case.plan, instance.arrays
    steps: list[Any] = []

    def note(*_: Any) -> None:
        items = plan.window_items(len(steps) % len(plan.windows))
        values = steps[0][0] if steps and instance.case.optimizer is None else _values(run.model)
        steps.append(
            (values, {name: array[items.start : items.stop] for name, array in arrays.items()})
        )

    handle = run.optimizer.register_step_pre_hook(note)
    LOOP(run)
    handle.remove()
    return steps if instance.case.optimizer else steps[: len(plan.windows)]


def _plain(same_cases: list[Case], compiled: list[Any], *, shared: bool) -> None:
    """Run the loop and the compiled gradient of each case.

    With `shared`, cases of one model have one function.
    """
    functions: dict[Any, Any] = {}
    for case in same_cases:
        instance = generated_instance(case)
        gradient = functions.get(case.problem) if shared else None
        gradient = gradient or functions.setdefault(case.problem, jax.jit(_whole(case.problem)))
        for values, batch in _trained(instance):
            jax.block_until_ready(gradient(values, batch))
        compiled.append((instance, gradient))


@pytest.mark.parametrize("name", ["careful, cold", "careful, warm"])
def test_careful(
    benchmark: Any, same_cases: list[Case], tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """With every program in JAX's persistent cache, however short its compilation.

    The second run finds all of them.
    """
    folder = tmp_path_factory.getbasetemp() / "jax"
    before = {option: getattr(jax.config, option) for option in PERSISTENT}
    for option, value in {**PERSISTENT, "jax_compilation_cache_dir": str(folder)}.items():
        jax.config.update(option, value)
    compilation_cache.reset_cache()
    try:
        _measure(
            benchmark, name, lambda: _plain(same_cases, [], shared=True), jax.clear_caches, rounds=1
        )
    finally:
        for option, value in before.items():
            jax.config.update(option, value)
        compilation_cache.reset_cache()
    assert any(folder.iterdir()), "JAX kept no program on disk"


def test_plain(benchmark: Any, same_cases: list[Case], compiled: list[Any]) -> None:
    jax.clear_caches()
    _measure(
        benchmark, "plain", lambda: _plain(same_cases, compiled, shared=False), _nothing, rounds=1
    )


def _floor(compiled: list[Any]) -> None:
    for instance, gradient in compiled:
        for values, batch in _trained(instance):
            jax.block_until_ready(gradient(values, batch))


def test_floor(benchmark: Any, compiled: list[Any]) -> None:
    assert len(compiled) == CASES, "the floor runs what the plain way compiled"
    _measure(benchmark, "floor", lambda: _floor(compiled), _nothing, rounds=3)


def _measure_beside_floor(
    benchmark: Any, name: str, setup: Callable[[], None], compiled: list[Any]
) -> None:
    """Time rounds of the suite, the floor before each and after the last, so that both meet the
    machine in one state.

    The speed of a shared machine changes within minutes by more than what is to be told apart.
    """
    floors: list[float] = []

    def floor_first() -> None:
        setup()
        began = time.perf_counter()
        _floor(compiled)
        floors.append(time.perf_counter() - began)

    _measure(benchmark, name, _suite, floor_first, rounds=ALTERNATED)
    floor_first()
    around = [(before + after) / 2 for before, after in pairwise(floors)]
    rounds = zip(benchmark.stats.stats.data, around, strict=True)
    RATIOS[name] = statistics.median(seconds / floor for seconds, floor in rounds)


def test_suite_steady(
    benchmark: Any,
    monkeypatch: pytest.MonkeyPatch,
    store: Path,
    second: ExitStack,
    compiled: list[Any],
) -> None:
    _fresh(monkeypatch, store, second)
    _suite()
    _measure_beside_floor(benchmark, "suite, steady", lambda: _forget_cases(monkeypatch), compiled)


def test_suite_in_one_process(
    benchmark: Any,
    monkeypatch: pytest.MonkeyPatch,
    store: Path,
    second: ExitStack,
    compiled: list[Any],
) -> None:
    _fresh(monkeypatch, store, second)
    second.close()
    _suite()
    _measure_beside_floor(benchmark, "in one process", lambda: _forget_cases(monkeypatch), compiled)


def test_ratios(same_cases: list[Case], capsys: pytest.CaptureFixture[str]) -> None:
    """Print the table, and what the cases were like."""
    layers = Counter(layer.kind for case in same_cases for layer in case.problem.layers)  # type: ignore[union-attr]
    depth = Counter(len(case.problem.layers) for case in same_cases)  # type: ignore[union-attr]
    micro = Counter(len(case.plan.micro_batches) for case in same_cases)
    with capsys.disabled():
        print(f"\n{len(same_cases)} cases; layers: {dict(layers.most_common())}")
        print(
            f"depth: {dict(sorted(depth.items()))}; micro-batches per epoch: {dict(sorted(micro.items()))}"
        )
        for name, seconds in SECONDS.items():
            per_case = 1e3 * seconds / CASES
            print(f"{name:>18}: {seconds:8.2f} s, {per_case:8.2f} ms per case")
        for a, b in (
            ("careful, cold", "suite, cold"),
            ("careful, warm", "suite, warm"),
            ("plain", "suite, warm"),
            ("plain", "suite, cold"),
        ):
            if a in SECONDS and b in SECONDS:
                print(f"{a} / {b}: {SECONDS[a] / SECONDS[b]:.2f}")
        for name, ratio in RATIOS.items():
            print(
                f"{name} / floor: {ratio:.2f}, the median of {ALTERNATED} rounds beside one another"
            )
        print(_others() or "The process had the machine to itself.")
