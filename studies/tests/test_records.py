"""What is kept under `reports/records`: which command makes it, at which commit.

No figure is without a command.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from gradcheck_suite.cli.shards import Shards
from gradcheck_suite.core.records import append_record, read_lines, records_path
from gradcheck_suite.page.content import Source
from studies.records import KINDS
from studies.tests import make_records as records
from studies.tests.report.made_up import build
from tests.core.test_records import grown_older
from tests.docs.pages import PAGES, ROOT

FIGURE = re.compile(
    r"(?<![\w.])\d[\d,.]*(?: ?%|[ ](?:ms|s|KiB|MiB|GiB|seconds?|minutes?|hours?|times)\b)"
)
"""A number with a unit of time or memory, a share, or a factor."""
MADE_BY = re.compile(
    r"`[^`]*\b(?:gradcheck-suite|pytest|tox|python3?|torchrun) [^`]*`|`(?:tests|properties|studies)/[\w/]+\.py`|^\$ |"
    r"\((?:\.\./\.\./|studies/)?(?:docs/)?(?:audit|bounds|figures|public-scripts)\.md|studies/docs/(?:figures|public-scripts)\.md|"
    r"reports/report\.md",
    re.MULTILINE,
)
"""A command, the test that holds the figure, or a link to the page that has the command."""


def without_command(page: str) -> list[str]:
    """Return the sections of a page that have a figure and say nowhere what makes it, by title."""
    plain = re.sub(
        r"^```.*?^```$",
        lambda code: "\n$ " * any(mark in code[0] for mark in ("\n$ ", "\n>>> ")),
        page,
        flags=re.MULTILINE | re.DOTALL,
    )
    sections = re.split(r"^(?=#+ )", plain, flags=re.MULTILINE)
    figures = (re.sub(r"`[^`]*`", "", section) for section in sections)
    return [
        section.partition("\n")[0]
        for section, text in zip(sections, figures, strict=True)
        if FIGURE.search(text) and not MADE_BY.search(section)
    ]


@pytest.mark.parametrize(
    "path",
    [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "studies" / "README.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_figure_stands_without_what_makes_it(path):
    assert without_command(path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("It takes 12 ms.", True),
        ("It takes 12 ms (`pytest properties/x.py`).", False),
        ("It takes 12 ms (`tests/test_x.py`).", False),
        ("It takes `12 ms`.", False),
        ("1.5 to 3% of a step", True),
        ("41 times as fast ([figures](figures.md#speed))", False),
        ("Three loops of JAX 0.10.2", False),
        ("30 times.\n\n```console\n$ gradcheck-suite verify\n```", False),
        ("30 times.\n\n```python\nrun()\n```", True),
    ],
)
def test_a_figure_without_what_makes_it_is_caught(text, caught):
    assert (
        without_command(f"# A\n\nWords.\n\n## B\n\n{text}\n\n## C\n\nSee `pytest tests`.\n")
        == ["## B"] * caught
    )


def unsourced(reports):
    """Return the parts of a folder's report that show figures and do not say which commands made
    them.
    """
    report = build(reports)
    parts = [
        *report.answers,
        *(section for section in report.sections if section.key != "provenance"),
    ]
    return [
        part.key
        for part in parts
        if _shows(part) and not all(s.command for s in part.sources or [NO_SOURCE])
    ]


NO_SOURCE = Source("", "", "", "", "")


def _shows(part):
    return any(
        getattr(part, name, None) for name in ("figures", "matrix", "matrices", "claims", "tables")
    )


def test_every_part_of_the_report_says_which_commands_made_it(tmp_path):
    assert unsourced(ROOT / "reports") == []
    reached = {"layers": {}, "losses": {}, "splits": {}}
    data = {
        "loop": "zero_",
        "verdict": "holds",
        "judged": 1,
        "dtype": "float64",
        "device": "cpu",
        "reached": reached,
    }
    append_record(tmp_path, KINDS["verify"], data, environment={}, command="")
    assert {"holds", "verified"} <= set(unsourced(tmp_path))


@pytest.mark.parametrize(
    "path",
    [
        *(ROOT / "properties").rglob("bench_*.py"),
        *(ROOT / "studies" / "properties").rglob("bench_*.py"),
    ],
    ids=lambda path: path.stem,
)
def test_every_benchmark_finds_what_it_imports(path):
    """No test runs them, since they take minutes: what they measure may have moved."""
    import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_every_kind_of_record_has_its_command_in_the_guide():
    # `python -m studies gpu` makes that one, on another machine
    assert {part.kind for part in records.PARTS} == set(KINDS) - {"gpu"}
    assert records.table() in (ROOT / "studies" / "README.md").read_text(), (
        "python -m studies.tests.make_records --table writes it"
    )
    assert all(
        "{reports}" in part.command or part.command.startswith(records.CAMPAIGN)
        for part in records.PARTS
    )


def unknown_commits(reports):
    """Return the kinds with a record that names no commit of the history."""
    found = {}
    for kind in KINDS:
        for _, record in read_lines(records_path(reports, kind)):
            found.setdefault(record.get("commit") or "none", set()).add(kind)
    history = set(_git("rev-list", "HEAD").split())
    return set().union(*(kinds for commit, kinds in found.items() if commit not in history))


def _git(*arguments):
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout


def _has_history():
    repository = (ROOT / ".git").exists() and shutil.which("git") is not None
    return repository and _git("rev-parse", "--is-shallow-repository").strip() == "false"


@pytest.mark.skipif(not _has_history(), reason="no history to look into")
def test_every_record_names_a_commit_of_the_history(tmp_path):
    assert unknown_commits(ROOT / "reports") == set()
    shutil.copytree(ROOT / "reports" / "records", tmp_path / "records")
    with records_path(tmp_path, "step").open("a") as file:
        file.write(json.dumps({"commit": "0" * 40}) + "\n")
    assert unknown_commits(tmp_path) == {"step"}


MAKE = """
import sys
from pathlib import Path
from gradcheck_suite.core.records import append_record
from studies.records import KINDS
name, _, reports = sys.argv[1:]
Path("log").open("a").write(name)
append_record(Path(reports), KINDS["atlas" if name == "c" else "step"], {"made": name}, environment={})
sys.exit(2 if name == "b" and not Path("fixed").exists() else 1 if name == "c" else 0)
"""


@pytest.mark.share(4)
def test_an_interrupted_run_goes_on_and_its_records_take_the_place_of_the_old_ones(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "make.py").write_text(MAKE)
    parts = [records.Part("step", f"python make.py {name} --reports {{reports}}") for name in "abc"]
    shards = Shards(records.REPORTS / "campaign" / "records")
    for made, device in (("old", "cpu"), ("on a GPU", "cuda")):
        append_record(
            records.REPORTS, KINDS["step"], {"made": made, "device": device}, environment={}
        )
    for kind in ("claim", "atlas"):
        append_record(records.REPORTS, KINDS[kind], {"made": "old"}, environment={})

    (failure,) = records.make(parts, shards)
    assert "[2/3] python make.py b --reports reports: status 2" in failure
    (tmp_path / "fixed").touch()
    assert records.make(parts, shards) == []
    assert (tmp_path / "log").read_text() == "abcb"
    printed = capsys.readouterr().out
    assert printed.count("[1/3] python make.py a --reports reports  done before") == 1

    assert records.put_in_place(parts, shards, records.REPORTS) == ["step"]
    read = {
        kind: [record for _, record in read_lines(records_path(records.REPORTS, kind))]
        for kind in KINDS
    }
    assert [record["data"]["made"] for record in read["step"]] == ["on a GPU", "a", "b"]
    # what a part of the steps makes beside them is not all of its kind
    assert [record["data"]["made"] for kind in ("atlas", "claim") for record in read[kind]] == [
        "old",
        "old",
    ]
    assert read["step"][1]["command"] == "make.py a --reports reports"


def test_records_are_made_of_a_commit_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        subprocess.run(["git", *arguments], check=True)
    (tmp_path / "changed.py").touch()
    with pytest.raises(SystemExit, match=r"commit or stash first:\n\?\? changed.py"):
        records.main(["--only", "step"])


@pytest.mark.parametrize(
    ("changed", "older"),
    [
        (ROOT / "gradcheck_suite" / "auditing" / "context.py", {"audit", "public-script"}),
        (ROOT / "studies" / "claims.py", {"claim"}),
        (ROOT / "studies" / "zoo" / "bug.py", {"zoo", "zoo-count"}),
        (
            ROOT / "gradcheck_suite" / "loops" / "reset_modes.py",
            {"benchmark", "claim", "gpu", "memory", "traffic", "verify"},
        ),
        (
            ROOT / "gradcheck_suite" / "core" / "comparison.py",
            {
                "atlas",
                "audit",
                "bridge",
                "calibration",
                "claim",
                "gpu",
                "public-script",
                "trainer",
                "verify",
                "zoo",
                "zoo-count",
            },
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_a_changed_statement_makes_the_records_older_that_speak_of_it(monkeypatch, changed, older):
    assert grown_older(KINDS, changed, monkeypatch) == older
