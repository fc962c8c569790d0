"""The real command, in processes of its own: few, since each imports torch and JAX."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "gradcheck_suite")


def environment(**extra):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def command(*arguments, cwd, **extra):
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=300
    )


def test_a_violation_end_to_end(project):
    done = command("verify", "loops.py:no_reset", "--json", "out.json", cwd=project)
    assert done.returncode == 1
    assert done.stderr == ""
    (result,) = json.loads((project / "out.json").read_text())["results"]
    plan = result["violation"]["case"]["plan"]
    assert result["violation"]["diagnosis"] == "stale-window"
    assert len(plan["micro_batches"]) <= 3
    (stored,) = (project / "reports" / "counterexamples").glob("*.json")
    again = command("replay", str(stored), cwd=project)
    assert (again.returncode, again.stderr) == (1, "")
    left = {path.name for path in project.iterdir()}
    assert left <= {"loops.py", "out.json", "reports", "__pycache__"}


def test_the_same_seed_draws_the_same_cases(project):
    for name in ("a.json", "b.json"):
        assert command("verify", "loops.py:never", "--seed", "5", "--json", name, cwd=project).returncode == 1
    first, second = (json.loads((project / name).read_text())["results"][0] for name in ("a.json", "b.json"))
    assert first["violation"] == second["violation"]


@pytest.mark.parametrize("arguments", [["verify", "--help"], ["verify", "--examples", "0"], ["replay", "none.json"]])
def test_help_and_usage_errors_do_not_import_the_frameworks(project, arguments):
    code = f"import sys; from gradcheck_suite.__main__ import main; main({arguments!r}); "
    code += "print([m for m in ('torch', 'jax') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_broken_installation_is_told_in_one_line(project):
    (project / "stub").mkdir()
    (project / "stub" / "torch.py").write_text("raise ImportError('libtorch.so: cannot open')\n")
    path = os.pathsep.join([str(project / "stub"), str(ROOT)])
    done = command("doctor", cwd=project, PYTHONPATH=path)
    assert done.returncode == 1
    assert "torch cannot be imported (ImportError: libtorch.so: cannot open)" in done.stdout
    done = command("verify", "zero_", cwd=project, PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "libtorch.so: cannot open" in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is a signal on POSIX only")
@pytest.mark.parametrize("swallows", [False, True])
def test_ctrl_c_keeps_what_was_found(project, swallows):
    body = "    try:\n        work(run)\n    except BaseException:\n        pass\n" if swallows else "    work(run)\n"
    (project / "slow.py").write_text(
        "import pathlib, time\nfrom loops import sound\n"
        "def work(run):\n    pathlib.Path('started').touch()\n    time.sleep(0.3)\n    sound(run)\n"
        f"def loop(run):\n{body}"
    )
    process = subprocess.Popen(
        [*COMMAND, "verify", "slow.py:loop", "zero_", "--json", "out.json"],
        cwd=project,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (project / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted, 0 of 2 loops went to the end" in out
    assert "Traceback" not in out + err
    (result,) = json.loads((project / "out.json").read_text())["results"]
    assert (result["loop"], result["verdict"], result["interrupted"]) == ("slow.py:loop", "holds", True)
    assert not list(project.rglob("*.tmp"))


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
def test_progress_shows_on_a_terminal_and_not_in_a_pipe(project):
    import pty

    def read_all() -> None:
        # reading a terminal whose other end is closed is an error on Linux
        with contextlib.suppress(OSError):
            while piece := os.read(terminal, 1 << 12):
                shown.extend(piece)

    shown = bytearray()
    terminal, other_end = pty.openpty()
    reader = threading.Thread(target=read_all)
    reader.start()
    arguments = ("verify", "loops.py:sound", "--problem", "loops.py:PROBLEM", "--examples", "20")
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=project,
        env=environment(TERM="xterm", COLUMNS="80"),
        stdout=subprocess.PIPE,
        stderr=other_end,
        text=True,
        timeout=300,
    )
    os.close(other_end)
    reader.join(timeout=30)
    os.close(terminal)
    assert done.returncode == 0
    assert "/20" in shown.decode()
    assert "loops.py:sound" in shown.decode()
    assert "\x1b" not in done.stdout
    assert "/20" not in done.stdout


def test_a_reader_that_goes_away_is_no_error(project):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, "verify", "--list"],
        cwd=project,
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(writer)
    assert done.stderr == b""
