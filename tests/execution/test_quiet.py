"""What a quiet loop writes is discarded, and what the suite writes afterwards is not."""

from __future__ import annotations

import logging
import os
import sys

import pytest

from gradcheck_suite import Case, Plan
from gradcheck_suite.execution.instance import generated_instance
from gradcheck_suite.execution.quiet import quiet_loops
from gradcheck_suite.execution.runner import run_loop
from tests.execution.test_instance import SPEC


@pytest.fixture
def loud():
    """A loop that prints, logs, writes to the file descriptor, and raises."""
    # as a library does when it is imported: the handler keeps the stream
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("loud")
    logger.addHandler(handler)

    def loop(run):
        print("to standard output")
        print("to standard error", file=sys.stderr)
        logger.error("to the log")
        os.write(1, b"to the file descriptor")
        raise ValueError("too loud")

    yield loop
    logger.removeHandler(handler)


SAID = ("to standard output", "to standard error", "to the log", "to the file descriptor")


def test_quiet_loops(capfd, loud):
    instance = generated_instance(Case(SPEC, Plan((1,), 1)))
    for quiet in (False, True):
        with quiet_loops(quiet):
            outcome = run_loop(loud, instance)
        print("the suite")
        assert outcome.raised.startswith("ValueError: too loud")
        assert 'print("to standard output")' not in outcome.trace
        printed = "".join(capfd.readouterr())
        assert "the suite" in printed
        assert [text in printed for text in SAID] == [not quiet] * len(SAID)


def test_a_quiet_loop_that_hangs_leaves_the_output_as_it_was(capfd):
    def hangs(run):
        while True:
            try:
                print("x")
            except BaseException:
                continue

    with quiet_loops(True):
        outcome = run_loop(hangs, generated_instance(Case(SPEC, Plan((1,), 1))), time_limit_s=0.05)
    assert outcome.timed_out
    print("the suite")
    assert "".join(capfd.readouterr()) == "the suite\n"
