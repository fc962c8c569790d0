"""Trainers of trl and sentence-transformers as loops in one line each, with a Problem for each."""

from __future__ import annotations

import sentence_transformers
import torch
import transformers
import trl
from datasets import Dataset
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import gradcheck_suite
from gradcheck_suite import Problem
from gradcheck_suite.loops.trainers.models import VOCABULARY, llama, padded_ids, seeded_model

TOKENIZER = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")),
    pad_token="w0",
    eos_token="w1",
)
ROWS = Dataset.from_dict({"input_ids": [[2, 3]]})
SFT = llama()
sft = gradcheck_suite.transformers_loop(
    trl.SFTTrainer, train_dataset=ROWS, processing_class=TOKENIZER
)


def pairs(items, seed):
    """Return a chosen and a rejected row for each item."""
    generator = torch.Generator().manual_seed(seed)
    both = [padded_ids(items, generator) for _ in range(2)]
    return {
        "ids": torch.stack([ids for ids, _ in both], 1),
        "tokens": torch.stack([t for _, t in both], 1),
    }


def both(batch):
    """Return the chosen rows, then the rejected ones, as trl's collators do."""
    ids, tokens = (torch.cat([batch[name][:, 0], batch[name][:, 1]]) for name in ("ids", "tokens"))
    return {"input_ids": ids, "attention_mask": tokens.long(), "completion_mask": tokens.long()}


def _rewarding():
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
    }
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(
            num_attention_heads=2, num_labels=1, initializer_range=0.5, pad_token_id=0, **sizes
        )
    )


def reward_loss(model, batch):
    rows = both(batch)
    chosen, rejected = (
        model(rows["input_ids"], attention_mask=rows["attention_mask"]).logits[:, 0].chunk(2)
    )
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


REWARD = Problem(seeded_model(_rewarding), pairs, reward_loss)
reward = gradcheck_suite.transformers_loop(
    trl.RewardTrainer,
    inputs=lambda batch: {
        name: rows for name, rows in both(batch).items() if name != "completion_mask"
    },
    train_dataset=Dataset.from_dict({"chosen_ids": [[2, 3]], "rejected_ids": [[3, 2]]}),
    processing_class=TOKENIZER,
)


class Embedder(torch.nn.Module):
    """The mean of a row's embeddings, as the one module of a SentenceTransformer."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 8)

    def tokenize(self, texts):
        """Return nothing."""
        return {}  # the rows are numbers already

    def forward(self, features, **_):
        """Add a row's embedding."""
        weights = features["attention_mask"].unsqueeze(-1)
        features["sentence_embedding"] = (self.embed(features["input_ids"]) * weights).sum(
            1
        ) / weights.sum(1)
        return features


def similar(items, seed):
    """Return pairs of rows with a similarity."""
    generator = torch.Generator().manual_seed(seed + 1)
    return pairs(items, seed) | {"label": torch.rand(items, generator=generator)}


def columns(batch):
    """Return what sentence-transformers' collator makes of pairs."""
    named = {"input_ids": batch["ids"], "attention_mask": batch["tokens"].long()}
    return {
        f"{side}_{name}": v[:, i] for i, side in enumerate("ab") for name, v in named.items()
    } | {"label": batch["label"]}


def similarity_loss(model, batch):
    rows = columns(batch)
    one, two = (
        model({name: rows[f"{side}_{name}"] for name in ("input_ids", "attention_mask")})[
            "sentence_embedding"
        ]
        for side in "ab"
    )
    return torch.nn.functional.mse_loss(torch.cosine_similarity(one, two), batch["label"])


SENTENCES = Problem(
    seeded_model(
        lambda: sentence_transformers.SentenceTransformer(modules=[Embedder()], device="cpu")
    ),
    similar,
    similarity_loss,
)
sentences = gradcheck_suite.transformers_loop(
    sentence_transformers.SentenceTransformerTrainer,
    inputs=columns,
    train_dataset=Dataset.from_dict({"a": ["w2"], "b": ["w3"], "label": [1.0]}),
    loss=CosineSimilarityLoss,
    data_collator=lambda rows: rows,
)
