"""Scripts as files: what of a user's own module is copied or imported, and the run before a script
is announced.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from gradcheck_suite.cli.loading import resolve_loop
from gradcheck_suite.core.case import Case, Input, Layer, Plan, ProblemSpec
from gradcheck_suite.core.results import Violation
from gradcheck_suite.script import script_failure, script_text
from gradcheck_suite.script.writer import CannotCopyError, Sources
from tests.script.alone import run_alone
from tests.script.test_violations import LINEAR, violation_of

LOOP = """
def train(run):
    for _ in range(run.epochs):
        for batch in run.loader:
            {body}
"""
FAULTY = LOOP.format(body="run.loss(run.model, batch).backward(); run.optimizer.step()")
SOUND = FAULTY + "            run.optimizer.zero_grad()\n"
# a file that does something when it is imported is not copied
IMPORTED = "NAMES = list()\n"
CASE = Case(LINEAR, Plan((1, 2), 1))


@pytest.fixture(autouse=True)
def unchanged_imports(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")) or name == "mine":
            del sys.modules[name]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.py"


def script_of(name, violation=None):
    loop = resolve_loop(name)
    return script_text(loop, name, violation or violation_of(loop, CASE), time_limit_s=0.5)


def test_the_script_of_the_readmes_example_is_short(mine):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    mine.write_text(re.search(r"```python\n# my_loop.py\n(.*?)```", readme, re.S)[1])
    spec = ProblemSpec(
        Input("vector", size=1), (Layer("linear", bias=False, features=1),), LINEAR.loss
    )
    violation = violation_of(resolve_loop("mine.py:train"), Case(spec, Plan((1, 2), 2)))
    assert violation.diagnosis == "mean-of-means"
    script = script_of("mine.py:train", violation)
    assert len(script.splitlines()) <= 200
    assert run_alone(script).status == 1


NEEDS_MORE = """
import torch as pt
from collections import deque
from gradcheck_suite import TrainingRun, training_loop
LIMIT: int = 3
def unused(): ...
def helper(run: TrainingRun, batch) -> pt.Tensor:
    return run.loss(run.model, batch)
@training_loop(assumes=("sum-reduction",))
@pt.enable_grad()
def train(run: TrainingRun) -> None:
    for _ in range(run.epochs):  # a comment
        for batch in deque(run.loader, LIMIT):
            helper(run, batch).backward()
            run.optimizer.step()
if __name__ == "__main__":
    print("not run")
"""


def test_a_users_loop_is_copied_as_it_is(mine):
    for text, lacks in (
        (FAULTY, ["from __future__"]),
        (NEEDS_MORE, ["training_loop", "unused", "not run"]),
    ):
        mine.write_text(text)
        script = script_of("mine.py:train")
        mine.unlink()
        assert run_alone(script).status == 1
        assert text[text.index("def train") :].partition("if __name__")[0] in script
        assert not [part for part in [*lacks, "def load"] if part in script]
        assert "It needs Python and torch alone." in script


@pytest.mark.parametrize(
    "text",
    [
        "import helper\n" + FAULTY,
        IMPORTED + FAULTY,
        FAULTY.replace("train", "model") + "train = model\n",
        FAULTY.replace("train", "count") + "def train(run):\n    count(run)\n",
        "import torch\n" + FAULTY + "torch.hidden = 1\n",
    ],
)
def test_a_users_loop_that_does_not_stand_alone_is_imported_from_its_file(mine, text, tmp_path):
    """The script runs in another working directory, where neither the suite nor JAX can be imported.

    It runs again after the loop is fixed.
    """
    mine.write_text(text)
    (tmp_path / "helper.py").write_text("")
    script = script_of("mine.py:train")
    assert f'loop = load("mine.py", "train", folder="{tmp_path}")' in script
    done = run_alone(script)
    assert (done.status, done.errors) == (1, "")
    mine.write_text("import helper\n" + SOUND)
    assert run_alone(script).status == 0


def test_a_users_loop_is_imported_from_its_module(mine):
    mine.write_text(IMPORTED + FAULTY)
    assert run_alone(script_of("mine:train")).status == 1


IMPORT_FAULTS = {
    "import nowhere_to_be_found": "No module named 'nowhere_to_be_found'",
    "raise SystemExit(0)": "SystemExit: 0",
    "other = 1": "has no attribute 'train'",
    "": "FileNotFoundError",
}


def test_where_the_loop_cannot_be_imported_the_status_is_2(mine, tmp_path):
    mine.write_text(IMPORTED + FAULTY)
    script = script_of("mine.py:train")
    for text, told in IMPORT_FAULTS.items():
        mine.write_text(text) if text else mine.unlink()
        done = run_alone(script)
        assert done.status == 2
        assert done.errors.startswith(f"cannot import train from mine.py in {tmp_path} (")
        assert told in done.errors


@pytest.mark.parametrize("body", ["raise SystemExit(0)", "raise GeneratorExit"])
def test_another_failure_than_the_fault_has_status_2(mine, body):
    mine.write_text(IMPORTED + FAULTY)
    script = script_of("mine.py:train")
    mine.write_text(LOOP.format(body=body))
    done = run_alone(script)
    assert done.status == 2
    assert done.errors.endswith("This is another failure than the fault that the script shows.\n")


CHANGES = """
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from gradcheck_suite import training_loop
@training_loop(assumes={assumes})
@torch.no_grad()
def train(run):
    plateau = ReduceLROnPlateau(run.optimizer, patience=0, factor=0.5, mode="max", threshold=1e9)
    parameters = list(run.model.parameters())
    for epoch in range(run.epochs):
        for batch in run.loader:
            with torch.enable_grad():
                run.loss(run.model, batch).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            {allowed}
            {fault}
