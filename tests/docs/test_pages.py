"""Every block of every page runs, and prints what the page shows."""

from __future__ import annotations

import pytest

from tests.docs.pages import PAGES, ROOT, Block, Page, blocks, commands, is_alike

LONG = ("docs/check-my-loop.md", "docs/check-my-model.md", "docs/check-my-trainer.md",
        "docs/grad-states.md", "docs/in-your-tests.md", "docs/replay.md", "studies/docs/commands.md")  # fmt: skip


def _name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.full] * (_name(path) in LONG), id=_name(path)) for path in PAGES],
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
        ("console", "$ gradcheck-suite --version\ngradcheck-suite version 3\n", "printed:\ngradcheck-suite 0"),
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
    assert is_alike(shown, shown.replace("12.5", "1.1").replace("2.13.0+cpu", "2.11.0").replace("0.99", "0.1"))
    assert is_alike("error 0.1, where rounding allows 1.17e-14\n", "error 0.1, where rounding allows 1.06e-14\n")
    assert is_alike("a\n...\nz\n", "a\nb\nz\n")
    assert not is_alike(shown, shown.replace("x", "y"))
    assert not is_alike("error      0.173\n", "error      0.174\n")


def test_a_console_block_is_split_into_commands_and_what_they_print():
    assert list(commands("$ a b\none\ntwo\n$ c\n")) == [("a b", "one\ntwo\n"), ("c", "")]
    assert list(commands("pip install .\n")) == [("pip install .", "")]
