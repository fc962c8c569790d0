"""Take the steps of torch's optimizers in optax, and print where formulas differ and how far the steps are apart."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gradcheck_suite.cli import arguments as output_paths
from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.records import append_record, write_document
from gradcheck_suite.core.text import aligned
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run import environment

if TYPE_CHECKING:
    from gradcheck_suite.studies.optimizer_steps import Row


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("optimizers", nargs="*", metavar="OPTIMIZER", help="such as adam; without one, all of them")
    parser.add_argument(
        "--seeds",
        type=parsers.positive_integer,
        default=3,
        metavar="N",
        help="runs of steps for each optimizer's settings, implementation and dtype (default %(default)s)",
    )
    output_paths.add_rows(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compute, print and record the rows; a step that is not within its bound is a finding."""
    environment.expect_main_job()
    if find_spec("optax") is None:
        raise CannotRunHere("the command steps needs optax: pip install 'gradcheck-suite[steps]'")
    output_paths.expect_writable(arguments.reports, json=arguments.json)
    environment.prepare()
    from gradcheck_suite.run.instance import checked_device
    from gradcheck_suite.studies.optimizer_steps import compare
    from gradcheck_suite.studies.optimizers import COUNTERPARTS

    checked_device(arguments.device)
    if unknown := [name for name in arguments.optimizers if name not in COUNTERPARTS]:
        raise UsageError(f"optimizer must be one of {', '.join(COUNTERPARTS)}; got {unknown[0]!r}")
    rows = []
    for name in arguments.optimizers or COUNTERPARTS:
        rows.append(compare(COUNTERPARTS[name], range(arguments.seeds), arguments.device))
        print("\n".join(_lines(rows[-1])), flush=True)
    apart = sum(not row.agree for row in rows)
    print(f"optimizers: {len(rows)}; steps of torch and optax differ by more than rounding in {apart}")
    data = {"device": arguments.device, "rows": [row.to_json() for row in rows]}
    about = environment.environment()
    append_record(arguments.reports, "step", data, environment=about)
    write_document(arguments.json, about, data)
    return exit_status.status_of(violated=False, findings=apart > 0)


def _lines(row: Row) -> list[str]:
    """Return what was found of an optimizer, and where its formulas differ from those of optax."""
    worst = ", ".join(f"{ratio:.2g} of what is allowed in {dtype}" for dtype, ratio in row.ratios.items())
    verdict = "agrees" if row.agree else "DIFFERS"
    head = aligned([(row.counterpart.torch, f"{verdict}, {row.cases} cases, worst error {worst}")])
    outside = [f"not compared: {row.counterpart.outside}"] if row.counterpart.outside else []
    return [*head, *(f"    {line}" for line in (f"optax: {row.counterpart.optax}", *row.counterpart.differs, *outside))]
