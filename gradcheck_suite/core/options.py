"""The options of `verify`, `audit` and `port`, each declared once, as a field of a frozen
dataclass.

The field gives the option of the command line, its key in `pyproject.toml`, the keyword in Python,
and its line in the help and in the documents; its values are checked in one place, with one
message. A new option is a new field. A command with options of its own adds a class here and to
`OF_COMMANDS`.

This module must import neither torch nor JAX, and must not parse: `cli/arguments.py` does.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from gradcheck_suite.core.case import DEVICES, DTYPES, MAX_SEED, is_integer
from gradcheck_suite.core.causes import CAUSES, is_cause
from gradcheck_suite.core.contract import (
    ASSUMPTIONS,
    AUTOCAST_DTYPES,
    DEFAULT_TIME_LIMIT,
    Loop,
    autocast_of,
    checked_assumptions,
    is_assumption,
    is_jax,
)
from gradcheck_suite.core.faults import FAULTS, names_of
from gradcheck_suite.core.findings import FINDINGS, Occurrence
from gradcheck_suite.core.formats import Accepted, is_accepted
from gradcheck_suite.core.text import suggestion
from gradcheck_suite.errors import UsageError

_T = TypeVar("_T")
NUMPY = "numpy"
XLA = "xla"
EVALUATORS = (NUMPY, XLA)
"""What evaluates JAX's derivatives."""


# The values that an option takes.


@dataclass(frozen=True)
class OptionValues:
    """The values that an option takes.

    Attributes:
        expected: what they are, in words that follow "expected".
        accepts: value -> whether it is one of them.
        read: text -> value; raises `ValueError` for a text that stands for none.
        names: the values that a misspelt one may stand for.
    """

    expected: str
    accepts: Callable[[Any], bool]
    read: Callable[[str], Any] = str
    names: tuple[str, ...] = ()

    def checked(self, value: Any) -> Any:
        """Return a value that is one of them; else raise `UsageError`."""
        if not self.accepts(value):
            raise self.refusal(value)
        return value

    def parsed(self, text: str) -> Any:
        """Return the value that a text stands for; raise `UsageError` where it stands for none."""
        try:
            value = self.read(text)
        except ValueError:
            raise self.refusal(text) from None
        if not self.accepts(value):
            raise self.refusal(text)
        return value

    def refusal(self, given: Any) -> UsageError:
        """Return the error for something that is none of them."""
        # `--accept NAME@FILE`: the name alone may be misspelt
        name = given.partition("@")[0] if isinstance(given, str) else ""
        meant = suggestion(name, self.names) if name else ""
        return UsageError(
            f"expected {self.expected}{';' if ', ' in self.expected else ','} got {given!r}{meant}"
        )


def integer(low: int, high: int | None = None, expected: str = "") -> OptionValues:
    """Return the whole numbers from `low` to `high`, or without an upper limit."""

    def accepts(value: Any) -> bool:
        return is_integer(value) and value >= low and (high is None or value <= high)

    return OptionValues(expected or f"an integer from {low} to {high}", accepts, int)


def one_of(names: Iterable[str], read: Callable[[str], Any] = str) -> OptionValues:
    """Return some names."""
    allowed = tuple(names)
    return OptionValues(
        f"one of {', '.join(allowed)}",
        allowed.__contains__,
        read,
        allowed,
    )


def _is_number(value: Any, least: float) -> bool:
    return (
        (isinstance(value, float) or is_integer(value)) and math.isfinite(value) and value >= least
    )


def _is_limit(value: Any) -> bool:
    # None is no limit, which Python alone can say
    return value is None or (_is_number(value, 0) and value > 0)


POSITIVE_INTEGER = integer(1, expected="a positive integer")
NATURAL = integer(0, expected="0 or a positive integer")
SEED = integer(0, MAX_SEED)
SECONDS = OptionValues("a positive number of seconds", _is_limit, float)


class _Entries(OptionValues):
    def checked(self, value: Any) -> Accepted:
        if isinstance(value, Accepted):
            return value
        known = [field.name for field in fields(Accepted)]
        if not isinstance(value, dict):
            raise self.refusal(value)
        # a key that nothing reads would be an entry that silently does less than it says
        for key in value.keys() - {*known}:
            raise one_of(known).refusal(key)
        for key in ("fault", "file", "reason"):
            if not isinstance(value.get(key), str) or not value[key].strip():
                raise UsageError(f"{key} is no text: expected {self.expected}, got {value!r}")
        for name in sorted(names_of(value["fault"])):
            one_of((*FAULTS, *FINDINGS, *CAUSES)).checked(name)
        if "line" in value:
            POSITIVE_INTEGER.checked(value["line"])
        return Accepted(**value)


