"""Surprises about torch and JAX, each in its smallest case.

A test fails when a release behaves differently. Where no issue is linked, none is known upstream.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.scipy import special

from gradcheck_suite.bridge.op_table import absolute, lowering_of

pytestmark = pytest.mark.full
aten = torch.ops.aten


def _torch_gradient(function, *values):
    inputs = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values]
    return torch.autograd.grad(function(*inputs).sum(), inputs)


def test_torch_hardsigmoid_has_a_float32_constant_in_its_float64_gradient():
    (gradient,) = _torch_gradient(torch.nn.functional.hardsigmoid, 0.5)
    assert 2e-8 < abs(gradient.item() * 6 - 1) < 4e-8
    ours = jax.grad(lowering_of(aten.hardsigmoid.default))(jnp.float64(0.5))
    assert ours == pytest.approx(1 / 6, rel=1e-15)


def test_torch_full_has_no_room_for_float64s_least_number_unless_told_the_dtype():
    """`torch.full` makes a float32 tensor of it, so that XGLM of transformers 5.23.0 raises in
    float64.
    """
    with pytest.raises(RuntimeError, match="cannot be converted to type float without overflow"):
        torch.full((), torch.finfo(torch.float64).min)


def test_torch_grouped_mm_has_no_float64_on_a_cpu():
    a, b = torch.ones(4, 4, dtype=torch.float64), torch.ones(1, 4, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Float32, BFloat16 or Float16 matrix, got Double"):
        aten._grouped_mm(a, b, offs=torch.tensor([4], dtype=torch.int32))


def test_torch_grouped_mm_leaves_rows_behind_the_last_group_uninitialised(monkeypatch):
    """Where torch fills uninitialised memory, with NaN, these rows are NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        out = aten._grouped_mm(
            torch.ones(4, 4), torch.ones(1, 4, 4), offs=torch.tensor([2], dtype=torch.int32)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert out[:2].eq(4).all()
    assert out[2:].isnan().all()


def test_torch_logit_has_either_infinity_at_negative_zero():
    """The derivative 1 / (x (1 - x)) has a pole at -0.0.

    Torch's vectorised loop and its scalar remainder differ there. 33 elements are a whole number of
    vectors and one more, for vectors of up to 16 numbers.
    """
    (gradient,) = _torch_gradient(torch.logit, [-0.0] * 33)
    assert set(gradient.tolist()) == {-math.inf, math.inf}
    assert jax.grad(lowering_of(aten.logit.default))(jnp.float64(-0.0)) in (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("x", "trigamma"), [(1.0, math.pi**2 / 6), (0.5, math.pi**2 / 2), (2.0, math.pi**2 / 6 - 1)]
)
def test_torch_digamma_has_a_gradient_of_nine_digits(x, trigamma):
    """The trigamma of torch is a short series by design:
    https://github.com/pytorch/pytorch/pull/4399.
    """
    (gradient,) = _torch_gradient(torch.digamma, x)
    assert 1e-12 < abs(gradient.item() / trigamma - 1) < 1e-9
    ours = jax.grad(lowering_of(aten.digamma.default))(jnp.float64(x))
    assert ours == pytest.approx(trigamma, rel=1e-14)


def test_jax_digamma_has_a_wrong_gradient_below_minus_six():
    """psi'(-9.5) = pi^2 / 2 + 4 sum over k = 0..9 of 1 / (2k + 1)^2, from psi'(1/2) by recurrence.

    https://github.com/jax-ml/jax/issues/37635
    """
    trigamma = math.pi**2 / 2 + 4 * sum(1 / (2 * k + 1) ** 2 for k in range(10))
    assert abs(jax.grad(special.digamma)(-9.5) / trigamma - 1) > 1e-3
    ours = jax.grad(lowering_of(aten.digamma.default))(jnp.float64(-9.5))
    assert ours == pytest.approx(trigamma, rel=1e-13)


def test_torch_as_strided_scatter_gives_its_first_argument_the_gradient_of_what_was_overwritten():
    """The first two entries are overwritten: their gradient is 0 and the others' 3 and 4."""
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    into, _ = _torch_gradient(
        lambda x, y: torch.as_strided_scatter(x, y, (2,), (1,), 0) * weights, [0.0] * 4, [1.0] * 2
    )
    assert into.tolist() == [1.0, 2.0, 0.0, 0.0]
    scatter = lowering_of(aten.as_strided_scatter.default)
    ours = jax.grad(lambda x: (scatter(x, jnp.ones(2), (2,), (1,), 0) * weights.numpy()).sum())(
        jnp.zeros(4)
    )
    assert ours.tolist() == [0.0, 0.0, 3.0, 4.0]


def test_torch_scatter_reduce_loses_half_a_gradient_to_an_entry_that_is_not_included():
    """The smallest of (2) is 2, with gradient 1; self's own 2 is not included and has no share.

    https://github.com/pytorch/pytorch/issues/168358 reports the NaN that the same formula gives
    elsewhere.
    """
    zero = torch.tensor([0])

    def smallest(into, source):
        return torch.scatter_reduce(into, 0, zero, source, "amin", include_self=False)

    _, gradient = _torch_gradient(smallest, [2.0], [2.0])
    assert gradient.item() == 0.5
    lowered = lowering_of(aten.scatter_reduce.two)

    def in_jax(source):
        return lowered(
            jnp.asarray([2.0]), 0, jnp.asarray([0]), source, "amin", include_self=False
        ).sum()

    assert jax.grad(in_jax)(jnp.asarray([2.0])).item() == 1.0


def test_the_derivative_of_abs_at_zero_is_one_in_jax_and_zero_in_torch():
    """JAX's choice is deliberate: https://github.com/jax-ml/jax/issues/37820."""
    assert jax.grad(jnp.abs)(0.0) == 1.0
    assert jax.grad(special.i0)(0.0) == 1.0
    assert _torch_gradient(torch.abs, 0.0)[0].item() == 0.0
    assert jax.grad(absolute)(0.0) == 0.0


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_decomposing_an_exported_program_drops_no_grad():
    """The derivative of w * stop(w) at 3 is 3, not 6.

    So the bridge detaches inside such regions before.
    """

    class Squared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

        def forward(self):
            with torch.no_grad():
                still = self.weight * 1
            return self.weight * still

    module = Squared()
    program = torch.export.export(module, (), strict=False).run_decompositions({}).module()
    (forgotten,) = torch.autograd.grad(program(), program.weight)
    (right,) = torch.autograd.grad(module(), module.weight)
    assert (forgotten.item(), right.item()) == (6.0, 3.0)
