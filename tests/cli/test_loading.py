"""What LOOP and --problem stand for, and the one line about each way it can go wrong."""

from __future__ import annotations

import contextlib
import sys

import pytest

from gradcheck_suite.cli.loading import (
    expect_found,
    libraries_of,
    resolve_function,
    resolve_loop,
    resolve_problem,
)
from gradcheck_suite.core.contract import Problem
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops import reset_modes
from gradcheck_suite.loops.jax_modes import JAX_MODES
from gradcheck_suite.loops.names import NAMES
from gradcheck_suite.loops.ranks import RANK_LOOPS
from gradcheck_suite.loops.reset_modes import BUILT_IN


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory; modules and paths of one test are gone in the next."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_built_in_loop():
    assert resolve_loop("zero_") is reset_modes.BUILT_IN["zero_"]


def test_a_pair_that_no_function_makes_gets_the_line_to_write(folder):
    write(folder, "pairs.py", "PAIR = {}\ndef make(): return PAIR\nNUMBER = 3\n")
    with pytest.raises(UsageError, match=r"is a dict itself: .* `def make\(\): return PAIR`"):
        resolve_function("pairs.py:PAIR", "a pair", returns=(dict,))
    assert resolve_function("pairs.py:make", "a pair", returns=(dict,))() == {}
    with pytest.raises(UsageError, match="is of type int: expected a function of no argument"):
        resolve_function("pairs.py:NUMBER", "a pair", returns=(dict,))


FOR_TYPE_CHECKERS = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradcheck_suite import TrainingRun

def loop(run: TrainingRun, *, scale: TrainingRun | None = None) -> None:
    return 7

def model(seed, sizes: TrainingRun = (3, 1)):
    return torch.nn.Linear(*sizes)

def problem():
    return gradcheck_suite.Problem(model, lambda items, seed: None, lambda model, batch: None)
