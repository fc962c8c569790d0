"""What new users stumbled over: layouts, read-only folders, help on narrow terminals, progress."""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from gradcheck_suite import check, verify
from gradcheck_suite.cli import PROGRAM
from gradcheck_suite.cli.arguments import set_python_path, top_parser
from gradcheck_suite.cli.campaign import line, merged_result
from gradcheck_suite.cli.progress import page_of
from gradcheck_suite.core import text
from gradcheck_suite.core.contract import ASSUMPTIONS
from gradcheck_suite.core.faults import FIX, remedy_of, remedy_over_ranks
from gradcheck_suite.core.source_lines import places_source
from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.result import PortFinding, PortResult
from tests.cli.conftest import files
from tests.cli.test_output import on_a_terminal

RELATIVE = "from .helper import sound\n\ndef train(run):\n    sound(run)\n"


@pytest.fixture
def src_layout(project):
    """A package `pkg` with a loop in `src/pkg/sub/loop.py`, which imports relative to it."""
    folder = project / "src" / "pkg" / "sub"
    folder.mkdir(parents=True)
    for name in ("src/pkg/__init__.py", "src/pkg/sub/__init__.py"):
        (project / name).touch()
    (folder / "loop.py").write_text(RELATIVE)
    (folder / "helper.py").write_text((project / "loops.py").read_text())
    yield project
    for name in [name for name in sys.modules if name.partition(".")[0] == "pkg"]:
        del sys.modules[name]


def test_a_relative_import_gets_the_hint_to_name_the_module(run, src_layout):
    said = run("verify", "src/pkg/sub/loop.py:train").err
    assert "; name the module, not the file: pkg.sub.loop:NAME, with src in pythonpath" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["pkg.sub.loop", "pkg"])
def test_a_module_that_is_in_src_is_said_to_be_there(run, src_layout, name):
    said = run("verify", f"{name}:train").err
    assert said.endswith(
        '; it is in src: set pythonpath = ["src"] in [tool.gradcheck-suite] of pyproject.toml\n'
    )
    assert "in src" not in run("verify", "other.sub.loop:train").err


def test_another_failed_import_gets_no_such_hint(run, project):
    (project / "lacks.py").write_text("import nowhere_to_be_found\n")
    assert "name the module" not in run("verify", "lacks.py:train").err


@pytest.fixture
def tagger(project):
    """A package whose script imports the module beside it."""
    folder = project / "tagger"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "data.py").write_text("ROWS = 3\n")
    return folder


@pytest.mark.parametrize("line", ["from .data import ROWS", "from tagger.data import ROWS"])
def test_a_script_of_a_package_is_told_to_run_as_a_module(run, tagger, line):
    (tagger / "train.py").write_text(f"{line}\n")
    said = run("audit", "tagger/train.py").err.splitlines()[-1]
    assert said.endswith(
        "before its first step; it is part of a package: run `gradcheck-suite audit -m tagger.train`"
    )


def test_the_folder_is_said_where_it_is_another(run, tagger, monkeypatch):
    (tagger / "train.py").write_text("from .data import ROWS\n")
    monkeypatch.chdir(tagger)
    assert (
        run("audit", "train.py")
        .err.splitlines()[-1]
        .endswith(f"-m tagger.train` in {tagger.parent}")
    )


def test_a_package_that_is_not_installed_is_said_to_be_missing_here(run, project):
    (project / "train.py").write_text("import nowhere_to_be_found.here\n")
    said = run("audit", "train.py").err.splitlines()[-1]
    assert f"nowhere_to_be_found is not installed where gradcheck-suite is, in {sys.prefix}" in said


@pytest.mark.parametrize(
    "line", ["import torch.nowhere", "from torch import nowhere", "raise ValueError('own')"]
)
def test_another_end_gets_no_hint_on_imports(run, project, line):
    (project / "train.py").write_text(f"{line}\n")
    assert run("audit", "train.py").err.splitlines()[-1].endswith("before its first step")


def test_pythonpath_finds_the_package_of_a_src_layout(run, src_layout):
    assert "there is no module" in run("verify", "pkg.sub.loop:train").err
    (src_layout / "pyproject.toml").write_text('[tool.gradcheck-suite]\npythonpath = ["src"]\n')
    outcome = run("verify", "pkg.sub.loop:train", "-n", 2, "-q")
    assert (outcome.status, outcome.err) == (0, "")


def test_the_project_folder_names_pythonpath_wherever_the_command_starts(src_layout, monkeypatch):
    (src_layout / "pyproject.toml").write_text('[tool.gradcheck-suite]\npythonpath = ["src"]\n')
    monkeypatch.chdir(src_layout / "src" / "pkg")
    set_python_path()
    assert sys.path[0] == str(src_layout / "src")


