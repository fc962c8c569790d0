"""Preference pairs trained by trl's DPOTrainer or RewardTrainer on a tiny model, with a tokenizer made here."""

import argparse
import copy
import tempfile

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

parser = argparse.ArgumentParser()
parser.add_argument("trainer", choices=["dpo", "reward"])
parser.add_argument("--rows", type=int, default=16)
args = parser.parse_args()

transformers.set_seed(0)
transformers.utils.logging.set_verbosity_error()
words = [f"w{i}" for i in range(30)]
vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)
config = transformers.LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_labels=1,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
if args.trainer == "dpo":
    model, kind, settings = transformers.LlamaForCausalLM(config), trl.DPOTrainer, trl.DPOConfig
    reference = {"ref_model": copy.deepcopy(model)}
else:
    model, kind, settings = transformers.LlamaForSequenceClassification(config), trl.RewardTrainer, trl.RewardConfig
    reference = {}


def texts():
    lengths = torch.randint(2, 12, (args.rows,)).tolist()
    return [" ".join(words[i] for i in torch.randint(0, 30, (length,))) for length in lengths]


with tempfile.TemporaryDirectory() as folder:
    trainer = kind(
        model=model,
        args=settings(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=1e-3,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": texts(), "chosen": texts(), "rejected": texts()}),
        processing_class=tokenizer,
        **reference,
    )
    trainer.train()
