"""Campaigns of the zoo and of calibrations: how they are cut, and what their shards come to
together.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradcheck_suite import cli
from gradcheck_suite.__main__ import main
from gradcheck_suite.cli import CommandLine
from gradcheck_suite.cli.campaign import cut_up
from studies.commands import PROGRAM, campaign
from studies.commands.campaign import KINDS
from studies.zoo import BUGS


def parsed(program: CommandLine, words: Sequence[str]) -> argparse.Namespace:
    return program.parser(words[0]).parse_intermixed_args(list(words[1:]))


def test_a_campaign_of_the_zoo_has_each_bug_once_and_the_sound_loops_apart() -> None:
    cut = [shard.words for shard in cut_up("zoo", ["--sound-cases", "300"], KINDS).shards]
    bugs = [words for words in cut if words[0] == "zoo"]
    assert [words[1] for words in bugs] == list(BUGS)
    assert {parsed(PROGRAM, words).sound_cases for words in bugs} == {0}
    sound = [words for words in cut if words[0] == "verify"]
    assert sum(parsed(cli.PROGRAM, words).examples for words in sound if words[1] == "zero_") == 300


def test_a_campaign_of_calibrate_has_all_checks_and_all_planted_cases() -> None:
    asked = ["--checks", "2500", "--planted", "45"]
    cut = [parsed(PROGRAM, shard.words) for shard in cut_up("calibrate", asked, KINDS).shards]
    assert sum(one.checks for one in cut) == 2500
    assert sum(one.planted for one in cut) == 45
    assert [one.seed for one in cut] == list(range(len(cut)))


@pytest.mark.full
def test_a_zoo_and_a_calibration_in_shards_count_what_they_were_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "CHECKS", 40)
    monkeypatch.chdir(tmp_path)
    asked = ["calibrate", "--checks", "80", "--planted", "4", "--dtypes", "float64"]
    assert main(["campaign", "--json", "c.json", *asked], PROGRAM) == 0
    assert json.loads(Path("c.json").read_text())["alarms"]["float64"]["checks"] == 80
    zoo_arguments = [
        "zoo",
        "mean-of-means",
        "no-reset",
        "--seeds",
        "2",
        "--examples",
        "40",
        "--sound-cases",
        "1",
    ]
    assert main(["campaign", "--json", "z.json", *zoo_arguments], PROGRAM) == 0
    document = json.loads(Path("z.json").read_text())
    assert [(row["name"], row["found"], row["runs"]) for row in document["bugs"]] == [
        ("mean-of-means", 2, 2),
        ("no-reset", 2, 2),
    ]


def test_a_wrong_argument_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["campaign", "--reports", str(tmp_path), "zoo", "no-such-bug"], PROGRAM) == 2
    assert (
        "python -m studies campaign: error: expected the name of a bug" in capsys.readouterr().err
    )
    assert main(["campaign", "zoo", "--json", "x.json"], PROGRAM) == 2
    assert (
        "--json stands before zoo: python -m studies campaign --json PATH zoo"
        in capsys.readouterr().err
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
