"""What fails, fails at once; JAX is imported by what computes with it.

Nothing is said after the verdict.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.cli.test_output import command

WITHOUT = """
import sys
from gradcheck_suite.__main__ import main
status = main(sys.argv[2:])
imported = [name for name in sys.argv[1].split(",") if name in sys.modules]
assert not imported, imported
sys.exit(status)
"""


def without(modules, *arguments, cwd):
    """Run the command line, and fail where it imports one of some modules."""
    given = [sys.executable, "-c", WITHOUT, ",".join(modules), *map(str, arguments)]
    return subprocess.run(given, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


BOTH = ("torch", "jax")


SLIPS = [
    (["verify", "mien.py:train"], "mien.py: no such file (did you mean 'mine.py'?)"),
    (["verify", "mine.py:trian"], "mine.py has no 'trian' (did you mean 'train'?); it defines"),
    (["verify", "mine.py:Loop"], "mine.py:Loop is a class: expected a function of one argument"),
    (["verify", "zero"], "no built-in loop is called 'zero' (did you mean 'zero_'?)"),
    (["verify", "folder"], "folder is a folder: expected FILE.py:NAME"),
    (["verify", "folder:train"], "folder is a folder: expected a Python file in it"),
    (["verify", "zero_", "--problem", "mine.py:PROBLEM"], "mine.py has no 'PROBLEM'"),
    (["replay", "case.json", "mine.py:trian"], "cannot read case.json (No such file or directory)"),
    (
        ["audit", "folder"],
        "folder is a folder: expected a Python script in it, such as folder/train.py",
    ),
    (
        ["audit", "run.ipynb"],
        "run.ipynb is a notebook: expected a script; put `with gradcheck_suite.audit",
    ),
    (["audit", "mien.py"], "did you mean 'mine.py'?"),
]


@pytest.mark.parametrize(("arguments", "said"), SLIPS)
def test_a_slip_is_said_in_one_line_before_torch_and_jax_are_imported(tmp_path, arguments, said):
    (tmp_path / "mine.py").write_text("class Loop: ...\n\ndef train(run): ...\n")
    (tmp_path / "run.ipynb").write_text("{}")
    (tmp_path / "folder").mkdir()
    done = without(BOTH, *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["verify", "zero_", "--html", "page.html"], "jinja2"),
        (["audit", "--html", "page.html", "mine.py"], "jinja2"),
        (["report"], "vl_convert"),
    ],
)
def test_a_missing_extra_is_said_before_any_work(tmp_path, arguments, package):
    (tmp_path / "mine.py").write_text("open('started', 'w')")
    hidden = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {package!r} else find(name, *rest)
{WITHOUT}"""
    given = [sys.executable, "-c", hidden, ",".join(BOTH), *arguments]
    done = subprocess.run(
        given, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'gradcheck-suite[" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.full
def test_a_loop_that_ends_the_process_is_said_in_one_line(tmp_path):
    (tmp_path / "mine.py").write_text("import os\ndef train(run):\n    os._exit(7)\n")
    done = command("verify", "mine.py:train", cwd=tmp_path)
    assert done.returncode == 2
    said = "the code under test ended the program with os._exit(7): return instead"
    assert done.stderr == f"gradcheck-suite verify: error: {said}\n"


SCRIPT = """
import os, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if not os.fork():
    os._exit(9)  # as a worker ends
os.wait()
for _ in range(3):
    torch.nn.functional.mse_loss(model(torch.ones(2, 2)), torch.ones(2, 1)).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("reset", "status"), [("optimizer.zero_grad()", 7), ("pass", 1)])
@pytest.mark.full
def test_of_a_script_that_ends_the_process_the_verdict_stands(tmp_path, reset, status):
    (tmp_path / "train.py").write_text(f"{SCRIPT}    {reset}\nos._exit(7)\n")
    done = command("audit", "--json", "r.json", "train.py", cwd=tmp_path)
    assert done.returncode == status
    assert done.stderr.count("train.py  ") == 1
    assert "3 steps judged of 3" in done.stderr
    assert (tmp_path / "r.json").is_file()


# JAX, and what bindings say when Python takes them apart.


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--list"],
        pytest.param(["--help"], marks=pytest.mark.full),
        pytest.param(["verify", "--help"], marks=pytest.mark.full),
        pytest.param(
            ["audit", "--json", "r.json", "--reports", "r", "--html", "r.html", "train.py"],
            marks=pytest.mark.full,
        ),
    ],
)
def test_jax_is_imported_only_by_what_computes_with_it(tmp_path, arguments):
    (tmp_path / "train.py").write_text(f"{SCRIPT}    optimizer.zero_grad()\n")
    done = without(("jax", "jaxlib"), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_an_audit_that_asks_jax_does_import_it(tmp_path):
    (tmp_path / "train.py").write_text(f"{SCRIPT}    optimizer.zero_grad()\n")
    done = without(("jax",), "audit", "--jax", "train.py", cwd=tmp_path)
    assert "AssertionError: ['jax']" in done.stderr


@pytest.mark.full
def test_a_script_ends_as_python_ends_it(tmp_path):
    """Its finalisers run: bindings that find objects alive say so, line by line."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
            class Cycle:
                def __init__(self):
                    self.own = self

                def __del__(self):
                    print("finalised")

            Cycle()
            import torch
        """)
    )
    own = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert own.stdout == "finalised\n"
    assert command("audit", "train.py", cwd=tmp_path).stdout == own.stdout


@pytest.mark.full
def test_a_command_ends_before_bindings_complain(tmp_path):
    """A binding that Python calls when it has taken everything apart, planted: it aborts."""
    (tmp_path / "mine.py").write_text(
        "import ctypes\nctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)\n"
        "import atexit\natexit.register(print, 'handlers run')\ndef train(run, more):\n    pass\n"
    )
    done = command("verify", "mine.py:train", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == "handlers run\n"
    assert done.stderr.count("\n") == 1
