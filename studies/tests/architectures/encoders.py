"""Language models that fill in or classify text, and those that turn one text into another."""

from __future__ import annotations

from studies.tests.architectures.model import (
    SMALL,
    SPECIAL,
    VOCABULARY,
    Architecture,
    classified_text,
    pairs,
    text,
    whole_text,
)

_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
    **SPECIAL,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_DEBERTA = {
    **SMALL,
    "pad_token_id": 0,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "num_labels": 5,
}

KIND = "language, encoder"
ARCHITECTURES = (
    Architecture("AlbertForMaskedLM", {**SMALL, "embedding_size": 8}, text),
    Architecture("BartForConditionalGeneration", _BART, pairs),
    Architecture("BertForMaskedLM", SMALL, text),
    Architecture("CamembertForMaskedLM", {**SMALL, "pad_token_id": 0}, text),
    Architecture(
        "ConvBertForMaskedLM", {**SMALL, "embedding_size": 16, "conv_kernel_size": 3}, text
    ),
    Architecture("DebertaForMaskedLM", _DEBERTA, text),
    Architecture("DebertaV2ForMaskedLM", {**_DEBERTA, "position_buckets": 8}, text),
    Architecture(
        "DebertaV2ForSequenceClassification",
        {**_DEBERTA, "position_buckets": 8},
        classified_text,
        refused=r"label_index\.size\(0\) > 0",
    ),
    Architecture(
        "DistilBertForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 32,
        },
        text,
    ),
    Architecture("ElectraForMaskedLM", {**SMALL, "embedding_size": 8}, text),
    Architecture("FNetForMaskedLM", SMALL, whole_text),
    Architecture("LayoutLMForMaskedLM", SMALL, text),
    Architecture("M2M100ForConditionalGeneration", _BART, pairs),
    Architecture("MarianMTModel", _BART, pairs),
    Architecture("MPNetForMaskedLM", SMALL, text),
    Architecture("ModernBertForMaskedLM", {**SMALL, "pad_token_id": 0, "local_attention": 4}, text),
    Architecture(
        "NystromformerForMaskedLM", {**SMALL, "num_landmarks": 7, "segment_means_seq_len": 7}, text
    ),
    Architecture("PegasusForConditionalGeneration", _BART, pairs),
    Architecture("RobertaForMaskedLM", {**SMALL, "pad_token_id": 0}, text),
    Architecture("SqueezeBertForMaskedLM", {**SMALL, "embedding_size": 16}, text),
    Architecture("T5ForConditionalGeneration", _T5, pairs),
    Architecture("UMT5ForConditionalGeneration", _T5, pairs),
    Architecture(
        "XLNetLMHeadModel",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24},
        whole_text,
    ),
)
