"""The pytest plugin: verify a training loop in a test of its own repository.

    def test_my_loop(verify_training_loop):
        verify_training_loop(train)

This module imports neither torch nor jax, so it costs nothing in a run that verifies no loop.
Options and the marker have the prefix `gradcheck`. No Hypothesis profile is registered or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gradcheck_suite.cli.arguments import reader
from gradcheck_suite.core.options import VerifyOptions, options_of
from gradcheck_suite.core.text import of_bound

if TYPE_CHECKING:
    from gradcheck_suite.core.contract import Loop, Problem
    from gradcheck_suite.core.counterexamples import Counterexample
    from gradcheck_suite.core.results import Result
    from gradcheck_suite.port.result import PortResult

MARKER = "gradcheck"
OPTIONS = {one.name: one for one in options_of(VerifyOptions)}
"""The options of the marker and of the fixture, by name."""
OVERRIDES = (OPTIONS["examples"], OPTIONS["seed"])
"""The options that pytest's command line has too, such as `--gradcheck-examples`; they override marker and call."""
SECOND_OPINION_S = 10.0
"""The default of `second_opinion_s` in a test, shorter than that of the command."""
_PROPERTY = "gradcheck-suite"
"""The property of a test's report that has the line of a verified loop; pytest-xdist hands it to the main process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("gradcheck-suite", "verification of training loops")
    for option in OVERRIDES:
        help_text = f"{option.help}; overrides marker and call"
        group.addoption(
            _flag(option.name), type=reader(option.values), metavar=option.metavar, help=help_text
        )
    group.addoption(
        "--gradcheck-reports",
        type=Path,
        metavar="DIR",
        help="store records and counterexamples under DIR, as `gradcheck-suite verify` does",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}({', '.join(OPTIONS)}): how `verify_training_loop` verifies in this test",
    )


@pytest.fixture
def verify_training_loop(request: pytest.FixtureRequest) -> Callable[..., Result]:
    """Return a function that verifies a loop and returns the `Result`.

    The test fails if the loop is violated, if torch and JAX disagree, or if no case could be
    judged. The function takes the loop, a `problem=` in place of random models, and the options of
    the marker.
    """
    config = request.config

    def verify_loop(
        loop: Loop, *, problem: Problem | None = None, name: str | None = None, **options: Any
    ) -> Result:
        # imported here, since pytest loads this plugin in every run, whether a test verifies or not
        from gradcheck_suite.cli.verify import Subject, record, store, verify_subject
        from gradcheck_suite.loops.trainers import PACKAGES
        from gradcheck_suite.run import environment

        environment.set_precision()
        label = name or str(getattr(loop, "__name__", repr(loop)))
        subject = Subject(
            label,
            loop,
            problem,
            None if problem is None else f"{label}'s problem",
            # a stored case is replayed by the loop's name on the command line, which `FILE.py:NAME`
            # is alone
            importable=":" in label,
        )
        with _bad_input_fails():
            chosen = _options(request.node, loop, options)
            result, reached = verify_subject(subject, chosen, lambda verdict: None)
        request.node.user_properties.append((_PROPERTY, _summary_line(result)))
        reports = config.getoption("--gradcheck-reports")
        stored = None
        if reports is not None:
            about = environment.environment(PACKAGES)
            stored = store(subject, chosen, result, reports, about)
            record(subject, chosen, result, reached, reports, about, stored)
        # the interrupt was caught to keep what was verified so far: the run of the tests must end
        # all the same
        if result.interrupted:
            raise KeyboardInterrupt
        if message := _failure(result, stored):
            pytest.fail(message, pytrace=False)
        return result

    return verify_loop


@pytest.fixture
def audit_training() -> Callable[..., AbstractContextManager[Any]]:
    """Return a context manager that audits the code in its block and yields the audit.

    The test fails if a step is violated, or if none could be judged. It takes the options of
    `gradcheck_suite.audit`.
    """

    @contextmanager
    def audited(**options: Any) -> Iterator[Any]:
        from gradcheck_suite.auditing.session import audit

        with _bad_input_fails():
            auditing = audit(**{"name": "this test", "quiet": True, **options})
        with auditing as opened:
            yield opened
        if not opened.holds:
            pytest.fail(str(opened.result), pytrace=False)

    return audited


@pytest.fixture
def assert_same_port() -> Callable[..., PortResult]:
    """Return a function that fails the test where a JAX model is not the torch module.

    It takes what `gradcheck_suite.compare_port` takes, and returns the `PortResult`.
    """

    def assert_same(module: Any, jax_model: Any = None, *inputs: Any, **options: Any) -> PortResult:
        from gradcheck_suite.port.compare import compare_port

        with _bad_input_fails():
            result = compare_port(
                module,
                jax_model,
                *inputs,
                **options,
            )
        if not result.holds:
            pytest.fail(str(result), pytrace=False)
        return result

    return assert_same


@contextmanager
def _bad_input_fails() -> Iterator[None]:
    """Fail the test with one line where the input is bad, without the suite's own frames."""
    from gradcheck_suite.errors import UsageError

    try:
        yield
    except UsageError as error:
        # not `pytest.fail`, whose own frame would stand in the traceback
        raise pytest.fail.Exception(f"gradcheck-suite: {error}", pytrace=False) from None


def _flag(name: str) -> str:
    return f"--gradcheck-{name}"


def _options(node: Any, loop: Loop, given: dict[str, Any]) -> VerifyOptions:
    """Return the options of one call: the command line overrides the call, and the call overrides
    the marker.

    Raises:
        UsageError: an option does not exist, or its value is wrong.
    """
    from gradcheck_suite.errors import UsageError

    chosen: dict[str, Any] = {"second_opinion_s": SECOND_OPINION_S}
    # the closest marker comes first in pytest's order, and must have the last word
    for marker in reversed(list(node.iter_markers(MARKER))):
        if marker.args:
            raise UsageError(f"the marker {MARKER} takes keywords alone, got {marker.args!r}")
        chosen.update(marker.kwargs)
    chosen.update(given)
    overrides = {option.name: node.config.getoption(_flag(option.name)) for option in OVERRIDES}
    chosen.update({name: value for name, value in overrides.items() if value is not None})
    return VerifyOptions().replace(**chosen).of(loop)


def _summary_line(result: Result) -> str:
    opinion = f"; {result.second_opinion}" if result.second_opinion else ""
    verdict = "holds"
    worst = f", worst error {of_bound(result.worst_error_over_allowed)}"
    if result.violation is not None:
        verdict = f"VIOLATED ({result.violation.diagnosis})"
        worst = ""
    return f"{result.loop}: {verdict}, {result.cases} cases, {result.seconds:.1f} s{worst}{opinion}"


def _failure(result: Result, stored: Counterexample | None) -> str | None:
    if result.violation is None:
        if result.findings and not result.unjudged:
            return "\n".join(
                [f"{result.loop} holds, but torch and JAX disagree:", *result.findings]
            )
        return result.unjudged and f"{result.loop}: {result.unjudged}"
    lines = [f"{result.loop} is violated", *result.violation.words]
    return "\n".join(lines if stored is None else [*lines, f"stored  {stored.case}"])


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Print one line for each verified loop."""
    result = yield
    reports = chain.from_iterable(terminalreporter.stats.values())
    # properties are repeated in the reports on setup and teardown
    calls = [report for report in reports if getattr(report, "when", None) == "call"]
    properties = chain.from_iterable(call.user_properties for call in calls)
    lines = sorted(line for name, line in properties if name == _PROPERTY)
    if lines:
        terminalreporter.section("training loops verified")
        for line in lines:
            terminalreporter.write_line(line)
    return result
