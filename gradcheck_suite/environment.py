"""What a run depends on beside its case, as data: versions, devices, precision flags, and what this machine can run.

Nothing here imports torch or jax before it is asked to, and everything works where they are missing or broken.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gradcheck_suite.case import DTYPES
from gradcheck_suite.errors import CannotRunHere

MINIMUM = {
    "torch": "2.9",
    "jax": "0.9",
    "jaxlib": "0.9",
    "numpy": "2.0",
    "hypothesis": "6.150",
    "rich": "14",
    "pytest": "8.4",
    "pytest-benchmark": "5.1",
}
"""Lowest version of each package the suite uses."""
MAIN_JOB = ("torch", "jax", "jaxlib", "numpy", "hypothesis", "rich")
"""The packages that `verify` and `replay` need."""
TRAINERS = ("transformers", "accelerate", "lightning")
"""Packages that bring trainers, named where they are installed."""


@dataclass(frozen=True)
class Ability:
    """Something this machine can or cannot do.

    Attributes:
        name: what.
        reason: why not; None where it can.
        main: whether the suite's main job, verifying on the CPU, needs it.
    """

    name: str
    reason: str | None
    main: bool = False


def versions() -> dict[str, str | None]:
    """Return the version of the suite, of Python and of each package; None where one that it uses is not installed."""
    from gradcheck_suite import __version__

    found: dict[str, str | None] = {"gradcheck-suite": __version__, "python": platform.python_version()}
    for package in (*MINIMUM, *TRAINERS):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in MINIMUM:
                found[package] = None
    return found


def missing() -> list[str]:
    """Return why the main job cannot run, one reason for each package that is missing or too old; imports none."""
    found, reasons = versions(), []
    for package in MAIN_JOB:
        version = found[package]
        if version is None or importlib.util.find_spec(package) is None:
            reasons.append(f"{package} is not installed: pip install '{package}>={MINIMUM[package]}'")
        elif _numbers(version) < _numbers(MINIMUM[package]):
            reasons.append(
                f"{package} {version} is too old: expected {MINIMUM[package]} or later; "
                f"pip install '{package}>={MINIMUM[package]}'"
            )
    return reasons


def prepare() -> None:
    """Set what must be set before torch and jax are imported or used; whatever the user has set stays."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # references run on the CPU: a GPU's memory and start-up time are left to the loop
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def keep_working_directory_clean() -> None:
    """Send what Hypothesis notes down for itself to the cache, and not into the user's working directory."""
    folder = program_cache() or str(Path(tempfile.gettempdir()) / "gradcheck-suite")
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(folder) / "hypothesis"))


def set_precision() -> None:
    """Set the precision flags of both frameworks, whose defaults differ, to full precision.

    Raises:
        CannotRunHere: one of them cannot be imported.
    """
    jax, torch = _imported("jax"), _imported("torch")
    for module in (jax, torch):
        if isinstance(module, str):
            raise CannotRunHere(f"{module}; `gradcheck-suite doctor` says what is missing")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_enable_x64", True)


def precision_flags() -> dict[str, Any]:
    """Return the precision flags of torch and jax as they are; of a framework that cannot be imported, none."""
    flags: dict[str, Any] = {}
    torch = _imported("torch")
    if not isinstance(torch, str):
        flags["torch_float32_matmul_precision"] = _asked(torch.get_float32_matmul_precision)
        flags["torch_cuda_matmul_allow_tf32"] = _asked(lambda: torch.backends.cuda.matmul.allow_tf32)
        flags["torch_cudnn_allow_tf32"] = _asked(lambda: torch.backends.cudnn.allow_tf32)
        flags["torch_deterministic_algorithms"] = _asked(torch.are_deterministic_algorithms_enabled)
    jax = _imported("jax")
    if not isinstance(jax, str):
        flags["jax_enable_x64"] = _asked(lambda: jax.config.jax_enable_x64)
        flags["jax_default_matmul_precision"] = _asked(lambda: jax.config.jax_default_matmul_precision)
    return flags


