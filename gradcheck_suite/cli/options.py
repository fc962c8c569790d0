"""The options of a verification, declared once for the command line and for pytest.

Each is a field of `VerifyOptions`, which has its default; the field's name is the keyword of the pytest marker.
"""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from gradcheck_suite.cli import parsers
from gradcheck_suite.errors import UsageError
from gradcheck_suite.schema.case import DEVICES, DTYPES
from gradcheck_suite.schema.contract import ASSUMPTIONS, AUTOCAST_DTYPES, checked_assumptions
from gradcheck_suite.schema.options import MAX_RANKS, OPTIMIZER_NAMES, VerifyOptions

DEFAULTS = VerifyOptions()
MARKER_OPTIONS = tuple(field.name for field in fields(VerifyOptions))


@dataclass(frozen=True)
class Option:
    """One option of the command line.

    Attributes:
        field: the field of `VerifyOptions` that it sets.
        flag: such as `"--examples"`.
        metavar: of its value, in the help.
        help: what it does, without its default.
        read: text -> value; raises `argparse.ArgumentTypeError`. None for a flag, which takes no value.
        repeatable: whether each use adds one value to a tuple.
    """

    field: str
    flag: str
    metavar: str
    help: str
    read: Callable[[str], Any] | None
    repeatable: bool = False


EXAMPLES = Option("examples", "--examples", "N", "cases drawn for each loop", parsers.positive_integer)
SEED = Option("seed", "--seed", "S", "the same seed and the same versions draw the same cases", parsers.seed)
TIME_LIMIT = Option(
    "time_limit_s",
    "--time-limit",
    "SECONDS",
    "how long a loop may take on one case before it counts as one that hangs",
    parsers.seconds,
)
AUTOCAST = Option(
    "autocast",
    "--autocast",
    "DTYPE",
    f"the loops may compute their losses under torch.autocast in {' or '.join(AUTOCAST_DTYPES)} (default: what a loop "
    "declares)",
    parsers.one_of(AUTOCAST_DTYPES),
)


def _assumption(text: str) -> str:
    try:
        checked_assumptions((text,))
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


OPTIONS = (
    EXAMPLES,
    SEED,
    Option("dtype", "--dtype", "DTYPE", f"of parameters and data: {', '.join(DTYPES)}", parsers.one_of(DTYPES)),
    Option("device", "--device", "DEVICE", " or ".join(DEVICES), parsers.one_of(DEVICES)),
    Option(
        "ranks",
        "--ranks",
        "N",
        f"processes of torch.distributed that train together, 1 to {MAX_RANKS}: each has its own micro-batches, and a "
        "window is what all contribute",
        parsers.positive_integer,
    ),
    Option(
        "optimizer",
        "--optimizer",
        "NAME",
        f"a real optimizer, so that parameters move and their path is judged too: {', '.join(OPTIMIZER_NAMES)} "
        "(default: one whose step changes nothing, in some cases normalized)",
        lambda name: parsers.one_of(OPTIMIZER_NAMES)(name.lower()),
    ),
    Option(
        "assumes",
        "--assume",
        "NAME",
        "what the loops rely on, so that only such cases are drawn; repeatable: "
        + "; ".join(f"{name} ({meaning})" for name, meaning in ASSUMPTIONS.items()),
        _assumption,
        repeatable=True,
    ),
    AUTOCAST,
    TIME_LIMIT,
    Option("quiet_loop", "--quiet-loop", "", "discard what the loops print", None),
)


def add_option(parser: parsers.Parser, option: Option) -> None:
    """Add one option to a command."""
    default = getattr(DEFAULTS, option.field)
    if option.read is None:
        parser.add_argument(option.flag, dest=option.field, action="store_true", help=option.help)
        return
    shown = f"{default:g}" if isinstance(default, float) else default
    parser.add_argument(
        option.flag,
        dest=option.field,
        type=option.read,
        metavar=option.metavar,
        action="append" if option.repeatable else "store",
        default=list(default) if option.repeatable else default,
        help=option.help if default in (None, ()) else f"{option.help} (default {shown})",
    )


def options_of(arguments: Namespace) -> VerifyOptions:
    """Return the options that a command line sets."""
    return DEFAULTS.replace(**{option.field: getattr(arguments, option.field) for option in OPTIONS})
