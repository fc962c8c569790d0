"""Every option, as its field declares it: on the command line, in `pyproject.toml` and in Python."""

from __future__ import annotations

import json
import math
import re

import pytest

from gradcheck_suite import UsageError, audit, verify
from gradcheck_suite.cli.arguments import (
    OutputOptions,
    Parser,
    add_options,
    configured,
    parsed,
    to_argv,
)
from gradcheck_suite.core.options import (
    OF_COMMANDS,
    OPTIMIZER_NAMES,
    PATH,
    AuditOptions,
    Option,
    PortOptions,
    VerifyOptions,
    options_of,
)
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.run.optimizers import OPTIMIZERS

POSITIVE = "expected a positive integer, got {}"
SECONDS = "expected a positive number of seconds, got {}"
BOOLEAN = "expected True or False, got {}"
ROWS = [
    # the field, a value that it takes and values that it refuses (text first, if the command line
    # takes any), the error
    (VerifyOptions, "examples", 3, ("0", "abc", "1.5", 0, True, 2.0), POSITIVE),
    (
        VerifyOptions,
        "seed",
        7,
        ("-1", "1.5", "4294967296", -1, True),
        "expected an integer from 0 to 4294967295, got {}",
    ),
    (
        VerifyOptions,
        "dtype",
        "float32",
        ("int8",),
        "expected one of float64, float32, bfloat16, float16; got {}",
    ),
    (VerifyOptions, "dtype", "float32", ("float23",), "got {} (did you mean 'float32'?)"),
    (VerifyOptions, "device", "cuda", ("tpu", None), "expected one of cpu, cuda; got {}"),
    (VerifyOptions, "ranks", 4, ("0", "5", 5, True), "expected an integer from 1 to 4, got {}"),
    (VerifyOptions, "optimizer", "adamw", (3,), "expected a name, got {}"),
    (
        VerifyOptions,
        "assumes",
        ("no-layer:embedding", "whole-windows"),
        ("luck", "no-layer:"),
        "no-layer:KIND; got {}",
    ),
    (
        VerifyOptions,
        "autocast",
        "bfloat16",
        ("float32",),
        "expected one of bfloat16, float16; got {}",
    ),
    (VerifyOptions, "time_limit_s", 2.5, ("0", "nan", "inf", "x", 0, math.inf, True), SECONDS),
    (VerifyOptions, "quiet_loop", True, (1, None), BOOLEAN),
    (VerifyOptions, "jax", "xla", ("XLA", "torch", None, 1), "expected one of numpy, xla; got {}"),
    (
        VerifyOptions,
        "second_opinion_s",
        0,
        (-1, None),
        "expected a number of seconds, 0 or more; got {}",
    ),
    (AuditOptions, "steps", 3, ("0", 0, True), POSITIVE),
    (
        AuditOptions,
        "budget",
        "1.5%",
        ("3", "0%", "101%", "x%", 3),
        "expected a share of the run's time, such as 3%",
    ),
    (AuditOptions, "every", 3, ("0", 0), POSITIVE),
    (AuditOptions, "accumulation_steps", 3, ("-1", -1), POSITIVE),
    (
        AuditOptions,
        "accept",
        ("mean-of-means", "wrong-scale@a.py:3"),
        ("mean", "@a.py:3", 3),
        "expected NAME, NAME@FILE or ",
    ),
    (AuditOptions, "accept", ("zero-gradient", "no-pass@a.py"), ("findings",), "expected NAME, "),
    (
        AuditOptions,
        "fail_on",
        ("findings", "zero-gradient", "no-pass", "step-per-micro-batch"),
        ("finding", "zero-gradient@a.py", 3),
        "expected the name of a finding or a reason",
    ),
    (
        AuditOptions,
        "objectives",
        ("a.py:3=n",),
        ("a.py=n", "a.py:3", "a.py:3=", 3),
        "expected FILE:LINE=COUNT, such as",
    ),
    (AuditOptions, "eager", True, ("no",), BOOLEAN),
    (
        AuditOptions,
        "without",
        ("sums", "batch"),
        ("sum",),
        "expected one of weights, sums, batch; got {}",
    ),
    (AuditOptions, "jax", True, (0,), BOOLEAN),
    (AuditOptions, "stop_on_violation", True, (0,), BOOLEAN),
    (PortOptions, "examples", 3, ("0", 0), POSITIVE),
    (PortOptions, "seed", 7, ("-1", -1), "expected an integer from 0 to 4294967295, got {}"),
    (
        PortOptions,
        "dtype",
        "float32",
        ("int8",),
        "expected one of float64, float32, bfloat16, float16; got {}",
    ),
    (
        PortOptions,
        "accept",
        ("eps", "norm-order@a.py:3", "eps and gelu-approximation"),
        ("epps", "mean-of-means", 3),
        "expected NAME, NAME@FILE or ",
    ),
    (PortOptions, "show_map", True, (0,), BOOLEAN),
]
SHARED = [
    (OutputOptions, "output_format", "sarif"),
    (OutputOptions, "quiet", True),
    (OutputOptions, "json", "r.json"),
    (OutputOptions, "html", "r.html"),
    (OutputOptions, "reports", "kept"),
    (OutputOptions, "pythonpath", ()),
    (OutputOptions, "baseline", ()),
    (OutputOptions, "always_fail_on", ("findings", "zero-gradient")),
]
"""Options of a command alone, which takes paths as texts."""


