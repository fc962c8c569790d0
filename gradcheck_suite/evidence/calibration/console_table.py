"""The figures of a campaign on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_suite.evidence.calibration import summary
from gradcheck_suite.evidence.calibration.curve import OURS
from gradcheck_suite.evidence.calibration.tally import spread_from_json
from gradcheck_suite.numerics.baselines import RIVALS

SHORT = {
    "torch.testing.assert_close": "assert_close",
    "chex.assert_trees_all_close": "chex",
    "twice the reference's rmse": "twice rmse",
    "NNSmith 1e-2/1e-3": "NNSmith",
}


def lines(data: summary.Data) -> list[str]:
    """Return the lines to print."""
    return [*_alarm_lines(data), "", *_detection_lines(data), "", *_summary(data)]


def _table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{row[i]:{'<' if i < left else '>'}{w}}" for i, w in enumerate(widths)) for row in rows]


def _alarm_lines(data: summary.Data) -> list[str]:
    rows = [["dtype", "checks", "judged", "elements", "false alarms", "largest", "by draws", "largest then",
             *(SHORT[rule] for rule in RIVALS)]]  # fmt: skip
    notes = []
    for dtype, tally in data["alarms"].items():
        drawn = spread_from_json(tally["drawn_on"])
        over = tally["over"].get("")
        rows.append(
            [
                dtype,
                f"{tally['checks']:,}",
                f"{tally['judged']:,}",
                f"{tally['elements']:,}",
                str(len(tally["alarms"])),
                f"{over['largest']:.3f}" if over else "-",
                f"{sum(drawn.counts):,}",
                f"{drawn.largest:.3f}",
                *(f"{count:,}" for count in summary.rival_alarms(data, dtype).values()),
            ]
        )
        notes += [f"FALSE ALARM in {dtype}: {a['loop']}: {a['explanation']}" for a in tally["alarms"]]
        notes += [f"finding in {dtype}, {n} checks: {text}" for text, n in tally["findings"].items()]
        notes += [f"{n:,} checks in {dtype} could not be made: {why}" for why, n in tally["skipped"].items()]
    return [
        "Sound loops judged; errors over what is allowed; and how often other rules blame the same loops",
        *_table(rows),
        *notes,
    ]


def _detection_lines(data: summary.Data) -> list[str]:
    rows = [["dtype", "planted in", "cases", OURS, "in half", *(SHORT[rule] for rule in RIVALS)]]
    for row in summary.found(data):
        alarms = summary.rival_alarms(data, row.dtype)
        rivals = [summary.shown(row.sizes[rule]) + ("*" if alarms[rule] else " ") for rule in RIVALS]
        rows.append(
            [row.dtype, row.place, f"{row.cases:,}", summary.shown(row.sizes[OURS]), summary.shown(row.half), *rivals]
        )
    return [
        f"Smallest relative error found in {summary.percent()} of the cases, by the suite also in half of them "
        "(* a rule that blames sound loops)",
        *_table(rows, left=2),
    ]


def _summary(data: summary.Data) -> list[str]:
    alarms, coverage = summary.false_alarms(data), data["coverage"]
    text = [f"{alarms} false alarms in {summary.checks(data):,} checks of sound loops"]
    for what in ("layers", "losses"):
        reached, missing = coverage[what]["reached"], coverage[what]["missing"]
        text.append(f"{reached} of {reached + len(missing)} kinds of {what} reached"
                    + (f"; not reached: {', '.join(missing)}" if missing else ""))  # fmt: skip
    worse = summary.better(data)
    return text + (worse or ["no rule without false alarms finds smaller errors, in any dtype"])
