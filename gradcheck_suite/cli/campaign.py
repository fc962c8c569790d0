"""Run verify or trainers in shards, on several processes or machines.

A run that is stopped goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from gradcheck_suite.cli import PROGRAM, CommandLine, exit_status
from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli.arguments import Parser, parsed, to_argv
from gradcheck_suite.cli.progress import Progress
from gradcheck_suite.cli.shards import (
    COULD_NOT_RUN,
    OUTPUT,
    Json,
    Shard,
    Shards,
    merge,
    run_locally,
    run_on_ray,
)
from gradcheck_suite.core import records
from gradcheck_suite.core.options import BY_FRAMEWORK, VerifyOptions
from gradcheck_suite.core.records import append_record, judge_digest, write_document
from gradcheck_suite.core.results import json_number
from gradcheck_suite.core.text import counted
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run import environment
from gradcheck_suite.run.environment import versions

FOLDER = "campaign"
"""Where the shards of unfinished campaigns are, within the reports folder."""
# smaller shards would spend more on starts and merging, and larger ones lose more when a run is
# stopped
CASES = 200
"""Cases of a shard of `verify`."""


@dataclass(frozen=True)
class CampaignKind:
    """A command that can be a campaign.

    Attributes:
        program: that has the command.
        cut: returns its shards, of its arguments.
        found: returns what these come to.
    """

    program: CommandLine
    cut: Callable[[argparse.Namespace], list[Shard]]
    found: Callable[[Campaign, Shards], CampaignResult]


@dataclass(frozen=True)
class Campaign:
    """A command, cut up.

    Attributes:
        kind: of the command.
        asked: the command's parsed arguments.
        shards: in order.
    """

    kind: CampaignKind
    asked: argparse.Namespace
    shards: tuple[Shard, ...]

    @property
    def key(self) -> str:
        """A digest of all that the shards' records depend on: the command lines, the judge and the
        versions.
        """
        # with another judge or another torch the old shards would be another campaign's
        parts = [list(map(str, self.shards)), judge_digest(), versions()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def cut_up(
    what: str,
    rest: Sequence[str],
    kinds: Mapping[str, CampaignKind],
    program: CommandLine = PROGRAM,
) -> Campaign:
    """Return a campaign of one command.

    Args:
        what: the command, a key of `kinds`.
        rest: the command's own arguments; it writes where the campaign says, so `--json` and
            `--reports` are refused.
        kinds: of campaigns.
        program: that has the command `campaign`.

    Raises:
        UsageError: a wrong argument.
    """
    kind = kinds[what]
    # the command's own parser: a wrong argument is refused here, and not by each of a thousand
    # shards
    parser = Parser(prog=f"{program.name} campaign {what}", add_help=False)
    kind.program.load(what).add_arguments(parser)
    asked = parser.parse_intermixed_args(list(rest))
    # looked for in the words, since the parsed value does not tell an option from the project's
    # default
    for option in ("--json", "--reports"):
        if any(argument == option or argument.startswith(f"{option}=") for argument in rest):
            raise UsageError(
                f"{option} stands before {what}: {program.name} campaign {option} PATH {what} ..."
            )
    if getattr(asked, "list", False):
        raise UsageError(f"--list is no campaign: {kind.program.name} {what} --list")
    return Campaign(kind, asked, tuple(kind.cut(asked)))


def blocks(total: int, size: int) -> list[int]:
    """Return the sizes of the blocks that a total is cut into, all `size` but the last."""
    return [min(size, total - start) for start in range(0, total, size)]


def _cut_verify(asked: argparse.Namespace) -> list[Shard]:
    """Cut by loop and by block of cases; the i-th block has the i-th seed."""
    from gradcheck_suite.cli.verify import reset_modes_of
    from gradcheck_suite.loops.jax_modes import JAX_MODES

    if asked.stop_on_violation or asked.html is not None:
        raise UsageError(
            f"{'-x' if asked.stop_on_violation else '--html'} is no option of a campaign: leave"
            " it out"
        )
    options: list[str] = []
    for flag, value in {"--problem": asked.problem, "--framework": asked.framework}.items():
        options += [] if value is None else [flag, value]
    # the values that the project's table sets are written out too: they are part of the campaign's
    # key
    options += to_argv(parsed(asked, VerifyOptions).replace(examples=None, seed=0))

    # the default number of cases differs by framework, which the name tells: no loop is loaded here
    def examples(loop: str) -> int:
        of_jax = asked.framework == "jax" or loop in JAX_MODES
        return int(asked.examples or BY_FRAMEWORK["jax" if of_jax else "torch"][0])

    loops = asked.loops or reset_modes_of(asked.framework, asked.ranks)
    shards: list[Shard] = []
    for loop in loops:
        shards += shards_of(loop, examples(loop), asked.seed, options)
    return shards


def shards_of(loop: str, examples: int, seed: int, options: Iterable[str]) -> list[Shard]:
    """Return the shards that verify a loop; the i-th has the i-th seed.

    Args:
        loop: the loop's name.
        examples: number of cases, of all of them.
        seed: of the first.
        options: of `verify`.
    """
    return [
        Shard(
            PROGRAM, ("verify", loop, "--examples", str(cases), "--seed", str(seed + i), *options)
        )
        for i, cases in enumerate(blocks(examples, CASES))
    ]


def _cut_trainers(asked: argparse.Namespace) -> list[Shard]:
    """Cut by trainer."""
    from gradcheck_suite.loops.trainers import TRAINERS

    if asked.heads:
        raise UsageError(
            "--heads asks one trainer and is no campaign: gradcheck-suite trainers --heads"
        )
    chosen = asked.trainers or [
        trainer.name for trainer in TRAINERS.values() if trainer.missing is None
    ]
    options = ["--examples", str(asked.examples), "--seed", str(asked.seed)]
    options += [] if asked.problem is None else ["--problem", asked.problem]
    options += ["--exit-zero"] if asked.exit_zero else []
    return [Shard(PROGRAM, ("trainers", name, *options)) for name in chosen]


@dataclass(frozen=True)
class CampaignResult:
    """What the shards of a campaign come to together.

    Attributes:
        document: what `--json` writes beside schema and environment.
        lines: to print.
        status: exit status.
        copied: kinds of the shards' own records that are kept.
        record: kind and data of a record of the campaign itself; None where the shards' own records
            say all.
    """

    document: Json
    lines: list[str]
    status: int
    copied: tuple[str, ...] = ()
    record: tuple[records.RecordKind, Json] | None = None


def failed(campaign: Campaign, shards: Shards) -> tuple[int, str] | None:
    """Return exit status and error message of the first shard that could not be run.

    None where every shard was.
    """
    for number, shard in enumerate(campaign.shards):
        status = shards.status(number)
        if status not in COULD_NOT_RUN:
            continue
        # the last line is the error message, by the convention of `exit_status.fail`
        said = (shards.output(number) or [""])[-1]
        message = said.partition(" error: ")[2] or said
        # bad input is the user's: the message of the shard says all, and its place would help
        # nobody
        if status == exit_status.BAD_USAGE:
            return status, message
        return (
            status,
            (
                f"`{shard}` ended with status {status}: {message}; its output is in"
                f" {shards.place(number) / OUTPUT}, and the same campaign goes on with the shards"
                " that are not done"
            ),
        )
    return None


def merged_result(parts: Sequence[Json]) -> Json:
    """Return the results of one loop's shards as one; the first violation is the loop's."""
    verdicts = [part["verdict"] for part in parts]
    # the first in the order of the seeds, not in time, so that any number of workers reports the
    # same
    first = verdicts.index("violated") if "violated" in verdicts else None
    worst = max(float(part["worst_error_over_allowed"]) for part in parts)
    findings = chain.from_iterable(part["findings"] for part in parts)
    return parts[0] | {
        # one shard with judged cases is enough for "holds": only all of them unjudged make it
        # unjudged
        "verdict": next(v for v in ("violated", "holds", "unjudged") if v in verdicts),
        "cases": _total(parts, "cases"),
        "judged": _total(parts, "judged"),
        "windows": _total(parts, "windows"),
        "seconds": round(_total(parts, "seconds"), 3),
        "worst_error_over_allowed": json_number(worst),
        # shards meet the same finding again and again
        "findings": list(dict.fromkeys(findings)),
        "skipped": _counts(parts, "skipped"),
        "windows_skipped": _counts(parts, "windows_skipped"),
        "moved_by_zeros": _moved_by_zeros(parts),
        **_accepted_in(parts),
        "shrinking": parts[first or 0]["shrinking"],
        "violation": None if first is None else _violation(parts[first], parts[:first]),
    }


def _total(parts: Iterable[Json], name: str) -> Any:
    return sum(part[name] for part in parts)


def _counts(parts: Iterable[Json], name: str) -> dict[str, int]:
    counts = Counter[str]()
    for part in parts:
        counts.update(part[name])
    return dict(counts)


def _moved_by_zeros(parts: Iterable[Json]) -> Json | None:
    moved = [part["moved_by_zeros"] for part in parts if part.get("moved_by_zeros")]
    return {**moved[0], "cases": _total(moved, "cases")} if moved else None


def _violation(part: Json, before: Iterable[Json]) -> Json:
    """Return a shard's violation, found after the cases of the shards before it, too."""
    # a fault of a probe is found before any case is drawn
    violation: Json = part["violation"]
    if violation["found_after"] is None:
        return violation
    return violation | {"found_after": violation["found_after"] + _total(before, "cases")}


