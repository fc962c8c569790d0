"""Samples of gradients: linear, blind to layout, and cheap."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

import gradcheck_suite
from gradcheck_suite.auditing.samples import BatchedSampler, read_samples, sample
from gradcheck_suite.auditing.vectors import ELEMENTS, PROJECTIONS

SHAPES = ((), (1,), (7,), (5000,), (3, 4), (300, 96), (5000, 40), (8, 3, 3, 3), (2, 70000))


def _draw(shape, dtype, seed):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_sample_of_a_sum_is_the_sum_of_the_samples(shape, dtype):
    one, other = _draw(shape, dtype, 1), _draw(shape, dtype, 2)
    summed, first, second = read_samples(
        [sample(t, whole=True) for t in (one.double() + other.double(), one, other)]
    )
    assert len(first) == ELEMENTS + PROJECTIONS
    np.testing.assert_allclose(summed, first + second, rtol=1e-5, atol=1e-4)
    assert np.array_equal(first[:ELEMENTS], sample(one, whole=False))
    # of 64 bits, odd multiples of the signs alone add up to 0
    assert (
        BatchedSampler().marks([one])
        == BatchedSampler().marks([one.clone()])
        != BatchedSampler().marks([-one])
    )


def test_a_sample_depends_on_the_values_alone():
    matrix = _draw((90, 64), torch.float64, 0)
    expected = sample(matrix, whole=True)
    assert np.array_equal(sample(matrix.t().contiguous().t(), whole=True), expected)
    images = _draw((4, 8, 5, 5), torch.float64, 1)
    assert np.array_equal(
        sample(images.to(memory_format=torch.channels_last), whole=True), sample(images, whole=True)
    )
    rows = torch.arange(90).repeat(2)
    twice = torch.sparse_coo_tensor(
        rows[None], torch.cat([matrix, matrix]), (90, 64), check_invariants=False
    )
    once = matrix.to_sparse(1)
    np.testing.assert_allclose(sample(twice, whole=True), 2 * sample(once, whole=True), rtol=1e-12)
    assert not np.isfinite(sample(torch.tensor([1.0, torch.nan]), whole=False)).all()


SEEN = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""The size of an edit of one sampled element, relative to the largest, that is found between two passes."""


