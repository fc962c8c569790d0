"""Memory in a process of its own, against bytes counted by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradcheck_suite.errors import UsageError
from studies import memory
from studies.memory import main, window_memory
from studies.reset_modes import BENCHMARKED, RESET_MODES
from studies.tests.costs import fake_cuda
from studies.workload import BATCH, Size, build, sized_workload, workload

ASKED = {
    "parameters": 2_000_000,
    "layout": "few",
    "micro_batches": 2,
    "dtype": "float32",
    "device": "cpu",
}


@pytest.mark.parametrize(("mode", "kept"), [("zero_", 8_000_000), ("set_to_none", 0)])
def test_gradients_between_steps_are_all_or_none(mode, kept):
    """Two weights of 1,000 x 1,000 float32: 8 MB.

    The peak is weights, sums and a fresh gradient of one of them.
    """
    found = json.loads(main(json.dumps({**ASKED, "mode": mode})))
    assert found["gradients_between"] == kept
    assert found["between"] == 8_000_000 + kept
    assert 8_000_000 + 8_000_000 + 4_000_000 <= found["peak"] < 20_200_000
    # a window starts and ends after a reset; the peak is one of its moments
    moments = list(zip(*found["window"].values(), strict=True))
    assert (found["window"]["gradients"][0], found["window"]["gradients"][-1]) == (kept, kept)
    assert max(found["window"]["gradients"]) == 8_000_000
    assert max(map(sum, moments)) == found["peak"]
    assert sum(moments[-1]) == found["between"]


@pytest.mark.full
def test_a_process_of_its_own_counts_resident_pages():
    command = [sys.executable, "-m", "studies.memory", json.dumps({**ASKED, "mode": "zero_"})]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if found["resident_peak"] is None:
        pytest.skip("the system reports no resident pages")
    assert found["resident_peak"] > found["peak"] - 8_000_000


def _peaks(monkeypatch, *, reset=None, warm=True):
    """Return what is counted of windows that allocate 3,000 bytes, after one with 9,000.

    Inputs have 1,000. The first window of the process makes a workspace of 500 bytes.
    """
    device = fake_cuda.install(monkeypatch)
    if reset is not None:
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    first = SimpleNamespace(window=lambda: device.allocate(500) if warm else None)
    monkeypatch.setattr(memory, "sized_workload", lambda *size, **about: first)
    baseline = memory.allocator_baseline(
        RESET_MODES["zero_"], Size(100, "few"), "cuda", torch.float32
    )
    device.allocate(1000)
    if not warm:
        device.allocate(500)

    def window(size):
        device.allocate(size)
        device.free(size)

    window(9000)
    work = SimpleNamespace(batches=[torch.zeros(250)], window=lambda: window(3000))
    return memory.allocator_peak(work, baseline)


def test_the_allocators_peaks_are_those_above_the_baseline_and_the_inputs(monkeypatch):
    found = _peaks(monkeypatch)
    # 3,000 bytes need 6 blocks of 512; the workspace and the inputs are subtracted
    assert (found.requested_peak, found.allocated_peak, found.allocations) == (3000, 3072, 1)


def test_peaks_that_are_not_reset_before_the_windows_are_told(monkeypatch):
    """Planted fault: the peak of an earlier, larger window is taken for the measured ones'."""
    assert _peaks(monkeypatch, reset=lambda: None).requested_peak == 9000


def test_a_baseline_before_the_first_window_misses_the_workspace(monkeypatch):
    """Planted fault: the libraries' workspace counts as a cost of the mode."""
    assert _peaks(monkeypatch, warm=False).requested_peak == 3500


@pytest.mark.parametrize(("micro_batches", "rows"), [(1, 1), (4, 0)])
def test_zeroing_raises_the_peak_by_one_fresh_gradient_unless_micro_batches_are_added(
    micro_batches, rows
):
    """Of a model of a thousand million parameters, on tensors without data.

    With one micro-batch, zeroing has its peak at the last layer, the first of a backward: both
    zeroed gradients are alive, the fresh gradient of one weight, and the layer's output (BATCH
    rows). A release has its peak at the first layer: two fresh gradients are alive, and that output
    no longer. With several micro-batches both modes have zeroed or partly summed gradients alive at
    the last layer.
    """
    size = Size(10**9, "few")
    with FakeTensorMode():
        zero, none = (
            window_memory(sized_workload(RESET_MODES[name], size, micro_batches))[0]
            for name in ("zero_", "set_to_none")
        )
    assert zero - none == rows * (size.width + BATCH) * size.width * 4


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="torch for CPUs has no fake tensors on CUDA"
)
@pytest.mark.parametrize("mode", BENCHMARKED, ids=lambda mode: mode.name)
def test_a_model_is_built_and_reset_on_a_gpu_without_one(mode):
    """No backward: autograd asks for a real device."""
    with FakeTensorMode():
        work = workload(mode, build(Size(10**6, "many"), "cuda", torch.bfloat16), [])
        work.reset()
        kept = [p.grad for p in work.parameters if p.grad is not None]
    assert len(kept) == (0 if mode.releases else 100)
    assert all(g.device.type == "cuda" and g.dtype == torch.bfloat16 for g in kept)


def test_an_unknown_mode_is_refused():
    with pytest.raises(UsageError, match="mode must be one of zero_"):
        main(json.dumps({**ASKED, "mode": "zero"}))
