"""Training steps to be measured that are compiled: by torch, as CUDA graphs, in JAX.

And a case under the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.core.case import Case
from gradcheck_suite.core.contract import Batch, Loop, TrainingRun
from gradcheck_suite.loops.jax_modes import RESETS, adder
from gradcheck_suite.run.instance import Instance, generated_instance, seeded
from studies.ledger import Ledger
from studies.reset_modes import ResetMode
from studies.step_times import COPY_BYTES
from studies.workload import BATCH, Size, build, micro_batch, sized_workload, workload

PARTS = ("model", "forward and backward", "step", "step, experts by turns")
"""The compiled part: the model's forward, with the backward eager; both, by compiled autograd; the optimizer's step
where every parameter has a gradient; the optimizer's step where each window reaches one expert of `EXPERTS`."""
VERSIONS = 8
"""Number of versions of a function that `torch.compile` makes before it falls back to eager (`recompile_limit`)."""
EXPERTS = VERSIONS + 4


class Experts(torch.nn.Module):
    """Linear experts of the same shape. A batch passes through one of them."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False, device=device) for _ in range(EXPERTS)
        )
        self.chosen = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the chosen expert's output for the batch, (n, width)."""
        result: torch.Tensor = self.experts[self.chosen](batch)
        return result


def graphs_needed(part: str, mode: ResetMode) -> int:
    """Return how many graphs a part needs under a mode, from what compiled code is specialised on.

    `torch.compile` guards on whether `.grad` is None. The forward is one graph, whatever the
    gradients are. A backward that makes a gradient and a backward that adds to it are two graphs. A
    step is one graph for each set of gradients that are None, up to the limit.
    """
    if part == PARTS[1]:
        return 3 if mode.releases else 2
    return VERSIONS if part == PARTS[3] and mode.releases else 1


def graphs() -> int:
    """Return the number of graphs compiled since the last `forget`."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def forget() -> None:
    """Drop all compiled code and count graphs from 0."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()