def test_a_pythonpath_that_is_not_there_is_said(project):
    (project / "pyproject.toml").write_text('[tool.gradcheck-suite]\npythonpath = ["scr"]\n')
    with pytest.raises(UsageError, match="there is no folder scr"):
        set_python_path()


@pytest.mark.parametrize("name", ["laid_out.train", "laid_out"])
def test_a_module_of_a_src_layout_gets_the_table_to_write(run, project, name):
    package = project / "src" / "laid_out"
    package.mkdir(parents=True)
    for file in ("__init__", "__main__", "train"):
        (package / f"{file}.py").write_text("print('ran')\n")
    outcome = run("audit", "-m", name)
    assert outcome.status == 2
    advice = 'src has it: put `pythonpath = ["src"]` below [tool.gradcheck-suite]'
    assert advice in outcome.err
    assert outcome.err.count("\n") == 1
    # what no folder has gets none
    assert "has it" not in run("audit", "-m", f"{name}.other").err


@pytest.fixture
def read_only(monkeypatch):
    """A folder in which nothing can be written; permission bits do not stop the superuser."""
    from gradcheck_suite.core import records

    def refused(*, dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(records.tempfile, "TemporaryFile", refused)


@pytest.mark.usefixtures("read_only", "untouched")
@pytest.mark.parametrize(("loop", "status"), [("sound", 0), ("no_reset", 1)])
def test_verify_warns_and_judges_in_a_read_only_folder(run, loop, status):
    outcome = run("verify", f"loops.py:{loop}", "-n", 2)
    assert outcome.status == status
    assert outcome.err == (
        "gradcheck-suite verify: warning: counterexamples are not stored: cannot write into ."
        " (Read-only file system); --reports DIR names another folder\n"
    )
    assert "replay" not in outcome.out


@pytest.mark.usefixtures("read_only", "untouched")
def test_a_read_only_folder_that_the_user_named_is_refused(run):
    outcome = run("verify", "loops.py:sound", "-n", 2, "--reports", "kept")
    assert outcome.status == 2
    assert "--reports kept: cannot write into" in outcome.err


KEPT = '[tool.gradcheck-suite]\nreports = "kept"\n'


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("given", [[], ["--reports", "other"]])
def test_a_read_only_folder_of_the_projects_table_is_no_reason_not_to_judge(run, project, given):
    (project / "pyproject.toml").write_text(KEPT)
    (project / "train.py").write_text("")
    outcome = run("audit", *given, "train.py")
    warned = (
        "gradcheck-suite audit: warning: verdicts are not recorded: cannot write into ."
        " (Read-only file system); --reports DIR names another folder\n"
    )
    if given:
        assert outcome.status == 2
        assert "--reports other: cannot write into" in outcome.err
    else:
        assert outcome.err.startswith(warned)
        # the script was run: it takes no step
        assert "unjudged" in outcome.err


@pytest.mark.usefixtures("read_only")
def test_a_report_in_a_read_only_folder_says_what_to_do(run, project):
    (project / "reports" / "records").mkdir(parents=True)
    outcome = run("report")
    assert outcome.status == 2
    assert outcome.err == (
        "gradcheck-suite report: error: the report stands beside its records in reports: cannot"
        " write into reports (Read-only file system); copy that folder to where you can write, and"
        " name the copy with --reports\n"
    )


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", [None, *PROGRAM.commands])
def test_help_fits_the_terminal_and_breaks_no_name(command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = (
        PROGRAM.parser(command)
        if command
        else top_parser(PROGRAM.name, {n: c.summary for n, c in PROGRAM.commands.items()})
    )
    text = parser.format_help()
    assert [line for line in text.splitlines() if len(line) > 80] == [] or columns == 100
    assert max(map(len, text.splitlines())) <= columns
    for name in ASSUMPTIONS if command == "verify" else ():
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", text), f"{name} is broken"


@pytest.mark.full
def test_trainers_prints_answers_alone_where_it_is_to_be_quiet(run):
    quiet = run("trainers", "loops.py:sound", "-n", 1, "-q").out.splitlines()
    told = run("trainers", "loops.py:sound", "-n", 1).out.splitlines()
    assert told[1:-1] == quiet
    assert all("holds" in line for line in quiet)


@pytest.mark.full
def test_campaign_takes_cases_and_quiet(run, project):
    outcome = run("campaign", "-q", "-n", 2, "verify", "loops.py:sound")
    assert outcome.out == "loops.py:sound  holds  2 cases\n"
    assert files(project / "reports") == [str(Path("records") / "verify.jsonl")]


class Bar:
    """What `Progress` is asked to show."""

    names: ClassVar[list[str]] = []
    counted = 0

    def __init__(self, **settings):
        Bar.names, Bar.counted = [], 0

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    def start(self, name, examples=None):
        Bar.names.append(name)

    def advance(self, verdict):
        Bar.counted += 1

    def stop(self):
        pass


@pytest.mark.share(4)
def test_trainers_shows_each_question_and_its_cases(run, monkeypatch):
    monkeypatch.setattr("gradcheck_suite.cli.trainers.Progress", Bar)
    questions = run("trainers", "loops.py:sound", "-n", 2, "-q").out.splitlines()
    assert len(Bar.names) == len(questions)
    assert all(name.startswith("loops.py:sound: ") for name in Bar.names)
    # two cases are asked for; with Hypothesis 6.150.0 four of the six questions get one
    assert Bar.counted >= len(questions)


# What Python refuses in the words of the command line.


def two(run, more):
    """Take two arguments."""


class Trainer:
    """A class, which is no loop."""


@pytest.mark.parametrize(
    ("loop", "case", "said"),
    [
        (two, "case", "two is two(run, more): expected a function of one argument"),
        (Trainer, "case", "Trainer is a class: expected a function of one argument"),
        (None, "case", "the loop None is of type NoneType: expected a function of one argument"),
        (lambda run: None, None, "case is of type NoneType: expected a gradcheck_suite.Case"),
    ],
)
def test_check_refuses_what_is_no_loop_and_no_case(loop, case, said, a_case):
    with pytest.raises(UsageError, match=re.escape(said)):
        check(loop, a_case if case else None)
    if case:
        with pytest.raises(UsageError, match=re.escape(said)):
            verify(loop, examples=1)


# What an audit says of declarations, denominators and shares.


MEANS = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in (4, 2, 7):
    loss = F.cross_entropy(model(torch.randn(rows, 5)), torch.randint(0, 3, (rows,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nofile.py:3=rows", "declares nothing: nothing went backward at this line"),
        ("train.py:2=rows", "declares nothing: nothing went backward at this line"),
        ("train.py:10=rowz", "declares nothing: NameError: name 'rowz' is not defined"),
    ],
)
def test_a_declaration_that_matches_nothing_is_said(run, project, given, said):
    (project / "train.py").write_text(MEANS)
    outcome = run("audit", "--objective", given, "train.py")
    assert outcome.status == 0
    assert f"--objective {given} {said}" in outcome.err
    assert "[unused-declaration]" in outcome.err


def test_a_declaration_that_matches_is_not_called_unused(run, project):
    (project / "train.py").write_text(MEANS)
    outcome = run("audit", "--objective", "train.py:10=rows", "train.py")
    assert "unused-declaration" not in outcome.err


def test_advice_on_ranks_stands_only_where_there_are_ranks():
    alone = f"weighs too much{FIX}{remedy_of('mean-of-means')}"
    assert "rank" not in alone
    assert remedy_over_ranks(alone, "mean-of-means").endswith(
        ", added up over all ranks or devices"
    )
    assert remedy_over_ranks(alone, "stale-window") == alone


# Records: what is accepted stays, and what is damaged is told once.


@pytest.mark.share(4)
def test_a_damaged_record_fails_the_report_and_is_named_once(run, project):
    pytest.importorskip("jinja2")
    run("verify", "loops.py:sound", "-n", 2, "--reports", "reports")
    assert run("report").status == 0
    with (project / "reports" / "records" / "verify.jsonl").open("a") as file:
        file.write('{"schema": 1\n')
    outcome = run("report")
    assert outcome.status == 1
    assert "left out: verify.jsonl, line 2: damaged\n" in outcome.out
    assert outcome.out.count("left out") == 1
    assert run("report", "--compare", "reports", "reports").status == 1


def test_an_accepted_fault_is_kept_in_records_and_shown_in_the_report(run, project):
    pytest.importorskip("jinja2")
    entry = '{fault = "stale-window", file = "loops.py", reason = "ported as it is"}'
    (project / "pyproject.toml").write_text(f"[tool.gradcheck-suite]\naccept = [{entry}]\n")
    assert run("verify", "loops.py:no_reset", "-n", 2, "--reports", "reports").status == 0
    assert run("report").status == 0
    page = (project / "reports" / "report.html").read_text()
    assert "accepted stale-window" in page
    assert "stale-window: ported as it is" in page


def test_a_campaign_keeps_what_its_later_shards_accept():
    part = {
        "loop": "a",
        "verdict": "holds",
        "violation": None,
        "findings": [],
        "seconds": 1.0,
        "cases": 1,
        "judged": 1,
        "windows": 1,
        "worst_error_over_allowed": 0.5,
        "skipped": {},
        "windows_skipped": {},
        "shrinking": None,
    }
    fault = {"diagnosis": "stale-window"}
    merged = merged_result([part, {**part, "accepted": [fault]}, {**part, "accepted": [fault]}])
    assert merged["accepted"] == [fault]
    assert line(merged) == "a  holds  3 cases  accepted: stale-window"
    assert "accepted" not in merged_result([part, part])


# Lines on narrow terminals.


TABLE = [
    "  micro-batch  count  weight  expected  weight (bar), expected (|)",
    "            0      1     0.5  0.333333  ################|########",
    "            1      2    0.25  0.333333  ############    |",
]
SOURCE = [
    "  10 |     loss = F.cross_entropy(model(torch.randn(rows, 5)), targets)   loss",
    "  11 |     (loss / len(window)).backward()                                backward",
]


def test_bars_shrink_and_notes_stay_on_their_line_at_60_columns():
    shown = [line.rstrip() for line in on_a_terminal(*TABLE, *SOURCE, width=60).splitlines()]
    shown = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown]
    assert len(shown) == len([*TABLE, *SOURCE])
    assert max(map(len, shown)) <= 60
    first, second, loss, backward = shown[1:]
    assert first.index("|") == second.index("|"), "the expected weight has one column"
    assert first.count("#") > second.count("#")
    assert loss.endswith("   loss")
    assert "..." in loss
    assert backward.endswith("   backward")


def test_bars_have_their_length_where_there_is_room():
    shown = on_a_terminal(*TABLE, *SOURCE, width=100)
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.splitlines()] == [*TABLE, *SOURCE]


# Pages


def test_the_page_shows_the_script_s_own_lines_beside_a_library_s(project):
    (project / "train.py").write_text("first\nsecond\nthird\n")
    (project / "library.py").write_text("theirs\n")
    places = {"loss": "library.py:1 < train.py:2", "backward": "train.py:3", "step": None}
    source = places_source(places, project)
    assert source["file"] == "train.py"
    assert [row for row in source["lines"] if row[2]] == [
        [2, "second", "loss"],
        [3, "third", "backward"],
    ]


def test_a_line_that_does_two_things_is_marked_with_both(project):
    (project / "train.py").write_text("first\n(loss / 4).backward()\n")
    places = {"division": "train.py:2", "loss": "train.py:1", "backward": "train.py:2"}
    (one, two) = places_source(places, project)["lines"]
    assert (one[2], two[2]) == ("loss", "division, backward")


def test_a_notebook_s_cell_is_listed(project, monkeypatch):
    name = "/tmp/ipykernel_1/7.py"
    monkeypatch.setitem(linecache.cache, name, (9, None, ["one\n", "two\n"], name))
    monkeypatch.setattr(text, "file_text", lambda file: "Cell In[3]" if file == name else file)
    source = places_source({"loss": "Cell In[3]:2"}, project)
    assert source["lines"] == [[1, "one", ""], [2, "two", "loss"]]
    assert places_source({"loss": "Cell In[4]:2"}, project) is None


def test_the_page_of_a_port_is_that_of_an_audit():
    finding = PortFinding.of(
        "forward", "head", "eps", "off by <one>", jax="port.py:3", error=1.0, allowed=1e-9
    )
    result = PortResult("port.py:pair", violations=(finding,))
    page = page_of(result.violations, result.loop, [*result.lines, "map: w"])
    assert "<title>port.py:pair: head: eps (forward)</title>" in page
    for shown in ("<dt>JAX</dt><dd>port.py:3</dd>", "off by &lt;one&gt;", "map: w", "pass torch"):
        assert shown in page
    assert "off by &lt;one&gt;" in result.to_html()


@pytest.mark.parametrize(
    ("cause", "words", "fix"),
    [
        (
            "eps",
            "expected layer_norm as at a.py:1, observed eps 1e-06 instead of 1e-05 (why)",
            "pass torch's eps, 1e-05",
        ),
        (
            "gelu-approximation",
            "expected gelu, observed approximate tanh instead of none",
            "pass approximate=False",
        ),
        (
            "gelu-approximation",
            "expected gelu, observed approximate none instead of tanh",
            "pass approximate=True",
        ),
        ("eps-place", "expected rms, observed 1e-06 instead of 1e-05", "add eps where torch does"),
        ("eps", "expected layer_norm, observed no epsilon", "pass torch's eps"),
    ],
)
def test_a_port_s_fix_has_torch_s_value_where_it_is_known(cause, words, fix):
    assert PortFinding.of("forward", "head", cause, words).remedy == fix
