"""The environment of a run: versions, devices, precision flags, environment variables, and what is
missing.

Importing this module imports neither torch nor jax, and its functions work where one of them is
missing or broken.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import stat
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run.dynamo import put_off_dynamo


def is_owned_by_user(path: Path) -> bool:
    """Return whether a file belongs to the user.

    A system without users has files of one user only.
    """
    return not hasattr(os, "geteuid") or path.stat().st_uid == os.geteuid()


def make_cache_folder(folder: Path) -> None:
    """Make a folder to which only the user may write, whatever the umask.

    One that exists stays as it is.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def expect_cache_folder(folder: Path, variable: str) -> None:
    """Refuse a folder of compiled programs that is another user's, or that others may write to.

    Programs are pickles, and reading a pickle can run any code. A folder that does not exist is
    right.

    Args:
        folder: the folder that programs are read from.
        variable: name of the environment variable that chooses it.

    Raises:
        UsageError: it is not the user's alone.
    """
    if not folder.is_dir() or not hasattr(os, "geteuid"):
        return
    what = f"compiled programs in {folder} are not read, since they can run any code and the folder"
    if not is_owned_by_user(folder):
        raise UsageError(
            f"{what} belongs to user {folder.stat().st_uid}: set {variable} to a folder of your"
            " own, or to nothing to keep no programs"
        )
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{what} may be written to by others (mode {mode:o}): run chmod go-w {folder} if nobody"
            f" else has written there, or set {variable} to another folder"
        )


MINIMUM = {
    "torch": "2.9",
    "jax": "0.9",
    "jaxlib": "0.9",
    "numpy": "2.0",
    "scipy": "1.13",
    "hypothesis": "6.150",
    "rich": "14",
    "pytest": "8.4",
    "pytest-benchmark": "5.3",
}
"""Lowest version of each package the suite uses."""
MAIN_JOB = tuple(package for package in MINIMUM if not package.startswith("pytest"))
"""The packages that `verify` and `replay` need."""
PROCESSES_VARIABLE = "GRADCHECK_SUITE_PROCESSES"
CACHE_VARIABLE = "GRADCHECK_SUITE_CACHE"
"""The environment variable with the folder of compiled programs; if it is empty, none are kept."""


def own_version() -> str:
    """Return the suite's version: the installed one's, or that of the checkout that runs without an
    installation.
    """
    try:
        return importlib.metadata.version("gradcheck-suite")
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        return str(tomllib.loads(project.read_text())["project"]["version"])


def versions(optional: Iterable[str] = ()) -> dict[str, str | None]:
    """Return the version of the suite, of Python and of each package that the suite uses, None
    where it is missing.

    Args:
        optional: further packages, listed only where they are installed.
    """
    found: dict[str, str | None] = {
        "gradcheck-suite": own_version(),
        "python": platform.python_version(),
    }
    for package in (*MINIMUM, *optional):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in MINIMUM:
                found[package] = None
    return found


def missing() -> list[str]:
    """Return why the main job cannot run, one reason for each package that is missing or too old.

    No package is imported.
    """
    found = versions()
    reasons = []
    for package in MAIN_JOB:
        version = found[package]
        if version is None or importlib.util.find_spec(package) is None:
            reasons.append(
                f"{package} is not installed: pip install '{package}>={MINIMUM[package]}'"
            )
        elif _release_numbers(version) < _release_numbers(MINIMUM[package]):
            reasons.append(
                f"{package} {version} is too old: expected {MINIMUM[package]} or later; "
                f"pip install '{package}>={MINIMUM[package]}'"
            )
    return reasons


def expect_main_job() -> None:
    """Refuse to run where a package is missing or too old; imports none of them.

    Raises:
        CannotRunHere: the first reason of `missing()`.
    """
    if reasons := missing():
        raise CannotRunHere(reasons[0])


def prepare() -> None:
    """Set the environment variables and precision flags of a command.

    A variable that the user has set stays.

    Raises:
        CannotRunHere: torch or jax cannot be imported.
        UsageError: others than the user may write to the folder of compiled programs.
    """
    set_variables()
    set_precision()


def set_variables() -> None:
    """Set the environment variables of a command, which its processes inherit.

    One that the user has set stays.

    Raises:
        UsageError: others than the user may write to the folder of compiled programs.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # references run on the CPU: a GPU's memory and start-up time are left to the loop
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Hypothesis would make a folder in the user's working directory
    folder = trusted_cache() or Path(tempfile.gettempdir()) / "gradcheck-suite"
    with contextlib.suppress(OSError):
        # before Hypothesis does, with the permissions that the umask allows
        make_cache_folder(folder)
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(folder / "hypothesis"))


@contextlib.contextmanager
def _without_advice_on_tf32() -> Iterator[None]:
    """Suppress what torch 2.9 says whenever it is asked for these flags.

    Later versions say nothing.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        yield


