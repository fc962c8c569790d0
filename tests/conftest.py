"""Hypothesis in the suite's own tests: no deadline, since a first case compiles; the same draws on every run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "gradcheck-suite-tests",
    parent=settings.get_profile("ci"),
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("gradcheck-suite-tests")
