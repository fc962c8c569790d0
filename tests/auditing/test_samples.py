"""Samples of gradients: linear, blind to layout, and cheap."""

from __future__ import annotations

import statistics
import time
import tracemalloc

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch.nn import functional

import gradcheck_suite
from gradcheck_suite.auditing.samples import ELEMENTS, PROJECTIONS, mark, read, sample

SHAPES = ((), (1,), (7,), (5000,), (3, 4), (300, 96), (5000, 40), (8, 3, 3, 3), (2, 70000))


def _draw(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_sample_of_a_sum_is_the_sum_of_the_samples(shape, dtype):
    one, other = _draw(shape, dtype, 1), _draw(shape, dtype, 2)
    summed, first, second = read([sample(t, whole=True) for t in (one.double() + other.double(), one, other)])
    assert len(first) == ELEMENTS + PROJECTIONS
    np.testing.assert_allclose(summed, first + second, rtol=1e-5, atol=1e-4)
    assert np.array_equal(first[:ELEMENTS], sample(one, whole=False))


def test_a_sample_depends_on_the_values_alone():
    matrix = _draw((90, 64), torch.float64, 0)
    expected = sample(matrix, whole=True)
    assert np.array_equal(sample(matrix.t().contiguous().t(), whole=True), expected)
    images = _draw((4, 8, 5, 5), torch.float64, 1)
    assert np.array_equal(sample(images.to(memory_format=torch.channels_last), whole=True), sample(images, whole=True))
    rows = torch.arange(90).repeat(2)
    twice = torch.sparse_coo_tensor(rows[None], torch.cat([matrix, matrix]), (90, 64), check_invariants=False)
    once = matrix.to_sparse(1)
    np.testing.assert_allclose(sample(twice, whole=True), 2 * sample(once, whole=True), rtol=1e-12)
    assert not np.isfinite(sample(torch.tensor([1.0, torch.nan]), whole=False)).all()


def test_the_elements_of_a_matrix_are_not_of_one_column():
    column = torch.zeros(1024, 1024)
    column[:, 1:] = 1.0
    assert np.count_nonzero(sample(column, whole=False)) > ELEMENTS // 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_element_that_is_off_shows_in_the_projections_and_an_edit_in_the_marks(dtype):
    for seed in range(20):
        gradient = _draw((300, 96), dtype, seed)
        wrong = gradient.clone()
        wrong[seed, 3 * seed] *= 1.5
        assert not np.array_equal(sample(wrong, whole=True), sample(gradient, whole=True))
    before = mark(gradient)
    assert mark(gradient.clone()) == before
    gradient.data.mul_(2)
    assert mark(gradient) != before


# What an audit costs on a CPU: a transformer of ten million parameters, four micro-batches in a window.
#
# pytest tests/auditing/test_samples.py --full -s


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
