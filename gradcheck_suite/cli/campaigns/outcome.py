"""What the shards of a campaign come to together: the document of `--json`, the lines to print, the exit status."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.campaigns.folder import COULD_NOT_RUN, OUTPUT, Shards
from gradcheck_suite.cli.campaigns.shards import Plan
from gradcheck_suite.schema.results import json_number

Json = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a campaign found.

    Attributes:
        document: what `--json` writes beside schema and environment.
        lines: to print.
        status: exit status.
        copied: kinds of the shards' own records that are kept.
        record: (kind, data) of a record of the campaign itself; None where the shards' own records say all.
    """

    document: Json
    lines: list[str]
    status: int
    copied: tuple[str, ...] = ()
    record: tuple[str, Json] | None = field(default=None)


def outcome(plan: Plan, shards: Shards) -> Outcome:
    """Return what the shards of a campaign, all of them done, come to."""
    return _OUTCOMES[plan.what](plan, shards)


def failed(plan: Plan, shards: Shards) -> tuple[int, str] | None:
    """Return exit status and error message of the first shard that could not be run; None where every shard was."""
    for number, command in enumerate(plan.shards):
        status = shards.status(number)
        if status not in COULD_NOT_RUN:
            continue
        said = (shards.output(number).splitlines() or [""])[-1]
        message = said.partition(" error: ")[2] or said
        if status == exit_status.BAD_USAGE:
            return status, message
        return status, (
            f"`{shlex.join(['gradcheck-suite', *command])}` ended with status {status}: {message}; its output is in "
            f"{shards.place(number) / OUTPUT}, and the same campaign goes on with the shards that are not done"
        )
    return None


def merged_result(parts: Sequence[Json]) -> Json:
    """Return the results of one loop's shards as one; the first violation is the loop's."""
    first = next((part for part in parts if part["verdict"] == "violated"), None)
    before = parts[: parts.index(first)] if first is not None else []
    violation = first and first["violation"]
    if violation and violation["found_after"] is not None:
        violation = violation | {"found_after": violation["found_after"] + sum(part["cases"] for part in before)}
    return parts[0] | {
        "verdict": "holds" if first is None else "violated",
        **{name: sum(part[name] for part in parts) for name in ("cases", "judged", "windows")},
        "seconds": round(sum(part["seconds"] for part in parts), 3),
        "worst_error_over_allowed": json_number(max(float(part["worst_error_over_allowed"]) for part in parts)),
        "findings": list(dict.fromkeys(finding for part in parts for finding in part["findings"])),
        **{name: _added(part[name] for part in parts) for name in ("skipped", "windows_skipped")},
        "moved_by_zeros": _moved_by_zeros([part["moved_by_zeros"] for part in parts if part.get("moved_by_zeros")]),
        "shrinking": (first or parts[0])["shrinking"],
        "violation": violation,
    }


def _moved_by_zeros(found: Sequence[Json]) -> Json | None:
    return {**found[0], "cases": sum(part["cases"] for part in found)} if found else None


def _added(counts: Any) -> Json:
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(total)


def _results(plan: Plan, shards: Shards) -> list[Json]:
    """Return one merged result for each loop that shards of `verify` verified, in the order of the shards."""
    by_loop: dict[str, list[Json]] = {}
    for number, command in enumerate(plan.shards):
        if command[0] == "verify":
            for result in shards.result(number)["results"]:
                by_loop.setdefault(result["loop"], []).append(result)
    return [merged_result(parts) for parts in by_loop.values()]


def _line(result: Json) -> str:
    violation = result["violation"]
    verdict = f"VIOLATED  {violation['kind']}: {violation['diagnosis']}" if violation else "holds"
    return f"{result['loop']}  {verdict}  {result['cases']:,} cases"


def _status(results: Sequence[Json], *, violated: bool = False) -> int:
    return exit_status.status_of(
        violated=violated or any(result["verdict"] == "violated" for result in results),
        findings=any(result["findings"] for result in results),
    )


def _verify(plan: Plan, shards: Shards) -> Outcome:
    results = _results(plan, shards)
    return Outcome({"results": results}, list(map(_line, results)), _status(results), ("verify",))


def _zoo(plan: Plan, shards: Shards) -> Outcome:
    numbers = [n for n, command in enumerate(plan.shards) if command[0] == "zoo"]
    rows = [row for n in numbers for row in shards.result(n)["bugs"]]
    results = _results(plan, shards)
    data = {
        "dtype": plan.asked.dtype,
        "seeds": plan.asked.seeds,
        "examples": plan.asked.examples,
        "bugs": rows,
        "sound": [
            {
                "loop": result["loop"],
                "cases": result["cases"],
                "blamed": result["verdict"] == "violated",
                "worst": result["worst_error_over_allowed"],
            }
            for result in results
        ],
    }
    lines = [
        f"{row['name']}  found in {row['found']} of {row['runs']} runs  "
        + ", ".join(f"{name} x{count}" for name, count in row["names"].items())
        for row in rows
    ]
    lines += [f"sound loop {_line(result)}" for result in results]
    failing = any(shards.status(n) == exit_status.VIOLATED for n in numbers)
    whole = ("zoo", data) if not plan.asked.bugs else None
    return Outcome(data, lines, _status(results, violated=failing), record=whole)


def _calibrate(plan: Plan, shards: Shards) -> Outcome:
    from gradcheck_suite.evidence.calibration import campaign, console_table
    from gradcheck_suite.evidence.calibration.curve import Curve, curve_from_json
    from gradcheck_suite.evidence.calibration.summary import false_alarms
    from gradcheck_suite.evidence.calibration.tally import Tally, tally_from_json

    tallies: dict[str, Tally] = {}
    curves: dict[str, Curve] = {}
    for number in range(len(plan.shards)):
        (data,) = (record["data"] for record in shards.records(number, "calibration"))
        for dtype, tally in data["alarms"].items():
            tallies.setdefault(dtype, Tally()).add(tally_from_json(tally))
        for dtype, curve in data["curves"].items():
            curves.setdefault(dtype, Curve()).add(curve_from_json(curve))
    asked = plan.asked
    settings = campaign.Settings(asked.checks, asked.planted, asked.seed, tuple(dict.fromkeys(asked.dtypes)))
    total = campaign.record(settings, tallies, curves)
    findings = any(tally.findings for tally in tallies.values())
    status = exit_status.status_of(violated=bool(false_alarms(total)), findings=findings)
    return Outcome(total, console_table.lines(total), status, record=("calibration", total))


def _trainers(plan: Plan, shards: Shards) -> Outcome:
    numbers = range(len(plan.shards))
    answers = [answer for number in numbers for answer in shards.result(number)["answers"]]
    lines = [line for number in numbers for line in shards.output(number).splitlines()]
    status = max((shards.status(number) for number in numbers), key=_ORDER.index)
    return Outcome({"answers": answers}, lines, status, ("trainer",))


_ORDER = (exit_status.HOLDS, exit_status.DISAGREEMENT, exit_status.VIOLATED)
_OUTCOMES: Mapping[str, Callable[[Plan, Shards], Outcome]] = {
    "verify": _verify,
    "zoo": _zoo,
    "calibrate": _calibrate,
    "trainers": _trainers,
}
