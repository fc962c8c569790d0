"""What torch itself does on several ranks, without an audit."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.auditing.running import GLOO_AT_EXIT, python_path, run_two_ranks

ENDS = """
import os
import torch

torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for thread in os.listdir("/proc/self/task"):
    if "gloo_runloop" in open(f"/proc/self/task/{thread}/comm").read():
        os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
model(torch.ones(1, 2)).sum().backward()
torch.distributed.destroy_process_group()
"""
"""Gloo's threads run where nothing else wants the processor, as on a busy machine."""


def _statuses(**more: str) -> list[int]:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **more}
    return [status for _, status in run_two_ranks([sys.executable, "-c", ENDS], shared)]


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs the scheduler of Linux")
def test_torch_aborts_a_rank_that_ends_while_a_gloo_thread_releases_a_collective():
    """In a third of the runs here.

    See https://github.com/pytorch/pytorch/pull/179291, closed without a merge.
    """
    assert any(-signal.SIGABRT in _statuses() for _ in range(30))


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs the scheduler of Linux")
def test_a_rank_that_waits_for_its_gloo_threads_does_not_abort():
    """So the tests of audits on two ranks wait for them, and a rank's status is the audit's alone."""
    waits = python_path(GLOO_AT_EXIT)
    assert [_statuses(PYTHONPATH=waits) for _ in range(10)] == [[0, 0]] * 10
