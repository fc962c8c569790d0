"""Take the steps of torch's optimizers in optax: where formulas differ, and how far the steps are
apart.
"""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.text import of_bound
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.run import environment
from studies.commands import add_rows, prepare, record_rows


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "optimizers", nargs="*", metavar="OPTIMIZER", help="such as adam; without one, all of them"
    )
    parsers.add_number(
        parser,
        "--seeds",
        3,
        "runs of steps for each optimizer's settings, implementation and dtype",
    )
    add_rows(parser)


def run(arguments: Namespace) -> int:
    """Compute, print and record the rows; a step that is not within its bound is a finding."""
    environment.expect_main_job()
    if find_spec("optax") is None:
        raise CannotRunHere("the command steps needs optax: pip install optax")
    prepare(arguments)
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
        print(
            *[f"{row.counterpart.torch}  {verdict}", *(f"    {line}" for line in below)],
            sep="\n",
            flush=True,
        )
    apart = sum(not row.agree for row in rows)
    print(
        f"optimizers: {len(rows)}; steps of torch and optax differ by more than rounding in {apart}"
    )
    record_rows(
        arguments, "step", {"device": arguments.device, "rows": [row.to_json() for row in rows]}
    )
    return exit_status.status_of(violated=False, findings=apart > 0)
