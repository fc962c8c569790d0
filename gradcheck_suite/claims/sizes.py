"""Claims about size: the traffic of a very large model (C1.7), when it matters at all (C1.8), and memory (C3.4)."""

from __future__ import annotations

import time
from statistics import median

import torch

from gradcheck_suite.claims.ledgered import train
from gradcheck_suite.claims.record import Claim, Finding
from gradcheck_suite.costs.clock import timer
from gradcheck_suite.costs.floors import copy_bandwidth
from gradcheck_suite.costs.models import Size, build
from gradcheck_suite.costs.resets import MODES, prepare, set_to_none, window

PARAMETERS = 405e9
STATED_BANDWIDTH = 2e12
"""Bytes per second, the claim's."""
FLOPS = 4e14
"""Operations per second that a device reaches in training: 40% of the 989e12 that NVIDIA states for an H100 in
bfloat16 (data sheet, dense)."""
OPERATIONS_PER_PARAMETER = 6
"""Of one token's forward and backward (Kaplan et al. 2020, Scaling Laws for Neural Language Models, section 2.1)."""
MOVED = 4
"""Times the gradients' bytes that zero mode moves per step beyond a release; see C1.6."""


def _very_large() -> Finding:
    here = copy_bandwidth("cpu", timer("cpu"))
    figures = {}
    for name, itemsize in (("float32", 4), ("bfloat16", 2)):
        size = PARAMETERS * itemsize
        figures[f"{name}: one gradient of 405e9 parameters"] = f"{size / 1e12:.2f} TB"
        figures[f"{name}: moved once at 2 TB/s"] = f"{size / STATED_BANDWIDTH:.2f} s"
        figures[f"{name}: zero mode's {MOVED} passes at 2 TB/s"] = f"{MOVED * size / STATED_BANDWIDTH:.2f} s"
        figures[f"{name}: moved once at this machine's measured {here / 1e9:.1f} GB/s"] = f"{size / here:.0f} s"
    shares = {}
    for tokens in (1024, 16384, 131072, 1048576):
        traffic = MOVED * PARAMETERS * 4 / STATED_BANDWIDTH
        compute = OPERATIONS_PER_PARAMETER * PARAMETERS * tokens / FLOPS
        shares[tokens] = traffic / (traffic + compute)
        figures[f"share of a step of {tokens:,} tokens per replica (float32, 2 TB/s, 4e14 op/s)"] = (
            f"{100 * shares[tokens]:.3g}%"
        )
    assert shares[1024] > 0.2
    assert shares[1048576] < 0.001
    return Finding(
        "conditional",
        "Moving 1.62 TB of float32 gradients once takes 0.81 s at 2 TB/s, 3.24 s for the four passes of zero mode. "
        "Both "
        "traffic and work are shared among devices alike, so its share of a step depends on the tokens that a replica "
        "works on per step alone: a third at 1,024, less than 1% at 131,072.",
        condition="few tokens per replica and step, below about 10,000",
        figures=figures,
        counterexample="131,072 tokens per replica and step: a third of a percent",
    )


def _milliseconds(mode: str, size: Size, items: int, micro_batches: int) -> float:
    model = build(size, "cpu", torch.float32)
    parameters = list(model.parameters())
    batches = [torch.full((items, size.width), 0.5) for _ in range(micro_batches)]
    chosen = MODES[mode]
    prepare(chosen, parameters)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        window(chosen, model, parameters, batches)
        seconds.append(time.perf_counter() - start)
    return 1000 * median(seconds[2:])


def _decision() -> Finding:
    figures = {}
    gains = {}
    for parameters in (10**5, 10**6, 10**7):
        size = Size(parameters, "few")
        for items in (1, 64):
            for k in (1, 8):
                zero, none = (_milliseconds(mode, size, items, k) for mode in ("zero_", "set_to_none"))
                gains[parameters, items, k] = (zero - none) / zero
                figures[f"{parameters:.0e} parameters, {items} items, K = {k}: saved by releasing"] = (
                    f"{zero - none:+.3f} ms of {zero:.3f} ({100 * (zero - none) / zero:+.0f}%); "
                    f"{size.bytes(torch.float32) / 2**20:.1f} MiB between steps"
                )
    return Finding(
        "conditional",
        "What decides is the share of the gradients' traffic in a step: large models, few items and K = 1 gain in "
        "time; "
        "with many items per step or much accumulation the difference drowns. Memory between steps is one gradient's "
        "worth, whatever the rest.",
        condition="gradients that fit in a cache, many items per step, or large K: the times differ by noise",
        figures=figures,
        counterexample="",
    )


def _limited_memory() -> Finding:
    total = 1024
    peaks = {}
    for k in (1, 2, 4, 8, 16):
        ledger, size = train(set_to_none, width=32, items=total // k, micro_batches=k)
        peaks[k] = ledger.peak(window=1).bytes
    ordered = [peaks[k] for k in sorted(peaks)]
    assert ordered == sorted(ordered, reverse=True)
    assert peaks[16] < peaks[1] / 4
    return Finding(
        "confirmed",
        "With the batch held fixed, the peak falls with the number of micro-batches as the activations do, towards "
        "what "
        "parameters and gradients need in any case.",
        figures={
            "bytes of parameters, and of gradients": size,
            **{f"peak bytes, 1024 items in K = {k} micro-batches": peak for k, peak in peaks.items()},
        },
    )


CLAIMS = (
    Claim(
        "C1.7",
        "Even at 2 TB/s, transferring the gradients of a very large model (405 B parameters) is significant.",
        "arithmetic from the ledger's law of C1.6; the copy bandwidth of this machine is measured",
        _very_large,
    ),
    Claim(
        "C1.8",
        "For small models, or when memory is no constraint, zeroing may do; what decides: model size, hardware, batch "
        "size, update frequency.",
        "windows timed under both modes on this machine's CPU, medians of 5",
        _decision,
    ),
)
MEMORY_CLAIMS = (
    Claim(
        "C3.4",
        "Accumulation serves limited GPU memory.",
        "the ledger's peak for 1,024 items cut into 1 to 16 micro-batches",
        _limited_memory,
    ),
)
