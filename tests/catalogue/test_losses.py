"""Every loss alone: torch against JAX, against finite differences, and against what its count
promises.

Generic over the catalogue: a new loss is tested by being registered. The planted faults at the end
show that the comparisons can fail; what torch does that its users may not expect is in
`studies/tests/test_losses_in_torch.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradcheck_suite.catalogue.definitions import LossDefinition, Options, Signal, vector
from gradcheck_suite.catalogue.losses import IGNORE_INDEX
from gradcheck_suite.catalogue.tables import LOSSES
from gradcheck_suite.core.case import REDUCTIONS, Loss
from gradcheck_suite.reference.jax_gradients import objective, parts_as_items
from gradcheck_suite.reference.programs import CompiledPrograms

RELATIVE = 1e-12
SIGNALS = (
    vector(1),
    vector(4),
    Signal("sequence", (3, 4)),
    Signal("sequence", (3, 4), padded=True),
    Signal("image", (4, 2, 3)),
)
SPLIT = (1, 5, 2)
"""Items of the micro-batches that a large batch is cut into."""
ITEMS = sum(SPLIT)
MANY = 64


@dataclass(frozen=True)
class Example:
    """A loss with its options on one signal, and its data."""

    kind: LossDefinition
    signal: Signal
    options: tuple[tuple[str, object], ...]

    @property
    def o(self) -> Options:
        """The options by name."""
        return dict(self.options)

    def ignored(self, items: int, masked: slice = slice(0, 0)) -> np.ndarray:
        """Return which targets are ignored: the padding, and the items of `masked`."""
        every = np.zeros(items, dtype=bool)
        every[masked] = True
        if self.signal.form != "sequence":
            return every
        length = self.signal.size[0]
        lengths = 1 + np.arange(items) % length if self.signal.padded else np.full(items, length)
        return every[:, None] | (np.arange(length) >= lengths[:, None])

    def arrays(self, items: int = ITEMS, *, masked: slice = slice(0, 0)) -> dict[str, np.ndarray]:
        """Draw the loss's data, with all targets of some items ignored."""
        rng = np.random.default_rng(7)
        return self.kind.targets(self.signal, self.o, rng, self.ignored(items, masked))

    def batch(self, items: int = ITEMS, *, masked: slice = slice(0, 0)) -> dict[str, torch.Tensor]:
        """Return `arrays` as tensors."""
        return {
            name: torch.from_numpy(array)
            for name, array in self.arrays(items, masked=masked).items()
        }

    def out(self, *, zeros: bool = False) -> np.ndarray:
        """Draw an output of the model.

        A dead ReLU makes whole items or single features of it zero.
        """
        out = 1.5 * np.random.default_rng(11).standard_normal((ITEMS, *self.signal.size))
        if zeros:
            out[1] = 0.0
            out[2, 0] = 0.0
        return out

    def torch(self, out, batch, reduction: str) -> tuple[float, np.ndarray]:
        """Return torch's loss and its gradient with respect to the output."""
        leaf = torch.as_tensor(out).requires_grad_()
        loss = self.kind.torch_loss(self.o, leaf, batch, reduction)
        return loss.item(), torch.autograd.grad(loss, leaf)[0].numpy()

    def count(self, batch) -> float:
        """Return the divisor of torch's mean over a batch."""
        return float(self.kind.count(self.o, batch))

    @cached_property
    def name(self) -> str:
        """The example's name in pytest's output."""
        options = ",".join(f"{name}={value}" for name, value in self.options)
        size = "x".join(map(str, self.signal.size))
        return (
            f"{self.kind.name}({options})-{self.signal.form}-{size}{'-padded' * self.signal.padded}"
        )


def examples() -> Iterator[Example]:
    for kind in LOSSES.values():
        for signal in SIGNALS:
            for options in kind.variants(signal):
                yield Example(kind, signal, tuple(options.items()))


EXAMPLES = list(examples())


