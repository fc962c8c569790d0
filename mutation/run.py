"""Run Cosmic Ray over a copy of the tree, and write what survived into a report.

    python mutation/run.py            # everything, from the start
    python mutation/run.py --again    # only what survived, after tests were added

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
from importlib.metadata import version
from pathlib import Path

from score import Mutant, explained, mutants, report, unexplained

HERE = Path(__file__).parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "mutation"
CONFIGURATIONS = ("numbers", "cases")
LOADED = ("numpy", "hypothesis", "torch", "jax")
SOCKET = "tests.socket"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def _copy_tree() -> Path:
    tree = BUILD / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("gradcheck_suite", "tests", "mutation"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def _forget_survivors(session: Path) -> None:
    with sqlite3.connect(session) as connection:
        connection.execute("DELETE FROM work_results WHERE test_outcome = 'SURVIVED'")


@contextlib.contextmanager
def _server(tree: Path) -> Iterator[None]:
    """Have a process ready that runs tests in forks of itself."""
    command = [sys.executable, "mutation/server.py", SOCKET, *LOADED]
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


def _run(name: str, tree: Path, *, again: bool) -> list[Mutant]:
    """Run one configuration's mutants; return them all."""
    configuration, session = f"mutation/{name}.toml", BUILD / f"{name}.sqlite"

    def call(*command: str) -> str:
        return subprocess.run(
            command, cwd=tree, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, encoding="utf-8"
        ).stdout

    if again:
        _forget_survivors(session)
    else:
        session.unlink(missing_ok=True)
        call("cosmic-ray", "init", configuration, str(session))
        call("cr-filter-operators", str(session), configuration)
    # the tests' own bytecode is never stale, and compiling it anew would take as long as running it
    call(sys.executable, "-m", "compileall", "-q", "tests")
    call("cosmic-ray", "baseline", configuration)
    call("cosmic-ray", "exec", configuration, str(session))
    # had the server died, every mutant since would look killed
    call("cosmic-ray", "baseline", configuration)
    return mutants(call("cosmic-ray", "dump", str(session)).splitlines())


def main() -> int:
    """Run, write `reports/mutation.md`, and say what is not explained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="try only what survived the last run")
    arguments = parser.parse_args()
    start, tree = time.monotonic(), _copy_tree()
    with _server(tree):
        found = [mutant for name in CONFIGURATIONS for mutant in _run(name, tree, again=arguments.again)]
    reasons = explained(HERE / "explained.toml")
    (ROOT / "reports" / "mutation.md").write_text(report(found, reasons, version("cosmic-ray")), encoding="utf-8")
    left = unexplained(found, reasons)
    for mutant in left:
        print(f"{mutant.module}: `{mutant.line}` -> `{mutant.changed}` survived and is not explained")
    print(f"{len(found)} mutants in {(time.monotonic() - start) / 60:.0f} minutes; see reports/mutation.md")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
