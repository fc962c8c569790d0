"""The command line: parses arguments, prints results, returns an exit status.

Must not judge, measure or explain anything itself. A command is one row of a program's table, and a
module with `add_arguments(parser)` and `run(arguments) -> int`, which is imported when the command
is asked for.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.arguments import BadUsageError, Parser, set_python_path, top_parser
from gradcheck_suite.cli.exit_status import (
    BAD_USAGE,
    HOLDS,
    JUDGED,
    VIOLATED,
    ends_with,
    noted_interrupts,
)
from gradcheck_suite.core.text import aligned
from gradcheck_suite.errors import UsageError


@dataclass(frozen=True)
class Command:
    """A command of a program.

    Attributes:
        summary: a line of the program's help.
        module: that has the command; the first paragraph of its docstring begins the command's
            help.
        examples: of the command and its arguments, at the end of its help.
        meanings: of its exit statuses, beside those that every command has.
        passes_on: whether what follows its first positional argument belongs to what it runs.
    """

    summary: str
    module: str
    examples: tuple[str, ...]
    meanings: Mapping[int, str]
    passes_on: bool = False


@dataclass(frozen=True)
class CommandLine:
    """A program with commands.

    Attributes:
        name: as it is called, such as `"gradcheck-suite"`.
        about: what its help says first.
        commands: by name.
    """

    name: str
    about: str
    commands: Mapping[str, Command]

    def load(self, command: str) -> Any:
        """Return the module of a command."""
        return import_module(self.commands[command].module)

    def parser(self, command: str) -> Parser:
        """Return the parser of a command."""
        module = self.load(command)
        about = (module.__doc__ or "").partition("\n\n")[0]
        parser = Parser(
            prog=f"{self.name} {command}", description=about, epilog=self.epilog(command)
        )
        module.add_arguments(parser)
        return parser

    def epilog(self, command: str) -> str:
        """Return the end of a command's help: examples, and what its exit statuses mean."""
        row = self.commands[command]
        statuses = aligned(
            (str(status), meaning)
            for status, meaning in exit_status.status_meanings(row.meanings).items()
        )
        examples = (f"  {self.name} {line}" for line in row.examples)
        return "\n".join(
            ["examples:", *examples, "", "exit status:", *(f"  {line}" for line in statuses)]
        )


PROGRAM = CommandLine(
    "gradcheck-suite",
    "Does this training loop hand its optimizer the gradient it should?",
    {
        "verify": Command(
            "verify loops on random cases; without LOOP, the built-in ones",
            "gradcheck_suite.cli.verify",
            (
                "verify                   every built-in reset mode",
                "verify my_loop.py:train  a loop of your own, on random models",
                "verify my_loop.py:train --problem my_model.py:PROBLEM",
                "verify my_loop.py:train -x -n 50 --assume equal-micro-batches",
            ),
            JUDGED,
        ),
        "replay": Command(
            "run one stored case again",
            "gradcheck_suite.cli.replay",
            (
                "replay reports/counterexamples/NAME.json",
                "replay reports/counterexamples/NAME.json my_loop.py:fixed",
            ),
            {**JUDGED, HOLDS: "the case holds", VIOLATED: "the case is violated"},
        ),
        "audit": Command(
            "run a training script as it is, and judge its optimizer steps",
            "gradcheck_suite.cli.audit",
            (
                "audit train.py --epochs 1  --epochs 1 is passed to the script",
                "audit -n 20 -x --html audit.html train.py",
                "audit -m package.train",
            ),
            {
                **JUDGED,
                HOLDS: "everything holds (or the script's own status, where that is not 0)",
                VIOLATED: "a step of the script is violated",
            },
            passes_on=True,
        ),
        "port": Command(
            "compare a JAX port with its torch original: outputs and gradients",
            "gradcheck_suite.cli.port",
            ("port my_port.py:pair", "port my_port.py:pair --map --json port.json"),
            {HOLDS: "the two are the same in all that was compared", VIOLATED: "they differ"},
        ),
        "trainers": Command(
            "ask every installed trainer on which plans it holds",
            "gradcheck_suite.cli.trainers",
            ("trainers --list", "trainers accelerate -n 50 --exit-zero"),
            {**JUDGED, VIOLATED: "some trainer is violated (0 with --exit-zero)"},
        ),
        "campaign": Command(
            "run verify or trainers in shards: several processes, resumable",
            "gradcheck_suite.cli.campaign",
            ("campaign --workers 2 verify my_loop.py:train --examples 2000",),
            JUDGED,
            passes_on=True,
        ),
        "report": Command(
            "build one page from the records: HTML, Markdown and JSON",
            "gradcheck_suite.cli.report",
            ("report", "report --compare OLD NEW"),
            {
                HOLDS: "the page is written, or the runs are compared",
                VIOLATED: "the same, without records or cases that are damaged",
            },
        ),
        "doctor": Command(
            "say what is installed and what can run here",
            "gradcheck_suite.cli.doctor",
            ("doctor",),
            {
                HOLDS: "verify and replay can run here",
                VIOLATED: "they cannot",
                BAD_USAGE: "bad usage",
            },
        ),
    },
)