"""
"""Names of annotations that exist for a type checker alone; Python 3.14 evaluates none (PEP 649)."""


@pytest.mark.parametrize(
    "first_line",
    [
        "from __future__ import annotations",
        pytest.param(
            "import sys",
            marks=pytest.mark.skipif(
                sys.version_info < (3, 14), reason="Python before 3.14 evaluates annotations"
            ),
        ),
    ],
)
def test_annotations_that_only_a_type_checker_can_evaluate(folder, first_line):
    write(folder, "lazy.py", f"{first_line}\nimport torch, gradcheck_suite\n{FOR_TYPE_CHECKERS}")
    assert resolve_loop("lazy.py:loop")(None) == 7
    assert isinstance(resolve_problem("lazy.py:problem"), Problem)


METHOD = "class T:\n    def fit(self, run):\n        return 7\ntrainer = T()\n"
SEVEN = "def f(run):\n    return 7\n"
DATACLASS = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass T:\n    x: int = 7\n"
)


@pytest.mark.parametrize(
    ("files", "loop"),
    [
        ({"a.py": SEVEN}, "a.py:f"),
        ({"a.py": SEVEN}, "{folder}/a.py:f"),
        ({"a.py": METHOD}, "a.py:trainer.fit"),
        ({"a.py": DATACLASS + "def f(run):\n    return T().x\n"}, "a.py:f"),
        ({"my_package/__init__.py": "", "my_package/deep.py": SEVEN}, "my_package.deep:f"),
        ({"sub/neighbour.py": SEVEN, "sub/a.py": "from neighbour import f\n"}, "sub/a.py:f"),
    ],
)
def test_a_loop_in_a_file_or_a_module(folder, files, loop):
    for name, text in files.items():
        write(folder, name, text)
    assert resolve_loop(loop.format(folder=folder))(None) == 7


def test_a_file_may_bear_the_name_of_a_module_that_is_already_there(folder):
    import json

    write(folder, "json.py", "def f(run):\n    return 7\n")
    assert resolve_loop("json.py:f")(None) == 7
    assert sys.modules["json"] is json


def test_two_loops_of_one_file_share_its_state_and_an_edit_is_seen(folder):
    path = write(
        folder, "a.py", "x = []\ndef f(run):\n    x.append(1)\ndef g(run):\n    return len(x)\n"
    )
    resolve_loop("a.py:f")(None)
    assert resolve_loop("a.py:g")(None) == 1
    path.write_text("def g(run):\n    return 'edited'\n")
    assert resolve_loop("a.py:g")(None) == "edited"


@pytest.mark.parametrize("definition", ["def f(run, k=1): ...", "def f(*args): ...", "f = len", "f = lambda run: None",
                                        "import functools\nf = functools.partial(max, 1)",
                                        "class C:\n    def __call__(self, run): ...\nf = C()"])  # fmt: skip
def test_whatever_takes_one_argument(folder, definition):
    write(folder, "a.py", definition + "\n")
    assert callable(resolve_loop("a.py:f"))


@pytest.mark.parametrize(
    ("source", "text", "said"),
    [
        (
            "def f(): ...",
            "a.py:f",
            "a.py:f is f(): expected a function of one argument, the TrainingRun",
        ),
        ("def f(*, run): ...", "a.py:f", "is f(*, run)"),
        ("async def f(run): ...", "a.py:f", "a.py:f is an async function"),
        ("def f(run): yield", "a.py:f", "a.py:f is a generator (it contains yield)"),
        (
            "f = 3\ndef g(run): ...",
            "a.py:f",
            "a.py:f is of type int: expected a function of one argument",
        ),
        ("f = 3\ndef g(run): ...", "a.py:f", "the TrainingRun; it defines g"),
        (
            "def train(run): ...",
            "a.py:tran",
            "a.py has no 'tran' (did you mean 'train'?); it defines train",
        ),
        ("import os", "a.py:train", "a.py has no 'train'"),
        # what would run as a script is not run
        (
            "def train(run): ...\nraise SystemExit",
            "a.py",
            "a.py names no loop: expected a.py:NAME; it defines train",
        ),
        (
            "x = 1\ndef (",
            "a.py:f",
            "cannot import a.py: SyntaxError: invalid syntax (a.py, line 2)",
        ),
        (
            "x = 1\n\n1 / 0",
            "a.py:f",
            "cannot import a.py (line 3): ZeroDivisionError: division by zero",
        ),
        (
            "import nowhere_to_be_found",
            "a.py:f",
            "cannot import a.py (line 1): ModuleNotFoundError: No module named",
        ),
        (
            "import bad_neighbour",
            "a.py:f",
            "(line 1): SyntaxError: invalid syntax (bad_neighbour.py, line 1)",
        ),
        (
            "raise ValueError('two\\nlines')",
            "a.py:f",
            "cannot import a.py (line 1): ValueError: two lines",
        ),
        (
            "import sys\nsys.exit(0)",
            "a.py:f",
            "a.py ends the program when it is imported (line 2): put what should",
        ),
        ("x = '\0'", "a.py:f", "cannot import a.py"),
        ("x", "b.py:f", "b.py: no such file (did you mean 'a.py'?)"),
        ("x", "nowhere/b.py:f", "nowhere/b.py: no such file"),
        ("x", "sub:f", "sub is a folder: expected a Python file in it, sub/FILE.py:NAME"),
        ("x", "./sub:f", "./sub is a folder: expected a Python file in it, sub/FILE.py:NAME"),
        ("x", ".:f", ". is a folder: expected a Python file in it, FILE.py:NAME"),
        ("x", "sub", "sub is a folder: expected FILE.py:NAME"),
        ("x", "folder.py:f", "folder.py is a folder: expected a Python file"),
        ("x", "notes.txt:f", "notes.txt is not a Python file: expected a name that ends in .py"),
        ("x", "./notes.txt:f", "notes.txt is not a Python file: expected a name that ends in .py"),
        ("x", "a:", "expected FILE.py:NAME or package.module:NAME for a loop, got 'a:'"),
        ("x", ":f", "got ':f'"),
        ("x", "a.py:f g", "got 'a.py:f g'"),
        (
            "x",
            "no_such_module:f",
            "there is no module 'no_such_module' on Python's path or in the working directory",
        ),
        ("x", "no_such.module:f", "there is no module 'no_such.module'"),
        ("1 / 0", "a:f", "cannot import a (line 1): ZeroDivisionError"),
        ("x", "zero", "no built-in loop is called 'zero' (did you mean 'zero_'?)"),
        ("x", "", "no built-in loop is called ''"),
    ],
)
def test_what_goes_wrong_is_one_line(folder, source, text, said):
    write(folder, "a.py", source + "\n")
    write(folder, "bad_neighbour.py", "def (\n")
    write(folder, "notes.txt", "hello")
    (folder / "sub").mkdir()
    (folder / "folder.py").mkdir()
    with pytest.raises(UsageError) as caught:
        resolve_loop(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


LAZY = """
import types
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise RuntimeError(f"no backend for {name}")
    @property
    def __class__(self):
        raise RuntimeError("no backend at all")
