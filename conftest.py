"""Options and Hypothesis profiles that `tests/` and `properties/` share.

    pytest tests properties studies -n 2               the same cases, within six minutes
    pytest tests properties studies -n 2 --full --hypothesis-profile full
                                                       also the long tests, over more cases
    pytest properties --hypothesis-profile dev         few new cases, while writing
    pytest properties --hypothesis-profile nightly     many new cases
    pytest properties --hypothesis-profile gpu -m cuda on a CUDA device

A profile sets how many examples a property draws. `properties.helpers.scaled(k)` draws a k-th of
that for a property whose examples take longer. Neither torch nor JAX is imported here: tests of
plain data start in half a second.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from hypothesis import HealthCheck, find, settings
from hypothesis import strategies as st

DEFAULT_PROFILE = "ci"
# The first example compiles programs, which takes seconds; deadlines and health checks of speed
# would fail on it alone.
_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": (
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ),
}
_FIXED, _RANDOM = settings.get_profile("ci"), settings.get_profile("default")
settings.register_profile("ci", parent=_FIXED, max_examples=50, **_COMMON)
settings.register_profile("full", parent=_FIXED, max_examples=200, **_COMMON)
settings.register_profile("gpu", parent=_FIXED, max_examples=30, **_COMMON)
settings.register_profile("dev", parent=_RANDOM, max_examples=20, **_COMMON)
settings.register_profile("nightly", parent=_RANDOM, max_examples=2000, **_COMMON)

# Commands that tests run would each start a second process, which imports torch.
os.environ.setdefault("GRADCHECK_SUITE_PROCESSES", "1")
# What the tests compute is too small to share among threads. torch reads the variable when it is
# first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# JAX would reserve three quarters of a GPU's memory, which torch needs too. JAX reads it when it
# looks for devices.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# cuBLAS is deterministic only with a workspace of a fixed size. It reads the variable when it is
# first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_STARTED = time.monotonic()
PLAIN_DATA = [
    Path(__file__).parent / "tests" / "core",
    Path(__file__).parent / "studies" / "tests" / "mutation",
]
"""Directories of tests that start without torch."""
# imports make objects that live until the end: collecting garbage among them takes a third of the
# time of collection
gc.set_threshold(100_000, 20, 20)
# pytest rewrites the assertions of every module of a package that has a plugin, which takes each
# worker six seconds
for _finder in sys.meta_path:
    if isinstance(_finder, AssertionRewritingHook):
        _finder._must_rewrite.discard("gradcheck_suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--full`, `--write-golden`, `--require-cuda` and `--minutes`."""
    parser.addoption(
        "--full", action="store_true", help="also run the tests marked `full`, which take long"
    )
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="write what users read to tests/golden, in place of comparing it",
    )
    parser.addoption(
        "--minutes",
        type=float,
        metavar="N",
        help="stop after the test that is running when N minutes are over",
    )
    parser.addoption(
        "--require-cuda", action="store_true", help="fail where torch or JAX sees no CUDA device"
    )


def _without_cuda() -> list[str]:
    """Return which of the two frameworks sees no CUDA device, one reason for each."""
    from properties.devices import jax_without_gpu, torch_without_cuda

    return [reason for reason in (torch_without_cuda(), jax_without_gpu()) if reason is not None]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give each worker of `-n` consecutive tests, which share programs and fixtures, until one has
    none left.

    pytest-xdist's default deals tests out in turn, so that every worker imports and compiles nearly
    everything.
    """
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start where CUDA is required and missing.

    Load the default profile where none is named.
    """
    if config.getoption("--require-cuda") and (reasons := _without_cuda()):
        raise pytest.UsageError(
            f"--require-cuda: a CUDA device for both frameworks is needed, and {'; '.join(reasons)}. Nothing was run. "
            "Use a machine with a GPU and CUDA builds of both, or leave the option out: CUDA tests then skip"
        )
    _commit(config.rootpath)
    if not config.getoption("--hypothesis-profile", default=None):
        settings.load_profile(DEFAULT_PROFILE)


