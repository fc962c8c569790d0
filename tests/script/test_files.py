"""Scripts as files: what a user's own loop is imported from, real processes, words for what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradcheck_suite.cli.loading import resolve_loop
from gradcheck_suite.core.case import Case, Plan
from gradcheck_suite.core.records import write_text
from gradcheck_suite.core.results import Violation
from gradcheck_suite.script import script_text
from tests.script.problems import load
from tests.script.test_violations import LINEAR, violation_of

# the suite cannot be imported where the script runs
ALONE = "import sys, runpy; sys.modules.update(dict.fromkeys(['gradcheck_suite', 'jax', 'hypothesis'])); "
RUN = ALONE + "runpy.run_path(sys.argv[1], run_name='__main__')"
LOOP = """
def train(run):
    for _ in range(run.epochs):
        for batch in run.loader:
            {body}
"""
FAULTY = LOOP.format(body="run.loss(run.model, batch).backward(); run.optimizer.step()")
SOUND = FAULTY + "            run.optimizer.zero_grad()\n"
CASE = Case(LINEAR, Plan((1, 2), 1))


def run(path, cwd):
    command = [sys.executable, "-c", RUN, str(path)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture
def elsewhere(tmp_path):
    """A folder that is neither the loop's nor the script's."""
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


def written(name, folder):
    """Write the script of a loop's violation; return where."""
    loop = resolve_loop(name)
    write_text(folder / "found.py", script_text(loop, name, violation_of(loop, CASE)))
    return folder / "found.py"


@pytest.fixture(autouse=True)
def unchanged_imports(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")) or name == "travelling":
            del sys.modules[name]


@pytest.mark.full
def test_a_users_loop_is_imported_from_its_file(tmp_path, elsewhere, monkeypatch):
    """In a process of its own, where neither the suite nor JAX can be imported; then mended."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import helper\n" + FAULTY)
    (tmp_path / "helper.py").write_text("")
    script = written("mine.py:train", tmp_path / "reports")
    assert script == tmp_path / "reports" / "found.py"
    done = run(script, elsewhere)
    assert (done.returncode, done.stderr) == (1, "")
    assert "the fault is there" in done.stdout
    (tmp_path / "mine.py").write_text("import helper\n" + SOUND)
    assert load(script.read_text()).main() == 0


IMPORT_FAULTS = {
    "import nowhere_to_be_found": "No module named 'nowhere_to_be_found'",
    "raise SystemExit(0)": "SystemExit: 0",
    "other = 1": "has no attribute 'train'",
    "": "FileNotFoundError",
}


def test_where_the_loop_cannot_be_imported_the_status_is_2(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(FAULTY)
    script = load(written(f"{path}:train", tmp_path).read_text())
    for text, told in IMPORT_FAULTS.items():
        path.write_text(text) if text else path.unlink()
        with pytest.raises(SystemExit, match="2"):
            script.main()
        error = capsys.readouterr().err
        assert error.startswith(f"cannot import train from mine.py in {tmp_path} (")
        assert told in error


def test_a_users_loop_is_imported_from_its_module(tmp_path, elsewhere, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "travelling").mkdir()
    (tmp_path / "travelling" / "loops.py").write_text(FAULTY)
    script = load(written("travelling.loops:train", tmp_path).read_text())
    monkeypatch.chdir(elsewhere)
    assert script.main() == 1


def test_a_loop_that_steps_without_end_is_stopped(tmp_path, capfd):
    (tmp_path / "mine.py").write_text(LOOP.format(body="while True: run.optimizer.step()"))
    script = load(written(f"{tmp_path / 'mine.py'}:train", tmp_path).read_text())
    assert script.main() == 1
    assert "calls optimizer.step() 12 times and does not stop there" in capfd.readouterr().out
    (tmp_path / "mine.py").write_text(SOUND)
    assert script.main() == 0


CATCHES = """while True:
                try: run.optimizer.step()
                except BaseException: pass"""


@pytest.mark.full
@pytest.mark.parametrize(("body", "diagnosis"), [(CATCHES, "endless"), ("while True: pass", "timed-out")])
def test_a_loop_that_cannot_be_stopped_ends_its_process_with_status_1(body, diagnosis, tmp_path, elsewhere):
    (tmp_path / "mine.py").write_text(LOOP.format(body=body))
    name = f"{tmp_path / 'mine.py'}:train"
    loop = resolve_loop(name)
    violation = Violation("step-count" if diagnosis == "endless" else "raised", diagnosis, "planted", CASE)
    script = tmp_path / "found.py"
    write_text(script, script_text(loop, name, violation, time_limit_s=0.5))
    done = run(script, elsewhere)
    assert done.returncode == 1
    assert "mine.py" in done.stderr


def test_words_that_python_would_read_do_no_harm(tmp_path):
    words = 'a """ quote, a \\ backslash, \\N{} and {braces}'
    name = f"{tmp_path / 'mine.py'}:train"
    (tmp_path / "mine.py").write_text(FAULTY)
    violation = Violation("step-count", "planted", words, CASE, details=("  " + words, "", "x " * 99))
    text = script_text(resolve_loop(name), name, violation)
    namespace: dict = {"__name__": "read"}
    exec(compile(text.split("\nfrom __future__")[0], "script", "exec"), namespace)
    assert words in namespace["__doc__"]