heavy = Lazy("heavy")
def train(run): ...
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a.py:trian", "a.py has no 'trian' (did you mean 'train'?); it defines Lazy, train"),
        ("a.py:heavy", "a.py:heavy is of type Lazy: expected a function of one argument"),
        (
            "a.py:heavy.train",
            "cannot look up heavy.train in a.py: RuntimeError: no backend for train",
        ),
    ],
)
@pytest.mark.parametrize("resolve", [resolve_loop, resolve_problem])
def test_a_lazy_module_in_a_file_is_not_asked_for_what_it_lacks(folder, text, said, resolve):
    write(folder, "a.py", LAZY)
    with pytest.raises(UsageError) as caught:
        resolve(text)
    if resolve is resolve_loop:
        assert said in str(caught.value)


def test_a_file_that_failed_is_tried_again(folder):
    path = write(folder, "a.py", "1 / 0\n")
    with pytest.raises(UsageError):
        resolve_loop("a.py:f")
    path.write_text("def f(run):\n    return 7\n")
    assert resolve_loop("a.py:f")(None) == 7


def test_an_interrupt_while_importing_passes(folder):
    write(folder, "a.py", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        resolve_loop("a.py:f")


PROBLEM = """
from gradcheck_suite import Problem
def part(*args): ...
PROBLEM = Problem(part, part, part)
def make(): return PROBLEM
def make_none(): ...
def fails(): raise OSError('no data')
NUMBER = 3
"""


def test_a_problem_and_a_function_that_returns_one(folder):
    write(folder, "p.py", PROBLEM)
    assert isinstance(resolve_problem("p.py:PROBLEM"), Problem)
    assert resolve_problem("p.py:make") is resolve_problem("p.py:PROBLEM")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "p.py",
            "p.py names no problem: expected p.py:NAME; it defines part, PROBLEM, make, make_none, fails",
        ),
        ("p", "expected FILE.py:NAME or package.module:NAME of a problem, got 'p'"),
        ("p.py:PROBLE", "p.py has no 'PROBLE' (did you mean 'PROBLEM'?)"),
        (
            "p.py:NUMBER",
            "p.py:NUMBER is of type int: expected a gradcheck_suite.Problem, or a function of no argument",
        ),
        ("p.py:NUMBER", "; it defines part, PROBLEM, make"),
        ("p.py:make_none", "p.py:make_none returned NoneType: expected a gradcheck_suite.Problem"),
        ("p.py:fails", "p.py:fails failed (line 7): OSError: no data"),
        ("q.py:x", "q.py: no such file (did you mean 'p.py'?)"),
    ],
)
def test_what_goes_wrong_with_a_problem_is_one_line(folder, text, said):
    write(folder, "p.py", PROBLEM)
    with pytest.raises(UsageError) as caught:
        resolve_problem(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# The libraries that a loop imports, by the files that it comes from.


def test_libraries_are_found_in_the_file_and_in_those_beside_it(folder):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("from . import inner\n")
    (folder / "package" / "inner.py").write_text("def later():\n    import rich.console\n")
    (folder / "mine.py").write_text(
        "import os, torch, gradcheck_suite\nfrom package import inner\n"
        "def loop(run):\n    import hypothesis, nowhere_to_be_found\n"
        "class Trainer:\n    def __call__(self, run): ...\ntrainer = Trainer()\n"
    )
    for name in ("loop", "trainer"):
        assert sorted(libraries_of(resolve_loop(f"mine.py:{name}"))) == ["hypothesis", "rich"]
    (folder / "alone.py").write_text("def loop(run): ...\n")
    assert libraries_of(resolve_loop("alone.py:loop")) == ()


@pytest.mark.parametrize("loop", [BUILT_IN["plain"], print, len])
def test_what_is_no_users_file_imports_nothing(loop):
    assert libraries_of(loop) == ()


def test_the_names_of_the_built_in_loops_are_known_without_torch():
    assert [*NAMES] == [*BUILT_IN, *JAX_MODES, *RANK_LOOPS]


DEFINES = [
    # the file, and whether it may define `train`
    ("def train(run): ...", True),
    ("class train:\n    def __init__(self, run): ...", True),
    ("class train(Base): ...", True),
    ("train = make()", True),
    ("from elsewhere import train", True),
    ("from elsewhere import *", True),
    ("globals()['tr' + 'ain'] = make()", True),
    ("if fast:\n    def train(run): ...", True),
    ("class train: ...", False),
    ("def others(run): ...", False),
]


@pytest.mark.parametrize(("text", "may_define"), DEFINES)
def test_what_a_file_cannot_define_is_refused_and_the_rest_is_left_to_its_import(
    text, may_define, tmp_path
):
    (tmp_path / "mine.py").write_text(text)
    with contextlib.nullcontext() if may_define else pytest.raises(UsageError):
        expect_found(f"{tmp_path / 'mine.py'}:train", is_loop=True)
