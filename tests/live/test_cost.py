"""What an audit costs on a CPU: a transformer of ten million parameters, four micro-batches in a window.

pytest tests/live/test_cost.py --full -s
"""

from __future__ import annotations

import statistics
import time
import tracemalloc

import pytest
import torch
from scipy.stats import binomtest
from torch.nn import functional

import gradcheck_suite

ALLOWED_SHARE, ALLOWED_BYTES, ALLOWED_AGAIN, ROUNDS = 0.05, 2**20, 1.5, 12
VOCABULARY, SIZE, LAYERS, LENGTH, ROWS = 4096, 320, 7, 128, 4


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, SIZE)
        layer = torch.nn.TransformerEncoderLayer(SIZE, 5, 4 * SIZE, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(SIZE, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))


def is_above(allowed, ratios):
    """Return whether the median of `ratios` is above `allowed`: a sign test with 0.5% of false alarms.

    A single pair of steps varies by a tenth here, so the median of a dozen may be above by chance.
    """
    return binomtest(sum(r > allowed for r in ratios), len(ratios), alternative="greater").pvalue < 0.005


@pytest.mark.parametrize(("above", "below", "expected"), [(12, 0, True), (11, 1, True), (10, 2, False), (6, 6, False)])
def test_only_what_is_not_chance_is_above(above, below, expected):
    assert is_above(1.05, [1.051] * above + [1.049] * below) == expected


@pytest.fixture
def one_thread():
    """Compute in one thread, since threads that wait for others take processor time on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_weights_and_sums_cost_a_twentieth_of_a_step_and_a_mebibyte():
    torch.manual_seed(0)
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1))

    def step():
        for _ in range(4):
            loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            (loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed():
        start = time.process_time()
        step()
        return time.process_time() - start

    step()
    under, without, again = [], [], []
    for _ in range(ROUNDS):
        with gradcheck_suite.audit() as audit:
            step()  # the first window of an optimizer is looked at twice
            under.append(timed())
        assert (audit.result.verdict, audit.result.windows) == ("holds", 2)
        without.append(timed())  # between the two, since the machine's speed changes within a minute
        with gradcheck_suite.audit(every=1) as audit:
            again.append(timed())
        assert audit.result.again == {"in one batch": 1}
    tracemalloc.start()
    with gradcheck_suite.audit() as audit:
        step()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        step()
        peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    ratios = [a / b for a, b in zip(under, without, strict=True)]
    again_ratios = [a / b for a, b in zip(again, without, strict=True)]
    share = statistics.median(ratios) - 1
    count = sum(p.numel() for p in model.parameters())
    print(f"\na window computed again costs {statistics.median(again_ratios) - 1:.2f} steps", end="")
    print(f"\n{count / 1e6:.1f}M parameters: step {statistics.median(without):.2f} s, audit {share:.1%}, {peak} bytes")
    print("pairs ", *(f"{r - 1:.1%}" for r in sorted(ratios)))
    assert not is_above(1 + ALLOWED_SHARE, ratios), sorted(ratios)
    assert not is_above(1 + ALLOWED_AGAIN, again_ratios), sorted(again_ratios)
    assert peak < ALLOWED_BYTES