"""
DECAY = "[p.mul_(0.999) for p in parameters]"


@pytest.mark.parametrize(
    ("assumes", "optimizer", "allowed", "fault"),
    [
        (
            ("edits-settings",),
            "sgd",
            'run.optimizer.param_groups[0]["lr"] *= 0.9',
            f"if epoch == 1: {DECAY}",
        ),
        (
            ("edits-parameters",),
            "momentum",
            DECAY,
            '[kept["momentum_buffer"].mul_(0.5) for kept in run.optimizer.state.values()]',
        ),
        ((), "momentum", "plateau.step(0)", f"if epoch == 2: {DECAY}"),
    ],
    ids=["settings", "parameters", "scheduled"],
)
def test_what_a_loop_may_change_is_no_fault_in_its_script(mine, assumes, optimizer, allowed, fault):
    mine.write_text(CHANGES.format(assumes=assumes, allowed=allowed, fault=fault))
    case = Case(LINEAR, Plan((1, 2), 1, 3), optimizer=optimizer)
    violation = violation_of(resolve_loop("mine.py:train"), case)
    assert violation.kind == "parameters"
    script = script_of("mine.py:train", violation)
    assert script.count(fault) == 1
    assert [run_alone(text).status for text in (script, script.replace(fault, "pass"))] == [1, 0]


CALLS = """
import torch
import warnings
from gradcheck_suite import training_loop
@training_loop(assumes={assumes})
def train(run):
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    warnings.simplefilter("ignore")  # torch says that a scheduler is stepped before the optimizer
    for epoch in range(run.epochs):
        batches = list(run.loader)
        total = sum(run.count(batch) for batch in batches)
        run.optimizer.zero_grad()
        for i, batch in enumerate(batches, 1):
            (scaler.scale(run.loss(run.model, batch)) * run.count(batch) / total).backward()
            if i == len(batches):
                scaler.step(run.optimizer)
                scaler.update()
            {call}
