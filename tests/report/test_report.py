"""The report: whole from records, plain where there are none, harmless whatever the records hold."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from gradcheck_suite.cli import run
from gradcheck_suite.records.store import append_record, records_path
from gradcheck_suite.report import html, markdown
from gradcheck_suite.report.build import build
from gradcheck_suite.report.content import Figure, Report, Section, Table, shown, to_json

ENVIRONMENT = {
    "versions": {"torch": "2.13.0", "jax": None},
    "platform": "Linux x86_64",
    "processor": "a processor",
    "processor_count": 2,
    "devices": {"torch": ["cpu"]},
    "precision": {"jax_enable_x64": True},
}
EVIL = "</td><script>alert('x')</script>|`*_[a](b)"


def _record(reports, kind, **data):
    append_record(reports, kind, data, environment=ENVIRONMENT, command=f"gradcheck-suite {kind}")


def _benchmark(reports, mode, median, *, measures="window", **changes):
    data = {
        "measures": measures,
        "mode": mode,
        "dtype": "float32",
        "parameters": 1000,
        "layout": "few",
        "micro_batches": 1 if measures == "window" else 0,
        "device": "cpu",
        "bytes_per_second": 1e10,
        "predicted_bytes": {"zero_": 16000, "set_to_none": 0}.get(mode, 0),
        "seconds": {"median": median},
        "rounds": 5,
    }
    _record(reports, "benchmark", **{**data, **changes})


def _verdict(reports, loop, *, verdict="holds", **changes):
    data = {
        "loop": loop,
        "verdict": verdict,
        "judged": 200,
        "dtype": "float64",
        "device": "cpu",
        "worst_error_over_allowed": 0.125,
        "violation": None,
        "reached": {"layers": {"linear": 7}, "losses": {}, "splits": {"several windows": 3}},
        "stored": None,
    }
    _record(reports, "verify", **{**data, **changes})


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("reports")
    _verdict(tmp_path, "zero_")
    _verdict(tmp_path, "set_to_none")
    violation = {"kind": "gradient", "diagnosis": "mean-of-means", "explanation": EVIL}
    _verdict(tmp_path, EVIL, verdict="violated", violation=violation, stored="mine-abc.json")
    for mode, median in (("zero_", 0.003), ("set_to_none", 0.002), ("jax_scan", 0.001)):
        _benchmark(tmp_path, mode, median)
    _benchmark(tmp_path, "zero_", 0.0001, measures="reset", predicted_bytes=4000)
    _record(
        tmp_path,
        "claim",
        number="C2.1",
        source="an answer",
        text=EVIL,
        how="by running",
        verdict="conditional",
        sentence="It depends.",
        condition="it rains",
        figures={"held": [1.0, 2.5]},
        counterexample="",
    )
    bug = {
        "number": 1, "name": "mean-of-means", "citations": ["transformers#24725"], "mechanism": "m", "needs": "n",
        "runs": 2, "found": 2, "median_cases": 7, "median_seconds": 1.5, "names": {"gradient/mean-of-means": 2},
        "wanted": [], "rightly_named": 2, "windows": 1, "micro_batches": 2, "layers": 1, "small": True,
        "others": {"torch.testing.assert_close": True},
    }  # fmt: skip
    _record(
        tmp_path,
        "zoo",
        seeds=2,
        examples=200,
        bugs=[bug],
        sound=[{"loop": "zero_", "cases": 1000, "blamed": False, "worst": 0.1}],
    )
    return tmp_path


@pytest.fixture(scope="module")
def report(reports):
    return build(reports)


@pytest.fixture(scope="module")
def page(report):
    return _page(report)


def test_the_zoo_in_other_dtypes_is_a_row_each(reports, tmp_path):
    zoo = json.loads((reports / "records" / "zoo.jsonl").read_text())["data"]
    (bug,) = zoo["bugs"]
    coarse = {**bug, "runs": 9, "found": 7, "within_rounding": 2, "rightly_named": 4, "unnamed": 2}
    sound = [{"loop": "zero_", "cases": 30, "blamed": True, "worst": 1.5}]
    _record(tmp_path, "zoo", **zoo)
    _record(tmp_path, "zoo", dtype="bfloat16", seeds=9, examples=200, bugs=[coarse], sound=sound)
    section = _section(build(tmp_path), "zoo")
    assert "2 of 2 runs with a right diagnosis" in section.text[0]
    assert "blamed in 0 of 1,000 cases" in section.text[0]
    # 7 found, 4 with a right diagnosis and 2 with none: 1 with a wrong one
    assert section.tables[2].rows == (("bfloat16", 9, 7, 2, 4, 2, 1, 30, 1),)


class _Page(HTMLParser):
    """Notes tags that are opened and never closed, scripts, and whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith(("#", "data:"))]
        if tag not in ("meta", "link", "br", "img", "path", "use", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def _page(report):
    page = _Page()
    page.feed(html.render(report))
    return page


def _section(report, key):
    (section,) = (section for section in report.sections if section.key == key)
    return section


def test_every_section_is_there_with_its_figures(page):
    text = "".join(page.text)
    for expected in (
        "Does zero_ give the same gradients as set_to_none?",
        "Yes: 2 ways of resetting hand the optimizer the large batch's gradient",
        "in each of the 200 cases that every one of them was judged on (float64).",
        "200 for each of",
        "Of 1 claims 0 are confirmed, 1 true under a condition, 0 refuted.",
        "True where: it rains",
        "held: 1, 2.5",
        "gradcheck-suite replay reports/counterexamples/mine-abc.json",
        "There are no records of a CUDA device",
        "1 of 1 real bugs",
        "a processor, 2 cores",
    ):
        assert expected in text, expected


def _calibration(reports, *, alarms=0):
    tally = {
        "checks": 60, "judged": 50, "cases": 3, "elements": 400, "skipped": {EVIL: 10}, "findings": {},
        "alarms": [{"loop": EVIL, "explanation": EVIL}] * alarms,
        "over": {k: {"counts": [50] + [0] * 19, "largest": 0.03} for k in ("", "linear")},
        "drawn_on": {"counts": [7] + [0] * 19, "largest": 0.04}, "layers": {"linear": 50}, "losses": {"mse": 50},
        "loops": {"zero_": 50}, "rivals": {"chex.assert_trees_all_close": 4}, "autocast": 5, "rivals_autocast": {},
    }  # fmt: skip
    found = {"gradcheck-suite": {"9": 200}, "torch.testing.assert_close": {"4": 200},
             "chex.assert_trees_all_close": {"11": 200}, "twice the reference's rmse": {"-1": 3, "8": 197},
             "NNSmith 1e-2/1e-3": {"2": 200}}  # fmt: skip
    curve = {"cases": 200, "skipped": {}, "smallest": {"everywhere": found}}
    coverage = {"layers": {"reached": 1, "missing": ["gru"]}, "losses": {"reached": 2, "missing": []}}
    _record(reports, "calibration", asked={}, alarms={"float16": tally}, curves={"float16": curve}, loops=20,
            coverage=coverage)  # fmt: skip


def test_calibration_has_its_tables_and_its_curve(tmp_path):
    _calibration(tmp_path)
    section = _section(build(tmp_path), "calibration")
    assert "50 checks in all; 0 of them blamed the loop" in section.text[0]
    assert "1 of 2 kinds of layers, 2 of 2 kinds of losses" in section.text[0]
    assert "No rule that never blames a sound loop finds smaller ones." in section.text[1]
    judged, detection, skipped, ratios = section.tables
    assert judged.rows == (("float16", 50, 400, 0, 7, 0.04, 45, 0, 4, 0, 0),)
    # 2**-9, 2**-4, 2**-11 by a rule with false alarms, one that misses 3 of 200, 2**-2
    assert detection.rows == (
        ("float16", "everywhere", 200, "2.0e-03", "98.7%", "2.0e-03", "6.2e-02", "4.9e-04 *", "none", "2.5e-01"),
    )
    assert skipped.rows == (("float16", EVIL, 10),)
    assert ratios.rows == (("linear", 50, "0.03 / 0.03 / 0.03"),)
    (figure,) = section.figures
    assert "in 200 cases" in figure.caption
    assert section.commands == ("gradcheck-suite calibration",)
    assert "script" not in _page(build(tmp_path)).tags


def test_a_quiet_rule_that_finds_smaller_errors_is_said(tmp_path):
    _calibration(tmp_path, alarms=2)
    path = tmp_path / "records" / "calibration.jsonl"
    path.write_text(path.read_text().replace('"chex.assert_trees_all_close": 4', '"chex.assert_trees_all_close": 0'))
    section = _section(build(tmp_path), "calibration")
    assert "2 of them blamed the loop" in section.text[0]
    assert "float16, everywhere: chex.assert_trees_all_close finds 4.9e-04, the bound 2.0e-03" in section.text[1]


def test_the_minimum_of_a_reset_is_bytes_over_bandwidth(report):
    section = _section(report, "costs")
    (resets,) = (t for t in section.tables if "alone" in t.caption)
    assert resets.rows[0][4:] == pytest.approx((0.1, 0.0004, 0.004))


def test_what_came_from_outside_is_text(page):
    assert "script" not in page.tags
    assert EVIL in "".join(page.text)
    assert page.fetched == []
    assert page.open == []


def test_drawings_are_well_formed_and_take_the_pages_colour(report):
    figures = [figure for section in report.sections for figure in section.figures]
    assert figures
    for figure in figures:
        ElementTree.fromstring(figure.svg)
        assert "currentColor" in figure.svg
        assert "#000000" not in figure.svg
        texts = [e for e in ElementTree.fromstring(figure.svg).iter() if e.tag.endswith("}text")]
        assert texts
        assert {text.get("fill") for text in texts} == {"currentColor"}
        assert figure.alt


def test_markdown_tables_keep_their_columns(report):
    text = markdown.render(report)
    assert "<script>" not in text
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    assert tables
    for line in tables:
        assert line.count("|") - line.count("\\|") >= 3
    assert "\\</td\\>" in text


def test_an_empty_folder_says_what_to_run(tmp_path):
    text = "".join(_page(build(tmp_path)).text)
    for expected in ("Nothing has been verified yet", "Nothing has been measured yet", "have not been tested yet",
                     "bounds have not been calibrated yet"):  # fmt: skip
        assert expected in text


def test_damaged_records_are_reported(tmp_path):
    _verdict(tmp_path, "zero_")
    with (tmp_path / "records" / "verify.jsonl").open("a") as file:
        file.write('{"torn')
    assert "verify.jsonl, line 2: damaged; left out" in "".join(_page(build(tmp_path)).text)


def test_the_command_writes_three_files_of_the_same_content(reports, capsys):
    assert run(["report", "--reports", str(reports)]) == 0
    data = json.loads((reports / "report.json").read_text())
    assert [s["key"] for s in data["sections"]] == [
        "verified", "costs", "memory", "decision", "compiled", "claims", "zoo", "calibration", "bridge", "trainers",
        "counterexamples",
    ]  # fmt: skip
    assert (reports / "report.html").stat().st_size < 2 * 2**20
    assert (reports / "report.md").read_text().startswith("# gradcheck-suite")
    assert "report.html" in capsys.readouterr().out


def test_without_records_the_command_says_what_makes_them(tmp_path, capsys):
    assert run(["report", "--reports", str(tmp_path)]) == 2
    assert "there are no records" in capsys.readouterr().err


def test_a_row_that_does_not_fit_its_table_is_a_bug():
    with pytest.raises(AssertionError):
        Table("t", ("a", "b"), (("only one",),))


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1234567, "1,234,567"), (0.00012345, "0.000123"), ("x", "x"), (True, "yes")]
)
def test_cells_are_shown_for_people(value, text):
    assert shown(value) == text


