"""Training scripts, sound and faulty, and what an audit says of each: one entry of a table each.

An entry says what differs from the plain loop below, or gives a `text` in its place. `write` makes
files of them, with `toy.py` beside each; so does `python -m tests.auditing.scripts FOLDER`. Their
first argument is a dtype.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from tests.auditing.trainer_scripts import TRAINERS

TOY = Path(__file__).with_name("toy.py")


@dataclass(frozen=True)
class Script:
    """A training script.

    Attributes:
        text: the script.
        verdict: of its audit.
        said: the diagnoses that it gets, in order; of one that cannot be judged, a part of the
            reason.
    """

    text: str
    verdict: str
    said: tuple[str, ...] = ()


def _training(  # noqa: PLR0913 - every piece of a script may differ
    windows: str = "*[4] * 8",
    *,
    before: str = "",
    model: str = "toy.classifier()",
    optimizer: str = "torch.optim.SGD(model.parameters(), lr=0.1)",
    setup: str = "",
    start: str = "",
    batch: str = "x, y in window",
    first: str = "",
    autocast: bool = True,
    loss: str = "loss = F.cross_entropy(model(x), y) / len(window)",
    backward: str = "loss.backward()",
    after: str = "",
    then: str = "",
    step: str = "optimizer.step()\noptimizer.zero_grad()",
    text: str = "",
    tail: str = "",
) -> str:
    """Return a script: `windows` are the sizes of the micro-batches or the head of a loop, the rest
    are statements.
    """
    windows = windows if " in " in windows else f"window in toy.windows({windows})"
    computed = f"with toy.autocast():\n{indent(loss.strip(), '    ')}" if autocast else loss
    of_batch = [first, computed, backward, after]
    of_window = [
        start,
        f"for {batch}:",
        *(indent(part.strip(), "    ") for part in of_batch),
        then,
        step,
    ]
    loop = [f"for {windows}:", *(indent(part.strip("\n"), "    ") for part in of_window)]
    made = [f"model = {model}", f"optimizer = {optimizer}"] if model else []
    parts = [before, *made, setup, *([text] if text else loop), tail]
    body = "\n".join(part.strip("\n") for part in parts if part.strip())
    return f"import torch\nimport torch.nn.functional as F\nimport toy\n\n{body}\n"


def sound(*windows: str, **pieces) -> Script:
    return Script(_training(*windows, **pieces), "holds")


def faulty(diagnosis: str | tuple[str, ...], *windows: str, **pieces) -> Script:
    said = (diagnosis,) if isinstance(diagnosis, str) else diagnosis
    return Script(_training(*windows, **pieces), "violated", said)


def unjudged(reason: str, *windows: str, **pieces) -> Script:
    return Script(_training(*windows, **pieces), "unjudged", (reason,))


def _scheduled(start: str = "", divisor: str = "accumulate", batches: int = 10) -> dict[str, str]:
    """Return the pieces of a script whose windows get longer from step to step, as in the warm-up
    of yolov5.
    """
    return {
        "setup": "number, last, accumulate = 0, 0, 1",
        "text": f"""
for epoch in range(3):
{start}    for x, y in toy.batches(*[4] * {batches}):
        number += 1
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / {divisor}
        loss.backward()
        if number - last >= accumulate:
            optimizer.step()
            optimizer.zero_grad()
            last, accumulate = number, min(4, 1 + number // 5)""",
    }


def _tasks(passes: str, divisor: str) -> dict[str, str]:
    """Return the pieces of a script whose passes, pairs of a task and a number of items, share a
    body.
    """
    return {
        "model": "torch.nn.ModuleList(torch.nn.Linear(i, o, dtype=toy.dtype()) for i, o in [(4, 8), (8, 1), (8, 2)])",
        "text": f"""
for epoch in range(4):
    for task, n in ({passes}):
        x = torch.randn(n, 4, dtype=toy.dtype())
        with toy.autocast():
            loss = F.mse_loss(model[1 + task](torch.tanh(model[0](x))), x[:, : task + 1])
        (loss / {divisor}).backward()
    optimizer.step()
    optimizer.zero_grad()""",
    }


def _function(name: str, arguments: str, forward: str, backward: str = "return gradient") -> str:
    """Return a custom function; the statements of its methods are parted by `; `."""
    bodies = [indent(code.replace("; ", "\n"), " " * 8) for code in (forward, backward)]
    return (
        f"class {name}(torch.autograd.Function):\n"
        f"    @staticmethod\n    def forward(ctx, {arguments}):\n{bodies[0]}\n"
        f"    @staticmethod\n    def backward(ctx, gradient):\n{bodies[1]}\n"
    )


def _model(forward: str, more: str = "", bias: str = "") -> str:
    """Return a model of a body and a head."""
    return f"""class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = toy.classifier(8), torch.nn.Linear(8, 3{bias}).to(toy.dtype()){more}
    def forward(self, x):
        {forward}"""


CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)"
DIVIDED_BACKWARD = "(loss / len(window)).backward()"
UNDIVIDED = "loss = F.cross_entropy(model(x), y)"
QUARTER = "(loss / 4).backward()"
NUMBERED, INDEXED = "number, (x, y) in enumerate(window)", "index, (x, y) in enumerate(window)"
TOTAL, COUNT = "total = sum(len(y) for _, y in window)", "count = sum(len(y) for _, y in window)"
RESET, NO_RESET = "optimizer.zero_grad()", "optimizer.step()"
UNEQUAL = "4, 2, 7, 1, 3, 3"
STEPPED_AT = """
for number, (x, y) in enumerate(data):
    with toy.autocast():
        loss = F.cross_entropy(model(x), y) / 4
    loss.backward()
    if (number + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()"""
GROWING = """
for length in (2, 2, 2, 4, 4, 4, 4, 4):
    for _ in range(length):
        x, y = next(data)
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()"""
TWICE = f"for _ in range(2):{indent(STEPPED_AT, '    ')}"
LAST_APART = """
for number, (x, y) in enumerate(data):
    with toy.autocast():
        loss = F.cross_entropy(model(x), y) / {divisor}
    if (number + 1) % 4 == 0 or number == 9:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:  # as under `no_sync`
        loss.backward()"""
DIVIDED = "for parameter in model.parameters():\n    parameter.grad /= len(window)"
SCALER_STEP = "scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()"
TWO_LOSSES = """
first = F.cross_entropy(model(x), y)
second = F.cross_entropy(model(-x), y.flip(0))
loss = (first + second) / 2"""
CLIPPED_AND_ADDED = """
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
for total, parameter in zip(sums, model.parameters(), strict=True):
    total += parameter.grad"""
SUMS_STEP = """
for total, parameter in zip(sums, model.parameters(), strict=True):
    parameter.grad = total
optimizer.step()"""
CHECKPOINTED = """
for reentrant in (False, True):
    for window in toy.windows(*[4] * 8):
        for x, y in window:
            with toy.autocast():
                x.requires_grad_()
                loss = checkpoint(lambda x, y: F.cross_entropy(model(x), y), x, y, use_reentrant=reentrant)
            (loss / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()"""
NOISY_STEP = """
for total, parameter in zip(sums, model.parameters(), strict=True):
    parameter.grad = total / len(window) + 0.1 * torch.randn_like(total)
optimizer.step()"""
BFLOAT16 = {
    "setup": "model = model.to(torch.bfloat16)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "autocast": False,
    "loss": "loss = F.cross_entropy(model(x.bfloat16()), y)",
}
OWN_BUFFER = {
    "start": "sums = [torch.zeros_like(parameter) for parameter in model.parameters()]",
    "first": RESET,
    "loss": UNDIVIDED,
}
EACH_LAYER = {
    "model": "",
    "setup": """
torch.manual_seed(0)
layers = torch.nn.ModuleList(torch.nn.Linear(5, 5).to(toy.dtype()) for _ in range(3))
optimizer = torch.optim.Adam(layers.parameters())""",
    "batch": "x, _ in window",
    "first": "hidden, loss = x, 0.0",
    "loss": """
for layer in layers:
    hidden = torch.tanh(layer(hidden))
    loss = loss + F.mse_loss(hidden, x)""",
    "backward": DIVIDED_BACKWARD,
}
BODY_AND_HEAD = {
    "model": "",
    "setup": """
body, head = toy.classifier(8), torch.nn.Linear(8, 3, bias=False).to(toy.dtype())
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)""",
    "loss": "log_probabilities = toy.ChunkedLogProbFunction.apply(body(x), head.weight, y)",
}
WHOLE_WINDOW_IN_A_CLOSURE = """
for window in toy.windows(*[4] * {}):
    def closure(window=window):
        optimizer.zero_grad()
        for x, y in window:
            with toy.autocast():
                loss = F.cross_entropy(model(x), y) / len(window)
            loss.backward()
        return loss
    optimizer.step(closure)"""
