"""Weights are recovered where the gradients determine them, and never claimed where they do not."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_suite.judge.fitted_weights import fit_weights

GRADIENTS = np.array([[1.0, 2.0, 0.0, -1.0], [0.5, 0.0, 3.0, 1.0], [0.0, -1.0, 1.0, 2.0]])
ALLOWED = np.full(4, 1e-13)


@pytest.mark.parametrize("weights", [(0.25, 0.25, 0.5), (1.0, 0.0, 0.0), (0.0, -2.0, 1e-3)])
def test_weights_are_recovered(weights):
    fit = fit_weights(np.array(weights) @ GRADIENTS, GRADIENTS, ALLOWED)
    assert fit.weights == pytest.approx(weights, rel=1e-12, abs=1e-13)
    assert fit.determined
    assert fit.exact


def test_sizes_that_differ_by_many_orders_do_not_matter():
    gradients = GRADIENTS * np.array([[1e-9], [1.0], [1e9]])
    fit = fit_weights(np.array((2.0, 3.0, 4.0)) @ gradients, gradients, ALLOWED)
    assert fit.determined
    # the smallest contribution is 1e-18 of the largest: lost in the observation itself
    assert fit.weights[1:] == pytest.approx((3.0, 4.0), rel=1e-6)


def test_what_is_no_combination_is_not_exact():
    observed = np.array((1.0, 1.0, 1.0)) @ GRADIENTS
    observed[2] += 1e-6
    fit = fit_weights(observed, GRADIENTS, ALLOWED)
    assert not fit.exact
    assert 1e-8 < fit.residual < 1e-6


def test_what_rounding_allows_is_exact():
    observed = np.array((1.0, 1.0, 1.0)) @ GRADIENTS
    observed[2] += 1e-13
    assert fit_weights(observed, GRADIENTS, ALLOWED).exact


@pytest.mark.parametrize(
    "gradients",
    [np.array([[1.0, 2.0], [2.0, 4.0]]), np.array([[1.0], [3.0]]), np.array([[1.0, 2.0], [1.0, 2.0 + 1e-9]])],
    ids=["proportional", "fewer elements than micro-batches", "proportional but for rounding"],
)
def test_weights_that_the_gradients_do_not_tell_apart_are_not_determined(gradients):
    fit = fit_weights(gradients.sum(axis=0), gradients, np.full(gradients.shape[1], 1e-12))
    assert not fit.determined


def test_a_micro_batch_without_a_gradient_has_no_weight():
    gradients = np.vstack([GRADIENTS[:2], np.zeros(4)])
    fit = fit_weights(np.array((0.5, 2.0, 7.0)) @ gradients, gradients, ALLOWED)
    assert fit.weights == pytest.approx((0.5, 2.0, 0.0))
    assert fit.determined


@pytest.mark.parametrize(("off", "exact"), [(250, True), (300, False)])
def test_what_the_fit_itself_rounds_is_exact(off, exact):
    """Of unit columns at 120 degrees the smaller singular value is sqrt(1/2); sizes of the sum are 3, 5 and 8.

    Rounding of 64 eps / sqrt(1/2) of each is 271, 453 and 724 eps; (-1, 1, 1) is no combination of the gradients.
    """
    gradients = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, -1.0]])
    observed = np.array([3.0, 5.0]) @ gradients + off * 2.0**-52 * np.array([-1.0, 1.0, 1.0])
    fit = fit_weights(observed, gradients, np.zeros(3))
    assert fit.exact == exact
    assert fit.residual == pytest.approx(off * 2.0**-52, rel=0.1, abs=0)
