"""The bridge's errors for losses that it cannot translate, and how a user registers an operation."""

from __future__ import annotations

import importlib

import jax.numpy as jnp
import pytest
import torch
from torch import nn

from gradcheck_suite.bridge import (
    BridgeError,
    NotExportable,
    RandomnessError,
    UnknownOperation,
    WrongLowering,
    jax_gradient,
    register_op,
    table,
)
from gradcheck_suite.bridge.exporting import rewrite_of
from gradcheck_suite.bridge.op_table import _TABLE
from gradcheck_suite.errors import UsageError
from tests.bridge.agreeing import assert_agrees
from tests.bridge.torch_models import LossInside

X = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)
MODEL = nn.Linear(4, 4).double()


@torch.library.custom_op("bridge_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: grad * 2)


@pytest.fixture
def restored_table():
    kept = dict(_TABLE)
    yield
    _TABLE.clear()
    _TABLE.update(kept)


def of_doubled(model, batch):
    return doubled(model(batch)).pow(2).mean()


def test_the_error_for_an_unknown_operation_has_its_line_and_how_to_register_it(restored_table):
    with pytest.raises(UnknownOperation) as raised:
        jax_gradient(MODEL, of_doubled, X)
    message = str(raised.value)
    assert "bridge_tests.doubled.default" in message
    assert "test_messages.py, line" in message
    assert "return doubled(model(batch)).pow(2).mean()" in message
    assert "register_op('bridge_tests.doubled.default')" in message
    assert isinstance(raised.value, UsageError)

    @register_op("bridge_tests.doubled.default")
    def doubled_in_jax(x):
        return x * 2

    assert_agrees(MODEL, of_doubled, X)
    assert table()["bridge_tests.doubled.default"] == "test_messages"


@pytest.mark.parametrize(
    ("lowering", "received"),
    [
        (lambda x: (x * 2).astype(jnp.float32), "float32"),
        (lambda x: x[0], r"float64\[4\]"),
        (lambda x: 2.0, "float where torch"),
        (lambda x: x * [], "failed"),
    ],
)
def test_the_error_for_a_wrong_lowering_has_the_received_and_the_expected_result(
    restored_table, lowering, received
):
    register_op("bridge_tests.doubled")(lowering)
    with pytest.raises(WrongLowering, match=received) as raised:
        jax_gradient(MODEL, of_doubled, X)
    assert "bridge_tests.doubled.default (test_messages.py, line" in str(raised.value)


@pytest.mark.parametrize("name", ["add", "aten.add.Tensor.more", 3])
def test_a_malformed_operation_name_is_refused(name):
    with pytest.raises(UsageError, match=r"expected names such as 'aten.add'"):
        register_op(name)


RANDOM = {
    "dropout": lambda model, batch: torch.nn.functional.dropout(model(batch), 0.5).mean(),
    "randn_like": lambda model, batch: (model(batch) + torch.randn_like(batch)).mean(),
    "bernoulli": lambda model, batch: (model(batch) * torch.bernoulli(batch * 0 + 0.5)).mean(),
    "attention": lambda model, batch: torch.nn.functional.scaled_dot_product_attention(
        *[model(batch)[None, None]] * 3, dropout_p=0.2
    ).mean(),
}


@pytest.mark.parametrize("loss", RANDOM)
def test_a_random_operation_is_refused_with_its_line(loss):
    with pytest.raises(RandomnessError) as raised:
        jax_gradient(MODEL, RANDOM[loss], X)
    message = str(raised.value)
    assert "test_messages.py, line" in message
    assert "torch and JAX would draw different numbers" in message
    assert "make the random numbers part of the batch" in message


def test_a_python_decision_on_values_is_refused_with_its_line_and_a_rewrite_that_agrees():
    def loss(model, batch):
        out = model(batch)
        return out.mean() if out.sum() > 0 else out.pow(2).mean()

    with pytest.raises(NotExportable, match="takes a Python decision") as raised:
        jax_gradient(MODEL, loss, X)
    message = str(raised.value)
    assert "if out.sum() > 0" in message
    assert message.endswith(
        "\n    return torch.where(out.sum() > 0, out.mean(), out.pow(2).mean())"
    )
    names = {"torch": torch}
    exec(f"def loss(model, batch):\n    out = model(batch)\n    {raised.value.rewrite}", names)
    assert_agrees(MODEL, names["loss"], X, jit=False)


def test_a_model_that_decides_on_its_labels_is_refused_with_a_rewrite_that_agrees():
    model = LossInside().double()
    batch = {"x": X, "labels": torch.tensor([1, -100, 4])}
    with pytest.raises(
        NotExportable, match=r"torch_models.py, line \d+: if kept.size\(0\) > 0:"
    ) as raised:
        jax_gradient(model, lambda model, batch: model(**batch).loss, batch)
    names = {"torch": torch}
    exec(raised.value.rewrite, names)
    assert names["loss"](model, batch).item() == model(**batch).loss.item()
    assert_agrees(model, names["loss"], batch, jit=False)


def test_the_rewrites_of_statements_compute_the_same():
    x, choice, parts = X, torch.tensor([2, 0, 2]), [torch.sin, torch.exp, torch.cos]
    names = {"torch": torch, "x": x, "choice": choice, "parts": parts, "out": torch.zeros_like(x)}
    exec(rewrite_of("for i in choice.unique():"), names)
    assert names["out"].equal(
        torch.stack([parts[i](row) for i, row in zip(choice, x, strict=True)])
    )
    for x in (X, -X):
        names = {"torch": torch, "x": x, "value_if_true": x, "value_if_false": 2 * x}
        exec(rewrite_of("if x.sum() > 0 and not x.mean() > x.max():"), names)
        assert names["chosen"].equal(x if x.sum() > 0 else 2 * x)
    names = {
        "draw": lambda items, seed: {"x": X},
        "number_of": lambda drawn: (drawn["x"] > 0).sum(),
    }
    exec(rewrite_of("length = int((x > 0).sum())"), names)
    assert names["batch"](3, 0)["number"] == (X > 0).sum()
    for line in ("while x.abs().max() > 1:", "for _ in range(rounds):"):
        names = {
            "torch": torch,
            "x": 5 * X,
            "rounds": torch.tensor(4),
            "most": 9,
            "one_round": lambda x: x / 2,
        }
        exec(rewrite_of(line), names)
        assert names["x"].equal(5 * X / 16)
    assert rewrite_of("assert x.isfinite().all(), 'text'").startswith(
        "# an assertion has no gradient"
    )
    assert rewrite_of("scale = 2 * x.max().item() if 0 < x.sum() < 1 else float(x.min())") == (
        "scale = torch.where((0 < x.sum()) & (x.sum() < 1), 2 * x.max().detach(), x.min().detach())"
    )


@pytest.mark.full
def test_a_decision_in_a_librarys_code_is_rewritten_in_a_copy_of_its_function(
    tmp_path, monkeypatch
):
    """The batch has labels, and the model no logits: the loss of logits would not help."""
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "deciding.py").write_text(
        "def bounded(x):\n    return x / 2 if x.max() > 1 else x\n"
    )
    monkeypatch.syspath_prepend(library)
    deciding = importlib.import_module("deciding")
    batch = {"x": X, "labels": torch.tensor([1, 0, 2])}

    def loss(model, batch):
        return nn.functional.cross_entropy(deciding.bounded(model(batch["x"])), batch["labels"])

    with pytest.raises(NotExportable, match=r"deciding.py, line 2") as raised:
        jax_gradient(MODEL, loss, batch)
    first, line = raised.value.rewrite.split("\n")
    assert (
        first
        == "# in a copy of deciding.bounded, which `deciding.bounded = copy` puts in its place:"
    )
    names = {"torch": torch}
    exec(f"def copy(x):\n    {line}", names)
    deciding.bounded = names["copy"]
    assert_agrees(MODEL, loss, batch, jit=False)