def _accepted_in(parts: Sequence[Json]) -> Json:
    """Return the accepted faults of all shards, the first of each name, under their field."""
    found: dict[str, Json] = {}
    for part in parts:
        for fault in part.get("accepted", ()):
            found.setdefault(fault["diagnosis"], fault)
    # the field is absent where nothing is accepted, as in a result of `verify`
    return {"accepted": list(found.values())} if found else {}


def results_of(campaign: Campaign, shards: Shards) -> list[Json]:
    """Return one merged result for each loop that shards of `verify` verified, in the order of the
    shards.
    """
    by_loop: dict[str, list[Json]] = {}
    for number, shard in enumerate(campaign.shards):
        if shard.words[0] == "verify":
            for result in shards.result(number)["results"]:
                by_loop.setdefault(result["loop"], []).append(result)
    return [merged_result(parts) for parts in by_loop.values()]


def line(result: Json) -> str:
    """Return a merged result on one line."""
    violation = result["violation"]
    verdict = (
        f"VIOLATED  {violation['kind']}: {violation['diagnosis']}"
        if violation
        else result["verdict"]
    )
    accepted = ", ".join(fault["diagnosis"] for fault in result.get("accepted", ()))
    more = f"  accepted: {accepted}" if accepted else ""
    return f"{result['loop']}  {verdict}  {result['cases']:,} cases{more}"


