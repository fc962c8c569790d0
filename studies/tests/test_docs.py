"""The pages on the studies list what the code and the records have."""

from __future__ import annotations

import configparser
import re

from gradcheck_suite.core.faults import FAULTS, names_of
from gradcheck_suite.run.optimizers import NEEDS, NEEDS_CLOSURE
from studies.commands import PROGRAM
from studies.optimizers import COUNTERPARTS
from studies.tests.architectures import ARCHITECTURES
from studies.tests.architectures.__main__ import MARK, table
from studies.zoo import BUGS
from tests.docs.pages import ROOT
from tests.docs.test_tables import first_cells, section

PAGES = ROOT / "studies" / "docs"


def test_every_command_has_a_section():
    titles = re.findall(r"^## (\w+)$", (PAGES / "commands.md").read_text(), re.MULTILINE)
    assert sorted(titles) == sorted(PROGRAM.commands)


def test_the_known_bugs_are_named_by_diagnoses_of_the_table():
    """Names from another source than the one that the table is held against."""
    wanted = {
        one
        for bug in BUGS.values()
        for name in bug.wanted
        for one in names_of(name.partition("/")[2])
    }
    assert len(wanted) > 10
    assert wanted <= FAULTS.keys()


def test_the_page_has_what_differs_in_every_optimizer():
    text = section("optimizers.md", "## Where the formulas differ", PAGES)
    assert first_cells(text) == [counterpart.torch for counterpart in COUNTERPARTS.values()]
    for counterpart in COUNTERPARTS.values():
        assert f"| {counterpart.optax} | {'; '.join(counterpart.differs)}" in text, (
            counterpart.torch
        )
    needs = first_cells(section("optimizers.md", "# The step of each optimizer", PAGES))[:3]
    assert set(needs) == {*NEEDS, *NEEDS_CLOSURE}


def test_the_page_has_the_architectures_of_the_records():
    page = (PAGES / "architectures.md").read_text()
    assert page.partition(MARK)[2] == "\n" + table(ROOT / "reports")
    shown = re.findall(r"^\| (\w+) \| (?:\d+|refused) \|", page, re.MULTILINE)
    assert set(shown) - {"LSTM", "Transformer"} <= set(ARCHITECTURES)


def test_the_commands_for_a_gpu_are_toxs():
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    commands = (
        tox["testenv:gpu-installed"]["commands"].replace("{posargs:build/gpu}", "build/gpu").strip()
    )
    page = (ROOT / "studies" / "README.md").read_text()
    # outside of an environment a system may have no `python`
    assert f"```\n{commands.replace('python ', 'python3 ')}\n```" in page


def test_what_a_user_sets_for_a_gpu_reaches_the_commands():
    """`tox -e gpu` runs tox again, and either environment keeps only the variables that it passes
    on.
    """
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    assert tox["testenv:gpu"]["pass_env"] == "{[testenv:gpu-installed]pass_env}"
    assert {"CUDA_*", "PYTORCH_*", "XLA_*"} <= set(tox["testenv:gpu-installed"]["pass_env"].split())
