"""The pytest plugin: verify a training loop in a test of its own repository.

    def test_my_loop(verify_training_loop):
        verify_training_loop(train)

Importing this imports neither torch nor jax; a run that verifies nothing pays nothing. Options and the marker have the
prefix `gradcheck`. No Hypothesis profile is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gradcheck_suite.schema.contract import Loop, Problem
    from gradcheck_suite.schema.results import Result

MARKER = "gradcheck"
MARKER_OPTIONS = ("examples", "seed", "dtype", "device", "optimizer", "assumes", "time_limit_s", "second_opinion_s")
SECOND_OPINION_S = 10.0
"""A test waits for JAX less long than a command does: one window is asked about in any case."""
_LINES = pytest.StashKey[list[str]]()
_OUTPUT = "gradcheck_suite_lines"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("gradcheck-suite", "verification of training loops")
    group.addoption("--gradcheck-examples", type=int, metavar="N", help="cases per verified loop, over any marker")
    group.addoption("--gradcheck-seed", type=int, metavar="S", help="of the drawn cases, over any marker")
    group.addoption(
        "--gradcheck-reports",
        type=Path,
        metavar="DIR",
        help="store records and counterexamples under DIR, as `gradcheck-suite verify` does",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", f"{MARKER}({', '.join(MARKER_OPTIONS)}): how `verify_training_loop` verifies in this test"
    )
    config.stash[_LINES] = []


@pytest.fixture
def verify_training_loop(request: pytest.FixtureRequest) -> Callable[..., Result]:
    """Return a function that verifies a loop and fails the test where it is violated.

    It takes the loop, a `problem=` in place of random models, and what the marker takes; it returns the `Result`.
    """
    config = request.config

    def verify_loop(loop: Loop, *, problem: Problem | None = None, name: str | None = None, **options: Any) -> Result:
        chosen = _options(request.node, options)
        from gradcheck_suite.errors import UsageError
        from gradcheck_suite.execution import environment

        environment.set_precision()
        from gradcheck_suite.verification.verify import verify

        label = name or str(getattr(loop, "__name__", repr(loop)))
        refusal = ""
        try:
            result = verify(loop, name=label, problem=problem, problem_name=f"{label}'s problem", **chosen)
        except UsageError as error:
            refusal = str(error)
        if refusal:
            # outside of the handler, or pytest would print the message twice
            pytest.fail(f"gradcheck-suite: {refusal}", pytrace=False)
        config.stash[_LINES].append(_line(result))
        stored = _store(config.getoption("--gradcheck-reports"), result, loop, problem)
        if result.interrupted:
            raise KeyboardInterrupt
        if result.holds and not result.judged:
            reasons = "; ".join([*result.skipped, *result.findings])
            pytest.fail(f"{label}: none of {result.cases} cases could be judged: {reasons}", pytrace=False)
        if result.violation is not None:
            pytest.fail(_message(result, stored), pytrace=False)
        return result

    return verify_loop


def _options(node: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `verify`: the command line's over the call's over the marker's."""
    chosen: dict[str, Any] = {"second_opinion_s": SECOND_OPINION_S}
    for marker in reversed(list(node.iter_markers(MARKER))):
        if marker.args:
            pytest.fail(f"the marker {MARKER} takes keywords alone, got {marker.args!r}", pytrace=False)
        chosen.update(marker.kwargs)
    chosen.update(given)
    for option in ("examples", "seed"):
        value = node.config.getoption(f"--gradcheck-{option}")
        if value is not None:
            chosen[option] = value
    unknown = sorted(chosen.keys() - set(MARKER_OPTIONS))
    if unknown:
        pytest.fail(f"expected some of {', '.join(MARKER_OPTIONS)}; got {', '.join(unknown)}", pytrace=False)
    if "seed" in chosen:
        chosen["seed_value"] = chosen.pop("seed")
    return chosen


def _line(result: Result) -> str:
    verdict = "holds" if result.holds else f"VIOLATED ({result.violation.diagnosis})"  # type: ignore[union-attr]
    worst = f", worst error {result.ratio:.2g} of what is allowed" if result.holds else ""
    opinion = f"; {result.second_opinion}" if result.second_opinion else ""
    return f"{result.loop}: {verdict}, {result.cases} cases, {result.seconds:.1f} s{worst}{opinion}"


def _store(reports: Path | None, result: Result, loop: Loop, problem: Problem | None) -> Path | None:
    if reports is None:
        return None
    from gradcheck_suite.execution import environment
    from gradcheck_suite.records.counterexamples import store_counterexample, store_script
    from gradcheck_suite.records.store import append_record, this_command
    from gradcheck_suite.report.scripts import script_text

    about = environment.environment()
    append_record(reports, "verify", result.to_json(), environment=about, command=this_command())
    if result.violation is None:
        return None
    path = store_counterexample(reports, result, about)
    # a loop that is local to a test cannot be named in a script
    if ":" in result.loop:
        store_script(path, script_text(loop, result.loop, result.violation, problem=problem))
    return path


def _message(result: Result, stored: Path | None) -> str:
    from gradcheck_suite.records.description import describe_violation, example_text

    assert result.violation is not None
    lines = [f"{result.loop} is violated", *describe_violation(result.violation), example_text(result.violation.case)]
    if stored is not None:
        lines.append(f"stored  {stored}")
    return "\n".join(lines)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what was verified to the main process where pytest-xdist spreads the run."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_OUTPUT] = session.config.stash[_LINES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker of pytest-xdist verified."""
    node.config.stash[_LINES].extend(getattr(node, "workeroutput", {}).get(_OUTPUT, ()))


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    """Print one line per verified loop."""
    result = yield
    if lines := config.stash[_LINES]:
        terminalreporter.section("training loops verified")
        for line in sorted(lines):
            terminalreporter.write_line(line)
    return result
