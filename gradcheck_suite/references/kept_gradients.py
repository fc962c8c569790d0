"""JAX's gradients of earlier runs, in files.

`verify` draws the same cases from the same seed, so a run after a change to the loop needs the same gradients. Only the
second process reads them: it says nothing but that a run holds, and whatever it doubts, its parent judges by gradients
that it computes itself.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from gradcheck_suite.catalogue.definitions import Arrays
from gradcheck_suite.references.kept_files import keep, kept_files
from gradcheck_suite.schema.spec import ProblemSpec

FOLDER = "gradients"
MOST_FILES = 4096
"""Files, of some kilobytes each, from which on the older half is deleted: about twenty runs of 200 cases."""
LossesAndGradients = list[tuple[float, Arrays]]
"""For each window its loss, and an array for each parameter and floating buffer."""
_used_here = False


def use_kept_gradients() -> None:
    """Let this process read gradients from files, and write those that it computes."""
    global _used_here
    _used_here = True
    if (folder := kept_files()) is not None:
        with suppress(OSError):  # there is no folder yet, it cannot be written, or another process deletes files too
            files = sorted((folder / FOLDER).iterdir(), key=lambda file: file.stat().st_mtime)
            for file in files[: len(files) - MOST_FILES // 2] if len(files) > MOST_FILES else ():
                file.unlink()


class KeptGradients:
    """The file of the gradients of some windows."""

    def __init__(self, problem: ProblemSpec, values: Arrays, data: Arrays, windows: Sequence[range]) -> None:
        """Find the file; the arguments are those of `large_batch_gradients`."""
        self._folder, self._values, self._windows = kept_files() if _used_here else None, values, len(windows)
        if self._folder is None:
            return
        digest = hashlib.sha256(repr((problem, windows)).encode())
        for arrays in (values, data):
            for name in sorted(arrays):
                array = arrays[name]
                digest.update(repr((name, array.shape, array.dtype.str)).encode())
                digest.update(array.tobytes())
        self._name = f"{FOLDER}/{digest.hexdigest()}"

    def read(self) -> LossesAndGradients | None:
        """Return what the file has, or None where there is none of the right size."""
        if self._folder is None:
            return None
        path = self._folder / self._name
        try:
            payload = path.read_bytes()
            os.utime(path)  # the latest is deleted last
        except OSError:
            return None
        sizes = [array.size for array in self._values.values()]
        if len(payload) != 8 * self._windows * (1 + sum(sizes)):
            return None
        found: LossesAndGradients = []
        for row in np.frombuffer(bytearray(payload)).reshape(self._windows, -1):
            parts = np.split(row[1:], np.cumsum(sizes)[:-1])
            named = zip(self._values.items(), parts, strict=True)
            found.append((float(row[0]), {name: part.reshape(like.shape) for (name, like), part in named}))
        return found

    def write(self, found: LossesAndGradients) -> None:
        """Keep gradients, float64."""
        if self._folder is not None:
            rows = [np.hstack([loss, *(gradient[name].ravel() for name in self._values)]) for loss, gradient in found]
            keep(self._folder, self._name, np.array(rows, np.float64).tobytes())
