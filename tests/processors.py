"""Run the tests that depend on the processor's arithmetic under each setting of vector width and
threads.

    python -m tests.processors              # the folders of `TESTS`
    python -m tests.processors tests/docs   # other tests

torch and XLA choose their kernels by the processor's vector instructions, and rounding differs
between kernels. No test may depend on it. Exits with 1 where the tests fail under some setting.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import torch

TESTS = ("tests/bridge", "tests/catalogue", "tests/docs", "tests/core", "tests/reference")
SETTINGS: dict[str, Mapping[str, str]] = {
    "torch without vector instructions": {"ATEN_CPU_CAPABILITY": "default"},
    "torch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "torch with AVX-512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "XLA with AVX2": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
    "four threads": {"OMP_NUM_THREADS": "4"},
}
WIDTHS = ("default", "avx2", "avx512")
"""Of torch's kernels; a processor that has one has those before it."""


def _available(setting: Mapping[str, str]) -> bool:
    """Say whether this processor has the instructions: torch crashes where it is told to use
    others.
    """
    wanted = setting.get("ATEN_CPU_CAPABILITY", "default")
    own = torch.backends.cpu.get_cpu_capability().lower()
    return wanted == "default" or (own in WIDTHS and WIDTHS.index(wanted) <= WIDTHS.index(own))


def main(arguments: list[str]) -> int:
    """Run pytest once per setting, and print which settings failed."""
    outcomes = {}
    for name, setting in SETTINGS.items():
        if not _available(setting):
            outcomes[name] = "skipped: this processor lacks the instructions"
            continue
        print(f"\n{name}: {setting}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *(arguments or TESTS)]
        status = subprocess.run(command, env={**os.environ, **setting}, check=False).returncode
        outcomes[name] = f"failed with status {status}" if status else "passed"
    print("", *(f"{name:<34} {outcome}" for name, outcome in outcomes.items()), sep="\n")
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
