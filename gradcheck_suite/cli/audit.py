"""Run a training script as it is, and judge its optimizer steps."""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import runpy
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.arguments import OutputOptions
from gradcheck_suite.cli.loading import import_hint, no_file
from gradcheck_suite.cli.progress import CommandOutput, page_of
from gradcheck_suite.core.options import LIVE_NAMES, AuditOptions
from gradcheck_suite.core.records import KINDS, append_record
from gradcheck_suite.core.results import Result, no_longer_found, result_lines
from gradcheck_suite.core.source_lines import places_source
from gradcheck_suite.core.text import say
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run import environment

PROGRAM = "gradcheck-suite audit"

# Run somebody's script or module as `python SCRIPT ARGS` does.


@contextlib.contextmanager
def _interpreter_of(argv: list[str], folder: str) -> Iterator[None]:
    """Set `sys.argv` and the first entry of `sys.path` as Python does.

    Put them and the main module back.
    """
    # a copy of the path, since the script may change it in place
    kept = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = argv
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = kept


def script_runner(path: str, arguments: Sequence[str]) -> Callable[[], dict[str, Any]]:
    """Return a function that runs a script as the main module, and returns its names.

    Raises:
        UsageError: the script does not exist, cannot be read, or is not Python.
    """
    file = Path(path)
    if file.is_dir():
        module = ".".join(file.parts)
        package = f", or `-m {module}` for the package" if (file / "__main__.py").is_file() else ""
        raise UsageError(
            f"{path} is a folder: expected a Python script in it, such as"
            f" {file / 'train.py'}{package}"
        )
    if not file.is_file():
        raise UsageError(no_file(file))
    if file.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook: expected a script; put `with gradcheck_suite.audit():` around"
            " the training in its cell, or convert it with `jupyter nbconvert --to script`"
        )
    try:
        # as Python opens a script, so that audit hooks of the interpreter see it
        with io.open_code(str(file.resolve())) as opened:
            # bytes, so that a declared encoding is honoured
            code = compile(opened.read(), path, "exec")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path}: not Python: {error}") from None

    # as Python has it since 3.9: a script that changes the folder still finds what lies beside it
    place = os.path.abspath(path)

    def run() -> dict[str, Any]:
        main = types.ModuleType("__main__")
        main.__dict__.update(
            __file__=place,
            __builtins__=sys.modules["builtins"],
            __cached__=None,
            __loader__=importlib.machinery.SourceFileLoader("__main__", place),
        )
        with _interpreter_of([path, *arguments], str(file.resolve().parent)):
            sys.modules["__main__"] = main
            exec(code, main.__dict__)
        return main.__dict__

    return run


def module_runner(name: str, arguments: Sequence[str]) -> Callable[[], dict[str, Any]]:
    """Return a function that runs a module as `python -m` does, and returns its names.

    Raises:
        UsageError: there is no such module.
    """
    try:
        with _interpreter_of(sys.argv, str(Path.cwd())):
            found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise UsageError(f"-m {name}: {error}{_folder_with(name)}") from None
    if found is None:
        raise UsageError(
            f"-m {name}: no such module on Python's path or in the working directory"
            f"{_folder_with(name)}"
        )

    def run() -> dict[str, Any]:
        with _interpreter_of([name, *arguments], str(Path.cwd())):
            return runpy.run_module(name, run_name="__main__", alter_sys=True)

    return run


