"""The walk over layers is the gradient that JAX gives for the whole model, padded or not."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, seed

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec, problems
from gradcheck_suite.catalogue.tables import draw_data
from gradcheck_suite.reference import jax_gradients
from gradcheck_suite.reference.jax_gradients import (
    large_batch_gradients,
    whole_gradient,
)
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import generated_instance
from properties.helpers import scaled


def _case(spec, plan=None):
    return Case(spec, plan or Plan((1, 3, 2), 3), seed=5)


def _close(one, other):
    scale = max(1.0, *(float(np.abs(a).max(initial=0.0)) for a in other.values()))
    for name, array in other.items():
        np.testing.assert_allclose(one[name], array, rtol=0, atol=1e-12 * scale, err_msg=name)


LINEAR = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", bias=True, features=1),),
    Loss("mse", reduction="mean"),
)


@seed(0)
@scaled(8)
@given(spec=problems(max_layers=3))
def test_walk_equals_the_whole_gradient_in_every_window(spec):
    reference = Reference(generated_instance(_case(spec, Plan((1, 3, 2, 2, 1), 3))))
    arrays, parameters = reference.instance.arrays, reference.layout.names
    windows = [range(6), range(6, 9)]
    walked = large_batch_gradients(spec, reference.values64, arrays, windows)
    for window, (value, gradient) in zip(windows, walked, strict=True):
        part = {name: array[window.start : window.stop] for name, array in arrays.items()}
        whole_value, whole = whole_gradient(spec, reference.values64, part)
        assert value == pytest.approx(whole_value, rel=1e-12)
        _close({n: gradient[n] for n in parameters}, {n: whole[n] for n in parameters})


def test_linear_regression_by_hand():
    data = {"x": np.array([[1.0, 2.0], [3.0, -1.0]]), "target": np.array([[1.0], [0.0]])}
    values = {"0.weight": np.array([[0.5, 1.0]]), "0.bias": np.array([0.25])}
    # residuals 2.75 - 1 and 0.75 - 0; the mean over two elements of r^2 has gradient sum(r x)
    ((loss, gradient),) = large_batch_gradients(LINEAR, values, data, [range(2)])
    assert loss == pytest.approx((1.75**2 + 0.75**2) / 2, rel=1e-15)
    np.testing.assert_allclose(gradient["0.weight"], [[1.75 + 2.25, 3.5 - 0.75]], rtol=1e-15)
    np.testing.assert_allclose(gradient["0.bias"], [2.5], rtol=1e-15)


def test_padding_rows_change_nothing(monkeypatch):
    spec = dataclasses.replace(LINEAR, layers=(Layer("layer_norm", affine=True), *LINEAR.layers))
    values = Reference(generated_instance(_case(spec))).values64
    data = draw_data(spec, 3, np.zeros(7, dtype=bool))
    windows = [range(2), range(2, 4), range(4, 7)]
    padded = large_batch_gradients(spec, values, data, windows)
    # a window of its own, and two windows side by side
    for rows in (2, 4):
        for axes, smallest in ((None, rows), (1, rows), (0, 2 * rows)):
            monkeypatch.setitem(jax_gradients.ROWS, axes, smallest)
        for (_, one), (_, other) in zip(
            padded, large_batch_gradients(spec, values, data, windows), strict=True
        ):
            _close(one, other)
