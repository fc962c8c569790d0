"""Models of images, alone or together with text."""

from __future__ import annotations

import torch

from studies.tests.architectures.model import SMALL, SPECIAL, Architecture, Batch, images, tokens

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 5,
}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 5}
_SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 5,
}
_TEXT = {**SMALL, **SPECIAL}


def _captions() -> Batch:
    return {"input_ids": tokens(), "pixel_values": torch.randn(3, 3, 8, 8), "return_loss": True}


def _segmented() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 5, (2, 32, 32))}


KIND = "vision"
ARCHITECTURES = (
    Architecture("BeitForImageClassification", VISION, images(8)),
    Architecture(
        "CLIPModel", {"text_config": _TEXT, "vision_config": VISION, "projection_dim": 8}, _captions
    ),
    Architecture("ConvNextForImageClassification", {**_STAGES, "num_stages": 2}, images(16)),
    Architecture("ConvNextV2ForImageClassification", {**_STAGES, "num_stages": 2}, images(16)),
    Architecture("DeiTForImageClassification", VISION, images(8)),
    Architecture("Dinov2ForImageClassification", {**VISION, "mlp_ratio": 2}, images(8)),
    Architecture(
        "FocalNetForImageClassification",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
            "num_labels": 5,
        },
        images(16),
        attention=None,
    ),
    Architecture(
        "LevitForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [8, 16, 16],
            "num_attention_heads": [1, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [4, 4, 4],
            "num_labels": 5,
        },
        images(32),
        attention=None,
    ),
    Architecture(
        "MobileNetV1ForImageClassification",
        {"image_size": 32, "depth_multiplier": 0.25, "num_labels": 5},
        images(32),
        attention=None,
    ),
    Architecture(
        "MobileNetV2ForImageClassification",
        {"image_size": 32, "depth_multiplier": 0.25, "num_labels": 5},
        images(32),
        attention=None,
    ),
    Architecture(
        "MobileViTForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [8, 12, 16],
            "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16],
            "num_attention_heads": 2,
            "num_labels": 5,
        },
        images(32),
    ),
    Architecture(
        "PoolFormerForImageClassification",
        {"hidden_sizes": [4, 8, 8, 8], "depths": [1, 1, 1, 1], "num_labels": 5},
        images(32),
        attention=None,
    ),
    Architecture(
        "PvtForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 2],
            "mlp_ratios": [2, 2, 2, 2],
            "num_labels": 5,
        },
        images(32),
        attention=None,
    ),
    Architecture(
        "RegNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "groups_width": 4,
            "num_labels": 5,
        },
        images(16),
        attention=None,
    ),
    Architecture(
        "ResNetForImageClassification",
        {**_STAGES, "embedding_size": 8, "layer_type": "basic"},
        images(16),
    ),
    Architecture(
        "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 2],
            "decoder_hidden_size": 8,
            "num_labels": 5,
        },
        _segmented,
        attention=None,
    ),
    Architecture(
        "SiglipModel",
        {"text_config": {**_TEXT, "projection_size": 16}, "vision_config": VISION},
        _captions,
    ),
    Architecture("SwinForImageClassification", _SWIN, images(16)),
    Architecture("Swinv2ForImageClassification", _SWIN, images(16)),
    Architecture("ViTForImageClassification", VISION, images(8)),
    Architecture("ViTMSNForImageClassification", VISION, images(8)),
)
