"""Run one stored case again: a counterexample's file, a bare case, or a `--json` result with one
violation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.loading import (
    expect_found,
    note_untested_trainers,
    resolve_loop,
    resolve_problem,
)
from gradcheck_suite.cli.waiting import IMPORTS, waiting
from gradcheck_suite.core.contract import Loop, Problem, is_jax
from gradcheck_suite.core.counterexamples import StoredCase, read_case_file
from gradcheck_suite.core.options import VerifyOptions, options_of
from gradcheck_suite.core.source_lines import loop_places
from gradcheck_suite.core.text import of_bound, say
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run import environment
from gradcheck_suite.run.private_names import expect_present

_T = TypeVar("_T")


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "case",
        type=Path,
        metavar="CASE.json",
        help="the file that holds the case",
    )
    parser.add_argument(
        "loop",
        nargs="?",
        metavar="LOOP",
        help=(
            "FILE.py:NAME, package.module:NAME or a built-in's name (default: the loop that the"
            " file names)"
        ),
    )
    parsers.add_framework(parser, ("torch", "jax"))
    parsers.add_problem(parser)
    for one in options_of(VerifyOptions):
        # the case has all other options of `verify` in itself: its dtype, its device, its plan
        if one.name in ("autocast", "time_limit_s", "jax"):
            parsers.add_option(parser, one, one.default)


def run(arguments: argparse.Namespace) -> int:
    """Run the stored case and print what it says."""
    stored = read_case_file(arguments.case)
    name = arguments.loop or stored.loop
    if name is None:
        raise UsageError(
            f"{arguments.case} holds a bare case, which names no loop: pass LOOP after it"
        )
    environment.expect_main_job()
    if arguments.loop is not None:
        expect_found(arguments.loop, is_loop=True)
    if arguments.problem is not None:
        expect_found(arguments.problem)
    with waiting(IMPORTS):
        environment.prepare()
        expect_present("verify")
    loop, problem = _subjects(arguments, stored, name)
    note_untested_trainers([name])

    from gradcheck_suite.catalogue.description import describe_case, with_case_described
    from gradcheck_suite.reference.evaluation import evaluated_by
    from gradcheck_suite.verification.ahead import checked_programs
    from gradcheck_suite.verification.check import check
    from gradcheck_suite.verification.second_opinion import second_opinion

    case = stored.case
    with waiting(f"running {name} on case {case.digest}"), evaluated_by(arguments.jax):
        verdict = check(
            loop,
            case,
            problem=problem,
            time_limit_s=arguments.time_limit_s,
            autocast=arguments.autocast,
            assumes=stored.assumes,
        )
    if verdict.skipped:
        raise CannotRunHere(f"case {case.digest} cannot be judged here: {verdict.skipped}")
    with waiting("XLA checks JAX's derivatives as numpy evaluates them"):
        checks = checked_programs()
    findings = [verdict.finding] if verdict.finding else []
    lines = []
    # a generated problem was judged against JAX; of a user's torch model JAX knows nothing until it
    # is translated, which is the second opinion
    if problem is not None and not is_jax(loop):
        with waiting("asking JAX for a second opinion"):
            opinion = second_opinion([case], problem)
        findings = [*opinion.findings]
        lines = [opinion.summary()]
    findings += checks.differences
    lines += [f"finding, for which no loop is to blame: {finding}" for finding in findings]
    if verdict.violation is not None:
        places = loop_places(loop, verdict.violation)
        shown = replace(with_case_described(verdict.violation), **places)
        lines += shown.words
    else:
        # where torch and JAX disagree there is no error of the loop to tell
        lines += [] if verdict.finding else [f"worst error {of_bound(verdict.ratio)}"]
        lines += describe_case(case)
    first = f"{name}  {'holds' if verdict.holds else 'VIOLATED'}  on case {case.digest}"
    say([first, *(f"    {line}".rstrip() for line in lines)])
    return exit_status.status_of(violated=not verdict.holds, findings=bool(findings))


def _subjects(
    arguments: argparse.Namespace, stored: StoredCase, name: str
) -> tuple[Loop, Problem | None]:
    asked = arguments.problem
    named = stored.case.problem
    if asked is not None and not isinstance(named, str):
        raise UsageError(
            f"--problem {asked}: case {stored.case.digest} has its own generated problem; drop"
            " --problem"
        )

    def resolve(text: str) -> Loop:
        return resolve_loop(text, arguments.framework)

    loop = _named_by(arguments.case, name, resolve) if arguments.loop is None else resolve(name)
    if not isinstance(named, str):
        return loop, None
    return loop, (
        _named_by(arguments.case, named, resolve_problem)
        if asked is None
        else resolve_problem(asked)
    )


def _named_by(case: Path, name: str, resolve: Callable[[str], _T]) -> _T:
    """Resolve a name from the case's file; if that fails, say how to pass another one."""
    try:
        return resolve(name)
    except UsageError as error:
        raise UsageError(
            f"{case} names {name}, but {error}; pass another LOOP or --problem"
        ) from None
