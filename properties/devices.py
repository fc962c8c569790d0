"""The devices that properties and tests run on, and runs whose gradients are compared by `==`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis
import jax
import pytest
import torch

from gradcheck_suite.core.contract import Loop
from gradcheck_suite.run.instance import Instance
from gradcheck_suite.run.observer import same_tree
from gradcheck_suite.run.runner import Outcome, run_loop


def torch_without_cuda() -> str | None:
    """Return that torch sees no CUDA device, or None where it sees one."""
    return (
        None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device here"
    )


def jax_without_gpu() -> str | None:
    """Return that JAX sees no GPU and why, or None where it sees one."""
    try:
        return None if jax.devices("gpu") else f"jax {jax.__version__} sees no GPU here"
    except RuntimeError as error:
        return f"jax {jax.__version__} sees no GPU here ({str(error).splitlines()[0]})"


def _unless(reason: str | None, name: str) -> object:
    return pytest.param(
        name, marks=[pytest.mark.cuda, pytest.mark.skipif(reason is not None, reason=str(reason))]
    )


DEVICES = ("cpu", _unless(torch_without_cuda(), "cuda"))
JAX_PLATFORMS = ("cpu", _unless(jax_without_gpu(), "gpu"))


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Have torch choose deterministic algorithms where it has one, and warn of no others."""
    before, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)


def repeatable_run(loop: Loop, instance: Instance) -> Outcome:
    """Run a loop whose gradients are compared by `==`.

    On a GPU, some kernels add in the order in which their threads end. Torch is asked for
    deterministic algorithms there, and the loop runs twice. Where the two runs differ all the same,
    the case is rejected.
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
    """Return whether two runs have the same gradients at every step and the same parameters at the
    end.
    """
    gradients = (
        [observation.gradients for observation in outcome.observations]
        for outcome in (first, second)
    )
    return same_tree(*gradients) and same_tree(dict(first.parameters), dict(second.parameters))
