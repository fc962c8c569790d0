"""Supervised fine-tuning of a tiny model with trl's SFTTrainer, on a tokenizer made here."""

import argparse
import tempfile

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["llama", "gpt2"])
parser.add_argument("--lora", action="store_true")
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
small = {"vocab_size": len(vocabulary), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
if args.model == "llama":
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, **small
    )
    model, targets = transformers.LlamaForCausalLM(config), ["q_proj", "v_proj"]
else:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **small)
    model, targets = transformers.GPT2LMHeadModel(config), ["c_attn"]
lora = None
if args.lora:
    import peft

    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, fan_in_fan_out=args.model == "gpt2")

lengths = torch.randint(2, 12, (16,)).tolist()
texts = [" ".join(words[i] for i in torch.randint(0, 30, (length,))) for length in lengths]
with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
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
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=lora,
    )
    trainer.train()
