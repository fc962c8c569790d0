"""The second process with few kept references, for `bench_suite_speed`: a round does not find those of the last one."""

from __future__ import annotations

from gradcheck_suite.references import reference
from gradcheck_suite.verification.second_process.serve import main

__all__ = ["main"]

reference.MAX_REFERENCES = 32
