"""What goes where: progress to a terminal alone, and to standard output nothing beside a document
for programs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from gradcheck_suite.cli.arguments import OutputOptions
from gradcheck_suite.cli.exit_status import attempt, fail
from gradcheck_suite.core.formats import rendered
from gradcheck_suite.core.records import write_json, write_text
from gradcheck_suite.core.results import (
    Result,
    Verdict,
    Violation,
    notices_of,
    results_to_json,
)
from gradcheck_suite.core.text import say


class Progress(AbstractContextManager["Progress"]):
    """One bar on standard error for the loop at work; gone once its line is printed."""

    def __init__(self, *, examples: int = 0, then: str | None = None) -> None:
        """Prepare the bar.

        Args:
            examples: cases of each loop.
            then: what happens after the last case, shown while it runs; None if nothing takes long.
        """
        self._then = then
        self._examples = examples
        self._name = ""
        self._bar: Bar | None = None

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def start(self, name: str, examples: int | None = None) -> None:
        """Show a new bar for a loop with `examples` cases."""
        self.stop()
        self._name = name
        self._examples = examples or self._examples
        # a log file would get a line for each case
        if not sys.stderr.isatty():
            return
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            # what a loop prints goes where it prints it; only on a terminal is it kept clear of the
            # bar
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )
        self._bar.add_task(name, total=self._examples)
        self._bar.start()

    def advance(self, verdict: Verdict) -> None:
        """Count a case."""
        self.count(1)
        tasks = () if self._bar is None else self._bar.tasks
        for task in tasks:
            # what follows are the cases of shrinking, whose number nobody knows
            if not verdict.holds:
                task.description = f"{self._name}: violated, looking for a smaller case"
            elif self._then is not None and task.completed == task.total:
                task.description = f"{self._name}: {self._then}"

    def count(self, more: int) -> None:
        """Advance the bar by `more` cases."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], more)

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


class CommandOutput(AbstractContextManager["CommandOutput"]):
    """What a command hands over beside its lines: the files that its options name, and a document
    where one is wanted.

    Standard output is then kept for the document. What the code under test prints goes to standard
    error, also that of child processes and of C.

    Attributes:
        options: with absolute paths, since the code under test may change the working directory.
        folder: in which the command began; messages name files as seen from it.
    """

    def __init__(self, options: OutputOptions) -> None:
        """Keep standard output from now on, where a document is wanted."""
        self.options = options.absolute()
        self.folder = Path.cwd()
        self._stdout = sys.stdout
        self._kept = -1
        self._keeps = options.output_format != "text"
        self._document = ""
        if not self._keeps:
            return
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError):  # it was closed before the start
            # replacing `sys.stdout` would not reach C code and child processes
            self._kept = os.dup(1)
            os.dup2(2, 1)
        try:
            own = sys.stdout.fileno() == 1
        except (OSError, ValueError):
            own = False
        # a notebook and pytest put an object without the file 1 there
        if not own:
            sys.stdout = sys.stderr

    def seen(self, path: Path) -> Path:
        """Return a path as messages have it."""
        return path.relative_to(self.folder) if path.is_relative_to(self.folder) else path

    def deliver(
        self,
        program: str,
        results: Sequence[Result],
        about: dict[str, Any],
        page: Callable[[], str],
        stale: Sequence[str] = (),
        file: TextIO | None = None,
    ) -> None:
        """Write the results to the files that are asked for.

        If a file cannot be written, a message says so.

        Args:
            program: the command.
            results: that it found.
            about: the environment.
            page: returns the page of the results, as HTML.
            stale: a line for each accepted fault that was not found again.
            file: where the name of the page is printed; standard output if None.
        """
        document = results_to_json(results, about, stale)
        if (json := self.options.json) is not None:
            attempt(program, lambda: write_json(json, document))
        if self._keeps:
            self._document = rendered(
                self.options.output_format, document, notices_of(results, stale), self.folder
            )
        if (html := self.options.html) is not None and results:
            # a page of a run that holds opens no window: it has nothing to show that the terminal
            # does not
            violated = any(
                result["verdict"] in ("violated", "differs") for result in document["results"]
            )
            attempt(program, lambda: self._write_page(html, page(), file, opens=violated))
        # last, after all files: these lines fail the command, and the last line is what a log shows
        for line in stale:
            fail(program, line)

    def _write_page(self, path: Path, text: str, file: TextIO | None, *, opens: bool) -> None:
        from gradcheck_suite.page.render import open_page

        write_text(path, text)
        say([f"page    {self.seen(path)}"], file)
        if opens:
            open_page(path)

    def __exit__(self, *raised: object) -> None:
        """Print to it again, first of all the document."""
        if not self._keeps:
            return
        with suppress(OSError, ValueError):
            # what the code under test has buffered for standard output goes where that pointed
            # meanwhile
            self._stdout.flush()
        if self._kept >= 0:
            os.dup2(self._kept, 1)
            os.close(self._kept)
        sys.stdout = self._stdout
        with suppress(OSError):  # the command says so at its end
            try:
                print(self._document, end="", flush=True)
            except ValueError:  # the code under test has closed it
                with open(1, "w", encoding="utf-8", closefd=False) as output:
                    output.write(self._document)


def page_of(violations: Sequence[Violation], loop: str, lines: Sequence[str]) -> str:
    """Return the page of what an audit or a comparison of a port found.

    Args:
        violations: with their `source`, where that is known.
        loop: the script's or the pair's name.
        lines: the verdict in words.
    """
    from gradcheck_suite.page.render import violations_html
    from gradcheck_suite.page.violation import violation_page

    pages = [violation_page(v, loop=loop, name=str(i)) for i, v in enumerate(violations)]
    return violations_html(pages, lines)
