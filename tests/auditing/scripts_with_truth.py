"""Training scripts whose first line says what is true of them: what a program does to elements of
`.grad` between passes, to parameters between forward and backward, and to a shared loss scale.
"""

from __future__ import annotations

WITH_TRUTH = {
    "s3_frozen_rows": """
# TRUTH sound (gradients of frozen rows are set to 0 after every backward)
import torch
import torch.nn.functional as F
torch.manual_seed(13)
emb, head = torch.nn.Embedding(12, 4), torch.nn.Linear(4, 3)
frozen = torch.tensor([0, 5, 7])
opt = torch.optim.SGD([*emb.parameters(), *head.parameters()], lr=0.1)
for step in range(8):
    for micro in range(3):
        ids, y = torch.randint(0, 12, (4, 2)), torch.randint(0, 3, (4,))
        (F.cross_entropy(head(emb(ids).mean(1)), y) / 3).backward()
        emb.weight.grad[frozen] = 0
    opt.step()
    opt.zero_grad()
""",
    "m_s3a": """
# TRUTH sound (first column of a Linear's gradient is masked after every backward)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    for micro in range(2):
        (net(torch.randn(4, 4)).square().mean() / 2).backward()
        net.weight.grad[:, 0] = 0
    opt.step()
    opt.zero_grad()
""",
    "m_s3b": """
# TRUTH sound (same, masked by multiplication)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    for micro in range(2):
        (net(torch.randn(4, 4)).square().mean() / 2).backward()
        net.weight.grad.mul_(torch.tensor([0.0, 1, 1, 1]))
    opt.step()
    opt.zero_grad()
""",
    "m_s3c": """
# TRUTH sound (same, 1 of 3000 elements)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(100, 30)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    for micro in range(2):
        (net(torch.randn(4, 100)).square().mean() / 2).backward()
        net.weight.grad[7, 5] = 0
    opt.step()
    opt.zero_grad()
""",
    "m_s3d": """
# TRUTH sound (masked once, after the last backward)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    for micro in range(2):
        (net(torch.randn(4, 4)).square().mean() / 2).backward()
    net.weight.grad[:, 0] = 0
    opt.step()
    opt.zero_grad()
""",
    "m_s3e": """
# TRUTH sound (mask by a post-accumulate hook)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
net.weight.register_post_accumulate_grad_hook(lambda p: p.grad.__setitem__((slice(None), 0), 0))
for step in range(3):
    for micro in range(2):
        (net(torch.randn(4, 4)).square().mean() / 2).backward()
    opt.step()
    opt.zero_grad()
""",
    "m_f2b": """
# TRUTH faulty line 11 (one row of 400 is cleared after the second of three micro-batches)
import torch
torch.manual_seed(0)
emb = torch.nn.Embedding(400, 3)
opt = torch.optim.SGD(emb.parameters(), lr=0.1)
for step in range(12):
    for micro in range(3):
        ids = torch.randint(0, 400, (64,))
        (emb(ids).square().mean() / 3).backward()
        if micro == 1:
            emb.weight.grad[ids[0]] = 0
    opt.step()
    opt.zero_grad()
""",
    "f2_rows_reset": """
# TRUTH faulty reset-inside-window line 15 (rows of earlier micro-batches are zeroed)
import torch
import torch.nn.functional as F
torch.manual_seed(2)
emb, head = torch.nn.Embedding(12, 4), torch.nn.Linear(4, 3)
frozen = torch.tensor([0, 1, 2])
opt = torch.optim.SGD([*emb.parameters(), *head.parameters()], lr=0.1)
for step in range(8):
    for micro in range(3):
        ids, y = torch.randint(0, 12, (4, 2)), torch.randint(0, 3, (4,))
        (F.cross_entropy(head(emb(ids).mean(1)), y) / 3).backward()
        keep = torch.zeros(12, 1)
        keep[ids.flatten()] = 1
        keep[frozen] = 0
        emb.weight.grad.mul_(keep)
    opt.step()
    opt.zero_grad()
""",
    "frozen_bias": """
# TRUTH sound (the whole gradient of the bias is set to 0 after each backward pass)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    for micro in range(2):
        (net(torch.randn(4, 4)).square().mean() / 2).backward()
        net.bias.grad.zero_()
    opt.step()
    opt.zero_grad()
""",
    "late": """
# TRUTH sound (columns are masked from the seventh step on)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(100, 30)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(12):
    for micro in range(2):
        (net(torch.randn(4, 100)).square().mean() / 2).backward()
        if step >= 6:
            net.weight.grad[:, :50] = 0
    opt.step()
    opt.zero_grad()
""",
    "late_bad": """
# TRUTH faulty reset-inside-window line 10 (a mask after the first pass alone, from step 6 on)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(100, 30)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(12):
    for micro in range(2):
        (net(torch.randn(4, 100)).square().mean() / 2).backward()
        if step >= 6 and micro == 0:
            net.weight.grad[:, :50] = 0
    opt.step()
    opt.zero_grad()
""",
    "prune": """
# TRUTH sound (a mask of each parameter, then clipping)
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
masks = [(torch.rand_like(p) > 0.7).float() for p in net.parameters()]
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for step in range(8):
    for micro in range(4):
        (net(torch.randn(4, 16)).square().mean() / 4).backward()
        for p, m in zip(net.parameters(), masks):
            p.grad.mul_(m)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    opt.step()
    opt.zero_grad(set_to_none=False)
""",
    "prune_wrong_scale": """
# TRUTH faulty wrong-scale line 9 (a mask of each parameter, and a second division by 4)
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
masks = [(torch.rand_like(p) > 0.7).float() for p in net.parameters()]
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for step in range(8):
    for micro in range(4):
        (net(torch.randn(4, 16)).square().mean() / 16).backward()
        for p, m in zip(net.parameters(), masks):
            p.grad.mul_(m)
    opt.step()
    opt.zero_grad(set_to_none=False)
""",
    "first_only": """
# TRUTH faulty reset-inside-window line 10 (a column is masked after the first pass alone)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    for micro in range(2):
        (net(torch.randn(4, 4)).square().mean() / 2).backward()
        if micro == 0:
            net.weight.grad[:, 0] = 0
    opt.step()
    opt.zero_grad()
""",
    "half": """
# TRUTH faulty not-linear line 9 (a column is halved after each pass)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    for micro in range(2):
        (net(torch.randn(4, 4)).square().mean() / 2).backward()
        net.weight.grad[:, 0] *= 0.5
    opt.step()
    opt.zero_grad()
""",
    "threshold": """
# TRUTH faulty reset-inside-window line 8 (small elements are set to 0 after each pass)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    for micro in range(3):
        (net(torch.randn(4, 4)).square().mean() / 3).backward()
        g = net.weight.grad
        g[g.abs() < g.abs().median()] = 0
    opt.step()
    opt.zero_grad()
""",
    "clipv": """
# TRUTH faulty clipped line 9 (clipped by value after each pass)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    for micro in range(2):
        (net(torch.randn(4, 4)).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.02)
    opt.step()
    opt.zero_grad()
""",
    "frozen_bias_bad": """
# TRUTH faulty reset-inside-window line 10 (the bias, after the first pass alone)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    for micro in range(2):
        (net(torch.randn(4, 4)).square().mean() / 2).backward()
        if micro == 0:
            net.bias.grad.zero_()
    opt.step()
    opt.zero_grad()
""",
    "reset_and_mask": """
# TRUTH faulty reset-inside-window line 8 (reset for each micro-batch, beside a mask)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    for micro in range(2):
        opt.zero_grad(set_to_none=False)
        (net(torch.randn(4, 4)).square().mean() / 2).backward()
        net.weight.grad[:, 0] = 0
    opt.step()
""",
    "scaler": """
# TRUTH sound (a mask under a GradScaler)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(5):
    for micro in range(2):
        scaler.scale(net(torch.randn(4, 4)).square().mean() / 2).backward()
        net.weight.grad[:, 0] = 0
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
""",
    "f6_ema_swap": """
# TRUTH faulty stale-parameters (EMA weights are swapped in between forward and backward)
import copy
import torch
import torch.nn.functional as F
torch.manual_seed(6)
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
ema = copy.deepcopy(net).requires_grad_(False)
opt = torch.optim.Adam(net.parameters(), lr=0.05)
val = torch.randn(6, 4)


def put(target, values):
    for p, v in zip(target.parameters(), values):
        p.data.copy_(v)


for step in range(14):
    for micro in range(2):
        x = torch.randn(4, 4)
        loss = F.mse_loss(net(x), x.prod(1, keepdim=True)) / 2
        saved = None
        if step % 6 == 5 and micro == 1:
            saved = [p.detach().clone() for p in net.parameters()]
            put(net, list(ema.parameters()))
            with torch.no_grad():
                score = net(val).mean()
        loss.backward()
        if saved:
            put(net, saved)
    opt.step()
    opt.zero_grad()
    with torch.no_grad():
        for e, p in zip(ema.parameters(), net.parameters()):
            e.lerp_(p, 0.05)
""",
    "m_f6": """
# TRUTH faulty stale-parameters (written by .data between forward and backward, and put back)
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(6):
    loss, saved = net(torch.randn(4, 3)).square().mean(), net[2].weight.detach().clone()
    net[2].weight.data.mul_(0.5)
    loss.backward()
    net[2].weight.data.copy_(saved)
    opt.step()
    opt.zero_grad()
""",
    "f4_scaler_shared": """
# TRUTH faulty step-per-micro-batch (one GradScaler for two optimizers; update() inside a window)
import torch
import torch.nn.functional as F
torch.manual_seed(4)
gen, dis = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
opt_g, opt_d = torch.optim.SGD(gen.parameters(), lr=0.05), torch.optim.SGD(dis.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
for i in range(16):
    real, z = torch.randn(4, 4) + 1, torch.randn(4, 4)
    opt_d.zero_grad()
    logits = dis(torch.cat([real, gen(z).detach()]))
    loss_d = F.binary_cross_entropy_with_logits(logits, torch.cat([torch.ones(4, 1), torch.zeros(4, 1)]))
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)
    loss_g = F.binary_cross_entropy_with_logits(dis(gen(z)), torch.ones(4, 1)) / 2
    scaler.scale(loss_g).backward()
    if i % 2 == 1:
        scaler.step(opt_g)
        opt_g.zero_grad()
    scaler.update()
""",
    "m_f4": """
# TRUTH faulty step-per-micro-batch (update() inside the window of opt_a)
import torch
torch.manual_seed(0)
a, b = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
opt_a, opt_b = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.SGD(b.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
for i in range(8):
    x = torch.randn(4, 3)
    scaler.scale(b(x).square().mean()).backward()
    scaler.step(opt_b)
    opt_b.zero_grad()
    scaler.scale(a(x).square().mean() / 2).backward()
    if i % 2:
        scaler.step(opt_a)
        opt_a.zero_grad()
    scaler.update()
""",
    "m_f4_sound": """
# TRUTH sound (update() after the window of opt_a)
import torch
torch.manual_seed(0)
a, b = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
opt_a, opt_b = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.SGD(b.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
for i in range(8):
    x = torch.randn(4, 3)
    scaler.scale(b(x).square().mean() / 2).backward()
    scaler.scale(a(x).square().mean() / 2).backward()
    if i % 2:
        scaler.step(opt_a)
        scaler.step(opt_b)
        opt_b.zero_grad()
        opt_a.zero_grad()
    if i % 2:
        scaler.update()
""",
    "m_mf2": """
# TRUTH sound (an embedding pair alone, 16 rows of 1000 for each micro-batch)
import torch
torch.manual_seed(1)
emb = torch.nn.Embedding(1000, 4)
opt = torch.optim.SGD(emb.parameters(), lr=0.1)
for step in range(6):
    for ids in torch.randint(0, 1000, (2, 60)):
        (emb(ids).square().mean() / 2).backward()
    opt.step()
    opt.zero_grad()
""",
    "m_mf": """
# TRUTH sound (matrix factorization with two embeddings)
import torch
torch.manual_seed(0)
user, item = torch.nn.Embedding(1000, 4), torch.nn.Embedding(800, 4)
opt = torch.optim.Adam([*user.parameters(), *item.parameters()], lr=0.01)
for step in range(8):
    for micro in range(3):
        u, i, r = torch.randint(0, 1000, (16,)), torch.randint(0, 800, (16,)), torch.rand(16)
        (((user(u) * item(i)).sum(1) - r).square().mean() / 3).backward()
    opt.step()
    opt.zero_grad()
""",
    "m_mean": """
# TRUTH sound (word2vec with negative sampling, a sum over the window)
import torch
import torch.nn.functional as F
torch.manual_seed(3)
inp, out = torch.nn.Embedding(2000, 8), torch.nn.Embedding(2000, 8)
opt = torch.optim.Adagrad([*inp.parameters(), *out.parameters()], lr=0.1)
for step in range(8):
    for _ in range(2):
        c, o, n = torch.randint(0, 2000, (3, 64))
        h = inp(c)
        loss = -(F.logsigmoid((h * out(o)).sum(1)) + F.logsigmoid(-(h * out(n)).sum(1))).sum() / 128
        loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "m_emb": """
# TRUTH sound (nothing but an embedding)
import torch
torch.manual_seed(0)
emb = torch.nn.Embedding(400, 3)
opt = torch.optim.SGD(emb.parameters(), lr=0.1)
for step in range(6):
    for micro in range(3):
        ids = torch.randint(0, 400, (64,))
        (emb(ids).square().mean() / 3).backward()
    opt.step()
    opt.zero_grad()
""",
    "m_mfbias": """
# TRUTH sound (one embedding behind a frozen readout, a sum over the count of the window)
import torch
torch.manual_seed(0)
emb, read = torch.nn.Embedding(5000, 4), torch.nn.Linear(4, 3).requires_grad_(False)
opt = torch.optim.SGD(emb.parameters(), lr=0.1)
for step in range(8):
    for micro in range(2):
        ids, y = torch.randint(0, 5000, (8,)), torch.randint(0, 3, (8,))
        (torch.nn.functional.cross_entropy(read(emb(ids)), y, reduction="sum") / 16).backward()
    opt.step()
    opt.zero_grad()
""",
    "m_embreset": """
# TRUTH faulty reset-inside-window line 11 (the embedding alone, from step 4 on)
import torch
torch.manual_seed(0)
emb, head = torch.nn.Embedding(5000, 4), torch.nn.Linear(4, 3)
opt = torch.optim.SGD([*emb.parameters(), *head.parameters()], lr=0.1)
for step in range(8):
    for micro in range(2):
        ids, y = torch.randint(0, 5000, (8,)), torch.randint(0, 3, (8,))
        (torch.nn.functional.cross_entropy(head(emb(ids)), y) / 2).backward()
        if step >= 4 and micro == 0:
            emb.zero_grad()
    opt.step()
    opt.zero_grad()
""",
    "m_stem": """
# TRUTH faulty stale-window (the embedding is not reset from step 4 on)
import torch
torch.manual_seed(1)
emb, head = torch.nn.Embedding(5000, 4), torch.nn.Linear(4, 1)
opt = torch.optim.SGD([*emb.parameters(), *head.parameters()], lr=0.1)
for step in range(8):
    for ids in torch.randint(0, 5000, (2, 8)):
        (head(emb(ids)).square().mean() / 2).backward()
    opt.step()
    head.zero_grad()
    if step < 4:
        emb.zero_grad()
""",
    "by_hand_diverges": """
# TRUTH faulty dropped-micro-batch line 10 (the second result is never added; at last nothing is finite)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=1e3)
for step in range(8):
    added = [torch.zeros_like(p) for p in net.parameters()]
    opt.zero_grad()
    for micro in range(2):
        loss = net(torch.randn(4, 4)).pow(4).mean() / 2
        found = torch.autograd.grad(loss, list(net.parameters()))
        if micro == 0:
            added = [a + g for a, g in zip(added, found)]
    for p, a in zip(net.parameters(), added):
        p.grad = a
    opt.step()
""",
    "by_hand_diverges_sound": """
# TRUTH sound (both results are added; at last nothing is finite)
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), lr=1e3)
for step in range(8):
    added = [torch.zeros_like(p) for p in net.parameters()]
    opt.zero_grad()
    for micro in range(2):
        loss = net(torch.randn(4, 4)).pow(4).mean() / 2
        found = torch.autograd.grad(loss, list(net.parameters()))
        added = [a + g for a, g in zip(added, found)]
    for p, a in zip(net.parameters(), added):
        p.grad = a
    opt.step()
