"""Campaigns: how work is cut, what the shards come to together, and what is left after a kill."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradcheck_suite.__main__ import main
from gradcheck_suite.cli import PROGRAM, campaign
from gradcheck_suite.cli.arguments import parsed as options_of
from gradcheck_suite.cli.campaign import KINDS, Campaign, merged_result
from gradcheck_suite.cli.shards import Shard, Shards, run_locally
from gradcheck_suite.core.options import VerifyOptions
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.loops.jax_modes import JAX_MODES
from gradcheck_suite.loops.reset_modes import MODES

# It ends its own process, as `kill -9` would, the first time it runs.
KILLS_ITS_WORKER_ONCE = """
import os
from pathlib import Path

def train(run):
    marker = Path("{marker}")
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), 9)
    for _ in range(run.epochs):
        for i, batch in enumerate(run.loader):
            (run.loss(run.model, batch) * {factor}).backward()
            if (i + 1) % run.accumulation_steps == 0 or i + 1 == len(run.loader):
                run.optimizer.step()
                run.optimizer.zero_grad()
"""


def cut_up(what: str, rest: Sequence[str]) -> Campaign:
    return campaign.cut_up(what, rest, KINDS)


def parsed(words: Sequence[str]) -> argparse.Namespace:
    return PROGRAM.parser(words[0]).parse_intermixed_args(list(words[1:]))


def comparable(lines: list[str]) -> list[Any]:
    """Return records without what differs from run to run: times, and the commit that the working
    tree is at.
    """

    def stripped(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: stripped(part)
                for key, part in value.items()
                if key not in ("time", "seconds", "commit", "clean")
            }
        return [stripped(part) for part in value] if isinstance(value, list) else value

    return [stripped(json.loads(line)) for line in lines]


def test_a_shard_of_verify_keeps_every_option_and_has_a_seed_of_its_own() -> None:
    asked = (
        "verify", "zero_", "plain", "--seed", "7", "--examples", "450", "--dtype", "float32", "--optimizer", "adamw",
        "--assume", "whole-windows", "--assume", "equal-micro-batches", "--time-limit", "3.5", "--quiet-loop",
        "--autocast", "bfloat16", "--problem", "p.py:P", "--ranks", "2", "--device", "cpu",
    )  # fmt: skip
    cut = [shard.words for shard in cut_up(asked[0], asked[1:]).shards]
    assert [(c[1], c[3], c[5]) for c in cut] == [
        (loop, str(cases), str(7 + i))
        for loop in ("zero_", "plain")
        for i, cases in enumerate((200, 200, 50))
    ]
    whole = parsed(asked)
    for command in cut:
        again = parsed(command)
        assert (again.problem, again.framework) == (whole.problem, whole.framework)
        given, kept = (options_of(arguments, VerifyOptions) for arguments in (whole, again))
        assert kept.replace(examples=given.examples, seed=given.seed) == given


@pytest.mark.parametrize(
    ("arguments", "loops", "cases"),
    [
        (["--framework", "jax"], JAX_MODES, 50),
        (["--framework", "all"], [*MODES, *JAX_MODES], None),
        (["mine.py:train", "--framework", "jax"], ["mine.py:train"], 50),
        (["mine.py:train"], ["mine.py:train"], 200),
    ],
)
def test_a_campaign_of_verify_verifies_what_the_command_does(arguments, loops, cases) -> None:
    cut = [shard.words for shard in cut_up("verify", arguments).shards]
    assert list(dict.fromkeys(command[1] for command in cut)) == list(loops)
    framework = arguments[-1] if "--framework" in arguments else None
    assert {parsed(command).framework for command in cut} == {framework}
    for loop in loops:
        of_jax = loop in JAX_MODES or framework == "jax"
        drawn = sum(parsed(command).examples for command in cut if command[1] == loop)
        assert drawn == (cases or (50 if of_jax else 200))


@pytest.mark.parametrize("option", [["-x"], ["--html", "page.html"]])
def test_a_campaign_refuses_what_it_would_leave_out(option) -> None:
    with pytest.raises(UsageError, match=f"{option[0]} is no option of a campaign"):
        cut_up("verify", ["zero_", *option])


def test_the_first_violation_is_the_loop_s_and_counts_go_on_over_shards() -> None:
    def part(
        cases: int, violation: dict[str, Any] | None, worst: float | str = 0.5
    ) -> dict[str, Any]:
        return {
            "loop": "l", "verdict": "violated" if violation else "holds", "cases": cases, "judged": cases - 1,
            "seconds": 1.5, "windows": 3, "windows_skipped": {}, "skipped": {"why": 1}, "findings": ["f"],
            "worst_error_over_allowed": worst, "shrinking": None, "violation": violation, "assumes": [],
        }  # fmt: skip

    merged = merged_result(
        [part(200, None), part(9, {"found_after": 4}, "inf"), part(5, {"found_after": 1})]
    )
    assert merged["violation"] == {"found_after": 204}
    assert (merged["verdict"], merged["cases"], merged["judged"], merged["windows"]) == (
        "violated",
        214,
        211,
        9,
    )
    assert (merged["seconds"], merged["skipped"], merged["findings"]) == (4.5, {"why": 3}, ["f"])
    assert merged["worst_error_over_allowed"] == "inf"
    said = {**part(3, None), "moved_by_zeros": {"cases": 2, "explanation": "e"}}
    assert merged_result([part(3, None), said, said])["moved_by_zeros"] == {
        "cases": 4,
        "explanation": "e",
    }


@pytest.mark.full
def test_a_shard_that_ends_every_process_stops_the_campaign(tmp_path: Path) -> None:
    loop = tmp_path / "my_loop.py"
    loop.write_text("import os\ndef train(run): os.kill(os.getpid(), 9)\n")
    shard = Shard(PROGRAM, ("verify", f"{loop}:train", "--examples", "1"))
    with pytest.raises(
        CannotRunHere, match=r"shard 0 ended 3 worker processes.*gradcheck-suite verify .*my_loop"
    ):
        run_locally([shard], [0], Shards(tmp_path), 1, lambda: None)


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "factor", "status"), [("processes", 1, 0), ("processes", 2, 1), ("ray", 1, 0)]
)
def test_a_worker_that_is_killed_loses_nothing(
    engine: str, factor: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The campaign has the verdict and the records of the same shards run one after the other, each
    once.
    """
    if engine == "ray":
        pytest.importorskip(
            "ray", reason="ray is not installed: pip install 'gradcheck-suite[ray]'"
        )
    monkeypatch.setattr(campaign, "CASES", 3)
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "killed"
    Path("my_loop.py").write_text(KILLS_ITS_WORKER_ONCE.format(marker=marker, factor=factor))
    options = ["my_loop.py:train", "--assume", "sum-reduction"]
    options = [str(tmp_path / options[0]), *options[1:]]  # a worker of Ray has a folder of its own
    words = [
        "campaign",
        "--engine",
        engine,
        "--workers",
        "2",
        "--reports",
        "merged",
        "--json",
        "merged.json",
    ]
    assert main([*words, "verify", *options, "--examples", "6"]) == status
    assert marker.exists()
    assert not Path("merged/campaign").exists()
    alone, counterexamples = [], []
    for seed in ("0", "1"):
        arguments = [options[0], "--examples", "3", "--seed", seed, "--assume", "sum-reduction"]
        monkeypatch.setattr(sys, "argv", ["gradcheck-suite", "verify", *arguments])
        assert main(["verify", *arguments, "--reports", seed]) == status
        alone += Path(seed, "records", "verify.jsonl").read_text().splitlines()
        counterexamples += list(Path(seed).glob("counterexamples/*"))
    merged = Path("merged/records/verify.jsonl").read_text().splitlines()
    assert comparable(merged) == comparable(alone)
    assert bool(counterexamples) == bool(status)
    for path in counterexamples:
        assert Path("merged/counterexamples", path.name).read_text() == path.read_text()
    (result,) = json.loads(Path("merged.json").read_text())["results"]
    assert result["verdict"] == ("violated" if status else "holds")
    assert result["cases"] == sum(json.loads(line)["data"]["cases"] for line in alone)