def _edited(edit, dtype, *, size=5, every=1000, between=True):
    """Audit two windows of three micro-batches, with an edit of the weight's gradient in the second
    one.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(size, size, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradcheck_suite.audit(without=("batch",), every=every) as audit:
        for window in range(2):
            for part in range(3):
                loss = functional.mse_loss(
                    model(torch.randn(4, size, dtype=dtype)), torch.randn(4, size, dtype=dtype)
                )
                (loss / 3).backward()
                if window and part == (1 if between else 2):
                    edit(model.weight.grad.view(-1))
            optimizer.step()
            optimizer.zero_grad()
    told = any("`.grad` is edited" in finding for finding in audit.result.findings)
    return [v.diagnosis for v in audit.result.violations], told


def _adds(share, place=0):
    def edit(gradient):
        gradient[place] += share * gradient.abs().max()

    return edit


@pytest.mark.parametrize("dtype", SEEN)
@pytest.mark.parametrize("every", [1000, 1])
@pytest.mark.parametrize("share", [1.0, 0.02, 0.0])
def test_an_edit_between_two_passes_is_found_down_to_the_rounding_of_the_element(
    dtype, every, share
):
    """The same holds in a window that is looked at in full.

    A smaller edit is not taken for a factor of the weights.
    """
    found, _ = _edited(_adds(share * SEEN[dtype]), dtype, size=300, every=every)
    assert found == ["not-linear"] * (share == 1)


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.3)]
)
@pytest.mark.parametrize("every", [1000, 1])
def test_an_edit_of_an_element_after_the_last_pass_is_no_gradient_made_by_hand(dtype, share, every):
    assert _edited(_adds(share), dtype, every=every, between=False) == ([], True)
    assert _edited(_adds(0.0), dtype, every=every, between=False) == ([], False)


@pytest.mark.parametrize(
    ("place", "share"), [(0, 1e-12), (1, 1e-9)], ids=["sampled", "seen by projections alone"]
)
def test_an_edit_of_an_element_of_many_is_seen_in_a_window_that_is_looked_at_in_full(place, share):
    assert _edited(_adds(share, place), torch.float64, size=1000, every=1, between=False) == (
        [],
        True,
    )
    assert _edited(
        _adds(share * 1e-3, place), torch.float64, size=1000, every=1, between=False
    ) == ([], False)


EDITS = {
    "decay": lambda p, share: p.grad.add_(p.detach(), alpha=share),
    "noise": lambda p, share: p.grad.add_(torch.randn_like(p), alpha=share),
    "factor": lambda p, share: p.grad.mul_(1 - share) if p.dim() == 1 else None,
}
FOUND = {
    torch.float32: {
        "decay": (1e-4, 1e-3, 1e-2),
        "noise": (1e-4, 1e-3, 1e-2),
        "factor": (1e-3, 1e-2),
    },
    torch.bfloat16: {"decay": (0.1, 0.3), "noise": (0.01, 0.1), "factor": (0.5,)},
}
"""The sizes of edits of whole gradients that are seen beside rounding."""


@pytest.mark.parametrize("passes", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 8))])
@pytest.mark.parametrize(
    ("dtype", "edit", "share"),
    [
        (dtype, edit, share)
        for dtype, edits in FOUND.items()
        for edit, shares in edits.items()
        for share in shares
    ],
)
def test_an_edit_of_whole_gradients_after_the_last_pass_is_a_finding(dtype, edit, share, passes):
    result = _by_hand(dtype, passes, lambda p: EDITS[edit](p, share))
    assert not result.violations, result
    assert any("`.grad` is edited" in finding for finding in result.findings), result


@pytest.mark.parametrize("passes", [8, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("share", [1e-2, 4e-2])
def test_an_edit_near_the_rounding_of_bfloat16_is_not_taken_for_weights(share, passes):
    for seed in range(4):
        assert not _by_hand(
            torch.bfloat16, passes, lambda p: EDITS["decay"](p, share), seed
        ).violations


def _by_hand(dtype, passes, edit, seed=0, *, sizes=(4,), shape=(8, 3), spread=1.0, sums=None):
    """Audit four windows.

    Args:
        dtype: of the model.
        passes: of a window.
        edit: is given each parameter before the step.
        seed: of the model and of the items.
        sizes: of the micro-batches.
        shape: of the layer.
        spread: of the items; what is left to 1 is the same in all micro-batches.
        sums: the micro-batches whose gradients the loop adds up by hand; None where `.grad` does.
    """
    torch.manual_seed(seed)
    model = torch.nn.Linear(*shape).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit() as audit:
        for _ in range(4):
            totals = {p: torch.zeros_like(p) for p in model.parameters()}
            same, targets = (
                torch.randn(max(sizes), shape[0], dtype=dtype),
                torch.randint(0, shape[1], (max(sizes),)),
            )
            for number in range(passes):
                items = sizes[number % len(sizes)]
                x = (1 - spread) * same[:items] + spread * torch.randn(items, shape[0], dtype=dtype)
                y = targets[:items] if spread < 1 else torch.randint(0, shape[1], (items,))
                loss = functional.cross_entropy(model(x).float(), y)
                (loss if sums else loss / passes).backward()
                if sums:
                    for p, total in totals.items() if number in sums else ():
                        total += p.grad / passes
                    optimizer.zero_grad()
            for p, total in totals.items():
                if sums:
                    p.grad = total
                edit(p)
            optimizer.step()
            optimizer.zero_grad()
    return audit.result


@pytest.mark.parametrize("dtype", FOUND)
def test_weights_of_a_sum_made_by_hand_are_judged_within_the_rounding_of_its_dtype(dtype):
    def found(sizes, passes):
        result = _by_hand(dtype, passes, lambda p: None, sizes=sizes, sums=range(passes))
        return [v.diagnosis for v in result.violations], result.verdict

    assert found((4,), 4) == ([], "holds")
    assert found((2, 7, 3, 4), 4) == (["mean-of-means"], "violated")


@pytest.mark.share(6)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("shape", "passes", "spread", "verdict"),
    [
        pytest.param((8, 3), 32, 1.0, "unjudged", id="more passes than elements"),
        pytest.param((1, 2), 8, 1.0, "unjudged", id="few elements"),
        pytest.param((300, 200), 8, 0.2, "holds", id="large layer"),
    ],
)
def test_a_sum_made_by_hand_is_told_from_a_reset(dtype, shape, passes, spread, verdict):
    """In the large layer, of 200 classes, few elements are of a class that a micro-batch has: these
    are far larger.
    """

    def found(sums, seed=0):
        return _by_hand(dtype, passes, lambda p: None, seed, shape=shape, spread=spread, sums=sums)

    for seed in range(4):
        result = found(range(passes), seed)
        assert not result.violations, result
        assert result.verdict == verdict, result
    assert [v.diagnosis for v in found([passes - 1]).violations] == ["reset-inside-window"]
    if verdict == "holds":
        # a combination of kept gradients is the program's own; that it leaves out the same pass of
        # one line in each window is a fault where the dtype's rounding lets the factors be read
        partial = found(range(1, passes))
        if dtype == torch.float32:
            assert [v.diagnosis for v in partial.violations] == ["dropped-micro-batch"]
            return
        assert (partial.verdict, not partial.violations) == ("holds", True)
        assert any("writes a combination into it" in finding for finding in partial.findings), (
            partial.findings
        )


@pytest.mark.share(4)
@pytest.mark.parametrize(("spread", "verdict"), [(1.0, "holds"), (0.01, "unjudged")])
def test_weights_of_gradients_that_are_alike_within_their_rounding_are_not_judged(spread, verdict):
    for passes in (2, 4, 8):
        result = _by_hand(torch.bfloat16, passes, lambda p: None, spread=spread, sums=range(passes))
        assert result.verdict == verdict, result
        reset = _by_hand(torch.bfloat16, passes, lambda p: None, spread=spread, sums=[passes - 1])
        assert [v.diagnosis for v in reset.violations] == ["reset-inside-window"]


def test_a_reset_that_is_edited_within_rounding_has_no_weights():
    for seed in range(3):
        edit = partial(EDITS["decay"], share=0.01)
        edited = _by_hand(torch.bfloat16, 4, edit, seed, shape=(300, 200), sums=[3])
        assert [v.diagnosis for v in edited.violations] == ["reset-inside-window"], edited


def test_a_sum_of_gradients_of_one_element_is_no_reset():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def found(is_kept):
        with gradcheck_suite.audit() as audit:
            for _ in range(3):
                total = torch.zeros(1)
                for _ in range(4):
                    optimizer.zero_grad()
                    (weight * torch.rand(5)).square().mean().backward()
                    total += weight.grad / 4
                weight.grad = weight.grad if is_kept else total
                optimizer.step()
        return audit.result.verdict

    assert (found(False), found(True)) == ("unjudged", "violated")
