"""What the end of each command's help says of its exit statuses."""

from __future__ import annotations

import pytest

from gradcheck_suite.cli import COMMANDS
from gradcheck_suite.cli.exit_status import BAD_USAGE, BUG, DISAGREEMENT, HOLDS, INTERRUPTED, VIOLATED, epilog

ALWAYS = {HOLDS, BAD_USAGE, BUG, INTERRUPTED}
NEVER_VIOLATED, NEVER_A_FINDING = {"atlas", "steps", "report"}, {"atlas", "claims", "report", "doctor"}


def _statuses(command: str) -> set[int]:
    said = epilog(command).removeprefix("Exit status: ").split("; ")
    return {int(one.split()[0]) for one in said}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_names_the_statuses_that_it_has_and_no_other(command):
    expected = ALWAYS | {VIOLATED, DISAGREEMENT}
    if command in NEVER_VIOLATED:
        expected -= {VIOLATED}
    if command in NEVER_A_FINDING:
        expected -= {DISAGREEMENT}
    assert _statuses(command) == expected


def test_that_torch_and_jax_differ_is_no_failure_of_the_atlas(run, tmp_path):
    outcome = run("atlas", "abs", "--reports", str(tmp_path))
    assert "differ at 1" in outcome.out
    assert outcome.status == HOLDS
