"""Run verify, zoo, calibrate or trainers in shards, on several processes or machines; a run that is stopped goes on."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.progress import Progress
from gradcheck_suite.core.records import append_record, write_document
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run import environment

COMMANDS = ("verify", "zoo", "calibrate", "trainers")
FOLDER = "campaign"
"""Where the shards of unfinished campaigns are, within the reports folder."""


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    work = "processes that work at the same time (default %(default)s); the records do not depend on it"
    parser.add_argument("--workers", type=parsers.positive_integer, default=1, metavar="N", help=work)
    parser.add_argument(
        "--engine",
        type=parsers.one_of(("processes", "ray")),
        default="processes",
        metavar="ENGINE",
        help="processes of this machine, or ray (default %(default)s)",
    )
    parser.add_argument(
        "--address", metavar="ADDR", help="with --engine ray: the cluster to join, in place of a local one"
    )
    parsers.add_json(parser, "the merged results")
    where = f"the records go to DIR/records, and until then the shards to DIR/{FOLDER}"
    parsers.add_reports(parser, where, Path("reports"))
    parser.add_argument("what", type=parsers.one_of(COMMANDS), metavar="COMMAND", help=f"one of {', '.join(COMMANDS)}")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="the command's own arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the shards that are not done yet, merge all of them, and print what they come to."""
    environment.expect_main_job()
    if arguments.address is not None and arguments.engine != "ray":
        raise UsageError("--address needs --engine ray")
    parsers.expect_writable(arguments.reports, FOLDER, json=arguments.json)
    environment.set_variables()
    from gradcheck_suite.core.text import counted
    from studies.campaigns import Shards, cut_up, failed, found_by, merge, run_locally, run_on_ray

    campaign = cut_up(arguments.what, arguments.rest)
    shards = Shards(arguments.reports / FOLDER / campaign.key)
    numbers = range(len(campaign.shards))
    waiting = [number for number in numbers if not shards.done(number)]
    done = len(numbers) - len(waiting)
    before = f", {done} of them done before" if done else ""
    print(f"{counted(len(numbers), 'shard')} of {arguments.what}{before}", flush=True)
    engine = partial(run_on_ray, address=arguments.address) if arguments.engine == "ray" else run_locally
    try:
        with Progress(examples=len(numbers)) as progress:
            progress.start(f"shards of {arguments.what}")
            progress.count(done)
            if waiting:
                engine(campaign.shards, waiting, shards, arguments.workers, lambda: progress.count(1))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", flush=True)
        raise
    if failure := failed(campaign, shards):
        status, message = failure
        if status == exit_status.BAD_USAGE:
            shards.remove()
            raise UsageError(message)
        raise RuntimeError(message)
    environment.set_precision()
    found = found_by(campaign, shards)
    about = environment.environment()
    merge(shards, numbers, arguments.reports, found.copied)
    if found.record is not None:
        kind, data = found.record
        command = shlex.join(["gradcheck-suite", FOLDER, arguments.what, *arguments.rest])
        append_record(arguments.reports, kind, data, environment=about, command=command)
    write_document(arguments.json, about, found.document)
    shards.remove()
    print("\n".join(found.lines))
    return found.status