def test_a_decision_inside_torch_is_refused_with_the_losss_line():
    def loss(model, batch):
        return torch.nn.functional.gaussian_nll_loss(model(batch), batch, batch.exp())

    with pytest.raises(
        NotExportable, match=r"this loss \(test_messages.py, line \d+: return .*gaussian_nll_loss"
    ):
        jax_gradient(MODEL, loss, X)


@pytest.mark.full
def test_the_error_for_a_transformer_that_inspects_its_mask_says_what_to_pass():
    """Without `is_causal`, torch.nn.modules.transformer._detect_is_causal_mask compares the mask's
    values.
    """
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), 1
    ).double()
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1)

    def loss(model, batch, **said):
        return model(batch[None], mask=mask.clone(), **said).pow(2).mean()

    with pytest.raises(NotExportable, match=r"is_causal .* beside the mask") as raised:
        jax_gradient(encoder, loss, X)
    assert "Python decision" not in str(raised.value)
    assert jax_gradient(encoder, lambda model, batch: loss(model, batch, is_causal=True), X)


def test_a_loss_that_is_not_a_scalar_is_refused():
    with pytest.raises(BridgeError, match="must be one scalar tensor"):
        jax_gradient(MODEL, lambda model, batch: model(batch), X)


def test_a_loss_that_writes_to_a_parameter_is_refused():
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(max=0.5)
            return x * self.weight

    with pytest.raises(BridgeError, match="writes to the parameter 'weight'"):
        jax_gradient(Clamped(), lambda model, batch: model(batch).mean(), X)


def test_the_error_for_data_says_to_write_detach():
    with pytest.raises(NotExportable, match=r"write tensor.detach\(\)"):
        jax_gradient(MODEL, lambda model, batch: (model(batch) * model(batch).data).mean(), X)


def test_other_export_failures_say_to_make_the_loss_exportable():
    def loss(model, batch):
        return model(batch).mean() * float(bytes(batch.numpy().data)[0])

    with pytest.raises(NotExportable, match="make the loss exportable"):
        jax_gradient(MODEL, loss, X)


def test_a_gradient_hook_is_refused_because_export_drops_it():
    def loss(model, batch):
        out = model(batch)
        out.register_hook(lambda grad: grad.clamp(max=0.01))
        return out.mean()

    with pytest.raises(BridgeError, match="hook"):
        jax_gradient(MODEL, loss, X)


@pytest.mark.parametrize("before", [False, True])
def test_a_module_whose_backward_hook_changes_a_gradient_is_refused_by_name(before):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    register = (
        model[1].register_full_backward_pre_hook if before else model[1].register_full_backward_hook
    )
    hook = register(lambda module, *gradients: (gradients[0][0] * 2,))
    with pytest.raises(
        BridgeError, match=r"the module '1' has a backward hook that changes a gradient"
    ):
        jax_gradient(model, lambda model, batch: model(batch).mean(), X)
    hook.remove()
    seen = []
    register = (
        model[1].register_full_backward_pre_hook if before else model[1].register_full_backward_hook
    )
    register(lambda module, *gradients: seen.append(gradients))
    assert_agrees(model, lambda model, batch: model(batch).mean(), X, jit=False)
    assert seen
