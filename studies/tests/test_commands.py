"""The commands of the studies: their examples, and what the end of their help says of exit
statuses.
"""

from __future__ import annotations

import pytest

from gradcheck_suite.cli.exit_status import (
    BAD_USAGE,
    BUG,
    DISAGREEMENT,
    HOLDS,
    INTERRUPTED,
    VIOLATED,
)
from studies.commands import PROGRAM
from tests.cli.test_output import expect_examples_that_parse

ALWAYS = {HOLDS, BAD_USAGE, BUG, INTERRUPTED}
NEVER_VIOLATED, NEVER_A_FINDING = (
    {"atlas", "steps", "report"},
    {"atlas", "claims", "gpu", "ports", "report", "scripts"},
)


@pytest.mark.parametrize("command", PROGRAM.commands)
def test_a_commands_help_has_examples_that_its_parser_takes_and_its_exit_statuses(run, command):
    said = run(command, "--help").out
    assert f"examples:\n  python -m studies {command}" in said
    expect_examples_that_parse(PROGRAM, command)
    expected = ALWAYS | {VIOLATED, DISAGREEMENT}
    expected -= {VIOLATED} if command in NEVER_VIOLATED else set()
    expected -= {DISAGREEMENT} if command in NEVER_A_FINDING else set()
    assert {
        int(line.split()[0]) for line in said.partition("exit status:\n")[2].splitlines()
    } == expected


def test_that_torch_and_jax_differ_is_no_failure_of_the_atlas(run, tmp_path):
    outcome = run("atlas", "abs", "--reports", str(tmp_path))
    assert "differ at 1" in outcome.out
    assert outcome.status == HOLDS


def test_a_command_of_the_suite_is_none_of_the_studies(run):
    outcome = run("verify")
    assert outcome.status == BAD_USAGE
    assert (
        "expected one of zoo, ports, claims, calibrate, atlas, steps, scripts, gpu, campaign, report"
        in outcome.err
    )
