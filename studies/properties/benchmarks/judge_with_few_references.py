"""The second process with few kept references, for `bench_suite_speed`: a round does not find those
of the last one.
"""

from __future__ import annotations

from gradcheck_suite.reference import large_batch
from gradcheck_suite.verification.ahead import main

__all__ = ["main"]

large_batch.MAX_REFERENCES = 32
