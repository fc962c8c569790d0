"""Real architectures of transformers and torch.nn, small, with random weights: loss and gradients
against torch's.

    pytest studies/tests/architectures --full --bridge-records reports

Most language models compute their norms, rotary embeddings and losses in float32 whatever their own
dtype. Such a model is held to torch twice: as it is, within what float32 leaves; and with every
request for float32 answered by float64, within 1e-10.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gradcheck_suite.bridge import BridgeError, Lowered, lower, wrong_backwards
from studies.tests.architectures import ARCHITECTURES, torch_models
from studies.tests.architectures.model import text
from studies.zero_or_none import float64_by_default
from tests.bridge.agreeing import TOLERANCE, assert_agreement

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.full]

SINGLE = 2.0**-24
TORCHS = {"LSTM": torch_models.LSTM, "Transformer": torch_models.Transformer}


class _Widened(TorchFunctionMode):
    """Answers every request for float32 with float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double

        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        return func(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def _widened_loss(model: Any, batch: Any) -> torch.Tensor:
    with _Widened():
        return _loss(model, batch)


@pytest.fixture
def _experts_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers use its own operation for products in groups: torch's has no kernel for
    float64.
    """
    pytest.importorskip("transformers", reason="transformers is not installed")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False)


def _tolerance(lowered: Lowered) -> float:
    return max(TOLERANCE, 2 * SINGLE * len(lowered.narrow))


CARRIED = [name for name, (_, row) in ARCHITECTURES.items() if not row.refused]


@pytest.mark.usefixtures("_experts_in_float64")
@pytest.mark.parametrize("name", CARRIED)
def test_an_architecture_in_its_own_dtypes_agrees_with_torch(name, note_agreement):
    """Each operation in float32 may round once in torch and once in JAX: 2 roundoffs of the largest
    entry for each.
    """
    kind, row = ARCHITECTURES[name]
    model, batch = row.made()
    note_agreement(model, kind, assert_agreement(model, _loss, batch, tolerance=_tolerance))
    assert wrong_backwards(model, _loss, batch) == ()


@pytest.mark.usefixtures("_experts_in_float64")
@pytest.mark.parametrize("name", CARRIED)
def test_an_architecture_in_float64_throughout_agrees_with_torch(name, note_agreement):
    kind, row = ARCHITECTURES[name]
    model, batch = row.made()
    with float64_by_default():
        agreement = assert_agreement(model, _widened_loss, batch)
    assert agreement.lowered.narrow == ()
    note_agreement(model, kind, agreement, widened=True)


@pytest.mark.usefixtures("_experts_in_float64")
@pytest.mark.parametrize("name", [name for name, (_, row) in ARCHITECTURES.items() if row.refused])
def test_a_refused_architecture_is_refused_by_name_and_its_rewrite_agrees(name, note_refusal):
    kind, row = ARCHITECTURES[name]
    model, batch = row.made()
    with pytest.raises(BridgeError, match=row.refused) as raised:
        lower(model, _loss, batch)
    note_refusal(model, kind, raised.value)
    if raised.value.rewrite:
        names = {"torch": torch, "model": model}
        exec(raised.value.rewrite, names)
        assert_agreement(model, names.get("loss", _loss), batch, tolerance=_tolerance)


@pytest.mark.parametrize("name", TORCHS)
def test_a_model_of_torch_agrees_with_torch(name, note_agreement):
    torch.manual_seed(0)
    batch = text()
    del batch["attention_mask"]
    model = TORCHS[name]().double().train()
    note_agreement(model, "torch.nn", assert_agreement(model, _loss, batch))