def declared(options, name) -> Option:
    return next(one for one in options_of(options) if one.name == name)


def command_line(options, *arguments):
    parser = Parser(prog="command")
    add_options(parser, options)
    return parsed(parser.parse_args([*arguments]), options)


def argv(one: Option, value):
    if value is True:
        return [one.flag]
    return [
        part for each in (value if one.repeatable else [value]) for part in (one.flag, str(each))
    ]


def test_every_option_has_a_row():
    for options in (*OF_COMMANDS, OutputOptions):
        rows = [name for cls, name, *_ in (*ROWS, *SHARED) if cls is options]
        assert list(dict.fromkeys(rows)) == [one.name for one in options_of(options)]


@pytest.mark.parametrize(("options", "name", "value"), [*(row[:3] for row in ROWS), *SHARED])
def test_a_value_is_the_same_from_the_command_line_from_pyproject_and_in_python(
    options, name, value, project
):
    one, title = (
        declared(options, name),
        ".".join(["tool.gradcheck-suite", *filter(None, [options.table])]),
    )
    kept = PATH.parsed(value) if one.values is PATH and not one.repeatable else value
    given = options(**{name: kept})
    assert getattr(given, name) == kept
    if not one.flag:
        return
    assert command_line(options, *argv(one, value)) == given
    assert command_line(options, *to_argv(given)) == given
    (project / "pyproject.toml").write_text(f"[{title}]\n{one.key} = {json.dumps(value)}\n")
    if one.in_project:
        assert configured(options) == {name: kept}
        assert command_line(options) == given
        assert command_line(options, *to_argv(given)) == given
    else:
        with pytest.raises(
            UsageError, match=rf"\[{title}\] in pyproject.toml: expected .*; got '{one.key}'"
        ):
            configured(options)


REFUSED = [(cls, name, wrong, said) for cls, name, _, wrongs, said in ROWS for wrong in wrongs]


