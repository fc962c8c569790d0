"""The studies that compute rows, print them and record them: atlas, steps, calibrate, claims and trainers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.loading import note_untested_trainers
from gradcheck_suite.cli.progress import Progress
from gradcheck_suite.core.case import DTYPES
from gradcheck_suite.core.contract import is_jax
from gradcheck_suite.core.options import VerifyOptions
from gradcheck_suite.core.records import append_record, write_document
from gradcheck_suite.core.text import aligned, of_bound
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.loops.trainers import PACKAGES, TRAINERS, Trainer
from gradcheck_suite.run import environment

if TYPE_CHECKING:
    from studies.tally import Curve, Tally


@dataclass(frozen=True)
class Study:
    """A command.

    Attributes:
        about: what its help says first.
        add_arguments: adds its arguments to a parser.
        run: does the work, prints and records it; returns the exit status.
    """

    about: str
    add_arguments: Callable[[parsers.Parser], None]
    run: Callable[[Namespace], int]


def _prepare(arguments: Namespace) -> None:
    """Refuse what cannot run or be written here, then import torch and JAX."""
    environment.expect_main_job()
    parsers.expect_writable(arguments.reports, json=getattr(arguments, "json", None))
    environment.prepare()


def _print_lines(lines: Iterable[str]) -> None:
    print("\n".join(lines), flush=True)


def _record_rows(arguments: Namespace, kind: str, data: Mapping[str, Any]) -> None:
    about = environment.environment()
    append_record(arguments.reports, kind, data, environment=about)
    write_document(arguments.json, about, data)


def _atlas_arguments(parser: parsers.Parser) -> None:
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help="such as relu; without one, all of them")
    parsers.add_rows(parser)


def _atlas(arguments: Namespace) -> int:
    """Compute, print and record the rows. That torch and JAX differ at a point is no failure."""
    _prepare(arguments)
    from gradcheck_suite.run.instance import checked_device
    from studies import atlas
    from studies.atlas_points import POINTS

    checked_device(arguments.device)
    known = dict.fromkeys(point.operation for point in POINTS)
    if unknown := [name for name in arguments.operations if name not in known]:
        near = get_close_matches(unknown[0], known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`gradcheck-suite atlas` prints all of them"
        raise UsageError(f"expected an operation of the atlas, got {unknown[0]!r}: {hint}")
    wanted = set(arguments.operations or known)
    rows = atlas.run([point for point in POINTS if point.operation in wanted], device=arguments.device)
    table = []
    for (operation, at), of_point in groupby(rows, lambda row: (row.point.operation, row.point.at)):
        shown = ""
        for row in of_point:
            # a further dtype has a line of its own where it comes out otherwise
            words = f"{'agree ' if row.agree else 'differ'}  {row.convention}"
            if words != shown:
                table.append((f"{operation}, {at}" if not shown else f"    in {row.dtype}", words))
            shown = shown or words
    _print_lines(aligned(table))
    differ = len({(row.point.operation, row.point.at) for row in rows if not row.agree})
    count = len(rows) // len(atlas.DTYPES)
    print(f"points: {count}, each in {' and '.join(atlas.DTYPES)}; torch and JAX differ at {differ}")
    _record_rows(arguments, "atlas", {"rows": [row.to_json() for row in rows]})
    return exit_status.HOLDS


def _steps_arguments(parser: parsers.Parser) -> None:
    parser.add_argument("optimizers", nargs="*", metavar="OPTIMIZER", help="such as adam; without one, all of them")
    parsers.add_number(parser, "--seeds", 3, "runs of steps for each optimizer's settings, implementation and dtype")
    parsers.add_rows(parser)


def _steps(arguments: Namespace) -> int:
    """Compute, print and record the rows; a step that is not within its bound is a finding."""
    environment.expect_main_job()
    if find_spec("optax") is None:
        raise CannotRunHere("the command steps needs optax: pip install 'gradcheck-suite[steps]'")
    _prepare(arguments)
    from gradcheck_suite.run.instance import checked_device
    from studies.optimizer_steps import compare
    from studies.optimizers import COUNTERPARTS

    checked_device(arguments.device)
    if unknown := [name for name in arguments.optimizers if name not in COUNTERPARTS]:
        raise UsageError(f"optimizer must be one of {', '.join(COUNTERPARTS)}; got {unknown[0]!r}")
    rows = []
    for name in arguments.optimizers or COUNTERPARTS:
        row = compare(COUNTERPARTS[name], range(arguments.seeds), arguments.device)
        rows.append(row)
        worst = ", ".join(f"{of_bound(ratio)} in {dtype}" for dtype, ratio in row.ratios.items())
        verdict = f"{'agrees' if row.agree else 'DIFFERS'}, {row.cases} cases, worst error {worst}"
        outside = [f"not compared: {row.counterpart.outside}"] if row.counterpart.outside else []
        below = (f"optax: {row.counterpart.optax}", *row.counterpart.differs, *outside)
        _print_lines([f"{row.counterpart.torch}  {verdict}", *(f"    {line}" for line in below)])
    apart = sum(not row.agree for row in rows)
    print(f"optimizers: {len(rows)}; steps of torch and optax differ by more than rounding in {apart}")
    _record_rows(arguments, "step", {"device": arguments.device, "rows": [row.to_json() for row in rows]})
    return exit_status.status_of(violated=False, findings=apart > 0)


DEFAULT_CHECKS, DEFAULT_PLANTED = 2000, 25


def calibrate_arguments(parser: parsers.Parser) -> None:
    """Add the arguments of `calibrate`."""
    natural = parsers.natural
    parsers.add_number(parser, "--checks", DEFAULT_CHECKS, "checks of sound loops, in all dtypes", natural)
    parsers.add_number(parser, "--planted", DEFAULT_PLANTED, "cases in each dtype that errors are planted in", natural)
    parsers.add_number(parser, "--seed", 0, "of the cases", parsers.seed, "S")
    parser.add_argument(
        "--dtypes",
        type=parsers.one_of(DTYPES),
        nargs="+",
        default=list(DTYPES),
        metavar="DTYPE",
        help=f"of {', '.join(DTYPES)}; all of them without this",
    )
    parsers.add_reports(parser, "where the record goes")


def _calibrate(arguments: Namespace) -> int:
    """Run the campaign, print its figures and record them."""
    _prepare(arguments)
    from studies import calibration, tally

    dtypes = tuple(dict.fromkeys(arguments.dtypes))
    settings = calibration.Settings(arguments.checks, arguments.planted, arguments.seed, dtypes)
    print(
        f"{arguments.checks:,} checks of sound loops and errors planted in {arguments.planted:,} cases per dtype, "
        f"seed {arguments.seed}, {', '.join(dtypes)}",
        flush=True,
    )
    tallies: dict[str, Tally] = {}
    curves: dict[str, Curve] = {}
    interrupted = False
    try:
        with Progress(examples=arguments.checks) as progress:
            progress.start("checks of sound loops")
            calibration.count_alarms(settings, progress.count, tallies)
        with Progress(examples=arguments.planted * len(dtypes)) as progress:
            progress.start("cases with planted errors")
            calibration.trace_curves(settings, progress.count, curves)
    except KeyboardInterrupt:
        interrupted = True
    data = calibration.record(settings, tallies, curves)
    _print_lines(tally.lines(data))
    if interrupted:
        print("interrupted, and not recorded: gradcheck-suite campaign calibrate goes on where it was stopped")
    else:
        append_record(arguments.reports, "calibration", data, environment=environment.environment())
    findings = any(counts.findings for counts in tallies.values())
    return exit_status.status_of(violated=bool(tally.false_alarms(data)), findings=findings, interrupted=interrupted)


def _claims_arguments(parser: parsers.Parser) -> None:
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="such as C2.1; without one, all, and the loops")
    parsers.add_number(parser, "--examples", 200, "cases per printed loop", metavar=None)
    parsers.add_reports(parser, "each verdict is recorded in DIR/records")


def _claims(arguments: Namespace) -> int:
    """Test the claims that the arguments name; print and record each verdict. A refuted claim is no failure."""
    _prepare(arguments)
    from studies.claims import CLAIMS, PRINTED, SOURCES, verify_printed
    from studies.step_times import device_info

    if unknown := [name for name in arguments.claims if name not in CLAIMS]:
        raise UsageError(f"expected the number of a claim, one of {', '.join(CLAIMS)}; got {unknown[0]!r}")
    about = environment.environment()
    for number in arguments.claims or CLAIMS:
        claim = CLAIMS[number]
        finding = claim.check()
        condition = [f"      true where: {finding.condition}"] if finding.condition else []
        said = f"      {finding.verdict}: {finding.sentence}"
        _print_lines([f"{number:<5} {claim.text}", f"      judged: {claim.how}", said, *condition])
        data = {
            "number": number,
            "source": SOURCES[int(number[1])],
            "text": claim.text,
            "how": claim.how,
            **{name: getattr(finding, name) for name in ("verdict", "sentence", "condition")},
            "figures": dict(finding.figures),
            "counterexample": finding.counterexample,
        }
        append_record(arguments.reports, "claim", data, environment=about)
        for row in finding.rows:
            made_on = {**about, "device": device_info(str(row["device"]))}
            append_record(arguments.reports, "benchmark", row, environment=made_on)
    unexpected = False
    for printed in PRINTED if not arguments.claims else ():
        result = verify_printed(printed, examples=arguments.examples)
        data = result.to_json()
        said = f"without assumptions: {data['bare']}; under what it relies on: {data['within']}"
        _print_lines([f"loop {printed.number}  {said}"])
        unexpected |= not result.as_expected
        append_record(arguments.reports, "claim", data, environment=about)
    return exit_status.VIOLATED if unexpected else exit_status.HOLDS


def _trainers_arguments(parser: parsers.Parser) -> None:
    parser.add_argument(
        "trainers",
        nargs="*",
        metavar="LOOP",
        help="names of trainers, or loops of one's own as FILE.py:NAME or package.module:NAME; without one, all "
        "trainers that are installed",
    )
    parsers.add_problem(parser)
    parser.add_argument(
        "--heads",
        action="store_true",
        help="ask hf-trainer alone, about models of transformers with different heads",
    )
    parser.add_argument("--list", action="store_true", help="print the trainers and stop")
    parsers.add_number(parser, "--examples", 20, "cases drawn for each question")
    parser.add_argument("--seed", type=parsers.seed, default=0, metavar="S", help="default %(default)s")
    parser.add_argument(
        "--exit-zero", action="store_true", help="status 0 also where a trainer is violated: that is an answer too"
    )
    parsers.add_json(parser, "the answers")
    parsers.add_reports(parser, "each answer is recorded in DIR/records")


def _trainers(arguments: Namespace) -> int:
    """Ask the trainers that the arguments name."""
    if arguments.list:
        _print_lines(aligned((name, f"{t.about} [{t.status}]") for name, t in TRAINERS.items()))
        return exit_status.HOLDS
    environment.expect_main_job()
    trainers = _chosen(_models_only(arguments) if arguments.heads else arguments.trainers)
    _prepare(arguments)
    note_untested_trainers(trainer.name for trainer in trainers)
    from gradcheck_suite.cli.loading import libraries_of, resolve_problem
    from gradcheck_suite.cli.verdict_text import subjects
    from gradcheck_suite.loops.trainers.trainer import model_questions, on_problem
    from studies.trainers import ask, closing, line

    problem = None if arguments.problem is None else resolve_problem(arguments.problem)
    libraries = [name for trainer in trainers if not trainer.requires for name in libraries_of(trainer.loop)]
    about = environment.environment((*PACKAGES, *libraries))
    about_what = subjects((trainer.name for trainer in trainers), about["versions"], libraries)
    dtypes = {is_jax(trainer.loop): VerifyOptions().of(trainer.loop).dtype for trainer in trainers}
    on = " and ".join(f"{dtype} on cpu{' of JAX' * (of_jax and len(dtypes) > 1)}" for of_jax, dtype in dtypes.items())
    asked = f"up to {arguments.examples} cases for each question, seed {arguments.seed}, {on}"
    _print_lines([f"{about_what}: {asked}"])
    answers = []
    try:
        for trainer in trainers:
            own = trainer.questions if problem is None else on_problem(arguments.problem)
            for question in model_questions() if arguments.heads else own:
                answer = ask(trainer, question, examples=arguments.examples, seed=arguments.seed, problem=problem)
                if answer.result is not None and answer.result.interrupted:
                    raise KeyboardInterrupt
                answers.append(answer)
                _print_lines([line(answer)])
                append_record(arguments.reports, "trainer", answer.to_json(), environment=about)
    finally:
        if answers:
            write_document(arguments.json, about, {"answers": [answer.to_json() for answer in answers]})
    _print_lines(closing(answers))
    if arguments.exit_zero:
        return exit_status.HOLDS
    if all(answer.result is None for answer in answers):
        raise CannotRunHere("no question could be asked here: the lines above say what is missing")
    findings = any(answer.result is not None and answer.result.findings for answer in answers)
    return exit_status.status_of(violated=any(answer.violated for answer in answers), findings=findings)


def _models_only(arguments: Namespace) -> list[str]:
    if arguments.problem is not None:
        raise UsageError("--heads asks about models of its own: leave out --problem, or leave out --heads")
    if others := [name for name in arguments.trainers if name != "hf-trainer"]:
        raise UsageError(f"--heads asks hf-trainer alone; got {others[0]!r}: leave it out, or leave out --heads")
    return ["hf-trainer"]


def _named(name: str) -> Trainer:
    from gradcheck_suite.cli.loading import resolve_loop

    if name in TRAINERS:
        return TRAINERS[name]
    if ":" in name:
        return Trainer(name, resolve_loop(name), "a loop of one's own")
    raise UsageError(
        f"expected a loop of one's own as FILE.py:NAME, or the name of a trainer, one of {', '.join(TRAINERS)}; "
        f"got {name!r}"
    )


def _chosen(names: list[str]) -> list[Trainer]:
    chosen = [_named(name) for name in names]
    if lacking := [trainer.missing for trainer in chosen if trainer.missing]:
        raise CannotRunHere(lacking[0])
    installed = chosen or [trainer for trainer in TRAINERS.values() if trainer.missing is None]
    if not installed:
        raise CannotRunHere(f"no trainer is installed: pip install {' '.join(PACKAGES)}, or one of them")
    return installed


STUDIES = {
    "atlas": Study(
        "Print where torch and JAX choose a derivative, at kinks, ties and limits, and which derivative each chooses.",
        _atlas_arguments, _atlas,
    ),
    "steps": Study(
        "Take the steps of torch's optimizers in optax, and print where formulas differ and how far the steps are "
        "apart.",
        _steps_arguments, _steps,
    ),
    "calibrate": Study(
        "Count how often sound loops are blamed, and how small a planted error is found, by the suite and by other "
        "rules.",
        calibrate_arguments, _calibrate,
    ),
    "claims": Study(
        "Put the claims about gradient zeroing to the test, and verify the loops that their sources print.",
        _claims_arguments, _claims,
    ),
    "trainers": Study(
        "Ask trainers, or loops of one's own, on which plans they hold; print and record the answers.",
        _trainers_arguments, _trainers,
    ),
}  # fmt: skip
