"""The tests run in one thread and on the same draws; without deadlines, since a first case compiles.

torch is not imported: tests of plain numbers start in half a second, thousands of times where mutants are tried.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# what the tests compute is too small to share among threads; torch reads this when it is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "gradcheck-suite-tests",
    parent=settings.get_profile("ci"),
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("gradcheck-suite-tests")
