"""Models of time series."""

from __future__ import annotations

import torch

from tests.bridge.architectures.model import Architecture, Batch

_SIZE = {
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
}
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
_AHEAD = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 2, **_SIZE}


def _forecast() -> Batch:
    return {
        "past_values": torch.randn(3, 10),
        "past_time_features": torch.randn(3, 10, 2),
        "past_observed_mask": torch.ones(3, 10),
        "future_values": torch.randn(3, 4),
        "future_time_features": torch.randn(3, 4, 2),
    }


def _channels() -> Batch:
    return {"past_values": torch.randn(3, 16, 2), "future_values": torch.randn(3, 4, 2)}


KIND = "time series"
ARCHITECTURES = (
    Architecture("AutoformerForPrediction", {**_AHEAD, "label_length": 4, "moving_average": 3}, _forecast),
    Architecture("InformerForPrediction", {**_AHEAD, "attention_type": "full"}, _forecast),
    Architecture("PatchTSMixerForPrediction", _PATCHED, _channels),
    Architecture("PatchTSTForPrediction", {**_PATCHED, "loss": "mse"}, _channels),
    Architecture(
        "PatchTSTForRegression",
        {**_PATCHED, "loss": "mse", "num_targets": 2},
        lambda: {"past_values": torch.randn(3, 16, 2), "target_values": torch.randn(3, 2)},
    ),
    Architecture("TimeSeriesTransformerForPrediction", _AHEAD, _forecast),
)