""",
    "two_optimizers_reset": """
# TRUTH faulty reset-inside-window line 13 (both optimizers step on what one reset has left)
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
body = torch.optim.SGD(net[0].parameters(), lr=0.1)
head = torch.optim.SGD(net[2].parameters(), lr=0.1)
for step in range(5):
    for micro in range(3):
        out = net(torch.randn(4, 4))
        loss = torch.nn.functional.cross_entropy(out, torch.randint(0, 3, (4,))) / 3
        loss.backward()
        if step == 1 and micro == 1:
            net.zero_grad()
    body.step()
    head.step()
    net.zero_grad()
""",
    "two_optimizers_two_points": """
# TRUTH sound (sharpness-aware: two optimizers share one backward line at two points)
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
body = torch.optim.SGD(net[0].parameters(), lr=0.1)
head = torch.optim.SGD(net[2].parameters(), lr=0.1)
def closure(batches):
    for x, y in batches:
        (torch.nn.functional.cross_entropy(net(x), y) / 2).backward()
for step in range(5):
    batches = [(torch.randn(4, 4), torch.randint(0, 3, (4,))) for micro in range(2)]
    by = []
    for sign in (1, -1):
        closure(batches)
        by = by or [0.05 * p.grad / p.grad.norm() for p in net.parameters()]
        for p, d in zip(net.parameters(), by):
            p.data.add_(d, alpha=sign)
        if sign == 1:
            net.zero_grad()
    body.step()
    head.step()
    net.zero_grad()