def _folder_with(name: str) -> str:
    """Advise the folder of the working directory that has a module, as `src` has; empty for none."""
    parts = Path(*name.split("."))
    for folder in sorted(path for path in Path().iterdir() if path.is_dir()):
        within = folder / parts
        if within.with_suffix(".py").is_file() or (within / "__main__.py").is_file():
            return (
                f'; {folder} has it: put `pythonpath = ["{folder}"]` below'
                " [tool.gradcheck-suite] in pyproject.toml"
            )
    return ""


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments; what follows the script belongs to the script."""
    parser.usage = (
        f"{parser.prog} [OPTIONS] SCRIPT.py [ARGS ...]\n       {parser.prog} [OPTIONS] -m MODULE"
        " [ARGS ...]"
    )
    parsers.add_options(parser, AuditOptions, OutputOptions)
    add = parser.add_argument
    add(
        "-m",
        dest="module",
        action="store_true",
        help="SCRIPT is a module, as for `python -m`",
    )
    add("script", metavar="SCRIPT.py", help="the script, and its own arguments")
    rest = add(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGS",
        help=argparse.SUPPRESS,
    )
    # before Python 3.12 argparse asks for them too, where the script is missing
    rest.required = False


def run(arguments: argparse.Namespace) -> int:
    """Run the script under an audit; print and store the result."""
    wanted = parsers.parsed(arguments, OutputOptions).writable(PROGRAM)
    options = parsers.parsed(arguments, AuditOptions)
    # a project's own list is for all of its scripts
    listed = parsers.configured(AuditOptions).get("accept", ())
    declared = [one for one in options.accept if one not in listed]
    # such a fault stops a step with `-x`, so the audit has to know of it while the script runs
    live = tuple(str(one) for one in wanted.baseline if one.fault in LIVE_NAMES)
    options = options.replace(
        accept=(*options.accept, *live), fail_on=(*options.fail_on, *wanted.always_fail_on)
    )
    # before the import of torch below: a script that is not there is refused at once
    runner = (module_runner if arguments.module else script_runner)(
        arguments.script, arguments.arguments
    )
    from gradcheck_suite.auditing.session import audit
    from gradcheck_suite.auditing.stopping import Terminated

    # the script's warnings are the script's
    warnings.resetwarnings()
    warnings.filters[:] = _python_filters()  # type: ignore[index]
    name = f"-m {arguments.script}" if arguments.module else arguments.script
    output = CommandOutput(wanted)
    closing = False
    audited = audit(options, name=name, quiet=wanted.quiet).open()

    def finished(error: BaseException | None, status: int) -> int:
        nonlocal closing
        closing = True
        result = audited.close(error, summary=False)  # `_finish` prints it
        # a signal loses what stands there without an audit too
        if not isinstance(error, Terminated):
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
        with contextlib.redirect_stderr(audited.standard_error), output:
            hint = import_hint(error, None if arguments.module else Path(arguments.script))
            own = _finish(arguments.arguments, output, result, status, hint)
            # of many ranks one speaks for all
            if not result.is_another_ranks:
                with contextlib.suppress(OSError, ValueError):
                    say(result.matching_nothing(declared), sys.stderr)
            return own

    ends: list[Callable[[], None]] = []

    def ended(end: Callable[[], None]) -> None:
        ends.append(end)
        # the verdict is being written: it is awaited, and not begun a second time from inside a
        # signal
        if closing:
            audited.hurry()
        else:
            audited.when_idle(finish)

    def finish() -> None:
        try:
            with _written_anew(audited.standard_error) as audited.standard_error:
                finished(Terminated(), 0)
        finally:
            # the sender of the signal waits for the process to end, whatever becomes of the verdict
            ends[0]()

    with exit_status.told_of_its_end(ended):
        error, status = _ran(runner, partial(finished, None))
        status = finished(error, status)
        for end in ends:
            end()
    return status


@contextlib.contextmanager
def _written_anew(stream: TextIO) -> Iterator[TextIO]:
    """Yield another stream to the file of a stream.

    A signal may have come while the script was writing to it: Python refuses to write to it then.
    """
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError, AttributeError):  # a notebook's, or one of the script's own
        yield stream
        return
    with open(descriptor, "w", encoding=stream.encoding, errors=stream.errors) as again:
        yield again


def _ran(
    runner: Callable[[], Any], exits: Callable[[int], int]
) -> tuple[BaseException | None, int]:
    """Run a script; return what has ended it, and its status.

    Args:
        runner: runs it.
        exits: what `os._exit` does first.
    """
    from gradcheck_suite.auditing.stopping import StoppedOnViolation

    # the script sees Ctrl-C as under Python: the suite's own handler, which counts, would be found
    # by it
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with exit_status.ends_with(exits):
            runner()
    except SystemExit as stop:
        return stop, _status(stop)
    except KeyboardInterrupt as stop:
        return stop, exit_status.INTERRUPTED
    # `-x` has ended the script, which has not failed by itself
    except StoppedOnViolation as stop:
        return stop, 0
    except BaseException as error:
        raised = error
    else:
        return None, 0
    finally:
        signal.signal(signal.SIGINT, previous)
    # not while it is handled: what a hook raises would have it as its context
    return raised, _tell_of(raised)


def _finish(
    arguments: list[str], output: CommandOutput, result: Result, status: int, hint: str
) -> int:
    """Print and write the result; return the exit status, also if a file cannot be written.

    Args:
        arguments: of the script.
        output: where the result goes.
        result: of the audit.
        status: of the script.
        hint: what helps where the script could not import something.
    """
    # the rank that collects the steps prints and records
    if result.is_another_ranks:
        return status
    options = output.options
    result = result.accepting(options.baseline)
    stale = no_longer_found(options.baseline, [result])
    lines = result_lines(result, shown=True)
    with contextlib.suppress(OSError, ValueError):  # a script may close its standard error
        say(lines[:1] if options.quiet else ["", *lines], sys.stderr)
    about = environment.environment()
    found = [replace(v, source=places_source(v.places, output.folder)) for v in result.violations]
    output.deliver(
        PROGRAM, [result], about, lambda: page_of(found, result.loop, lines), stale, sys.stderr
    )
    violations = [{**violation.to_json(), "source": violation.source} for violation in found]
    data = {**result.to_json(), "arguments": arguments, "violations": violations}
    exit_status.attempt(
        PROGRAM, lambda: append_record(options.reports, KINDS["audit"], data, environment=about)
    )
    # before the script's own status: a script that fails later has trained on wrong gradients first
    if result.violations or stale or result.failing:
        return exit_status.VIOLATED
    if result.unjudged is not None and not result.is_unjudged_accepted:
        # if the script failed before it trained, it may well train otherwise
        early = status and not result.steps
        why = (
            f"the script ended with status {status} before its first step{hint}"
            if early
            else result.unjudged
        )
        failed = exit_status.fail(PROGRAM, f"{result.loop}: unjudged: {why}")
        return status or failed
    if status:
        return status
    return exit_status.status_of(violated=False, findings=bool(result.disagreements))


def _python_filters() -> list[Any]:
    """Return the filters that a fresh interpreter has."""
    # in the order of CPython's `_Py_InitializeWarnings`; there is no call that returns it
    kept: list[Any] = [
        ("default", None, DeprecationWarning, "__main__", 0),
        ("ignore", None, DeprecationWarning, None, 0),
        ("ignore", None, PendingDeprecationWarning, None, 0),
        ("ignore", None, ImportWarning, None, 0),
        ("ignore", None, ResourceWarning, None, 0),
    ]
    return kept


def _status(stop: SystemExit) -> int:
    """Return the status of `sys.exit`, and print its message as Python does."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1


def _tell_of(error: BaseException) -> int:
    """Print the traceback from the script's first frame on, as `python SCRIPT` does, or call the
    script's own `sys.excepthook`; return the exit status.
    """
    own: TracebackType | None = _of_the_script(error)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    hook = sys.excepthook
    # the default hook prints all frames, with those of the suite
    if hook is sys.__excepthook__:
        traceback.print_exception(type(error), error, own)
        return 1
    try:
        hook(type(error), error, own)
    except SystemExit as stop:
        return _status(stop)
    except BaseException as another:  # what Python prints then
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(type(another), another, _of_the_script(another))
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(type(error), error, own)
    return 1


def _of_the_script(error: BaseException) -> TracebackType | None:
    own: TracebackType | None = error.__traceback__
    # the outermost frames are the suite's, which ran the script; those further inside stay
    while own is not None and own.tb_frame.f_globals.get("__name__", "").startswith(
        "gradcheck_suite"
    ):
        own = own.tb_next
    return own
