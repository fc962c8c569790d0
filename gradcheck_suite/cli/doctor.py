"""Say what is installed, which devices and precision flags there are, and what can run here and
what cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.case import DTYPES
from gradcheck_suite.core.records import expect_writable_folder
from gradcheck_suite.core.text import aligned
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.loops.trainers import PACKAGES
from gradcheck_suite.run import environment

MAIN = "verify and replay on the CPU"
"""The suite's main job."""


def capabilities() -> dict[str, str | None]:
    """Try what the suite can do on some machines.

    Return why it cannot run here, None where it can.
    """
    reasons = environment.missing()
    found = {MAIN: reasons[0] if reasons else _cannot_run(_small_job)}
    torch = environment.imported("torch")
    jax = environment.imported("jax")
    no_torch = no_cuda = torch if isinstance(torch, str) else None
    # a build with CUDA may still see no device, as with another driver
    if no_cuda is None and not torch.cuda.is_available():
        no_cuda = f"torch {torch.__version__} sees no CUDA device"
    found |= {
        f"--dtype {name}": no_torch or _cannot_run(partial(_backward, name, "cpu"))
        for name in DTYPES
    }
    # run and not only asked: a wheel without kernels for this GPU fails at the first of them
    found["--device cuda"] = no_cuda or _cannot_run(partial(_backward, "float32", "cuda"))
    no_alarm = f"{sys.platform} has no SIGALRM: a loop that hangs hangs the suite"
    found["--time-limit"] = None if hasattr(signal, "setitimer") else no_alarm
    no_jax = "jax cannot be imported" if isinstance(jax, str) else None
    found["compiled programs kept between runs"] = no_jax or _cannot_run(_write_to_cache)
    return found


def _small_job() -> None:
    from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec
    from gradcheck_suite.loops.reset_modes import BUILT_IN
    from gradcheck_suite.verification.check import check

    # a model, since a weight probe is judged without JAX
    linear = Layer("linear", bias=False, features=1)
    problem = ProblemSpec(Input("vector", size=1), (linear,), Loss("mse", reduction="mean"))
    verdict = check(BUILT_IN["zero_"], Case(problem, Plan((1, 3), 2)))
    if verdict.violation or verdict.finding or verdict.skipped:
        raise RuntimeError(f"a trial case came to {verdict}")


def _backward(dtype: str, device: str) -> None:
    import torch

    # a product, since that is what low precisions and devices have kernels of their own for
    x = torch.ones(
        2,
        2,
        dtype=getattr(torch, dtype),
        device=device,
        requires_grad=True,
    )
    (x @ x).sum().backward()
    assert x.grad is not None
    # each entry meets two ones on the left and two on the right; exact in every dtype
    if x.grad.tolist() != [[4.0, 4.0], [4.0, 4.0]]:
        raise RuntimeError(f"the gradient of a small product came out as {x.grad.tolist()}")


def _write_to_cache() -> None:
    folder = environment.trusted_cache()
    if folder is None:
        raise RuntimeError(f"{environment.CACHE_VARIABLE} is empty")
    expect_writable_folder(folder, environment.CACHE_VARIABLE)


def _cannot_run(attempt: Callable[[], Any]) -> str | None:
    """Return why an attempt fails, or None."""
    try:
        attempt()
    # its message is written for users
    except UsageError as error:
        return str(error)
    # whatever else it raises is the answer
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def add_arguments(parser: parsers.Parser) -> None:
    """Add nothing: the command has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; return 0 if `verify` and `replay` can run here, else 1."""
    # a diagnosis must not take three quarters of a GPU, which JAX does by default:
    # https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    reasons = environment.missing()
    with contextlib.suppress(CannotRunHere):
        environment.set_precision()
    found = capabilities()
    flags = environment.precision_flags()
    devices = environment.devices()
    versions = environment.versions(PACKAGES)
    _section("versions", {name: version or "not installed" for name, version in versions.items()})
    _section("machine", {"platform": platform.platform(), "processors": str(os.cpu_count())})
    _section("devices", {name: ", ".join(listed) or "none" for name, listed in devices.items()})
    _section(
        "precision flags, as verify sets them", {name: str(value) for name, value in flags.items()}
    )
    _section("compiled programs", {"kept in": str(environment.cache_directory() or "nowhere")})
    _section(
        "can run here",
        {name: f"no: {reason}" if reason else "yes" for name, reason in found.items()},
    )
    # a single reason stands in the section above
    if len(reasons) > 1:
        _section(
            "to install", {str(number): reason for number, reason in enumerate(reasons, start=1)}
        )
    able = found[MAIN] is None
    print("verify and replay can run here" if able else "verify and replay cannot run here")
    return exit_status.HOLDS if able else exit_status.VIOLATED


def _section(title: str, rows: dict[str, str]) -> None:
    print("\n".join([title, *(f"  {line}" for line in aligned(rows.items())), ""]))