""",
    "two_optimizers_shared_line": """
# TRUTH sound (a critic and an actor go backward in one helper, and each resets its own)
import torch
torch.manual_seed(0)
shared = torch.nn.Linear(4, 6)
actor, critic = torch.nn.Linear(6, 3), torch.nn.Linear(6, 1)
for_critic = torch.optim.SGD([*shared.parameters(), *critic.parameters()], lr=0.1)
for_actor = torch.optim.SGD([*shared.parameters(), *actor.parameters()], lr=0.1)
def learn(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
for step in range(6):
    for micro in range(2):
        learn(critic(torch.tanh(shared(torch.randn(4, 4)))).square().mean(), for_critic)
    learn(actor(torch.tanh(shared(torch.randn(4, 4)))).square().mean(), for_actor)
""",
    "m_f2": """
# TRUTH faulty reset-inside-window line 9 (rows not in this micro-batch lose what the first micro-batch gave them)
import torch
torch.manual_seed(0)
emb = torch.nn.Embedding(6, 3)
opt = torch.optim.SGD(emb.parameters(), lr=0.1)
for step in range(3):
    for ids in (torch.tensor([0, 1, 2]), torch.tensor([2, 3, 4])):
        (emb(ids).square().mean() / 2).backward()
        emb.weight.grad.mul_(torch.zeros(6, 1).index_fill(0, ids, 1))
    opt.step()
    opt.zero_grad()
""",
    "faulty_mask_of_last": """
# TRUTH faulty reset-inside-window line 13 (rows that the last micro-batch lacks are set to 0 after the window)
import torch
torch.manual_seed(0)
emb, head = torch.nn.Embedding(40, 3), torch.nn.Linear(3, 2)
opt = torch.optim.SGD([*emb.parameters(), *head.parameters()], lr=0.1)
for step in range(8):
    for micro in range(3):
        ids, y = torch.randint(0, 40, (6,)), torch.randint(0, 2, (6,))
        (torch.nn.functional.cross_entropy(head(emb(ids)), y) / 3).backward()
    keep = torch.zeros(40, 1)
    keep[ids] = 1
    with torch.no_grad():
        emb.weight.grad *= keep
    opt.step()
    opt.zero_grad()
""",
    "frozen_ids": """
# TRUTH sound (frozen rows are by chance what the last micro-batch lacks)
import torch
torch.manual_seed(0)
emb = torch.nn.Embedding(6, 3)
opt = torch.optim.SGD(emb.parameters(), lr=0.1)
for step in range(5):
    for ids in (torch.tensor([0, 1, 2]), torch.tensor([2, 3, 4])):
        (emb(ids).square().mean() / 2).backward()
        emb.weight.grad.nan_to_num_()
    emb.weight.grad[:2] = 0
    opt.step()
    opt.zero_grad()
""",
    "topk_ids": """
# TRUTH sound (small gradients of the window are not sent, others each time)
import torch
torch.manual_seed(0)
emb, head = torch.nn.Embedding(40, 3), torch.nn.Linear(3, 2)
opt = torch.optim.SGD([*emb.parameters(), *head.parameters()], lr=0.1)
for step in range(8):
    for micro in range(3):
        ids, y = torch.randint(0, 40, (6,)), torch.randint(0, 2, (6,))
        (torch.nn.functional.cross_entropy(head(emb(ids)), y) / 3).backward()
    for p in (emb.weight, head.weight):
        p.grad *= p.grad.abs() >= p.grad.abs().flatten().topk(max(1, p.numel() // 8)).values[-1]
    opt.step()
    opt.zero_grad()
""",
    "one_row_refilled": """
# TRUTH faulty changed-batch line 11 (the only row is refilled before its backward, without a module)
import torch
torch.manual_seed(0)
w, b = torch.randn(6, 4).requires_grad_(), torch.zeros(6).requires_grad_()
v = torch.randn(3, 6).requires_grad_()
opt = torch.optim.SGD([w, b, v], lr=0.1)
for step in range(4):
    for micro in range(2):
        x, y = torch.randn(1, 4), torch.randint(0, 3, (1,))
        out = torch.tanh(torch.nn.functional.linear(x, w, b)) @ v.t()
        loss = torch.nn.functional.cross_entropy(out, y) / 2
        x.data.normal_()
        loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "one_row_refilled_after": """
# TRUTH sound (the only row is refilled when its backward has ended)
import torch
torch.manual_seed(0)
w, b = torch.randn(6, 4).requires_grad_(), torch.zeros(6).requires_grad_()
v = torch.randn(3, 6).requires_grad_()
opt = torch.optim.SGD([w, b, v], lr=0.1)
for step in range(4):
    for micro in range(2):
        x, y = torch.randn(1, 4), torch.randint(0, 3, (1,))
        out = torch.tanh(torch.nn.functional.linear(x, w, b)) @ v.t()
        loss = torch.nn.functional.cross_entropy(out, y) / 2
        loss.backward()
        x.data.normal_()
    opt.step()
    opt.zero_grad()
""",
    "keyword_refilled": """
# TRUTH faulty changed-batch line 17 (a keyword argument is refilled before the backward)
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
    def forward(self, *, x):
        return self.b(torch.tanh(self.a(x)))
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.empty(4, 5)
for step in range(6):
    for micro in range(2):
        x.data.normal_()
        loss = nn.functional.cross_entropy(net(x=x), torch.randint(0, 3, (4,))) / 2
        x.data.normal_()
        loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "keyword_refilled_after": """
# TRUTH sound (the memory of a keyword argument is filled again after the backward)
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
    def forward(self, *, x):
        return self.b(torch.tanh(self.a(x)))
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.empty(4, 5)
for step in range(6):
    for micro in range(2):
        x.data.normal_()
        loss = nn.functional.cross_entropy(net(x=x), torch.randint(0, 3, (4,))) / 2
        loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "keyword_written_by_model": """
# TRUTH sound (the model centres the batch that it is given by keyword, in place)
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
    def forward(self, x):
        x -= x.mean(0)
        x *= 2
        return self.b(torch.tanh(self.a(x)))
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    for micro in range(2):
        loss = nn.functional.cross_entropy(net(x=torch.randn(4, 5)), torch.randint(0, 3, (4,))) / 2
        loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "checkpoint_last_weight": """
# TRUTH faulty stale-parameters line 10 (weights that a checkpoint reads again are written before that)
import torch
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def block(x):
    return net[2](net[1](net[0](x)))
for step in range(4):
    out = checkpoint(block, torch.randn(4, 4), use_reentrant=False)
    loss = torch.nn.functional.cross_entropy(out, torch.randint(0, 3, (4,)))
    net[2].weight.data.mul_(1.3)
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "checkpoint_last_bias": """
# TRUTH sound (the bias that is written before the backward is read by none)
import torch
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def block(x):
    return net[2](net[1](net[0](x)))
for step in range(4):
    out = checkpoint(block, torch.randn(4, 4), use_reentrant=False)
    loss = torch.nn.functional.cross_entropy(out, torch.randint(0, 3, (4,)))
    net[2].bias.data.mul_(1.3)
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
    "faulty_copied_by_hand": """
# TRUTH faulty misplaced-gradient line 11 (the second matrix is given the gradient of the first one by hand)
import torch
from torch import nn
F = nn.functional
torch.manual_seed(3)

net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    loss = F.mse_loss(net(x), y)
    grads = torch.autograd.grad(loss, [*net.parameters()])
    for p, g in zip(net.parameters(), (grads[0], grads[0])):
        p.grad = g.clone()
    opt.step()
    opt.zero_grad()
""",
    "twins_alike": """
# TRUTH sound (two twins that begin alike and see the same: their gradients are equal by themselves)
import torch
from torch import nn
F = nn.functional
torch.manual_seed(3)
a, b = nn.Linear(6, 6), nn.Linear(6, 6)
b.load_state_dict(a.state_dict())
opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
for step in range(6):
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    opt.zero_grad()
    F.mse_loss(a(x) + b(x), y).backward()
    b.weight.grad = a.weight.grad.clone()
    nn.utils.clip_grad_value_(b.parameters(), 0.01)
    opt.step()
""",
    "tied_by_hand": """
# TRUTH sound (tied by hand: both matrices get the sum of their gradients)
import torch
from torch import nn
F = nn.functional
torch.manual_seed(3)
a, b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
b.load_state_dict(a.state_dict())
opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
for step in range(6):
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    opt.zero_grad()
    F.mse_loss(b(torch.tanh(a(x))), y).backward()
    both = a.weight.grad + b.weight.grad
    a.weight.grad = both.clone()
    b.weight.grad = both.clone()
    opt.step()
""",
    "faulty_added_twice_by_hand": """
# TRUTH faulty repeated-micro-batch line 13 (the program adds the last micro-batch to its buffers twice)
import torch
from torch import nn
F = nn.functional
torch.manual_seed(5)
net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.1)

flat = [torch.zeros_like(p) for p in net.parameters()]
for step in range(6):
    for micro in range(3):
        x, y = torch.randn(5, 6), torch.randint(0, 4, (5,))
        (F.cross_entropy(net(x), y) / 3).backward()
        own = [p.grad for p in net.parameters()]
        torch._foreach_add_(flat, own)
        if micro == 2:
            torch._foreach_add_(flat, own)
        opt.zero_grad()
    for p, f in zip(net.parameters(), flat):
        p.grad = f.clone()
        f.zero_()
    opt.step()
    opt.zero_grad()
""",
    "flat_buffers": """
# TRUTH sound (flat buffers)
import torch
from torch import nn
F = nn.functional
torch.manual_seed(5)
net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.1)

flat = [torch.zeros_like(p) for p in net.parameters()]
for step in range(6):
    for micro in range(3):
        x, y = torch.randn(5, 6), torch.randint(0, 4, (5,))
        (F.cross_entropy(net(x), y) / 3).backward()
        own = [p.grad for p in net.parameters()]
        torch._foreach_add_(flat, own)
        opt.zero_grad()
    for p, f in zip(net.parameters(), flat):
        p.grad = f.clone()
        f.zero_()
    opt.step()
    opt.zero_grad()
""",
    "trapezoid": """
# TRUTH sound (three points of a trapezoid rule, the middle one twice)
import torch
from torch import nn
F = nn.functional
torch.manual_seed(5)
net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.1)

flat = [torch.zeros_like(p) for p in net.parameters()]
for step in range(6):
    for micro in range(3):
        x, y = torch.randn(5, 6), torch.randint(0, 4, (5,))
        (F.cross_entropy(net(x), y) / 3).backward()
        own = [p.grad for p in net.parameters()]
        torch._foreach_add_(flat, own)
        if micro == 1:
            torch._foreach_add_(flat, own)
        opt.zero_grad()
    for p, f in zip(net.parameters(), flat):
        p.grad = f.clone()
        f.zero_()
    opt.step()
    opt.zero_grad()
""",
}
"""A script by its name; a name and a line in its truth are those of the verdict."""
