"""How long a port takes to judge: a small one with nothing compiled and with its programs on disk, and GPT-2.

    pytest -s studies/properties/benchmarks/bench_port.py --full

The time is that of the whole judgement, without the imports of torch and jax.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PAIRS = Path(__file__).with_name("port_pairs.py")


def seconds(pair: str, folder: Path) -> float:
    """Judge a pair in a process of its own, with programs kept in a folder, and return what it took."""
    out = folder / "verdict.json"
    command = [sys.executable, "-m", "gradcheck_suite", "port", f"{PAIRS}:{pair}", "--json", str(out)]
    environment = {**os.environ, "GRADCHECK_SUITE_CACHE": str(folder / "programs"), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return float(json.loads(out.read_text())["results"][0]["seconds"])


@pytest.mark.full
def test_a_port_is_judged_in_time(tmp_path: Path) -> None:
    """The limits are those of an idle machine with two cores."""
    rows = [("small, nothing compiled", "small", 10.0), ("small, programs on disk", "small", 4.0)]
    rows += [("GPT-2, nothing compiled", "decoder", 60.0), ("GPT-2, programs on disk", "decoder", 60.0)]
    took = [(words, seconds(pair, tmp_path), limit) for words, pair, limit in rows]
    for words, time, limit in took:
        print(f"{words:<26} {time:6.1f} s of {limit:g}")
    assert all(time <= limit for _, time, limit in took)
