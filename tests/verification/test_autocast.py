"""A loop under autocast is verified where autocast casts something, or told that it was not."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import training_loop
from gradcheck_suite.core.options import VerifyOptions
from gradcheck_suite.loops.reset_modes import part_of_window, window_count, windows
from gradcheck_suite.verification.verify import verify

UNCAST = "nothing of the cast was judged"


def _under_autocast(run, factor=1.0):
    for window in windows(run):
        run.optimizer.zero_grad()
        total = window_count(run, window)
        for batch in window:
            with torch.autocast(run.device.type, dtype=torch.bfloat16):
                loss = part_of_window(run, batch, total)
            # a fault of what is cast alone
            (loss * (factor if run.dtype is torch.float32 else 1.0)).backward()
        run.optimizer.step()


@training_loop(autocast="bfloat16")
def declared(run):
    _under_autocast(run)


@training_loop(autocast="bfloat16")
def doubles_where_it_casts(run):
    _under_autocast(run, 2.0)


def undeclared(run):
    _under_autocast(run)


@pytest.mark.parametrize(
    ("loop", "fields", "dtype"),
    [
        (declared, {}, "float32"),
        (undeclared, {"autocast": "float16"}, "float32"),
        (declared, {"dtype": "float64"}, "float64"),
        (declared, {"dtype": "bfloat16"}, "bfloat16"),
        (undeclared, {}, "float64"),
    ],
)
def test_autocast_is_verified_in_float32_unless_a_dtype_is_asked_for(loop, fields, dtype):
    assert VerifyOptions(**fields).of(loop).dtype == dtype


def test_a_fault_of_the_cast_alone_is_found():
    assert verify(doubles_where_it_casts, examples=1).violation.diagnosis == "wrong-scale"


@pytest.mark.share(4)
def test_in_float64_the_verdict_says_that_nothing_was_cast():
    assert UNCAST in str(verify(doubles_where_it_casts, examples=1, dtype="float64"))
    assert UNCAST not in str(verify(declared, examples=1))
