"""Chunks of a campaign on disk, so that a campaign that is stopped loses at most one chunk.

A chunk is found again by everything that its counts depend on: what was asked for, the sources that decide a verdict,
the versions of torch, JAX and Hypothesis.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gradcheck_suite.records.files import append_line, read_lines
from gradcheck_suite.records.sources import sources_digest

FILE = "calibration-chunks.jsonl"
DECIDING = (
    "catalogue",
    "evidence/calibration/alarms.py",
    "evidence/calibration/drawing.py",
    "evidence/calibration/styles.py",
    "evidence/calibration/tally.py",
    "evidence/rivals.py",
    "execution/autocast.py",
    "execution/instance.py",
    "execution/observer.py",
    "execution/runner.py",
    "generation",
    "loops",
    "numerics",
    "references",
    "verification/accumulable.py",
    "verification/check.py",
    "verification/divergence.py",
    "verification/gradient_violation.py",
)
"""Modules and folders that the counts depend on."""


@cache
def made_by(also: tuple[str, ...] = ()) -> str:
    """Return a digest of the sources and versions that counts depend on.

    Comments, docstrings, annotations of arguments, imports and layout do not change the digest.

    Args:
        also: further modules, beside `DECIDING`.
    """
    digest = hashlib.sha256(sources_digest((*DECIDING, *also)).encode())
    for name in ("torch", "jax", "hypothesis", "numpy"):
        digest.update(f"{name} {version(name)}".encode())
    return digest.hexdigest()[:16]


class Store:
    """Counts by key, each a JSON line of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[str, Mapping[str, Any]] = {
            line["key"]: line["counts"]
            for _, line in read_lines(path)
            if isinstance(line, dict) and {"key", "counts"} <= line.keys()
        }

    def get(self, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what was counted under a key, or None."""
        return self._kept.get(_text(key))

    def put(self, key: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
        """Keep counts under a key.

        Raises:
            UsageError: the file cannot be written.
        """
        self._kept[_text(key)] = counts
        append_line(self._path, {"key": _text(key), "counts": counts})


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(dict(key), sort_keys=True)