PADDED = BODY_AND_HEAD | {
    "loss": "hidden = torch.cat([body(x), torch.zeros(2, 8, dtype=toy.dtype())])\n"
    "loss = F.cross_entropy(head(hidden)[:4], y)",
}
TIED = {
    "model": "",
    "setup": """
model = toy.classifier(5)
model[0].weight.requires_grad_(False)
tied = torch.nn.Linear(5, 8, bias=False).to(toy.dtype())
model[2].weight = torch.nn.Parameter(tied.weight.detach().T.clone())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])""",
    "loss": """
hidden = torch.tanh(model[0](x))
loss = F.cross_entropy(hidden @ model[2].weight.T + model(x), y) / len(window)""",
}
SCALED = (
    "toy.classifier()\nmodel.logit_scale = torch.nn.Parameter(torch.ones((), dtype=toy.dtype()))"
)
CONTRASTED = (
    "loss = F.cross_entropy(model.logit_scale * features @ features.T, torch.arange(len(features)))"
)
MIXUP = {
    "setup": "torch.manual_seed(2)",
    "first": "share, order = float(torch.rand(())), torch.randperm(len(x))",
}
TABLE = {
    "setup": """
table = torch.nn.Embedding(7, 5, sparse=True).to(toy.dtype())
rows = torch.optim.SparseAdam(table.parameters())""",
    "batch": "_, y in window",
    "loss": "loss = F.cross_entropy(model(table(y)), y) / len(window)",
}
SPARSE_ALONE = {
    "model": "torch.nn.Sequential(torch.nn.Embedding(3, 3, sparse=True), torch.nn.Dropout(0.5)).to(toy.dtype())",
    "batch": "index, (_, y) in enumerate(window)",
    "loss": "loss = F.cross_entropy(model(y), y) / len(window)",
}

# Losses of two tasks with weights that are learned, as by their uncertainty.
TASKS = {
    "windows": "window in toy.windows(4, 2, 7, 1, 3, 5, 2, 2)",
    "setup": """
s = torch.nn.Parameter(torch.tensor([0.3, -0.2], dtype=toy.dtype()))
optimizer.add_param_group({"params": [s]})""",
    "start": "total = sum(len(y) for _, y in window)",
    "loss": """
logits = model(x)
losses = torch.stack([F.cross_entropy(logits, y), logits.square().mean()])
loss = (torch.exp(-s) * losses + s).sum()""",
    "backward": "(loss * len(y) / total).backward()",
}

# A variational autoencoder: a summed reconstruction, a divergence with a coefficient, and the mean
# over the batch.
AUTOENCODER = {
    "model": "torch.nn.ModuleList([toy.classifier(4), torch.nn.Linear(2, 5).to(toy.dtype())])",
    "windows": "step, window in enumerate(toy.windows(*[4] * 16))",
    "first": "share = 1 / 4",
    "loss": """
mean, logarithm = model[0](x).chunk(2, 1)
decoded = model[1](mean + torch.randn_like(mean) * (logarithm / 2).exp())
divergence = -(1 + logarithm - mean.square() - logarithm.exp()).sum() / 2
loss = F.mse_loss(decoded, x, reduction="sum") + share * divergence""",
    "backward": "(loss / len(y) / len(window)).backward()",
}
# A detector: the loss of every query of an image, divided by the number of boxes, which varies from
# image to image.
BOXES = {
    "before": "import random\nrandom.seed(0)",
    "windows": "*[2] * 32",
    "start": "boxes = sum(random.randint(1, 3) for _, y in window for _ in y)",
    "loss": """
queries = F.binary_cross_entropy_with_logits(model(x), F.one_hot(y, 3).to(toy.dtype()), reduction="none")
loss = 2 * queries.mean(1).sum() / boxes""",
}

MASTERS = {
    "setup": """
masters = [p.detach().to(torch.promote_types(p.dtype, torch.float32)).requires_grad_() for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.1)""",
    "step": """
for master, p in zip(masters, model.parameters(), strict=True):
    master.grad, p.grad = p.grad.to(master.dtype) / 2, None
optimizer.step()
with torch.no_grad():
    for master, p in zip(masters, model.parameters(), strict=True):
        p.copy_(master)""",
}
# A recurrent tagger of sequences of 3 to 5 elements, packed.
PACKED = {
    "before": "from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence",
    "model": "torch.nn.ModuleList([torch.nn.GRU(1, 4, bidirectional=True), torch.nn.Linear(8, 2)]).to(toy.dtype())",
    "start": "total = sum(int((5 - y).sum()) for _, y in window)",
    "loss": """
packed = pack_padded_sequence(x.T[..., None], 5 - y, enforce_sorted=False)
hidden, _ = pad_packed_sequence(model[0](packed)[0], total_length=5)
tags = torch.where(torch.arange(5)[:, None] < 5 - y, (x.T > 0).long(), -100)
loss = F.cross_entropy(model[1](hidden).flatten(0, 1), tags.flatten(), reduction="sum")""",
}
UNFROZEN = {"windows": "*[4] * 12", "setup": "seen = 0"}
HELPER = """
data = iter(toy.batches(*[4] * 12))
def back():
    x, y = next(data)
    F.cross_entropy(model(x), y).backward()
def step():
    optimizer.step()
    optimizer.zero_grad()
"""
ON_ZEROS = {
    "step": "optimizer.step()\noptimizer.zero_grad(set_to_none=False)",
    "tail": "optimizer.step()",
}
DISTILLED = {
    "setup": "teacher = toy.classifier()",
    "start": "total = sum(len(y) for _, y in window)",
    "loss": """
logits = model(x)
soft = F.kl_div((logits / 2).log_softmax(1), (teacher(x) / 2).softmax(1).detach(), reduction="batchmean")
loss = soft * 2**2 * 0.5 + F.cross_entropy(logits, y) * 0.5""",
}
# A loss over some items of a micro-batch, as over active triplets; the third micro-batch has none.
ACTIVE = {
    "batch": INDEXED,
    "loss": """
active = (2, 1, 0, 2)[index]
each = F.cross_entropy(model(x), y, reduction="none")[:active]
loss = (each.mean() if active else each.sum())""",
}
# Two models, each of which is trained in a thread of its own.
THREADS = {
    "model": "",
    "setup": "import threading",
    "text": """
def train():
    model = toy.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in toy.windows(*[4] * {batches}):
        for x, y in window:
            with toy.autocast():
                loss = F.cross_entropy(model(x), y) / len(window)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    models.append(model)

models, threads = [], [threading.Thread(target=train) for _ in range(2)]
for thread in threads:
    thread.start()
    {then}
for thread in threads:
    thread.join()
model, other = models""",
}
SCRIPTED = (
    "import warnings\nwarnings.simplefilter('ignore')\n"
    "@torch.jit.script\ndef back(x: torch.Tensor):\n    x.backward()"
)

FLAT = {
    "setup": """
flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach().requires_grad_()
optimizer = torch.optim.SGD([flat], lr=0.1)""",
    "step": """
flat.grad = torch.cat([p.grad.flatten() for p in model.parameters()])
model.zero_grad()
optimizer.step()
with torch.no_grad():
    torch.nn.utils.vector_to_parameters(flat, model.parameters())""",
}

