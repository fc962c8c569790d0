"""`verify`: verdicts, words, files, exit_status."""

from __future__ import annotations

import json
import re
from importlib.metadata import version

import pytest

from gradcheck_suite.core.case import Plan
from gradcheck_suite.core.records import KINDS, read_records
from gradcheck_suite.core.results import Result, Verdict, Violation
from gradcheck_suite.loops.jax_modes import JAX_MODES
from gradcheck_suite.loops.reset_modes import BUILT_IN, MODES
from gradcheck_suite.loops.trainers import TRAINERS
from tests.cli.conftest import files

pytestmark = pytest.mark.usefixtures("only_linear")


def test_a_sound_loop_holds_and_leaves_its_record_alone(run, project):
    outcome = run("verify", "loops.py:sound", "--examples", 7, "--reports", "reports")
    assert outcome.status == 0
    assert outcome.err == ""
    assert re.search(
        r"loops.py:sound +holds +7 cases +\d+\.\d s +worst error \S+ of the rounding bound",
        outcome.out,
    )
    assert outcome.out.endswith("the loop holds\n")
    assert files(project) == ["loops.py", "reports/records/verify.jsonl"]
    ((record,), problems) = read_records(project / "reports", KINDS["verify"])
    assert problems == []
    assert (record.data["verdict"], record.data["judged"], record.data["dtype"]) == (
        "holds",
        7,
        "float64",
    )
    assert sum(record.data["reached"]["inputs"].values()) == 7


@pytest.mark.full
@pytest.mark.parametrize("loop", ["sound", "no_reset"])
def test_two_processes_find_what_one_finds(run, project, loop):
    found = []
    for processes in (1, 2):
        asked = ("--processes", processes, "--examples", 60, "--json", "result.json")
        outcome = run("verify", f"loops.py:{loop}", *asked)
        (result,) = json.loads((project / "result.json").read_text())["results"]
        found.append((outcome.status, result | {"seconds": None}))
    assert found[0] == found[1]


def test_a_number_of_processes_that_is_none_is_bad_usage(run, monkeypatch):
    monkeypatch.setenv("GRADCHECK_SUITE_PROCESSES", "three")
    outcome = run("verify", "zero_")
    assert outcome.status == 2
    assert outcome.err.endswith("error: GRADCHECK_SUITE_PROCESSES: expected 1 or 2, got 'three'\n")


