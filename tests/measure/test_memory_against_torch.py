"""The peaks that the ledger predicts, against what torch's allocator hands out, here the CPU's."""

from __future__ import annotations

from functools import cache

import pytest
from torch.profiler import ProfilerActivity, profile

from gradcheck_suite.loops.modes import BENCHMARKED, RESET_MODES
from gradcheck_suite.measure.memory import window_memory
from gradcheck_suite.measure.workload import Size, sized_workload
from properties.benchmarks import bench_memory_modes
from properties.benchmarks.bench_memory_modes import assert_peaks_differ_as_counted

SIZE = Size(20_000, "few")


@cache
def _row(mode, micro_batches):
    """Return what `measure.memory` prints of a mode, with the CPU's allocator in the place of CUDA's."""
    work = sized_workload(RESET_MODES[mode], SIZE, micro_batches)
    peak, window = window_memory(work)
    kept = window["gradients"][-1]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        work.window()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = kept + 4 * SIZE.total
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return {"parameters": SIZE.total, "tensors": SIZE.tensors, "micro_batches": micro_batches, "peak": peak,
            "gradients_between": kept, "allocator": {"requested_peak": most, "allocated_peak": most}}  # fmt: skip


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_peaks_differ_between_modes_as_counted(micro_batches):
    released = _row("set_to_none", micro_batches)
    for mode in BENCHMARKED:
        assert_peaks_differ_as_counted(_row(mode.name, micro_batches), released, mode.name)


def test_a_peak_that_is_four_bytes_off_is_told():
    row = _row("zero_", 1)
    allocator = {**row["allocator"], "requested_peak": row["allocator"]["requested_peak"] + 4}
    with pytest.raises(AssertionError, match="requested="):
        assert_peaks_differ_as_counted({**row, "allocator": allocator}, _row("set_to_none", 1), "zero_")


def test_the_copy_in_a_matrix_product_is_told(monkeypatch):
    """Planted fault: nobody adds the copy of the sum's gradient, which the ledger does not see."""
    monkeypatch.setattr(bench_memory_modes, "BATCH", 0)
    with pytest.raises(AssertionError, match="requested="):
        assert_peaks_differ_as_counted(_row("zero_", 1), _row("set_to_none", 1), "zero_")
