"""How a campaign is cut into shards, one rule for each command that can be one."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from gradcheck_suite.cli.options import DEFAULTS, OPTIONS
from gradcheck_suite.cli.parsers import Parser
from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.environment import versions
from gradcheck_suite.records.sources import judge_digest

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
    module = import_module(f"gradcheck_suite.cli.{what}")
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


def _verify(asked: argparse.Namespace) -> list[Command]:
    """Cut by loop and by block of cases; the i-th block has the i-th seed."""
    loops = asked.loops or _built_in_modes(asked.ranks)
    options = _verify_options(asked)
    return [
        ("verify", loop, "--examples", str(cases), "--seed", str(asked.seed + i), *options)
        for loop in loops
        for i, cases in enumerate(blocks(asked.examples, CASES))
    ]


def _built_in_modes(ranks: int) -> list[str]:
    from gradcheck_suite.loops.modes import MODES
    from gradcheck_suite.loops.ranks import RANK_MODES

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


def _zoo(asked: argparse.Namespace) -> list[Command]:
    """Cut by bug, whose row needs all its seeds; the sound loops are shards of `verify`."""
    from gradcheck_suite.cli.zoo import chosen
    from gradcheck_suite.loops import BUILT_IN

    dtype = () if asked.dtype is None else ("--dtype", asked.dtype)
    runs = ("--seeds", str(asked.seeds), "--examples", str(asked.examples), "--seed", str(asked.seed))
    bugs = [("zoo", bug.name, *runs, "--sound-cases", "0", *dtype) for bug in chosen(asked.bugs)]
    sound = [
        ("verify", loop, "--examples", str(cases), "--seed", str(i), *dtype)
        for loop in BUILT_IN
        for i, cases in enumerate(blocks(asked.sound_cases, CASES))
    ]
    return [*bugs, *sound]


def _calibrate(asked: argparse.Namespace) -> list[Command]:
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


def _trainers(asked: argparse.Namespace) -> list[Command]:
    """Cut by trainer."""
    from gradcheck_suite.trainers import TRAINERS

    if asked.heads:
        raise UsageError("--heads asks one trainer and is no campaign: gradcheck-suite trainers --heads")
    chosen = asked.trainers or [trainer.name for trainer in TRAINERS.values() if trainer.missing is None]
    options = ["--examples", str(asked.examples), "--seed", str(asked.seed)]
    options += [] if asked.problem is None else ["--problem", asked.problem]
    return [("trainers", name, *options, *(("--exit-zero",) if asked.exit_zero else ())) for name in chosen]


CUTS: dict[str, Callable[[argparse.Namespace], list[Command]]] = {
    "verify": _verify,
    "zoo": _zoo,
    "calibrate": _calibrate,
    "trainers": _trainers,
}
"""Command -> the function that cuts its arguments into the command lines of shards."""
