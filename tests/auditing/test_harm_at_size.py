"""An audit of a large program takes no more memory and time than of a small one, in counts that do
not depend on the load of the machine.
"""

from __future__ import annotations

import gc
import linecache
import tracemalloc
import weakref
from collections import Counter

import numpy as np
import pytest
import torch

import gradcheck_suite
from gradcheck_suite.auditing import (
    gradient_hooks,
    judge,
    masks,
    parameter_points,
    places,
    recomputation,
    recorder,
    samples,
    strays,
)
from gradcheck_suite.auditing.places import Place, lines_with
from gradcheck_suite.auditing.saved_values import saved_by_call
from gradcheck_suite.auditing.schedule import ATTEMPTS, Schedule
from gradcheck_suite.core.options import AuditOptions
from tests.auditing.running import accumulate


def _step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_hooks_of_the_program_keep_no_gradient(monkeypatch):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = list[int]()
    raw = recorder.Recorder._raw

    def noted(self, known, gradient):
        raw(self, known, gradient)
        sampled = () if known.raw.sampled is None else known.raw.sampled
        kept.append(len(sampled) + len(known.raw.some))
        kept.append(0 if known.ratio is None else len(known.ratio))

    monkeypatch.setattr(recorder.Recorder, "_raw", noted)
    audit = gradcheck_suite.audit(quiet=True, without=("batch",)).open()
    accumulate(model, optimizer)
    result = audit.close()
    # of a gradient of any size
    assert max(kept) <= 24 + gradient_hooks.MOST_RATIOS < 64 * 64
    assert "hook-factor" in {found.name for found in result.named_findings}, result.findings


@pytest.mark.parametrize("layout", ["channels last", "transposed", "in a row"])
def test_a_sample_is_no_copy_however_the_elements_lie(layout, monkeypatch):
    plain = torch.randn(32, 16, 8, 8)
    tensor = {
        "channels last": lambda: plain.to(memory_format=torch.channels_last),
        "transposed": lambda: plain.transpose(0, 1).contiguous().transpose(0, 1),
        "in a row": lambda: plain,
    }[layout]()
    whole = samples.sample(plain, whole=True)
    copies = list[int]()
    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(
        torch.Tensor, "contiguous", lambda t, **k: copies.append(t.numel()) or contiguous(t, **k)
    )
    together = samples.BatchedSampler()
    (found,), (mark,) = together.taken([tensor], whole=False)
    assert not copies
    assert found.tolist() == whole[: samples.ELEMENTS].tolist()
    assert samples.sample(tensor, whole=True).tolist() == whole.tolist()
    # where its elements lie is computed once, and a write to any sampled one is seen
    tensor.data[0, 0, 0, 0] += 1
    assert together.marks([tensor]) != [mark]


def test_other_strides_at_the_same_address_are_other_places():
    memory = torch.arange(64.0)
    together = samples.BatchedSampler()
    one, other = memory.view(8, 8).t(), memory.as_strided((8, 8), (1, 1))
    first = together.taken([one], whole=False)[0][0]
    assert together.taken([other], whole=False)[0][0].tolist() != first.tolist()


def test_high_addresses_have_marks_and_others_are_said_to_have_none(monkeypatch):
    # Linux on aarch64 gives addresses of 48 bits and more
    assert samples._HIGHEST >= 1 << 52

    def findings():
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradcheck_suite.audit(quiet=True) as audit:
            for _ in range(3):
                _step(model, optimizer, torch.randn(3, 4))
        return [found.name for found in audit.result.named_findings]

    assert "unseen-writes" not in findings()
    monkeypatch.setattr(samples, "_HIGHEST", 1 << 13)
    assert "unseen-writes" in findings()


