"""Models of sound."""

from __future__ import annotations

import torch

from studies.tests.architectures.encoders import _BART
from studies.tests.architectures.model import SMALL, Architecture, Batch, classes, sounds, tokens

_WAVE = {
    **SMALL,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 3],
    "conv_stride": [2, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "num_labels": 5,
    "classifier_proj_size": 8,
}
_WHISPER = {
    **_BART,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "max_target_positions": 16,
    "apply_spec_augment": False,
}


def _spoken() -> Batch:
    return {"input_features": torch.randn(2, 8, 16), "labels": tokens(2, 5)}


def _spectra() -> Batch:
    return {"input_values": torch.randn(3, 16, 8), "labels": classes()}


KIND = "audio"
ARCHITECTURES = (
    Architecture(
        "ASTForAudioClassification",
        {
            **SMALL,
            "max_length": 16,
            "num_mel_bins": 8,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "num_labels": 5,
        },
        _spectra,
    ),
    Architecture(
        "Data2VecAudioForSequenceClassification",
        {**_WAVE, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3},
        sounds(32),
    ),
    Architecture("HubertForSequenceClassification", _WAVE, sounds(32)),
    Architecture("SEWForSequenceClassification", {**_WAVE, "squeeze_factor": 2}, sounds(64)),
    Architecture("UniSpeechForSequenceClassification", _WAVE, sounds(32)),
    Architecture("Wav2Vec2ForSequenceClassification", _WAVE, sounds(32)),
    Architecture(
        "Wav2Vec2ConformerForSequenceClassification",
        {**_WAVE, "conv_depthwise_kernel_size": 3},
        sounds(32),
    ),
    Architecture("WavLMForSequenceClassification", _WAVE, sounds(32)),
    Architecture("WhisperForConditionalGeneration", _WHISPER, _spoken),
    Architecture(
        "WhisperForAudioClassification",
        {**_WHISPER, "num_labels": 5, "classifier_proj_size": 8},
        lambda: {"input_features": torch.randn(3, 8, 16), "labels": classes()},
    ),
)
