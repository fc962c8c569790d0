"""An audit never harms: an error of its own, a strange graph, or a long run leaves the program what
it is.
"""

from __future__ import annotations

import collections
import copy
import enum
import json
import mmap
import queue
import random
import subprocess
import sys
import time
import tracemalloc
import types
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

import gradcheck_suite
from gradcheck_suite.auditing import (
    context,
    judge,
    module_calls,
    program_state,
    recomputation,
    recorder,
    replay,
    samples,
    session,
    terms,
    weights,
)

PLANTED = [
    (samples.BatchedSampler, "_find"),
    (samples, "read_samples"),
    (recorder, "current_place"),
    (recorder, "leaves_below"),
    (recorder.Recorder, "_look_at_gradients"),
    (recorder.Recorder, "_watch"),
    (recorder.Recorder, "_points"),
    (terms.Reader, "read"),
    (terms.Reader, "measured"),
    (terms.Reader, "_scalar"),
    (terms, "kind"),
    (replay.Replay, "on_pass"),
    (replay.Replay, "on_step"),
    (judge, "decide"),
    (judge, "judge_weights"),
    (weights, "compare_terms"),
    (recomputation, "_compute"),
    (program_state.RandomState, "now"),
    (module_calls.ModuleCalls, "_record"),
]
"""Where an error is planted: every hook of the audit and what it calls."""


def _trained():
    """Train three windows and return the parameters and the state of the random numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):
            loss = F.cross_entropy(model(torch.randn(4, 5)), torch.tensor([0, 1, 2, 1]))
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize(("holder", "name"), PLANTED, ids=[name for _, name in PLANTED])
def test_an_error_of_its_own_ends_the_instrument_and_not_the_program(holder, name, monkeypatch):
    parameters, state = _trained()

    def failing(*args, **kwargs):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(holder, name, failing)
    audit = gradcheck_suite.audit(name="planted").open()
    try:
        found = _trained()
    finally:
        result = audit.close()
    assert all(map(torch.equal, parameters, found[0]))
    assert torch.equal(state, found[1])
    assert not result.violations, result
    said = [*result.findings, result.unjudged or ""]
    assert any("ZeroDivisionError" in sentence for sentence in said), result


def _trained_on_noise():
    """Train two windows, whose losses are means of means, and return the parameter and the next
    random numbers.
    """
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        for number in (2, 4):
            noise = torch.randn(number) * random.random() * np.random.rand()
            ((weight[:number] * noise).sum() / (2 * number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.tolist(), torch.randn(1).item(), random.random(), np.random.rand()


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (recorder.Recorder, "open"),
        (context, "recompute"),
        (context, "tell"),
        (session, "result_lines"),
    ],
    ids=["open", "again", "told", "closed"],
)
def test_what_the_audit_draws_is_put_back(holder, name, monkeypatch):
    # rich draws a number when it is imported, which a violation does: yolov5 and minimind then had
    # other samples
    original, calls = getattr(holder, name), []

    def drawing(*args, **kwargs):
        calls.append((torch.randn(1), random.random(), np.random.rand()))
        return original(*args, **kwargs)

    def seeded():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)

    seeded()
    without = _trained_on_noise()
    monkeypatch.setattr(holder, name, drawing)
    seeded()
    audit = gradcheck_suite.audit(every=1).open()
    if name == "result_lines":
        audit.close()
        under = _trained_on_noise()
    else:
        under = _trained_on_noise()
        assert [v.diagnosis for v in audit.close().violations] == ["mean-of-means"]
    assert calls
    assert under == without


class Lazy(torch.autograd.Function):
    """A function whose backward receives None for an output that nothing uses."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, one, other):
        return (
            None
            if one is None and other is None
            else 2 * (one if one is not None else 0) + 3 * (other if other is not None else 0)
        )


class Reused(torch.autograd.Function):
    """A function that returns the same buffer from every backward."""

    buffer = None

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if Reused.buffer is None or Reused.buffer.shape != gradient.shape:
            Reused.buffer = torch.empty_like(gradient)
        Reused.buffer.copy_(gradient * 2)
        return Reused.buffer


