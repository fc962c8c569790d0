"""Ask trainers, or loops of one's own, on which plans they hold; print and record the answers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.loading import (
    libraries_of,
    note_untested_trainers,
    resolve_loop,
    resolve_problem,
)
from gradcheck_suite.cli.progress import Progress
from gradcheck_suite.cli.waiting import IMPORTS, waiting
from gradcheck_suite.core.contract import Problem, is_jax
from gradcheck_suite.core.options import VerifyOptions, options_of
from gradcheck_suite.core.records import KINDS, append_record, write_document
from gradcheck_suite.core.text import aligned, say
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.loops.trainers import PACKAGES, TRAINERS, Trainer
from gradcheck_suite.run import environment
from gradcheck_suite.run.private_names import expect_present

if TYPE_CHECKING:
    from gradcheck_suite.loops.trainers.trainer import Question
    from gradcheck_suite.verification.trainers import Answer


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "trainers",
        nargs="*",
        metavar="LOOP",
        help=(
            "names of trainers, or loops of your own as FILE.py:NAME or package.module:NAME;"
            " without LOOP, all trainers that are installed"
        ),
    )
    parsers.add_problem(parser)
    parser.add_argument(
        "--heads",
        action="store_true",
        help="ask hf-trainer alone, about models of transformers with different heads",
    )
    parser.add_argument("--list", action="store_true", help="print the trainers and stop")
    parsers.add_number(
        parser,
        "--examples",
        20,
        "cases drawn for each question",
        short="-n",
    )
    parser.add_argument(
        "--seed", type=parsers.seed, default=0, metavar="S", help="default %(default)s"
    )
    parser.add_argument(
        "--exit-zero",
        action="store_true",
        help="status 0 also where a trainer is violated: that is an answer too",
    )
    for one in options_of(VerifyOptions):
        if one.name == "jax":
            parsers.add_option(parser, one, one.default)
    parsers.add_quiet(parser, "print each answer in one line, and no more")
    parsers.add_json(parser, "the answers")
    parsers.add_reports(parser, "each answer is recorded in DIR/records")


def run(arguments: Namespace) -> int:
    """Ask the trainers that the arguments name."""
    if arguments.list:
        rows = ((name, f"{trainer.about} [{trainer.status}]") for name, trainer in TRAINERS.items())
        say(aligned(rows))
        return exit_status.HOLDS
    environment.expect_main_job()
    # before torch is imported: a name that does not exist is refused at once
    trainers = _chosen(_models_only(arguments) if arguments.heads else arguments.trainers)
    parsers.expect_writable(arguments.reports, json=arguments.json)
    with waiting(IMPORTS):
        environment.prepare()
        expect_present("verify")
    note_untested_trainers(trainer.name for trainer in trainers)
    from gradcheck_suite.cli.verify import subjects
    from gradcheck_suite.verification.trainers import closing

    problem = None if arguments.problem is None else resolve_problem(arguments.problem)
    # a trainer's packages are named anyway; of a user's loop the imports tell them
    own = [trainer.loop for trainer in trainers if not trainer.requires]
    libraries = list(chain.from_iterable(map(libraries_of, own)))
    about = environment.environment((*PACKAGES, *libraries))
    about_what = subjects((trainer.name for trainer in trainers), about["versions"], libraries)
    on = _devices(trainers)
    asked = f"up to {arguments.examples} cases for each question, seed {arguments.seed}, {on}"
    if not arguments.quiet:
        say([f"{about_what}: {asked}"])
    answers = _asked(arguments, trainers, problem, about)
    if not arguments.quiet:
        say(closing(answers))
    return exit_status.HOLDS if arguments.exit_zero else _status(answers)


def _questions(arguments: Namespace, trainer: Trainer) -> Iterable[Question]:
    from gradcheck_suite.loops.trainers.trainer import model_questions, on_problem

    if arguments.heads:
        return model_questions()
    return trainer.questions if arguments.problem is None else on_problem(arguments.problem)


def _asked(
    arguments: Namespace,
    trainers: Iterable[Trainer],
    problem: Problem | None,
    about: dict[str, Any],
) -> list[Answer]:
    """Ask each trainer each question, print and record the answers; keep them where one stops."""
    from gradcheck_suite.verification.trainers import ask, line

    answers: list[Answer] = []
    with Progress(examples=arguments.examples) as progress:
        try:
            for trainer in trainers:
                for question in _questions(arguments, trainer):
                    progress.start(f"{trainer.name}: {question.name}")
                    answer = ask(
                        trainer,
                        question,
                        examples=arguments.examples,
                        seed=arguments.seed,
                        problem=problem,
                        jax=arguments.jax,
                        progress=progress.advance,
                    )
                    progress.stop()
                    # half an answer is none: it is neither printed nor recorded
                    if answer.result is not None and answer.result.interrupted:
                        raise KeyboardInterrupt
                    answers.append(answer)
                    print(line(answer), flush=True)
                    append_record(
                        arguments.reports, KINDS["trainer"], answer.to_json(), environment=about
                    )
        finally:
            # the answers before an interrupt are the user's, after hours perhaps
            if answers:
                write_document(
                    arguments.json, about, {"answers": [answer.to_json() for answer in answers]}
                )
    return answers


def _devices(trainers: Iterable[Trainer]) -> str:
    """Return the dtype and device of the loops of torch and of JAX, in words."""
    dtypes = {is_jax(trainer.loop): VerifyOptions().of(trainer.loop).dtype for trainer in trainers}
    if len(dtypes) == 1:
        return f"{next(iter(dtypes.values()))} on cpu"
    return " and ".join(
        f"{dtype} on cpu of JAX" if of_jax else f"{dtype} on cpu"
        for of_jax, dtype in dtypes.items()
    )


def _status(answers: Sequence[Answer]) -> int:
    # a run that asked nothing must not end with the status of one that held
    if all(answer.result is None for answer in answers):
        raise CannotRunHere("no question could be asked here: the lines above say what is missing")
    return exit_status.status_of(
        violated=any(answer.violated for answer in answers),
        findings=any(answer.result and answer.result.findings for answer in answers),
    )


def _models_only(arguments: Namespace) -> list[str]:
    if arguments.problem is not None:
        raise UsageError(
            "--heads asks about models of its own: leave out --problem, or leave out --heads"
        )
    if others := [name for name in arguments.trainers if name != "hf-trainer"]:
        raise UsageError(
            f"--heads asks hf-trainer alone; got {others[0]!r}: leave it out, or leave out --heads"
        )
    return ["hf-trainer"]


def _named(name: str) -> Trainer:
    if name in TRAINERS:
        return TRAINERS[name]
    if ":" in name:
        return Trainer(name, resolve_loop(name), "a loop of one's own")
    raise UsageError(
        "expected a loop of one's own as FILE.py:NAME, or the name of a trainer, one of"
        f" {', '.join(TRAINERS)}; got {name!r}"
    )


def _chosen(names: list[str]) -> list[Trainer]:
    chosen = [_named(name) for name in names]
    if lacking := [trainer.missing for trainer in chosen if trainer.missing]:
        raise CannotRunHere(lacking[0])
    installed = chosen or [trainer for trainer in TRAINERS.values() if trainer.missing is None]
    if not installed:
        raise CannotRunHere(
            f"no trainer is installed: pip install {' '.join(PACKAGES)}, or one of them"
        )
    return installed
