"""The folder of what later processes need again: compiled programs and JAX's gradients.

There is one for all that they depend on: the source of the catalogue and of this package, the versions of JAX and XLA,
and the processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from functools import cache
from pathlib import Path

import jax
from jaxlib import version as jaxlib_version

from gradcheck_suite.execution.cache_folder import expect_cache_folder, make_cache_folder
from gradcheck_suite.execution.environment import CACHE_VARIABLE, trusted_cache

KEPT_ENVIRONMENTS = 4


def kept_files() -> Path | None:
    """Return the folder, which need not exist; None where nothing is kept.

    Raises:
        UsageError: others than the user may write to it.
    """
    directory = trusted_cache()
    if directory is None:
        return None
    folder = directory / _environment_key()[:16]
    expect_cache_folder(folder, CACHE_VARIABLE)
    return folder


def keep(folder: Path, name: str, payload: bytes) -> None:
    """Write a file whole or not at all; ignore a folder that cannot be written, since this is only a cache.

    Args:
        folder: what `kept_files` returned.
        name: of the file, with its sub-folder if it has one.
        payload: its contents.
    """
    path = folder / name
    try:
        _forget_others(folder)
        for parent in (folder.parent, folder, path.parent):
            make_cache_folder(parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(payload)
        os.replace(file.name, path)
    except OSError:
        pass


@cache
def _environment_key() -> str:
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("catalogue", "references"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    try:
        processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        processor = platform.processor()
    for part in (
        jax.__version__,
        jaxlib_version.__version__,
        platform.machine(),
        processor,
        os.environ.get("XLA_FLAGS", ""),
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _forget_others(folder: Path) -> None:
    """Before the first file of a new environment is kept, delete all but the latest `KEPT_ENVIRONMENTS` others."""
    if folder.exists() or not folder.parent.is_dir():
        return
    others = sorted((f for f in folder.parent.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime)
    for old in others[: -KEPT_ENVIRONMENTS or None]:
        shutil.rmtree(old, ignore_errors=True)
