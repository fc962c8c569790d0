"""Models of transformers that trainers are asked about.

Imports transformers: import it where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import transformers

from gradcheck_suite.core.contract import Problem

# Models of transformers, tiny and with random weights, each a problem by the name of its class.
#
# gradcheck-suite verify hf-trainer --problem gradcheck_suite.loops.trainers.models:BertForMaskedLM
#
# Whether a trainer's gradient is right depends on how the model's loss uses `num_items_in_batch`.


Batch = dict[str, torch.Tensor]
VOCABULARY = 13
LONGEST = 6
CLASSES = 3
PIXELS = 8
IGNORED = -100
"""What transformers' losses take for no target."""
ATTENTION = "eager"
"""Old versions build the other implementations' masks in float32, too narrow for a float64 run."""
SPREAD = 0.5
"""Standard deviation of the weights: large, so that the losses of rows differ as those of a trained model do."""
SMOOTHING = 0.1
"""Share of each target that `smoothed_loss` spreads over the vocabulary."""


def padded_ids(
    items: int, generator: torch.Generator, shortest: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (items, `LONGEST`) token ids, padded on the right with 0, and which of them are no
    padding.
    """
    ids = torch.randint(
        3,
        VOCABULARY,
        (items, LONGEST),
        generator=generator,
    )
    is_token = torch.arange(LONGEST) < torch.randint(
        shortest, LONGEST + 1, (items, 1), generator=generator
    )
    return torch.where(is_token, ids, 0), is_token


def next_tokens(batch: Batch) -> torch.Tensor:
    """Return how many targets a causal language model's mean divides by: the first token of a row
    is no target.
    """
    return (batch["labels"][:, 1:] != IGNORED).sum()


def own_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss that the model computes from its labels."""
    return model(**batch).loss


def seeded_model(make: Callable[[], torch.nn.Module]) -> Callable[[int], torch.nn.Module]:
    """Return a function of a seed that makes the model with weights drawn from it."""

    def model(seed: int) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return model


def smoothed_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy with `SMOOTHING` of each target spread evenly over the
    vocabulary.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCABULARY),
        targets.reshape(-1),
        ignore_index=IGNORED,
        label_smoothing=SMOOTHING,
    )


