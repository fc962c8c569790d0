"""Whether a folder is the user's alone. Compiled programs are pickles, and reading a pickle can run any code."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gradcheck_suite.errors import UsageError


def is_own(path: Path) -> bool:
    """Return whether a file belongs to the user; a system without users has files of one user only."""
    return not hasattr(os, "geteuid") or path.stat().st_uid == os.geteuid()


def make_cache_folder(folder: Path) -> None:
    """Make a folder to which only the user may write, whatever the umask; one that exists stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def expect_cache_folder(folder: Path, variable: str) -> None:
    """Refuse a folder of compiled programs that is another user's, or that others may write to.

    A folder that does not exist is right.

    Args:
        folder: that programs are read from.
        variable: name of the environment variable that chooses it.

    Raises:
        UsageError: it is not the user's alone.
    """
    if not folder.is_dir() or not hasattr(os, "geteuid"):
        return
    said = f"compiled programs in {folder} are not read, since they can run any code and the folder"
    if not is_own(folder):
        raise UsageError(
            f"{said} belongs to user {folder.stat().st_uid}: set {variable} to a folder of your own, or to nothing to "
            "keep no programs"
        )
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{said} may be written to by others (mode {mode:o}): run chmod go-w {folder} if nobody else has written "
            f"there, or set {variable} to another folder"
        )
