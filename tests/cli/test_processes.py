"""The real command in processes of its own, few since each imports torch and JAX.

Signals and terminals in this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(*arguments, cwd, path=(), **streams):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))),
        "OMP_NUM_THREADS": "1",
    }
    streams = streams or {"capture_output": True}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        text=True,
        timeout=300,
        check=False,
        **streams,
    )


@pytest.mark.full
def test_the_same_seed_has_the_same_result_in_every_process(run, project):
    arguments = ("verify", "loops.py:sound", "--seed", "5", "--examples", "3", "--json")
    done = python("-m", "gradcheck_suite", *arguments, "there.json", cwd=project)
    assert (done.returncode, done.stderr) == (0, "")
    assert run(*arguments, "here.json").status == 0
    there, here = (
        json.loads((project / name).read_text())["results"][0]
        for name in ("there.json", "here.json")
    )
    # the largest error has the digits of a float, and differs from case to case
    assert {**there, "seconds": 0} == {**here, "seconds": 0}
    assert there["worst_error_over_allowed"] > 0
    left = {path.name for path in project.iterdir()}
    assert left <= {"loops.py", "there.json", "here.json", "reports", "__pycache__"}


def test_a_broken_installation_is_reported_in_one_line(project):
    (project / "stub").mkdir()
    (project / "stub" / "torch.py").write_text("raise ImportError('libtorch.so: cannot open')\n")
    code = "from gradcheck_suite.__main__ import main; print(main(['doctor']), main(['verify', 'zero_']))"
    done = python("-c", code, cwd=project, path=[project / "stub"])
    assert done.stdout.endswith("1 2\n")
    assert "torch cannot be imported (ImportError: libtorch.so: cannot open)" in done.stdout
    assert done.stderr.count("\n") == 1
    assert "libtorch.so: cannot open" in done.stderr


@pytest.mark.usefixtures("only_linear")
@pytest.mark.parametrize("swallows", [False, True])
def test_ctrl_c_keeps_what_was_found(run, project, swallows):
    caught = "BaseException" if swallows else "ZeroDivisionError"
    (project / "interrupted.py").write_text(f"""
import signal
from loops import sound
calls = []
def loop(run):
    calls.append(1)
    try:
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
    except {caught}:
        pass
    sound(run)
""")
    outcome = run("verify", "interrupted.py:loop", "zero_", "--json", "out.json")
    assert outcome.status == 130
    assert "interrupted, 0 of 2 loops went to the end" in outcome.out
    assert "Traceback" not in outcome.out + outcome.err
    (result,) = json.loads((project / "out.json").read_text())["results"]
    assert (result["loop"], result["verdict"], result["interrupted"]) == (
        "interrupted.py:loop",
        "holds",
        True,
    )
    assert not list(project.rglob("*.tmp"))


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
@pytest.mark.usefixtures("only_linear")
def test_progress_shows_on_a_terminal_and_not_in_a_pipe(run, monkeypatch):
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
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(other_end, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        outcome = run("verify", "loops.py:sound", "--examples", "20")
        monkeypatch.undo()
    reader.join(timeout=30)
    os.close(terminal)
    assert outcome.status == 0
    assert "/20" in shown.decode()
    assert "loops.py:sound" in shown.decode()
    assert "\x1b" not in outcome.out
    assert "/20" not in outcome.out