def _text(items: int, seed: int, label: Callable[..., torch.Tensor], shortest: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids, is_token = padded_ids(items, generator, shortest)
    return {
        "input_ids": ids,
        "attention_mask": is_token.long(),
        "labels": label(ids, is_token, generator),
    }


def _every_token(items: int, seed: int) -> Batch:
    return _text(items, seed, lambda ids, is_token, _: torch.where(is_token, ids, IGNORED))


def _some_tokens(items: int, seed: int) -> Batch:
    def label(
        ids: torch.Tensor, is_token: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        chosen = is_token & (torch.rand(ids.shape, generator=generator) < 0.6)
        chosen[:, 0] = True  # every row has a target
        return torch.where(chosen, ids, IGNORED)

    return _text(items, seed, label)


def _class_of_tokens(items: int, seed: int) -> Batch:
    def label(
        ids: torch.Tensor, is_token: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        return torch.where(
            is_token, torch.randint(0, CLASSES, ids.shape, generator=generator), IGNORED
        )

    return _text(items, seed, label)


def _class_of_row(items: int, seed: int) -> Batch:
    # without padding, which only some of these models take into account
    return _text(
        items,
        seed,
        lambda ids, is_token, g: torch.randint(0, CLASSES, (len(ids),), generator=g),
        LONGEST,
    )


def _class_of_image(items: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(
        items,
        3,
        PIXELS,
        PIXELS,
        generator=generator,
        dtype=torch.float64,
    )
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, CLASSES, (items,), generator=generator),
    }


def _not_ignored(batch: Batch) -> torch.Tensor:
    return (batch["labels"] != IGNORED).sum()


@dataclass(frozen=True)
class _Task:
    """What the models of one task are trained on.

    Attributes:
        batch: (items, seed) -> a batch.
        count: what the model's mean divides by; the number of items if None.
        models: first part of a model's class name -> settings of its configuration.
        settings: settings of every model's configuration.
    """

    batch: Callable[[int, int], Batch]
    count: Callable[[Batch], torch.Tensor] | None
    models: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 20,
    "attn_implementation": ATTENTION,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": SPREAD,
}
_DROPOUTS = (
    "hidden_dropout_prob attention_probs_dropout_prob classifier_dropout_prob hidden_dropout"
    " attention_dropout dropout activation_dropout classifier_dropout attn_pdrop resid_pdrop"
    " embd_pdrop dropout_rate seq_classif_dropout summary_first_dropout embedding_dropout"
    " embed_dropout encoder_layerdrop decoder_layerdrop"
)
_GPT = {"n_positions": 20, "n_embd": 8, "n_layer": 1, "n_head": 2}
_T5 = {
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_BART = {
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "decoder_start_token_id": 1,
}
_DISTILBERT = {"dim": 8, "hidden_dim": 12, "n_layers": 1, "n_heads": 2}
_ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {},
    "DistilBert": _DISTILBERT,
    "Electra": {"embedding_size": 8},
    "ModernBert": {"global_attn_every_n_layers": 1, "local_attention": 4},
}
_DECODERS: dict[str, dict[str, Any]] = {"Llama": {}, "Qwen2": {}, "GPT2": _GPT, "GPTNeoX": {}}
_CLASSES = {"num_labels": CLASSES}
_IMAGE = {"image_size": PIXELS, "patch_size": 4}
TASKS: dict[str, _Task] = {
    "ForCausalLM": _Task(
        _every_token,
        next_tokens,
        {"Llama": {}, "Mistral": {}, "Qwen2": {}, "GPTNeoX": {}, "Bloom": {**_GPT}},
    ),
    "LMHeadModel": _Task(
        _every_token,
        next_tokens,
        {
            "GPT2": _GPT,
            "OpenAIGPT": {**_GPT, "afn": "gelu"},
            "CTRL": {**_GPT, "dff": 12},
            "Bert": {"is_decoder": True},
        },
    ),
    "ForMaskedLM": _Task(_some_tokens, _not_ignored, _ENCODERS),
    "ForConditionalGeneration": _Task(
        _every_token, _not_ignored, {"T5": _T5, "MT5": _T5, "Bart": _BART, "Pegasus": _BART}
    ),
    "ForSequenceClassification": _Task(_class_of_row, None, {**_ENCODERS, **_DECODERS}, _CLASSES),
    "ForTokenClassification": _Task(
        _class_of_tokens, _not_ignored, {**_ENCODERS, **_DECODERS}, _CLASSES
    ),
    "ForImageClassification": _Task(
        _class_of_image,
        None,
        {
            "ViT": _IMAGE,
            "Dinov2": _IMAGE,
            "ConvNext": {"hidden_sizes": [8], "depths": [1], "patch_size": 4, "num_stages": 1},
        },
        _CLASSES,
    ),
}
"""Last part of a model's class name -> its task."""
NAMES = tuple(
    chain.from_iterable([model + name for model in task.models] for name, task in TASKS.items())
)
"""The class names of the models; each is an attribute of this module, a function that returns the problem."""


def _problem(name: str) -> Problem:
    suffix = next(suffix for suffix in TASKS if name.endswith(suffix))
    task = TASKS[suffix]
    model = name.removesuffix(suffix)
    settings = {
        **_COMMON,
        **dict.fromkeys(_DROPOUTS.split(), 0.0),
        **task.models[model],
        **task.settings,
    }
    make = getattr(transformers, name)
    config = getattr(transformers, f"{model}Config")
    return Problem(
        seeded_model(lambda: make(config(**settings))),
        task.batch,
        own_loss,
        count=task.count,
    )


def gpt2() -> Problem:
    """A causal language model with absolute positions and tied embeddings, on padded rows."""
    return _problem("GPT2LMHeadModel")


def llama() -> Problem:
    """A causal language model with rotary positions and gated layers, on padded rows."""
    return _problem("LlamaForCausalLM")


def llama_smoothed() -> Problem:
    """The same as `llama` with the smoothed loss that
    `TrainingArguments(label_smoothing_factor=0.1)` asks for.
    """
    return replace(llama(), loss=smoothed_loss)


def __getattr__(name: str) -> Callable[[], Problem]:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: _problem(name)
