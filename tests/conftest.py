"""The tests run in one torch thread and on the same draws; without deadlines, since a first case compiles."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

# what the tests compute is too small to share among threads
torch.set_num_threads(1)

settings.register_profile(
    "gradcheck-suite-tests",
    parent=settings.get_profile("ci"),
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("gradcheck-suite-tests")