ACCEPTED = _Entries(
    'entries such as {fault = "wrong-scale", file = "train.py", reason = "why"}', lambda _: True
)
FLAG = OptionValues("True or False", lambda value: isinstance(value, bool))
NAME = OptionValues("a name", lambda value: isinstance(value, str), str.lower)
PATH = OptionValues("a path", lambda value: isinstance(value, Path), Path)
ASSUMPTION = OptionValues(
    f"one of {', '.join(ASSUMPTIONS)}", is_assumption, names=tuple(ASSUMPTIONS)
)


# One option, and a dataclass of options.


@dataclass(frozen=True)
class Option:
    """How a field of an options' dataclass is set.

    Attributes:
        name: of the field, which is the keyword in Python.
        default: of the field.
        values: that it takes; a repeatable option takes several of them.
        help: what it is, without its default.
        flag: on the command line, such as `"--examples"`; empty where only Python sets it, or
            `pyproject.toml`.
        short: a second flag of one letter, such as `"-n"`; empty for none.
        metavar: of its value, in the help.
        details: what only the help of the command line adds, such as the meaning of each value;
            empty for nothing.
        unset: what happens by default, in words, where the default does not say it.
        repeatable: whether the field is a tuple, to which each use of the flag adds one value.
        in_project: whether a table of `pyproject.toml` may set it.
        project_key: its key there, where it has no flag.
    """

    name: str
    default: Any
    values: OptionValues
    help: str
    flag: str
    short: str = ""
    metavar: str = ""
    details: str = ""
    unset: str = ""
    repeatable: bool = False
    in_project: bool = False
    project_key: str = ""

    @property
    def key(self) -> str:
        """Its key in a table of `pyproject.toml`."""
        return self.flag.removeprefix("--") or self.project_key

    @property
    def default_text(self) -> str:
        """Its default in words; empty for a flag, and where nothing need be said."""
        if self.unset or self.default in (None, ()) or self.values is FLAG:
            return self.unset
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def summary(self) -> str:
        """What it is, and its default."""
        return f"{self.help} (default: {self.default_text})" if self.default_text else self.help

    @property
    def help_text(self) -> str:
        """What the command line says of it."""
        repeatable = "; repeatable" if self.repeatable else ""
        details = f": {self.details}" if self.details else ""
        return self.help + repeatable + details + self.summary.removeprefix(self.help)

    def checked(self, value: Any) -> Any:
        """Return a value as the field keeps it.

        Raises:
            UsageError: it is none that the option takes; the message does not name the option.
        """
        if not self.repeatable:
            # None is "not set", and is a value only where it is the default
            return value if value is None and self.default is None else self.values.checked(value)
        # one name in place of a tuple is what a user means by `accept="wrong-scale"`; its letters
        # are not
        several = [value] if isinstance(value, str) or not isinstance(value, Iterable) else value
        return tuple(dict.fromkeys(self.values.checked(one) for one in several))


def option(default: Any, values: OptionValues, help: str, flag: str = "", **more: Any) -> Any:
    """Return a field of an options' dataclass.

    Args:
        default: of the field.
        values: that it takes.
        help: what it is, without its default.
        flag: on the command line; empty where only Python sets it.
        more: other fields of `Option`.
    """
    return field(default=default, metadata={"values": values, "help": help, "flag": flag, **more})


@dataclass(frozen=True)
class Options:
    """Base of the options' dataclasses: checks the value of every option.

    Raises:
        UsageError: a value is none that its option takes.
    """

    table: ClassVar[str] = ""
    """The table of `[tool.gradcheck-suite]` in `pyproject.toml` that sets them; empty for that table itself."""

    def __post_init__(self) -> None:
        for declared in options_of(type(self)):
            try:
                value = declared.checked(getattr(self, declared.name))
            except UsageError as error:
                raise UsageError(f"{declared.name}: {error}") from None
            # the class is frozen, and keeps checked values: a name in lower case, several as a
            # tuple
            object.__setattr__(self, declared.name, value)

    def replace(self, **changes: Any) -> Self:
        """Return the options with some fields changed.

        `UsageError` names a field that does not exist.
        """
        names = [field.name for field in fields(self)]
        for name in sorted(changes.keys() - set(names)):
            raise one_of(names).refusal(name)
        return replace(self, **changes)


