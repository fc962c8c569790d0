"""Long work in shards: each shard is one command line, run by a worker, and its files are merged in the end.

A shard depends on what is asked and on its seeds alone, so the records are the same whatever the number of workers.
Must not judge anything itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradcheck_suite.cli import command_of, exit_status
from gradcheck_suite.cli.arguments import DEFAULTS, OPTIONS, Parser
from gradcheck_suite.core.records import judge_digest, records_path, write_text
from gradcheck_suite.core.results import json_number
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run.environment import versions

# The files of a campaign: one folder a shard, which appears when the shard is done, and the merging of all of them.


STATUS, RESULT, OUTPUT = "status", "result.json", "output.txt"
COUNTEREXAMPLES = "counterexamples"
COULD_NOT_RUN = (exit_status.BAD_USAGE, exit_status.BUG, exit_status.INTERRUPTED)
"""Exit statuses of shards that have not done their work."""


@dataclass(frozen=True)
class Shards:
    """The shards of one campaign on disk.

    Attributes:
        folder: of the campaign; it has one folder for each shard that is done, named by its number.
    """

    folder: Path

    def place(self, number: int) -> Path:
        """Return a shard's folder."""
        return self.folder / f"{number:06d}"

    def partial(self, number: int) -> Path:
        """Return a fresh folder that a shard is written to before it is done."""
        path = self.folder / f"{number:06d}.partial"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def finish(self, number: int, status: int) -> None:
        """Note a shard's exit status, and put its folder in place in one step."""
        partial = self.folder / f"{number:06d}.partial"
        (partial / STATUS).write_text(f"{status}\n")
        shutil.rmtree(self.place(number), ignore_errors=True)  # where it is, it failed or a file of it was cut short
        partial.rename(self.place(number))

    def remove(self) -> None:
        """Remove all of them, and the folder of campaigns where no other one is under way."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()

    def done(self, number: int) -> bool:
        """Return whether a shard is done: one that failed is not, nor is one with a file that is cut short."""
        try:
            if self.status(number) in COULD_NOT_RUN:
                return False
            self.result(number)
            for path in self.place(number).rglob("*.jsonl"):
                for line in path.read_text().splitlines():
                    json.loads(line)
        except (OSError, ValueError):
            return False
        return True

    def status(self, number: int) -> int:
        """Return the exit status of a shard that is done."""
        return int((self.place(number) / STATUS).read_text())

    def result(self, number: int) -> dict[str, Any]:
        """Return what a shard wrote by `--json`; empty where it wrote nothing."""
        path = self.place(number) / RESULT
        document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return document

    def lines(self, number: int, kind: str) -> list[str]:
        """Return the lines that a shard recorded."""
        path = records_path(self.place(number), kind)
        return path.read_text().splitlines() if path.is_file() else []

    def records(self, number: int, kind: str) -> list[dict[str, Any]]:
        """Return the records of a shard."""
        return [json.loads(line) for line in self.lines(number, kind)]

    def output(self, number: int) -> str:
        """Return what a shard printed."""
        path = self.place(number) / OUTPUT
        return path.read_text() if path.is_file() else ""


def merge(shards: Shards, numbers: range, reports: Path, kinds: tuple[str, ...]) -> None:
    """Append the shards' records and copy their counterexamples, in the order of the shards.

    A line that is there already is not appended again, so an interrupted merge can be repeated.

    Args:
        shards: all done.
        numbers: of the shards.
        reports: where the records go.
        kinds: of the records that are appended.
    """
    for kind in kinds:
        path = records_path(reports, kind)
        old = path.read_text().splitlines() if path.is_file() else []
        known = set(old)
        new = [line for number in numbers for line in shards.lines(number, kind) if line not in known]
        if new:
            write_text(path, "".join(f"{line}\n" for line in (*old, *new)))
    for number in numbers:
        for source in _files(shards.place(number) / COUNTEREXAMPLES):
            target = reports / COUNTEREXAMPLES / source.relative_to(shards.place(number) / COUNTEREXAMPLES)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


# How a campaign is cut into shards, one rule for each command that can be one.


CASES = 200
"""Cases of a shard of `verify`, and of one sound loop in a shard of `zoo`."""
CHECKS = 1000
"""Checks of a shard of `calibrate`, in all its dtypes."""
PLANTED = 10
"""Cases with planted errors of a shard of `calibrate`, in each dtype."""

Command = tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A campaign, cut up.

    Attributes:
        what: the command, such as `"verify"`.
        asked: the command's parsed arguments.
        shards: the command line of each shard, without the paths that it writes to.
    """

    what: str
    asked: argparse.Namespace
    shards: tuple[Command, ...]

    @property
    def key(self) -> str:
        """A digest of all that the shards' records depend on: the command lines, the judge and the versions."""
        parts = [self.shards, judge_digest(), versions()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def plan(what: str, rest: Sequence[str]) -> Plan:
    """Return a campaign of one command.

    Args:
        what: one of `CUTS`.
        rest: the command's own arguments; it writes where the campaign says, so `--json` and `--reports` are refused.

    Raises:
        UsageError: a wrong argument.
    """
    module = command_of(what)
    parser = Parser(prog=f"gradcheck-suite campaign {what}", add_help=False)
    module.add_arguments(parser)
    asked = parser.parse_intermixed_args(list(rest))
    for option in ("--json", "--reports"):
        if any(argument == option or argument.startswith(f"{option}=") for argument in rest):
            raise UsageError(f"{option} stands before {what}: gradcheck-suite campaign {option} PATH {what} ...")
    if getattr(asked, "list", False):
        raise UsageError(f"--list is no campaign: gradcheck-suite {what} --list")
    return Plan(what, asked, tuple(CUTS[what](asked)))


def blocks(total: int, size: int) -> list[int]:
    """Return the sizes of the blocks that a total is cut into, all `size` but the last."""
    return [min(size, total - start) for start in range(0, total, size)]


def _shards_verify(asked: argparse.Namespace) -> list[Command]:
    """Cut by loop and by block of cases; the i-th block has the i-th seed."""
    loops = asked.loops or _built_in_modes(asked.ranks)
    options = _verify_options(asked)
    return [
        ("verify", loop, "--examples", str(cases), "--seed", str(asked.seed + i), *options)
        for loop in loops
        for i, cases in enumerate(blocks(asked.examples, CASES))
    ]


def _built_in_modes(ranks: int) -> list[str]:
    from gradcheck_suite.loops.ranks import RANK_MODES
    from gradcheck_suite.loops.reset_modes import MODES

    return list(MODES if ranks == 1 else RANK_MODES)


def _verify_options(asked: argparse.Namespace) -> Command:
    found = [] if asked.problem is None else ["--problem", asked.problem]
    for option in OPTIONS:
        value = getattr(asked, option.field)
        if option.field in ("examples", "seed") or value in (getattr(DEFAULTS, option.field), []):
            continue
        if option.read is None:
            found.append(option.flag)
        else:
            found += [part for each in (value if option.repeatable else [value]) for part in (option.flag, str(each))]
    return tuple(found)


def _shards_zoo(asked: argparse.Namespace) -> list[Command]:
    """Cut by bug, whose row needs all its seeds; the sound loops are shards of `verify`."""
    from gradcheck_suite.loops.reset_modes import BUILT_IN
    from gradcheck_suite.studies.commands.zoo import chosen

    dtype = () if asked.dtype is None else ("--dtype", asked.dtype)
    runs = ("--seeds", str(asked.seeds), "--examples", str(asked.examples), "--seed", str(asked.seed))
    bugs = [("zoo", bug.name, *runs, "--sound-cases", "0", *dtype) for bug in chosen(asked.bugs)]
    sound = [
        ("verify", loop, "--examples", str(cases), "--seed", str(i), *dtype)
        for loop in BUILT_IN
        for i, cases in enumerate(blocks(asked.sound_cases, CASES))
    ]
    return [*bugs, *sound]


def _shards_calibrate(asked: argparse.Namespace) -> list[Command]:
    """Cut into blocks of checks; the i-th block has the i-th seed."""
    checks, planted = blocks(asked.checks, CHECKS), blocks(asked.planted, PLANTED)
    count = max(len(checks), len(planted))
    pairs = zip(_filled(checks, count), _filled(planted, count), strict=True)
    return [
        ("calibrate", "--checks", str(c), "--planted", str(p), "--seed", str(asked.seed + i), "--dtypes", *asked.dtypes)
        for i, (c, p) in enumerate(pairs)
    ]


def _filled(parts: list[int], count: int) -> list[int]:
    return [*parts, *([0] * (count - len(parts)))]


def _shards_trainers(asked: argparse.Namespace) -> list[Command]:
    """Cut by trainer."""
    from gradcheck_suite.loops.trainers import TRAINERS

    if asked.heads:
        raise UsageError("--heads asks one trainer and is no campaign: gradcheck-suite trainers --heads")
    chosen = asked.trainers or [trainer.name for trainer in TRAINERS.values() if trainer.missing is None]
    options = ["--examples", str(asked.examples), "--seed", str(asked.seed)]
    options += [] if asked.problem is None else ["--problem", asked.problem]
    return [("trainers", name, *options, *(("--exit-zero",) if asked.exit_zero else ())) for name in chosen]


CUTS: dict[str, Callable[[argparse.Namespace], list[Command]]] = {
    "verify": _shards_verify,
    "zoo": _shards_zoo,
    "calibrate": _shards_calibrate,
    "trainers": _shards_trainers,
}
"""Command -> the function that cuts its arguments into the command lines of shards."""


# What the shards of a campaign come to together: the document of `--json`, the lines to print, the exit status.


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


def _outcome_verify(plan: Plan, shards: Shards) -> Outcome:
    results = _results(plan, shards)
    return Outcome({"results": results}, list(map(_line, results)), _status(results), ("verify",))


def _outcome_zoo(plan: Plan, shards: Shards) -> Outcome:
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


def _outcome_calibrate(plan: Plan, shards: Shards) -> Outcome:
    from gradcheck_suite.studies import calibration
    from gradcheck_suite.studies import tally as console_table
    from gradcheck_suite.studies.tally import Curve, Tally, curve_from_json, false_alarms, tally_from_json

    tallies: dict[str, Tally] = {}
    curves: dict[str, Curve] = {}
    for number in range(len(plan.shards)):
        (data,) = (record["data"] for record in shards.records(number, "calibration"))
        for dtype, tally in data["alarms"].items():
            tallies.setdefault(dtype, Tally()).add(tally_from_json(tally))
        for dtype, curve in data["curves"].items():
            curves.setdefault(dtype, Curve()).add(curve_from_json(curve))
    asked = plan.asked
    settings = calibration.Settings(asked.checks, asked.planted, asked.seed, tuple(dict.fromkeys(asked.dtypes)))
    total = calibration.record(settings, tallies, curves)
    findings = any(tally.findings for tally in tallies.values())
    status = exit_status.status_of(violated=bool(false_alarms(total)), findings=findings)
    return Outcome(total, console_table.lines(total), status, record=("calibration", total))


def _outcome_trainers(plan: Plan, shards: Shards) -> Outcome:
    numbers = range(len(plan.shards))
    answers = [answer for number in numbers for answer in shards.result(number)["answers"]]
    lines = [line for number in numbers for line in shards.output(number).splitlines()]
    status = max((shards.status(number) for number in numbers), key=_ORDER.index)
    return Outcome({"answers": answers}, lines, status, ("trainer",))


_ORDER = (exit_status.HOLDS, exit_status.DISAGREEMENT, exit_status.VIOLATED)
_OUTCOMES: Mapping[str, Callable[[Plan, Shards], Outcome]] = {
    "verify": _outcome_verify,
    "zoo": _outcome_zoo,
    "calibrate": _outcome_calibrate,
    "trainers": _outcome_trainers,
}