def training(
    part: str,
    mode: ResetMode,
    size: Size,
    micro_batches: int,
    device: str,
    *,
    compiled: bool,
    backend: str = "inductor",
) -> Callable[[], None]:
    """Return a function that runs the next window: forward and backward of each micro-batch, a
    step, the reset.

    Args:
        part: the compiled part, of `PARTS`; the same window runs eagerly where `compiled` is false.
        mode: the reset mode.
        size: size of the model; its weights are float32.
        micro_batches: number of micro-batches in a window.
        device: `"cpu"` or `"cuda"`.
        compiled: whether to compile that part.
        backend: backend of `torch.compile`; `"eager"` captures graphs and compiles nothing.
    """
    from torch._dynamo import config as dynamo_settings

    by_turns = part == PARTS[3]
    model: torch.nn.Module = (
        Experts(size.width // 2, device) if by_turns else build(size, device, torch.float32)
    )
    width = size.width // 2 if by_turns else size.width
    batches = [micro_batch(size, device, torch.float32, j)[:, :width] for j in range(micro_batches)]
    work = workload(mode, model, batches)
    work.reset()

    forward: Callable[[torch.Tensor], torch.Tensor] = model

    def backward(batch: torch.Tensor) -> None:
        forward(batch).sum().backward()

    step: Callable[[], object] = work.optimizer.step
    if compiled and part == PARTS[0]:
        forward = torch.compile(model, backend=backend)
    elif compiled and part == PARTS[1]:
        # `torch.compile` reads this setting when it wraps a function, and then traces the backward
        # too
        with dynamo_settings.patch(compiled_autograd=True):
            backward = torch.compile(backward, backend=backend)
    elif compiled:
        step = torch.compile(work.optimizer.step, backend=backend)
    windows = count()

    def run() -> None:
        if isinstance(model, Experts):
            model.chosen = next(windows) % EXPERTS
        for batch in batches:
            backward(batch)
        step()
        work.reset()

    return run


PLACES = ("inside the graph", "between replays")
FINDINGS = ("right", "None", "wrong")
WARM = 3
"""Windows run eagerly on a side stream before a capture, as torch's documentation requires."""


class CapturedWindow:
    """Forward and backward of a window's micro-batches as one CUDA graph, the reset inside it or
    before each replay.

    A replay runs kernels and no Python. A reset that consists of kernels (`zero_`) may run inside
    the graph or between replays. A release may run inside the graph, where its only effect is that
    the first backward writes instead of adding. A release between replays takes the gradients'
    tensors from the parameters, and the next replay fills memory that no parameter holds. See
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(
        self, mode: ResetMode, place: str, size: Size, micro_batches: int, device: str = "cuda"
    ) -> None:
        """Warm up and capture.

        Args:
            mode: the reset mode.
            place: where the reset stands, one of `PLACES`.
            size: size of the model.
            micro_batches: number of micro-batches in a window.
            device: where tensors live; anything but CUDA needs a stand-in for `torch.cuda`'s
                graphs.
        """
        self.place, self.size, self.micro_batches, self.device = place, size, micro_batches, device
        self.workload = sized_workload(mode, size, micro_batches, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self.workload.reset()
                self.workload.accumulate()
        torch.cuda.current_stream().wait_stream(side)
        self.workload.reset()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            if place == PLACES[0]:
                self.workload.reset()
            self.workload.accumulate()

    def replay(self) -> None:
        """Run a window: the reset if it stands between replays, then the graph."""
        if self.place == PLACES[1]:
            self.workload.reset()
        self.graph.replay()

    def finding(self) -> str:
        """Return what `.grad` is after two replays on data other than the captured data: right,
        None or wrong.

        Right is what the same window gives eagerly, in another model, up to rounding.
        """
        for j, batch in enumerate(self.workload.batches):
            batch.copy_(micro_batch(self.size, self.device, torch.float32, self.micro_batches + j))
        for _ in range(2):
            self.replay()
        eager = build(self.size, self.device, torch.float32)
        for batch in self.workload.batches:
            eager(batch).sum().backward()
        found = [p.grad for p in self.workload.parameters if p.grad is not None]
        expected = [p.grad for p in eager.parameters() if p.grad is not None]
        if len(found) < len(expected):
            return FINDINGS[1]
        alike = all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(found, expected, strict=True))
        return FINDINGS[0] if alike else FINDINGS[2]


def compiled_window(
    mode: str, size: Size, micro_batches: int, dtype: str, device: jax.Device
) -> tuple[Any, Callable[[], Any]]:
    """Compile what one window runs under a reset mode of JAX.

    Args:
        mode: a name in `JAX_MODES`. The window of `jax_scan_carry` is one program, that of another
            mode calls a program for each micro-batch.
        size: size of the model.
        micro_batches: number of micro-batches in a window.
        dtype: dtype of weights and data.
        device: where it runs.

    Returns:
        The compiled program, and a function that runs one window, waits for it and returns the
        gradients, whose buffers the next window may take.
    """
    kind = jnp.dtype(dtype)

    def loss(weights: Any, batch: jax.Array) -> jax.Array:
        for w in weights:
            batch = batch @ w.T
        return batch.sum()

    def part(weights: Any, batch: jax.Array) -> Any:
        # without the loss among the results, XLA would leave out the last layer's forward
        value, gradient = jax.value_and_grad(loss)(weights, batch)
        return gradient, value

    def scanned(old: Any, weights: Any, batches: jax.Array) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, old)
        return jax.lax.scan(
            lambda kept, b: (jax.tree.map(jnp.add, kept, part(weights, b)), None), zeros, batches
        )[0]

    with jax.default_device(device):
        shape = (size.width, size.width)
        weights = tuple(jnp.full(shape, 1 / size.width, kind) for _ in range(size.tensors))
        batches = jnp.asarray(
            np.random.default_rng(0).random((micro_batches, BATCH, size.width)), kind
        )
        kept = [(tuple(jnp.zeros(shape, kind) for _ in range(size.tensors)), jnp.zeros((), kind))]
        if mode in RESETS:
            calls: list[tuple[Any, ...]] = [
                (batch, jnp.asarray(number == 0)) for number, batch in enumerate(batches)
            ]
            program = adder(mode, part).lower(kept[0], weights, *calls[0]).compile()
        else:
            calls = [(batches,)]
            # no value of the donated gradients is read, so that JAX would drop the argument and
            # allocate others
            jitted = jax.jit(scanned, donate_argnums=0, keep_unused=True)
            program = jitted.lower(kept[0], weights, batches).compile()

    def run() -> Any:
        for arguments in calls:
            kept[0] = program(kept[0], weights, *arguments)
        return jax.block_until_ready(kept[0])[0]

    return program, run


def flush_caches(device: jax.Device) -> Callable[[], None]:
    """Return a function that evicts everything else from a device's caches, on JAX's stream, and
    waits for it.
    """
    scratch = [
        jax.device_put(
            np.zeros(COPY_BYTES["cpu" if device.platform == "cpu" else "cuda"] // 8, np.float32),
            device,
        )
    ]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def run() -> None:
        scratch[0] = jax.block_until_ready(add(scratch[0]))

    return run


def memory_bytes(program: Any) -> dict[str, int]:
    """Return the bytes that XLA reports for the program's arguments, outputs, aliases and
    temporaries.
    """
    analysis = program.memory_analysis()
    return {
        name: int(getattr(analysis, f"{name}_size_in_bytes"))
        for name in ("argument", "output", "alias", "temp")
        if analysis is not None
    }


def record(loop: Loop, subject: Case | Instance | TrainingRun) -> Ledger:
    """Run a loop under a new ledger and return the closed ledger.

    The loop receives the run unchanged except for `run.loss`, which marks the forward phase.

    Args:
        loop: any loop under the loop contract; its exceptions propagate.
        subject: a generated case, an instance, or a run.

    Raises:
        UsageError: the loop used a tensor that is not dense, such as a sparse gradient.
    """
    seed = 0
    if isinstance(subject, Case):
        subject = generated_instance(subject)
    if isinstance(subject, Instance):
        seed, subject = subject.case.seed, subject.run()
    run = subject
    ledger = Ledger(run.model, run.optimizer)

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        with ledger.phase("forward"):
            return run.loss(model, batch)

    # restoring the random state allocates, so it stays outside the ledger
    with seeded(seed, run.device), torch.enable_grad(), ledger:
        loop(replace(run, loss=loss))
    return ledger