def _keep_what_exists() -> None:
    """Take what exists out of garbage collection: most of it lives until the end, and audits look
    at all objects.
    """
    # makes Hypothesis's generator, as `_make_hypothesis_generator` of `verification/verify.py` does
    find(st.none(), lambda _: True, settings=settings(database=None))
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Keep what has been imported."""
    _keep_what_exists()


@pytest.fixture(scope="module", autouse=True)
def _kept() -> Iterator[None]:
    """Keep what the tests of a module have imported and compiled, so that those of the next do not
    look at it.
    """
    yield
    _keep_what_exists()


@pytest.fixture(scope="module", autouse=True)
def _draws_for_planted_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    """By default, let `verify` draw rounding errors as often for a violation as for a gradient that
    holds.

    A planted fault is thousands of times larger than rounding, and drawing four times as often
    takes most of the time. Over more cases, or random ones, some sound loop needs all draws. The
    fixture `many_draws` makes them in one test.
    """
    option = request.config.getoption
    default = not option("--full") and option("--hypothesis-profile", default=None) in (
        None,
        DEFAULT_PROFILE,
    )
    with pytest.MonkeyPatch.context() as patch:
        if default and not any(request.path.is_relative_to(folder) for folder in PLAIN_DATA):
            for name in ("large_batch", "rounding"):
                module = import_module(f"gradcheck_suite.reference.{name}")
                patch.setattr(module, "MANY_DRAWS", module.DRAWS)
        yield


OF_COMMIT = "GRADCHECK_SUITE_TESTS_OF_COMMIT"
PARTS = 1600
"""Of the tests marked `full` each commit runs this part by default, another one than the next commit."""


def _commit(root: Path) -> int:
    """Return the commit as a number, which chooses the tests that run by default; 0 without one."""
    # all workers of one run choose alike, also where somebody commits meanwhile
    if OF_COMMIT in os.environ:
        return int(os.environ[OF_COMMIT])
    git = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(git, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # an sdist, or no git
        return 0
    os.environ[OF_COMMIT] = str(int(found.stdout, 16) % (2**32))
    return int(os.environ[OF_COMMIT])


def _beyond_their_share(items: list[pytest.Item], commit: int) -> list[pytest.Item]:
    """Return the cases of tests marked `share(n)` that do not run by default: all but every n-th,
    from the first, the second or another on by the commit and the test's name.

    By its name, so that tests of one case do not all run at the same commit.
    """
    seen: dict[str, int] = {}
    beyond = []
    for item in items:
        marker = item.get_closest_marker("share")
        if marker is None:
            continue
        test = item.nodeid.partition("[")[0]
        number = seen.get(test, 0)
        seen[test] = number + 1
        if (number + zlib.crc32(test.encode()) + commit) % marker.args[0]:
            beyond.append(item)
    return beyond


def _is_of_another_commit(item: pytest.Item, commit: int) -> bool:
    """Whether a long test is left to other commits. By its name, so that a new one moves no other."""
    return (zlib.crc32(item.nodeid.encode()) + commit) % PARTS != 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `full`, but for this commit's part of them, or with `--full` their
    parts marked `quick`.

    Those that need ranks come first, in one worker.
    """
    items.sort(key=lambda item: "ranks" not in getattr(item, "fixturenames", ()))
    if config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("quick")]
    else:
        commit = _commit(config.rootpath)
        long = [item for item in items if item.get_closest_marker("full")]
        left_out = [item for item in long if _is_of_another_commit(item, commit)]
        for item in set(long).difference(left_out):
            # a long test may judge a sound loop that needs all draws
            item.fixturenames.append("many_draws")  # type: ignore[attr-defined]
        left_out += _beyond_their_share(items, commit)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the run once the time of `--minutes` is over.

    What was measured is kept, and the exit status is 2.
    """
    minutes = item.config.getoption("--minutes")
    if minutes is not None and nextitem is not None and time.monotonic() - _STARTED > 60 * minutes:
        item.session.shouldstop = f"--minutes {minutes:g} are over, before {nextitem.nodeid}"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """A function that compares a text with `tests/golden/NAME.txt`, given NAME.

    It writes it with `--write-golden`.
    """
    from tests.wording import compare

    return partial(compare, write=request.config.getoption("--write-golden"))


@pytest.fixture
def many_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many draws for a violation as `verify` makes outside of the tests."""
    from gradcheck_suite.core.comparison import MANY_DRAWS

    for module in ("large_batch", "rounding"):
        monkeypatch.setattr(f"gradcheck_suite.reference.{module}.MANY_DRAWS", MANY_DRAWS)


@pytest.fixture
def only_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` draw plans alone, on one small problem, so that next to nothing is compiled."""
    from tests.one_problem import draw_only_linear

    draw_only_linear(monkeypatch)


@pytest.fixture
def without_second_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` ask JAX nothing about users' problems, so that none is exported and compiled."""
    from gradcheck_suite.verification import second_opinion

    def nothing(*_: object, **_others: object) -> second_opinion.SecondOpinion:
        return second_opinion.SecondOpinion()

    monkeypatch.setattr(second_opinion, "second_opinion", nothing)


@pytest.fixture(scope="session")
def ranks() -> Iterator[None]:
    """Ranks that start once for all tests that need them: it takes seconds to import torch."""
    from gradcheck_suite.run.ranks import kept_ranks

    with kept_ranks():
        yield
