"""Models of time series."""

from __future__ import annotations

import torch

from studies.tests.architectures.model import Architecture, Batch

_PATCHED = {
    "context_length": 16,
    "patch_length": 4,
    "patch_stride": 4,
    "stride": 4,
    "prediction_length": 4,
    "num_input_channels": 2,
    "d_model": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "ffn_dim": 12,
}


def _channels() -> Batch:
    return {"past_values": torch.randn(3, 16, 2), "future_values": torch.randn(3, 4, 2)}


KIND = "time series"
ARCHITECTURES = (
    Architecture("PatchTSMixerForPrediction", _PATCHED, _channels),
    Architecture("PatchTSTForPrediction", {**_PATCHED, "loss": "mse"}, _channels),
    Architecture(
        "PatchTSTForRegression",
        {**_PATCHED, "loss": "mse", "num_targets": 2},
        lambda: {"past_values": torch.randn(3, 16, 2), "target_values": torch.randn(3, 2)},
    ),
)