@pytest.mark.parametrize(("options", "name", "wrong", "said"), REFUSED)
def test_a_wrong_value_is_refused_with_one_message_on_every_path(
    options, name, wrong, said, run, project
):
    one, command = declared(options, name), options.table
    message = said.format(repr(wrong))
    if isinstance(wrong, str) and one.flag and one.metavar:
        outcome = run(command, one.flag, wrong, "loops.py")
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)
        assert re.search(
            rf"^gradcheck-suite {command}: error: (-\w/)?{one.flag}: expected ", outcome.err
        )
        assert message in outcome.err
    with pytest.raises(UsageError, match=rf"^{name}: expected ") as error:
        options(**{name: (wrong,) if one.repeatable else wrong})
    assert message in str(error.value)
    if one.in_project and wrong is not None and wrong is not math.inf:
        text = json.dumps([wrong] if one.repeatable else wrong)
        (project / "pyproject.toml").write_text(
            f"[tool.gradcheck-suite.{command}]\n{one.key} = {text}\n"
        )
        outcome = run(command, "loops.py")
        where = f"[tool.gradcheck-suite.{command}] in pyproject.toml: {one.key}"
        assert outcome.err.startswith(f"gradcheck-suite {command}: error: {where}: expected ")
        assert message in outcome.err
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            "tool.gradcheck-suite]\nreport = 'kept'",
            "expected one of reports, pythonpath, accept, fail-on, verify, audit, port; got 'report'",
        ),
        ("tool.gradcheck-suite]\nreports = 3", "reports: expected a path, got 3"),
        ("tool.gradcheck-suite]\nreports = ''", "reports: expected a path, got ''"),
        (
            "tool.gradcheck-suite]\nverify = 3",
            "[tool.gradcheck-suite.verify] in pyproject.toml: expected a table",
        ),
        (
            "tool.gradcheck-suite.verify]\nassume = 'whole-windows'",
            "assume: expected a list, with one of equal-micro",
        ),
        ("tool.gradcheck-suite.verify]\nexampels = 3", "got 'exampels' (did you mean 'examples'?)"),
        ("tool.gradcheck-suite.verify]\nexamples = [", "pyproject.toml: "),
    ],
)
def test_a_wrong_table_is_one_line(run, project, table, said):
    (project / "pyproject.toml").write_text(f"[{table}\n")
    outcome = run("verify", "zero_")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert said in outcome.err


def test_the_command_line_overrides_pyproject_and_adds_to_its_lists(project, monkeypatch):
    (project / "pyproject.toml").write_text(
        "[tool.gradcheck-suite]\nreports = 'kept'\n"
        "[tool.gradcheck-suite.verify]\nexamples = 5\ntime-limit = 3\nassume = ['one-epoch']\n"
    )
    (project / "inside").mkdir()
    monkeypatch.chdir(project / "inside")
    assert str(command_line(OutputOptions).reports) == "../kept"
    given = command_line(
        VerifyOptions, "--examples", "2", "--time-limit", "30", "--assume", "whole-windows"
    )
    assert (given.examples, given.time_limit_s, given.assumes) == (
        2,
        30,
        ("one-epoch", "whole-windows"),
    )
    assert command_line(VerifyOptions, *to_argv(given)) == given
    assert VerifyOptions().time_limit_s == 30  # Python reads no table


@pytest.mark.parametrize(
    ("call", "fields", "said"),
    [
        (
            audit,
            {"stepz": 3},
            "expected one of steps, budget, every, .*; got 'stepz' (did you mean 'steps'?)",
        ),
        (audit, {"steps": 0}, "steps: expected a positive integer, got 0"),
        (audit, {"jax": True, "without": "batch"}, "leave out `without batch`"),
        (
            VerifyOptions().replace,
            {"exampels": 3},
            "expected one of examples, seed, .*; got 'exampels' (did you",
        ),
        (
            VerifyOptions().replace,
            {"assumes": ("sum-reduction", "mean-reduction")},
            "exclude each other",
        ),
        (
            lambda **fields: verify(MODES["zero_"], **fields),
            {"examples": 0},
            "examples: expected a positive integer",
        ),
        (
            lambda **fields: verify(MODES["zero_"], **fields),
            {"optimizer": "lion"},
            "optimizer: expected one of sgd",
        ),
    ],
)
def test_what_python_refuses(call, fields, said):
    with pytest.raises(UsageError, match=re.escape(said).replace(r"\.\*", ".*")):
        call(**fields)


def test_one_value_of_a_repeatable_option_may_stand_alone():
    assert AuditOptions(accept="mean-of-means").accept == ("mean-of-means",)


def test_the_docstrings_list_every_keyword():
    for taker, options in ((verify, VerifyOptions), (audit, AuditOptions)):
        for one in options_of(options):
            assert f"{one.name}: {one.summary}" in taker.__doc__


def test_every_optimizer_has_a_name_that_the_options_accept():
    assert tuple(OPTIMIZERS) == OPTIMIZER_NAMES
