"""The sections of the report: text, tables and figures from made-up records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gradcheck_suite import Case, Plan
from gradcheck_suite.core.records import Record, read_records, records_path
from gradcheck_suite.loops.jax_modes import JAX_MODES
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.page.content import cell_text, sources
from studies.records import KINDS
from studies.report.subjects import BRIDGE, MOVED
from studies.tally import RIVALS
from studies.tests.report.made_up import (
    EVIL,
    benchmark,
    build,
    calibration,
    claim,
    fill,
    record,
    verdict,
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    fill(folder)
    return folder


ROOT = Path(__file__).resolve().parents[3]
BROKEN = {"kind": "gradient", "diagnosis": "mean-of-means", "explanation": "means are averaged"}


def _section(report, key):
    (section,) = (section for section in report.sections if section.key == key)
    return section


def test_the_zoo_in_other_dtypes_is_a_row_each(reports, tmp_path):
    zoo = json.loads((reports / "records" / "zoo.jsonl").read_text())["data"]
    (bug,) = zoo["bugs"]
    coarse = {**bug, "runs": 9, "found": 7, "within_rounding": 2, "rightly_named": 4, "unnamed": 2}
    sound = [{"loop": "zero_", "cases": 30, "blamed": True, "worst": 1.5}]
    planted = {**bug, "number": None, "found": 1, "rightly_named": 0}
    record(tmp_path, "zoo", **{**zoo, "dtype": "float64", "bugs": [bug, planted]})
    record(tmp_path, "zoo", dtype="bfloat16", seeds=9, examples=200, bugs=[coarse], sound=sound)
    section = _section(build(tmp_path), "zoo")
    assert "1 of 1 reported bugs" in section.text[0]
    assert "0 of 1 planted ones, 2 of 4 runs with the expected diagnosis" in section.text[0]
    assert "blamed in 0 of 1,000 cases" in section.text[0]
    # 7 found, 4 with a right diagnosis and 2 with none: 1 with a wrong one
    assert section.tables[2].rows == (("bfloat16", 9, 7, 2, 4, 2, 1, 30, 1, bug["name"]),)


def test_calibration_has_its_tables_and_its_curve(tmp_path):
    calibration(tmp_path)
    section = _section(build(tmp_path), "calibration")
    assert "False alarms: 0 in 50 checks" in section.text[0]
    assert "1 of 2 kinds of layers, 2 of 2 kinds of losses" in section.text[0]
    assert "In float16 no rule that blames no right loop finds smaller errors." in section.text[1]
    judged, detection, skipped, ratios = section.tables
    assert judged.rows == (("float16", 50, 400, 0, 7, 0.04, 45, 0, 4, 0, 0),)
    # 2**-9, 2**-4, 2**-11 by a rule with false alarms, one that misses 3 of 200, 2**-2
    assert detection.rows == (
        (
            "float16",
            "everywhere",
            200,
            "2.0e-03",
            "98.7%",
            "2.0e-03",
            "6.2e-02",
            "4.9e-04 *",
            "none",
            "2.5e-01",
        ),
    )
    assert skipped.rows == (("float16", EVIL, 10),)
    assert ratios.rows == (("linear", 50, "0.03 / 0.03 / 0.03"),)
    (figure,) = section.figures
    assert "in 200 cases" in figure.caption
    assert [source.command for source in section.sources] == ["gradcheck-suite calibration"]


def test_a_dtype_in_which_every_other_rule_raises_false_alarms_is_said(tmp_path):
    calibration(tmp_path)
    path = tmp_path / "records" / "calibration.jsonl"
    data = json.loads(path.read_text())
    data["data"]["alarms"]["float16"]["rivals"] = dict.fromkeys(RIVALS, 1)
    path.write_text(json.dumps(data) + "\n")
    said = "In float16 every other rule blames right loops; the suite needs an error of 2.0e-03, planted everywhere."
    assert _section(build(tmp_path), "calibration").text[1].endswith(said)


def test_the_claims_say_once_that_figures_are_older_than_the_code(tmp_path):
    claim(tmp_path, "C1.1")
    assert len(_section(build(tmp_path), "claims").text) == 1
    path = records_path(tmp_path, "claim")
    path.write_text(json.dumps({**json.loads(path.read_text()), "judge": "0" * 16}) + "\n")
    assert _section(build(tmp_path), "claims").text[1].startswith("Older than the code: ")


def test_a_quiet_rule_that_finds_smaller_errors_is_said(tmp_path):
    calibration(tmp_path, alarms=2)
    path = tmp_path / "records" / "calibration.jsonl"
    path.write_text(
        path.read_text().replace(
            '"chex.assert_trees_all_close": 4', '"chex.assert_trees_all_close": 0'
        )
    )
    section = _section(build(tmp_path), "calibration")
    assert "False alarms: 2 in 50 checks" in section.text[0]
    assert (
        "float16, everywhere: chex.assert_trees_all_close finds 4.9e-04, the bound 2.0e-03"
        in section.text[1]
    )


def test_the_minimum_of_a_reset_is_bytes_over_bandwidth(reports):
    section = _section(build(reports), "costs")
    (resets,) = (t for t in section.tables if "alone" in t.caption)
    assert resets.rows[0][4:] == pytest.approx((0.1, 0.0004, 0.004))


def test_damaged_records_are_reported(tmp_path):
    verdict(tmp_path, "zero_")
    with (tmp_path / "records" / "verify.jsonl").open("a") as file:
        file.write('{"torn')
    assert build(tmp_path).problems == ("verify.jsonl, line 2: damaged; left out",)


@pytest.mark.parametrize(
    "kind",
    ["verify", "claim", "memory", "trainer", "benchmark", "bridge", "calibration", "traffic"],
)
def test_a_record_whose_fields_cannot_be_read_is_left_out_and_named(kind, tmp_path):
    verdict(tmp_path, "zero_")
    sound = build(tmp_path)
    data = {
        "number": "C1.1",
        "loop": "zero_",
        "measures": "window",
        "mode": "zero_",
        "device": "cpu",
        "question": 3,
    }
    record(tmp_path, kind, **data)
    found = build(tmp_path)
    number = 2 if kind == "verify" else 1
    (problem,) = found.problems
    assert problem.startswith(f"{kind}, record {number}: cannot be read (")
    assert problem.endswith("left out")
    assert found.answers == sound.answers


def test_trainers_have_a_column_for_each_question(tmp_path):
    """The latest answer counts; micro-batches of 1 and 2 items in one window, then a short one."""
    violation = {
        "kind": "gradient",
        "diagnosis": "mean-of-means",
        "explanation": "each mean: weighs 1/2",
        "case": Case("model.py:P", Plan((1, 2, 3), 2)).to_json(),
    }
    answer = {
        "trainer": "a-trainer",
        "package": "pack",
        "version": "1.0",
        "question": "unequal counts",
        "why": "",
    }
    for found in (None, violation):
        record(tmp_path, "trainer", **answer, result={"loop": "t", "cases": 20, "violation": found})
    record(
        tmp_path,
        "trainer",
        **{**answer, "question": "sum loss"},
        result={"loop": "t", "cases": 7, "violation": None},
    )
    for model, result in (
        ("Some", None),
        ("A", {"loop": "t", "violation": None}),
        ("B", {"loop": "t", "violation": violation}),
    ):
        record(tmp_path, "trainer", **{**answer, "question": f"head {model}"}, result=result)
    section = _section(build(tmp_path), "trainers")
    assert section.text[0] == (
        "Of 2 models under the Trainer of pack 1.0, 1 hold and 1 get a wrong gradient (diagnosis: mean-of-means 1)."
    )
    assert section.tables[0].columns == ("trainer", "version", "unequal counts", "sum loss")
    assert section.tables[0].rows == (
        ("a-trainer", "pack 1.0", "mean-of-means [1 2 | 3] K=2", "holds"),
    )
    assert section.tables[1].rows == (
        ("Some", "pack 1.0", None, None),
        ("A", "pack 1.0", "holds", None),
        ("B", "pack 1.0", "mean-of-means [1 2 | 3] K=2", "each mean"),
    )
    assert section.text[1].startswith("1 of 1 trainers and versions ran")


def test_architectures_stand_with_both_of_their_errors(tmp_path):
    found = {
        "architecture": "Some", "package": "p", "version": "1", "operations": 7, "loss_error": 1e-9, "narrow": ["a"],
    }  # fmt: skip
    record(tmp_path, "bridge", **found, widened=False, gradient_error=2e-7, allowed=1e-6)
    record(
        tmp_path,
        "bridge",
        **{**found, "narrow": []},
        widened=True,
        gradient_error=3e-16,
        allowed=1e-10,
    )
    other = {"architecture": "Other", "package": "p", "version": "1"}
    record(tmp_path, "bridge", **other, widened=False, refused="it draws")
    section = _section(build(tmp_path), "bridge")
    assert len(section.sources) == 1
    assert section.tables[0].rows == (
        ("Some", "p 1", 7, 1e-9, 2e-7, 1e-6, 3e-16, "a"),
        ("Other", "p 1", None, None, None, None, None, "refused: it draws"),
    )


def test_a_command_names_files_where_they_stand_today():
    records, _ = read_records(ROOT / "reports", KINDS["bridge"])
    assert MOVED[0] in records[0].command
    section = BRIDGE.content(records)
    paths = re.findall(r"(?:studies|tests)/\S+", " ".join(run.command for run in section.sources))
    assert paths
    assert all((ROOT / path).exists() for path in paths)


def test_memory_is_shown_in_mebibytes(tmp_path):
    row = {
        "device": "cpu",
        "parameters": 10,
        "layout": "few",
        "dtype": "float32",
        "micro_batches": 1,
        "mode": "zero_",
    }
    counted = {"gradients_between": 2**20, "peak": 3 * 2**20}
    allocator = {"requested_peak": 2**21, "allocated_peak": 2**22, "reserved_peak": 2**23}
    counts = {"allocations": 12.0, "retries": 0, "segments": 3}
    record(tmp_path, "memory", **row, **counted, resident_peak=5 * 2**20, allocator=None)
    on_gpu = {**row, "device": "cuda"}
    record(
        tmp_path,
        "memory",
        **on_gpu,
        **counted,
        resident_peak=None,
        allocator={**allocator, **counts},
    )
    cpu, gpu = _section(build(tmp_path), "memory").tables[0].rows
    assert cpu == (
        "cpu",
        10,
        "float32",
        1,
        "zero_",
        1.0,
        3.0,
        5.0,
        None,
        None,
        None,
        None,
        None,
        None,
    )
    assert gpu == ("cuda", 10, "float32", 1, "zero_", 1.0, 3.0, None, 2.0, 4.0, 8.0, 12.0, 0, 3)


def test_the_matrix_has_violated_loops_first_then_the_modes(tmp_path):
    verdict(tmp_path, "zero_")
    verdict(tmp_path, "mine.py:right")
    verdict(tmp_path, "zero_", dtype="bfloat16", worst_error_over_allowed=0.5)
    verdict(
        tmp_path, "mine.py:wrong", state="violated", violation={**BROKEN, "diagnosis": "no-divide"}
    )
    (matrix,) = _section(build(tmp_path), "verified").matrices
    columns = tuple(column.replace("\N{NO-BREAK SPACE}", " ") for column in matrix.columns)
    assert columns == ("float64 CPU (200)", "bfloat16 CPU (200)", "any GPU")
    assert matrix.caption == "Columns: dtype, device (cases). Cells: worst error / allowed"
    not_run = ("none", ("not run",))
    assert matrix.rows == (
        ("mine.py:wrong", (("bad", ("violated", "no-divide")), not_run, not_run)),
        ("zero_", (("good", ("✓ 0.12",)), ("good", ("✓ 0.5",)), not_run)),
        ("mine.py:right", (("good", ("✓ 0.12",)), not_run, not_run)),
    )
    verdict(tmp_path, "zero_", device="cuda", judged=1500)
    verdict(tmp_path, "mine.py:right", device="cuda", judged=1400)
    (matrix,) = _section(build(tmp_path), "verified").matrices
    assert matrix.columns[2] == "float64 GPU\N{NO-BREAK SPACE}(1,400+)"
    assert dict(matrix.rows)["zero_"][2] == ("good", ("✓ 0.12",))


def test_where_torch_and_jax_disagree_is_said_and_what_was_not_judged_has_its_reason(tmp_path):
    verdict(tmp_path, "zero_", skipped={"not implemented": 7}, judged=193)
    assert "disagree" not in build(tmp_path).answers[0].answer
    for mode in ("zero_", "set_to_none"):
        verdict(tmp_path, mode, dtype="bfloat16", findings=["they differ in case 1"])
    report = build(tmp_path)
    said = "In 1 gradient torch and JAX disagree"
    assert report.answers[0].answer.endswith(f"{said}.")
    assert "in 193 to 200 random cases each" in report.answers[0].answer
    section = _section(report, "verified")
    assert section.text[1].startswith(said)
    verdicts, found = section.tables[:2]
    assert [row[-1] for row in verdicts.rows] == ["7: not implemented", None, None]
    assert found.rows[0] == ("zero_", "bfloat16", "they differ in case 1")


def test_an_audited_script_has_its_last_verdict(tmp_path):
    record(tmp_path, "audit", loop="train.py", verdict="holds", windows=3, violation=None)
    violation = {
        "kind": "gradient",
        "diagnosis": "tail-leak",
        "step": 4,
        "where": "train.py:7",
        "explanation": "leaks",
    }
    record(tmp_path, "audit", loop="train.py", verdict="violated", windows=5, violation=violation)
    record(
        tmp_path,
        "audit",
        loop="train.py",
        arguments=["--fast"],
        ranks=2,
        verdict="holds",
        windows=4,
        violation=None,
    )
    record(tmp_path, "audit", loop="other.py", verdict="unjudged", windows=0, violation=None)
    section = _section(build(tmp_path), "audits")
    assert section.text[0].startswith("`gradcheck-suite audit` ran 3 scripts unchanged")
    assert "; 1 violated." in section.text[0]
    assert [(row[0], [cell[1] for cell in row[1]]) for row in section.matrices[0].rows] == [
        ("train.py", [("tail-leak",), ("not run",)]),
        ("train.py --fast", [("not run",), ("holds",)]),
        ("other.py", [("unjudged",), ("not run",)]),
    ]
    assert section.tables[0].rows == (
        ("train.py", 1, "violated", 5, "gradient: tail-leak", 4, "train.py:7", "leaks"),
        ("train.py --fast", 2, "holds", 4, None, None, None, None),
        ("other.py", 1, "unjudged", 0, None, None, None, None),
    )


def test_a_question_is_counted_apart(tmp_path):
    claim(tmp_path, "C1.1", verdict="confirmed", condition="")
    claim(tmp_path, "C2.6", text="Does it matter?", verdict="sometimes")
    (shown,) = (answer for answer in build(tmp_path).answers if answer.key == "claims")
    assert shown.brief == "1 yes, 0 under a condition, 0 no"
    assert shown.answer.startswith("Of 1 widely read claims 1 are true (confirmed), ")
    assert shown.answer.endswith(" One question: Does it matter? Sometimes.")
    assert [each.number for each in shown.claims] == ["C1.1", "C2.6"]


def test_figures_of_a_claim_become_plots_where_they_are_numbers(tmp_path):
    figures = {
        "bytes, zero_ / None": "16,384 / 0", "gradients": [1.0, 2.5], "peak of K = 1": 4.0, "peak of K = 2": 2.0,
        "phase, zero_ / None": "backward / backward", "held": True,
    }  # fmt: skip
    claim(tmp_path, "C1.1", figures=figures)
    (found,) = _section(build(tmp_path), "claims").claims
    assert found.numbers == (("phase, zero_ / None", "backward / backward"), ("held", "yes"))
    pairs, values = (figure.spec["data"]["values"] for figure in found.figures)
    assert [(row["group"], row["name"], row["value"], row["text"]) for row in pairs] == [
        ("bytes", "zero_", 16384.0, "16,384"),
        ("bytes", "None", 0.0, "0"),
    ]
    assert [(row["group"], row["value"]) for row in values] == [
        ("peak of K = 1", 4.0),
        ("peak of K = 2", 2.0),
    ]
    assert found.series == (("gradients", ("1", "2.5")),)
    assert all("16,384 / 0" in figure.alt for figure in found.figures)


def test_findings_are_the_files_under_their_folder(tmp_path):
    (tmp_path / "findings" / "project").mkdir(parents=True)
    (tmp_path / "findings" / "README.md").write_text("# Not a finding\n")
    (tmp_path / "findings" / "project" / "b.md").write_text("# A title\n\n- **Versions**: 1\n")
    (document,) = _section(build(tmp_path), "findings").documents
    assert (document.title, document.markdown) == ("A title", "- **Versions**: 1")


def test_what_zeros_change_has_a_row_for_each_optimizer(tmp_path):
    row = {"optimizer": "SGD", "settings": {}, "law": "b <- momentum b", "before": 1.0, "after_none": 1.0,
           "none_changes": [], "to_the_bit": True, "as_predicted": True}  # fmt: skip
    record(
        tmp_path, "zero-or-none", variant="plain", zero_changes=[], after_zero=1.0, same=True, **row
    )
    moved = {**row, "settings": {"momentum": 0.5}}
    changed = ["parameter", "momentum_buffer"]
    record(
        tmp_path,
        "zero-or-none",
        variant="momentum",
        zero_changes=changed,
        after_zero=0.5,
        same=False,
        **moved,
    )
    section = _section(build(tmp_path), "zero-or-none")
    summary, values = section.tables
    assert summary.rows == (
        (
            "SGD",
            "nothing",
            "parameter, momentum_buffer",
            None,
            "nothing",
            "in some settings",
            "b <- momentum b",
        ),
    )
    assert values.rows[1] == (
        "SGD",
        "momentum=0.5",
        1.0,
        0.5,
        1.0,
        "parameter, momentum_buffer",
        "yes",
        "yes",
    )
    assert "2 of 2 settings" in section.text[2]
    answer = build(tmp_path).answers[1]
    assert (answer.tab, "also under" in answer.answer) == ("atlas", False)
    for optimizer in ("AMSGrad", "Adam"):
        moves = {**row, "optimizer": optimizer, "zero_changes": ["parameter"]}
        record(tmp_path, "zero-or-none", variant="plain", after_zero=0.5, same=False, **moves)
    assert (
        "steps), also under Adam and 1 more; None does not. Kept"
        in build(tmp_path).answers[1].answer
    )


def test_a_question_that_a_trainer_was_not_asked_has_its_reason(tmp_path):
    asked = {"package": "transformers", "version": "9", "why": ""}
    holds = {"loop": "t", "cases": 1, "violation": None}
    record(tmp_path, "trainer", **asked, trainer="hf-trainer", question="sum loss", result=holds)
    record(
        tmp_path,
        "trainer",
        **asked,
        trainer="hf-trainer-smoothing",
        question="label smoothing",
        result=holds,
    )
    record(
        tmp_path,
        "trainer",
        **{**asked, "why": "takes no loss"},
        trainer="mine",
        question="sum loss",
        result=None,
    )
    (matrix,) = _section(build(tmp_path), "trainers").matrices
    said = {name: [cell[1][0] for cell in cells] for name, cells in matrix.rows}
    assert said == {
        "hf-trainer, transformers 9": ["holds", "not asked (1)"],
        "hf-trainer-smoothing, transformers 9": ["not asked (2)", "holds"],
        "mine, transformers 9": ["not asked (3)", "not asked (4)"],
    }
    assert matrix.notes == (
        "Not asked (1): this question is for trainers that smooth labels.",
        "Not asked (2): hf-trainer-smoothing is a variant for the question label smoothing alone.",
        "Not asked (3): takes no loss.",
        "Not asked (4): no record has it; `gradcheck-suite trainers mine` asks.",
    )


def test_communication_is_held_to_its_prediction(tmp_path):
    row = {"loop": "ddp/zero_", "ranks": 2, "device": "cpu"}
    law = {"all-reduce": (3, 56)}
    record(
        tmp_path,
        "traffic",
        **row,
        accumulation_steps=1,
        observed={"all-reduce": (3, 56)},
        predicted=law,
    )
    too_much = {"all-reduce": (6, 176)}
    record(tmp_path, "traffic", **row, accumulation_steps=4, observed=too_much, predicted=law)
    section = _section(build(tmp_path), "traffic")
    (matrix,) = section.matrices
    assert matrix.columns == ("2 ranks, K = 1", "2 ranks, K = 4")
    assert matrix.rows == (
        ("ddp", (("good", ("3 collectives, 56 bytes",)), ("bad", ("6 collectives, 176 bytes",)))),
    )
    assert "1 of 2 windows" in section.text[1]
    assert section.tables[0].rows[1] == (
        "ddp", "zero_", 2, 4, 6.0, 176.0, "6 all-reduce (176 bytes)", 3.0, 56.0, "no",
    )  # fmt: skip


def test_the_answer_on_modes_shows_the_modes_alone(tmp_path):
    verdict(tmp_path / "one", "jax_where")
    assert [name for name, _ in build(tmp_path / "one").answers[0].matrix.rows] == ["1 mode of JAX"]
    verdict(tmp_path, "zero_")
    verdict(tmp_path, "mine", state="violated", violation=BROKEN)
    for mode in [*MODES, *JAX_MODES][1:]:
        verdict(tmp_path, mode)
    report = build(tmp_path)
    answer, (everything,) = report.answers[0], _section(report, "verified").matrices
    of_jax = f"{len(JAX_MODES)} modes of JAX"
    assert [name for name, _ in answer.matrix.rows] == [*MODES, of_jax]
    assert (
        answer.brief
        == f"Yes, all {len(MODES)} modes hold in float64 on the CPU, and all {len(JAX_MODES)} of JAX in float64 on the "
        "CPU: the gradient is that of one large batch"
    )
    verdict(tmp_path, "zero_", dtype="float32", worst_error_over_allowed=0.9964)
    assert "The worst error is 0.996 of" in build(tmp_path).answers[0].answer
    for mode in MODES:
        verdict(tmp_path, mode, dtype="bfloat16")
    brief = build(tmp_path).answers[0].brief
    # float32 is not listed: one mode alone was run in it
    assert brief.startswith(
        f"Yes, all {len(MODES)} modes hold in float64, bfloat16 on the CPU, and"
    )
    assert everything.rows[0][0] == "mine"
    assert {name for name, _ in everything.rows} == {"mine", *MODES, *JAX_MODES}
    assert everything.notes[0].startswith("Not run: ")
    # the row of several modes says the worst of them
    assert dict(build(tmp_path).answers[0].matrix.rows)[of_jax][0][0] == "good"
    verdict(tmp_path, "jax_where", state="unjudged")
    assert dict(build(tmp_path).answers[0].matrix.rows)[of_jax][0] == ("none", ("unjudged", ""))
    verdict(
        tmp_path, "jax_donated", state="violated", violation={**BROKEN, "diagnosis": "no-divide"}
    )
    assert dict(build(tmp_path).answers[0].matrix.rows)[of_jax][0] == (
        "bad",
        ("violated", "no-divide"),
    )


def test_figures_older_than_their_code_are_marked(tmp_path):
    verdict(tmp_path, "zero_")
    benchmark(tmp_path, "zero_", 0.1)
    for key in ("verified", "costs"):
        (source,) = _section(build(tmp_path), key).sources
        assert not source.older
    path = records_path(tmp_path, "verify")
    new = {**json.loads(path.read_text()), "clean": True}
    old = {
        **new,
        "judge": "0" * 16,
        "commit": "1234567890ab",
        "clean": False,
        "time": "2020-01-02T03:04:05+00:00",
    }
    older = {**old, "data": {**new["data"], "loop": "plain"}}
    path.write_text(json.dumps(new) + "\n" + json.dumps(older) + "\n")
    first, second = _section(build(tmp_path), "verified").sources
    assert (first.older, first.unclean, first.records) == (False, False, 1)
    assert (second.older, second.unclean, second.commit, second.date) == (
        True,
        True,
        "123456789",
        "2020-01-02",
    )
    assert second.machine == "a processor, 2 cores, torch 2.13.0"
    # a record of an earlier version has neither
    del older["judge"], older["clean"], older["commit"]
    path.write_text(json.dumps(older) + "\n")
    (source,) = _section(build(tmp_path), "verified").sources
    assert (source.older, source.unclean, source.commit) == (True, False, "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (1234567, "1,234,567"), (0.00012345, "0.000123"), ("x", "x"), (True, "yes")],
)
def test_cells_are_shown_for_people(value, text):
    assert cell_text(value) == text


def test_printed_loops_are_counted_first_where_they_are_right(tmp_path):
    loop = {"says": "s", "why": "w", "smallest": ["x"]}
    bad, good = "violated, found after 1 cases", "holds over 200 cases"
    record(tmp_path, "claim", **loop, loop="1a", needs="one step", within=good, bare=bad)
    record(tmp_path, "claim", **loop, loop="1b", needs=None, within=good, bare=good)
    record(tmp_path, "claim", **loop, loop="1c", needs="one step", within=bad, bare=bad)
    section = _section(build(tmp_path), "claims")
    assert section.text[1].startswith(
        "Of 3 loops that the sources print, 2 are right under what they rely on: one step (2 of them)."
    )
    assert section.text[1].endswith("1 are.")
    assert section.tables[0].rows[0] == (
        "1a",
        "s",
        "one step",
        good,
        "violated, found after 1 case",
        "w",
        "x",
    )


def test_points_of_the_atlas_are_counted_once_for_all_dtypes(tmp_path):
    assert "atlas" not in build(tmp_path).tabs
    row = {
        "operation": "relu",
        "torch": {"value": ["inf"], "gradient": [[1.0, 2.0], [0.5]]},
        "jax": {"value": [0.0]},
    }
    rows = [{**row, "point": point, "dtype": dtype, "agree": point == "x = 0"}
            for point in ("x = 0", "x = inf", "x = 1") for dtype in ("float64", "float32")]  # fmt: skip
    record(tmp_path, "atlas", rows=rows)
    assert "atlas" in build(tmp_path).tabs
    section = _section(build(tmp_path), "atlas")
    assert section.text[0].startswith(
        "3 points at kinks, ties and limits, in 2 dtypes: of these 6 derivatives"
    )
    assert section.text[0].endswith("agree in 2.")
    assert section.tables[0].rows[0][3:5] == ("value inf; gradient 1, 2 | 0.5", "value 0")


def test_steps_of_optimizers_show_the_newest_row_of_each(tmp_path):
    row = {
        "torch": "Adam",
        "optax": "scale_by_adam",
        "differs": ["a", "b"],
        "outside": "c",
        "source": "s",
        "cases": 6,
    }
    ratios = {"float64": 0.5, "float32": 2.0}
    record(
        tmp_path,
        "step",
        rows=[{**row, "error_over_allowed": {}, "agree": True}, {"torch": "SGD", "agree": True}],
    )
    record(tmp_path, "step", rows=[{**row, "error_over_allowed": ratios, "agree": False}])
    section = _section(build(tmp_path), "steps")
    assert "Of 2 optimizers of torch.optim, 1 take" in section.text[0]
    adam, sgd = section.tables[0].rows
    assert adam == ("Adam", "scale_by_adam", "a; b; not compared: c", 6, 0.5, 2.0, "s")
    assert sgd[0] == "SGD"


def test_the_newest_run_is_the_first_of_its_sources():
    runs = [
        Record("verify", {}, command=f"run {hour}", time=f"2026-01-01T{hour}:00")
        for hour in (10, 12, 11)
    ]
    assert [source.command for source in sources(runs)] == ["run 12", "run 11", "run 10"]


def test_a_mode_of_which_nothing_was_judged_neither_holds_nor_is_violated(tmp_path):
    verdict(tmp_path, "zero_", state="unjudged", judged=0)
    answer = next(answer for answer in build(tmp_path).answers if answer.key == "holds")
    assert answer.brief == "Not verified yet"
    assert [row for _, row in answer.matrix.rows] == [
        (("none", ("unjudged", "")), ("none", ("not run",)))
    ]
