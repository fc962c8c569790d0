"""Change the code that judges, one place at a time, and see whether a test fails.

    python mutation/run.py                      # a sample of the mutants of every module
    python mutation/run.py --again              # only what survived, after tests were added
    python mutation/run.py core/comparison      # one module
    python mutation/run.py --sample 0 judge/weights   # all mutants of a module

Cosmic Ray makes the mutants; each is tried in a fork of this process, which has torch and jax
loaded, by the tests that execute the changed statement. Which those are is measured first: the
lines that each test executes in its own process. Files are changed in a copy of the tree under
`build/mutation`: a run that is killed leaves the tree as it was.

The report is written where every module was tried in this checkout, now or before; else it stays as
it is. Exits with 1 where a mutant survived that `explained.toml` does not explain.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import fmean

import coverage
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for `python mutation/run.py`, which puts `mutation/` there instead

from mutation.score import TARGETS, Mutant, Tried, explained, path, unexplained, write_report  # noqa: E402
from mutation.statements import Code, changed_statement  # noqa: E402

HERE = ROOT / "mutation"
BUILD = ROOT / "build" / "mutation"
TREE = BUILD / "tree"
SAMPLE, SEED = 24, 1
LOADED = ("numpy", "hypothesis", "scipy.stats", "torch", "torch._dynamo", "jax")
"""What takes seconds to import: forks find it there. The package itself each of them imports anew."""


def _copy_tree() -> None:
    shutil.rmtree(TREE, ignore_errors=True)
    for name in ("gradcheck_suite", "tests", "properties", "docs"):
        shutil.copytree(
            ROOT / name, TREE / name, ignore=shutil.ignore_patterns("__pycache__", "_build")
        )
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, TREE)
    # forks write no bytecode: it would be dated by the second, in which the next mutant is written
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "gradcheck_suite", "tests", "properties"],
        cwd=TREE,
        check=True,
    )


def _forked(act: Callable[[], int], seconds: float) -> int | None:
    """Return the exit status of what is done in a fork, in the copy of the tree.

    None where it was still running.
    """
    child = os.fork()
    if not child:
        status = 70
        try:
            os.setsid()
            os.chdir(TREE)
            with (BUILD / "output.txt").open("wb") as output:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
            sys.path[:] = [
                str(TREE),
                *(entry for entry in sys.path if Path(entry).resolve() not in (ROOT, HERE)),
            ]
            # compiled programs are kept by the source that they come from: mutants would push out
            # everybody else's
            os.environ.update(PYTHONPATH=str(TREE), GRADCHECK_SUITE_CACHE=str(BUILD / "cache"))
            sys.dont_write_bytecode = True
            status = act()
            sys.stdout.flush()
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class _Recorder:
    """A plugin of pytest that notes what each test executes, and its time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.coverage = coverage.Coverage(
            data_file=None,
            include=[str(TREE / path(target)) for target in TARGETS],
            config_file=False,
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration


class _Chosen:
    """A plugin of pytest that runs these tests alone, the shortest first, file by file."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.seconds]
        of_file: defaultdict[Path, list[float]] = defaultdict(list)
        for item in items:
            of_file[item.path].append(self.seconds[item.nodeid])
        items.sort(
            key=lambda item: (fmean(of_file[item.path]), item.path, self.seconds[item.nodeid])
        )


def _pytest(files: Collection[str], plugin: object) -> int:
    options = ["-x", "-q", "--assert=plain", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    return int(pytest.main([*options, *files], plugins=[plugin]))


def _measure(file: str, out: Path) -> int:
    """Run a file of tests and write what each of them executes."""
    recorder = _Recorder()
    recorder.coverage.start()
    status = _pytest([file], recorder)
    recorder.coverage.stop()
    data = recorder.coverage.get_data()
    lines = {target: data.contexts_by_lineno(str(TREE / path(target))) for target in TARGETS}
    out.write_text(json.dumps({"seconds": recorder.seconds, "lines": lines}), encoding="utf-8")
    return status


def _tests_of(target: str) -> tuple[dict[str, float], dict[int, set[str]]]:
    """Return the seconds that each test takes, and the tests that execute each line of the module."""
    seconds: dict[str, float] = {}
    lines: dict[int, set[str]] = defaultdict(set)
    for place in TARGETS[target]:
        folder = TREE / place
        for file in sorted(folder.rglob("test_*.py")) if folder.is_dir() else [folder]:
            name = str(file.relative_to(TREE))
            kept = BUILD / f"{name.replace('/', '_')}.json"
            if not kept.exists() and (
                status := _forked(lambda n=name, k=kept: _measure(n, k), 600.0)
            ) not in (0, 5):
                raise SystemExit(
                    f"{name} ended with {status} before anything was changed: see {BUILD}/output.txt"
                )
            measured = json.loads(kept.read_text(encoding="utf-8"))
            seconds |= measured["seconds"]
            for line, tests in measured["lines"][target].items():
                lines[int(line)] |= set(tests) & measured["seconds"].keys()
    return seconds, lines


def _mutants(source: str) -> list[tuple[str, int]]:
    """Return the mutants that tests may tell from the module, each as an operator and its
    occurrence.
    """
    tree, code = get_ast(source), Code(source)
    found = []
    for name in sorted(operator_names()):
        if not (kind := get_operator(name)).arguments():
            places = (
                place for node in ast_nodes(tree) for place in kind().mutation_positions(node)
            )
            found += [
                (name, i) for i, (start, end) in enumerate(places) if code.tells(name, start, end)
            ]
    return found


def _is_python(source: str, place: tuple[str, int]) -> bool:
    """Whether a mutant can be parsed: `not` before an assignment expression without parentheses
    cannot.
    """
    try:
        ast.parse(mutate_code(source, get_operator(place[0])(), place[1]))
    except SyntaxError:
        return False
    return True


def _try(
    target: str,
    source: str,
    place: tuple[str, int],
    tests: tuple[dict[str, float], dict[int, set[str]]],
) -> Mutant:
    """Run the tests that execute a changed statement."""
    name, occurrence = place
    changed = mutate_code(source, get_operator(name)(), occurrence)
    at, before, after = changed_statement(source, changed)
    mutant = Mutant(path(target), name, occurrence, before, after, "survived")
    seconds, lines = tests
    chosen = {test for line in at for test in lines.get(line, ())} if at else set(seconds)
    if not chosen:
        return replace(mutant, outcome="not executed")
    file = TREE / path(target)
    dates = file.stat()
    file.write_text(changed, encoding="utf-8")
    spent = {test: seconds[test] for test in chosen}
    files = sorted({test.split("::")[0] for test in chosen})
    status = _forked(lambda: _pytest(files, _Chosen(spent)), 30.0 + 5.0 * sum(spent.values()))
    file.write_text(source, encoding="utf-8")
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))  # which its bytecode is dated by
    if status == 5:
        raise SystemExit(f"no test was run: see {BUILD}/output.txt")
    return replace(
        mutant, outcome="time limit" if status is None else "survived" if status == 0 else "killed"
    )


def _run(target: str, commit: str, sample: int, seed: int, before: Tried | None) -> Tried:
    """Try a sample of a module's mutants.

    Only what survived `before`, if the module is still what it was.
    """
    source = (TREE / path(target)).read_text(encoding="utf-8")
    tests = _tests_of(target)
    if before is not None and before.source == source:
        mutants = [
            m if m.is_killed else _try(target, source, (m.operator, m.occurrence), tests)
            for m in before.mutants
        ]
        return replace(before, commit=commit, mutants=mutants)
    places = _mutants(source)
    random.Random(f"{seed} {target}").shuffle(places)
    chosen = islice((place for place in places if _is_python(source, place)), sample or None)
    mutants = [_try(target, source, place, tests) for place in chosen]
    return Tried(commit, seed, len(places), source, mutants)


def _kept(target: str) -> Path:
    return BUILD / f"{target.replace('/', '_')}.json"


def _read(target: str) -> Tried | None:
    if not _kept(target).exists():
        return None
    kept = json.loads(_kept(target).read_text(encoding="utf-8"))
    return Tried(**{**kept, "mutants": [Mutant(**mutant) for mutant in kept["mutants"]]})


def main() -> int:
    """Run, write the scores to `build/mutation/report.md` if all modules have some, and say what is
    not explained.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="MODULE",
        help=f"of {', '.join(TARGETS)}; all if none is named",
    )
    parser.add_argument("--again", action="store_true", help="try only what survived the last run")
    parser.add_argument(
        "--sample", type=int, default=SAMPLE, metavar="N", help="mutants of each module; 0 for all"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the sample")
    arguments = parser.parse_args()
    if unknown := [target for target in arguments.targets if target not in TARGETS]:
        parser.error(f"MODULE must be of {', '.join(TARGETS)}; got {', '.join(unknown)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    for measured in BUILD.glob("tests_*.json"):
        measured.unlink()
    _copy_tree()
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, encoding="utf-8"
    ).strip()
    for name in LOADED:
        import_module(name)
    gc.freeze()
    reasons, left = explained(HERE / "explained.toml"), 0
    for target in arguments.targets or TARGETS:
        start = time.monotonic()
        tried = _run(
            target,
            commit,
            arguments.sample,
            arguments.seed,
            _read(target) if arguments.again else None,
        )
        _kept(target).write_text(json.dumps(asdict(tried)), encoding="utf-8")
        minutes = (time.monotonic() - start) / 60
        print(
            f"{target}: {len(tried.mutants)} of {tried.total} mutants, {minutes:.1f} minutes",
            flush=True,
        )
        for mutant in unexplained(tried.mutants, reasons):
            left += 1
            print(f"  {mutant.outcome}: `{mutant.statement}` -> `{mutant.changed}`", flush=True)
    found = {target: tried for target in TARGETS if (tried := _read(target))}
    write_report(BUILD / "report.md", found, reasons, version("cosmic-ray"))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
