"""Every operation in the table against torch, in value and gradient, on torch's own samples or on ours."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
import torch.utils._pytree

from gradcheck_suite.bridge import ops  # noqa: F401  (fills the table)
from gradcheck_suite.bridge.errors import RandomnessError
from gradcheck_suite.bridge.table import lowering_of, register_op, table
from tests.bridge.comparing import TOLERANCE, compare
from tests.bridge.opinfo import direct, recorded
from tests.bridge.samples import HAND, THROUGH, tensor

SAMPLES = 4
OPERATIONS = sorted({name.split(".")[1] for name in table() if name.startswith("aten.")})
VALUES_ARE_ANYTHING = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
PYTHON_NUMBERS = {"_local_scalar_dense", "sym_constrain_range_for_size", "sym_numel", "sym_size"}
"""Operations on numbers, not tensors: what exported programs do with them is tested in test_lowered."""
NO_DERIVATIVE = {"bincount", "floor_divide", "heaviside", "histc"}
LOOSER = {
    # torch's trigamma sums too few terms of its series: see test_findings
    "digamma": 1e-9,
    "lgamma": 1e-9,
    "polygamma": 1e-7,
    # torch's 1/6 is a float32 in the backward of hardsigmoid: see test_findings
    "hardsigmoid": 1e-7,
}
NO_GRADIENT_OF = {"as_strided_scatter": (0,), "_ctc_loss": (0,)}
"""Leaves whose gradient is wrong in torch (see test_findings), or right only after log_softmax (see test_lowered)."""
ILL_CONDITIONED = {"native_batch_norm", "native_group_norm", "native_layer_norm"}
"""Normalising two numbers gives +1 and -1 whatever they are: the gradient is rounding and nothing else."""


def _samples(name: str) -> list[Any]:
    if name in HAND:
        return HAND[name]()
    found = [] if name in THROUGH else list(islice(direct(name, SAMPLES), 3 * SAMPLES))
    if not found and name in THROUGH:
        found = list(recorded(name, THROUGH[name], SAMPLES))
    return [sample for sample in found if lowering_of(sample[0]) is not None and not _hopeless(name, *sample)]


def _hopeless(name: str, op: Any, args: Any, kwargs: Any) -> bool:
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p"))
    if name == "rrelu":
        return bool(kwargs.get("training"))
    if name == "as_strided":
        return bool(kwargs.get("storage_offset")) or args[0].numel() < 1
    return name in ILL_CONDITIONED and args[0].numel() <= 6


def _still(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


@pytest.mark.filterwarnings("ignore")  # torch's deprecations of what its own samples call
@pytest.mark.parametrize("name", [n for n in OPERATIONS if n not in VALUES_ARE_ANYTHING | PYTHON_NUMBERS])
def test_an_operation_is_torchs(name):
    samples = _samples(name)
    assert samples, f"no test of aten.{name}: add samples to tests/bridge/samples.py"
    for op, args, kwargs in samples:
        if name.startswith("nll_loss"):
            args = (args[0], *map(_still, args[1:]))
        if name in NO_DERIVATIVE:
            args = torch.utils._pytree.tree_map(_still, args)
        masked = name in ("index", "index_put", "one_hot")
        compare(
            op,
            args,
            kwargs,
            tolerance=LOOSER.get(name, TOLERANCE),
            jit=not masked,
            skip_gradients_of=NO_GRADIENT_OF.get(name, ()),
        )


def test_there_are_more_than_150_operations():
    assert len(OPERATIONS) >= 150


def test_a_planted_fault_is_seen():
    """The look-up that gives its padding row a gradient is the fault that the comparison must see."""
    weight, indices = tensor(5, 2), torch.tensor([1, 0, 3, 1])
    op = torch.ops.aten.embedding.default
    right = lowering_of(op)
    compare(op, (weight, indices, 1), {})
    try:
        register_op("aten.embedding")(lambda weight, indices, padding_idx=-1, *_: weight[indices])
        with pytest.raises(AssertionError, match="gradient of argument 0 is off"):
            compare(op, (weight, indices, 1), {})
    finally:
        register_op("aten.embedding")(right)
    compare(op, (weight, indices, 1), {})


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (torch.ops.aten.dropout.default, (tensor(3), 0.5, True)),
        (torch.ops.aten.native_dropout.default, (tensor(3), 0.5, True)),
        (torch.ops.aten.rrelu.default, (tensor(3), 0.1, 0.3, True)),
        (torch.ops.aten.scaled_dot_product_attention.default, (*[tensor(1, 1, 2, 2)] * 3, None, 0.1)),
    ],
)
def test_active_randomness_is_refused(op, arguments):
    with pytest.raises(RandomnessError):
        compare(op, arguments, {})
