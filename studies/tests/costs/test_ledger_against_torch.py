"""The ledger against torch's own instruments: the profiler's record of every allocation, and the
memory tracker.

Where all count the same thing they agree to the byte. Where they do not, a test says why.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

from studies.ledger import Ledger
from studies.memory import window_memory
from studies.properties.benchmarks import bench_memory_modes
from studies.properties.benchmarks.bench_memory_modes import assert_peaks_differ_as_counted
from studies.reset_modes import BENCHMARKED, RESET_MODES
from studies.workload import Size, sized_workload

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


def _parts(optimizer):
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.rand(3, 2), torch.rand(3), torch.rand(5, 3)])
    batches = [(torch.rand(n, 2), torch.rand(n, 5)) for n in (4, 7)]
    return model, OPTIMIZERS[optimizer](model.parameters()), batches


def _train(model, optimizer, batches, *, set_to_none):
    for _ in range(3):
        for x, weight in batches:
            out = torch.nn.functional.linear(x, model[0], model[1]).tanh() @ model[2].t()
            (out * weight).sum().backward()
            del out
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def _allocations(run):
    """Return what the profiler saw: (bytes, names of the operations around it), negative where
    memory was freed.
    """
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        run()
    found = []

    def walk(nodes, names):
        for node in nodes:
            if hasattr(node.extra_fields, "alloc_size"):
                found.append((node.start_time_ns, node.extra_fields.alloc_size, names))
            walk(node.children, (*names, node.name))

    walk(profiler.profiler.kineto_results.experimental_event_tree(), ())
    return [(size, names) for _, size, names in sorted(found, key=lambda each: each[0])]


def _peak(sizes):
    alive = most = 0
    for size in sizes:
        alive += size
        most = max(most, alive)
    return most


@pytest.mark.parametrize("set_to_none", [True, False])
def test_allocations_frees_and_peak_are_the_profilers_to_the_byte(set_to_none):
    model, optimizer, batches = _parts("sgd")
    sizes = [
        size
        for size, _ in _allocations(
            lambda: _train(model, optimizer, batches, set_to_none=set_to_none)
        )
    ]
    model, optimizer, batches = _parts("sgd")
    with Ledger(model, optimizer) as ledger:
        before = sum(ledger.live.values())
        _train(model, optimizer, batches, set_to_none=set_to_none)
    assert ledger.total().allocated == sum(size for size in sizes if size > 0)
    assert ledger.total().freed == -sum(size for size in sizes if size < 0)
    assert ledger.peak().bytes - before == _peak(sizes)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_peak_is_the_memory_trackers_to_the_byte(optimizer, set_to_none):
    model, stepping, batches = _parts(optimizer)
    tracker = MemTracker()
    tracker.track_external(model, stepping)
    with tracker:
        _train(model, stepping, batches, set_to_none=set_to_none)
    at_peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    alive = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    model, stepping, batches = _parts(optimizer)
    with Ledger(model, stepping) as ledger:
        _train(model, stepping, batches, set_to_none=set_to_none)
    assert ledger.peak().bytes == at_peak["Total"]
    assert sum(ledger.live.values()) == alive["Total"]
    sizes = {kind.value: size for kind, size in at_peak.items() if kind != "Total"}
    assert ledger.peak().by_category["parameters"] == sizes["Parameter"]
    assert ledger.peak().by_category["optimizer state"] == sizes["Optstate"]


# --- where they differ


def _both(make, train):
    """Return the profiler's allocations and a ledger over the same training, each on parameters of
    its own.
    """
    parameters = make()
    seen = _allocations(lambda: train(*parameters))
    parameters = make()
    with Ledger(torch.nn.ParameterList(parameters)) as ledger:
        train(*parameters)
    return [(size, names) for size, names in seen if size > 0], ledger


def test_python_numbers_become_tensors_inside_an_operation():
    """On the CPU `p * 3.0` allocates 8 bytes for the number and 4 for its conversion.

    No dispatch mode sees them.
    """
    seen, ledger = _both(lambda: [torch.nn.Parameter(torch.ones(5))], lambda p: p.detach() * 3.0)
    assert sorted(size for size, _ in seen) == [4, 8, 20]
    assert ledger.total().allocated == 20


def test_a_product_copies_operands_without_the_right_strides():
    """`mm` copies an expanded operand for itself and frees the copy: 36 bytes more at its peak than
    the ledger's.
    """
    expanded = torch.ones(1).expand(3, 3)
    seen, ledger = _both(
        lambda: [torch.nn.Parameter(torch.ones(3, 3))], lambda p: p.detach() @ expanded
    )
    assert sorted(size for size, _ in seen) == [36, 36]
    assert any("aten::clone" in names for _, names in seen)
    assert ledger.total().allocated == 36


def test_under_a_dispatch_mode_autograd_sums_out_of_place():
    """A finding about torch: to watch autograd with a dispatch mode changes what it does, in
    memory, not in value.

    The contributions to a tensor that is used twice are summed in place, unless a dispatch mode is
    on.
    """

    def train(p):
        (p.sin() * p.cos()).sum().backward()

    seen, ledger = _both(lambda: [torch.nn.Parameter(torch.ones(5))], train)
    assert ledger.operations("backward")["add"] == 1
    assert ledger.total().allocated - sum(size for size, _ in seen) == 20
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        train(torch.nn.Parameter(torch.ones(5)))
    names = [event.name for event in profiler.events()]
    assert names.count("aten::add_") == 1
    assert "aten::add" not in names


@pytest.mark.parametrize(("micro_batches", "additions"), [(1, 0), (4, 3)])
def test_the_additions_to_a_gradient_are_the_same_without_the_ledger(micro_batches, additions):
    """The profiler, which changes nothing, sees as many additions, and no copy: the first gradient
    is taken.
    """

    def train(p):
        for _ in range(micro_batches):
            p.sin().sum().backward()

    seen, ledger = _both(lambda: [torch.nn.Parameter(torch.ones(5))], train)
    assert ledger.operations("accumulate") == ({"add_": additions} if additions else {})
    assert ledger.total().allocated == sum(size for size, _ in seen)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        train(torch.nn.Parameter(torch.ones(5)))
    names = [event.name for event in profiler.events()]
    assert names.count("aten::add_") == additions
    assert not {"aten::clone", "aten::copy_"} & set(names)


# --- what the benchmark of memory asserts of CUDA's allocator, on the CPU's


@cache
def _row(mode, micro_batches):
    """Return what `studies.memory` prints of a mode, with the CPU's allocator in the place of
    CUDA's.
    """
    size = Size(20_000, "few")
    work = sized_workload(RESET_MODES[mode], size, micro_batches)
    peak, window = window_memory(work)
    kept = window["gradients"][-1]
    most = kept + 4 * size.total + _peak([each for each, _ in _allocations(work.window)])
    about = {
        "parameters": size.total,
        "tensors": size.tensors,
        "dtype": "float32",
        "micro_batches": micro_batches,
    }
    allocator = {"requested_peak": most, "allocated_peak": most}
    return {**about, "peak": peak, "gradients_between": kept, "allocator": allocator}


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_peaks_differ_between_modes_as_counted(micro_batches):
    released = _row("set_to_none", micro_batches)
    for mode in BENCHMARKED:
        assert_peaks_differ_as_counted(_row(mode.name, micro_batches), released, mode.name)


def test_a_peak_that_is_four_bytes_off_is_told():
    row = _row("zero_", 1)
    allocator = {**row["allocator"], "requested_peak": row["allocator"]["requested_peak"] + 4}
    with pytest.raises(AssertionError, match="requested="):
        assert_peaks_differ_as_counted(
            {**row, "allocator": allocator}, _row("set_to_none", 1), "zero_"
        )


def test_the_copy_in_a_matrix_product_is_told(monkeypatch):
    """Planted fault: nobody adds the copy of the sum's gradient, which the ledger does not see."""
    monkeypatch.setattr(bench_memory_modes, "BATCH", 0)
    with pytest.raises(AssertionError, match="requested="):
        assert_peaks_differ_as_counted(_row("zero_", 1), _row("set_to_none", 1), "zero_")