MATMUL = "matmul precision: torch highest (TF32 off, cuDNN TF32 off), jax highest"
PRINTED = [
    # the arguments, the status, and what is printed
    (
        "zero_ --examples 1 --seed 3 --dtype float32 --optimizer adam",
        0,
        ("1 case per loop, seed 3, float32 on cpu, optimizer adam", MATMUL),
    ),
    (
        "loops.py:sound --assume whole-windows --assume equal-micro-batches --examples 2",
        0,
        ("assumes equal-micro-batches, whole-windows: nothing else was tried",),
    ),
    (
        "loops.py:raises",
        1,
        (
            "the loop failed: ValueError: two lines (loops.py, line ",
            "Traceback (most recent call last):",
        ),
    ),
    # options may stand between loops
    pytest.param(
        "loops.py:sound --examples 2 zero_", 0, ("all 2 loops hold\n",), marks=pytest.mark.full
    ),
    # a loop's own prints pass
    pytest.param(
        "loops.py:chatty --examples 1",
        0,
        ("the loop says hello", "the loop holds"),
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("arguments", "status", "said"), PRINTED)
def test_what_is_asked_and_found_is_printed(run, arguments, status, said):
    outcome = run("verify", *arguments.split())
    assert (outcome.status, outcome.err) == (status, "")
    for text in said:
        assert text in outcome.out


@pytest.mark.full
def test_a_loop_is_quiet_where_it_is_to_be(run):
    outcome = run("verify", "loops.py:chatty", "--examples", 1, "--quiet-loop")
    assert outcome.status == 0
    assert "the loop says hello" not in outcome.out
    assert "the loop holds" in outcome.out


@pytest.mark.share(4)
@pytest.mark.usefixtures("script_runs")
def test_a_violation_is_explained_stored_and_replayable(run, project):
    outcome = run("verify", "loops.py:no_reset", "--examples", 50)
    assert outcome.status == 1
    assert outcome.err == ""
    (stored,) = (project / "reports" / "counterexamples").glob("*.json")
    assert re.fullmatch(r"loops\.py-no_reset-[0-9a-f]{12}\.json", stored.name)
    shown = outcome.out
    for text in (
        "VIOLATED",
        "loops.py:13: stale-window: ",
        "\n      13 |     loss = run.loss(run.model, batch)  ",
        "\n    fix: reset once after every step",
        "parameter  0.weight",
        "where rounding allows",
        "expected",
        "observed",
        "linear       (n, 1) -> (n, 1)  bias=False, features=1",
        "mse          (n, 1) -> scalar, reduction mean",
        "accumulation_steps = 1",
        "@example(Case(problem=ProblemSpec(",
        "found on the weight probe, then shown on this small case; the loop was run ",
        f"script  python reports/counterexamples/{stored.stem}.py\n",
        f"replay  gradcheck-suite replay reports/counterexamples/{stored.name}\n",
        "1 of 1 loop violated: loops.py:no_reset\n",
    ):
        assert text in shown
    assert files(project / "reports" / "counterexamples") == [stored.name, f"{stored.stem}.py"]
    command = shown.split("replay  gradcheck-suite ")[1].splitlines()[0].split()
    again = run(*command)
    assert again.status == 1
    assert "loops.py:13: stale-window: " in again.out


@pytest.mark.full
@pytest.mark.usefixtures("script_runs")
def test_a_script_that_does_not_show_the_fault_is_not_kept(run, project):
    outcome = run("verify", "loops.py:tires", "--examples", 50, "--reports", "reports")
    assert outcome.status == 1
    said = "in a process of its own the loop does not show the fault"
    assert f"    script  none: {said}\n" in outcome.out
    assert not list((project / "reports" / "counterexamples").glob("*.py"))
    ((record,), _) = read_records(project / "reports", KINDS["verify"])
    assert record.data["no_script"] == said


def test_what_the_command_line_assumes_is_assumed_in_the_script(run, project):
    drift = "next(run.model.parameters()).data.mul_(0.5)"
    (project / "drifts.py").write_text(
        f"from loops import sound\ndef drifts(run):\n    sound(run)\n    {drift}\n"
    )
    assert (
        run("verify", "drifts.py:drifts", "--optimizer", "sgd", "--assume", "edits-settings").status
        == 1
    )
    (script,) = (project / "reports" / "counterexamples").glob("*.py")
    assert "settings=False" in script.read_text()


@pytest.mark.full
def test_without_a_loop_every_reset_mode_is_verified(run, project):
    outcome = run("verify", "--examples", 2, "--json", "out.json")
    assert outcome.status == 0
    assert [r["loop"] for r in json.loads((project / "out.json").read_text())["results"]] == list(
        MODES
    )


def test_list_prints_every_built_in_loop_and_trainer(run):
    outcome = run("verify", "--list")
    assert outcome.status == 0
    assert [line.split()[0] for line in outcome.out.splitlines()] == [
        *BUILT_IN,
        *JAX_MODES,
        *TRAINERS,
    ]
    # a docstring's first sentence may go on in its second line
    assert "which zeroes all at once. After each step." in outcome.out
    assert "of their gradients" in " ".join(outcome.out.split())


def test_the_header_names_the_versions_of_the_libraries_that_a_loop_imports(run, project):
    (project / "mine.py").write_text("def loop(run):\n    import rich.console\n")
    outcome = run("verify", "mine.py:loop", "--examples", 1, "--json", "out.json")
    assert f", rich {version('rich')}: 1 case per loop" in outcome.out.splitlines()[0]
    assert json.loads((project / "out.json").read_text())["environment"]["versions"][
        "rich"
    ] == version("rich")


@pytest.mark.parametrize(
    ("loop", "said"), [("needs_more", "No module named"), ("instead", "please install it")]
)
def test_a_loop_that_cannot_import_what_it_needs_is_bad_usage(run, project, loop, said):
    outcome = run("verify", f"loops.py:{loop}", "--json", "out.json")
    assert outcome.status == 2
    assert re.fullmatch(r"[^\n]*the loop cannot import what it needs: [^\n]*\n", outcome.err)
    assert said in outcome.err
    assert files(project) == ["loops.py"]


def test_a_loop_that_hangs_is_a_violation(run, project):
    (project / "slow.py").write_text("import time\ndef loop(run):\n    time.sleep(60)\n")
    outcome = run("verify", "slow.py:loop", "--time-limit", 0.2)
    assert outcome.status == 1
    assert ": timed-out: " in outcome.out
    assert "it did not return within 0.2 s (the time limit per case)" in outcome.out
    assert re.search(r"replay  gradcheck-suite replay \S+ --time-limit 0.2\n", outcome.out)


def test_a_case_of_a_loop_with_autocast_is_replayed_with_it(run, project, a_case):
    (project / "case.json").write_text(
        json.dumps(a_case.replace(dtype="float32", plan=Plan((2,), 1)).to_json())
    )
    assert "low-precision" in run("replay", "case.json", "loops.py:autocast").out
    assert run("replay", "case.json", "loops.py:autocast", "--autocast", "bfloat16").status == 0


@pytest.mark.share(4)
def test_a_users_problem(run):
    outcome = run("verify", "loops.py:sound", "--problem", "loops.py:PROBLEM", "--examples", 2)
    assert outcome.status == 0
    assert "problem loops.py:PROBLEM: only plans are drawn" in outcome.out
    assert re.search(
        r"JAX gave a second opinion on (\d+) of \1 windows, of \d+ shapes, (.* has moved, )?and agrees with torch",
        outcome.out,
    )
    assert "finding" not in outcome.out


@pytest.mark.full
@pytest.mark.usefixtures("without_second_opinion")
def test_a_violation_on_a_users_problem_is_replayed_on_it(run, project):
    assert (
        run("verify", "loops.py:no_reset", "--problem", "loops.py:PROBLEM", "--examples", 30).status
        == 1
    )
    (stored,) = (project / "reports" / "counterexamples").glob("*.json")
    assert json.loads(stored.read_text())["case"]["problem"] == "loops.py:PROBLEM"
    assert run("replay", stored).status == 1
    assert run("replay", stored, "loops.py:sound").status == 0
    assert run("replay", stored, "--problem", "loops.py:PROBLEM").status == 1


def test_a_problem_that_is_not_accumulable_is_said_of_the_problem(run, project):
    outcome = run("verify", "loops.py:sound", "--problem", "loops.py:CENTRED", "--json", "out.json")
    assert outcome.status == 1
    assert "loops.py:CENTRED: the objective is not a sum over items" in outcome.out
    assert "no loop is to blame" in outcome.out
    (result,) = json.loads((project / "out.json").read_text())["results"]
    assert result["violation"]["kind"] == "not-accumulable"


def planted(monkeypatch, verdicts, **fields):
    """Replace the search by one that comes to given verdicts."""
    from gradcheck_suite.verification import verify as verification

    def verify(loop, options, *, name, progress, **others):
        for verdict in verdicts:
            progress(verdict)
        judged = sum(not (verdict.finding or verdict.skipped) for verdict in verdicts)
        return Result(name, len(verdicts), 0.5, judged=judged, **fields)

    monkeypatch.setattr(verification, "verify", verify)


def test_findings_and_skipped_cases_are_reported(run, project, monkeypatch, a_case):
    verdicts = [
        Verdict(a_case, finding="torch and JAX differ"),
        Verdict(a_case),
        Verdict(a_case, skipped="no\nkernel"),
    ]
    planted(monkeypatch, verdicts, findings=("torch and JAX differ",), skipped={"no\nkernel": 1})
    outcome = run("verify", "zero_", "--json", "out.json")
    assert outcome.status == 3
    assert "finding, for which no loop is to blame: torch and JAX differ" in outcome.out
    assert outcome.out.endswith("the loop holds; torch and JAX disagree: 1 finding above\n")
    assert json.loads((project / "out.json").read_text())["results"][0]["findings"] == [
        "torch and JAX differ"
    ]
    assert "1 case could not be judged here: no kernel" in outcome.out


@pytest.mark.parametrize(
    ("finding", "raised", "fields", "status"),
    [
        (None, True, {}, 1),
        (None, False, {"interrupted": True}, 130),
        ("differ", False, {"unjudged": "differ"}, 2),
    ],
)
def test_a_finding_changes_no_other_status(
    run, monkeypatch, a_case, finding, raised, fields, status
):
    violations = (Violation("raised", "raised", "", a_case),) if raised else ()
    verdict = Verdict(a_case, finding=finding)
    planted(monkeypatch, [verdict], findings=("differ",), violations=violations, **fields)
    assert run("verify", "zero_").status == status


def test_where_nothing_could_be_judged_nothing_is_said_to_hold(run, project, monkeypatch, a_case):
    why = "none of 3 cases could be judged: no kernel"
    planted(
        monkeypatch,
        [Verdict(a_case, skipped="no kernel")] * 3,
        skipped={"no kernel": 3},
        unjudged=why,
    )
    outcome = run("verify", "zero_", "--json", "out.json")
    assert outcome.status == 2
    assert (
        outcome.err
        == "gradcheck-suite verify: error: zero_: none of 3 cases could be judged: no kernel\n"
    )
    assert re.search(r"zero_ +unjudged +3 cases", outcome.out)
    assert "hold" not in outcome.out
    (result,) = json.loads((project / "out.json").read_text())["results"]
    assert result["verdict"] == "unjudged"


@pytest.mark.parametrize(("violated", "status"), [(False, 130), (True, 1)])
def test_an_interrupt_keeps_what_was_found(run, project, monkeypatch, a_case, violated, status):
    violations = (Violation("step-count", "never-stepped", "planted", a_case),) if violated else ()
    planted(monkeypatch, [Verdict(a_case)], interrupted=True, violations=violations)
    outcome = run("verify", "zero_", "set_to_none", "--json", "out.json")
    assert outcome.status == status
    assert "interrupted, 0 of 2 loops went to the end" in outcome.out
    (result,) = json.loads((project / "out.json").read_text())["results"]
    assert (result["loop"], result["interrupted"]) == ("zero_", True)
    assert outcome.err == ""
