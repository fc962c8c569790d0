"""The devices that properties and tests run on, and runs whose gradients are compared by `==`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis
import jax
import pytest
import torch

from gradcheck_suite.execution.instance import Instance
from gradcheck_suite.execution.observer import same_tree
from gradcheck_suite.execution.runner import Outcome, run_loop
from gradcheck_suite.schema.contract import Loop


def _jax_sees(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def _where(sees: bool, name: str, reason: str) -> object:
    return pytest.param(name, marks=[pytest.mark.cuda, pytest.mark.skipif(not sees, reason=reason)])


DEVICES = (
    "cpu",
    _where(torch.cuda.is_available(), "cuda", f"torch {torch.__version__} sees no CUDA device here"),
)
JAX_PLATFORMS = ("cpu", _where(_jax_sees("gpu"), "gpu", f"jax {jax.__version__} sees no GPU here"))


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Have torch choose deterministic algorithms where it has one, and warn of no others."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)


def repeatable_run(loop: Loop, instance: Instance) -> Outcome:
    """Run a loop whose gradients are compared by `==`.

    On a GPU, some kernels add in the order in which their threads end. Torch is asked for deterministic algorithms
    there, and the loop runs twice. Where the two runs differ all the same, the case is rejected.
    """
    if instance.case.device == "cpu":
        return run_loop(loop, instance)
    with deterministic_algorithms():
        first, second = (run_loop(loop, instance) for _ in range(2))
    if not same_outcome(first, second):
        reason = f"not repeatable on this device: {instance.case!r}"
        if not hypothesis.currently_in_test_context():
            pytest.skip(reason)
        hypothesis.event("not repeatable on this device")
        hypothesis.reject()
    return first


def same_outcome(first: Outcome, second: Outcome) -> bool:
    """Return whether two runs have the same gradients at every step and the same parameters at the end."""
    gradients = ([observation.gradients for observation in outcome.observations] for outcome in (first, second))
    return same_tree(*gradients) and same_tree(dict(first.parameters), dict(second.parameters))
