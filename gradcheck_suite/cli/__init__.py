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
from importlib import import_module
from typing import Any

from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.arguments import BadUsageError, Parser, top_parser
from gradcheck_suite.cli.exit_status import noted_interrupts
from gradcheck_suite.errors import UsageError

PROGRAM = "gradcheck-suite"
COMMANDS = {
    "verify": "verify loops on random cases; without one, every built-in reset mode",
    "replay": "run one stored case again",
    "audit": "run a training script as it is, and judge every optimizer step of it",
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


def command_of(name: str) -> Any:
    """Return a command: what has its `add_arguments` and `run`, and `about` or a docstring."""
    if name in PLAIN:
        return import_module("gradcheck_suite.studies.commands.plain").STUDIES[name]
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
            parser = Parser(prog=program, description=about, epilog=exit_status.epilog(command))
            found.add_arguments(parser)
            # what follows a script that is run belongs to the script
            arguments = (
                parser.parse_args(rest) if command in ("audit", "campaign") else parser.parse_intermixed_args(rest)
            )
            parsed = True
            with noted_interrupts():
                status: int = found.run(arguments)
            sys.stdout.flush()
            return status
    except (BadUsageError, UsageError) as error:
        return _fail(program, str(error))
    except SystemExit as error:
        if parsed:
            return _fail(
                program, f"the code under test ended the program with sys.exit({error.code!r}): return instead"
            )
        return error.code if isinstance(error.code, int) else exit_status.HOLDS  # --help and --version
    except KeyboardInterrupt:
        return _fail(program, "interrupted", exit_status.INTERRUPTED)
    except BrokenPipeError:
        # the reader closed the pipe, as `| head` does: leave nothing that Python would flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_status.BAD_USAGE
    except Exception:
        traceback.print_exc()
        return _fail(program, "this is a bug in gradcheck-suite; please report it", exit_status.BUG)


def _command(argv: Sequence[str]) -> tuple[str, list[str]]:
    if argv and argv[0] in COMMANDS:
        return argv[0], list(argv[1:])
    parser = top_parser(PROGRAM, COMMANDS)
    parser.parse_args(list(argv))
    raise BadUsageError(f"expected a command, one of {', '.join(COMMANDS)}")


def _fail(program: str, message: str, status: int = exit_status.BAD_USAGE) -> int:
    sys.stdout.flush()
    line = " ".join(message.split())
    print(f"{program}: error: {line}", file=sys.stderr, flush=True)
    return status
