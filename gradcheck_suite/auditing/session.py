"""`gradcheck_suite.audit`: judge a live run, of PyTorch, of JAX, or of both.

Neither framework is imported before the program has done it: an audit of each begins where its
module is there.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from gradcheck_suite.auditing.places import current_place
from gradcheck_suite.auditing.standard_error import StandardError
from gradcheck_suite.auditing.stopping import StoppedOnViolation, Terminated, in_words
from gradcheck_suite.auditing.told import tell
from gradcheck_suite.core.findings import finding
from gradcheck_suite.core.options import AuditOptions, takes
from gradcheck_suite.core.results import Result, Violation, result_lines
from gradcheck_suite.errors import UsageError

if TYPE_CHECKING:
    from gradcheck_suite.auditing import context
    from gradcheck_suite.auditing.jax.run import JaxAudit


# Modules are looked at when the program has imported them.


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls functions when modules have been imported.

    Args:
        calls: name of a module -> what is called.
    """

    def __init__(self, calls: dict[str, Callable[[], None]]) -> None:
        self._calls = calls

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders give, with a call after the module's own code."""
        if name not in self._calls:
            return None
        # as the import system asks them itself, but for this one
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(spec, name)
                return spec
        return None

    def _follow(self, spec: importlib.machinery.ModuleSpec, name: str) -> None:
        run: Callable[[ModuleType], None] | None = getattr(spec.loader, "exec_module", None)
        # a loader of the old kind, or none, as of a namespace package
        if run is None:
            return
        call = self._calls[name]

        def followed(module: ModuleType) -> None:
            run(module)
            call()

        # a loader is one module's own; one that takes no attribute is left as it is
        with contextlib.suppress(AttributeError):
            spec.loader.exec_module = followed  # type: ignore[method-assign, union-attr]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Be asked about each module that is imported."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # the program may have taken it out
                sys.meta_path.remove(self)


_open: list[audit] = []


def _random_numbers_kept() -> contextlib.AbstractContextManager[None]:
    """Put back what the suite draws at the end: an import alone may draw, as rich's does."""
    # what puts them back imports torch, which the program has not done
    if "torch" not in sys.modules:
        return contextlib.nullcontext()
    from gradcheck_suite.auditing.program_state import preserve_rng

    return preserve_rng()


