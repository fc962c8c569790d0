"""Timers on a device played by a queue, each with the mistake that it must tell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch._C._autograd import DeviceType

from studies import step_times
from studies.step_times import DeviceStamp, device_work, operations, quartiles, timed
from studies.tests.costs import fake_cuda

FLUSH, WORK = 50e-3, 5e-3


def _timed(device, which):
    found = timed(lambda: device.launch(WORK), lambda: device.launch(FLUSH), 3, "cuda", which)
    assert found == pytest.approx([found[0]] * 3)
    return found[0]


@pytest.mark.parametrize("which", ["device", "host"])
def test_a_round_starts_on_an_idle_device(monkeypatch, which):
    """The device waits for the launch, then works: both clocks show both, and nothing of the flush."""
    assert _timed(fake_cuda.install(monkeypatch), which) == pytest.approx(fake_cuda.LAUNCH + WORK)


def test_a_missing_synchronisation_hides_the_launch(monkeypatch):
    """Planted fault: behind the flush, which still runs, the launch costs the device nothing."""
    device = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(step_times, "settle", lambda device: None)
    assert _timed(device, "device") == pytest.approx(WORK)


@pytest.mark.parametrize("waits", [True, False])
def test_a_flush_ends_when_the_device_is_idle(monkeypatch, waits):
    """Planted fault: without waiting, the host goes on while the device still flushes."""
    device = fake_cuda.install(monkeypatch)
    scratch = SimpleNamespace(add_=lambda one: device.launch(FLUSH))
    monkeypatch.setattr(step_times.torch, "zeros", lambda size, device: scratch)
    if not waits:
        monkeypatch.setattr(step_times, "settle", lambda device: None)
    step_times.flush("cuda")()
    assert (device.host >= device.done) == waits


def test_a_host_clock_that_does_not_wait_sees_the_launch_alone(monkeypatch):
    """Planted fault: the end is stamped while the device still works."""
    device = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(step_times, "_host_seconds_after_device", lambda: device.host)
    assert _timed(device, "host") == pytest.approx(fake_cuda.LAUNCH)


def test_an_event_that_the_device_has_not_reached_has_no_time(monkeypatch):
    """`DeviceStamp` waits for its event.

    Without that the fake, as CUDA, refuses to tell the time.
    """
    device = fake_cuda.install(monkeypatch)
    start = DeviceStamp()
    device.launch(WORK)
    end = DeviceStamp()
    with pytest.raises(RuntimeError, match="not ready"):
        start.event.elapsed_time(end.event)
    assert end - start == pytest.approx(fake_cuda.LAUNCH + WORK)


def test_quartiles_of_five():
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == step_times.Timing(2.0, 3.0, 4.0)


def test_overlapping_kernels_keep_the_device_busy_once():
    def event(start, end, kind=DeviceType.CUDA):
        return SimpleNamespace(device_type=kind, time_range=SimpleNamespace(start=start, end=end))

    # 0 to 10 and 5 to 12 overlap, 20 to 21 stands alone; the operation's own event on the host
    # counts for nothing
    events = [event(0, 10), event(5, 12), event(20, 21), event(0, 100, DeviceType.CPU)]
    assert device_work(events) == (3, pytest.approx(13e-6))


def test_the_wait_at_the_end_and_the_profilers_own_cost_are_no_operations():
    def event(key, host, device=0.0, kind=DeviceType.CPU):
        return SimpleNamespace(
            key=key,
            count=1,
            device_type=kind,
            self_cpu_time_total=host,
            self_device_time_total=device,
        )

    kernel = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int)"
    )
    kept = ["aten::fill_", "Optimizer.zero_grad#AdamW.zero_grad", "autograd::engine::evaluate_function: MmBackward0",
            "MmBackward0"]  # fmt: skip
    averages = [event(kept[0], 1.0, 900.0), *(event(name, 10.0 - i) for i, name in enumerate(kept[1:])),
                event(kernel, 0.0, 900.0, DeviceType.CUDA), event("cudaDeviceSynchronize", 890.0),
                event("cuLaunchKernelEx", 20.0), event("Activity Buffer Request", 1700.0)]  # fmt: skip
    assert [entry["name"] for entry in operations(averages)] == kept
