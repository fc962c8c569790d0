"""Run zoo, calibrate, verify or trainers in shards, on several processes or machines.

One that is stopped goes on.
"""

from __future__ import annotations

import argparse
import json
from itertools import zip_longest

from gradcheck_suite.cli import campaign, exit_status
from gradcheck_suite.cli.arguments import Parser
from gradcheck_suite.cli.campaign import (
    Campaign,
    CampaignKind,
    CampaignResult,
    blocks,
    campaign_status,
    line,
    results_of,
    shards_of,
)
from gradcheck_suite.cli.shards import Shard, Shards
from studies.commands import PROGRAM
from studies.commands.zoo import chosen
from studies.records import KINDS as RECORDS

CHECKS = 1000
"""Checks of a shard of `calibrate`, in all its dtypes."""
PLANTED = 10
"""Cases with planted errors of a shard of `calibrate`, in each dtype."""


def _cut_zoo(asked: argparse.Namespace) -> list[Shard]:
    """Cut by bug, whose row needs all its seeds; the sound loops are shards of `verify`."""
    from gradcheck_suite.loops.reset_modes import BUILT_IN

    dtype = () if asked.dtype is None else ("--dtype", asked.dtype)
    runs = (
        "--seeds",
        str(asked.seeds),
        "--examples",
        str(asked.examples),
        "--seed",
        str(asked.seed),
    )
    bugs = [
        Shard(PROGRAM, ("zoo", bug.name, *runs, "--sound-cases", "0", *dtype))
        for bug in chosen(asked.bugs)
    ]
    return bugs + [
        shard for loop in BUILT_IN for shard in shards_of(loop, asked.sound_cases, 0, dtype)
    ]


def _cut_calibrate(asked: argparse.Namespace) -> list[Shard]:
    """Cut into blocks of checks; the i-th block has the i-th seed."""
    pairs = zip_longest(blocks(asked.checks, CHECKS), blocks(asked.planted, PLANTED), fillvalue=0)
    dtypes = ("--dtypes", *asked.dtypes)
    return [
        Shard(
            PROGRAM,
            (
                "calibrate",
                "--checks",
                str(c),
                "--planted",
                str(p),
                "--seed",
                str(asked.seed + i),
                *dtypes,
            ),
            writes_json=False,
        )
        for i, (c, p) in enumerate(pairs)
    ]


def _found_by_zoo(campaign: Campaign, shards: Shards) -> CampaignResult:
    numbers = [n for n, shard in enumerate(campaign.shards) if shard.words[0] == "zoo"]
    rows = [row for n in numbers for row in shards.result(n)["bugs"]]
    results = results_of(campaign, shards)
    data = {
        **{name: getattr(campaign.asked, name) for name in ("dtype", "seeds", "examples")},
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
    lines += [f"sound loop {line(result)}" for result in results]
    failing = any(shards.status(n) == exit_status.VIOLATED for n in numbers)
    whole = (RECORDS["zoo"], data) if not campaign.asked.bugs else None
    return CampaignResult(data, lines, campaign_status(results, violated=failing), record=whole)


def _found_by_calibrate(campaign: Campaign, shards: Shards) -> CampaignResult:
    from studies import calibration, tally

    tallies: dict[str, tally.Tally] = {}
    curves: dict[str, tally.Curve] = {}
    for number in range(len(campaign.shards)):
        (data,) = (json.loads(line)["data"] for line in shards.lines(number, "calibration"))
        for dtype, found in data["alarms"].items():
            tallies.setdefault(dtype, tally.Tally()).add(tally.tally_from_json(found))
        for dtype, found in data["curves"].items():
            curves.setdefault(dtype, tally.Curve()).add(tally.curve_from_json(found))
    asked = campaign.asked
    settings = calibration.Settings(
        asked.checks, asked.planted, asked.seed, tuple(dict.fromkeys(asked.dtypes))
    )
    total = calibration.record(settings, tallies, curves)
    findings = any(found.findings for found in tallies.values())
    status = exit_status.status_of(violated=bool(tally.false_alarms(total)), findings=findings)
    return CampaignResult(total, tally.lines(total), status, record=(RECORDS["calibration"], total))


KINDS = {
    **campaign.KINDS,
    "zoo": CampaignKind(PROGRAM, _cut_zoo, _found_by_zoo),
    "calibrate": CampaignKind(PROGRAM, _cut_calibrate, _found_by_calibrate),
}


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    campaign.add_arguments(parser, tuple(KINDS))


def run(arguments: argparse.Namespace) -> int:
    """Run the shards that are not done yet, merge all of them, and print what they come to."""
    return campaign.run_campaign(arguments, KINDS, PROGRAM)
