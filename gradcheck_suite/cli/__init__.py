"""The command line: parses arguments, prints results, returns an exit status.

Must not judge, measure or explain anything itself. Each command is a module with `add_arguments(parser)` and
`run(arguments) -> int`, or a record of `studies/commands/plain.py` with the same; a new command is one row in
`COMMANDS`. The commands of the studies are found by name alone.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.arguments import BadUsageError, Parser, top_parser
from gradcheck_suite.cli.exit_status import ends_with, noted_interrupts
from gradcheck_suite.core.text import aligned
from gradcheck_suite.errors import UsageError

PROGRAM = "gradcheck-suite"
COMMANDS = {
    "verify": "verify loops on random cases; without one, every built-in reset mode",
    "replay": "run one stored case again",
    "audit": "run a training script as it is, and judge its optimizer steps",
    "zoo": "run the known bugs and print which are found, after how many cases",
    "atlas": "print where torch and JAX choose different derivatives: kinks, ties, limits",
    "steps": "take the steps of torch's optimizers in optax, and print how far they are apart",
    "calibrate": "count false alarms on sound loops, and how small a planted error is found",
    "claims": "put the claims about gradient zeroing to the test",
    "trainers": "ask every installed trainer on which plans it holds",
    "campaign": "run verify, zoo, calibrate or trainers in shards: several processes, resumable",
    "report": "build one page from the records: HTML, Markdown and JSON",
    "doctor": "say what is installed and what can run here",
}
PLAIN, STUDIES = ("atlas", "steps", "calibrate", "claims", "trainers"), ("zoo", "campaign", "report")
"""The commands that are records of `studies/commands/plain.py`, and those whose modules stand beside it."""


EXAMPLES = {
    "verify": (
        "verify                                    every built-in reset mode",
        "verify my_loop.py:train                   a loop of your own, on random models",
        "verify my_loop.py:train --problem my_model.py:PROBLEM",
        "verify my_loop.py:train -x -n 50 --assume equal-micro-batches",
    ),
    "replay": ("replay reports/counterexamples/NAME.json", "replay reports/counterexamples/NAME.json my_loop.py:fixed"),
    "audit": (
        "audit train.py --epochs 1                 what follows the script belongs to it",
        "audit -n 20 -x --html audit.html train.py",
        "audit -m package.train",
    ),
    "zoo": ("zoo --list", "zoo mean-of-means --seeds 3"),
    "atlas": ("atlas relu abs",),
    "steps": ("steps adam --seeds 1",),
    "calibrate": ("calibrate --checks 200 --planted 5 --dtypes float64",),
    "claims": ("claims C2.1",),
    "trainers": ("trainers --list", "trainers accelerate --exit-zero"),
    "campaign": ("campaign --workers 2 verify my_loop.py:train --examples 2000",),
    "report": ("report", "report --compare OLD NEW"),
    "doctor": ("doctor",),
}
"""Command -> examples at the end of its help."""


def epilog(command: str) -> str:
    """Return the end of a command's help: examples, and what its exit statuses mean."""
    examples = (f"  {PROGRAM} {line}" for line in EXAMPLES[command])
    statuses = aligned((str(status), meaning) for status, meaning in exit_status.meanings(command).items())
    return "\n".join(["examples:", *examples, "", "exit status:", *(f"  {line}" for line in statuses)])


def command_of(name: str) -> Any:
    """Return a command: what has its `add_arguments` and `run`, and `about` or a docstring."""
    if name in PLAIN:
        return import_module("studies.commands.plain").STUDIES[name]
    return import_module(f"gradcheck_suite.{'studies.commands' if name in STUDIES else 'cli'}.{name}")


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit status; every exception becomes a status and a message."""
    program, parsed = PROGRAM, False
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                # torch and jax warn about their own internals, which says nothing about a loop
                warnings.simplefilter("ignore")
            command, rest = _command(argv)
            program = f"{PROGRAM} {command}"
            found = command_of(command)
            about = getattr(found, "about", found.__doc__)
            parser = Parser(prog=program, description=about, epilog=epilog(command))
            found.add_arguments(parser)
            # what follows a script that is run belongs to the script
            arguments = (
                parser.parse_args(rest) if command in ("audit", "campaign") else parser.parse_intermixed_args(rest)
            )
            parsed = True
            with noted_interrupts(), ends_with(lambda status: _ended(program, f"os._exit({status})")):
                status: int = found.run(arguments)
            if (fault := _output_fault()) is None:
                return status
            status = status or exit_status.BAD_USAGE
            return _fail(program, fault, status) if fault else status
    except (BadUsageError, UsageError) as error:
        return _fail(program, str(error))
    except SystemExit as error:
        if parsed:
            return _ended(program, f"sys.exit({error.code!r})")
        return error.code if isinstance(error.code, int) else exit_status.HOLDS  # --help and --version
    except KeyboardInterrupt:
        return _fail(program, "interrupted", exit_status.INTERRUPTED)
    except BrokenPipeError:
        _output_fault()
        return exit_status.BAD_USAGE
    except Exception as error:
        if isinstance(error, OSError) and (fault := _output_fault("\n")) is not None:
            return _fail(program, fault)
        if isinstance(error, ValueError) and sys.stdout.closed:
            return _fail(program, "the code under test has closed standard output, where the verdict goes")
        traceback.print_exc()
        return _fail(program, "this is a bug in gradcheck-suite; please report it", exit_status.BUG)


def _command(argv: Sequence[str]) -> tuple[str, list[str]]:
    if argv and argv[0] in COMMANDS:
        return argv[0], list(argv[1:])
    parser = top_parser(PROGRAM, COMMANDS)
    parser.parse_args(list(argv))
    raise BadUsageError(f"expected a command, one of {', '.join(COMMANDS)}")


def _ended(program: str, how: str) -> int:
    return _fail(program, f"the code under test ended the program with {how}: return instead")


def _fail(program: str, message: str, status: int = exit_status.BAD_USAGE) -> int:
    """Print one line on standard error and return the status, also where one of the outputs takes no more."""
    _output_fault()
    return exit_status.fail(program, message, status)


def _output_fault(more: str = "") -> str | None:
    """Return why standard output took not all; None where it did, or where the code under test has closed it.

    Nothing, `""`, is to be said where the reader closed the pipe, as `| head` does.

    What it did not take is dropped: Python would try again at its exit, complain, and end with status 120.

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
