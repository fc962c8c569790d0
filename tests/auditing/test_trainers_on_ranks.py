"""Trainers' scripts on two ranks, unchanged: what is true of one rank, and what each divides by between ranks.

The ranks' gradients are averaged. Accelerate and Lightning leave each rank its own mean, so equal counts are right.
transformers' Trainer divides by the targets of all ranks, unless it is told not to.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.auditing.running import SCRIPTS, audited_on_two_ranks

FOUND = {
    ("accelerate_loop",): ("accelerate", None),
    ("accelerate_loop", "--samples", "40"): ("accelerate", "wrong-scale"),
    ("accelerate_recipe",): ("transformers", None),
    ("accelerate_recipe", "--as-printed"): ("transformers", "wrong-scale"),
    ("fabric_loop",): ("lightning", None),
    ("fabric_loop", "--own-count"): ("lightning", "mean-of-means"),
    ("lightning_trainer",): ("lightning", None),
    ("lightning_trainer", "--batches", "10"): ("lightning", "wrong-scale"),
    ("transformers_trainer", "llama"): ("transformers", None),
    ("transformers_trainer", "llama", "--own-count"): ("transformers", "mean-of-means"),
    ("transformers_trainer", "gpt2"): ("transformers", "wrong-scale"),
    ("transformers_trainer", "bert"): ("transformers", "wrong-scale"),
}
"""Script with its arguments -> the library that it needs, and the diagnosis, or None where it holds."""


@pytest.mark.full
@pytest.mark.parametrize(("command", "expected"), FOUND.items(), ids=str)
def test_a_script_of_a_library_on_two_ranks(command, expected, tmp_path):
    library, diagnosis = expected
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    script, *arguments = command
    path = SCRIPTS / "trainers" / f"{script}.py"
    result, ended = audited_on_two_ranks(path, tmp_path / "result.json", *arguments)
    assert (result["violation"] or {}).get("diagnosis") == diagnosis, (result, ended)
    assert (result["windows"], result["ranks"]) == (result["steps"], 2), result
    assert [status for _, status in ended] == [int(diagnosis is not None), 0], ended
