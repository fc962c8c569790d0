"""The kinds of records that the studies make, beside those of the suite, and what makes them older
than the code.
"""

from __future__ import annotations

from pathlib import Path

from gradcheck_suite.core import records
from gradcheck_suite.core.records import JUDGING, LOOPS, Kind

HERE = Path(__file__).resolve().parent


def _own(*names: str) -> tuple[Path, ...]:
    return tuple(HERE / name for name in names)


MEASURING: tuple[str | Path, ...] = (
    *LOOPS,
    *_own(
        "compiled_steps.py",
        "ledger.py",
        "memory.py",
        "reset_laws.py",
        "reset_modes.py",
        "step_times.py",
    ),
    *_own("workload.py"),
)
"""The modules that decide what is measured."""
KINDS = {
    **records.KINDS,
    **{
        kind.name: kind
        for kind in (
            Kind("benchmark", MEASURING),
            Kind("memory", MEASURING),
            Kind("gpu", (*JUDGING, *MEASURING), ("part", "task", "device")),
            Kind("claim", (*JUDGING, *MEASURING, *_own("claims.py"))),
            Kind("zoo", (*JUDGING, *_own("zoo")), ("dtype",)),
            Kind("zoo-count", (*JUDGING, *_own("zoo")), ("bug",)),
            Kind("calibration", (*JUDGING, *_own("calibration.py", "tally.py")), ()),
            Kind("bridge", JUDGING, ("architecture", "version", "widened")),
            Kind("atlas", (*JUDGING, *_own("atlas.py", "atlas_points.py")), ()),
            Kind(
                "zero-or-none",
                _own("zero_or_none.py", "zero_or_none_laws.py"),
                ("optimizer", "variant"),
            ),
            Kind("step", _own("optimizer_steps.py", "optimizers.py")),
            Kind(
                "traffic",
                (*MEASURING, "run/ranks.py", *_own("traffic.py")),
                ("loop", "ranks", "accumulation_steps"),
            ),
            Kind("public-script", (*JUDGING, "auditing", *_own("public_scripts.py")), ("key",)),
        )
    },
}
"""All kinds, by name."""
