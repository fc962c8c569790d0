"""The suite's own tests in one torch thread; Hypothesis without deadline, since a first case compiles; the same draws on every run."""

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