def test_names_are_looked_for_once_in_each_module(monkeypatch):
    counts = Counter()
    named = torch.nn.Module.named_parameters

    def counted(self, *args, **kwargs):
        for one in named(self, *args, **kwargs):
            counts["parameters"] += 1
            yield one

    number = 400
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(number)))
    optimizer = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.1)
    gc.collect()
    others = sum(
        len([*m.parameters()]) for m in recorder.live_instances(torch.nn.Module) if m is not model
    )
    with gradcheck_suite.audit(quiet=True, without=("batch",)) as audit:
        _step(model, optimizer, torch.randn(2, 2))
        monkeypatch.setattr(torch.nn.Module, "named_parameters", counted)
        context = audit._torch
        names = {context._name_of(key) for key in context._recorder.parameters}
    assert {name for name, _ in named(model)} < names
    # once by the model; its layers are not asked again, other modules that live here may be
    assert counts["parameters"] <= 2 * number + others


def test_millions_of_counted_steps_take_little_memory():
    one = judge.AuditJudge(1, {}, given=None, weights=True, sums=True, name_of=lambda key: None)
    number = 5_000_000
    one.counted += [range(begin, begin + 998) for begin in range(2, number, 1000)]
    tracemalloc.start()
    try:
        found = one.unjudged(number)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * number / 5  # a byte for each, and what was not judged: 2 of 1,000
    assert f"{2 * number // 1000:,}" in str(found[0]) or str(2 * number // 1000) in str(found[0])


def test_a_long_script_is_read_once(tmp_path, monkeypatch):
    script = tmp_path / "long.py"
    script.write_text("\n".join(f"x = {n}" for n in range(3000)) + "\noptimizer.zero_grad()\n")
    place = Place(f"{script}:5", (f"{script}:5",))
    reads, getlines = list[str](), linecache.getlines
    monkeypatch.setattr(linecache, "getlines", lambda file: reads.append(file) or getlines(file))
    for _ in range(100):
        assert lines_with("zero_grad(", place) == [f"{script}:3001"]
    assert len(reads) == 1


def test_what_is_kept_does_not_grow_with_the_optimizers_that_are_gone(monkeypatch):
    audit = gradcheck_suite.audit(quiet=True).open()
    sizes = list[int]()
    searches = list[int]()
    living = places.live_instances
    for one in (recorder, strays, parameter_points):
        monkeypatch.setattr(
            one, "live_instances", lambda *kinds: searches.append(len(sizes)) or living(*kinds)
        )
    for task in range(600):
        weight = torch.nn.Parameter(torch.randn(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (weight * torch.randn(4)).square().mean().backward()
            optimizer.step()
        kept = audit._torch._recorder
        schedule = audit._torch._schedule
        sizes.append(
            len(kept._optimizers) + len(kept._passes_at_step) + len(schedule._recomputed._due)
        )
        if task > 300:
            assert not kept.records or schedule._in_a_row <= 12
    result = audit.close()
    assert max(sizes[10:]) <= 10
    # a search through all objects takes longer than a task
    assert len(searches) <= 3
    assert result.holds
    # the first windows, and a few more that the budget pays for
    assert result.windows < 200


def test_an_optimizer_that_gets_the_identity_of_one_that_is_gone_is_another():
    own = recorder.Recorder(lambda event: None, lambda: False, weights=True, sums=True)
    one = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    first = own.index(one)
    identity, gone = id(one), weakref.ref(one)
    del one
    assert gone() is None
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    # as if Python had given it the same address
    own._optimizers[id(other)] = own._optimizers.pop(identity)
    second = own.index(other)
    assert second != first
    own._forget_optimizers()
    assert own.index(other) == second


def test_a_window_that_cannot_be_computed_again_is_tried_ever_more_rarely():
    schedule = Schedule(AuditOptions(budget="none", every=1), on_ranks=False)
    tried = list[int]()
    for window in range(2000):
        if schedule.full:
            tried.append(window)
        schedule.after(0, window, 0.0, was_full=schedule.full)
    assert len(tried) <= ATTEMPTS + np.log2(2000)
    # one that can be is computed again each time
    able = Schedule(AuditOptions(budget="none", every=1), on_ranks=False)
    for window in range(100):
        assert able.full
        able.again[0] += 1
        able.after(0, window, 0.0, was_full=True)


def test_a_tool_that_puts_the_engine_back_after_the_audit_leaves_no_recorder():
    audit = gradcheck_suite.audit(quiet=True).open()
    kept = torch.autograd.Variable._execution_engine  # as a tool that was opened meanwhile does
    audit.close()
    plain = torch.autograd.Variable._execution_engine
    torch.autograd.Variable._execution_engine = kept
    try:
        model = torch.nn.Linear(4, 2)
        _step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4))
    finally:
        torch.autograd.Variable._execution_engine = plain
    assert kept.recorder is None
    assert not model.weight._post_accumulate_grad_hooks


def _train_with_hooks(windows):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate(model, optimizer, windows)


def test_hooks_of_the_program_let_no_gradient_be_read_as_a_whole(monkeypatch):
    """But in the first pass, which shows whether the hooks write to what they are given."""
    read = list[int]()
    sample = samples.sample
    monkeypatch.setattr(
        recorder.samples, "sample", lambda t, **k: read.append(t.numel()) or sample(t, **k)
    )
    with gradcheck_suite.audit(quiet=True, without=("batch",)) as audit:
        _train_with_hooks(10)
    assert len(read) == 2 * 8  # two of each parameter
    assert audit.result.verdict == "holds", audit.result


def test_hooks_that_write_in_place_where_no_element_is_looked_at_are_seen():
    model = torch.nn.Linear(64, 64, bias=False)

    def zero_one(gradient):
        gradient.data[1, 1] = 0.0

    model.weight.register_hook(zero_one)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit(quiet=True) as audit:
        accumulate(model, optimizer)
    result = audit.result
    assert result.verdict == "holds", result
    assert not result.again, result  # the gradient is the program's own, and is not compared


def test_a_gradient_that_hooks_replace_by_one_that_differs_in_one_element_is_another_one():
    one = torch.randn(64, 64)
    other = one.clone()
    assert samples.are_equal(one, other)
    other[0, 1] += 1
    assert not samples.are_equal(one, other)
    one[0, 1] = other[0, 1] = torch.nan
    assert samples.are_equal(one, other)
    assert samples.are_equal(one.t(), other.t()) is False  # as torch has it: NaN is not NaN


def test_one_gradient_at_a_time_is_kept_of_a_window_that_is_computed_again(monkeypatch):
    arrived = list[weakref.ref[torch.Tensor]]()
    alive = list[int]()
    compare = recomputation.ComparedGradient.compare

    def noted(self, key, gradient):
        alive.append(sum(one() is not None for one in arrived))
        arrived.append(weakref.ref(gradient))
        compare(self, key, gradient)

    monkeypatch.setattr(recomputation.ComparedGradient, "compare", noted)
    with gradcheck_suite.audit(quiet=True) as audit:
        _train_with_hooks(3)
    assert "in one batch" in str([*audit.result.again]), audit.result
    assert len(alive) == 3 * 8
    assert not any(alive)


def test_a_gradient_that_holds_needs_no_bound_that_is_measured(monkeypatch):
    monkeypatch.setattr(recomputation, "student_factor", lambda *_: pytest.fail("asked for"))
    assert recomputation.exceeding({1: 0.5}, {1: 1.0}, {}, lambda _: {}) == {}


def test_gradients_that_vanish_are_computed_again_once(monkeypatch):
    """Below the smallest normal number no share of a gradient bounds its rounding error."""
    calls = list[int]()
    replay = recomputation.replay

    def counted(forward, arguments, cotangents, how, *receive):
        if not how.forward_only:  # once it is asked whether the forward writes to what it has saved
            calls.append(1)
        return replay(forward, arguments, cotangents, how, *receive)

    monkeypatch.setattr(recomputation, "replay", counted)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(160)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gradcheck_suite.audit(quiet=True) as audit:
        for _ in range(3):
            for _ in range(2):
                (model(torch.randn(4, 16)).square().mean() / 2).backward()
            optimizer.step()
            least = min(float(p.grad.abs().max()) for p in model.parameters())
            optimizer.zero_grad()
    assert 0.0 <= least < torch.finfo(torch.float32).tiny
    assert len(calls) == 3, audit.result


def test_an_error_that_underflow_does_not_explain_is_seen():
    tiny = torch.finfo(torch.float32).tiny
    observed = {1: torch.full((4, 4), 2.0 * tiny)}
    total = recomputation.ComparedGradient(observed, 1.0, is_sampled=False)
    total.compare(1, torch.full((4, 4), 1.0 * tiny))
    assert total.difference().worst == 1


def test_a_transposed_tensor_is_not_copied_for_its_fingerprint(monkeypatch):
    tensor = torch.randn(8, 4).t()
    contiguous = torch.Tensor.contiguous
    copied = list[bool]()
    monkeypatch.setattr(
        torch.Tensor,
        "contiguous",
        lambda t, **k: copied.append(not t.is_contiguous()) or contiguous(t, **k),
    )
    first = samples.fingerprint_in_place(tensor)
    assert samples.fingerprint_in_place(tensor) == first
    tensor.data[0, 1] += 1
    assert samples.fingerprint_in_place(tensor) != first
    assert not any(copied)


def test_elements_that_are_kept_for_masks_are_bounded_over_all_gradients():
    watch = masks.MaskWatch()
    gradients = {key: torch.randn(64, 64) for key in range(1024)}
    watch.arrived(gradients, full=True, sparse=())
    assert sum(len(one.then) for one in watch._kept.values()) <= masks.MOST_OF_ALL
    assert masks.MOST_OF_ALL // 1024 < 64 * 64


def test_a_window_that_was_judged_keeps_little_of_each_parameter():
    """Hundreds of windows are kept, to be weighed together: of thousands of layers each took 10 MB."""
    layers = 100
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = list[int]()
    with gradcheck_suite.audit(quiet=True, without=("batch",)) as audit:
        tracemalloc.start()
        try:
            for _ in range(16):
                for _ in range(4):
                    (model(torch.randn(2, 4)).square().mean() / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
                gc.collect()
                kept.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert audit.result.windows == 16
    # a checksum and an entry for it; what arrived, in four passes, was 1,200 bytes beside that
    assert (kept[15] - kept[5]) / 10 / (2 * layers) < 300


def test_a_costly_audit_judges_fewer_of_the_first_windows():
    judged = dict[float, int]()
    for cost in (0.4, 4.0):
        schedule = Schedule(AuditOptions(budget="0.001%"), on_ranks=False)
        judged[cost] = 1 + sum(
            schedule.after(0, number, cost * number, was_full=False) for number in range(1, 30)
        )
    assert judged == {0.4: 20, 4.0: 5}


def test_what_a_call_has_saved_is_counted_without_the_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    output = model(torch.randn(64, 8))
    # the inputs of both layers; what the ReLU has given is that of the second one
    assert saved_by_call(model, [output], []).size == 4 * (64 * 8 + 64 * 32)


@pytest.mark.parametrize(("items", "how"), [(64, "in one batch"), (4096, "by micro-batch")])
def test_a_window_is_computed_at_once_where_that_takes_little_more_memory(items, how, monkeypatch):
    """Whoever accumulates may lack the memory for the whole batch."""
    monkeypatch.setattr(recomputation, "peak_memory", lambda _: 300_000_000)
    model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gradcheck_suite.audit(quiet=True) as audit:
        for _ in range(2):
            for _ in range(4):  # each saves 2 KB for each item
                (model(torch.randn(items, 8)).square().mean() / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    (again,) = audit.result.again
    assert how in again, audit.result
