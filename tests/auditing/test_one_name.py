"""A fault has one name, whether `verify` or `audit` sees it."""

from __future__ import annotations

import json

import pytest

from gradcheck_suite.core.faults import FAULTS
from tests.auditing.running import audited, audited_on_two_ranks

HEAD = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(n=4):
    return F.cross_entropy(model(torch.randn(n, 6)), torch.randint(0, 3, (n,)))

"""
EPOCHS = """
K = {k}
for epoch in range({epochs}):
    for i in range({number}):
        (loss_of() / K).backward()
        if {steps}:
            optimizer.step()
            optimizer.zero_grad()
"""
WHOLE = "(i + 1) % K == 0"
CLIPPED = """
for window in range(4):
    for i in range(4):
        (loss_of() / 4).backward()
        INSIDE
    AFTER
    optimizer.step()
    optimizer.zero_grad()
"""
NORM = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)"
VALUE = "torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)"
ALSO_DROPPED = ["tail-dropped"]
FAULTY = {
    "7 of K = 4": (
        EPOCHS.format(k=4, epochs=4, number=7, steps=WHOLE),
        ["tail-leak", *ALSO_DROPPED],
    ),
    "5 of K = 4": (
        EPOCHS.format(k=4, epochs=4, number=5, steps=WHOLE),
        ["tail-leak", *ALSO_DROPPED],
    ),
    "3 of K = 2": (
        EPOCHS.format(k=2, epochs=4, number=3, steps=WHOLE),
        ["tail-leak", *ALSO_DROPPED],
    ),
    "shifted by one": (
        EPOCHS.format(k=4, epochs=2, number=16, steps="i % K == 0"),
        ["wrong-windows", *ALSO_DROPPED],
    ),
    "shifted, and stepped at the end": (
        EPOCHS.format(k=3, epochs=1, number=13, steps="i % K == 0"),
        ["wrong-windows"],
    ),
    "stepped at the first of every epoch": (
        EPOCHS.format(k=4, epochs=3, number=9, steps="i % K == 0"),
        ["wrong-windows"],
    ),
    "stepped at the first and at the last of every epoch": (
        EPOCHS.format(k=4, epochs=3, number=10, steps="i % K == 0 or i == 9"),
        ["wrong-windows", "wrong-scale"],
    ),
    "short window at the end of every epoch": (
        EPOCHS.format(k=4, epochs=3, number=9, steps=f"{WHOLE} or i == 8"),
        ["wrong-scale"],
    ),
    "norm clipped inside": (
        CLIPPED.replace("INSIDE", NORM).replace("AFTER", "pass"),
        ["clipped"],
    ),
    "value clipped inside": (
        CLIPPED.replace("INSIDE", VALUE).replace("AFTER", "pass"),
        ["clipped"],
    ),
}
SOUND = {
    "whole windows": EPOCHS.format(k=4, epochs=3, number=8, steps=WHOLE),
    "windows over epochs": """
K, count = 4, 0
for epoch in range(4):
    for i in range(6):
        (loss_of() / K).backward()
        count += 1
        if count % K == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    "short windows": """
for epoch in range(3):
    for window in (4, 3):
        for i in range(window):
            (loss_of() / window).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "a short window first": """
for epoch in range(3):
    for i in range(9):
        (loss_of() / (1 if i == 0 else 4)).backward()
        if i % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    "clipped once": CLIPPED.replace("INSIDE", "pass").replace("AFTER", NORM),
    "never large enough": CLIPPED.replace("INSIDE", NORM.replace("0.05", "1e6")).replace(
        "AFTER", VALUE
    ),
}


def of_script(text, tmp_path):
    """Return the result of an audit of a script that begins with `HEAD`."""
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    return audited(path)[0]


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_has_the_name_that_verify_gives_it(name, tmp_path):
    text, diagnoses = FAULTY[name]
    result = of_script(text, tmp_path)
    assert [v.diagnosis for v in result.violations] == diagnoses, result
    assert all(FAULTS[one].command != "verify" for one in diagnoses)


def test_first_windows_of_epochs_are_one_fault(tmp_path):
    """The last window of an epoch, which is as short, has a name of its own."""
    text, _ = FAULTY["stepped at the first and at the last of every epoch"]
    occurrences = {v.diagnosis: v.occurrences for v in of_script(text, tmp_path).violations}
    assert occurrences == {"wrong-windows": 3, "wrong-scale": 3}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_twin_is_not_blamed(name, tmp_path):
    result = of_script(SOUND[name], tmp_path)
    assert result.holds, result


LEFT = """
for epoch in range(3):
    BEFORE
    for i in range(4):
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.randn(5, 6))
    AFTER
"""
PLAIN = "model = torch.nn.Linear(6, 3)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
OWN = """
class Own(torch.nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)
model = Own(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize(
    ("text", "is_left"),
    [
        (LEFT.replace("BEFORE", "pass").replace("AFTER", "pass"), True),
        (OWN + LEFT.replace("BEFORE", "pass").replace("AFTER", "pass"), True),
        (LEFT.replace("BEFORE", "epoch or model.train()").replace("AFTER", "pass"), True),
        (LEFT.replace("BEFORE", "model.train()").replace("AFTER", "pass"), False),
        (LEFT.replace("BEFORE", "pass").replace("AFTER", "model.train()"), False),
        (LEFT.replace("BEFORE", "model.eval()").replace("AFTER", "pass"), False),
        (PLAIN + LEFT.replace("BEFORE", "pass").replace("AFTER", "pass"), False),
    ],
)
def test_a_model_that_an_evaluation_leaves_in_eval_mode_is_a_finding(text, is_left, tmp_path):
    result = of_script(text, tmp_path)
    assert result.holds, result
    found = [one for one in result.named_findings if one.name == "wrong-mode"]
    assert bool(found) == is_left, result
    lines = (tmp_path / "train.py").read_text().splitlines()
    for one in found:
        assert "backward()" in lines[int(one.where.rpartition(":")[2]) - 1]
        assert "from step 4 on in eval mode" in one.sentence


SCHEDULE = """
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for window in range(4):
    for i in range(3):
        (loss_of() / 3).backward()
        INSIDE
    optimizer.step()
    optimizer.zero_grad()
    AFTER
"""


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_schedule_that_steps_per_micro_batch_has_the_name_of_verify(is_inside, tmp_path):
    step = "schedule.step()"
    inside, after = (step, "pass") if is_inside else ("pass", step)
    result = of_script(SCHEDULE.replace("INSIDE", inside).replace("AFTER", after), tmp_path)
    names = [one.name for one in result.named_findings]
    assert ("step-per-micro-batch" in names) == is_inside, result


HOOKED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model, last = torch.nn.Linear(3, 4), False


def reduce(g):
    if WHEN:
        dist.all_reduce(g)
        g /= 2
    return g


for p in model.parameters():
    p.register_hook(reduce)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for i in range(8):
    last = i % 2 == 1
    (model(torch.randn(5, 3)).square().mean() / 2).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.share(4)
@pytest.mark.parametrize(("when", "diagnosis"), [("last", "not-reduced"), ("True", None)])
def test_hooks_that_reduce_some_passes_are_not_reduced(when, diagnosis, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(HOOKED.replace("WHEN", when))
    result, ended = audited_on_two_ranks(script, tmp_path / "r.json")
    assert (result["violation"] or {}).get("diagnosis") == diagnosis, json.dumps(result, indent=1)
    assert [status for _, status in ended] == [int(diagnosis is not None), 0], ended
