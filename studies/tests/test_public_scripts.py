"""The study of public scripts: its rows are well-formed, and its runner says what is right and what
is wrong.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest

from gradcheck_suite.__main__ import main
from gradcheck_suite.core.options import LIVE_DIAGNOSES
from gradcheck_suite.core.records import append_record
from gradcheck_suite.errors import UsageError
from studies.commands import PROGRAM
from studies.public_scripts import (
    KIND,
    MARK,
    TRUTHS,
    Script,
    judged,
    outcome,
    page_table,
    scripts,
)
from studies.records import KINDS
from tests.docs.pages import ROOT

TRAIN = """
import sys
import torch
import torch.nn.functional as F
from beside import ROWS

torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
labels = torch.tensor([int(label) for label in open("labels.txt").read().split()])
for window in ROWS:
    for rows in window:
        x, y = torch.randn(rows, 5), labels[:rows]
        loss = F.cross_entropy(model(x), y)
        weight = rows / sum(window) if "--sound" in sys.argv else 1 / len(window)
        (loss * weight).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "model.pt")
if "gradcheck_suite" in sys.modules and "--harmed" in sys.argv:
    open("another.txt", "w").close()
"""
WHY = "Means over 4, 2, 7 and 1 targets are weighed as the argument says."


@pytest.fixture
def checkout(tmp_path):
    """A folder of checkouts with one repository, and the script in it."""
    folder = tmp_path / "someone" / "loops"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "beside.py").write_text("ROWS = ((4, 2, 7, 1), (3, 3))\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Train"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    data = "open('labels.txt', 'w').write('0 1 2 0 1 2 0')"
    row = Script(
        "someone/loops",
        commit,
        "train.py",
        "language",
        "plain",
        "holds",
        WHY,
        ("--sound",),
        data=data,
    )
    return tmp_path, row


def test_each_row_is_well_formed():
    for script in scripts():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", script.repository), script.key
        assert re.fullmatch(r"[0-9a-f]{40}", script.commit), script.key
        assert script.truth in TRUTHS, script.key
        assert bool(script.names) == (script.truth == "violated"), script.key
        assert set(script.names) <= set(LIVE_DIAGNOSES), script.key
        assert re.fullmatch(r"[\w.-]+\.py:\d+(-\d+)?", script.place) or not script.place, script.key
        assert len(script.why) > 40, script.key
        assert script.k >= 1, script.key
        assert all(len(pair) == 2 for pair in script.replace), script.key
        assert not any(source.startswith("@") for source in script.stubs.values()), script.key
        for source in (script.data, script.driver, *script.stubs.values()):
            compile(source, script.key, "exec")


def test_a_table_with_an_unknown_name_or_the_same_run_twice_is_refused(tmp_path):
    row = '[[script]]\nrepository="a/b"\ncommit="0"\nfile="t.py"\nkind="k"\nframework="f"\ntruth="holds"\nwhy="w"\n'
    (tmp_path / "public_scripts.toml").write_text(f'{row}colour="red"\n')
    with pytest.raises(UsageError, match=r"public_scripts\.toml: t\.py: .*colour"):
        scripts(tmp_path / "public_scripts.toml")
    (tmp_path / "public_scripts.toml").write_text(row + row)
    with pytest.raises(UsageError, match=r"a/b t\.py: two rows are the same run"):
        scripts(tmp_path / "public_scripts.toml")


@pytest.mark.full
def test_a_sound_script_is_right_and_a_wrong_truth_is_caught(checkout):
    folder, sound = checkout
    row = judged(sound, folder)
    assert (row["outcome"], row["verdict"], row["steps"], row["parameters"]) == (
        "right",
        "holds",
        2,
        18,
    )
    assert row["equal"] is True
    assert outcome(replace(sound, truth="violated", names=("mean-of-means",)), row) == "wrong"
    assert outcome(replace(sound, truth="partial"), row) == "wrong"
    unknown = {**row, "findings": ["train.py:15: the weights of this loss are unknown"]}
    assert [outcome(replace(sound, truth=truth), unknown) for truth in TRUTHS] == [
        "partial",
        "partial",
        "right",
    ]


@pytest.mark.full
def test_a_faulty_script_is_right_with_its_name_and_place_alone(checkout):
    folder, sound = checkout
    # the fault is made by a replacement; the changed copy still imports what stands beside the file
    changes = {"replace": (("rows / sum(window)", "1 / len(window)"),), "names": ("mean-of-means",)}
    faulty = replace(sound, truth="violated", place="train.py:14-16", **changes)
    row = judged(faulty, folder)
    assert (row["outcome"], row["violations"][0][0]) == ("right", "mean-of-means")
    assert outcome(replace(faulty, place="train.py:1-12"), row) == "misleading"
    assert outcome(replace(faulty, place="rain.py:14-16"), row) == "misleading"
    assert outcome(replace(faulty, names=("wrong-scale",)), row) == "misleading"
    assert outcome(replace(faulty, truth="holds", names=()), row) == "wrong"


@pytest.mark.full
def test_a_script_that_ends_otherwise_under_the_audit_is_harmed(checkout):
    folder, sound = checkout
    row = judged(replace(sound, arguments=("--sound", "--harmed")), folder)
    assert (row["outcome"], row["note"]) == ("harmed", "other files: another.txt")


def test_what_cannot_be_run_is_said_and_is_no_verdict(checkout, capsys):
    folder, sound = checkout
    for script, said in (
        (replace(sound, commit="0" * 40), "no checkout of someone/loops at 000000000000"),
        (
            replace(sound, packages=("numpy", "no-such-thing")),
            "not installed: pip install no-such-thing",
        ),
        (replace(sound, replace=(("no such text", ""),)), "'no such text' is not in the file"),
        (replace(sound, data="raise ValueError('no data')"), "ValueError: no data"),
    ):
        row = judged(script, folder)
        assert row["outcome"] == "not run"
        assert said in row["note"]


def test_the_page_has_the_newest_record_of_each_run_of_the_table(tmp_path, capsys):
    head = f'[[script]]\nrepository="a/b"\ncommit="{"0" * 40}"\nkind="k"\nframework="f"\ntruth="holds"\nwhy="w"\n'
    table = tmp_path / "public_scripts.toml"
    table.write_text(f'{head}file="t.py"\nk=4\narguments=["--x"]\npackages=["rich", "numpy"]\n')
    row = {
        "repository": "a/b",
        "file": "t.py",
        "commit": "0" * 40,
        "kind": "k",
        "framework": "f",
        "truth": "holds",
    }
    row |= {
        "names": [],
        "violations": [],
        "verdict": "holds",
        "judged": 2,
        "steps": 3,
        "parameters": 7000,
    }
    row |= {"seconds": [1.04, 2.0]}
    for key, found in (
        ("a/b t.py --x", "wrong"),
        ("a/b t.py --x", "right"),
        ("a/b gone.py", "harmed"),
    ):
        append_record(tmp_path, KINDS[KIND], {**row, "key": key, "outcome": found}, environment={})
    page = tmp_path / "page.md"
    page.write_text(f"# Head\n\n{MARK}what was there\n")
    assert (
        main(
            ["scripts", "--page", str(page), "--reports", str(tmp_path), "--table", str(table)],
            PROGRAM,
        )
        == 0
    )
    text = page.read_text()
    assert text.startswith("# Head\n")
    assert "what was there" not in text
    assert "1 of the table's 1 runs, from 1 repositories: 1 right\n\n| script |" in text
    row = "| a/b at 00000000, `t.py` | k, f | holds | holds | right | 7,000 | 2 of 3, 4 | 1, 2 |"
    assert re.search(rf"\|\n{re.escape(row)} [0-9a-f]* \|\n$", text)
    assert main(["scripts", str(tmp_path), "t.py", "--needs", "--table", str(table)], PROGRAM) == 0
    assert capsys.readouterr().out == "numpy\nrich\n"


def test_the_page_of_the_guide_is_what_the_records_say():
    text = (ROOT / "studies" / "docs" / "public-scripts.md").read_text()
    assert text.partition(MARK)[2].strip() == "\n".join(page_table(ROOT / "reports")).strip()


def test_the_command_names_what_is_missing(capsys, tmp_path):
    (tmp_path / "public_scripts.toml").write_text('[[script]]\nfile="t.py"\n')
    assert (
        main(["scripts", str(tmp_path), "--table", str(tmp_path / "public_scripts.toml")], PROGRAM)
        == 2
    )
    assert "public_scripts.toml: t.py" in capsys.readouterr().err