def devices() -> dict[str, list[str]]:
    """Return the devices that torch and jax see; none of a framework that cannot be imported."""
    found: dict[str, list[str]] = {"torch": [], "jax": []}
    torch = _imported("torch")
    if not isinstance(torch, str):
        found["torch"].append("cpu")
        if _asked(torch.cuda.is_available) is True:
            count = torch.cuda.device_count()
            found["torch"] += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(count)]
    jax = _imported("jax")
    if not isinstance(jax, str):
        listed = _asked(lambda: [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()])
        found["jax"] = listed if isinstance(listed, list) else []
    return found


def program_cache() -> str | None:
    """Return the folder where compiled programs are kept; None where there is none or it cannot be known."""
    try:
        from gradcheck_suite.references.programs import cache_directory
    except Exception:
        return None
    folder = cache_directory()
    return None if folder is None else str(folder)


def environment() -> dict[str, Any]:
    """Return what a record says of where it was made, as JSON-ready data; no path and no name of the machine."""
    return {
        "versions": versions(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "processor_count": os.cpu_count(),
        "devices": devices(),
        "precision": precision_flags(),
    }


def processor() -> str:
    """Return the processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def abilities() -> list[Ability]:
    """Try what the suite can be asked for, and return what works here and what does not."""
    reasons = missing()
    found = [Ability("verify and replay on the CPU", reasons[0] if reasons else _cannot_run(_small_job), main=True)]
    torch, jax = _imported("torch"), _imported("jax")
    without = torch if isinstance(torch, str) else None
    found += [Ability(f"--dtype {name}", without or _cannot_run(partial(_backward, name, "cpu"))) for name in DTYPES]
    no_cuda = without
    if no_cuda is None and not torch.cuda.is_available():
        no_cuda = f"torch {torch.__version__} sees no CUDA device"
    found.append(Ability("--device cuda", no_cuda or _cannot_run(partial(_backward, "float32", "cuda"))))
    alarm = (
        None if hasattr(signal, "setitimer") else f"{sys.platform} has no SIGALRM: a loop that hangs hangs the suite"
    )
    found.append(Ability("--time-limit", alarm))
    cache = "jax cannot be imported" if isinstance(jax, str) else _cannot_run(_write_to_cache)
    found.append(Ability("compiled programs kept between runs", cache))
    tested = [f"{p} is not installed" for p in ("pytest", "pytest-benchmark") if versions()[p] is None]
    found.append(Ability("pytest properties/", tested[0] if tested else None))
    return found


def _small_job() -> None:
    from gradcheck_suite.checking import check
    from gradcheck_suite.loops import BUILT_IN
    from gradcheck_suite.plan import Plan
    from gradcheck_suite.probe import probe_case

    verdict = check(BUILT_IN["zero_"], probe_case(Plan((1, 3), 2)))
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
    from gradcheck_suite.files import expect_writable_folder
    from gradcheck_suite.references.programs import CACHE_VARIABLE, cache_directory

    folder = cache_directory()
    if folder is None:
        raise RuntimeError(f"{CACHE_VARIABLE} is set to nothing")
    expect_writable_folder(folder, CACHE_VARIABLE)


def _cannot_run(attempt: Callable[[], Any]) -> str | None:
    """Return why an attempt fails, or None."""
    try:
        attempt()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def _asked(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:  # a flag that a version lacks or refuses to tell is no reason to stop
        return f"unknown ({type(error).__name__})"


def _imported(name: str) -> Any:
    """Return the module, or a string that says why it cannot be imported (a broken installation raises anything)."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        return " ".join(f"{name} cannot be imported ({type(error).__name__}: {error})".split())


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's release numbers: (2, 13, 0) of "2.13.0+cpu"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release.group().split("."))) if release else ()
