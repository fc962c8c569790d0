"""Ordinary training scripts of several libraries: name -> text, in which each $NAME is one of the
shared pieces.
"""

from __future__ import annotations

from string import Template

SHARED = {
    "PARSER": "import argparse\nparser = argparse.ArgumentParser()",
    "LLAMA": """\
if args.model == "llama":
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, **small
    )
    model, targets = transformers.LlamaForCausalLM(config), ["q_proj", "v_proj"]""",
    "GPT2": """\
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **small)
    model, targets = transformers.GPT2LMHeadModel(config), ["c_attn"]""",
    "ARGUMENTS": """\
output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=1e-3,
            use_cpu=True,""",
    "QUIET": 'report_to="none", save_strategy="no", disable_tqdm=True, logging_strategy="no",',
}
TEMPLATES = {
    # A classifier trained with Accelerate's `accumulate()`, as its guide prints it.
    "accelerate_loop": """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
$PARSER
parser.add_argument("--samples", type=int, default=32)
args = parser.parse_args()
torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
dataset = TensorDataset(torch.randn(args.samples, 10), torch.randint(0, 3, (args.samples,)))
model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
loader = DataLoader(dataset, batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
loss_function = torch.nn.CrossEntropyLoss()
for _ in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = loss_function(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
""",
    # A causal language model trained by the recipe of Accelerate's guide for samples of variable
    # size.
    "accelerate_recipe": """\
import contextlib
import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader
$PARSER
parser.add_argument("--as-printed", action="store_true", help="count the first label of each row, too")
args = parser.parse_args()
steps = 4
accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True)
transformers.set_seed(0)
config = transformers.LlamaConfig(
    vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
model = transformers.LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = [torch.randint(3, 40, (int(length),)) for length in torch.randint(3, 12, (24,))]
def collate(batch):
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(row) for row in batch], batch_first=True)
    ids, labels = (pad(batch, batch_first=True, padding_value=value) for value in (0, -100))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2, collate_fn=collate))
criterion = torch.nn.CrossEntropyLoss(reduction="sum")
batches = list(loader)
for start in range(0, len(batches), steps):
    window = batches[start : start + steps]
    labels = [batch["labels"] if args.as_printed else batch["labels"][..., 1:] for batch in window]
    count = accelerator.gather(sum(label.ne(-100).sum() for label in labels)).sum().item()
    for index, batch in enumerate(window):
        waits = index < len(window) - 1 and accelerator.num_processes > 1
        with model.no_sync() if waits else contextlib.nullcontext():
            targets = batch.pop("labels")[:, 1:]
            logits = model(**batch).logits[:, :-1]
            loss = criterion(logits.flatten(0, 1), targets.flatten())
            accelerator.backward(loss * steps * accelerator.num_processes / count)
    optimizer.step()
    optimizer.zero_grad()
""",
    # Sequences of unequal lengths trained with Lightning's Fabric: the loop counts the targets of
    # all processes itself.
    "fabric_loop": """\
import os
import torch
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.utils.data import DataLoader
$PARSER
parser.add_argument("--own-count", action="store_true", help="divide by the targets of this process alone")
args = parser.parse_args()
fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
fabric.launch()
fabric.seed_everything(0, verbose=False)
model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 20))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
rows = [torch.randint(0, 20, (int(length),)) for length in torch.randint(2, 12, (32,))]
def collate(batch):
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    return ids, torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=2, collate_fn=collate))
for _ in range(2):
    batches = list(loader)
    for start in range(0, len(batches), 3):
        window = batches[start : start + 3]
        count = sum((labels[:, 1:] != -100).sum() for _, labels in window)
        if not args.own_count:
            count = fabric.all_reduce(count, reduce_op="sum") / fabric.world_size
        for index, (ids, labels) in enumerate(window):
            with fabric.no_backward_sync(model, enabled=index < len(window) - 1):
                logits = model(ids)[:, :-1].flatten(0, 1)
                loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
                fabric.backward(loss / count)
        optimizer.step()
        optimizer.zero_grad()
""",
    # A classifier trained by ignite's supervised trainer, whose windows run on from one epoch into
    # the next.
    "ignite_trainer": """\
import torch
from ignite.engine import create_supervised_trainer
from torch.utils.data import DataLoader, TensorDataset
$PARSER
parser.add_argument("--batches", type=int, default=8)
parser.add_argument("--unequal", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = 4 * args.batches - (3 if args.unequal else 0)
loader = DataLoader(TensorDataset(torch.randn(rows, 6), torch.randint(0, 3, (rows,))), batch_size=4)
trainer = create_supervised_trainer(model, optimizer, torch.nn.CrossEntropyLoss(), gradient_accumulation_steps=4)
trainer.run(loader, max_epochs=2)
""",
    # A classifier trained by keras on torch with `gradient_accumulation_steps`; its optimizer is
    # keras's own.
    "keras_fit": """\
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch
torch.manual_seed(0)
model = keras.Sequential([keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)])
optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(torch.randn(32, 6), torch.randint(0, 3, (32,)), batch_size=4, epochs=2, verbose=0)
""",
    # A regression trained by Lightning's Trainer with `accumulate_grad_batches`, a validation loop
    # and clipping.
    "lightning_trainer": """\
import logging
import os
import warnings
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset
$PARSER
parser.add_argument("--batches", type=int, default=8)
args = parser.parse_args()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(x), y))
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
lightning.seed_everything(0, verbose=False)
x = torch.randn(4 * args.batches, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
trainer = lightning.Trainer(
    max_epochs=2,
    accumulate_grad_batches=4,
    gradient_clip_val=0.5,
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4))
""",
    # Image classification with smoothed labels, an exponential average of the weights and a short
    # last window. The loop is that of timm's train.py since its commit df81d8d8, rewritten. With
    # `--repaired` the last window changes what the loss is divided by, but not when a step is due.
    "timm_like": """\
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
$PARSER
parser.add_argument("--batches", type=int, default=7)
parser.add_argument("--grad-accum-steps", type=int, default=4)
parser.add_argument("--repaired", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
)
model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
train_loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
loader = [(torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))) for _ in range(args.batches)]
def train_one_epoch():
    divisor = modulus = args.grad_accum_steps
    last_window = len(loader) % divisor
    short_from = len(loader) - last_window
    model.train()
    optimizer.zero_grad()
    for batch_idx, (images, target) in enumerate(loader):
        need_update = batch_idx == len(loader) - 1 or (batch_idx + 1) % modulus == 0
        if batch_idx >= short_from:
            divisor = last_window
            if not args.repaired:
                modulus = last_window
        loss = train_loss_fn(model(images), target) / divisor
        loss.backward()
        if not need_update:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model_ema.update_parameters(model)
for _ in range(2):
    train_one_epoch()
""",
    # A classifier trained by torchtnt's AutoUnit with `gradient_accumulation_steps`.
    "torchtnt_unit": """\
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.train import train
$PARSER
parser.add_argument("--batches", type=int, default=8)
args = parser.parse_args()
class Unit(AutoUnit):
    def compute_loss(self, state, data):
        x, y = data
        outputs = self.module(x)
        return torch.nn.functional.cross_entropy(outputs, y), outputs
    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.SGD(module.parameters(), lr=0.1), None
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
rows = 4 * args.batches
loader = DataLoader(TensorDataset(torch.randn(rows, 6), torch.randint(0, 3, (rows,))), batch_size=4)
unit = Unit(module=model, device=torch.device("cpu"), gradient_accumulation_steps=4)
train(unit, loader, max_epochs=2)
""",
    # Tiny models of transformers, trained by its Trainer on rows of unequal lengths, padded by a
    # collator of one's own.
    "transformers_trainer": """\
import tempfile
import torch
import transformers
from transformers import Trainer, TrainingArguments
$PARSER
parser.add_argument("model", choices=["llama", "gpt2", "bert"])
parser.add_argument("--lora", action="store_true")
parser.add_argument("--left", action="store_true", help="pad on the left")
parser.add_argument("--rows", type=int, default=16)
parser.add_argument("--own-count", action="store_true", help="divide by the targets of this process alone")
args = parser.parse_args()
transformers.set_seed(0)
transformers.utils.logging.set_verbosity_error()
small = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
$LLAMA
elif args.model == "gpt2":
$GPT2
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
            $ARGUMENTS
            average_tokens_across_devices=not args.own_count,
            $QUIET
        ),
        train_dataset=dataset,
        data_collator=collate,
    )
    trainer.train()
""",
    # A tiny model, with a tokenizer made here, trained by a trainer of trl: SFTTrainer, DPOTrainer
    # or RewardTrainer.
    "trl_trainer": """\
import copy
import tempfile
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
$PARSER
parser.add_argument("trainer", choices=["sft", "dpo", "reward"])
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
$LLAMA
else:
$GPT2
def texts():
    lengths = torch.randint(2, 12, (16,)).tolist()
    return [" ".join(words[i] for i in torch.randint(0, 30, (length,))) for length in lengths]
pairs = {"prompt": texts(), "chosen": texts(), "rejected": texts()}
if args.trainer == "sft":
    import peft
    pairs = {"text": texts()}
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, fan_in_fan_out=args.model == "gpt2")
    kind, settings, others = trl.SFTTrainer, trl.SFTConfig, {"peft_config": lora if args.lora else None}
elif args.trainer == "dpo":
    kind, settings, others = trl.DPOTrainer, trl.DPOConfig, {"ref_model": copy.deepcopy(model)}
else:
    config.num_labels = 1
    model = transformers.LlamaForSequenceClassification(config)
    kind, settings, others = trl.RewardTrainer, trl.RewardConfig, {}
with tempfile.TemporaryDirectory() as folder:
    trainer = kind(
        model=model,
        args=settings(
            $ARGUMENTS
            bf16=False,
            $QUIET
        ),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
        **others,
    )
    trainer.train()
""",
}
TRAINERS = {name: Template(text).substitute(SHARED) for name, text in TEMPLATES.items()}
