"""What an audit costs a program that is large in one way: hooks, layouts, layers, optimizers, lines.

Run it by itself, on an idle machine: `pytest -s
studies/properties/benchmarks/bench_audit_at_size.py`, with `-k hooks` for one row. Each program
trains in a process of its own, once without and once with the audit, in turn. A row has the ratios
of the processor time of the training and of the peak of the process's memory, medians over rounds.
Imports and the beginning of the audit are in neither. Steps by the million are in
`tests/auditing/test_harm_at_size.py`: what is kept of these needs no training.

Measured with torch 2.13.0 on two cores of x86-64, one pair of runs of one thread each, with tests on
the other core for the first two rows, as ratios of time and of memory:

- 1,600 layers 1.70 and 1.25 of 26 s and 448 MB
- hooks 1.02 and 1.13 of 25 s and 427 MB
- channels last 0.94 and 1.06 of 5 s and 339 MB; 1.15 in another pair
- 4,000 optimizers 0.70 and 1.02 of 2 s and 322 MB; 1.03 in another pair
- 3,000 lines 0.82 and 1.04 of 5 s and 332 MB; 1.04 in another pair

Of the 1,600 layers 18 s are left, which are fixed in a run: three windows are computed again,
micro-batch by micro-batch, and five are judged, each in about a second for 3,200 parameters. They are
a twentieth of six minutes, so of about 800 windows. Of the memory: 10 MB for what an audit loads and
finds in a program of any size, and the gradients of a window that is computed again, which are as
much as the parameters; in one batch what it saves, 25 MB or a twentieth of the peak at most.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

ROUNDS = int(os.environ.get("GRADCHECK_SUITE_BENCH_ROUNDS", "3"))
ALLOWED = 1.05
PASSES = 4

Program = Callable[[], None]


def _train(model: nn.Module, windows: int, make: Callable[[], torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(windows):
        for _ in range(PASSES):
            (model(make()).square().mean() / PASSES).backward()
        optimizer.step()
        optimizer.zero_grad()


def _mlp(layers: int, size: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(layers)))


def hooks_on_each_parameter() -> None:
    """Train with a hook of the program's on each of 64 parameters."""
    model = _mlp(32, 512)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 1.0)
    _train(model, 120, lambda: torch.randn(64, 512))


def channels_last() -> None:
    """Train convolutions whose elements do not lie in a row."""
    layers = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(12)]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    _train(model, 60, lambda: torch.randn(2, 64, 16, 16).to(memory_format=torch.channels_last))


def many_layers() -> None:
    """Train 1,600 layers."""
    _train(_mlp(1600, 64), 60, lambda: torch.randn(64, 64))


def an_optimizer_for_each_task() -> None:
    """Train 4,000 tasks, each with a parameter and an optimizer of its own."""
    for _ in range(4000):
        weight = nn.Parameter(torch.randn(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (weight * torch.randn(4)).square().mean().backward()
            optimizer.step()


def a_long_script() -> None:
    """Train in a script of 3,000 lines."""
    lines = [f"x{n} = {n}" for n in range(3000)]
    lines += [
        "for _ in range(300):",
        "    for _ in range(4):",
        "        (functional.mse_loss(model(torch.randn(64, 256)), torch.zeros(1)) / 4).backward()",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    ]
    model = _mlp(8, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    names = {"torch": torch, "functional": functional, "model": model, "optimizer": optimizer}
    exec(compile("\n".join(lines), "long_script.py", "exec"), names)


PROGRAMS: dict[str, Program] = {
    "hooks": hooks_on_each_parameter,
    "channels last": channels_last,
    "1,600 layers": many_layers,
    "4,000 optimizers": an_optimizer_for_each_task,
    "3,000 lines": a_long_script,
}


@contextlib.contextmanager
def _audited(is_on: bool) -> Iterator[None]:
    import gradcheck_suite
    import gradcheck_suite.auditing.context  # a part of the memory of both

    if not is_on:
        yield
        return
    with gradcheck_suite.audit(quiet=True) as audit:
        yield
    assert not audit.result.violations, audit.result
    assert audit.result.windows


def _measure(name: str, *, audited: bool) -> tuple[float, float]:
    """Return the seconds of the processor and the peak of memory of a program in a process."""
    command = [sys.executable, "-W", "ignore", __file__, name, "audited" if audited else "plain"]
    root = str(Path(__file__).parents[3])
    found = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root}, check=True, capture_output=True, text=True
    )
    seconds, memory = json.loads(found.stdout.splitlines()[-1])
    return seconds, memory


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_audit_of_a_large_program_takes_little_time_and_memory(name: str) -> None:
    pairs = [(_measure(name, audited=False), _measure(name, audited=True)) for _ in range(ROUNDS)]
    time_ratio, memory_ratio = (
        statistics.median(audited[i] / plain[i] for plain, audited in pairs) for i in (0, 1)
    )
    plain = statistics.median(plain[0] for plain, _ in pairs)
    print(
        f"\n{name}: {plain:.1f} s, load {os.getloadavg()[0]:.1f}:"
        f" {time_ratio:.3f} of the time, {memory_ratio:.3f} of the memory"
    )
    assert memory_ratio <= ALLOWED
    assert time_ratio <= ALLOWED


def _run(name: str, mode: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    begun = time.process_time()
    with _audited(mode == "audited"):
        if mode == "audited":
            begun = time.process_time()
        PROGRAMS[name]()
        seconds = time.process_time() - begun
    print(json.dumps((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)))


if __name__ == "__main__":
    _run(*sys.argv[1:])
