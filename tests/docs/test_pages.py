"""Every block of every page runs, and prints what the page shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, Block, Page, blocks, commands, is_alike

LONG = ("docs/check-my-loop.md", "docs/check-my-model.md", "docs/check-my-trainer.md", "docs/grad-states.md",
        "docs/in-your-tests.md", "docs/json.md", "docs/replay.md", "studies/docs/commands.md")  # fmt: skip

SOUND = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    torch.nn.functional.mse_loss(model(torch.ones(2, 2)), torch.ones(2, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.full] * (_name(path) in LONG), id=_name(path))
        for path in PAGES
    ],
)
def test_a_page_does_what_it_shows(path, folder):
    page = Page(path.name, folder)
    for block in blocks(path.read_text()):
        page.run(block)


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_no_fence_is_missed(path):
    """A fence that is indented, or left open, would be shown and never run."""
    fences = sum(line.lstrip().startswith("```") for line in path.read_text().splitlines())
    assert fences == 2 * len(blocks(path.read_text()))


@pytest.mark.parametrize(
    ("language", "text", "says"),
    [
        ("python", "assert 1 + 1 == 3\n", ""),
        ("pycon", ">>> 1 + 1\n3\n", "Expected:"),
        (
            "console",
            "$ gradcheck-suite --version\ngradcheck-suite version 3\n",
            "printed:\ngradcheck-suite 1",
        ),
        ("console", "$ gradcheck-suite doctor\n", "printed:\nversions"),
        ("console", "$ cat my_loop.py\n", "no rule for"),
        ("console", "$ gradcheck-suite bench\n$ echo $?\n0\n", "expected one of"),
        ("pyhton", "1 + 1\n", "what is this?"),
    ],
)
def test_a_page_that_shows_what_does_not_happen_is_caught(language, text, says, folder):
    with pytest.raises(AssertionError) as caught:
        Page("page.md", folder).run(Block(language, text, 1))
    assert says in str(caught.value)


def test_what_varies_between_runs_may_differ_and_nothing_else():
    shown = "gradcheck-suite 1.0.0, torch 2.13.0+cpu: x  12.5 s  worst error 0.99 of the rounding bound 0123456789ab\n"
    assert is_alike(
        shown, shown.replace("12.5", "1.1").replace("2.13.0+cpu", "2.11.0").replace("0.99", "0.1")
    )
    assert is_alike(
        "error 0.1, where rounding allows 1.17e-14\n", "error 0.1, where rounding allows 1.06e-14\n"
    )
    assert is_alike("a\n...\nz\n", "a\nb\nz\n")
    assert not is_alike(shown, shown.replace("x", "y"))
    assert not is_alike("error      0.173\n", "error      0.174\n")


def test_a_console_block_is_split_into_commands_and_what_they_print():
    assert list(commands("$ a b\none\ntwo\n$ c\n")) == [("a b", "one\ntwo\n"), ("c", "")]
    assert list(commands("pip install .\n")) == [("pip install .", "")]


@pytest.mark.full
def test_the_commands_of_the_workflow_run_in_an_empty_folder(folder):
    text = (ROOT / "docs" / "in-your-tests.md").read_text()
    training = next(block.text for block in blocks(text) if block.file == "training.py")
    Path("training.py").write_text(training)
    Path("train.py").write_text(SOUND)
    called = f"#!/bin/sh\nexec '{sys.executable}' -m gradcheck_suite \"$@\"\n"
    Path("gradcheck-suite").write_text(called)
    Path("gradcheck-suite").chmod(0o755)
    (install, *commands) = re.findall(r"- run: (.*)", text)
    assert install.partition("  #")[0] == "pip install gradcheck-suite"
    assert len(commands) == 3
    paths = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command],
            env=paths,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert "holds" in done.stderr
    assert json.loads(Path("gradients.sarif").read_text())["runs"][0]["results"] == []


def test_a_hook_of_pre_commit_is_each_of_those_that_the_page_names():
    hooks = re.findall(
        r"id: (gradcheck-suite-(\w+))\n.*?\n  entry: ([^\n]*)\n",
        (ROOT / ".pre-commit-hooks.yaml").read_text(),
        re.DOTALL,
    )
    assert [entry for _, _, entry in hooks] == [
        f"gradcheck-suite {command}" for _, command, _ in hooks
    ]
    named = re.findall(r"- id: (.*)", (ROOT / "docs" / "in-your-tests.md").read_text())
    assert named == [name for name, *_ in hooks]
