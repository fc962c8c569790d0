import math

import torch
import torch.nn.functional as F
import toy


class Block(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = torch.nn.LayerNorm(size)
        self.mix = torch.nn.Linear(size, 3 * size)
        self.out = torch.nn.Linear(size, size)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Model(torch.nn.Module):
    def __init__(self, vocabulary=11, size=8):
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, size)
        self.blocks = torch.nn.ModuleList(Block(size) for _ in range(2))
        self.head = torch.nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, targets=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


torch.manual_seed(0)
model = Model().to(toy.dtype())
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
data = torch.randint(0, 11, (500,))


def get_batch():
    start = torch.randint(0, 480, (3,))
    return torch.stack([data[i : i + 8] for i in start]), torch.stack([data[i + 1 : i + 9] for i in start])


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch())[1].item() for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


x, y = get_batch()
for iteration in range(5):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * math.cos(iteration)
    if iteration % 2 == 0:
        estimate_loss()
    for _ in range(4):
        with toy.autocast():
            logits, loss = model(x, y)
            loss = loss / 4
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