class Noisy(torch.nn.Module):
    """A model with a generator of its own, which an audit may not advance."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 3)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return self.linear(x + 0.1 * torch.randn(x.shape, generator=self.generator))


COUNTS, RECENT = {"calls": 0, "deep": {"calls": 0}}, collections.deque(maxlen=3)
CALLS = 0


class Warmup:
    """An object of the model's that counts, and a tensor of its own."""

    def __init__(self):
        self.calls, self.mean = 0, torch.zeros(3)

    def __call__(self, x):
        self.calls += 1
        self.mean += x.detach().mean(0)
        return x * (1 + 0.01 * self.calls) + self.mean


class Stateful(torch.nn.Module):
    """A model whose forward changes attributes, globals, a class attribute and an object below
    them.
    """

    total = 0

    def __init__(self):
        super().__init__()
        self.linear, self.warmup, self.settings = (
            torch.nn.Linear(5, 3),
            Warmup(),
            {"a": {"calls": 0}},
        )
        COUNTS.update(calls=0, deep={"calls": 0})
        RECENT.clear()

    def forward(self, x):
        global CALLS
        CALLS += 1
        Stateful.total += 1
        COUNTS["calls"] += 1
        COUNTS["deep"]["calls"] += 1
        self.settings["a"]["calls"] += 1
        RECENT.append(CALLS)
        calls = (
            COUNTS["calls"] + COUNTS["deep"]["calls"] + self.settings["a"]["calls"] + len(RECENT)
        )
        return self.warmup(self.linear(x)) * (1 + 0.01 * calls)


class Reading(torch.nn.Module):
    """A model that reads an iterator, which no one can put back."""

    def __init__(self):
        super().__init__()
        self.linear, self.noise = (
            torch.nn.Linear(5, 3),
            iter([torch.full((4, 5), 0.1 * i) for i in range(6)]),
        )

    def forward(self, x):
        return self.linear(x + next(self.noise))


