"""The files of a campaign: one folder a shard, which appears when the shard is done, and the merging of all of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradcheck_suite.cli import exit_status
from gradcheck_suite.records.files import write_text
from gradcheck_suite.records.store import records_path

STATUS, RESULT, OUTPUT = "status", "result.json", "output.txt"
COUNTEREXAMPLES = "counterexamples"
COULD_NOT_RUN = (exit_status.BAD_USAGE, exit_status.BUG, exit_status.INTERRUPTED)
"""Exit statuses of shards that have not done their work."""


@dataclass(frozen=True)
class Shards:
    """The shards of one campaign on disk.

    Attributes:
        folder: of the campaign; it has one folder for each shard that is done, named by its number.
    """

    folder: Path

    def place(self, number: int) -> Path:
        """Return a shard's folder."""
        return self.folder / f"{number:06d}"

    def partial(self, number: int) -> Path:
        """Return a fresh folder that a shard is written to before it is done."""
        path = self.folder / f"{number:06d}.partial"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def finish(self, number: int, status: int) -> None:
        """Note a shard's exit status, and put its folder in place in one step."""
        partial = self.folder / f"{number:06d}.partial"
        (partial / STATUS).write_text(f"{status}\n")
        shutil.rmtree(self.place(number), ignore_errors=True)  # where it is, it failed or a file of it was cut short
        partial.rename(self.place(number))

    def remove(self) -> None:
        """Remove all of them, and the folder of campaigns where no other one is under way."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()

    def done(self, number: int) -> bool:
        """Return whether a shard is done: one that failed is not, nor is one with a file that is cut short."""
        try:
            if self.status(number) in COULD_NOT_RUN:
                return False
            self.result(number)
            for path in self.place(number).rglob("*.jsonl"):
                for line in path.read_text().splitlines():
                    json.loads(line)
        except (OSError, ValueError):
            return False
        return True

    def status(self, number: int) -> int:
        """Return the exit status of a shard that is done."""
        return int((self.place(number) / STATUS).read_text())

    def result(self, number: int) -> dict[str, Any]:
        """Return what a shard wrote by `--json`; empty where it wrote nothing."""
        path = self.place(number) / RESULT
        document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return document

    def lines(self, number: int, kind: str) -> list[str]:
        """Return the lines that a shard recorded."""
        path = records_path(self.place(number), kind)
        return path.read_text().splitlines() if path.is_file() else []

    def records(self, number: int, kind: str) -> list[dict[str, Any]]:
        """Return the records of a shard."""
        return [json.loads(line) for line in self.lines(number, kind)]

    def output(self, number: int) -> str:
        """Return what a shard printed."""
        path = self.place(number) / OUTPUT
        return path.read_text() if path.is_file() else ""


def merge(shards: Shards, numbers: range, reports: Path, kinds: tuple[str, ...]) -> None:
    """Append the shards' records and copy their counterexamples, in the order of the shards.

    A line that is there already is not appended again, so an interrupted merge can be repeated.

    Args:
        shards: all done.
        numbers: of the shards.
        reports: where the records go.
        kinds: of the records that are appended.
    """
    for kind in kinds:
        path = records_path(reports, kind)
        old = path.read_text().splitlines() if path.is_file() else []
        known = set(old)
        new = [line for number in numbers for line in shards.lines(number, kind) if line not in known]
        if new:
            write_text(path, "".join(f"{line}\n" for line in (*old, *new)))
    for number in numbers:
        for source in _files(shards.place(number) / COUNTEREXAMPLES):
            target = reports / COUNTEREXAMPLES / source.relative_to(shards.place(number) / COUNTEREXAMPLES)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
