"""The commands of `python -m studies`: modules with `add_arguments(parser)` and `run(arguments)`,
and their table.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from gradcheck_suite.cli import Command, CommandLine
from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli.exit_status import DISAGREEMENT, HOLDS, JUDGED, VIOLATED
from gradcheck_suite.core.case import DEVICES
from gradcheck_suite.core.records import append_record, write_document
from gradcheck_suite.run import environment
from studies.records import KINDS

PROGRAM = CommandLine(
    "python -m studies",
    "Measure torch, JAX and gradcheck-suite itself.",
    {
        "zoo": Command(
            "run the known bugs and print which are found, after how many cases",
            "studies.commands.zoo",
            ("zoo --list", "zoo mean-of-means --seeds 3"),
            {
                **JUDGED,
                HOLDS: "every known bug is found and named, and every sound loop holds",
                VIOLATED: "a bug is missed or misnamed, or a sound loop is violated",
            },
        ),
        "ports": Command(
            "judge ports with planted faults: which are found, placed and named",
            "studies.ports.command",
            (
                "ports --list",
                "ports swiglu diffusion/epsilon",
                "ports --tolerances",
                "ports --public flax-0.12.8",
            ),
            {
                HOLDS: "every fault is found and none misnamed, and every sound pair holds",
                VIOLATED: "a fault is missed or misnamed, or a sound pair is blamed",
            },
        ),
        "claims": Command(
            "put the claims about gradient zeroing to the test",
            "studies.commands.claims",
            ("claims C2.1",),
            {
                HOLDS: "the claims are put to the test, whatever their answers",
                VIOLATED: "the loops that the sources print are not judged as they are known to be",
            },
        ),
        "calibrate": Command(
            "count false alarms on sound loops, and how small a planted error is found",
            "studies.commands.calibrate",
            ("calibrate --checks 200 --planted 5 --dtypes float64",),
            {
                **JUDGED,
                HOLDS: "no false alarm",
                VIOLATED: "a sound loop is violated (a false alarm)",
            },
        ),
        "atlas": Command(
            "print where torch and JAX choose different derivatives: kinks, ties, limits",
            "studies.commands.atlas",
            ("atlas relu abs",),
            {HOLDS: "the rows are printed, also where torch and JAX differ"},
        ),
        "steps": Command(
            "take the steps of torch's optimizers in optax, and print how far they are apart",
            "studies.commands.steps",
            ("steps adam --seeds 1",),
            {
                HOLDS: "every step is within its bound",
                DISAGREEMENT: "some step of optax is not (a finding)",
            },
        ),
        "scripts": Command(
            "run public training scripts with and without the audit",
            "studies.public_scripts",
            ("scripts checkouts nanoGPT", "scripts --page studies/docs/public-scripts.md"),
            {
                HOLDS: "the audit is right about every run",
                VIOLATED: "it is not, or a run could not be made",
            },
        ),
        "gpu": Command(
            "run what needs a CUDA device: correctness, time or memory",
            "studies.commands.gpu",
            (
                "gpu --out build/gpu --part correctness",
                "gpu --out build/rehearsal --part memory --device cpu",
            ),
            {
                HOLDS: "every command ended as expected",
                VIOLATED: "some command did not, or was stopped before its end",
            },
        ),
        "campaign": Command(
            "run zoo, calibrate, verify or trainers in shards: several processes, resumable",
            "studies.commands.campaign",
            ("campaign --workers 2 zoo --seeds 1",),
            JUDGED,
            passes_on=True,
        ),
        "report": Command(
            "build one page from the records: HTML, Markdown and JSON",
            "studies.commands.report",
            ("report", "report --compare OLD NEW"),
            {HOLDS: "the page is written, or the runs are compared"},
        ),
    },
)


def prepare(arguments: Namespace) -> None:
    """Refuse what cannot run or be written here, then import torch and JAX."""
    environment.expect_main_job()
    parsers.expect_writable(arguments.reports, json=getattr(arguments, "json", None))
    environment.prepare()


def record_rows(arguments: Namespace, kind: str, data: Mapping[str, Any]) -> None:
    """Record what a command found, and write it where `--json` says."""
    about = environment.environment()
    append_record(arguments.reports, KINDS[kind], data, environment=about)
    write_document(arguments.json, about, data)


def add_rows(parser: parsers.Parser) -> None:
    """Add `--device`, `--json` and `--reports` of a command that computes rows by torch and by JAX."""
    parser.add_argument(
        "--device",
        type=parsers.choice_of(DEVICES),
        default="cpu",
        help="where torch computes (default %(default)s)",
    )
    parsers.add_json(parser, "the rows")
    parsers.add_reports(parser, "the rows are recorded in DIR/records")