def campaign_status(results: Sequence[Json], *, violated: bool = False) -> int:
    """Return the exit status of a campaign.

    Args:
        results: merged.
        violated: whether something else is.
    """
    return exit_status.status_of(
        violated=violated or any(result["verdict"] == "violated" for result in results),
        findings=any(result["findings"] for result in results),
    )


def _found_by_verify(campaign: Campaign, shards: Shards) -> CampaignResult:
    results = results_of(campaign, shards)
    return CampaignResult(
        {"results": results},
        list(map(line, results)),
        campaign_status(results),
        ("verify",),
    )


def _found_by_trainers(campaign: Campaign, shards: Shards) -> CampaignResult:
    numbers = range(len(campaign.shards))
    answers: list[Json] = []
    lines: list[str] = []
    for number in numbers:
        answers += shards.result(number)["answers"]
        lines += shards.output(number)
    # by their weight: by number, a disagreement (3) would outweigh a violation (1)
    order = (exit_status.HOLDS, exit_status.DISAGREEMENT, exit_status.VIOLATED)
    return CampaignResult(
        {"answers": answers}, lines, max(map(shards.status, numbers), key=order.index), ("trainer",)
    )


KINDS = {
    "verify": CampaignKind(PROGRAM, _cut_verify, _found_by_verify),
    "trainers": CampaignKind(PROGRAM, _cut_trainers, _found_by_trainers),
}


