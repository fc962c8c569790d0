"""Memory stays flat over many cases: resident size after 5,000 cases against that after 1,000.

The C library keeps freed memory for later, more of it the more threads compile. It is given back
before the size is read, so that what grows is in use. It takes minutes, so it runs alone: `pytest
studies/properties/bench_memory.py`.
"""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest

from gradcheck_suite.core.results import Verdict
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.verification.verify import verify

EARLY, LATE = 1_000, 5_000
GROWTH = 0.10
STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return this process's resident size in bytes, without what the C library keeps of freed
    memory.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="needs /proc/self/statm")
def test_memory_stays_flat(capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[int, int] = {}
    cases = 0

    def count(verdict: Verdict) -> None:
        nonlocal cases
        cases += 1
        if cases % EARLY == 0:
            seen[cases] = resident_bytes()

    result = verify(MODES["set_to_none"], examples=LATE, progress=count)
    assert result.holds
    with capsys.disabled():
        print("\n" + ", ".join(f"{n:,} cases: {size / 2**20:.0f} MiB" for n, size in seen.items()))
    assert seen[LATE] <= (1 + GROWTH) * seen[EARLY]
