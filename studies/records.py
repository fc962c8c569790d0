"""The kinds of records that the studies make, beside those of the suite, and what makes them older
than the code.
"""

from __future__ import annotations

from pathlib import Path

from gradcheck_suite.core import records
from gradcheck_suite.core.records import JUDGING, LOOPS, RecordKind

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
            RecordKind("benchmark", MEASURING),
            RecordKind("memory", MEASURING),
            RecordKind("gpu", (*JUDGING, *MEASURING), ("part", "task", "device")),
            RecordKind("claim", (*JUDGING, *MEASURING, *_own("claims.py"))),
            RecordKind("zoo", (*JUDGING, *_own("zoo")), ("dtype",)),
            RecordKind("zoo-count", (*JUDGING, *_own("zoo")), ("bug",)),
            RecordKind("calibration", (*JUDGING, *_own("calibration.py", "tally.py")), ()),
            RecordKind("bridge", JUDGING, ("architecture", "version", "widened")),
            RecordKind("atlas", (*JUDGING, *_own("atlas.py", "atlas_points.py")), ()),
            RecordKind(
                "zero-or-none",
                _own("zero_or_none.py", "zero_or_none_laws.py"),
                ("optimizer", "variant"),
            ),
            RecordKind("step", _own("optimizer_steps.py", "optimizers.py")),
            RecordKind(
                "traffic",
                (*MEASURING, "run/ranks.py", *_own("traffic.py")),
                ("loop", "ranks", "accumulation_steps"),
            ),
            RecordKind(
                "public-script", (*JUDGING, "auditing", *_own("public_scripts.py")), ("key",)
            ),
        )
    },
}
"""All kinds, by name."""
