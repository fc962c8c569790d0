"""The fenced blocks of a page, run in order as a reader would, in an empty folder.

What a block is, its language says, and its first line:

- any language, first line `# NAME.py` (or another file's name): the block is written to that file;
- `python`: executed; all of a page's blocks share one namespace;
- `pycon`: a session, whose shown output must be the real one;
- `console`: each line after `$ ` is a command, the lines below it are what it prints;
- `text`, `json`, `toml`, `yaml` and directives: shown only.

What is printed is compared but for times, versions, rounding errors, digests of cases and white
space; `...` stands for anything.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from gradcheck_suite.__main__ import main
from gradcheck_suite.cli import PROGRAM, CommandLine
from studies.commands import PROGRAM as STUDIES

ROOT = Path(__file__).parent.parent.parent
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "studies" / "docs").glob("*.md")),
)
SHOWN_ONLY = ("text", "json", "toml", "yaml")
NOT_RUN = ("python3 -m venv", "pip install", ".venv/bin/", "tox")
"""Commands that install, or run the suite's own tests."""
FEW, FEW_ON_PROBLEM, AS_SHOWN = 5, 1, 20
"""Cases that `verify` draws here in place of the number that a page shows, one where JAX compiles a program for each
set of shapes, and up to which number the page's own is kept."""
_COUNTED = (
    (r"\b\d+ cases?\b", "SOME cases"),
    (r"on \d+ of \d+ windows, of \d+ shapes?", "on SOME windows"),
    (r"; for the others the \d+ s that this may take did not suffice", ""),
)
"""What depends on how many cases were drawn."""
_MACHINE_S_OWN = ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS", "FORCE_COLOR", "PY_COLORS")
"""Variables of the environment that change what pytest prints: on a CI server its summary is not cut."""
_FENCE = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^# ([\w./]+\.(?:py|toml|ini))$")
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_VARYING = (
    (r"\d+\.\d+ ?s\b", "TIME"),
    (
        r"(gradcheck-suite|torch|jax|jaxlib|numpy|hypothesis|rich|pytest|python)( +)v?\d[\w.+]*",
        r"\1 VERSION",
    ),
    (r"(Python|xdist-|benchmark-|hypothesis-|pytest-|pluggy-)( ?)v?\d[\w.+]*", r"\1 VERSION"),
    (r"worst error \S+ of", "worst error E of"),
    (r"rounding allows [\d.e+-]+", "rounding allows E"),
    (r"\b[0-9a-f]{12}\b", "DIGEST"),
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and the line it begins at."""

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The file it is the text of, if it is one."""
        named = _FILE.match(self.text.partition("\n")[0])
        return named[1] if named else None


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page's text."""
    return [
        Block(m["language"].strip(), m["text"], page.count("\n", 0, m.start("text")) + 1)
        for m in _FENCE.finditer(page)
    ]


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block and what is shown below it."""
    if not text.startswith("$ "):
        yield text.strip(), ""
        return
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def is_alike(shown: str, printed: str) -> bool:
    """Whether what a page shows is what was printed, but for what differs from run to run."""
    return doctest.OutputChecker().check_output(_steady(shown), _steady(printed), _OPTIONS)


def _steady(text: str) -> str:
    for pattern, word in _VARYING:
        text = re.sub(pattern, word, text)
    return text


@dataclass
class Page:
    """A page that is run: a namespace, a folder, and the last command's exit status."""

    name: str
    folder: Path
    few: bool = True
    status: int = 0
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__page__"})

    def run(self, block: Block) -> None:
        """Run one block; what goes wrong is an `AssertionError` that names its line."""
        where = f"{self.name}, line {block.line}"
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, self.name, "exec"), self.namespace)
        elif block.language == "pycon":
            self._session(block, where)
        elif block.language == "console":
            for command, shown in commands(block.text):
                printed = self.command(command)
                if printed is None:
                    continue
                expected, got = self._modulo_count(command, shown, printed)
                assert is_alike(expected, got), (
                    f"{where}: $ {command}\nshown:\n{shown}\nprinted:\n{printed}"
                )
        else:
            assert block.language in SHOWN_ONLY or block.language.startswith("{"), (
                f"{where}: what is this?"
            )

    def command(self, command: str) -> str | None:
        """Return what a command prints, or None where it is one that is not run."""
        if command == "echo $?":
            return f"{self.status}\n"
        if command.startswith(NOT_RUN):
            return None
        program, *arguments = shlex.split(self.resolved(command))
        if program == "gradcheck-suite":
            self.status, printed = _called([*arguments, *self._fewer(command)])
            return printed
        if command.startswith("python -m studies "):
            self.status, printed = _called(arguments[2:], STUDIES)
            return printed
        if program == "pytest":
            self.status, printed = _tested(
                ["-p", "no:cacheprovider", "-p", "no:xdist", *_plugin(), *arguments]
            )
            return printed
        assert program == "python", f"{self.name}: no rule for $ {command}"
        (script,) = arguments
        interpreter = [sys.executable, str(self.folder / script)]
        done = subprocess.run(interpreter, capture_output=True, text=True, timeout=300, check=False)
        self.status = done.returncode
        return done.stdout + done.stderr

    def _fewer(self, command: str) -> list[str]:
        if (
            not self.few
            or not command.startswith("gradcheck-suite verify")
            or re.search(r"--(list|help)", command)
        ):
            return []
        asked = re.search(r"--examples (\d+)", command)
        few = FEW_ON_PROBLEM if "--problem" in command else FEW
        return [] if asked and int(asked[1]) <= AS_SHOWN else ["--examples", str(few)]

    def _modulo_count(self, command: str, *texts: str) -> list[str]:
        if not self._fewer(command):
            return list(texts)
        for pattern, word in _COUNTED:
            texts = tuple(re.sub(pattern, word, text) for text in texts)
        return list(texts)

    def resolved(self, command: str) -> str:
        """Return a command with the digests that counterexamples have here."""
        return " ".join(map(self._found, command.split(" ")))

    def _found(self, argument: str) -> str:
        if not (digest := re.search(r"-[0-9a-f]{12}(?=\.\w+$)", argument)):
            return argument
        (path,) = self.folder.glob(argument.replace(digest[0], "-*"))
        return str(path.relative_to(self.folder))

    def _session(self, block: Block, where: str) -> None:
        test = doctest.DocTestParser().get_doctest(
            block.text, self.namespace, where, self.name, block.line
        )
        said = io.StringIO()
        checker = doctest.OutputChecker()
        checker.check_output = lambda want, got, flags: is_alike(want, got)  # type: ignore[method-assign]
        runner = doctest.DocTestRunner(checker, verbose=False, optionflags=_OPTIONS)
        runner.run(test, out=said.write, clear_globs=False)
        self.namespace.update(test.globs)
        assert not runner.failures, said.getvalue()


def _called(arguments: list[str], program: CommandLine = PROGRAM) -> tuple[int, str]:
    """Run the command line in this process: importing the frameworks anew for each command would
    take the time.
    """
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(),
    ):
        status = main(arguments, program)
    return status, printed.getvalue()


def _tested(arguments: list[str]) -> tuple[int, str]:
    """Run pytest in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        for name in (*_MACHINE_S_OWN, "PYTEST_CURRENT_TEST"):
            patch.delenv(name, raising=False)
        status = pytest.main(arguments)
    return int(status), printed.getvalue()


def _plugin() -> list[str]:
    installed = {point.name for point in entry_points(group="pytest11")}
    return [] if "gradcheck-suite" in installed else ["-p", "gradcheck_suite.pytest_plugin"]
