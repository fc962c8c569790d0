"""Problems that end the program, and outputs that are not regular files."""

from __future__ import annotations

import os
import threading

import pytest

from gradcheck_suite.core.records import write_json

PROBLEM = """
import sys
from dataclasses import replace
import torch
from gradcheck_suite import Problem


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(1, 1)


GOOD = Problem(
    model=model,
    batch=lambda items, seed: torch.ones(items, 1),
    loss=lambda model, batch: model(batch).mean(),
)
MODEL = replace(GOOD, model=lambda seed: sys.exit(0))
BATCH = replace(GOOD, batch=lambda items, seed: sys.exit(5))
LOSS = replace(GOOD, loss=lambda model, batch: sys.exit("no GPU found"))
COUNT = replace(GOOD, count=lambda batch: sys.exit())
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
