"""What a ledger leaves behind: nothing on, nothing kept alive; and what it refuses."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.run.instance import generated_instance
from studies.compiled_steps import record
from studies.ledger import Ledger

SPEC = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", features=3, bias=True),),
    Loss("mse", reduction="mean"),
)
CASE = Case(SPEC, Plan((1, 2, 1, 2), 2))
SPARSE = ProblemSpec(
    Input("tokens", length=3, padded=False, vocabulary=5),
    (
        Layer("embedding", features=2, padding_idx=False, sparse=True),
        Layer("flatten"),
        Layer("linear", features=1, bias=True),
    ),
    Loss("mse", reduction="mean"),
)


def _nothing_is_on():
    hooks = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return not _get_current_dispatch_mode_stack() and not any(hooks)


def test_a_recorded_case_leaves_nothing_on():
    ledger = record(MODES["zero_"], CASE)
    assert ledger.window == 2
    assert _nothing_is_on()


def test_a_case_a_trial_and_a_run_give_the_same_ledger():
    instance = generated_instance(CASE)
    ledgers = [
        record(MODES["set_to_none"], subject) for subject in (CASE, instance, instance.run())
    ]
    assert len({str(ledger.total()) for ledger in ledgers}) == 1
    assert len({ledger.peak().bytes for ledger in ledgers}) == 1


def test_recording_leaves_the_random_state_as_it_was():
    before = torch.get_rng_state()
    record(MODES["zero_"], CASE)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_loop_that_raises_leaves_nothing_on(where):
    class Broken(Exception):
        pass

    def broken(*_):
        raise Broken

    def loop(run):
        if where == "step":
            run.optimizer.register_step_pre_hook(broken)
        for batch in run.loader:
            loss = run.loss(run.model, batch)
            if where == "forward":
                broken()
            if where == "backward":
                loss.register_hook(broken)
            loss.backward()
            run.optimizer.step()

    with pytest.raises(Broken):
        record(loop, CASE)
    assert _nothing_is_on()


def test_what_follows_a_step_that_raised_is_no_step():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with Ledger(torch.nn.ParameterList([p]), optimizer) as ledger:
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        handle.remove()
        (p * 2).sum().backward()
        optimizer.step()
        p.detach() * 3
    assert ledger.operations("backward") == {"mul": 1}
    assert ledger.operations("step") == {"add_": 1}
    assert ledger.operations("other", window=1) == {"mul": 1}


def test_nested_ledgers_record_the_same():
    model, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outer, inner = Ledger(model, optimizer), Ledger(model, optimizer)
    with outer, inner:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert inner.total() == outer.total()
    assert inner.operations("accumulate", "step") == outer.operations("accumulate", "step")
    assert inner.peak().bytes == outer.peak().bytes
    assert _nothing_is_on()


def test_neither_ledger_nor_tensors_are_kept_alive():
    gc.collect()
    gc.disable()
    try:
        run = generated_instance(CASE.replace(optimizer="momentum")).run()
        ledger = record(MODES["zero_"], run)
        parameters = [weakref.ref(p) for p in run.model.parameters()]
        gradients = [weakref.ref(p.grad) for p in run.model.parameters()]
        storages = [weakref.ref(p.grad.untyped_storage()) for p in run.model.parameters()]
        gone = weakref.ref(ledger)
        del run
        assert [r() for r in (*gradients, *storages)] == [None] * 4
        assert [r() for r in parameters] == [None] * 2
        live = ledger.live
        # (2 * 3 + 3) float64, counted at the end
        assert live["gradients"] == live["optimizer state"] == 72
        del ledger
        assert gone() is None
    finally:
        gc.enable()


def test_tensors_that_outlive_the_ledger_do_not_keep_it():
    ledger = Ledger()
    with ledger:
        kept = torch.ones(3) * 2
    gone = weakref.ref(ledger)
    del ledger
    assert gone() is None
    assert kept.sum() == 6


def test_an_abandoned_ledger_is_not_kept_by_what_it_watches():
    ledger = Ledger()
    ledger.__enter__()
    kept = torch.ones(3) * 2
    ledger.__exit__(None, None, None)
    gone = weakref.ref(ledger._storages)
    del ledger
    assert gone() is None
    del kept


# --- what it refuses


def test_a_sparse_gradient_is_refused():
    with pytest.raises(
        UsageError, match=r"layout torch.sparse_coo and shape \(5, 2\).*use dense gradients"
    ):
        record(MODES["zero_"], Case(SPARSE, Plan((2, 2), 2)))
    assert _nothing_is_on()


def test_a_ledger_is_for_one_block():
    ledger = Ledger()
    with ledger:
        with pytest.raises(UsageError, match="one `with` block"), ledger:
            pass
        torch.ones(2)
    with pytest.raises(UsageError, match="make another Ledger"), ledger:
        pass
    assert ledger.total().operations == 1
    assert _nothing_is_on()


def test_phases_are_checked():
    ledger = Ledger()
    with pytest.raises(UsageError, match="outside `with ledger:`"), ledger.phase("step"):
        pass
    with (
        ledger,
        pytest.raises(UsageError, match=r"must be one of reset, forward.*got 'steps'"),
        ledger.phase("steps"),
    ):
        pass
    with pytest.raises(UsageError, match="got 'rest'"):
        ledger.total("rest")
    with pytest.raises(UsageError, match="no operation was recorded"):
        ledger.peak("step")
