"""Claims about size: the traffic of a very large model (C1.7), when zeroing suffices (C1.8), and memory (C3.4)."""

from __future__ import annotations

from gradcheck_suite.evidence.claims.claim import Claim, Finding
from gradcheck_suite.evidence.claims.training_under_ledger import train
from gradcheck_suite.loops.laws import bytes_saved_by_releasing
from gradcheck_suite.measure.bandwidth import copy_bandwidth
from gradcheck_suite.measure.clock import timer
from gradcheck_suite.measure.paired_steps import ITEMS, MICRO_BATCHES, PAIRS, PARAMETERS, time_paired_steps
from gradcheck_suite.measure.workload import Size
from gradcheck_suite.records.step_times import answer

VERY_LARGE = 405e9
"""Parameters of the model that C1.7 speaks of."""
STATED_BANDWIDTH = 2e12
"""Bandwidth that the claim states, in bytes per second."""
FLOPS = 4e14
"""Floating-point operations per second of a device in training: 40% of the 989e12 that NVIDIA states for an H100 in
bfloat16 (data sheet, dense)."""
OPERATIONS_PER_PARAMETER = 6
"""Operations per parameter in one token's forward and backward (Kaplan et al. 2020, Scaling Laws for Neural Language
Models, section 2.1)."""
PASSES = bytes_saved_by_releasing(1)
"""Number of times that zero mode moves the gradients' bytes per step beyond a release; see C1.6."""


def _very_large() -> Finding:
    here = copy_bandwidth("cpu", timer("cpu"))
    figures = {}
    for name, itemsize in (("float32", 4), ("bfloat16", 2)):
        size = VERY_LARGE * itemsize
        figures[f"{name}: one gradient of 405e9 parameters"] = f"{size / 1e12:.2f} TB"
        figures[f"{name}: moved once at 2 TB/s"] = f"{size / STATED_BANDWIDTH:.2f} s"
        figures[f"{name}: zero mode's {PASSES} passes at 2 TB/s"] = f"{PASSES * size / STATED_BANDWIDTH:.2f} s"
        figures[f"{name}: moved once at this machine's measured {here / 1e9:.1f} GB/s"] = f"{size / here:.0f} s"
    once, shares = VERY_LARGE * 4 / STATED_BANDWIDTH, {}
    for tokens in (1024, 16384, 131072, 1048576):
        traffic = PASSES * VERY_LARGE * 4 / STATED_BANDWIDTH
        compute = OPERATIONS_PER_PARAMETER * VERY_LARGE * tokens / FLOPS
        shares[tokens] = traffic / (traffic + compute)
        figures[f"share of a step of {tokens:,} tokens per replica (float32, 2 TB/s, 4e14 op/s)"] = (
            f"{100 * shares[tokens]:.3g}%"
        )
    assert shares[1024] > 0.2
    assert shares[1048576] < 0.001
    return Finding(
        "conditional",
        f"Moving {VERY_LARGE * 4 / 1e12:.2f} TB of float32 gradients once takes {once:.2f} s at 2 TB/s; the {PASSES} "
        f"passes of zero mode take {PASSES * once:.2f} s. Devices share traffic and work alike, so the share of a step "
        f"depends only on the tokens that a replica processes per step: {100 * shares[1024]:.2g}% of the step at 1,024 "
        f"tokens, {100 * shares[131072]:.2g}% at 131,072.",
        condition="few tokens per replica and step, below about 10,000",
        figures=figures,
        counterexample=f"131,072 tokens per replica and step: {100 * shares[131072]:.2g}% of the step",
    )


def _decision() -> Finding:
    sizes = [Size(parameters, "few") for parameters in PARAMETERS["cpu"]]
    rows = tuple(
        time_paired_steps(size, items, k, pairs=PAIRS).to_row(size, "cpu")
        for size in sizes
        for items in ITEMS
        for k in MICRO_BATCHES
    )
    return Finding("conditional", rows=rows, **answer(rows))


def _limited_memory() -> Finding:
    total = 1024
    peaks = {}
    for k in (1, 2, 4, 8, 16):
        ledger, size = train("set_to_none", width=32, items=total // k, micro_batches=k)
        peaks[k] = ledger.peak(window=1).bytes
    ordered = [peaks[k] for k in sorted(peaks)]
    assert ordered == sorted(ordered, reverse=True)
    assert peaks[16] < peaks[1] / 4
    return Finding(
        "confirmed",
        "With a fixed batch, the peak falls with the number of micro-batches, as the activations do, towards the "
        "memory of parameters and gradients. The bytes were counted; nothing was run on a GPU.",
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
        short="Gradients of 405 B parameters take long",
    ),
    Claim(
        "C1.8",
        "For small models, or when memory is no constraint, zeroing suffices; model size, hardware, batch size and "
        "update frequency decide.",
        "steps under both modes in turn, timed on this machine's CPU",
        _decision,
        short="For small models zeroing suffices",
    ),
)
MEMORY_CLAIMS = (
    Claim(
        "C3.4",
        "Accumulation helps where GPU memory is limited.",
        "the ledger's peak for 1,024 items cut into 1 to 16 micro-batches",
        _limited_memory,
        short="Accumulation helps if memory is short",
    ),
)
