"""Say what is installed, which devices and precision flags there are, and what can run here and what cannot."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.case import DTYPES
from gradcheck_suite.core.records import expect_writable_folder
from gradcheck_suite.core.text import aligned
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.loops.trainers import PACKAGES
from gradcheck_suite.run import environment


@dataclass(frozen=True)
class Capability:
    """One thing that the suite can do on some machines.

    Attributes:
        name: such as `"--device cuda"`.
        reason: why it cannot run here; None if it can.
        main: whether it is the suite's main job, verifying on the CPU.
    """

    name: str
    reason: str | None
    main: bool = False


def capabilities() -> list[Capability]:
    """Try each capability, and return them with the reasons of those that cannot run here."""
    reasons = environment.missing()
    found = [Capability("verify and replay on the CPU", reasons[0] if reasons else _cannot_run(_small_job), main=True)]
    torch, jax = environment.imported("torch"), environment.imported("jax")
    without = torch if isinstance(torch, str) else None
    found += [Capability(f"--dtype {name}", without or _cannot_run(partial(_backward, name, "cpu"))) for name in DTYPES]
    no_cuda = without
    if no_cuda is None and not torch.cuda.is_available():
        no_cuda = f"torch {torch.__version__} sees no CUDA device"
    found.append(Capability("--device cuda", no_cuda or _cannot_run(partial(_backward, "float32", "cuda"))))
    alarm = (
        None if hasattr(signal, "setitimer") else f"{sys.platform} has no SIGALRM: a loop that hangs hangs the suite"
    )
    found.append(Capability("--time-limit", alarm))
    cache = "jax cannot be imported" if isinstance(jax, str) else _cannot_run(_write_to_cache)
    found.append(Capability("compiled programs kept between runs", cache))
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

    x = torch.ones(2, 2, dtype=getattr(torch, dtype), device=device, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None
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
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def add_arguments(parser: parsers.Parser) -> None:
    """Add nothing: the command has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; return 0 if the suite's main job can run here, else 1."""
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
    _section("precision flags, as verify sets them", {name: str(value) for name, value in flags.items()})
    _section("compiled programs", {"kept in": str(environment.cache_directory() or "nowhere")})
    _section("can run here", {a.name: f"no: {a.reason}" if a.reason else "yes" for a in found})
    if len(reasons) > 1:
        _section("to install", {str(number): reason for number, reason in enumerate(reasons, start=1)})
    able = all(capability.reason is None for capability in found if capability.main)
    print("the main job can run here" if able else "the main job cannot run here")
    return exit_status.HOLDS if able else exit_status.VIOLATED


def _section(title: str, rows: dict[str, str]) -> None:
    print("\n".join([title, *(f"  {line}" for line in aligned(rows.items())), ""]))