def add_arguments(parser: Parser, kinds: Iterable[str] = tuple(KINDS)) -> None:
    """Add the command's arguments."""
    work = (
        "processes that work at the same time (default %(default)s); the records do not depend"
        " on it"
    )
    parser.add_argument(
        "--workers", type=parsers.positive_integer, default=1, metavar="N", help=work
    )
    parser.add_argument(
        "--engine",
        type=parsers.choice_of(("processes", "ray")),
        default="processes",
        metavar="ENGINE",
        help="processes of this machine, or ray (default %(default)s)",
    )
    parser.add_argument(
        "--address",
        metavar="ADDR",
        help="with --engine ray: the cluster to join, in place of a local one",
    )
    parsers.add_quiet(parser, "print each verdict in one line, and no more")
    parser.add_argument(
        "-n",
        "--examples",
        type=parsers.positive_integer,
        metavar="N",
        help="cases, as --examples of the command (default: the command's own)",
    )
    parsers.add_json(parser, "the merged results")
    where = f"the records go to DIR/records, and until then the shards to DIR/{FOLDER}"
    parsers.add_reports(parser, where, Path("reports"))
    parser.add_argument(
        "what", type=parsers.choice_of(kinds), metavar="COMMAND", help=f"one of {', '.join(kinds)}"
    )
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="the command's own arguments"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the shards that are not done yet, merge all of them, and print what they come to."""
    return run_campaign(arguments, KINDS, PROGRAM)


def run_campaign(
    arguments: argparse.Namespace, kinds: Mapping[str, CampaignKind], program: CommandLine
) -> int:
    """Run a campaign of one of some kinds, as the command of a program."""
    environment.expect_main_job()
    if arguments.address is not None and arguments.engine != "ray":
        raise UsageError("--address needs --engine ray")
    parsers.expect_writable(arguments.reports, FOLDER, json=arguments.json)
    environment.set_variables()
    rest = list(arguments.rest)
    if arguments.examples is not None:
        rest = [*rest, "--examples", str(arguments.examples)]
    campaign = cut_up(arguments.what, rest, kinds, program)
    shards = Shards(arguments.reports / FOLDER / campaign.key)
    numbers = range(len(campaign.shards))
    waiting = [number for number in numbers if not shards.done(number)]
    done = len(numbers) - len(waiting)
    before = f", {done} of them done before" if done else ""
    if not arguments.quiet:
        print(f"{counted(len(numbers), 'shard')} of {arguments.what}{before}", flush=True)
    engine = (
        partial(run_on_ray, address=arguments.address) if arguments.engine == "ray" else run_locally
    )
    try:
        with Progress(examples=len(numbers)) as progress:
            progress.start(f"shards of {arguments.what}")
            progress.count(done)
            if waiting:
                engine(
                    campaign.shards, waiting, shards, arguments.workers, lambda: progress.count(1)
                )
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", flush=True)
        raise
    if failure := failed(campaign, shards):
        status, message = failure
        # nothing of a campaign with bad input is worth keeping, and a corrected one has another key
        if status == exit_status.BAD_USAGE:
            shards.remove()
            raise UsageError(message)
        raise RuntimeError(message)
    # the flags as the shards had them: they are part of the environment that is recorded
    environment.set_precision()
    found = campaign.kind.found(campaign, shards)
    about = environment.environment()
    merge(shards, numbers, arguments.reports, found.copied)
    if found.record is not None:
        kind, data = found.record
        command = f"{program.name} {shlex.join([FOLDER, arguments.what, *rest])}"
        append_record(
            arguments.reports,
            kind,
            data,
            environment=about,
            command=command,
        )
    write_document(arguments.json, about, found.document)
    shards.remove()
    print("\n".join(found.lines))
    return found.status