SCRIPTS = {
    # An evaluation swaps averaged weights in and puts the trained ones back one micro-batch too
    # late.
    "faulty_averaged_weights_left_in": faulty(
        "stale-parameters",
        setup="averaged = [p.detach() + 0.01 * torch.randn_like(p) for p in model.parameters()]",
        start="trained = [p.detach().clone() for p in model.parameters()]",
        batch=INDEXED,
        first="""
with torch.no_grad():
    for p, value in zip(model.parameters(), averaged if index == 1 else trained, strict=True):
        p.copy_(value)""",
    ),
    "faulty_backward_hook_normalizes": faulty(
        "not-linear",
        setup="model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / inputs[0].norm(),))",
    ),
    "faulty_bfloat16_never_reset": faulty(
        "stale-window",
        "*[4] * 40, steps=8",
        **BFLOAT16,
        backward="(loss / 8).backward()",
        step=NO_RESET,
    ),
    "faulty_checkpointed": faulty(
        "mean-of-means",
        setup="from torch.utils.checkpoint import checkpoint",
        text=CHECKPOINTED.replace("*[4] * 8", "4, 2, 7, 1"),
    ),
    "faulty_compiled_model": faulty(
        "mean-of-means",
        "4, 2, 7, 1, 3, 3, 2, 6",
        setup='compiled = torch.compile(model, backend="aot_eager")',
        loss="loss = F.cross_entropy(compiled(x), y) / len(window)",
    ),
    "finding_declared_denominator": sound(
        setup="""
def compute_loss(logits, labels, num_items_in_batch):
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch""",
        first="y[0] = -100",
        loss="loss = compute_loss(model(x), y, num_items_in_batch=sum(len(y) for _, y in window))",
    ),
    # Both losses divide by the items of their micro-batch, and the first has a factor of its own.
    "faulty_distilled": faulty(
        "mean-of-means", "4, 2, 7, 1, 3, 5, 2, 6", **DISTILLED, backward=DIVIDED_BACKWARD
    ),
    "faulty_frozen_and_thawed": faulty(
        "stale-window",
        "i, window in enumerate(toy.windows(*[4] * 16))",
        step="""
optimizer.step()
model[0].requires_grad_(i != 1)
for p in model.parameters():
    if p.requires_grad:
        p.grad = None  # the gradient that a frozen parameter has is left, and is there when it is thawed""",
    ),
    # A custom function whose backward does not multiply by the gradient that it receives.
    "faulty_function_ignores_its_gradient": faulty(
        "not-linear",
        before=_function(
            "Penalised", "hidden", "return hidden.clone()", "return gradient.sign() * 0.1"
        )
        + _model("return self.head(Penalised.apply(self.body(x)))"),
        model="Model()",
    ),
    # The head drops features, which the model returns beside a distribution.
    "faulty_features_and_evaluation_mode": faulty(
        "wrong-mode",
        before="from torch.distributions import Categorical\n"
        + _model(
            """hidden = self.body(x)
        return Categorical(logits=self.head(F.dropout(hidden, 0.5, self.training))), hidden"""
        ),
        model="Model()",
        batch=INDEXED,
        first="model.train(index < 2)",
        loss="loss = -model(x)[0].log_prob(y).mean() / len(window)",
    ),
    # A hook halves the gradient of one parameter after each micro-batch, and with it what is
    # accumulated already.
    "faulty_halved_after_each_micro_batch": faulty(
        "rescaled-accumulator",
        setup="""
def halve(parameter):
    with torch.no_grad():
        parameter.grad *= 0.5
model[0].weight.register_post_accumulate_grad_hook(halve)""",
    ),
    "faulty_hook_clamps": faulty(
        "not-linear",
        "*[4] * 12",
        setup="""
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))""",
    ),
    "faulty_left_in_evaluation_mode": faulty(
        "wrong-mode",
        model="torch.nn.Sequential(torch.nn.Dropout(0.5), *toy.classifier())",
        setup="held_out = toy.batches(6)[0][0]",
        start="model.train()",
        batch=INDEXED,
        after="""
if index == 1:
    model.eval()
    with torch.no_grad():
        model(held_out)""",
    ),
    "faulty_hook_set_again": faulty(
        "wrong-scale",
        "*[4] * 12",
        start="next(model.parameters()).register_hook(lambda gradient: gradient / 2)",
    ),
    # The scaler steps one optimizer, and forgets the other one.
    "faulty_left_scaled": faulty(
        "wrong-scale",
        setup="""
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
other = torch.optim.Adam(model[2].parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)""",
        backward="scaler.scale(loss).backward()",
        step=SCALER_STEP + "\nother.step()\nother.zero_grad()",
    ),
    "faulty_loss_of_each_layer": faulty("mean-of-means", UNEQUAL, **EACH_LAYER),
    "faulty_loss_scale_moves": faulty(
        "weighted-by-place",
        "*[4] * 12",
        setup='scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)',
        loss=UNDIVIDED,
        backward="scaler.scale(loss / 4).backward()\nscaler._scale *= 2",
        step=SCALER_STEP,
    ),
    # The optimizer steps on copies in float32, as mixed precision by hand does.
    "faulty_master_copies": faulty(
        "mean-of-means", UNEQUAL, **MASTERS, backward="(2 * loss).backward()"
    ),
    "faulty_master_copies_leak": faulty(
        "stale-window",
        **{
            **MASTERS,
            "step": MASTERS["step"].replace(", p.grad = p", " = p").replace("/ 2, None", "/ 2"),
        },
    ),
    "faulty_mean_of_means": faulty("mean-of-means", UNEQUAL, then=CLIP),
    "faulty_mean_of_means_auxiliary": faulty(
        "mean-of-means",
        batch=NUMBERED,
        loss="""
logits = model(x)
part = logits[: number + 1]
loss = F.cross_entropy(logits, y) + 0.1 * F.mse_loss(part, torch.zeros_like(part))""",
        backward=DIVIDED_BACKWARD,
    ),
    "sound_means_of_chunks": sound(
        "6, 4, 8, 2, 6, 6",
        start=TOTAL,
        loss="""
logits = model(x)
parts = list(zip(logits.split(3), y.split(3), strict=True))
loss = sum(F.cross_entropy(a, b) for a, b in parts) / len(parts)""",
        backward="(loss * len(y) / total).backward()",
    ),
    "faulty_mean_of_means_declared": faulty(
        "mean-of-means",
        UNEQUAL,
        setup="import gradcheck_suite",
        loss="loss = -model(x).log_softmax(1)[range(len(y)), y].mean()",
        backward="loss = gradcheck_suite.objective(loss, count=len(y))\n(loss / len(window)).backward()",
    ),
    "faulty_mean_of_means_class_weights": faulty(
        "mean-of-means",
        setup="weight = torch.tensor([0.2, 1.0, 3.0], dtype=toy.dtype())",
        loss="loss = F.nll_loss(model(x).log_softmax(1), y, weight=weight) / len(window)",
    ),
    "faulty_mean_of_means_ignored": faulty(
        "mean-of-means",
        "*[6] * 4",
        batch=NUMBERED,
        first="y[: number + 1] = -100",
        loss=UNDIVIDED,
        backward=QUARTER,
    ),
    "faulty_mean_of_means_log_probabilities": faulty(
        "mean-of-means",
        "4, 2, 7, 3, 3, 3, 2, 1",
        **BODY_AND_HEAD,
        backward="""
loss = -log_probabilities.masked_fill(y == 0, 0).sum() / max(int((y != 0).sum()), 1) / len(window)
loss.backward()""",
    ),
    "sound_means_in_one_backward": sound(
        text="""
for window in toy.windows(4, 2, 7, 1, 3, 3):
    with toy.autocast():
        losses = [F.cross_entropy(model(x), y) for x, y in window]
    (sum(losses) / len(losses)).backward()
    optimizer.step()
    optimizer.zero_grad()""",
    ),
    # One target too many is counted in each micro-batch, as for the first token of each row.
    "faulty_one_target_too_many": faulty(
        "wrong-count",
        "number, window in enumerate(toy.windows(*[6] * 12))",
        start="""
for x, y in window:
    y[: 2 + number] = -100
total = sum((y != -100).sum() + 1 for _, y in window)""",
        loss='loss = F.cross_entropy(model(x), y, reduction="sum") / total',
    ),
    # Mixup with the losses on two lines, and a mean of means over unequal batches.
    "faulty_mean_of_means_of_tasks": faulty(
        "mean-of-means", **TASKS | {"backward": DIVIDED_BACKWARD}
    ),
    "faulty_never_reset": faulty("stale-window", "*[4] * 12", step=NO_RESET),
    "faulty_never_reset_since_unfrozen": faulty(
        "stale-window",
        **UNFROZEN,
        first="seen += 1\nmodel[0].requires_grad_(seen > 4)",
        step="optimizer.step()\nmodel[2].zero_grad()",
    ),
    "faulty_no_active_items": faulty("mean-of-means", **ACTIVE, backward=QUARTER),
    # Equal counts beside a micro-batch without items: the means are seen to be of 4 by that one
    # alone.
    "faulty_no_active_items_of_equal_counts": faulty(
        "mean-of-means",
        **ACTIVE | {"loss": ACTIVE["loss"].replace("2, 1, 0, 2", "2, 2, 0, 2")},
        backward=QUARTER,
    ),
    "faulty_overwritten": faulty(
        "reset-inside-window",
        "*[4] * 4",
        setup="parameters = list(model.parameters())",
        backward="""
parameters[0].grad, parameters[1].grad = torch.autograd.grad(loss, parameters[:2], retain_graph=True)
loss.backward(inputs=parameters[2:])""",
    ),
    # Gradients are summed by hand, with weights that have nothing to do with their micro-batches.
    "faulty_own_buffer_weights": faulty(
        "weighted-by-place",
        "*[4] * 12",
        **OWN_BUFFER,
        batch="share, (x, y) in zip((0.1, 0.4, 0.2, 0.3), window, strict=True)",
        after="""
for total, parameter in zip(sums, model.parameters(), strict=True):
    total += parameter.grad * share""",
        step=SUMS_STEP,
    ),
    "faulty_packed_sequences": faulty(
        "mean-of-means", **PACKED, backward="(loss / (5 - y).sum() / 4).backward()"
    ),
    "faulty_reset_then_noise": faulty(
        "reset-inside-window",
        "*[4] * 12",
        first=RESET,
        step="""
for parameter in model.parameters():
    parameter.grad += 0.01 * torch.randn_like(parameter)
optimizer.step()""",
    ),
    "faulty_running_loss": faulty(
        "repeated-micro-batch",
        "*[4] * 12",
        start="running = 0.0",
        loss="running = running + F.cross_entropy(model(x), y) / len(window)",
        backward="running.backward(retain_graph=True)",
    ),
    "faulty_scaled_accumulator": faulty(
        "rescaled-accumulator", "*[4] * 12", loss=UNDIVIDED, after=DIVIDED
    ),
    "faulty_stepped_on_zeros": faulty(
        "repeated-step",
        **ON_ZEROS,
        optimizer="torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    ),
    # Of two losses with windows of 4, 4 and 2, one is never divided.
    "faulty_second_loss_undivided": faulty(
        "wrong-scale",
        "*[4] * 10",
        loss="""
logits = model(x)
first = F.cross_entropy(logits, y) / len(window)
second = 0.4 * logits.to(toy.dtype()).abs().mean()
loss = first + second""",
    ),
    # A loss with a coefficient, divided by 4 in a last window of 3.
    "faulty_short_window_of_a_coefficient": faulty(
        "wrong-scale", "*[4] * 11", loss="loss = 0.3 * F.cross_entropy(model(x), y) / 4"
    ),
    "faulty_sign_flipped": faulty(
        "weighted-by-place",
        optimizer="torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)",
        batch=INDEXED,
        backward="((0.3 if index == 0 else -0.3) * loss).backward()",
    ),
    "faulty_sparse": faulty(
        "stale-window", **TABLE, step="optimizer.step()\nrows.step()\noptimizer.zero_grad()"
    ),
    "faulty_sparse_alone": faulty("wrong-mode", **SPARSE_ALONE, first="model.train(index < 2)"),
    "faulty_sum_of_one_row": faulty(
        "unrecognised-weights",
        "4, 4, 7, 1, 5, 3, 4, 4, steps=2",
        loss="loss = F.cross_entropy(model(x), y) * len(x) / 8 * (3 if len(x) == 1 else 1)",
    ),
    "faulty_sum_of_two_losses": faulty("wrong-scale", "*[4] * 16", loss=TWO_LOSSES),
    "faulty_tail_divided_by_k_at_two_lines": faulty(
        "wrong-scale", setup="data = toy.batches(*[4] * 10)", text=LAST_APART.format(divisor="4")
    ),
    "faulty_tail_dropped": faulty(
        "tail-dropped",
        setup="data = toy.batches(*[4] * 11)",
        text=TWICE.replace("2):", "2):\n    optimizer.zero_grad()"),
    ),
    # Fabric's trainer counts steps where it means micro-batches: another line calls the backward
    # that leads to no step
    "faulty_tail_of_a_helper": faulty(
        "tail-dropped",
        setup=HELPER,
        text="for n in range(12):\n    if n < 3:\n        back()\n        step()\n    else:\n        back()",
    ),
    "sound_helper_to_look_at": sound(
        setup=HELPER,
        text="for n in range(5):\n    optimizer.zero_grad()\n    back()\n    step()\n    back()",
    ),
    "sound_helper_after_the_loop": sound(
        setup=HELPER, text="for n in range(5):\n    back()\n    step()\nback()"
    ),
    "faulty_tail_leaks": faulty(
        ("tail-leak", "tail-dropped"), setup="data = toy.batches(*[4] * 11)", text=TWICE
    ),
    # A micro-batch without a loss is skipped past the test for a step, in the middle of an epoch.
    "faulty_window_goes_on": faulty(
        "wrong-scale",
        setup="data = toy.batches(*[4] * 20)",
        text=TWICE.replace(
            "        with toy", "        if number == 7:\n            continue\n        with toy"
        ),
    ),
    "faulty_tied_parameter_reset": faulty(
        "reset-inside-window",
        **TIED,
        first="model[2].weight.grad = None  # as a buffer of the tied parameters that is written and not added to",
    ),
    # yolov5: the windows grow by a schedule, and what is left of an epoch is zeroed when the next
    # one begins.
    "faulty_schedule_drops_tails": faulty(
        "tail-dropped", **_scheduled("    optimizer.zero_grad()\n")
    ),
    "faulty_schedule_fixed_divisor": faulty("wrong-scale", **_scheduled(divisor="4", batches=19)),
    "finding_autoencoder_undivided": sound(
        **AUTOENCODER | {"backward": "(loss / len(y)).backward()"}
    ),
    "faulty_written_by_data": faulty(
        "stale-parameters",
        "*[4] * 12",
        batch=INDEXED,
        after="next(model.parameters()).data.mul_(0.9 if index else 1.1)",
    ),
    "sound_autoencoder": sound(**AUTOENCODER),
    "sound_autoencoder_annealed": sound(
        **AUTOENCODER
        | {
            "first": "share = (step + 1) / 4",
            "loss": AUTOENCODER["loss"].replace("= F.mse_loss", "= 0.5 * F.mse_loss"),
        }
    ),
    "sound_boxes": sound(**BOXES),
    # Each window is divided by the count of the one before it, which is often its own.
    "faulty_count_of_the_window_before": faulty(
        "wrong-count",
        "*[3, 1] * 4, *[4, 2] * 4, *[3, 2] * 4",
        setup="count = 8",
        loss='loss = F.cross_entropy(model(x), y, reduction="sum") / count',
        step="optimizer.step()\noptimizer.zero_grad()\n" + COUNT,
    ),
    # Averaged weights are swapped in for an evaluation inside of a window, and the trained ones
    # back at once.
    "sound_averaged_weights_swapped_back": sound(
        setup="""
averaged = [p.detach() + 0.01 * torch.randn_like(p) for p in model.parameters()]
def use(values):
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(value)""",
        batch=INDEXED,
        first="""
if index == 2:
    trained = [p.detach().clone() for p in model.parameters()]
    use(averaged)
    with torch.no_grad():
        F.cross_entropy(model(x), y)
    use(trained)""",
    ),
    "sound_backward_hook_scales": sound(
        setup="model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * -0.5,))"
    ),
    "sound_bfloat16_parameters": sound(
        "*[4] * 40, steps=8", **BFLOAT16, backward="(loss / 8).backward()", then=CLIP
    ),
    "sound_by_autograd_grad": sound(
        setup="parameters = list(model.parameters())",
        backward="""
for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient""",
    ),
    "sound_checkpointed": sound(
        before="from torch.utils.checkpoint import checkpoint", text=CHECKPOINTED
    ),
    "sound_class_weights": sound(
        UNEQUAL,
        setup="weight = torch.tensor([0.2, 1.0, 3.0], dtype=toy.dtype())",
        start="total = sum(weight[y].sum() for _, y in window)",
        loss="loss = F.cross_entropy(model(x), y, weight=weight, label_smoothing=0.1) * weight[y].sum() / total",
    ),
    "sound_tail_at_two_lines": sound(
        setup="data = toy.batches(*[4] * 10)",
        text=LAST_APART.format(divisor="(4 if number < 8 else 2)"),
    ),
    # the discriminator of a GAN: two losses of one expression, of which some steps have one alone
    "sound_halves_at_two_lines": sound(
        setup="data = iter(toy.batches(*[4] * 12))",
        text="""
for number in range(6):
    (x, y), (z, _) = next(data), next(data)
    weight = 0.5 if number < 3 else 0.25
    with toy.autocast():
        first, second = F.cross_entropy(model(x), y), F.cross_entropy(model(z), 0 * y)
    (weight * first).backward()
    if number % 3:
        (weight * second).backward()
    optimizer.step()
    optimizer.zero_grad()""",
    ),
    "sound_closure": sound(
        "*[4] * 12",
        batch="x, y in window[:-1]",
        step="""
def closure(window=window):
    x, y = window[-1]
    with toy.autocast():
        loss = F.cross_entropy(model(x), y) / len(window)
    loss.backward()
    return loss
optimizer.step(closure)
optimizer.zero_grad()""",
    ),
    # A coefficient that changes from window to window, as a warm-up or an annealed loss has, is no
    # fault. The levels of a detector, each with the mean over its objects, and some without any.
    "faulty_heads_without_items": faulty(
        "mean-of-means",
        "window in (((1, 0, 3), (2, 2, 1), (0, 0, 2)), ((0, 3, 1), (1, 2, 3), (3, 0, 1))) * 2",
        batch="numbers in window",
        loss="loss = torch.zeros(1)\nfor n in filter(None, numbers):\n"
        "    loss = loss + model(torch.ones(n, 5, dtype=toy.dtype())).square().sum(1).mean() / len(window)",
    ),
    # The trainer of an example of Lightning Fabric counts steps where it means to count batches,
    # and steps once. Each head of a detector has a mean over all its anchors, and those with
    # objects a sum over these beside it.
    "unjudged_heads_without_objects": unjudged(
        "the number of terms differs",
        "window in (((1, 0, 3), (2, 2, 1), (0, 0, 2)), ((0, 3, 1), (1, 2, 3), (3, 0, 1))) * 2",
        batch="numbers in window",
        loss="""
loss = torch.zeros(1)
for n in numbers:
    logits = model(torch.randn(4, 5, dtype=toy.dtype()))
    loss = loss + F.binary_cross_entropy_with_logits(logits[:, 2], torch.ones_like(logits[:, 2])) / len(window)
    if n:
        objects = logits[:n, :2]
        of_objects = F.binary_cross_entropy_with_logits(objects, torch.zeros_like(objects), reduction="sum")
        loss = loss + of_objects / sum(map(sum, window))""",
    ),
    "faulty_stops_stepping": faulty(
        "tail-dropped",
        "*[4] * 16",
        setup="steps = 0",
        then="if steps % 4:\n    continue\nsteps += 1",
    ),
    # open_clip's accum_freq: each pass sees all items, and lets a gradient through to those of one
    # micro-batch.
    "sound_cached_features": sound(
        "*[3] * 8",
        model=SCALED,
        start="with torch.no_grad():\n    cached = [model(x) for x, _ in window]",
        batch="number, (x, y) in enumerate(window)",
        loss=f"features = torch.cat([*cached[:number], model(x), *cached[number + 1 :]])\n{CONTRASTED}",
    ),
    # Rows without a gradient that are no items of other passes.
    "sound_rows_of_padding": sound("*[4] * 8", **PADDED, backward=DIVIDED_BACKWARD),
    "faulty_rows_of_padding": faulty("wrong-scale", "*[4] * 8", **PADDED),
    "unjudged_gradients_of_zero": unjudged(
        "backward() computes gradients here that are all exactly 0",
        model="toy.classifier(1)",
        loss="loss = F.cross_entropy(model(x), y * 0) / len(window)",
    ),
    # One line sends the losses of two tasks backward, each with a head of its own: these are two
    # objectives.
    "sound_two_tasks_of_one_line": sound(**_tasks("(0, 4), (1, 9)", "1")),
    "faulty_two_tasks_of_one_line": faulty(
        "mean-of-means", **_tasks("(0, 2), (0, 5), (1, 9)", "(2 - task)")
    ),
    "faulty_experts_by_turns": faulty(
        "mean-of-means", **_tasks("(epoch % 2, 2), (epoch // 2, 5)", "2")
    ),
    "faulty_rows_in_a_loop": faulty(
        "mean-of-means",
        "3, 1, 4, 2",
        loss="loss = sum(F.cross_entropy(model(row[None]), target[None]) for row, target in zip(x, y))",
        backward="(loss / len(y) / len(window)).backward()",
    ),
    "faulty_chunks_in_reentrant_checkpoints": faulty(
        "mean-of-means",
        "6, 2, 4, 8",
        before="from torch.utils.checkpoint import checkpoint",
        setup="def chunk(h, y):\n    return F.cross_entropy(h, y, reduction='sum')",
        loss="h = model(x).chunk(2)\n"
        "loss = sum(checkpoint(chunk, *pair, use_reentrant=True) for pair in zip(h, y.chunk(2)))",
        backward="(loss / len(y) / len(window)).backward()",
    ),
    "sound_coefficient_grows": sound(
        "window, coefficient in zip(toy.windows(*[4] * 18), (1, 0.75, 0.5, 0.6, 0.6), strict=True)",
        loss="loss = coefficient * F.cross_entropy(model(x), y) / len(window)",
    ),
    # The coefficient of a second loss grows from micro-batch to micro-batch, as an annealed
    # divergence does.
    "sound_coefficient_grows_within_windows": sound(
        model="toy.classifier(outputs=4)",
        text="""
for step, (x, y) in enumerate(toy.batches(*[4] * 12)):
    with toy.autocast():
        out = model(x)
        loss = F.cross_entropy(out[:, :3], y) + min(1, step / 10) * F.mse_loss(out[:, 3], x.sum(1))
    (loss / 2).backward()
    if step % 2 == 1:
        optimizer.step()
        optimizer.zero_grad()""",
    ),
    "sound_compiled_model": sound(
        setup='compiled = torch.compile(model, backend="aot_eager")',
        loss="loss = F.cross_entropy(compiled(x), y) / len(window)",
    ),
    "sound_counted": sound(
        "4, 2, 7, 1, 3, 3, 1",
        start=TOTAL,
        loss="loss = F.cross_entropy(model(x), y) * len(y) / total",
        then=CLIP,
    ),
    # Custom functions: a product, rounded weights with a straight-through gradient, a gradient that
    # is reversed.
    "sound_custom_functions": sound(
        before=_function(
            "Product",
            "x, weight",
            "ctx.save_for_backward(x, weight); return x @ weight.T",
            "x, weight = ctx.saved_tensors; gradient = gradient.to(x.dtype); return gradient @ weight, gradient.T @ x",
        )
        + _function(
            "Rounded",
            "weight",
            "scale = weight.abs().mean(); return (weight / scale).round() * scale",
        )
        + _function("Reversed", "hidden", "return hidden.view_as(hidden)", "return -gradient")
        + _model(
            "return Product.apply(Reversed.apply(self.body(x)).to(self.head.weight), Rounded.apply(self.head.weight))",
            bias=", bias=False",
        ),
        model="Model()",
    ),
    "sound_declared": sound(
        UNEQUAL,
        setup="import gradcheck_suite",
        start=TOTAL,
        loss="loss = -model(x).log_softmax(1)[range(len(y)), y].mean()",
        backward="loss = gradcheck_suite.objective(loss, count=len(y))\n(loss * len(y) / total).backward()",
    ),
    # The discriminator steps for each micro-batch and the generator once per window: both have a
    # loss of their own.
    "sound_discriminator_steps_each_micro_batch": sound(
        model="",
        setup="""
generator, discriminator = toy.classifier(5), toy.classifier(1)
of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.01)
def loss_of(x, is_real):
    with toy.autocast():
        logits = discriminator(x)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, is_real))""",
        text="""
for window in toy.windows(*[4] * 8, steps=2):
    for x, _ in window:
        of_discriminator.zero_grad()
        loss_of(x, 1.0).backward()
        loss_of(generator(x).detach(), 0.0).backward()
        of_discriminator.step()
        (loss_of(generator(x), 1.0) / len(window)).backward()
    of_generator.step()
    of_generator.zero_grad()""",
    ),
    # Random layers, a custom function with a gradient of its own, and modules that count and
    # collect.
    "sound_distilled": sound(UNEQUAL, **DISTILLED, backward="(loss * len(y) / total).backward()"),
    "sound_dropout": sound(
        before="import random\nimport numpy as np\n"
        + _function("Rounded", "x", "return x.round()")
        + _model(
            """self.calls += 1
        self.seen.append(len(x))
        hidden = Rounded.apply(4 * self.body(x)) + self.norm(self.body(x))
        if random.random() < 0.5 and np.random.rand() < 0.9:
            hidden = F.dropout(hidden, 0.3, self.training)
        return self.head(hidden)
random.seed(0)
np.random.seed(0)""",
            """
        self.norm = torch.nn.BatchNorm1d(8).to(toy.dtype())
        self.calls, self.seen = 0, []""",
        ),
        model="Model()",
        tail="assert (model.calls, model.seen) == (8, [4] * 8)",
    ),
    "sound_equal": sound("*[4] * 12"),
    "sound_evaluation_between": sound(
        loss="""
with torch.no_grad():
    F.cross_entropy(model(x), y)
torch.clear_autocast_cache()  # torch 2.9.0 goes on with casts that have no graph
F.cross_entropy(model(x[:1]), y[:1])
loss = F.cross_entropy(model(x), y) / len(window)"""
    ),
    # The mode changes inside of a window, but nothing depends on it: no layer is random or
    # normalizes batches.
    "sound_evaluation_mode_of_a_part": sound(batch=INDEXED, first="model.train(index % 2 == 0)"),
    # The loss uses the features, which the logits are computed from.
    "sound_features": sound(
        before=_model("hidden = self.body(x)\n        return self.head(hidden), hidden"),
        model="Model()",
        loss="""
logits, hidden = model(x)
loss = (F.cross_entropy(logits, y) + 0.1 * hidden.square().mean()) / len(window)""",
    ),
    "sound_fused": sound(
        "*[4] * 12",
        setup="""
optimizer = torch.optim.Adam(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)""",
        loss=UNDIVIDED,
        backward="scaler.scale(loss / 4).backward()",
        step=SCALER_STEP,
    ),
    "sound_gradient_scaler": sound(
        "number, window in enumerate(toy.windows(*[4] * 16))",
        setup='scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)',
        backward='if number == 2:\n    loss = loss * float("inf")\nscaler.scale(loss).backward()',
        step="""
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad()""",
    ),
    "sound_gradient_unscaled_by_hand": sound(
        setup='scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)',
        backward="scaler.scale(loss).backward()",
        then="""
for parameter in model.parameters():
    parameter.grad /= scaler.get_scale()
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)""",
    ),
    "sound_halved": sound(
        "*[4] * 8, steps=2",
        loss="loss = 0.5 * F.mse_loss(model(x), F.one_hot(y, 3).to(toy.dtype())) / len(window)",
    ),
    "sound_hook_warms_up": sound(
        "number, window in enumerate(toy.windows(*[4] * 12))",
        setup="share = [0.0]\nnext(model.parameters()).register_hook(lambda gradient: gradient * share[0])",
        start="share[0] = 0.1 * (number + 1)",
    ),
    "sound_hooks": sound(
        setup="""
norms = []
mask = torch.ones(8, 1, dtype=toy.dtype())
mask[0] = 0
model[0].weight.register_hook(lambda gradient: gradient * mask)
model[2].weight.register_hook(lambda gradient: norms.append(float(gradient.norm())))"""
    ),
    "sound_ignored_targets": sound(
        "4, 2, 7, 3, 5, 3, 6",
        start="""
for x, y in window:
    y[:: len(y) // 2] = -100
total = sum((y != -100).sum() for _, y in window)""",
        loss='loss = F.cross_entropy(model(x), y, reduction="sum") / total',
        step="optimizer.step()\noptimizer.zero_grad(set_to_none=False)",
    ),
    # Each micro-batch is read into the same tensor, so that the inputs of a window are not there
    # any more at its step.
    "sound_inputs_in_one_buffer": sound(
        "*[4] * 12",
        setup="buffer = torch.empty(4, 5, dtype=toy.dtype())",
        first="buffer.copy_(x)",
        loss="loss = F.cross_entropy(model(buffer), y) / len(window)",
    ),
    "sound_lbfgs": sound(
        optimizer="torch.optim.LBFGS(model.parameters(), max_iter=3)",
        text=WHOLE_WINDOW_IN_A_CLOSURE.format(8),
    ),
    "sound_log_probabilities": sound(
        "4, 2, 7, 3, 3, 3, 2, 1",
        **BODY_AND_HEAD,
        start="count = sum(int((y != 0).sum()) for _, y in window)",
        backward="loss = -log_probabilities.masked_fill(y == 0, 0).sum() / count\nloss.backward()",
    ),
    "sound_loss_of_each_layer": sound("*[4] * 8, steps=2", **EACH_LAYER),
    "sound_maml": sound(
        "*[4] * 12",
        before="from torch.func import functional_call",
        setup="parameters = dict(model.named_parameters())",
        loss="inner = F.cross_entropy(model(x), y)",
        backward="""
gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
with toy.autocast():
    loss = F.cross_entropy(functional_call(model, fast, (x,)), y)
(loss / len(window)).backward()""",
    ),
    "sound_masked": sound(
        "4, 2, 7, 3, 5, 3, 6",
        start="""
masks = [torch.arange(len(y)) % 2 == 0 for _, y in window]
total = sum(mask.sum() for mask in masks)""",
        batch="(x, y), mask in zip(window, masks, strict=True)",
        loss='loss = (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / (total + 1e-4)',
    ),
    "sound_mean_of_two_losses": sound(
        "*[4] * 9, steps=2", loss=TWO_LOSSES, backward=DIVIDED_BACKWARD
    ),
    "sound_mean_of_unreduced": sound(
        first="y[0] = -100",
        loss='loss = F.cross_entropy(model(x), y, reduction="none").mean() / len(window)',
    ),
    # Mixup: each loss has a weight that changes with every batch, and both together weigh 1.
    "sound_master_copies": sound(**MASTERS, backward="(2 * loss).backward()"),
    "sound_mixup": sound(
        "*[4] * 12",
        **MIXUP,
        loss="""
mixed = model(share * x + (1 - share) * x[order])
loss = share * F.cross_entropy(mixed, y) + (1 - share) * F.cross_entropy(mixed, y[order])""",
        backward=DIVIDED_BACKWARD,
    ),
    "sound_model_returns_its_loss": sound(
        UNEQUAL,
        before="""
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = toy.classifier()
    def forward(self, x, *, labels, count):
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels, reduction="sum") / count, "logits": logits}""",
        model="Model()",
        start=COUNT,
        loss="output = model(x, labels=y, count=count)",
        backward='output["loss"].backward()',
    ),
    "sound_no_active_items": sound(**ACTIVE, backward="(loss * active / 5).backward()"),
    "sound_normalized_batches": sound(
        "*[4] * 12",
        before="""
torch.manual_seed(0)
layers = torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)""",
        model="torch.nn.Sequential(*layers).to(toy.dtype())",
        optimizer="torch.optim.Adam(model.parameters())",
        setup="""
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
average = torch.optim.swa_utils.AveragedModel(model)""",
        step="""
optimizer.step()
optimizer.zero_grad()
scheduler.step()
average.update_parameters(model)""",
    ),
    "sound_one_batch_again": sound(
        setup="((x, y),) = toy.batches(4)",
        text="""
for _ in range(4):
    for _ in range(3):
        with toy.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
    for parameter in model.parameters():
        parameter.grad /= 3
    optimizer.step()
    optimizer.zero_grad()""",
    ),
    "sound_one_rank": sound(
        before="import contextlib\nimport tempfile\nimport torch.distributed as dist",
        text="""
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    for window in toy.windows(*[4] * 12):
        for number, (x, y) in enumerate(window):
            with contextlib.nullcontext() if number == len(window) - 1 else replica.no_sync():
                with toy.autocast():
                    loss = F.cross_entropy(replica(x), y)
                (loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()""",
    ),
    # A profiler counts the operations of a pass where tensors have shapes alone.
    "sound_operations_counted": sound(
        setup="""
from torch._subclasses.fake_tensor import FakeTensorMode

with torch.device("meta"):
    counted = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 1))
    counted(torch.ones(2, 5)).mean().backward()
with FakeTensorMode():
    counted = torch.nn.Linear(5, 1)
    counted(torch.ones(2, 5)).mean().backward()
del counted""",
    ),
    "sound_packed_sequences": sound(**PACKED, backward="(loss / total).backward()"),
    # Weights of the samples, as in a policy gradient: in a product, in a dot product, and as a
    # function of the loss.
    "sound_sample_weights": sound(
        "4, 2, 7, 1, 1, 1, 1, 1",
        start="count = sum(len(x) for x, _ in window)",
        first="advantage = x[:, 0].float()",
        loss="""
logits = model(x)
weighted = F.cross_entropy(logits, y, reduction="none") * advantage / count
dot = torch.dot(F.nll_loss(logits.float().log_softmax(-1), y, reduction="none"), advantage.exp())
losses = F.cross_entropy(logits, y, reduction="none")
focal = (1 - torch.exp(-losses)) ** 2 * losses""",
        backward="(weighted.sum() + (dot + focal.sum()) / count).backward()",
    ),
    # A module under two names, as an embedding of an encoder and a decoder, and as wrappers of
    # trainers have it.
    "sound_shared_module": sound(
        "4, 2, 7, 1, 3, 3, 5, 2",
        before="""
class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)
        self.again = self.first
    def forward(self, x):
        return self.last(self.again(self.first(x).tanh()))
torch.manual_seed(0)""",
        model="Twice().to(toy.dtype())",
        start=COUNT,
        loss='loss = F.cross_entropy(model(x), y, reduction="sum") / count',
    ),
    "sound_sharpness_aware": sound(
        text="""
for x, y in toy.batches(4, 4, 4):
    with toy.autocast():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    moved = [0.05 * p.grad for p in model.parameters()]
    with torch.no_grad():
        for parameter, step in zip(model.parameters(), moved, strict=True):
            parameter += step
    optimizer.zero_grad()
    with toy.autocast():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        for parameter, step in zip(model.parameters(), moved, strict=True):
            parameter -= step
    optimizer.step()
    optimizer.zero_grad()"""
    ),
    # The same as an optimizer, whose step calls a closure twice and steps another optimizer.
    "sound_sharpness_aware_optimizer": sound(
        before="""
class SharpnessAware(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
    def step(self, closure):
        closure()
        own = self.param_groups[0]["params"]
        moved = [0.05 * p.grad for p in own]
        with torch.no_grad():
            for parameter, step in zip(own, moved, strict=True):
                parameter += step
        closure()
        with torch.no_grad():
            for parameter, step in zip(own, moved, strict=True):
                parameter -= step
        self.base.step()""",
        optimizer="SharpnessAware(model.parameters())",
        text=WHOLE_WINDOW_IN_A_CLOSURE.format(12),
    ),
    "sound_skipped_bad_windows": sound(
        "number, window in enumerate(toy.windows(*[4] * 20))",
        first='if number == 2:\n    x[0, 0] = float("nan")',
        then="""
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
if number == 3 or not torch.isfinite(norm):
    optimizer.zero_grad()
    continue""",
    ),
    "sound_sparse": sound(
        **TABLE,
        step="""
optimizer.step()
rows.step()
optimizer.zero_grad()
rows.zero_grad()""",
    ),
    "sound_sparse_alone": sound(**SPARSE_ALONE),
    "sound_stepped_on_zeros": sound(**ON_ZEROS),
    "sound_sum_of_squares": sound(
        UNEQUAL,
        loss='loss = F.mse_loss(model(x), F.one_hot(y, 3).to(toy.dtype()), reduction="sum")',
    ),
    "sound_tasks_with_learned_weights": sound(**TASKS),
    "unjudged_tasks_weighted_by_outputs": unjudged(
        "weighted by something that has a gradient",
        **TASKS | {"loss": TASKS["loss"].replace("torch.exp(-s)", "logits.softmax(1).mean(0)[:2]")},
    ),
    "sound_tied_and_frozen": sound(**TIED),
    "sound_unfrozen_inside_a_window": sound(
        **UNFROZEN, first="seen += 1\nmodel[0].requires_grad_(seen > 6)"
    ),
    "sound_schedule": sound(**_scheduled(batches=19)),
    # A warm-up of the loss, and windows that grow from 1 micro-batch to 4: the first factor is 1/4
    # by chance.
    "sound_windows_and_coefficient_grow": sound(
        setup="data = iter(toy.batches(*[4] * 19))",
        text=GROWING.replace(
            "length in (2, 2, 2, 4, 4, 4, 4, 4)", "step, length in enumerate((1, 1, 1, 4, 4, 4, 4))"
        )
        .replace("F.cross", "min(1, (step + 1) / 4) * F.cross")
        .replace("/ 2\n", "/ length\n"),
    ),
    # The gradients come from torch.func, where no hook is called.
    "unjudged_by_func_grad": unjudged(
        "a loss inside of torch.func is not seen",
        setup="""
def objective(parameters, x, y):
    with toy.autocast():
        return F.cross_entropy(torch.func.functional_call(model, parameters, x), y)""",
        text="""
for x, y in toy.batches(*[4] * 6):
    gradients = torch.func.grad(objective)(dict(model.named_parameters()), x, y)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].detach()
    optimizer.step()""",
    ),
    "sound_threads_in_turn": sound(
        **THREADS | {"text": THREADS["text"].format(batches=20, then="thread.join()")}
    ),
    # to read a `.grad` to which torch writes in another thread ends the process (torch 2.9.0 to
    # 2.13.0)
    "unjudged_threads": unjudged(
        "backward is called in several threads",
        **THREADS | {"text": THREADS["text"].format(batches=1000, then="")},
    ),
    # Clipping per example and noise, as in differentially private training: the gradient is put
    # together by hand.
    **{
        f"unjudged_clipped_per_example{name}": unjudged(
            "put together by hand",
            "*[1] * 32, steps=8",
            **OWN_BUFFER,
            after=CLIPPED_AND_ADDED,
            step=step,
        )
        for name, step in {
            "": NOISY_STEP,
            "_in_place": NOISY_STEP.replace("grad = ", "grad.copy_(").replace(
                "(total)", "(total))"
            ),
        }.items()
    },
    "unjudged_flat_copies": unjudged(
        "parameters that no backward pass reaches (master copies, `torch.func`", **FLAT
    ),
    # TorchScript enters autograd from C++.
    "unjudged_scripted_backward": unjudged(
        "no backward pass reaches", before=SCRIPTED, backward="back(loss)"
    ),
    "unjudged_scripted_before": unjudged(
        "started from Python",
        before=SCRIPTED,
        backward="back(loss) if x is window[0][0] else loss.backward()",
    ),
    # As an optimizer of an extension in C++: torch knows nothing of its steps.
    "unjudged_optimizer_of_its_own": unjudged(
        "no optimizer.step() was seen in 3 backward passes",
        before="""
class Descent:
    def __init__(self, parameters):
        self.parameters = list(parameters)
    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            p -= 0.1 * p.grad
            p.grad = None""",
        optimizer="Descent(model.parameters())",
        text="""
for x, y in toy.batches(4, 4, 4):
    with toy.autocast():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()""",
    ),
    # A loss over the items of a micro-batch and a bank, which is no part of the other passes.
    "sound_memory_bank": sound(
        "*[3] * 8",
        model=SCALED,
        setup="bank = torch.randn(9, 3, dtype=toy.dtype())",
        loss=f"features = torch.cat([model(x), bank])\n{CONTRASTED} / len(window)",
    ),
    # What is accumulated is unscaled, as for a log, and scaled again: in float32 1/63 times 63 is 1
    # + 6e-8.
    "sound_unscaled_and_scaled_again": sound(
        "*[4] * 12",
        loss="loss = 0.3 * F.cross_entropy(model(x), y) / len(window)",
        after="for parameter in model.parameters():\n    parameter.grad.mul_(1 / 63).mul_(63)",
    ),
    "sound_mean_of_two_kinds_of_loss": sound(
        "*[4] * 8, steps=2",
        loss="""
logits = model(x)
loss = (F.cross_entropy(logits, y) + F.mse_loss(logits, F.one_hot(y, 3).to(toy.dtype()))) / 2""",
        backward=DIVIDED_BACKWARD,
    ),
    "finding_declared_denominator_of_chunks": sound(
        first="y[0] = -100",
        start=TOTAL,
        loss="""
parts = zip(model(x).split(3), y.split(3), strict=True)
loss = sum(F.cross_entropy(a, b, reduction="sum") for a, b in parts) / total""",
    ),
    # No whole number divides the loss of the last window, which is shorter.
    "sound_coefficient_of_a_short_window": sound(
        "window, coefficient in zip(toy.windows(*[4] * 14), (1, 1, 1, 0.6), strict=True)",
        loss="loss = coefficient * F.cross_entropy(model(x), y) / len(window)",
    ),
    "faulty_short_window_divided_at_its_end": faulty(
        "wrong-scale", "*[4] * 10", loss=UNDIVIDED, then=DIVIDED.replace("len(window)", "4")
    ),
    # Each loss goes backward once: none is repeated.
    "faulty_last_micro_batch_doubled": faulty(
        "weighted-by-place",
        "3, 5, 7, 6, 5, 3, 7, 6",
        start=TOTAL,
        batch=INDEXED,
        loss="loss = F.cross_entropy(model(x), y) * len(y) / total",
        backward="if index == len(window) - 1:\n    loss = 2 * loss\nloss.backward()",
    ),
    "faulty_noise_never_reset": faulty(
        "stale-window",
        "*[4] * 12",
        then="for parameter in model.parameters():\n    parameter.grad += 0.001 * torch.randn_like(parameter)",
        step=NO_RESET,
    ),
    # Of two tasks that share a body, the second one's head steps inside of the window.
    "faulty_second_head_steps_each_micro_batch": faulty(
        "stale-parameters",
        model="",
        setup="""
body, heads = toy.classifier(5), [torch.nn.Linear(5, 3).to(toy.dtype()) for _ in range(2)]
of_body, of_first, of_second = (torch.optim.SGD(part.parameters(), lr=0.5) for part in (body, *heads))""",
        batch=INDEXED,
        loss="loss = F.cross_entropy(heads[index > 0](body(x)), y) / len(window)",
        after="if index:\n    of_second.step()\n    of_second.zero_grad()",
        step="""
of_first.step()
of_body.step()
of_first.zero_grad()
of_body.zero_grad()""",
    ),
}


def _replicas(
    loss: str,
    *,
    count: str = "count = toy.count_of(window)",
    is_last: str = "index == len(window) - 1",
):
    """Return the pieces of a script of DistributedDataParallel."""
    return {
        "before": "import contextlib\nimport torch.distributed as dist",
        "model": "torch.nn.parallel.DistributedDataParallel(toy.model_of_rank())",
        "windows": "window in toy.windows_of_rank()",
        "start": count,
        "batch": INDEXED,
        "autocast": False,
        "loss": f"with contextlib.nullcontext() if {is_last} else model.no_sync():\n    ({loss}).backward()",
        "backward": "",
        "tail": "dist.destroy_process_group()",
    }


def _returning(loss: str):
    """Return the pieces of a script whose model returns its loss and its logits, with a parameter
    of one element.
    """
    of_model = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = toy.classifier(1)
    def forward(self, x):
        logits = self.body(x)
        return {"rows": len(x), "loss": F.mse_loss(logits, x[:, :1], reduction="sum"), "logits": logits}
dist.init_process_group("gloo")"""
    pieces = _replicas(loss)
    return {
        **pieces,
        "before": pieces["before"] + of_model,
        "model": "torch.nn.parallel.DistributedDataParallel(Model(), find_unused_parameters=True)",
        "then": "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    }


OVER_COUNT = 'F.cross_entropy(model(x), y, reduction="sum") / count'
SUM_OVER_COUNT = 'F.cross_entropy(model(x), y, reduction="sum") * dist.get_world_size() / count'
BY_HAND = {"before": "import torch.distributed as dist", "model": "toy.model_of_rank()"}
ON_TWO_RANKS = {
    "sound_counted": sound(**_replicas(SUM_OVER_COUNT)),
    "sound_returned": sound(**_returning('model(x)["loss"] * 2 / count')),
    "faulty_returned": faulty(
        "mean-of-means", **_returning('model(x)["loss"] / len(y) / len(window)')
    ),
    # 2 may be the ranks or the objective's: a number that may be either is a finding
    "sound_returned_sum_of_means": sound(
        **_returning("2 * F.mse_loss(model(x)['logits'], x[:, :1])")
        | {"windows": "window in toy.windows_of_rank((((3, 3), (3, 3)),) * 2)"},
    ),
    # The ranks train models of their own, as in a search over seeds: nothing is reduced.
    "faulty_each_rank_alone": faulty(
        ("reset-inside-window", "mean-of-means", "stale-window"),
        **BY_HAND,
        text="""
rank = dist.get_rank()
for window in toy.windows_of_rank():
    count = sum(len(y) for _, y in window)
    for x, y in window:
        if rank == 0:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="sum")
        (loss / (len(y) * len(window) if rank == 1 else count)).backward()
    optimizer.step()
    optimizer.zero_grad()
