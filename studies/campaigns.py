"""Long work in shards: each shard is one command line in a process of its own, and their files are merged in the end.

A shard depends on what is asked and on its seeds alone, so the records are the same whatever the number of workers.
Must not judge anything itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from gradcheck_suite.cli import command_of, exit_status
from gradcheck_suite.cli.arguments import Parser, parsed, to_argv
from gradcheck_suite.core.options import BY_FRAMEWORK, VerifyOptions
from gradcheck_suite.core.records import judge_digest, records_path, write_text
from gradcheck_suite.core.results import json_number
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run.environment import PROCESSES_VARIABLE, versions
from gradcheck_suite.run.processes import Template, end_with_parent

Command = tuple[str, ...]
Json = dict[str, Any]
STATUS, RESULT, OUTPUT = "status", "result.json", "output.txt"
COUNTEREXAMPLES = "counterexamples"
COULD_NOT_RUN = (exit_status.BAD_USAGE, exit_status.BUG, exit_status.INTERRUPTED)
"""Exit statuses of shards that have not done their work."""


@dataclass(frozen=True)
class Shards:
    """The shards of one campaign on disk.

    Attributes:
        folder: of the campaign; it has one folder for each shard that is done, named by its number.
    """

    folder: Path

    def place(self, number: int) -> Path:
        """Return a shard's folder."""
        return self.folder / f"{number:06d}"

    def partial_place(self, number: int) -> Path:
        """Return the folder that a shard is written to before it is done."""
        return self.folder / f"{number:06d}.partial"

    def partial(self, number: int) -> Path:
        """Return that folder, empty."""
        shutil.rmtree(path := self.partial_place(number), ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def finish(self, number: int, status: int) -> None:
        """Note a shard's exit status, and put its folder in place in one step."""
        partial = self.partial_place(number)
        (partial / STATUS).write_text(f"{status}\n")
        shutil.rmtree(self.place(number), ignore_errors=True)  # where it is, it failed or a file of it was cut short
        partial.rename(self.place(number))

    def remove(self) -> None:
        """Remove all of them, and the folder of campaigns where no other one is under way."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self.folder.parent.rmdir()

    def done(self, number: int) -> bool:
        """Return whether a shard is done: one that failed is not, nor is one with a file that is cut short."""
        try:
            if self.status(number) in COULD_NOT_RUN:
                return False
            self.result(number)
            for path in self.place(number).rglob("*.jsonl"):
                for line in path.read_text().splitlines():
                    json.loads(line)
        except (OSError, ValueError):
            return False
        return True

    def status(self, number: int) -> int:
        """Return the exit status of a shard that is done."""
        return int((self.place(number) / STATUS).read_text())

    def result(self, number: int) -> dict[str, Any]:
        """Return what a shard wrote by `--json`; empty where it wrote nothing."""
        path = self.place(number) / RESULT
        document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return document

    def lines(self, number: int, kind: str) -> list[str]:
        """Return the lines that a shard recorded."""
        return _lines(records_path(self.place(number), kind))

    def output(self, number: int) -> list[str]:
        """Return the lines that a shard printed."""
        return _lines(self.place(number) / OUTPUT)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def merge(shards: Shards, numbers: range, reports: Path, kinds: tuple[str, ...]) -> None:
    """Append the shards' records and copy their counterexamples, in the order of the shards.

    A line that is there already is not appended again, so an interrupted merge can be repeated.

    Args:
        shards: all done.
        numbers: of the shards.
        reports: where the records go.
        kinds: of the records that are appended.
    """
    for kind in kinds:
        path = records_path(reports, kind)
        old = _lines(path)
        known = set(old)
        new = [line for number in numbers for line in shards.lines(number, kind) if line not in known]
        if new:
            write_text(path, "".join(f"{line}\n" for line in (*old, *new)))
    for number in numbers:
        if (own := shards.place(number) / COUNTEREXAMPLES).is_dir():
            shutil.copytree(own, reports / COUNTEREXAMPLES, dirs_exist_ok=True)


CASES = 200
"""Cases of a shard of `verify`, and of one sound loop in a shard of `zoo`."""
CHECKS = 1000
"""Checks of a shard of `calibrate`, in all its dtypes."""
PLANTED = 10
"""Cases with planted errors of a shard of `calibrate`, in each dtype."""


@dataclass(frozen=True)
class Campaign:
    """A command, cut up.

    Attributes:
        what: the command, such as `"verify"`.
        asked: the command's parsed arguments.
        shards: the command line of each shard, without the paths that it writes to.
    """

    what: str
    asked: argparse.Namespace
    shards: tuple[Command, ...]

    @property
    def key(self) -> str:
        """A digest of all that the shards' records depend on: the command lines, the judge and the versions."""
        parts = [self.shards, judge_digest(), versions()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def cut_up(what: str, rest: Sequence[str]) -> Campaign:
    """Return a campaign of one command.

    Args:
        what: one of `COMMANDS`.
        rest: the command's own arguments; it writes where the campaign says, so `--json` and `--reports` are refused.

    Raises:
        UsageError: a wrong argument.
    """
    parser = Parser(prog=f"gradcheck-suite campaign {what}", add_help=False)
    command_of(what).add_arguments(parser)
    asked = parser.parse_intermixed_args(list(rest))
    for option in ("--json", "--reports"):
        if any(argument == option or argument.startswith(f"{option}=") for argument in rest):
            raise UsageError(f"{option} stands before {what}: gradcheck-suite campaign {option} PATH {what} ...")
    if getattr(asked, "list", False):
        raise UsageError(f"--list is no campaign: gradcheck-suite {what} --list")
    return Campaign(what, asked, tuple(COMMANDS[what].cut(asked)))


def blocks(total: int, size: int) -> list[int]:
    """Return the sizes of the blocks that a total is cut into, all `size` but the last."""
    return [min(size, total - start) for start in range(0, total, size)]


def _cut_verify(asked: argparse.Namespace) -> list[Command]:
    """Cut by loop and by block of cases; the i-th block has the i-th seed."""
    from gradcheck_suite.cli.verify import modes_of
    from gradcheck_suite.loops.jax_modes import JAX_MODES

    if asked.stop_on_violation or asked.html is not None:
        raise UsageError(f"{'-x' if asked.stop_on_violation else '--html'} is no option of a campaign: leave it out")
    named = {"--problem": asked.problem, "--framework": asked.framework}
    options = [part for flag, value in named.items() if value is not None for part in (flag, value)]
    options += to_argv(parsed(asked, VerifyOptions).replace(examples=None, seed=0))

    def examples(loop: str) -> int:
        of_jax = asked.framework == "jax" or loop in JAX_MODES
        return int(asked.examples or BY_FRAMEWORK["jax" if of_jax else "torch"][0])

    loops = asked.loops or modes_of(asked.framework, asked.ranks)
    return [command for loop in loops for command in _blocks_of(loop, examples(loop), asked.seed, options)]


def _blocks_of(loop: str, examples: int, seed: int, options: Iterable[str]) -> list[Command]:
    return [
        ("verify", loop, "--examples", str(cases), "--seed", str(seed + i), *options)
        for i, cases in enumerate(blocks(examples, CASES))
    ]


def _cut_zoo(asked: argparse.Namespace) -> list[Command]:
    """Cut by bug, whose row needs all its seeds; the sound loops are shards of `verify`."""
    from gradcheck_suite.loops.reset_modes import BUILT_IN
    from studies.commands.zoo import chosen

    dtype = () if asked.dtype is None else ("--dtype", asked.dtype)
    runs = ("--seeds", str(asked.seeds), "--examples", str(asked.examples), "--seed", str(asked.seed))
    bugs: list[Command] = [("zoo", bug.name, *runs, "--sound-cases", "0", *dtype) for bug in chosen(asked.bugs)]
    return bugs + [command for loop in BUILT_IN for command in _blocks_of(loop, asked.sound_cases, 0, dtype)]


def _cut_calibrate(asked: argparse.Namespace) -> list[Command]:
    """Cut into blocks of checks; the i-th block has the i-th seed."""
    pairs = zip_longest(blocks(asked.checks, CHECKS), blocks(asked.planted, PLANTED), fillvalue=0)
    return [
        ("calibrate", "--checks", str(c), "--planted", str(p), "--seed", str(asked.seed + i), "--dtypes", *asked.dtypes)
        for i, (c, p) in enumerate(pairs)
    ]


def _cut_trainers(asked: argparse.Namespace) -> list[Command]:
    """Cut by trainer."""
    from gradcheck_suite.loops.trainers import TRAINERS

    if asked.heads:
        raise UsageError("--heads asks one trainer and is no campaign: gradcheck-suite trainers --heads")
    chosen = asked.trainers or [trainer.name for trainer in TRAINERS.values() if trainer.missing is None]
    options = ["--examples", str(asked.examples), "--seed", str(asked.seed)]
    options += [] if asked.problem is None else ["--problem", asked.problem]
    return [("trainers", name, *options, *(("--exit-zero",) if asked.exit_zero else ())) for name in chosen]


@dataclass(frozen=True)
class Found:
    """What the shards of a campaign come to together.

    Attributes:
        document: what `--json` writes beside schema and environment.
        lines: to print.
        status: exit status.
        copied: kinds of the shards' own records that are kept.
        record: (kind, data) of a record of the campaign itself; None where the shards' own records say all.
    """

    document: Json
    lines: list[str]
    status: int
    copied: tuple[str, ...] = ()
    record: tuple[str, Json] | None = None


def found_by(campaign: Campaign, shards: Shards) -> Found:
    """Return what the shards of a campaign, all of them done, come to."""
    return COMMANDS[campaign.what].found(campaign, shards)


def failed(campaign: Campaign, shards: Shards) -> tuple[int, str] | None:
    """Return exit status and error message of the first shard that could not be run; None where every shard was."""
    for number, command in enumerate(campaign.shards):
        status = shards.status(number)
        if status not in COULD_NOT_RUN:
            continue
        said = (shards.output(number) or [""])[-1]
        message = said.partition(" error: ")[2] or said
        if status == exit_status.BAD_USAGE:
            return status, message
        return status, (
            f"`{shlex.join(['gradcheck-suite', *command])}` ended with status {status}: {message}; its output is in "
            f"{shards.place(number) / OUTPUT}, and the same campaign goes on with the shards that are not done"
        )
    return None


def merged_result(parts: Sequence[Json]) -> Json:
    """Return the results of one loop's shards as one; the first violation is the loop's."""
    first = next((part for part in parts if part["verdict"] == "violated"), None)
    before = parts[: parts.index(first)] if first is not None else []
    violation = first and first["violation"]
    if violation and violation["found_after"] is not None:
        violation = violation | {"found_after": violation["found_after"] + sum(part["cases"] for part in before)}
    moved = [part["moved_by_zeros"] for part in parts if part.get("moved_by_zeros")]
    return parts[0] | {
        "verdict": next(v for v in ("violated", "holds", "unjudged") if any(part["verdict"] == v for part in parts)),
        **{name: sum(part[name] for part in parts) for name in ("cases", "judged", "windows")},
        "seconds": round(sum(part["seconds"] for part in parts), 3),
        "worst_error_over_allowed": json_number(max(float(part["worst_error_over_allowed"]) for part in parts)),
        "findings": list(dict.fromkeys(finding for part in parts for finding in part["findings"])),
        **{
            name: dict(sum((Counter(part[name]) for part in parts), Counter()))
            for name in ("skipped", "windows_skipped")
        },
        "moved_by_zeros": {**moved[0], "cases": sum(part["cases"] for part in moved)} if moved else None,
        "shrinking": (first or parts[0])["shrinking"],
        "violation": violation,
    }


def _results(campaign: Campaign, shards: Shards) -> list[Json]:
    """Return one merged result for each loop that shards of `verify` verified, in the order of the shards."""
    by_loop: dict[str, list[Json]] = {}
    for number, command in enumerate(campaign.shards):
        if command[0] == "verify":
            for result in shards.result(number)["results"]:
                by_loop.setdefault(result["loop"], []).append(result)
    return [merged_result(parts) for parts in by_loop.values()]


def _line(result: Json) -> str:
    violation = result["violation"]
    verdict = f"VIOLATED  {violation['kind']}: {violation['diagnosis']}" if violation else result["verdict"]
    return f"{result['loop']}  {verdict}  {result['cases']:,} cases"


def _status(results: Sequence[Json], *, violated: bool = False) -> int:
    return exit_status.status_of(
        violated=violated or any(result["verdict"] == "violated" for result in results),
        findings=any(result["findings"] for result in results),
    )


def _found_by_verify(campaign: Campaign, shards: Shards) -> Found:
    results = _results(campaign, shards)
    return Found({"results": results}, list(map(_line, results)), _status(results), ("verify",))


def _found_by_zoo(campaign: Campaign, shards: Shards) -> Found:
    numbers = [n for n, command in enumerate(campaign.shards) if command[0] == "zoo"]
    rows = [row for n in numbers for row in shards.result(n)["bugs"]]
    results = _results(campaign, shards)
    data = {
        **{name: getattr(campaign.asked, name) for name in ("dtype", "seeds", "examples")},
        "bugs": rows,
        "sound": [
            {
                "loop": result["loop"],
                "cases": result["cases"],
                "blamed": result["verdict"] == "violated",
                "worst": result["worst_error_over_allowed"],
            }
            for result in results
        ],
    }
    lines = [
        f"{row['name']}  found in {row['found']} of {row['runs']} runs  "
        + ", ".join(f"{name} x{count}" for name, count in row["names"].items())
        for row in rows
    ]
    lines += [f"sound loop {_line(result)}" for result in results]
    failing = any(shards.status(n) == exit_status.VIOLATED for n in numbers)
    whole = ("zoo", data) if not campaign.asked.bugs else None
    return Found(data, lines, _status(results, violated=failing), record=whole)


def _found_by_calibrate(campaign: Campaign, shards: Shards) -> Found:
    from studies import calibration, tally

    tallies: dict[str, tally.Tally] = {}
    curves: dict[str, tally.Curve] = {}
    for number in range(len(campaign.shards)):
        (data,) = (json.loads(line)["data"] for line in shards.lines(number, "calibration"))
        for dtype, found in data["alarms"].items():
            tallies.setdefault(dtype, tally.Tally()).add(tally.tally_from_json(found))
        for dtype, found in data["curves"].items():
            curves.setdefault(dtype, tally.Curve()).add(tally.curve_from_json(found))
    asked = campaign.asked
    settings = calibration.Settings(asked.checks, asked.planted, asked.seed, tuple(dict.fromkeys(asked.dtypes)))
    total = calibration.record(settings, tallies, curves)
    findings = any(found.findings for found in tallies.values())
    status = exit_status.status_of(violated=bool(tally.false_alarms(total)), findings=findings)
    return Found(total, tally.lines(total), status, record=("calibration", total))


def _found_by_trainers(campaign: Campaign, shards: Shards) -> Found:
    numbers = range(len(campaign.shards))
    answers = [answer for number in numbers for answer in shards.result(number)["answers"]]
    lines = [line for number in numbers for line in shards.output(number)]
    order = (exit_status.HOLDS, exit_status.DISAGREEMENT, exit_status.VIOLATED)
    return Found({"answers": answers}, lines, max(map(shards.status, numbers), key=order.index), ("trainer",))


@dataclass(frozen=True)
class Divisible:
    """A command that can be a campaign.

    Attributes:
        cut: returns the command lines of its shards, of its arguments.
        found: returns what these come to.
    """

    cut: Callable[[argparse.Namespace], list[Command]]
    found: Callable[[Campaign, Shards], Found]


COMMANDS = {
    "verify": Divisible(_cut_verify, _found_by_verify),
    "zoo": Divisible(_cut_zoo, _found_by_zoo),
    "calibrate": Divisible(_cut_calibrate, _found_by_calibrate),
    "trainers": Divisible(_cut_trainers, _found_by_trainers),
}


LOSSES = 3
"""Processes that one shard may lose before the campaign gives up: the shard itself ends its process, then."""
ANSWER_S = 30
"""Seconds that a cluster of Ray has to answer; Ray itself tries for minutes."""


def run_shard(command: Sequence[str], folder: Path) -> int:
    """Run a shard's command line in this process, with all its files under `folder`, and return its exit status."""
    from gradcheck_suite.cli import run

    os.environ[PROCESSES_VARIABLE] = "1"  # there is a worker for each processor
    paths = ["--reports", str(folder)]
    if command[0] != "calibrate":
        paths += ["--json", str(folder / RESULT)]
    before = sys.argv
    # the command that records tell, which has no path of this run
    sys.argv = ["gradcheck-suite", *command]
    try:
        return run([*command, *paths])
    finally:
        sys.argv = before


def main(connection: Connection, command: Sequence[str], folder: Path) -> None:
    """Run a shard in a process of its own, and send its exit status.

    Args:
        connection: to the driver of the campaign.
        command: the shard's command line.
        folder: for its files and what it prints.
    """
    end_with_parent(connection)
    with (folder / OUTPUT).open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    status = run_shard(command, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(status)
    # whatever the loop has left behind, such as a thread, ends here
    os._exit(0)


def run_locally(
    commands: Sequence[Command], waiting: Sequence[int], shards: Shards, workers: int, progress: Callable[[], None]
) -> None:
    """Run the waiting shards, so many at a time.

    Args:
        commands: the command line of each shard, by number.
        waiting: the numbers of the shards to run.
        shards: where their files go.
        workers: number of shards at a time.
        progress: called after each shard.

    Raises:
        CannotRunHere: a shard ends its process again and again.
    """
    free: SimpleQueue[Template] = SimpleQueue()

    def work(number: int) -> None:
        template = free.get()
        for _ in range(LOSSES):
            _, (connection,) = template.fork(__name__, [(commands[number], shards.partial(number).resolve())])
            with connection, suppress(EOFError, OSError):
                shards.finish(number, connection.recv())
                free.put(template)
                return
        where = shards.partial_place(number) / OUTPUT
        raise CannotRunHere(
            f"shard {number} ended {LOSSES} worker processes, so the campaign stops; what is done is kept. "
            f"It is `gradcheck-suite {' '.join(commands[number])}`, and what it printed is in {where}"
        )

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        # shards that run end with their templates, so that threads which wait for them do
        for _ in range(min(workers, len(waiting))):
            free.put(stack.enter_context(closing(Template("gradcheck_suite.verification.verify"))))
        jobs = [pool.submit(work, number) for number in waiting]
        stack.callback(lambda: [job.cancel() for job in jobs])
        for job in as_completed(jobs):
            job.result()
            progress()


def files_of_shard(command: Sequence[str]) -> tuple[int, dict[str, bytes]]:
    """Run a shard in a temporary folder; return its exit status, and its files by their path within the folder.

    So the machines of a cluster need not share a disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        status = run_shard(command, top)
        files = {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}
    return status, files


def run_on_ray(
    commands: Sequence[Command],
    waiting: Sequence[int],
    shards: Shards,
    workers: int,
    progress: Callable[[], None],
    address: str | None = None,
) -> None:
    """Run the waiting shards as tasks of Ray, which is imported here alone.

    The user's files must be at the same paths on each of its machines.

    Args:
        commands: the command line of each shard, by number.
        waiting: the numbers of the shards to run.
        shards: where their files go.
        workers: processors of the local cluster; a cluster that is joined has its own.
        progress: called after each shard.
        address: of a cluster to join; None starts one here.

    Raises:
        CannotRunHere: Ray is not installed, the cluster does not answer, or a shard ends its worker again and again.
    """
    _expect_listener(address)
    try:
        import ray
    except ImportError:
        raise CannotRunHere("--engine ray: ray is not installed: pip install 'gradcheck-suite[ray]'") from None
    _expect_cluster(address)
    try:
        cluster = {"address": address} if address else {"num_cpus": workers, "include_dashboard": False}
        ray.init(**cluster, logging_level="error", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise CannotRunHere(
            f"--engine ray: no cluster could be {'joined' if address else 'started'} ({reason})"
        ) from None
    try:
        task = ray.remote(num_cpus=1, max_retries=LOSSES)(files_of_shard)
        running = {task.remote(list(commands[number])): number for number in waiting}
        while running:
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            number = running.pop(done)
            try:
                status, files = ray.get(done)
            except ray.exceptions.WorkerCrashedError:
                command = " ".join(("gradcheck-suite", *commands[number]))
                raise CannotRunHere(
                    f"shard {number} ended {1 + LOSSES} worker processes of Ray: run {command} by itself"
                ) from None
            folder = shards.partial(number)
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            shards.finish(number, status)
            progress()
    finally:
        ray.shutdown()


def _expect_listener(address: str | None) -> None:
    """Refuse an address at which nothing listens; `auto` is left to Ray."""
    if address in (None, "auto"):
        return
    host, _, port = str(address).rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--address: expected HOST:PORT, ray://HOST:PORT or auto; got {address!r}")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError as error:
        said = error.strerror or error
        raise CannotRunHere(f"--address {address}: no Ray cluster answers there ({said})") from None


def _expect_cluster(address: str | None) -> None:
    """Refuse an address at which something else than Ray listens: another process joins first, which can be ended."""
    joins = f"import ray; ray.init({address!r}, logging_level='error', log_to_driver=False)"
    try:
        if address is not None:
            subprocess.run([sys.executable, "-Pc", joins], timeout=ANSWER_S, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        raise CannotRunHere(f"--address {address}: no Ray cluster answers there within {ANSWER_S} s") from None