def options_of(declared: type[Options]) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in its order."""
    return tuple(
        Option(name=field.name, default=field.default, **field.metadata)
        for field in fields(declared)
        if field.metadata
    )


def takes(declared: type[Options]) -> Callable[[_T], _T]:
    """Return a decorator that adds the options to the docstring of what takes them as keywords."""
    lines = [f"{one.name}: {one.summary}." for one in options_of(declared)]
    section = "\n".join(("Keyword Args:", *(f"    {line}" for line in lines)))

    def add(taker: _T) -> _T:
        # Python 3.13 takes the indentation out of docstrings
        own = inspect.cleandoc(taker.__doc__ or "")
        taker.__doc__ = f"{own}\n\n{section}\n"
        return taker

    return add


# The options of a verification.


OPTIMIZER_NAMES = (
    *(
        "sgd",
        "momentum",
        "nesterov",
        "adam",
        "adamw",
        "adagrad",
        "rmsprop",
        "adadelta",
        "adamax",
        "nadam",
        "radam",
    ),
    *("rprop", "asgd", "adafactor", "lbfgs", "muon", "sparseadam", "normalized"),
)
"""The names of `optimizers.OPTIMIZERS`, which cannot be imported without torch; a test holds the two equal."""
MAX_RANKS = 4
"""Ranks that a verification may start on one machine."""
SECOND_OPINION_S = 60.0
"""Seconds that one verification spends on JAX's second opinion."""
BY_FRAMEWORK = {"torch": (200, "float64"), "jax": (50, "float32")}
"""Cases and dtype of a verification where neither is asked for, by the framework of the loop: JAX compiles each case,
and optax accumulates in float32 unless it is told otherwise."""


CAST_BY_AUTOCAST = "float32"
"""The dtype of a verification under autocast where none is asked for. `torch.autocast` leaves float64 alone:
https://docs.pytorch.org/docs/stable/amp.html"""


@dataclass(frozen=True)
class VerifyOptions(Options):
    """What one verification draws, and how long it may take."""

    table: ClassVar[str] = "verify"

    examples: int | None = option(
        None,
        POSITIVE_INTEGER,
        "cases drawn for each loop",
        "--examples",
        short="-n",
        metavar="N",
        unset="200, and 50 for a loop of JAX",
        in_project=True,
    )
    seed: int = option(
        0,
        SEED,
        "seed of the drawn cases; the same seed and versions draw the same cases",
        "--seed",
        metavar="S",
    )
    dtype: str | None = option(
        None,
        one_of(DTYPES),
        f"dtype of parameters and data: {', '.join(DTYPES)}",
        "--dtype",
        metavar="DTYPE",
        unset="float64, and float32 for a loop of JAX or under autocast",
        in_project=True,
    )
    device: str = option("cpu", one_of(DEVICES), " or ".join(DEVICES), "--device", metavar="DEVICE")
    ranks: int = option(
        1,
        integer(1, MAX_RANKS),
        f"processes of torch.distributed that train together, 1 to {MAX_RANKS}: each has its own"
        " micro-batches, and a window is what all contribute",
        "--ranks",
        metavar="N",
    )
    optimizer: str | None = option(
        None,
        NAME,
        "a real optimizer, so that parameters move and their path is judged too",
        "--optimizer",
        details=(
            f"{', '.join(OPTIMIZER_NAMES)}; for a loop of JAX normalized or a factory of optax,"
            " such as adam or lion"
        ),
        metavar="NAME",
        unset="one whose step changes nothing, in some cases normalized",
        in_project=True,
    )
    assumes: tuple[str, ...] = option(
        (),
        ASSUMPTION,
        "what the loops rely on, so that only such cases are drawn",
        "--assume",
        details="; ".join(f"{name} ({meaning})" for name, meaning in ASSUMPTIONS.items()),
        metavar="NAME",
        repeatable=True,
        in_project=True,
    )
    autocast: str | None = option(
        None,
        one_of(AUTOCAST_DTYPES),
        "the loops may compute their losses under torch.autocast in"
        f" {' or '.join(AUTOCAST_DTYPES)}",
        "--autocast",
        metavar="DTYPE",
        unset="what a loop declares",
        in_project=True,
    )
    time_limit_s: float | None = option(
        DEFAULT_TIME_LIMIT,
        SECONDS,
        "seconds that a loop may take on one case before it counts as one that hangs",
        "--time-limit",
        metavar="SECONDS",
        in_project=True,
    )
    quiet_loop: bool = option(
        False, FLAG, "discard what the loops print", "--quiet-loop", in_project=True
    )
    jax: str = option(
        NUMPY,
        one_of(EVALUATORS),
        "what evaluates JAX's derivatives: numpy, checked by XLA, or xla alone",
        "--jax",
        metavar="NAME",
        in_project=True,
    )
    second_opinion_s: float = option(
        SECOND_OPINION_S,
        OptionValues("a number of seconds, 0 or more", lambda value: _is_number(value, 0), float),
        "seconds after which JAX computes no further window of a user's Problem; it computes at"
        " least one",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "assumes", tuple(sorted(checked_assumptions(self.assumes))))

    def of(self, loop: Loop) -> ChosenOptions:
        """Return the options of a loop, with a number of cases and a dtype.

        Raises:
            UsageError: no optimizer of torch has the name, and the loop is one of torch.
        """
        # a loop of JAX may name any factory of optax, which is not imported here
        if self.optimizer is not None and not is_jax(loop):
            known = one_of(OPTIMIZER_NAMES)
            if not known.accepts(self.optimizer):
                raise UsageError(f"optimizer: {known.refusal(self.optimizer)}")
        examples, dtype = BY_FRAMEWORK["jax" if is_jax(loop) else "torch"]
        if self.autocast or autocast_of(loop):
            dtype = CAST_BY_AUTOCAST
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return ChosenOptions(
            **{**chosen, "examples": self.examples or examples, "dtype": self.dtype or dtype}
        )