def each_example(check: Callable[[Example], None]) -> Callable[[str], None]:
    """Make a test of each kind of loss that checks all its examples.

    A failure names the example.
    """

    @pytest.mark.parametrize("kind", LOSSES)
    @functools.wraps(check)
    def test(kind):
        for example in EXAMPLES:
            if example.kind.name == kind:
                _checked(check, example)

    del test.__wrapped__  # pytest would look there for the names of the arguments
    return test


def _checked(check: Callable[[Example], None], example: Example) -> None:
    try:
        check(example)
    except AssertionError as error:
        error.add_note(f"with {example.name}")
        raise


def jax_losses(
    examples: Sequence[Example], *outs: Sequence[np.ndarray]
) -> list[list[dict[str, tuple[float, np.ndarray]]]]:
    """Return JAX's loss and gradient of each example at each of its outputs, by reduction: one
    program computes all.

    The last item has no weight, and another's data.
    """
    data = [
        {n: np.concatenate([a[:-1], a[:1]]) for n, a in example.arrays().items()}
        for example in examples
    ]
    weight = (np.arange(ITEMS) < ITEMS - 1).astype(np.float64)

    def objective_of(out, arrays, reduction, example):
        if LOSSES.get(example.kind.name) is example.kind:
            return objective(
                Loss(example.kind.name, **example.o, reduction=reduction), out, arrays, weight
            )
        total = jnp.sum(weight * example.kind.jax_items(example.o, out, arrays))
        return (
            total / jnp.sum(weight * example.kind.jax_counts(example.o, arrays))
            if reduction == "mean"
            else total
        )

    def all_reductions(outs, data):
        return tuple(
            {
                name: jax.value_and_grad(objective_of)(out, arrays, name, example)
                for name in REDUCTIONS
            }
            for out, arrays, example in zip(outs, data, examples, strict=True)
        )

    programs = CompiledPrograms()
    found = [
        programs.call("test of losses", all_reductions, tuple(each), tuple(data), store=False)
        for each in outs
    ]
    assert not any(g[-1].any() for each in found for f in each for _, g in f.values()), (
        "an item of no weight counts"
    )
    return [
        [{n: (float(value), g[:-1]) for n, (value, g) in f.items()} for f in each] for each in found
    ]


def assert_close(received, expected, what: str, relative: float = RELATIVE) -> None:
    """Assert that two arrays differ by at most `relative` times the largest entry."""
    __tracebackhide__ = True
    received, expected = np.asarray(received), np.asarray(expected)
    assert received.shape == expected.shape
    assert np.isfinite(received).all(), f"{what}: not finite: {received}"
    error, scale = np.abs(received - expected).max(), np.abs(expected).max()
    assert error <= relative * scale, (
        f"{what}: off by {error:.3g}, {error / scale:.3g} of the largest, {scale:.3g}"
    )


def assert_frameworks_agree(examples: Sequence[Example]) -> None:
    __tracebackhide__ = True
    outs = [[example.out(zeros=zeros) for example in examples] for zeros in (False, True)]
    for each, found in zip(outs, jax_losses(examples, *outs), strict=True):
        for example, out, by_jax in zip(examples, each, found, strict=True):
            _checked(partial(_assert_agrees, out=out, found=by_jax), example)


def _assert_agrees(
    example: Example, *, out: np.ndarray, found: dict[str, tuple[float, np.ndarray]]
) -> None:
    __tracebackhide__ = True
    batch = {name: tensor[:-1] for name, tensor in example.batch().items()}
    for reduction, (value_by_jax, gradient_by_jax) in found.items():
        value, gradient = example.torch(out[:-1], batch, reduction)
        assert_close(value, value_by_jax, f"{reduction}, value, torch against JAX")
        assert_close(gradient, gradient_by_jax, f"{reduction}, gradient, torch against JAX")