def test_the_json_holds_what_the_page_does():
    section = Section("k", "t", ("p",), (Table("c", ("a",), ((1.5,),)),), (Figure("<svg/>", "alt", "cap"),), ("cmd",))
    data = json.loads(json.dumps(to_json(Report("title", "now", (("q", "a", "k"),), (section,)))))
    assert data == {
        "schema": 1, "title": "title", "made": "now", "answers": [{"question": "q", "answer": "a", "section": "k"}],
        "sections": [{
            "key": "k", "title": "t", "text": ["p"],
            "tables": [{"caption": "c", "columns": ["a"], "rows": [[1.5]], "note": ""}],
            "figures": [{"alt": "alt", "caption": "cap"}], "commands": ["cmd"], "missing": None,
        }],
        "environments": [], "problems": [],
    }  # fmt: skip


def test_trainers_have_a_column_for_each_question(tmp_path):
    """The latest answer counts; micro-batches of 1 and 2 items in one window, then a short one."""
    violation = {
        "kind": "gradient",
        "diagnosis": "mean-of-means",
        "case": {"plan": {"micro_batches": [1, 2, 3], "accumulation_steps": 2}},
    }
    answer = {"trainer": "a-trainer", "package": "pack", "version": "1.0", "question": "unequal counts", "why": ""}
    for found in (None, violation):
        _record(tmp_path, "trainer", **answer, result={"cases": 20, "violation": found})
    _record(tmp_path, "trainer", **{**answer, "question": "sum loss"}, result={"cases": 7, "violation": None})
    _record(tmp_path, "trainer", **{**answer, "question": "head Some"}, result=None)
    section = _section(build(tmp_path), "trainers")
    assert section.tables[0].columns == ("trainer", "version", "unequal counts", "sum loss")
    assert section.tables[0].rows == (("a-trainer", "pack 1.0", "mean-of-means [1 2 | 3] K=2", "holds"),)
    assert section.tables[1].rows == (("Some", "pack 1.0", None, None),)
    assert "1 trainers and versions" in section.text[0]