@takes(AuditOptions)
class audit:  # noqa: N801 - it is used as a function, as `open` is
    """Judge the optimizer steps of the code that runs while it is open, unchanged.

    Example::

        with gradcheck_suite.audit(steps=20) as audit:
            trainer.train()
        audit.result.raise_for_violation()

    The run may be one of PyTorch, of JAX, or of both. The first violation of each kind is printed
    when it is found, of JAX at the end of the run, and the verdict when the audit is closed: on
    standard error, as the command does, or below the cell of a notebook.

    Args:
        options: of the audit; the defaults of `AuditOptions` if None.
        name: of the run in the result.
        quiet: whether nothing is printed; `print(audit.result)` prints the verdict later.
        fields: fields of `AuditOptions`, over those of `options`: `steps=20`.

    Raises:
        UsageError: an option is wrong, or another audit is open.
    """

    def __init__(
        self,
        options: AuditOptions | None = None,
        *,
        name: str | None = None,
        quiet: bool = False,
        **fields: Any,
    ) -> None:
        self.options = (options or AuditOptions()).replace(**fields)
        self.quiet = quiet
        self._name = name or current_place().line
        self._torch: context.TorchAudit | None = None
        self._jax: JaxAudit | None = None
        self._failed: list[str] = []
        self._result: Result | None = None
        self._opened = self._is_closing = False
        self._standard_error = StandardError()
        self._process = os.getpid()
        self._stack = contextlib.ExitStack()
        self._start = time.perf_counter()

    def __enter__(self) -> audit:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close(error)

    def open(self) -> audit:
        """Begin to observe.

        Raises:
            UsageError: this audit was open before, or another one is.
            CannotRunHere: this torch lacks what the audit needs.
        """
        if self._opened:
            raise UsageError(
                "audit: this audit was closed; make a new one with gradcheck_suite.audit()"
            )
        if _open:
            raise UsageError("audit: another audit is open in this process; close it first")
        self._opened = True
        self._standard_error.begun = sys.stderr
        self._start = time.perf_counter()
        # ranks that a launcher of torch starts write their files from the beginning
        if "torch" in sys.modules or "RANK" in os.environ:
            self._open_torch()
        _open.append(self)
        if "jax" in sys.modules:
            self._open_jax()
        calls = {
            "torch": self._guarded(self._open_torch),
            "jax": self._guarded(self._open_jax),
            "optax": self._guarded(lambda: self._on_import("optax")),
            OF_EXAMPLES: self._guarded(lambda: self._on_import(OF_EXAMPLES)),
        }
        self._stack.enter_context(_AfterImport(calls).installed())
        return self

    def _guarded(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call in the program's import that raises nothing."""

        def guarded() -> None:
            try:
                if self.observing:
                    call()
            # an import of the program's must not fail because of the suite; the result says what
            # has failed
            except Exception as error:
                self._failed.append(f"{type(error).__name__}: {error}")

        return guarded

    def _open_torch(self) -> None:
        from gradcheck_suite.auditing.context import TorchAudit

        if self._torch is None:
            self._torch = TorchAudit(
                self.options, self._name, self._standard_error, quiet=self.quiet
            ).open()

    def _open_jax(self) -> None:
        from gradcheck_suite.auditing.jax.run import JaxAudit

        if self._jax is None:
            self._jax = JaxAudit(
                self.options,
                self._name,
                self._tell,
                self._remark,
            )
            self._jax.open()

    def _on_import(self, name: str) -> None:
        if self._jax is not None:
            from gradcheck_suite.auditing.jax.recorder import on_import

            on_import(name)

    def _tell(self, violation: Violation) -> None:
        if not self.quiet:
            tell(violation.words, self.standard_error)
        # while the audit closes there is nothing left to stop
        if self.options.stop_on_violation and self._result is None and not self._is_closing:
            raise StoppedOnViolation

    def _remark(self, line: str) -> None:
        """Say on a terminal what takes long: no log of two runs differs by it."""
        if not self.quiet and self.standard_error.isatty():
            tell([line], self.standard_error)

    def close(self, error: BaseException | None = None, *, summary: bool = True) -> Result:
        """Stop observing and return the result; a second call returns the same.

        Args:
            error: the exception that ended the run, if any.
            summary: whether the result is printed after the violations.
        """
        if not self._opened:
            raise UsageError(
                "audit: the audit was never opened: use `with gradcheck_suite.audit() as audit:`"
            )
        if self._result is None:
            with _random_numbers_kept():
                self._result = self._closed(error)
                if summary and not self.quiet and not self._result.is_another_ranks:
                    lines = result_lines(self._result, shown=bool(self._result.violations))
                    tell(lines, self.standard_error)
        return self._result

    def _closed(self, error: BaseException | None) -> Result:
        self._is_closing = True
        self._stack.close()
        if self in _open:
            _open.remove(self)
        of_torch = None if self._torch is None else self._torch.close(error)
        of_jax = None
        if self._jax is not None:
            of_jax = self._jax.close(error)
            self._jax.tell_all()
        return self._together(of_torch, of_jax, error)

    def _together(
        self, of_torch: Result | None, of_jax: Result | None, error: BaseException | None
    ) -> Result:
        """Return the result of the frameworks that the run has trained with."""
        if of_jax is not None and self._jax is not None and not self._jax.has_seen and of_torch:
            of_jax = None  # it was imported by something, and trained nothing
        # torch is there for its data loader: what it has not trained is no reason to leave the run
        # unjudged
        if of_torch is not None and of_jax is not None and not of_torch.steps:
            of_torch = of_torch if of_torch.violations else None
        found = [one for one in (of_torch, of_jax) if one is not None]
        if not found:
            return self._of_none(error)
        first, *rest = found
        return _united(first, rest[0]) if rest else first

    def _of_none(self, error: BaseException | None) -> Result:
        why = (
            "no gradient and no optimizer step was seen in this process: the script trains nothing"
            " with PyTorch or JAX, or it trains in another process"
        )
        return Result(
            loop=self._name,
            command="audit",
            seconds=time.perf_counter() - self._start if self._opened else 0.0,
            unjudged="; ".join(self._failed) or why,
            unjudged_reason="failed-instrument" if self._failed else "nothing-trained",
            interrupted=isinstance(error, KeyboardInterrupt | Terminated),
            raised=in_words(error) or None,
        )

    @property
    def result(self) -> Result:
        """The result so far, or the final one where the audit is closed."""
        if self._result is not None:
            return self._result
        of_torch = None if self._torch is None else self._torch.result
        of_jax = None if self._jax is None else self._jax.result(None)
        return self._together(of_torch, of_jax, None)

    @property
    def holds(self) -> bool:
        """Whether some step was judged, and no violation was found so far."""
        return self.result.holds

    @property
    def observing(self) -> bool:
        """Whether steps are still judged in this process."""
        return self._opened and self._result is None and self._process == os.getpid()

    def when_idle(self, act: Callable[[], None]) -> None:
        """Call a function, which closes the audit, once nothing of the audit's is half done."""
        if self._torch is None:
            act()
        else:
            self._torch.when_idle(act)

    def hurry(self) -> None:
        """Wait for other ranks no longer than a launcher waits for this one."""
        if self._torch is not None:
            self._torch.hurry()

    @property
    def standard_error(self) -> TextIO:
        """The standard error of the time when the audit began, which the program may have replaced
        since then.
        """
        return self._standard_error.now

    @standard_error.setter
    def standard_error(self, stream: TextIO) -> None:
        self._standard_error.begun = stream


OF_EXAMPLES = "jax.example_libraries.optimizers"


def _united(of_torch: Result, of_jax: Result) -> Result:
    """Return the result of a run that trains with both frameworks."""
    skipped = dict(of_torch.windows_skipped)
    for reason, number in of_jax.windows_skipped.items():
        skipped[reason] = skipped.get(reason, 0) + number
    reasons = [one for one in (of_torch.unjudged, of_jax.unjudged) if one]
    found = of_torch.violations + of_jax.violations + of_torch.accepted + of_jax.accepted
    is_judged = bool(found) or len(reasons) < 2
    return replace(
        of_torch,
        violations=of_torch.violations + of_jax.violations,
        accepted=of_torch.accepted + of_jax.accepted,
        steps=of_torch.steps + of_jax.steps,
        windows=of_torch.windows + of_jax.windows,
        windows_skipped=skipped,
        findings=(*of_torch.findings, *of_jax.findings, *(reasons if is_judged else ())),
        named_findings=(
            *of_torch.named_findings,
            *of_jax.named_findings,
            *(finding("nothing-judged", one) for one in reasons if is_judged),
        ),
        unjudged_reason=None if is_judged else of_torch.unjudged_reason,
        unknown=of_torch.unknown + of_jax.unknown,
        unjudged=None if is_judged else "; ".join(reasons),
        files=tuple(dict.fromkeys((*of_torch.files, *of_jax.files))),
    )
