"""Run Cosmic Ray over a copy of the tree, module by module, and write what survived into a report.

    python mutation/run.py                     # everything, from the start
    python mutation/run.py --again             # only what survived, after tests were added
    python mutation/run.py core/comparison     # one module

The report is written where all modules were run in this checkout, now or before; else it stays as it is.

Mutants are written to disk one after the other, so this works on a copy under `build/mutation`: a run that is killed
leaves the tree as it was. Exits with 1 where a mutant survived that `explained.toml` does not explain.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from string import Template

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for `python mutation/run.py`, which puts `mutation/` there instead

from mutation.score import Mutant, explained, mutants, report, stale, unexplained  # noqa: E402

HERE = ROOT / "mutation"
BUILD = ROOT / "build" / "mutation"
SOCKET = "tests.socket"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GRADCHECK_SUITE_CACHE": str(BUILD / "cache")}
"""Compiled programs are kept by the source that they come from: mutants of it would push out everybody else's."""
NUMBERS = ("numpy", "hypothesis")
TORCH = (*NUMBERS, "torch", "torch._dynamo", "scipy.stats", "jax")
"""An optimizer imports torch._dynamo, which takes longer than most modules' tests."""


@dataclass(frozen=True)
class Target:
    """A module's tests.

    Attributes:
        tests: those that are to notice its mutants.
        loaded: what they import from elsewhere.
        seconds: that they may take.
    """

    tests: str
    loaded: tuple[str, ...] = NUMBERS
    seconds: float = 20.0


def _torch_targets(package: str, modules: str, *tests: str, seconds: float = 60.0) -> dict[str, Target]:
    """Return the targets of modules of a package: a module's own test, if there is one, is run first."""
    targets = {}
    for module in modules.split():
        own = f"tests/{package}/test_{module}.py"
        first = [own] if (ROOT / own).exists() else []
        targets[f"{package}/{module}"] = Target(" ".join(dict.fromkeys((*first, *tests))), TORCH, seconds)
    return targets


_JUDGED = ("tests/verification/test_judge_run.py", "tests/verification/test_check.py")
TARGETS = {
    "core/case": Target("tests/core/test_case.py"),
    "core/comparison": Target("tests/core/test_comparison.py tests/core/test_bounds_by_hand.py"),
    "studies/tally": Target("tests/studies/test_baselines.py"),
    "judge/weights": Target("tests/judge/test_weights.py"),
    **_torch_targets("judge", "gradient"),
    "judge/probe": Target(" ".join(f"tests/judge/test_{of}.py" for of in ("probe", "gradient", "step_count")), TORCH),
    "judge/fitted_weights": Target("tests/judge/test_fitted_weights.py", TORCH),
    **_torch_targets("reference", "large_batch rounding", "tests/reference/test_reference.py"),
    **_torch_targets("verification", "separability", *_JUDGED),
    **_torch_targets("verification", "judge_run", *_JUDGED, seconds=120.0),
    **_torch_targets("verification", "check", *_JUDGED, "tests/verification/test_refusals.py"),
    **_torch_targets(
        "verification", "verify", "tests/verification/test_search.py", "tests/verification/test_finite_gradients.py"
    ),
}


def _copy_tree() -> Path:
    tree = BUILD / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("gradcheck_suite", "tests", "mutation"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    # forks write no bytecode, and making it anew would take them longer than the tests; a mutant's module is dated
    # later than its bytecode here
    subprocess.run([sys.executable, "-m", "compileall", "-q", "gradcheck_suite", "tests"], cwd=tree, check=True)
    return tree


@contextlib.contextmanager
def _server(tree: Path, loaded: tuple[str, ...]) -> Iterator[None]:
    """Have a process ready that runs tests in forks of itself."""
    command = [sys.executable, "mutation/server.py", SOCKET, *loaded]
    process = subprocess.Popen(command, cwd=tree, env=ENVIRONMENT)
    try:
        while not (tree / SOCKET).exists():
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()
        (tree / SOCKET).unlink(missing_ok=True)


def _call(tree: Path, *command: str) -> str:
    return subprocess.run(
        command, cwd=tree, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, encoding="utf-8"
    ).stdout


def _session(target: str) -> Path:
    return BUILD / f"{target.replace('/', '_')}.sqlite"


def _run(target: str, tree: Path, *, again: bool) -> None:
    """Try a module's mutants."""
    aim = TARGETS[target]
    session, configuration = _session(target), tree / "cosmic-ray.toml"
    template = Template((HERE / "cosmic-ray.toml").read_text(encoding="utf-8"))
    configuration.write_text(
        template.substitute(module=f"gradcheck_suite/{target}.py", tests=aim.tests, seconds=aim.seconds),
        encoding="utf-8",
    )
    if again:
        with sqlite3.connect(session) as connection:
            connection.execute("DELETE FROM work_results WHERE test_outcome = 'SURVIVED'")
    else:
        session.unlink(missing_ok=True)
        _call(tree, "cosmic-ray", "init", str(configuration), str(session))
        _call(tree, "cr-filter-operators", str(session), str(configuration))
    with _server(tree, aim.loaded):
        _call(tree, "cosmic-ray", "baseline", str(configuration))
        _call(tree, "cosmic-ray", "exec", str(configuration), str(session))
        # had the server died, every mutant since would look killed
        _call(tree, "cosmic-ray", "baseline", str(configuration))


def _found(tree: Path) -> list[Mutant]:
    """Return the mutants of all modules that were ever run."""
    sessions = [_session(target) for target in TARGETS]
    dumps = [_call(tree, "cosmic-ray", "dump", str(session)) for session in sessions if session.exists()]
    source = cache(lambda module: (tree / module).read_text(encoding="utf-8"))
    return [mutant for dump in dumps for mutant in mutants(dump.splitlines(), source)]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    """Run, write the scores to `mutation/README.md` if all modules have some, and say what is not explained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "targets", nargs="*", metavar="MODULE", help=f"of {', '.join(TARGETS)}; all where none is named"
    )
    parser.add_argument("--again", action="store_true", help="try only what survived the last run")
    arguments = parser.parse_args()
    if unknown := [target for target in arguments.targets if target not in TARGETS]:
        parser.error(f"MODULE must be of {', '.join(TARGETS)}; got {', '.join(unknown)}")
    tree = _copy_tree()
    for target in arguments.targets or TARGETS:
        start = time.monotonic()
        _run(target, tree, again=arguments.again)
        print(f"{target}: {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    found, reasons = _found(tree), explained(HERE / "explained.toml")
    untried = [target for target in TARGETS if not _session(target).exists()]
    if untried:
        print(f"mutation/README.md stays as it is: not run here: {', '.join(untried)}")
    else:
        (HERE / "README.md").write_text(report(found, reasons, version("cosmic-ray")), encoding="utf-8")
    left = unexplained(found, reasons)
    for mutant in left:
        print(f"{mutant.module}: `{mutant.statement}` -> `{mutant.changed}` survived and is not explained")
    for module, statement, _ in stale(reasons, lambda module: _text(ROOT / module)):
        print(f"explained.toml: {module} no longer contains `{statement}`; remove the entry, or correct it")
    print(f"{len(found)} mutants, {len(left)} neither killed nor explained")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