@dataclass(frozen=True)
class ChosenOptions(VerifyOptions):
    """The options of one loop: none of them is left open."""

    examples: int = 0
    dtype: str = ""


# The options of an audit.


INSTRUMENTS = ("weights", "sums", "batch")
"""What can be switched off by `without`: the weights of items, the sums of arrivals, the window again in one batch."""
LIVE_DIAGNOSES = tuple(fault.name for fault in FAULTS.values() if fault.command != "verify")
"""Every diagnosis of a live run."""
LIVE_NAMES = (*LIVE_DIAGNOSES, *FINDINGS)
"""Every name that an audit gives: of a fault, a finding or a reason."""
ALL_FINDINGS = "findings"
"""Stands for every finding."""
FAIL_ON = OptionValues(
    f"the name of a finding or a reason, or {ALL_FINDINGS}",
    (*LIVE_NAMES, ALL_FINDINGS).__contains__,
    names=(*LIVE_NAMES, ALL_FINDINGS),
)

DEFAULT_BUDGET = "3%"
NO_BUDGET = "none"
EVERY = 10
"""Of an audit: its share of the run's time, no limit of it, and windows from one to the next that is computed again."""


def _budget_share(budget: Any) -> float | None:
    """Return the share that a text such as `3%` stands for, infinity for no budget, None for a text
    that is neither.
    """
    if budget == NO_BUDGET:
        return math.inf
    number = re.fullmatch(r"(\d+\.?\d*|\.\d+)%", budget) if isinstance(budget, str) else None
    share = float(number[1]) / 100 if number else 0.0
    # 0% would judge nothing, and is more likely a mistake than a wish
    return share if 0 < share <= 1 else None


def _is_acceptable(value: Any) -> bool:
    return isinstance(value, str) and value.partition("@")[0] in LIVE_NAMES


