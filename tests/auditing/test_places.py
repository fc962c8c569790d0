"""Where a program is: in its loops, whatever the interpreter compiles them to, and in a stack."""

from __future__ import annotations

import sysconfig
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from gradcheck_suite.auditing.places import Loop, Place, in_trace, loop_here
from tests.auditing.running import audited

LINES = """
def program(see):
    for epoch in range(2):
        for row in range(2):
            see(epoch)
"""
# Python 3.13 compiles the head and the body of such a loop to one STORE_FAST_LOAD_FAST
ONE_LINE = """
def program(see):
    for epoch in range(2):
        for row in range(2): see(epoch)
"""
TWO_FUNCTIONS = """
def program(see):
    for epoch in range(2): rows(see, epoch)

def rows(see, epoch):
    for row in range(2): see(epoch)
"""
COMPREHENSION = """
def program(see):
    [see(epoch) for epoch in range(2) for row in range(2)]
"""
PAIRS = """
def program(see):
    for epoch, name in enumerate("ab"):
        for row, other in enumerate("cd"): see(epoch)
"""
SHARPNESS_AWARE = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def passes():
    for x in window:
        (model(x).square().mean() / 2).backward()
for _ in range(4):
    window = torch.randn(2, 4, 5)
    passes()  # first
    moved = [0.05 * p.grad for p in model.parameters()]
    with torch.no_grad():
        for p, by in zip(model.parameters(), moved):
            p.add_(by)
    optimizer.zero_grad()
    passes()
    with torch.no_grad():
        for p, by in zip(model.parameters(), moved):
            p.sub_(by)
    optimizer.step()
    optimizer.zero_grad()
"""
BOUND_AGAIN = """
def program(see):
    for _ in range(2):
        for _ in range(2): see(0)
"""


def _loops(text: str) -> list[tuple[int, Loop | None]]:
    """Run a program of the user's; return each epoch with what `loop_here` says in it."""
    found: list[tuple[int, Loop | None]] = []
    module = types.ModuleType("users_program")
    exec(compile(text, "/somewhere/users_program.py", "exec"), vars(module))
    program: Callable[..., None] = module.program
    program(lambda epoch: found.append((epoch, loop_here())))
    return found


@pytest.mark.parametrize("text", [LINES, ONE_LINE, TWO_FUNCTIONS, COMPREHENSION, PAIRS])
def test_the_loops_around_the_innermost_one_tell_epochs_apart(text):
    found = _loops(text)
    assert len(found) == 4
    assert None not in [loop for _, loop in found]
    assert len({loop for epoch, loop in found if epoch == 0}) == 1
    assert len({loop for epoch, loop in found if epoch == 1}) == 1
    assert len({loop for _, loop in found}) == 2


def test_an_outer_name_that_the_inner_loop_binds_again_tells_nothing():
    assert {loop for _, loop in _loops(BOUND_AGAIN)} == {None}


@pytest.mark.parametrize(("through_libraries", "expected"), [(True, "train.py:16"), (False, None)])
def test_what_a_library_divides_is_at_no_line_of_the_users(through_libraries, expected):
    trainer = Path(sysconfig.get_path("purelib")) / "trainer" / "loop.py"
    entries = [
        '  File "train.py", line 16, in <module>\n    trainer.fit(model)\n',
        f'  File "{trainer}", line 5, in fit\n    loss = loss / self.accumulate\n',
    ]
    assert in_trace(entries, through_libraries=through_libraries) == expected


def test_what_the_user_divides_is_at_its_line_whatever_has_called_it():
    trainer = Path(sysconfig.get_path("purelib")) / "trainer" / "loop.py"
    entries = [
        f'  File "{trainer}", line 5, in fit\n    self.module.training_step(batch)\n',
        '  File "train.py", line 7, in training_step\n    return loss / 4\n',
    ]
    assert in_trace(entries, through_libraries=False) == "train.py:7"


def test_a_place_is_told_from_others_by_the_innermost_line_of_its_own():
    inner = "train.py:9"
    first = Place(inner, (inner, "train.py:12"))
    second = Place(inner, (inner, "train.py:18"))
    deep = Place(inner, (inner, "train.py:30", "train.py:40"))
    deeper = Place(inner, (inner, "train.py:30", "train.py:41"))
    places = [first, second, deep, deeper]
    assert [one.apart_from(places) for one in places] == [
        "train.py:12",
        "train.py:18",
        "train.py:40",
        "train.py:41",
    ]
    assert first.apart_from([first, Place("train.py:10", ("train.py:10",))]) == inner


def test_a_pass_that_is_discarded_has_the_line_that_calls_it(tmp_path):
    """The first of the two passes of sharpness-aware minimization: one function runs both."""
    script = tmp_path / "sam.py"
    script.write_text(SHARPNESS_AWARE)
    result, _ = audited(script, quiet=True)
    discarded = [one for one in result.findings if "in no step of the whole run" in one]
    assert result.verdict == "holds", result
    assert len(discarded) == 1, result.findings
    assert (
        f"sam.py:{1 + SHARPNESS_AWARE.splitlines().index('    passes()  # first')}" in discarded[0]
    )