"""


@pytest.mark.parametrize(
    ("assumes", "fault", "fixed", "printed"),
    [
        (
            (),
            "scheduler.step()",
            "if i == 3: scheduler.step()",
            "scheduler.step() was called [3, 3]",
        ),
        (
            (),
            "if i == 3 or epoch: scheduler.step()",
            "if i == 3: scheduler.step()",
            "scheduler.step() was called [1, 3]",
        ),
        (
            ("schedules-micro-batches",),
            "scheduler.step(); scaler.unscale_(run.optimizer)",
            "scheduler.step()",
            "GradScaler.unscale_() was called [3, 3]",
        ),
    ],
)
def test_calls_of_a_scheduler_or_scaler_are_counted(mine, assumes, fault, fixed, printed):
    mine.write_text(CALLS.format(assumes=assumes, call=fault))
    violation = violation_of(resolve_loop("mine.py:train"), Case(LINEAR, Plan((1, 2, 1), 3, 2)))
    assert violation.diagnosis == "step-per-micro-batch"
    script = script_of("mine.py:train", violation)
    assert script.count(fault) == 1
    faulty, right = (run_alone(text) for text in (script, script.replace(fault, fixed)))
    assert (faulty.status, right.status) == (1, 0)
    assert f"{printed} times per epoch, of 3 micro-batches and 1 window(s)\n" in faulty.output


CATCHES = """while True:
                try: run.optimizer.step()
                except BaseException: pass"""


@pytest.mark.parametrize("body", ["while True: run.optimizer.step()", CATCHES])
def test_a_loop_that_steps_without_end_is_stopped(mine, body):
    mine.write_text(LOOP.format(body=body))
    violation = Violation("step-count", "wrong-step-count", "planted", CASE)
    done = run_alone(script_of("mine.py:train", violation))
    told = "the loop calls optimizer.step() 12 times and does not stop there\nthe fault is there\n"
    assert (done.status, done.output) == (1, told)
    mine.write_text(SOUND)
    assert run_alone(script_of("mine.py:train", violation)).status == 0


def test_a_loop_that_hangs_ends_its_process_with_status_1(mine):
    mine.write_text(IMPORTED + LOOP.format(body="while True: pass"))
    done = run_alone(script_of("mine.py:train", Violation("raised", "timed-out", "planted", CASE)))
    assert done.status == 1
    assert "mine.py" in done.errors


def test_words_that_python_would_read_do_no_harm(mine):
    words = 'a """ quote, a \\ backslash, $dollar, \\N{} and {braces}'
    mine.write_text(FAULTY)
    violation = Violation(
        "step-count", "planted", words, CASE, details=("  " + words, "", "x " * 99)
    )
    assert words in ast.get_docstring(ast.parse(script_of("mine.py:train", violation)))


# Definitions copied from modules.


def test_a_global_whose_name_is_only_local_in_a_function_is_not_copied(mine):
    mine.write_text(
        "def batch(): ...\ndef total(): ...\ndef i(): ...\ndef inner(): ...\ndef wanted(): ...\n"
        "def train(run, batch=tuple([i for i in ()])):\n    total = [i for i in (run, batch)]\n"
        "    def inner(total): return total, wanted\n    return inner(total)\n"
    )
    sources = Sources()
    sources.add(resolve_loop("mine.py:train").__module__, "train")
    assert [line for line in sources.take().splitlines() if line.startswith("def ")] == [
        "def wanted(): ...",
        "def train(run, batch=tuple([i for i in ()])):",
    ]


def test_one_name_cannot_stand_for_two_things(mine):
    sources = Sources()
    mine.write_text(FAULTY)
    sources.add(resolve_loop("mine.py:train").__module__, "train")
    mine.write_text(SOUND)
    with pytest.raises(CannotCopyError, match=r"train of \w+ and of another module"):
        sources.add(resolve_loop("mine.py:train").__module__, "train")


# A script is run before it is announced: one that does not show the fault is not announced.

OWN_MISTAKE = """
import warnings, sys
print("a warning", file=sys.stderr)
raise TypeError("own mistake")
"""
SCRIPTS = [
    ("print('the fault is there'); raise SystemExit(1)", "never-stepped", None),
    ("raise SystemExit(1)", "timed-out", None),
    ("print('the fault is gone')", "raised", "the loop does not show the fault"),
    (OWN_MISTAKE, "raised", "the script itself fails with status 1: TypeError: own mistake"),
    (
        "import sys; sys.exit('cannot import x')",
        "raised",
        "the script itself fails with status 1: cannot import x",
    ),
    ("import time; time.sleep(60)", "raised", "it did not end within 0.4 s"),
    (None, "raised", "the script itself fails with status 2: "),
]


@pytest.mark.parametrize(("text", "diagnosis", "said"), SCRIPTS)
def test_only_a_script_that_shows_the_fault_is_announced(
    tmp_path, text, diagnosis, said, monkeypatch
):
    monkeypatch.setattr(
        "gradcheck_suite.script.writer.START_S", 0.2 if text and "sleep" in text else 60.0
    )
    script = tmp_path / "script.py"
    if text:
        script.write_text(text)
    found = script_failure(script, Violation("raised", diagnosis, "planted", CASE), 0.2)
    assert (found is None) == (said is None)
    if said:
        assert said in found.reason
        assert found.is_refuted == ("did not end" not in said)
