"""What an audit costs on a CPU: a transformer of ten million parameters, four micro-batches in a window.

pytest tests/live/test_cost.py --full -s
"""

from __future__ import annotations

import statistics
import time
import tracemalloc

import pytest
import torch
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


@pytest.mark.full
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
        without.append(timed())
    for plain in without[: ROUNDS // 3]:
        with gradcheck_suite.audit(every=1) as audit:
            again.append(timed() / plain - 1)
        assert audit.result.again == {"in one batch": 1}
    tracemalloc.start()
    with gradcheck_suite.audit() as audit:
        step()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        step()
        peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    share = statistics.median(a / b for a, b in zip(under, without, strict=True)) - 1
    count = sum(p.numel() for p in model.parameters())
    print(f"\na window computed again costs {statistics.median(again):.2f} steps", end="")
    print(f"\n{count / 1e6:.1f}M parameters: step {statistics.median(without):.2f} s, audit {share:.1%}, {peak} bytes")
    assert share < ALLOWED_SHARE
    assert statistics.median(again) < ALLOWED_AGAIN
    assert peak < ALLOWED_BYTES