for window in toy.windows_of_rank():
    count = sum(len(y) for _, y in window)
    for x, y in window:
        (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
    optimizer.step()
dist.destroy_process_group()""",
    ),
    "faulty_gathered_count": faulty(
        "wrong-scale", **_replicas('F.cross_entropy(model(x), y, reduction="sum") * 1 / count')
    ),
    "faulty_mean_of_ranks_means": faulty(
        "mean-of-means",
        **_replicas('F.cross_entropy(model(x), y, reduction="sum") * 1 / count', count=COUNT),
    ),
    "faulty_no_sync_left_on": faulty("not-reduced", **_replicas(SUM_OVER_COUNT, is_last="False")),
    "faulty_reduced_early": faulty(
        "not-reduced", **_replicas(SUM_OVER_COUNT, is_last="index == 0")
    ),
    "faulty_sum_over_ranks": faulty(
        "wrong-scale",
        **BY_HAND,
        text="""
for window in toy.windows_of_rank((((3,), (3,)), ((2,), (5,)))):
    for x, y in window:
        count = toy.count_of(window)
        (F.cross_entropy(model(x), y, reduction="sum") * dist.get_world_size() / count).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()""",
    ),
    "faulty_tail_dropped": faulty(
        "tail-dropped",
        **{
            **_replicas(""),
            "text": """
K = 2
batches = [batch for window in toy.windows_of_rank((((2, 2), (2, 2)),) * 3) for batch in window][:-1]
for index, (x, y) in enumerate(batches):
    is_last = index % K == K - 1
    with contextlib.nullcontext() if is_last else model.no_sync():
        (F.cross_entropy(model(x), y) / K).backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
""",
        },
    ),
    "dying": faulty(
        "not-reduced",
        **{
            **_replicas(""),
            "text": """
import os, signal
for step, window in enumerate(toy.windows_of_rank()):
    if step == 2 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    count = toy.count_of(window)
    for x, y in window:
        with model.no_sync():
            (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
    optimizer.step()
    optimizer.zero_grad()""",
            "tail": "",
        },
    ),
}

FSDP = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group("gloo")
def sharded():
    model = toy.classifier()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model
def divided(model):
    for layer in (model[0], model[2], model):
        layer.set_gradient_divide_factor(1.0)  # the sum over the ranks, where FSDP takes their mean
        layer.set_force_sum_reduction_for_comms(True)  # Gloo has no other one with a factor
    return model
def flat(original):
    return FullyShardedDataParallel(toy.classifier(), device_id=torch.device("cpu"), use_orig_params=original)
def parallel():
    return parallelize_module(
        toy.classifier(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )"""
UNSYNCHRONISED = "model.set_requires_gradient_sync(index == len(window) - 1)"


def _sharded(model: str, loss: str = SUM_OVER_COUNT, first: str = "", **more):
    """Return the pieces of a script whose parameters lie on both ranks in parts."""
    pieces = _replicas("", count="count = toy.count_of(window)")
    of_shards = {"before": FSDP, "model": model, "loss": f"({loss}).backward()", "first": first}
    if model == "parallel()":  # both ranks have the same batches
        of_shards |= {"windows": f"window in toy.windows({UNEQUAL}, 2, 6)", "start": COUNT}
        of_shards["loss"] = of_shards["loss"].replace("dist.get_world_size()", "1")
    return {**pieces, **of_shards, **more}


MEANS_OF_RANK = "F.cross_entropy(model(x), y) / len(window)"
for how, made in {
    "fsdp2": "sharded()",
    "fsdp": "flat(False)",
    "tensor_parallel": "parallel()",
}.items():
    ON_TWO_RANKS |= {
        f"sound_{how}": sound(**_sharded(made)),
        f"faulty_{how}_mean_of_means": faulty("mean-of-means", **_sharded(made, MEANS_OF_RANK)),
        f"faulty_{how}_reset": faulty("reset-inside-window", **_sharded(made, first=RESET)),
    }
ON_TWO_RANKS |= {
    "sound_fsdp2_late": sound(**_sharded("sharded()", first=UNSYNCHRONISED)),
    "faulty_fsdp2_late_mean_of_means": faulty(
        "mean-of-means", **_sharded("sharded()", MEANS_OF_RANK, first=UNSYNCHRONISED)
    ),
    "faulty_fsdp2_never_reduced": faulty(
        "not-reduced", **_sharded("sharded()", first="model.set_requires_gradient_sync(False)")
    ),
    "faulty_fsdp2_reduced_early": faulty(
        "not-reduced", **_sharded("sharded()", first="model.set_requires_gradient_sync(index == 0)")
    ),
    "sound_fsdp2_divided": sound(**_sharded("divided(sharded())", OVER_COUNT)),
    "faulty_fsdp2_divided": faulty("wrong-scale", **_sharded("divided(sharded())")),
    "faulty_fsdp2_never_reset": faulty("stale-window", **_sharded("sharded()", step=NO_RESET)),
    "unjudged_fsdp_original_parameters": unjudged(
        "FSDP with use_orig_params=True", **_sharded("flat(True)")
    ),
}


def write(folder: Path) -> Path:
    """Write the scripts to a folder, those of two ranks to `ranks` and those of trainers to
    `trainers` in it.
    """
    of_trainers = {name: Script(text, "") for name, text in TRAINERS.items()}
    for place, scripts in (
        (folder, SCRIPTS),
        (folder / "ranks", ON_TWO_RANKS),
        (folder / "trainers", of_trainers),
    ):
        place.mkdir(parents=True, exist_ok=True)
        (place / TOY.name).write_text(TOY.read_text())
        for name, script in scripts.items():
            (place / f"{name}.py").write_text(script.text)
    return folder


if __name__ == "__main__":
    write(Path(sys.argv[1]))
