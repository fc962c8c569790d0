"""An audit leaves nothing behind, keeps no graph alive, and breaks no other tool of torch."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

import gradcheck_suite
from gradcheck_suite.live.recording.patches import Patches
from gradcheck_suite.live.recording.recorder import Recorder
from tests.live.running import trained


def _places():
    replaced = Patches(Recorder(lambda state, place: None))
    replaced.install()
    places = [(holder, name) for holder, name, _, _ in replaced._replaced]
    replaced.remove()
    return places


def test_what_was_replaced_is_put_back():
    places = _places()
    before = [holder.__dict__[name] for holder, name in places]
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit():
        assert [holder.__dict__[name] for holder, name in places] != before
        kept = F.cross_entropy
        F.cross_entropy(model(torch.ones(1, 2)), torch.tensor([0])).backward()
        optimizer.step()
    assert all(holder.__dict__[name] is value for (holder, name), value in zip(places, before, strict=True))
    assert not any(p._backward_hooks for p in model.parameters())
    assert kept(torch.zeros(1, 2), torch.tensor([0])) > 0


def test_a_loss_that_never_goes_backward_is_freed_with_its_graph():
    model = torch.nn.Linear(2, 2)
    with gradcheck_suite.audit():
        hidden = model(torch.ones(1, 2))
        freed = weakref.ref(hidden)
        loss = F.cross_entropy(hidden, torch.tensor([0]))
        del hidden, loss
        gc.collect()
        assert freed() is None


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripting_compiling_saving_and_copying_work_under_an_audit():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.ones(3, 2), torch.tensor([0, 1, 1])
    with gradcheck_suite.audit() as audit:
        compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="aot_eager", fullgraph=True)
        for loss in (compiled(x, y), torch.jit.script(torch.nn.CrossEntropyLoss())(model(x), y)):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        file = io.BytesIO()
        torch.save(model, file)
        twin = copy.deepcopy(model)
        assert not any(p._backward_hooks for p in twin.parameters())
    assert "computed inside torch.compile" in audit.result.unjudged


SCRIPTED = """
import torch

def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

@torch.jit.script
class Doubled:
    def __init__(self):
        self.value = twice(torch.ones(1))
"""


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_class_that_is_scripted_under_an_audit_finds_the_functions_beside_it(tmp_path):
    """As `torch.distributed.optim` needs when it is imported."""
    script = tmp_path / "scripted.py"
    script.write_text(SCRIPTED)
    with gradcheck_suite.audit():
        assert trained(script)["Doubled"]().value == 2