def assert_splits(example: Example, reduction: str) -> None:
    """Assert N * L(X) = sum of n_i * L(X_i) for a mean, L(X) = sum of L(X_i) for a sum, and the
    same for gradients.
    """
    __tracebackhide__ = True
    out, batch = torch.from_numpy(example.out()), example.batch()
    value, gradient = example.torch(out, batch, reduction)
    share = example.count(batch) if reduction == "mean" else 1.0
    values, gradients, start = [], [], 0
    for items in SPLIT:
        part = {name: tensor[start : start + items] for name, tensor in batch.items()}
        part_value, part_gradient = example.torch(out[start : start + items], part, reduction)
        part_share = example.count(part) if reduction == "mean" else 1.0
        values.append(part_share * part_value)
        gradients.append(part_share * part_gradient)
        start += items
    assert_close(sum(values), share * value, f"{reduction}, value, parts against the whole")
    assert_close(
        np.concatenate(gradients),
        share * gradient,
        f"{reduction}, gradient, parts against the whole",
    )


@pytest.mark.parametrize("signal", SIGNALS, ids=str)
def test_every_signal_has_a_loss_and_few_variants_of_each(signal):
    numbers = {name: len(kind.variants(signal)) for name, kind in LOSSES.items()}
    assert sum(map(bool, numbers.values())) >= 8
    assert max(numbers.values()) <= 8


@pytest.mark.parametrize("kind", LOSSES.values(), ids=lambda kind: kind.name)
def test_a_loss_takes_no_tokens(kind):
    assert not kind.variants(Signal("tokens", (3,), vocabulary=5))


@pytest.mark.parametrize(
    "kind", ["l1", "mse_and_l1", "smooth_l1", "huber", "multi_margin", "margin_ranking"]
)
def test_frameworks_have_the_same_slope_at_kinks(kind):
    """Numbers with few digits meet kinks: a margin of 1 is reached by bfloat16 weights that are
    drawn.
    """
    examples = [e for e in EXAMPLES if e.kind.name == kind and e.signal == vector(4)]
    assert examples
    for example in examples:
        arrays = {
            n: np.round(2 * a) / 2 if a.dtype.kind == "f" else a
            for n, a in example.arrays().items()
        }
        out = np.round(2 * example.out()) / 2
        _, torchs = example.torch(
            out, {name: torch.from_numpy(a) for name, a in arrays.items()}, "sum"
        )
        with jax.disable_jit():
            own = jax.grad(lambda x, e=example, a=arrays: jnp.sum(e.kind.jax_items(e.o, x, a)))(
                jnp.asarray(out)
            )
        assert np.abs(torchs - np.asarray(own)).max() < 1e-12


def _is_compiled_by_default(example: Example) -> bool:
    """Vectors of one feature and sequences without padding run the same code as other signals."""
    return example.signal not in (
        vector(1),
        Signal("sequence", (3, 4)),
    ) or not example.kind.variants(vector(4))


# the others with --full
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.full] * (i % 2)) for i, kind in enumerate(LOSSES)],
)
@pytest.mark.parametrize("default", [True, pytest.param(False, marks=pytest.mark.full)])
def test_torch_and_jax_agree(kind, default):
    examples = [
        e for e in EXAMPLES if e.kind.name == kind and _is_compiled_by_default(e) is default
    ]
    if examples:
        assert_frameworks_agree(examples)


@each_example
def test_parts_add_up_to_the_whole(example):
    for reduction in REDUCTIONS:
        assert_splits(example, reduction)


@each_example
def test_parts_of_an_item_are_items_where_the_definition_says_so(example):
    out, arrays, axes = example.out(), example.arrays(), example.kind.axes
    parts = {n: parts_as_items(a, axes, has_classes=a.ndim == out.ndim) for n, a in arrays.items()}
    batch = {name: torch.from_numpy(array) for name, array in parts.items()}
    value, _ = example.torch(parts_as_items(out, axes, has_classes=True), batch, "sum")
    assert_close(
        value, example.torch(out, example.batch(), "sum")[0], "sum, value, parts against items"
    )
    assert example.count(batch) == pytest.approx(example.count(example.batch()), rel=RELATIVE)


@each_example
def test_counts_agree(example):
    batch, arrays = example.batch(), example.arrays()
    counts = np.asarray(example.kind.jax_counts(example.o, arrays))
    assert counts.shape == (ITEMS,)
    assert (counts > 0).all(), "an item that is not ignored has a count of 0"
    singles = [
        example.count({name: t[i : i + 1] for name, t in batch.items()}) for i in range(ITEMS)
    ]
    assert_close(singles, counts, "counts of single items, torch against JAX")
    assert_close(example.count(batch), counts.sum(), "count of the batch, torch against JAX")


