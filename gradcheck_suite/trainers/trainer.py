"""What the suite knows about a real trainer before the trainer's package is imported."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from importlib import import_module

from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.schema.contract import Loop
from gradcheck_suite.trainers.questions import PLANS, Question


@dataclass(frozen=True)
class Trainer:
    """A trainer that can be a subject: one with an adapter, or a loop in somebody's own file.

    Attributes:
        name: the name that `verify` and `trainers` take.
        loop: the training loop; it imports the trainer's package when it is called.
        about: one line on what runs.
        requires: requirements such as `"accelerate>=1.0"`, the trainer's package first; the extra of that name lists
            the same. Empty for a loop in somebody's own file.
        tested: versions of the trainer's package that the adapter is tested with.
        imports: `module:name` of what the loop uses of the packages.
        questions: what `gradcheck-suite trainers` asks.
    """

    name: str
    loop: Loop
    about: str
    requires: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    questions: tuple[Question, ...] = PLANS

    @property
    def packages(self) -> tuple[str, ...]:
        """The distributions that must be installed, the trainer's own first."""
        return tuple(re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in self.requires)

    @property
    def package(self) -> str:
        """The trainer's own distribution; empty for a loop in somebody's own file."""
        return self.packages[0] if self.packages else ""

    @property
    def place(self) -> str:
        """`module:name` of the loop."""
        return f"{self.loop.__module__}:{self.loop.__name__}"

    @property
    def version(self) -> str | None:
        """The installed version, or None."""
        return _version(self.package) if self.package else None

    @property
    def missing(self) -> str | None:
        """Why the trainer cannot be imported and what to do, or None."""
        absent = [name for name in self.packages if _version(name) is None]
        if not absent:
            return None
        return f"{self.name} needs {' and '.join(absent)}, not installed here: pip install {' '.join(absent)}"

    @property
    def note(self) -> str | None:
        """That the installed version is not a tested one, or None."""
        if self.version is None or self.version in self.tested:
            return None
        tested = " and ".join(self.tested)
        return (
            f"{self.name} is tested with {self.package} {tested}; {self.version} is installed, and is run all the same"
        )

    @property
    def status(self) -> str:
        """The installed version, or that there is none."""
        if not self.package:
            return "own file"
        return f"{self.package} is not installed" if self.version is None else f"{self.package} {self.version}"

    def load(self) -> Loop:
        """Import what the loop uses and return the loop.

        Raises:
            CannotRunHere: a package is not installed, or an import fails.
        """
        if reason := self.missing:
            raise CannotRunHere(reason)
        try:
            for place in self.imports:
                module, _, name = place.partition(":")
                getattr(import_module(module), name)
        except Exception as error:  # a broken or foreign version raises anything
            message = " ".join(f"{type(error).__name__}: {error}".split())
            raise CannotRunHere(
                f"{self.name} cannot be loaded with {self.package} {self.version} ({message}); "
                f"it is tested with {' and '.join(self.tested)}"
            ) from error
        return self.loop


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