def test_architectures_stand_with_both_of_their_errors(tmp_path):
    found = {
        "architecture": "Some",
        "package": "p",
        "version": "1",
        "operations": 7,
        "loss_error": 1e-9,
        "narrow": ["a"],
    }
    _record(tmp_path, "bridge", **found, widened=False, gradient_error=2e-7, allowed=1e-6)
    _record(tmp_path, "bridge", **{**found, "narrow": []}, widened=True, gradient_error=3e-16, allowed=1e-10)
    section = _section(build(tmp_path), "bridge")
    assert section.tables[0].rows == (("Some", "p 1", 7, 1e-9, 2e-7, 1e-6, 3e-16, "a"),)


def test_memory_is_shown_in_mebibytes(tmp_path):
    row = {"device": "cpu", "parameters": 10, "layout": "few", "dtype": "float32", "micro_batches": 1, "mode": "zero_"}
    counted = {"gradients_between": 2**20, "peak": 3 * 2**20}
    allocator = {"requested_peak": 2**21, "allocated_peak": 2**22, "reserved_peak": 2**23}
    counts = {"allocations": 12.0, "retries": 0, "segments": 3}
    _record(tmp_path, "memory", **row, **counted, resident_peak=5 * 2**20, allocator=None)
    on_gpu = {**row, "device": "cuda"}
    _record(tmp_path, "memory", **on_gpu, **counted, resident_peak=None, allocator={**allocator, **counts})
    cpu, gpu = _section(build(tmp_path), "memory").tables[0].rows
    assert cpu == ("cpu", 10, "float32", 1, "zero_", 1.0, 3.0, 5.0, None, None, None, None, None, None)
    assert gpu == ("cuda", 10, "float32", 1, "zero_", 1.0, 3.0, None, 2.0, 4.0, 8.0, 12.0, 0, 3)