def run(argv: Sequence[str], program: CommandLine = PROGRAM) -> int:
    """Run one command line and return its exit status.

    Every exception becomes a status and a message.

    Args:
        argv: the command and its arguments.
        program: that has the command.
    """
    called = program.name
    parsed = False
    try:
        with warnings.catch_warnings():
            # `python -W` or `PYTHONWARNINGS` asks for the warnings: they are shown then
            if not sys.warnoptions:
                # torch and jax warn about their own internals, which says nothing about a loop
                warnings.simplefilter("ignore")
            command, rest = _command(argv, program)
            called = f"{program.name} {command}"
            # its module is imported now, and no other command's: `--help` of one stays quick
            parser = program.parser(command)
            # what follows a script that is run belongs to the script
            passes_on = program.commands[command].passes_on
            arguments = parser.parse_args(rest) if passes_on else parser.parse_intermixed_args(rest)
            parsed = True
            # after parsing: `--help` works with a wrong table
            set_python_path()
            with (
                noted_interrupts(),
                ends_with(lambda status: _ended(called, f"os._exit({status})")),
            ):
                status: int = program.load(command).run(arguments)
            if (fault := _output_fault()) is None:
                return status
            # a verdict that could not be printed is not a success, and a violation stays one
            status = status or exit_status.BAD_USAGE
            return _fail(called, fault, status) if fault else status
    except (BadUsageError, UsageError) as error:
        return _fail(called, str(error))
    except SystemExit as error:
        # argparse ends by `SystemExit` itself; after it, only the code under test does
        if parsed:
            return _ended(called, f"sys.exit({error.code!r})")
        # --help and --version
        return error.code if isinstance(error.code, int) else exit_status.HOLDS
    except KeyboardInterrupt:
        return _fail(called, "interrupted", exit_status.INTERRUPTED)
    except BrokenPipeError:
        _output_fault()
        return exit_status.BAD_USAGE
    except Exception as error:
        return _failed_by(error, called)


def _failed_by(error: Exception, called: str) -> int:
    """Say why a command raised: the output takes no more, or there is a bug in the suite."""
    # asked of the output itself, since an `OSError` may come from anything else in the command
    if isinstance(error, OSError) and (fault := _output_fault("\n")) is not None:
        return _fail(called, fault)
    if isinstance(error, ValueError) and sys.stdout.closed:
        return _fail(
            called, "the code under test has closed standard output, where the verdict goes"
        )
    traceback.print_exc()
    return _fail(called, "this is a bug in gradcheck-suite; please report it", exit_status.BUG)


def _command(argv: Sequence[str], program: CommandLine) -> tuple[str, list[str]]:
    if argv and argv[0] in program.commands:
        return argv[0], list(argv[1:])
    parser = top_parser(
        program.name, {name: command.summary for name, command in program.commands.items()}
    )
    parser.description = program.about
    # it ends by itself at `--help` and `--version`, and refuses a misspelt command
    parser.parse_args(list(argv))
    raise BadUsageError(f"expected a command, one of {', '.join(program.commands)}")


def _ended(program: str, how: str) -> int:
    return _fail(program, f"the code under test ended the program with {how}: return instead")


def _fail(program: str, message: str, status: int = exit_status.BAD_USAGE) -> int:
    """Print one line on standard error and return the status, also where one of the outputs takes
    no more.
    """
    _output_fault()
    return exit_status.fail(program, message, status)


def _output_fault(more: str = "") -> str | None:
    """Return why standard output took not all.

    None where it did, or where the code under test has closed it. Nothing, `""`, is to be said
    where the reader closed the pipe, as `| head` does.

    What it did not take is dropped: Python would try again at its exit, complain, and end with
    status 120.

    Args:
        more: written first, where a write has failed and left nothing to flush.
    """
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return ""
        return f"standard output cannot be written ({error.strerror or error}): send it elsewhere"
    except ValueError:  # closed
        return None
    return None