class Drawing(torch.nn.Module):
    """A model that adds a number of a series, which a function gives."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = torch.nn.Linear(5, 3), draw

    def forward(self, x):
        return self.linear(x + self.draw())


def numbers():
    return [0.1 * i**2 for i in range(30)]


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("calls", "source")

    def __init__(self, source):
        self.source, self.calls = source, 0

    def __call__(self):
        self.calls += 1
        return self.calls + self.source.pop()


class Computed:
    """A property that reads what a class holds."""

    series = None

    @property
    def number(self):
        return next(SERIES)

    def __call__(self):
        return self.number


class Added(torch.autograd.Function):
    """A custom function that reads a global."""

    @staticmethod
    def forward(ctx, x):
        return x + SERIES.pop()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Kind(enum.Enum):
    """A class whose attributes cannot be set."""

    ONE = 1


class Log(list):
    """A list with an attribute."""

    def __call__(self):
        return self.source.get_nowait()


def filled(kind):
    made = kind()
    for number in numbers():
        made.put(number)
    return made


def of_slots():
    return Slotted(numbers())


def of_list():
    log = Log()
    log.source = filled(queue.SimpleQueue)
    return log


def of_decorator():
    source = iter(numbers())
    return torch.no_grad()(lambda: next(source))


def of_method():
    return iter(numbers()).__next__


def of_queue():
    return filled(queue.Queue).get_nowait  # `get` would wait for ever on an empty one


def of_library():
    return collections.UserList(numbers()).pop


def of_generator():
    state = np.random.RandomState(0)
    return lambda: state.rand()


def of_attribute():
    def draw():
        draw.calls += 1
        return draw.calls

    draw.calls = 0
    return draw


def of_module():
    module = types.ModuleType("helpers")
    module.__file__, module.take = __file__, numbers().pop
    globals()["HELPERS"] = module
    return lambda: HELPERS.take()


def of_property():
    globals()["SERIES"] = iter(numbers())
    return Computed()


def of_enum():
    both = numbers(), Kind.ONE
    return lambda: both[0].pop() * both[1].value


def of_function():
    globals()["SERIES"] = numbers()
    return lambda: Added.apply(torch.zeros(4, 5))


def of_bytes():
    held = bytearray(1)

    def draw():
        held[0] += 1
        return held[0]

    return draw


def of_expanded():
    one = torch.ones(1)
    # copying into it raises, which may not keep the other one from being put back
    wide = one.expand(5)

    def draw():
        one.add_(1)
        return wide

    return draw


def of_mapped():
    memory = mmap.mmap(-1, 80, prot=mmap.PROT_READ)  # writing to it ends the process
    with warnings.catch_warnings(action="ignore"):
        held = torch.from_numpy(np.frombuffer(memory, np.float32).reshape(4, 5))
    return lambda: held


SERIES, HELPERS = None, None
SOURCES = (of_method, of_queue, of_list, of_decorator, of_property)
SOURCES += (
    of_slots,
    of_library,
    of_generator,
    of_attribute,
    of_module,
    of_enum,
    of_function,
    of_bytes,
)
SOURCES += (of_expanded, of_mapped)


class Writing(torch.nn.Module):
    """A model whose forward writes to its parameters or to a frozen copy, as encoders with momentum
    do.
    """

    def __init__(self, write):
        super().__init__()
        self.query, self.write = torch.nn.Linear(5, 3), write
        self.key = copy.deepcopy(self.query).requires_grad_(requires_grad=False)
        self.listed, self.calls = [self.query.weight], 0

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            self.write(self)
        return self.query(x) + self.key(x)


def into_data(model):
    model.key.weight.data.mul_(0.9)


def of_data(model):
    for query, key in zip(model.query.parameters(), model.key.parameters(), strict=True):
        key.data = key.data * 0.9 + query.data * 0.1


def into_trained(model):
    # once a window: its micro-batches have the same ones
    model.query.weight.mul_(0.9 if model.calls % 2 else 1.0)


def into_listed(model):
    model.listed[0].mul_(0.9 if model.calls % 2 else 1.0)


def of_name(model):
    model.key.weight = torch.nn.Parameter(model.key.weight * 0.9, requires_grad=False)


WRITES = (into_data, of_data, into_trained, into_listed, of_name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Sequential(
            torch.nn.Linear(5, 3),
            type("L", (torch.nn.Module,), {"forward": lambda s, x: Lazy.apply(x)[0]})(),
        ),
        lambda: torch.nn.Sequential(
            torch.nn.Linear(5, 3),
            type("R", (torch.nn.Module,), {"forward": lambda s, x: Reused.apply(x)})(),
        ),
        Noisy,
        Stateful,
        Reading,
        lambda: torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)),
        *(lambda of=of: Drawing(of()) for of in SOURCES),
        *(lambda write=write: Writing(write) for write in WRITES),
    ],
    ids=["unused output", "reused buffer", "own generator", "state", "iterator", "buffers"]
    + [of.__name__ for of in (*SOURCES, *WRITES)],
)
def test_strange_models_train_as_without_an_audit(make):
    def train():
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(2):
                (
                    F.cross_entropy(model(torch.randn(4, 5)), torch.tensor([0, 1, 2, 1])) / 2
                ).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*model.parameters(), *model.buffers(), torch.get_rng_state()]

    without = train()
    with gradcheck_suite.audit(every=1) as audit:
        under = train()
    assert all(map(torch.equal, without, under))
    assert audit.result.holds, audit.result


def test_a_graph_from_before_a_step_still_goes_backward():
    """What is put back keeps its version, which autograd holds to that of the tensors that it has
    saved.
    """
    model = Drawing(lambda: 0.0)
    model.scale = torch.ones(3)
    model.linear.register_forward_hook(lambda part, given, output: output * model.scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit(every=1) as audit:
        for _ in range(2):
            loss = model(torch.randn(4, 5)).sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            loss.backward()
            optimizer.zero_grad()
    assert audit.result.again, audit.result


def test_storages_can_still_be_resized():
    # FSDP frees the parameters that it has gathered; `Tensor.numpy` keeps a storage from being
    # resized for good
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with gradcheck_suite.audit(every=1):
        for _ in range(2):
            weight.sum().backward()
            gradient = weight.grad
            optimizer.step()
            optimizer.zero_grad()
        for tensor in (weight, gradient):
            tensor.untyped_storage().resize_(0)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of Dynamo itself
def test_dynamo_does_not_compile_an_audit_below_a_compiled_function(capfd):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    @torch.compile(backend="aot_eager")
    def update(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with gradcheck_suite.audit(every=1) as audit:
        for _ in range(12):  # beyond Dynamo's limit of recompilations
            update(torch.randn(8, 4))
    # Dynamo has traced half of the first step when the audit first sees it
    assert (audit.result.verdict, audit.result.windows >= 11) == ("holds", True), audit.result
    assert "recompile_limit" not in capfd.readouterr().err


def test_a_window_that_is_computed_again_compiles_nothing_also_where_it_raises():
    torch.compiler.reset()  # other tests may have used up the limit of compilations
    compiled, steps, inner = [], [], torch.nn.Linear(4, 2)
    weight, optimizer = inner.weight, torch.optim.SGD(inner.parameters(), lr=0.1)
    model = torch.nn.Sequential(
        torch.compile(inner, backend=lambda graph, _: compiled.append(graph) or graph)
    )
    # raises in the first window
    model.register_forward_pre_hook(
        lambda *_: None if steps or inner.weight is weight else steps[0]
    )
    with gradcheck_suite.audit() as audit:
        for _ in range(3):
            for _ in range(2):
                (model(torch.randn(8, 4)).square().mean() / 2).backward()
            optimizer.step()
            steps.append(optimizer.zero_grad())
        assert len(compiled) == 1
        model(torch.randn(8, 4, requires_grad=True))  # the program compiles as before
    assert (audit.result.again, len(compiled)) == ({"in one batch": 2}, 2), audit.result


class _Frozen(collections.OrderedDict):
    """A dict that refuses to be written to, as the configuration of a diffusers model does."""

    def update(self, *_):
        raise TypeError("frozen")

    __setitem__ = pop = clear = update


class _Configured(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.config = torch.nn.Linear(3, 1), _Frozen()
        collections.OrderedDict.__setitem__(self.config, "scale", 2.0)

    def forward(self, x):
        return self.inner(x) * self.config["scale"]


def test_a_container_that_cannot_be_written_to_need_not_be_put_back():
    model = _Configured()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit(every=1) as audit:
        for _ in range(2):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert audit.result.holds
    assert sum(audit.result.again.values()) == 2, audit.result


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.full
def test_time_and_memory_of_a_long_run_are_bounded(faulty):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def seconds(steps):
        before = time.process_time()
        for i in range(steps):
            if i % 2:
                for number in (2, 4):
                    (
                        (weight[:1] * torch.ones(number)).sum() / (2 * number if faulty else 6)
                    ).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.process_time() - before

    with gradcheck_suite.audit(every=1000) as audit:
        tracemalloc.start()
        seconds(1200)  # as many windows as are judged together
        used = tracemalloc.get_traced_memory()[0]
        seconds(600)
        grown = tracemalloc.get_traced_memory()[0] - used
        tracemalloc.stop()
        first = seconds(600)
        seconds(3000)
        last = seconds(600)
    assert [(v.diagnosis, v.occurrences) for v in audit.result.violations] == [
        ("mean-of-means", 3000)
    ] * faulty
    assert audit.result.windows == 3000
    assert grown < 1 << 20, grown
    assert last < 2 * first, (first, last)


@pytest.mark.full
@pytest.mark.parametrize("closes", [False, True])
def test_a_script_may_put_a_logger_in_place_of_its_standard_error(closes, tmp_path):
    """It has `write` and `flush`, and seldom `isatty`.

    The audit prints to it where the first one is closed.
    """
    script, path = tmp_path / "train.py", tmp_path / "r.json"
    script.write_text(
        "import sys\nclass Logger:\n    def write(self, text): log.write(text)\n    def flush(self): pass\n"
        "log = open('log.txt', 'w', buffering=1)\nsys.stdout = sys.stderr = Logger()\n"
        f"if {closes}: sys.__stderr__.close()\n"
        "import torch\nw = torch.nn.Parameter(torch.ones(2))\no = torch.optim.SGD([w])\n"
        "for _ in range(2):\n    (w * 1).mean().backward()\n    o.step()\n"
    )
    command = [sys.executable, "-m", "gradcheck_suite", "audit", "--json", str(path), str(script)]
    ended = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1, (tmp_path / "log.txt").read_text()
    assert json.loads(path.read_text())["results"][0]["verdict"] == "violated"
    said = ended.stderr, (tmp_path / "log.txt").read_text()
    assert ["stale-window" in one for one in said] == [not closes, closes]
    assert "VIOLATED" in said[closes]
