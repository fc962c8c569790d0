"""A folder with loops in it, and `python -m studies` called in this process."""

from __future__ import annotations

import pytest

from gradcheck_suite.__main__ import main
from studies.commands import PROGRAM
from tests.cli.conftest import Outcome, project, scripts_that_do_not_run, untouched

__all__ = ["project", "scripts_that_do_not_run", "untouched"]


@pytest.fixture
def run(project, capsys):
    """Call the command line in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = main([str(a) for a in arguments], PROGRAM)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return call
