"""Make every record of `reports/records` again, at one commit, and build the report from them: `tox
-e records`.

    python -m studies.tests.make_records                     # everything that can run here
    python -m studies.tests.make_records --only step atlas   # these kinds
    python -m studies.tests.make_records --table             # print the table of studies/README.md

Each part is one command with records of its own. A part that is done is not run again, so a run
that was interrupted goes on with the same command, as the campaigns inside of it do. Times are
measured first, with nothing beside them. In the end the new records take the place of the old ones
of their kinds. Those of a kind that was not made are kept, and so are those of a GPU, which other
commands make.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.shards import COULD_NOT_RUN, Shards
from gradcheck_suite.core.records import is_clean, read_lines, records_path, write_text
from studies.records import KINDS

REPORTS = Path("reports")
FOLDER = "campaign"
"""Where parts are kept until all are done, within the reports folder; git ignores it."""
WORKERS = "2"
SUITE = "gradcheck-suite"
STUDIES = "python -m studies"
CAMPAIGN, STUDIES_CAMPAIGN = (
    f"{program} campaign --workers {WORKERS}" for program in (SUITE, STUDIES)
)
BENCHMARKS = "pytest -q -p no:cacheprovider studies/properties/benchmarks"
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Part:
    """One command that makes records.

    Attributes:
        kind: of its records; it may make a few of another kind too.
        command: with `{reports}` for the folder that they go to.
        needs: modules that it needs beside those of the tests.
        says: what the records are, in the table of studies/README.md; empty for a further part of
            the same row.
    """

    kind: str
    command: str
    says: str = ""
    needs: tuple[str, ...] = ()


def _audits() -> list[Part]:
    """Return the audits of the scripts with real trainers, on two ranks."""
    runs = ("transformers_trainer.py llama", "transformers_trainer.py llama --own-count",
            "transformers_trainer.py gpt2", "transformers_trainer.py bert", "accelerate_loop.py",
            "accelerate_loop.py --samples 40",
            "accelerate_recipe.py", "accelerate_recipe.py --as-printed", "lightning_trainer.py",
            "lightning_trainer.py --batches 10", "fabric_loop.py", "fabric_loop.py --own-count")  # fmt: skip
    command = "torchrun --nproc-per-node 2 -m gradcheck_suite audit --reports {reports} build/scripts/trainers/"
    needs = ("transformers", "accelerate", "lightning")
    return [Part("audit", command + run, "scripts with real trainers, on two ranks" * (run == runs[0]), needs)
            for run in runs]  # fmt: skip


PARTS: tuple[Part, ...] = (
    # what is timed stands first, and the whole steps three times: how often they come out
    # differently is told
    Part("benchmark", f"{BENCHMARKS}/bench_modes.py --bench-records {{reports}}", "time of resets and windows"),
    *(Part("benchmark", f"{BENCHMARKS}/bench_decision.py --bench-records {{reports}}",
           "whole steps under both modes in turn, three times" * (i == 0)) for i in range(3)),
    Part("benchmark", f"{BENCHMARKS}/bench_compiled.py --bench-records {{reports}}", "the modes under `torch.compile`"),
    Part("memory", f"{BENCHMARKS}/bench_memory_modes.py --bench-records {{reports}}", "memory of resets and windows"),
    Part("claim", f"{STUDIES} claims --reports {{reports}}", "the claims and the printed loops"),
    Part("traffic", f"{BENCHMARKS}/bench_traffic.py --full --bench-records {{reports}}",
         "collectives and bytes of each window on several ranks"),
    Part("zero-or-none", f"{BENCHMARKS}/bench_zero_or_none.py --bench-records {{reports}}",
         "what zeros do that None does not, for each optimizer"),
    Part("step", f"{STUDIES} steps --reports {{reports}}", "the steps of torch's optimizers, in optax"),
    Part("atlas", f"{STUDIES} atlas --reports {{reports}}", "where torch and JAX choose different derivatives"),
    *(Part("verify", f"{CAMPAIGN} --reports {{reports}} verify --dtype {dtype}",
           "verdicts on the reset modes in each dtype, with what their cases reached" * (dtype == "float64"))
      for dtype in DTYPES),
    Part("verify", f"{SUITE} verify --framework jax --reports {{reports}}", "verdicts on the reset modes of JAX"),
    Part("verify", f"{SUITE} verify --framework jax --dtype bfloat16 --examples 20 --reports {{reports}}"),
    *(Part("zoo", f"{STUDIES_CAMPAIGN} --reports {{reports}} zoo --seeds 1 --sound-cases 50 --dtype {dtype}",
           "the known bugs, in each dtype" * (dtype == "float64")) for dtype in DTYPES[:3]),
    Part("zoo-count", f"{STUDIES} zoo --counts --reports {{reports}}",
         "after how many drawn cases each of ten seeds finds a known bug"),
    Part("calibration", f"{STUDIES_CAMPAIGN} --reports {{reports}} calibrate --checks 20000 --planted 60 --seed 1",
         "false alarms on sound loops, and the smallest planted errors found"),
    Part("bridge", "pytest -q -p no:cacheprovider studies/tests/architectures --full --bridge-records {reports}",
         "architectures that the bridge lowers to JAX", ("transformers",)),
    Part("trainer", f"{CAMPAIGN} --reports {{reports}} trainers --exit-zero", "real trainers",
         ("transformers", "accelerate", "lightning")),
    Part("trainer", f"{SUITE} trainers --heads --examples 6 --exit-zero --reports {{reports}}",
         "model heads of transformers", ("transformers", "accelerate")),
    *_audits(),
    Part("public-script", "python -m studies scripts build/public --reports {reports}",
         "public training scripts, with and without the audit; `build/public` has them"),
)  # fmt: skip


def table() -> str:
    """Return the table of studies/README.md: what the records are, and the commands that make them."""
    rows = [
        f"| `{part.kind}` | {part.says} | `{part.command.replace('{reports}', 'reports')}` |"
        for part in PARTS
        if part.says
    ]
    return "\n".join(["| records | content | made by |", "| --- | --- | --- |", *rows, ""])


def _expect_one_commit() -> str:
    """Return the commit that all records will name.

    Refuse where the working tree is not that of a commit.
    """
    changes = _git("status", "--porcelain", "--", ":/", f":(exclude,top){REPORTS}")
    if changes:
        sys.exit(f"records name a commit, so commit or stash first:\n{changes}")
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def lacks(part: Part) -> str:
    """Return why a part cannot run here; empty where it can."""
    missing = [module for module in part.needs if importlib.util.find_spec(module) is None]
    if part.kind == "public-script" and not Path("build/public").is_dir():
        missing.append("the scripts in build/public")
    return f"needs {', '.join(missing)}" if missing else ""


def make(parts: Sequence[Part], shards: Shards) -> list[str]:
    """Run the parts that are not done; return the commands that could not make their records.

    A verdict of "violated" is a result, and so are the rows beside one that other load disturbed:
    status 1 is told.
    """
    failed = []
    for number, part in enumerate(parts):
        shown = f"[{number + 1}/{len(parts)}] {part.command.format(reports=REPORTS)}"
        if shards.done(number):
            print(f"{shown}  done before", flush=True)
            continue
        print(shown, flush=True)
        # a campaign goes on from its own shards; what another command left behind is half of a
        # result
        folder = shards.partial_place(number)
        if not part.command.startswith((CAMPAIGN, STUDIES_CAMPAIGN)):
            folder = shards.partial(number)
        folder.mkdir(parents=True, exist_ok=True)
        program, *arguments = part.command.format(reports=folder).split(" ")
        command = {
            SUITE: ["-m", "gradcheck_suite"],
            "python": [],
            "torchrun": ["-m", "torch.distributed.run"],
        }.get(program, ["-m", program])
        began = time.monotonic()
        with (folder / "output.txt").open("w") as output:
            status = subprocess.run(
                [sys.executable, *command, *arguments],
                check=False,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode
        made = any(records_path(folder, kind).is_file() for kind in KINDS)
        print(f"    status {status}, {time.monotonic() - began:.0f} s", flush=True)
        if not made or status in COULD_NOT_RUN or status < 0:
            failed.append(f"{shown}: status {status}; {folder / 'output.txt'} has what it printed")
        else:
            shards.finish(number, status)
    return failed


def _is_of_a_gpu(record: Any) -> bool:
    return isinstance(record, dict) and record.get("data", {}).get("device") == "cuda"


def put_in_place(parts: Sequence[Part], shards: Shards, reports: Path) -> list[str]:
    """Write the parts' records in place of the old ones of their kinds, whole files.

    Return the kinds.
    """
    found: dict[str, list[str]] = {}
    for number in range(len(parts)):
        # the few that a part makes of a kind that was not asked for are not all of that kind
        for kind in {part.kind for part in parts}:
            for line in shards.lines(number, kind):
                # where packages are installed is of this machine alone
                record = json.loads(line.replace(f"{sysconfig.get_path('purelib')}/", ""))
                # a part knows its own folder alone, and not that changes in all of `reports` do not
                # count
                record["clean"] = is_clean(reports)
                record["command"] = record["command"].replace(
                    str(shards.partial_place(number)), str(REPORTS)
                )
                found.setdefault(kind, []).append(json.dumps(record, allow_nan=False))
    for kind, lines in found.items():
        old = [
            json.dumps(found)
            for _, found in read_lines(records_path(reports, kind))
            if _is_of_a_gpu(found)
        ]
        write_text(records_path(reports, kind), "".join(f"{line}\n" for line in (*old, *lines)))
    return list(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the records, put them in place, and build the report."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.tests.make_records", description=__doc__
    )
    parser.add_argument(
        "--only", nargs="+", choices=sorted({part.kind for part in PARTS}), metavar="KIND"
    )
    parser.add_argument("--table", action="store_true", help="print the table of studies/README.md")
    asked = parser.parse_args(arguments)
    if asked.table:
        print(table(), end="")
        return 0
    commit = _expect_one_commit()
    wanted = [part for part in PARTS if not asked.only or part.kind in asked.only]
    parts = [part for part in wanted if not lacks(part)]
    for part in wanted:
        if why := lacks(part):
            print(f"left out: {part.command.format(reports=REPORTS)}: {why}")
    shards = Shards(REPORTS / FOLDER / f"records-{commit[:9]}-{'-'.join(asked.only or ['all'])}")
    print(
        f"{len(parts)} parts at commit {commit[:9]}; they are kept in {shards.folder} until all are done",
        flush=True,
    )
    if any(part.kind == "audit" for part in parts):
        subprocess.run(
            [sys.executable, "-m", "tests.auditing.scripts", "build/scripts"], check=True
        )
    try:
        failed = make(parts, shards)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here")
        return exit_status.INTERRUPTED
    if failed:
        print("not done; the same command runs these again:", *failed, sep="\n")
        return 1
    made = put_in_place(parts, shards, REPORTS)
    shutil.rmtree(shards.folder)
    kept = [kind for kind in KINDS if kind not in made and records_path(REPORTS, kind).is_file()]
    print(
        f"made: {', '.join(made)}" + (f"; kept as they were: {', '.join(kept)}" if kept else ""),
        flush=True,
    )
    return subprocess.run([sys.executable, "-m", "studies", "report"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