def test_figures_older_than_the_judge_are_flagged(tmp_path):
    _verdict(tmp_path, "zero_")
    (text,) = [s.text for s in build(tmp_path).sections if s.key == "verified"]
    assert not any("Older than the judge" in paragraph for paragraph in text)
    path = records_path(tmp_path, "verify")
    record = {**json.loads(path.read_text()), "clean": True}
    path.write_text(json.dumps(record) + "\n")
    older = {**record, "judge": "0" * 16, "commit": "1234567890ab", "clean": False}
    path.write_text(json.dumps({**older, "data": {**record["data"], "loop": "plain"}}) + "\n" + path.read_text())
    (text,) = [s.text for s in build(tmp_path).sections if s.key == "verified"]
    assert text[-1] == (
        "Older than the judge: 1 of the 2 records behind these figures were made by another version of the code that "
        "judges (commit 123456789). Unclean: 1 of the 2 records were made with uncommitted changes in the working tree."
    )
    # a record of an earlier version has neither
    del older["judge"], older["clean"], older["commit"]
    path.write_text(json.dumps(older) + "\n")
    (text,) = [s.text for s in build(tmp_path).sections if s.key == "verified"]
    assert "1 of the 1 records" in text[-1]
    assert "(an unknown commit)" in text[-1]
