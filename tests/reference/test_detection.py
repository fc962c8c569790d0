"""The smallest error that the whole bound finds, by how much the contributions of an element
cancel.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, ProblemSpec
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import generated_instance

LINEAR = Layer("linear", bias=True, features=3)
SPEC = ProblemSpec(
    Input("vector", size=3), (LINEAR, Layer("tanh"), LINEAR), Loss("mse", reduction="mean")
)
CASES = [Case(SPEC, Plan((3, 5, 4, 4, 1, 2, 6, 3), 4), seed=seed) for seed in range(20)]
STATED = {
    "float32": {
        (1, 1.01): (2.0e-6, 3.9e-6),
        (1.01, 3): (2.9e-6, 1.0e-5),
        (3, 10): (7.9e-6, 3.3e-5),
        (10, 100): (2.8e-5, 1.4e-4),
    },
    "bfloat16": {
        (1, 1.01): (0.076, 0.14),
        (1.01, 3): (0.099, 0.36),
        (3, 10): (0.28, 1.1),
        (10, 100): (1.0, 5.3),
    },
}
"""By dtype and cancellation the first and the ninth decile of `docs/bounds.md`: sizes of the smallest error found,
relative to the element. The cancellation of an element is the sum of the absolute contributions of the micro-batches
over its absolute value, which is 1 where all contributions have one sign."""


def _planted(dtype, case):
    """Yield each window of a case, its elements' cancellations, and whether it finds one element's
    error of a size.
    """
    reference = Reference(generated_instance(case.replace(dtype=dtype)))

    def rounded(values):
        return torch.from_numpy(values).to(getattr(torch, dtype)).to(torch.float64).numpy()

    for index in range(len(case.plan.windows)):
        window = reference.window(index)
        contributions = np.sum(np.abs(window.float64_bound.contributions), axis=0)

        def is_found(element, size, window=window):
            observed = window.expected.copy()
            observed[element] *= 1 + size
            return window.compare(rounded(observed)).ratio > 1

        assert window.compare(rounded(window.expected)).ratio <= 1
        yield contributions / np.abs(window.expected), is_found


@pytest.mark.full
@pytest.mark.parametrize("dtype", STATED)
def test_errors_are_found_down_to_the_stated_sizes(dtype):
    """At 1.25 times the ninth decile 90% of the errors are found, and at 0.8 times the first decile
    at most 10%.
    """
    small, large = {}, {}
    for case in CASES:
        for cancellations, is_found in _planted(dtype, case):
            for element, cancellation in enumerate(cancellations):
                for (low, high), (first, ninth) in STATED[dtype].items():
                    if low <= cancellation < high:
                        sign = (-1) ** element
                        small.setdefault(low, []).append(is_found(element, sign * 0.8 * first))
                        large.setdefault(low, []).append(is_found(element, sign * 1.25 * ninth))
    for low, found in large.items():
        assert len(found) >= 50
        assert np.mean(found) >= 0.9, (low, np.mean(found))
        assert np.mean(small[low]) <= 0.1, (low, np.mean(small[low]))