@pytest.mark.full
def test_a_driver_that_is_killed_leaves_no_worker_and_its_successor_goes_on(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "gradcheck_suite",
        "campaign",
        "--workers",
        "2",
        "verify",
        "zero_",
    ]
    command += ["--examples", "600"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True
    ) as driver:
        end = time.monotonic() + 300
        while not list(tmp_path.glob("reports/campaign/*/*/status")):
            assert time.monotonic() < end, "no shard was done in 300 s"
            time.sleep(0.1)
        workers = subprocess.run(
            ["pgrep", "-P", str(driver.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        driver.send_signal(signal.SIGKILL)
    assert workers
    time.sleep(5)
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "done before" in done.stdout
    assert done.returncode == 0
    seeds = [
        json.loads(line)["data"]["seed"]
        for line in (tmp_path / "reports/records/verify.jsonl").read_text().splitlines()
    ]
    assert seeds == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "case.json"], "expected one of verify, trainers; got 'replay'"),
        (
            ["verify", "--json", "x.json"],
            "--json stands before verify: gradcheck-suite campaign --json PATH verify",
        ),
        (["verify", "--reports=x"], "--reports stands before verify"),
        (["verify", "--list"], "--list is no campaign: gradcheck-suite verify --list"),
        (["--workers", "0", "verify"], "--workers: expected a positive integer, got '0'"),
        (["--address", "host:1", "verify"], "--address needs --engine ray"),
        (
            ["--engine", "ray", "--address", "127.0.0.1:1", "verify", "zero_"],
            "127.0.0.1:1: no Ray cluster answers",
        ),
        (
            ["--engine", "ray", "--address", "nowhere", "verify", "zero_"],
            "expected HOST:PORT, ray://HOST:PORT or auto",
        ),
        (["trainers", "--list"], "--list is no campaign: gradcheck-suite trainers --list"),
        (["verify", "--dtype", "int8"], "--dtype: expected one of"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["campaign", "--reports", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.full
def test_a_shard_whose_file_is_cut_short_is_done_again(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    for name, content in (
        ("status", ""),
        ("result.json", '{"schema": 1, "resu'),
        ("records/verify.jsonl", '{"a": 1}\n{'),
    ):
        place = shards.partial(0)
        shards.finish(0, 0)
        assert shards.done(0)
        (shards.place(0) / name).parent.mkdir(exist_ok=True)
        (shards.place(0) / name).write_text(content)
        assert not shards.done(0), name
        assert not place.exists()
    run_locally([Shard(PROGRAM, ("verify", "--list"))], [0], shards, 1, lambda: None)
    assert shards.done(0)
    assert shards.lines(0, "verify") == []


def test_ray_that_is_not_installed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["campaign", "--reports", str(tmp_path), "--engine", "ray", "verify", "zero_"]) == 2
    assert "ray is not installed: pip install 'gradcheck-suite[ray]'" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.full
def test_a_cluster_of_ray_is_joined_and_no_process_of_one_s_own_is_left(tmp_path: Path) -> None:
    ray = pytest.importorskip(
        "ray", reason="ray is not installed: pip install 'gradcheck-suite[ray]'"
    )
    ray.init(num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        address = ray.get_runtime_context().gcs_address
        command = [
            sys.executable,
            "-m",
            "gradcheck_suite",
            "campaign",
            "--engine",
            "ray",
            "--address",
            address,
        ]
        command += ["verify", "zero_", "--examples", "2"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        ray.shutdown()
    children = subprocess.run(
        ["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert not children.stdout


def test_a_shard_that_meets_a_bug_is_named_and_costs_no_other_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "campaign",
        "--reports",
        str(tmp_path),
        "verify",
        "zero_",
        "grad_none",
        "--examples",
        "1",
    ]
    run: list[int] = []

    def crash(asked: Any, waiting: list[int], shards: Shards, *_: Any) -> None:
        run.extend(waiting)
        for number in waiting:
            (shards.partial(number) / "output.txt").write_text(
                "gradcheck-suite verify: error: a bug\n"
            )
            shards.finish(number, 70 if asked[number].words[1] == "grad_none" else 0)

    monkeypatch.setattr(campaign, "run_locally", crash)
    assert main(arguments) == 70
    said = capsys.readouterr().err
    assert (
        "`gradcheck-suite verify grad_none --examples 1 --seed 0` ended with status 70: a bug"
        in said
    )
    assert main(arguments) == 70
    assert run == [0, 1, 1]
