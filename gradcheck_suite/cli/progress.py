"""What goes where: progress to a terminal alone, and to standard output nothing beside a document for programs."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from gradcheck_suite.core.results import Verdict


class Progress:
    """One bar on standard error for the loop at work; gone once its line is printed."""

    def __init__(self, *, examples: int = 0, then: str | None = None) -> None:
        """Prepare the bar.

        Args:
            examples: cases of each loop.
            then: what happens after the last case, shown while it runs; None if nothing takes long.
        """
        self._then, self._cases = then, 0
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._examples = examples

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self, name: str, examples: int | None = None) -> None:
        """Show a new bar for a loop with `examples` cases."""
        self.stop()
        self._examples = examples or self._examples
        self._cases = 0
        if not sys.stderr.isatty():
            return
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            # what a loop prints goes where it prints it; only on a terminal is it kept clear of the bar
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )
        self._task = self._bar.add_task(name, total=self._examples)
        self._bar.start()
        self._name = name

    def advance(self, verdict: Verdict) -> None:
        """Count a case."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
            self._cases += 1
            if not verdict.holds:
                self._bar.update(self._task, description=f"{self._name}: violated, looking for a smaller case")
            elif self._then is not None and self._cases == self._examples:
                self._bar.update(self._task, description=f"{self._name}: {self._then}")

    def count(self, more: int) -> None:
        """Advance the bar by `more` cases."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, more)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None


class StandardOutput:
    """Standard output, kept for a document where one is wanted: what the code under test prints, too, goes elsewhere.

    It goes to standard error, also that of child processes and of C.
    """

    def __init__(self, *, keep: bool) -> None:
        """Keep it from now on."""
        self._stdout, self._kept, self._keeps, self.document = sys.stdout, -1, keep, ""
        if not keep:
            return
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError):  # it was closed before the start
            self._kept = os.dup(1)
            os.dup2(2, 1)
        try:
            own = sys.stdout.fileno() == 1
        except (OSError, ValueError):
            own = False
        if not own:
            sys.stdout = sys.stderr

    def __enter__(self) -> StandardOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Print to it again, first of all the document."""
        if not self._keeps:
            return
        with suppress(OSError, ValueError):
            self._stdout.flush()
        if self._kept >= 0:
            os.dup2(self._kept, 1)
            os.close(self._kept)
        sys.stdout = self._stdout
        with suppress(OSError):  # the command says so at its end
            try:
                print(self.document, end="", flush=True)
            except ValueError:  # the code under test has closed it
                with open(1, "w", encoding="utf-8", closefd=False) as output:
                    output.write(self.document)