def set_precision() -> None:
    """Set the precision flags of both frameworks, whose defaults differ, to full precision.

    Raises:
        CannotRunHere: one of them cannot be imported.
    """
    jax = imported("jax")
    torch = imported("torch")
    for module in (jax, torch):
        if isinstance(module, str):
            raise CannotRunHere(f"{module}; `gradcheck-suite doctor` says what is missing")
    # cuDNN rounds float32 to TF32, with 10 bits, unless it is told not to; matmul does not
    # (https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices)
    with _without_advice_on_tf32():
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    # otherwise cuBLAS may round partial sums to the dtype of the matrices
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # JAX's default rounds the factors of a product on a GPU or TPU
    jax.config.update("jax_default_matmul_precision", "highest")
    # without it JAX makes float32 of every float64 array, and says nothing
    jax.config.update("jax_enable_x64", True)
    put_off_dynamo(torch)


def processes() -> int:
    """Return how many processes a verification uses unless it is told: 2 where it may use two
    processors.

    Raises:
        UsageError: the environment variable `PROCESSES_VARIABLE` is neither 1 nor 2.
    """
    if (chosen := os.environ.get(PROCESSES_VARIABLE)) is not None:
        if chosen not in ("1", "2"):
            raise UsageError(f"{PROCESSES_VARIABLE}: expected 1 or 2, got {chosen!r}")
        return int(chosen)
    # a container or `taskset` may leave fewer processors than the machine has
    found = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(found, 2)


def precision_flags() -> dict[str, Any]:
    """Return the precision flags of torch and jax.

    A framework that is not imported has computed nothing.
    """
    flags: dict[str, Any] = {}
    if (torch := sys.modules.get("torch")) is not None:
        with _without_advice_on_tf32():
            flags["torch_float32_matmul_precision"] = _answer_or_unknown(
                torch.get_float32_matmul_precision
            )
            flags["torch_cuda_matmul_allow_tf32"] = _answer_or_unknown(
                lambda: torch.backends.cuda.matmul.allow_tf32
            )
            flags["torch_cudnn_allow_tf32"] = _answer_or_unknown(
                lambda: torch.backends.cudnn.allow_tf32
            )
        flags["torch_deterministic_algorithms"] = _answer_or_unknown(
            torch.are_deterministic_algorithms_enabled
        )
    if (jax := sys.modules.get("jax")) is not None:
        flags["jax_enable_x64"] = _answer_or_unknown(lambda: jax.config.jax_enable_x64)
        flags["jax_default_matmul_precision"] = _answer_or_unknown(
            lambda: jax.config.jax_default_matmul_precision
        )
    return flags


def devices() -> dict[str, list[str]]:
    """Return the devices that torch and jax see; a framework that is not imported sees none."""
    found: dict[str, list[str]] = {"torch": [], "jax": []}
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"].append("cpu")
        if _answer_or_unknown(torch.cuda.is_available) is True:
            count = torch.cuda.device_count()
            found["torch"] += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(count)]
    if (jax := sys.modules.get("jax")) is not None:
        listed = _answer_or_unknown(
            lambda: [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]
        )
        found["jax"] = listed if isinstance(listed, list) else []
    return found


def cache_directory() -> Path | None:
    """Return the folder of compiled programs, or None where `GRADCHECK_SUITE_CACHE` is empty."""
    if (chosen := os.environ.get(CACHE_VARIABLE)) is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gradcheck-suite"


def trusted_cache() -> Path | None:
    """Return the folder of compiled programs, to which only the user may write.

    Raises:
        UsageError: others may, or it is another user's.
    """
    folder = cache_directory()
    if folder is not None:
        expect_cache_folder(folder, CACHE_VARIABLE)
    return folder


def environment(optional: Iterable[str] = ()) -> dict[str, Any]:
    """Return the environment of a record as JSON-ready data, without paths and without the
    machine's name.

    Args:
        optional: further packages whose versions are listed where they are installed.
    """
    return {
        "versions": versions(optional),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "processor_count": os.cpu_count(),
        "devices": devices(),
        "precision": precision_flags(),
    }


def processor() -> str:
    """Return the processor's name, or its architecture where the system gives no name."""
    # `platform.processor()` is empty on many Linux systems
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _answer_or_unknown(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:
        # a flag that a version lacks or refuses to tell is no reason to stop: the record says so
        return f"unknown ({type(error).__name__})"


def imported(name: str) -> Any:
    """Return the module, or a string that says why it cannot be imported (a broken installation
    raises anything).
    """
    try:
        return importlib.import_module(name)
    except Exception as error:
        return " ".join(f"{name} cannot be imported ({type(error).__name__}: {error})".split())


def _release_numbers(version: str) -> tuple[int, ...]:
    """Return a version's release numbers: (2, 13, 0) of "2.13.0+cpu"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release.group().split("."))) if release else ()
