"""JAX's opinion on a live run: faults planted in torch, one of torch's own, both sides of the
resolution.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import gradcheck_suite
from gradcheck_suite import UsageError
from gradcheck_suite.__main__ import main
from tests.faults.torch_kernels import tanh_backward

NORM = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(2, 2, 1), torch.nn.InstanceNorm2d(2), torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    images = torch.randn(1, 2, 5, 5).to(memory_format=torch.channels_last)
    F.mse_loss(model(images), torch.zeros(1, 3, 3, 3)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def _trained(model, *, jax=True, steps=2):
    """Train for some windows of two micro-batches, and return the audit's result."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_suite.audit(jax=jax) as audit:
        for step in range(steps):
            for rows in (3, 2):
                x = torch.linspace(-1, 1 + step, rows * 3).reshape(rows, 3)
                (F.mse_loss(model(x), torch.ones(rows, 1)) * rows / 5).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit.result


def test_jax_agrees_and_the_run_is_the_same_to_the_bit():
    asked, alone = _model(), _model()
    result = _trained(asked)
    assert result.holds
    assert (
        result.second_opinion
        == "JAX gave a second opinion on 2 of 2 calls of one window, and agrees with torch"
    )
    assert result.disagreements == ()
    assert _trained(alone, jax=False).second_opinion is None
    for one, other in zip(asked.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("error", "calls"), [(1e-6, 2), (1e-9, 0)])
def test_a_wrong_derivative_of_torch_is_a_finding_from_the_stated_size_on(error, calls):
    with tanh_backward(lambda out: 1 + error):
        result = _trained(_model())
    assert result.holds
    assert len(result.disagreements) == calls
    for micro_batch, text in enumerate(result.disagreements):
        assert text.startswith("torch and JAX differ in the gradient of 0.")
        assert f"by {error:.2g} of its size, and 1 more, both in float64" in text
        assert text.endswith(
            f"in a call of Sequential in micro-batch {micro_batch}: no loop is to blame"
        )


@pytest.mark.full
def test_a_fault_of_torchs_own_ends_the_command_with_status_3(tmp_path, capfd):
    """Torch 2.13.0: instance_norm's backward for one image and a channels_last gradient
    (reports/findings).
    """
    script = tmp_path / "train.py"
    script.write_text(NORM)
    assert main(["audit", str(script)]) == 0
    affected = torch.__version__.startswith("2.13")
    assert main(["audit", "--jax", str(script)]) == (3 if affected else 0)
    err = capfd.readouterr().err
    assert ("finding: torch and JAX differ in the gradient of 0.weight" in err) == affected
    script.write_text(NORM.replace("(1, ", "(2, "))  # two images
    assert main(["audit", "--jax", str(script)]) == 0


def test_what_jax_cannot_be_asked_about_is_said():
    def answer(*modules: torch.nn.Module) -> str | None:
        return _trained(torch.nn.Sequential(*modules), steps=1).second_opinion

    refused = "JAX gives no second opinion: "
    dropout = answer(torch.nn.Dropout(0.5), torch.nn.Linear(3, 1))
    assert dropout == f"{refused}the model draws random numbers, which JAX draws differently"
    large = answer(torch.nn.Linear(3, 300_000), torch.nn.Linear(300_000, 1))
    assert (
        large
        == f"{refused}the model has 1,500,001 parameters, and JAX computes only models of at most 1,000,000"
    )
    with pytest.raises(UsageError, match="leave out `without batch`"):
        gradcheck_suite.audit(jax=True, without=("batch",))


class Reversing(torch.nn.Linear):
    """A layer that makes the class of its custom function in each forward."""

    def forward(self, x):
        class Reversed(torch.autograd.Function):
            @staticmethod
            def forward(context, hidden):
                return hidden.view_as(hidden)

            @staticmethod
            def backward(context, gradient):
                return -gradient

        return Reversed.apply(super().forward(x))


def test_jax_is_not_asked_about_functions_whose_class_is_made_anew():
    result = _trained(torch.nn.Sequential(torch.nn.Linear(3, 4), Reversing(4, 1)))
    assert (result.verdict, result.disagreements) == ("holds", ()), result
    assert "is made anew in each forward" in result.second_opinion