def _is_objective(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    place, _, count = value.partition("=")
    # whether the expression can be evaluated is only known at the line
    return bool(count) and place.rpartition(":")[2].isdigit()


@dataclass(frozen=True)
class AuditOptions(Options):
    """How a run is audited."""

    table: ClassVar[str] = "audit"

    steps: int | None = option(
        None,
        POSITIVE_INTEGER,
        "optimizer steps to judge; then the script runs on without the audit",
        "--steps",
        short="-n",
        metavar="N",
        unset="all",
    )
    budget: str | None = option(
        None,
        OptionValues(
            f"a share of the run's time, such as {DEFAULT_BUDGET}, or {NO_BUDGET}",
            lambda value: bool(_budget_share(value)),
        ),
        "share of the run's time that the audit may take: after the first windows it judges pairs"
        f" of them, and counts the others; {NO_BUDGET} judges every window",
        "--budget",
        metavar="P%",
        unset=f"{DEFAULT_BUDGET}, and {NO_BUDGET} with --every",
        in_project=True,
    )
    every: int | None = option(
        None,
        POSITIVE_INTEGER,
        "compute the first window and every M-th after it again, in one batch if the model"
        " allows it",
        "--every",
        metavar="M",
        unset=f"the first three, and every {EVERY}th that the budget pays for",
        in_project=True,
    )
    accumulation_steps: int | None = option(
        None,
        POSITIVE_INTEGER,
        "micro-batches that every window must have",
        "--accumulation-steps",
        metavar="K",
        unset="inferred from the run",
    )
    accept: tuple[str, ...] = option(
        (),
        OptionValues(
            "NAME, NAME@FILE or NAME@FILE:LINE, with the name of a fault, a finding or a reason",
            _is_acceptable,
            names=LIVE_NAMES,
        ),
        "report this fault, finding or reason, everywhere or at one place, as accepted",
        "--accept",
        metavar="NAME[@FILE[:LINE]]",
        repeatable=True,
        in_project=True,
    )
    fail_on: tuple[str, ...] = option(
        (),
        FAIL_ON,
        f"end with status 1 where this finding or reason stands; {ALL_FINDINGS}: any finding",
        "--fail-on",
        metavar="NAME",
        repeatable=True,
        in_project=True,
    )
    objectives: tuple[str, ...] = option(
        (),
        OptionValues("FILE:LINE=COUNT, such as 'train.py:40=mask.sum()'", _is_objective),
        "what the mean divides by in a loss that cannot be read: the line of its backward, and an"
        " expression of the names there",
        "--objective",
        metavar="FILE:LINE=COUNT",
        repeatable=True,
        in_project=True,
    )
    eager: bool = option(
        False,
        FLAG,
        "run what torch.compile compiles eagerly, so that its losses can be read",
        "--eager",
        in_project=True,
    )
    without: tuple[str, ...] = option(
        (),
        one_of(INSTRUMENTS),
        f"switch off one of {', '.join(INSTRUMENTS)}",
        "--without",
        metavar="INSTRUMENT",
        repeatable=True,
        in_project=True,
    )
    jax: bool = option(
        False,
        FLAG,
        "let JAX compute the first window too, at the end, if the model has at most a million"
        " parameters",
        "--jax",
        in_project=True,
    )
    stop_on_violation: bool = option(
        False, FLAG, "end the script at its first violation", "--stop-on-violation", short="-x"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jax and "batch" in self.without:
            raise UsageError(
                "jax: JAX computes the window that `batch` computes again: leave out `without"
                " batch`"
            )

    @property
    def share(self) -> float | None:
        """The share of the run's time that the audit may take.

        None where every window is judged.
        """
        # who says how often to compute again has chosen what it may cost
        share = _budget_share(self.budget or (NO_BUDGET if self.every else DEFAULT_BUDGET))
        return None if share == math.inf else share

    def accepts(self, name: str, where: str | None) -> bool:
        """Return whether a finding or a reason is accepted.

        Args:
            name: of it.
            where: its places, each `file:line`, joined by ` < `; None where it has none.
        """
        return any(is_accepted(accepted, name, where) for accepted in self.accept)

    def judged(self, one: Occurrence) -> Occurrence:
        """Return a finding or a reason as what it is to the user: accepted, or one that fails."""
        if self.accepts(one.name, one.where):
            return replace(one, reason=one.reason or "--accept", fails=False)
        # reasons say that something was not judged: each is asked for by its name
        is_any = one.kind == "finding" and ALL_FINDINGS in self.fail_on
        return replace(one, fails=is_any or one.name in self.fail_on)


# The options of a comparison of a port.


def _is_acceptable_cause(value: Any) -> bool:
    return isinstance(value, str) and is_cause(value.partition("@")[0])


@dataclass(frozen=True)
class PortOptions(Options):
    """How a JAX model is compared with a torch module."""

    table: ClassVar[str] = "port"

    examples: int = option(
        20,
        POSITIVE_INTEGER,
        "inputs drawn beside the given ones, some of them of other sizes",
        "--examples",
        short="-n",
        metavar="N",
        in_project=True,
    )
    seed: int = option(
        0, SEED, "seed of the parameters and the inputs that are drawn", "--seed", metavar="S"
    )
    dtype: str = option(
        "float64",
        one_of(DTYPES),
        f"report, too, how exactly both compute in {', '.join(DTYPES[1:])}; the verdict is always"
        " that of float64",
        "--dtype",
        metavar="DTYPE",
        in_project=True,
    )
    accept: tuple[str, ...] = option(
        (),
        OptionValues(
            "NAME, NAME@FILE or NAME@FILE:LINE, with the name of a cause",
            _is_acceptable_cause,
            names=tuple(CAUSES),
        ),
        "report a difference of this cause, everywhere or at one place, as accepted, and judge the"
        " rest",
        "--accept",
        metavar="NAME[@FILE[:LINE]]",
        repeatable=True,
        in_project=True,
    )
    show_map: bool = option(
        False, FLAG, "print which torch tensors each leaf of the parameters comes from", "--map"
    )


OF_COMMANDS: tuple[type[Options], ...] = (VerifyOptions, AuditOptions, PortOptions)
"""The options of the commands that have a table in `pyproject.toml`."""
