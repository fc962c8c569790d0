"""What the end of each command's help says of its exit statuses."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest

from gradcheck_suite.cli import PROGRAM
from gradcheck_suite.cli.exit_status import (
    BAD_USAGE,
    BUG,
    DISAGREEMENT,
    HOLDS,
    INTERRUPTED,
    VIOLATED,
    noted_interrupts,
)
from gradcheck_suite.core.records import write_json

ALWAYS = {HOLDS, BAD_USAGE, BUG, INTERRUPTED}
NEVER_A_FINDING = {"report", "doctor", "port"}


def _statuses(command: str) -> set[int]:
    _, _, said = PROGRAM.epilog(command).partition("exit status:\n")
    return {int(line.split()[0]) for line in said.splitlines()}


@pytest.mark.parametrize("command", PROGRAM.commands)
def test_a_commands_help_names_the_statuses_that_it_has_and_no_other(command):
    expected = ALWAYS | {VIOLATED, DISAGREEMENT}
    if command in NEVER_A_FINDING:
        expected -= {DISAGREEMENT}
    assert _statuses(command) == expected


# Ctrl-C where Python can raise nothing: it is noted, and nothing is printed.


class _Finalised:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


class _Raises:
    def __del__(self) -> None:
        raise ValueError("told of")


def test_an_interrupt_inside_a_finaliser_is_noted_and_not_printed(capsys):
    with noted_interrupts() as pressed:
        _Finalised()
        gc.collect()
    assert pressed == [signal.SIGINT]
    assert capsys.readouterr().err == ""


def test_whatever_else_a_finaliser_raises_is_reported(monkeypatch):
    seen = []
    monkeypatch.setattr("sys.unraisablehook", seen.append)
    with noted_interrupts():
        _Raises()
        gc.collect()
    assert [str(one.exc_value) for one in seen] == ["told of"]


def test_an_interrupt_that_was_lost_during_start_up_is_noticed_by_the_work_that_follows():
    with noted_interrupts():
        _Finalised()
        gc.collect()
        with noted_interrupts() as pressed:
            assert pressed == [signal.SIGINT]


# Problems that end the program, and outputs that are not regular files.


PROBLEM = """
import sys
from dataclasses import replace
from loops import PROBLEM

MODEL = replace(PROBLEM, model=lambda seed: sys.exit(0))
BATCH = replace(PROBLEM, batch=lambda items, seed: sys.exit(5))
LOSS = replace(PROBLEM, loss=lambda model, batch: sys.exit("no GPU found"))
COUNT = replace(PROBLEM, count=lambda batch: sys.exit())
"""


@pytest.mark.parametrize("name", ["MODEL", "BATCH", "LOSS", "COUNT"])
def test_a_problem_that_ends_the_program_is_a_usage_error(run, project, name):
    (project / "exits.py").write_text(PROBLEM)
    outcome = run("verify", "zero_", "--problem", f"exits.py:{name}", "--examples", "1")
    assert outcome.status == 2
    assert "exits.py" in outcome.err
    assert "SystemExit" in outcome.err


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_json(link, {})
    assert link.is_symlink()
    assert target.read_text() == "{}\n"


def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_json(pipe, {})
    reader.join(10)
    assert read == ["{}\n"]
    assert pipe.is_fifo()
