"""What an audit does on a device: it waits for none before the step, and starts few kernels.

Without hardware the audit's way on a device is forced on tensors of a CPU, and its operations are
counted there.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import gradcheck_suite
from gradcheck_suite.auditing import modes, module_calls, recorder, samples, terms

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim")
"""Operations that wait for a device."""
READS = ("cpu", "numpy", "tolist", "item", "__float__", "__int__", "__bool__")
"""Methods of a tensor that do."""
VIEWS = frozenset(
    str.split(
        "_reshape_alias _unsafe_view alias as_strided detach expand permute reshape select slice"
        " split squeeze t transpose unbind unsqueeze view view_as_real"
    )
)
"""Operations without a kernel."""


class Counting(TorchDispatchMode):
    """Counts the operations that it sees."""

    def __init__(self, found):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket._qualified_op_name.partition("::")[2]
        self._found[name] += 1
        if name == "detach" and not isinstance(args[0], torch.Tensor):
            # a number of Python that a product has saved reaches a mode as that number
            return torch.tensor(args[0])
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def counts(monkeypatch):
    """Force the way on a device, and count the operations of the audit, and of nothing else."""
    found = Counter()

    class Watched(modes.Apart):
        __slots__ = ("_counting",)

        def __enter__(self):
            super().__enter__()
            self._counting = Counting(found)
            self._counting.__enter__()
            return self

        def __exit__(self, *error):
            self._counting.__exit__(*error)
            super().__exit__(*error)

    def waits(name):
        whole = getattr(torch.Tensor, name)

        def counted(self, *args, **kwargs):
            # the state of the CPU's generator lies on no device
            if torch._C._len_torch_dispatch_stack() and self.dtype != torch.uint8:
                found[f"wait: {name}"] += 1
            return whole(self, *args, **kwargs)

        return counted

    for place in (recorder, terms, module_calls):
        monkeypatch.setattr(place, "Apart", Watched)
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, waits(name))
    for place in (samples, terms):
        monkeypatch.setattr(place, "is_on_device", lambda tensor: True)
    return found


def _waits(found):
    return {k: n for k, n in found.items() if n and (k in WAITS or k.startswith("wait"))}


def _kernels(found):
    return sum(n for k, n in found.items() if k not in VIEWS and not k.startswith("wait"))


class Block(torch.nn.Module):
    """Layers whose parameters have one, two and four dimensions."""

    def __init__(self, channels):
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = torch.nn.GroupNorm(2, channels)
        self.linear = torch.nn.Linear(channels, channels)

    def forward(self, x):
        x = x + self.norm(self.conv(x))
        return self.linear(x.movedim(1, -1)).movedim(-1, 1).relu()


def _model(layout=torch.contiguous_format):
    model = torch.nn.Sequential(
        *(Block(8) for _ in range(6)), torch.nn.Flatten(), torch.nn.Linear(8 * 16, 5)
    )
    return model.to(memory_format=layout)


LOSSES = {
    "cross entropy": lambda out, y: functional.cross_entropy(out, y),
    "some ignored": lambda out, y: (
        functional.cross_entropy(out, y.where(torch.arange(len(y)) > 0, -100), reduction="sum")
        / torch.tensor(7.0)
    ),
    "masked": lambda out, y: (
        (functional.cross_entropy(out, y, reduction="none") * (torch.arange(len(y)) > 0)).sum() / 8
    ),
    "two terms": lambda out, y: functional.cross_entropy(out, y) + out.square().mean() * 0.1,
}
PASSES = 3


def _train(counts, loss, *, windows=8, model=None, options=None):
    """Return the counts of each pass, and of each step, and the result."""
    torch.manual_seed(0)
    model = model or _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    of_passes = []
    of_steps = []
    with gradcheck_suite.audit(quiet=True, **(options or {})) as audit:
        for _ in range(windows):
            for _ in range(PASSES):
                value = loss(model(torch.randn(4, 8, 4, 4)), torch.randint(0, 5, (4,))) / PASSES
                counts.clear()
                value.backward()
                of_passes.append(Counter(counts))
            counts.clear()
            optimizer.step()
            of_steps.append(Counter(counts))
            optimizer.zero_grad()
    return of_passes, of_steps, audit.result


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pass_waits_for_nothing_and_starts_few_kernels(counts, loss):
    of_passes, _, result = _train(counts, LOSSES[loss], options={"budget": "none", "every": 1000})
    assert not [_waits(found) for found in of_passes if _waits(found)]
    assert sum(found["cat"] for found in of_passes) >= len(of_passes)
    # the first window's gradients are sampled as a whole
    assert max(map(_kernels, of_passes[PASSES:])) <= 20
    assert result.windows == 8
    assert not result.violations


def test_the_kernels_of_a_pass_do_not_grow_with_the_parameters(counts):
    found = {}
    for layers in (2, 40):
        model = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(128, 16),
            *(torch.nn.Linear(16, 16) for _ in range(layers)),
            torch.nn.Linear(16, 5),
        )
        of_passes, _, _ = _train(counts, LOSSES["cross entropy"], model=model)
        found[layers] = max(map(_kernels, of_passes[3 * PASSES :]))
    assert found[2] == found[40] <= 20


def test_channels_last_takes_no_kernel_for_each_parameter(counts):
    of_passes, _, result = _train(
        counts, LOSSES["cross entropy"], model=_model(torch.channels_last)
    )
    assert max(map(_kernels, of_passes[3 * PASSES :])) <= 20
    assert not result.violations


@pytest.mark.share(4)
def test_hooks_of_the_program_are_judged_without_a_wait(counts):
    model = _model()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    of_passes, _, result = _train(counts, LOSSES["cross entropy"], model=model)
    assert not [_waits(found) for found in of_passes if _waits(found)]
    assert "hook-factor" in {found.name for found in result.named_findings}, result


def test_a_step_waits_once_for_what_the_passes_have_left(counts):
    _, of_steps, _ = _train(
        counts, LOSSES["masked"], options={"without": ("batch",), "budget": "none"}
    )
    for found in of_steps[2:]:
        # one for the numbers of the losses, one for the samples, with the copy to numpy of each
        assert _waits(found) == {"wait: cpu": 2, "wait: numpy": 2}


FAULTS = {
    "sound": ("value / PASSES", None),
    "undivided": ("value", "wrong-scale"),
    "reset within": ("value / PASSES", "reset-inside-window"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_on_a_device_as_on_a_cpu(fault, counts, monkeypatch):
    weight, name = FAULTS[fault]
    verdicts = []
    for is_device in (True, False):
        for place in (samples, terms):
            monkeypatch.setattr(place, "is_on_device", lambda tensor, on=is_device: on)
        torch.manual_seed(0)
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with gradcheck_suite.audit(quiet=True) as audit:
            for _ in range(6):
                for number in range(PASSES):
                    value = functional.cross_entropy(
                        model(torch.randn(4, 8, 4, 4)), torch.randint(0, 5, (4,))
                    )
                    eval(weight, {"value": value, "PASSES": PASSES}).backward()
                    if fault == "reset within" and number < PASSES - 1:
                        optimizer.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
        verdicts.append({v.diagnosis for v in audit.result.violations})
    assert verdicts == [{name} - {None}] * 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_waited_for_at_the_step_alone():
    torch.manual_seed(0)
    model = _model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradcheck_suite.audit(quiet=True) as audit:
        for _ in range(8):
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(PASSES):
                    x = torch.randn(4, 8, 4, 4, device="cuda")
                    y = torch.randint(0, 5, (4,), device="cuda")
                    (functional.cross_entropy(model(x), y) / PASSES).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            optimizer.step()
            optimizer.zero_grad()
    assert audit.result.holds, audit.result
