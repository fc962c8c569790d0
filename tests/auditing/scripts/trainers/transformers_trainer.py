"""Tiny models of transformers, trained by its Trainer on rows of unequal lengths, padded by a collator of one's own."""

import argparse
import tempfile

import torch
import transformers
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["llama", "gpt2", "bert"])
parser.add_argument("--lora", action="store_true")
parser.add_argument("--left", action="store_true", help="pad on the left")
parser.add_argument("--rows", type=int, default=16)
parser.add_argument("--own-count", action="store_true", help="divide by the targets of this process alone")
args = parser.parse_args()

transformers.set_seed(0)
transformers.utils.logging.set_verbosity_error()
small = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
if args.model == "llama":
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, **small
    )
    model, targets = transformers.LlamaForCausalLM(config), ["q_proj", "v_proj"]
elif args.model == "gpt2":
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **small)
    model, targets = transformers.GPT2LMHeadModel(config), ["c_attn"]
else:
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=3, vocab_size=40
    )
    model, targets = transformers.BertForSequenceClassification(config), ["query", "value"]
if args.lora:
    import peft

    task = "SEQ_CLS" if args.model == "bert" else "CAUSAL_LM"
    fan = {"fan_in_fan_out": args.model == "gpt2"}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=4, target_modules=targets, **fan))


def pad(ids, value, length):
    filling = torch.full((length - len(ids),), value)
    return torch.cat([filling, ids] if args.left else [ids, filling])


def collate(rows):
    length = max(len(row["input_ids"]) for row in rows)
    batch = {
        "input_ids": torch.stack([pad(row["input_ids"], 0, length) for row in rows]),
        "attention_mask": torch.stack([pad(torch.ones_like(row["input_ids"]), 0, length) for row in rows]),
    }
    if args.model == "bert":
        batch["labels"] = torch.stack([row["labels"] for row in rows])
    else:
        batch["labels"] = torch.stack([pad(row["input_ids"], -100, length) for row in rows])
    return batch


dataset = [
    {"input_ids": torch.randint(3, 40, (int(length),)), "labels": torch.randint(0, 3, ())}
    for length in torch.randint(3, 12, (args.rows,))
]
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=1e-3,
            use_cpu=True,
            average_tokens_across_devices=not args.own_count,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        ),
        train_dataset=dataset,
        data_collator=collate,
    )
    trainer.train()