@each_example
def test_uniform_says_whether_all_items_have_the_same_count(example):
    batch = example.batch(MANY)
    counts = {example.count({name: t[i : i + 1] for name, t in batch.items()}) for i in range(MANY)}
    assert example.kind.uniform(example.signal, example.o) == (len(counts) == 1)


@each_example
def test_maskable_says_whether_the_gradient_of_a_batch_without_valid_targets_is_zero(example):
    for dtype in (torch.float64, torch.float32):
        tensors = example.batch(masked=slice(None))
        batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        _, gradient = example.torch(torch.from_numpy(example.out()).to(dtype), batch, "mean")
        no_valid_target = example.count(batch) == 0
        assert example.kind.maskable(example.o) == (no_valid_target and bool((gradient == 0).all()))
        if not no_valid_target:
            assert np.isfinite(gradient).all()


@each_example
def test_a_masked_item_changes_nothing(example):
    if example.kind.maskable(example.o):
        masked = slice(1, 3)
        for reduction in REDUCTIONS:
            assert_masked_items_change_nothing(example, reduction, masked)
        arrays = example.arrays(masked=masked)
        assert not np.asarray(example.kind.jax_counts(example.o, arrays))[masked].any()
        items = partial(example.kind.jax_items, example.o)
        assert (
            not CompiledPrograms()
            .call("test of one loss", items, example.out(), arrays, store=False)[masked]
            .any()
        )


def assert_masked_items_change_nothing(example: Example, reduction: str, masked: slice) -> None:
    out, batch = example.out(), example.batch(masked=masked)
    value, gradient = example.torch(out, batch, reduction)
    rest = np.r_[0:1, 3:ITEMS]
    without = {name: tensor[rest] for name, tensor in batch.items()}
    value_without, gradient_without = example.torch(out[rest], without, reduction)
    assert_close(value, value_without, "value")
    assert_close(gradient[rest], gradient_without, "gradient")
    assert not gradient[masked].any()
    assert example.count(batch) == example.count(without)


def _example(name: str, signal: Signal, **options) -> Example:
    return Example(LOSSES[name], signal, tuple(options.items()))


SMOOTHED = _example(
    "cross_entropy",
    Signal("sequence", (3, 4)),
    ignore_index=True,
    label_smoothing=0.1,
    class_weights=True,
)


def test_ignored_targets_are_drawn_but_every_item_keeps_one():
    target = SMOOTHED.arrays(MANY)["target"]
    assert target.dtype == np.int64
    ignored = (target == IGNORE_INDEX).sum(axis=1)
    assert set(ignored) == {0, 1, 2}


def test_padding_is_ignored():
    padded = _example(
        "cross_entropy",
        Signal("sequence", (3, 4), padded=True),
        ignore_index=True,
        label_smoothing=0.0,
        class_weights=False,
    )
    target = padded.arrays(MANY)["target"]
    assert (target[padded.ignored(MANY)] == IGNORE_INDEX).all()


@pytest.mark.parametrize(
    "count",
    [
        lambda options, batch: torch.tensor(len(batch["target"])),
        lambda options, batch: (batch["target"] != IGNORE_INDEX).sum(),
    ],
    ids=["items", "targets without their weights"],
)
def test_a_planted_wrong_count_fails_the_identity(count):
    assert_splits(SMOOTHED, "mean")
    with pytest.raises(AssertionError, match="parts against the whole"):
        assert_splits(replace(SMOOTHED, kind=replace(SMOOTHED.kind, count=count)), "mean")


def _forgets_to_ignore(options, out, batch):
    return SMOOTHED.kind.jax_items(options, out, {"target": jnp.maximum(batch["target"], 0)})


def test_a_planted_wrong_implementation_fails_the_comparison():
    with pytest.raises(AssertionError, match="torch against JAX"):
        assert_frameworks_agree(
            [replace(SMOOTHED, kind=replace(SMOOTHED.kind, jax_items=_forgets_to_ignore))]
        )
