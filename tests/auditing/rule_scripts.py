"""Training scripts on which rules of the audit's tables fire that no other table of scripts has."""

from __future__ import annotations

START = """
import torch
import torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def batch(n=5):
    return torch.randn(n, 3), torch.randint(0, 3, (n,))
def loss(n=5, model=model, **how):
    x, y = batch(n)
    return F.cross_entropy(model(x), y, **how)
def mean(n):
    return loss(n) * n / 7
def step():
    optimizer.step()
    optimizer.zero_grad()
"""
HEAD = """
head = torch.nn.Linear(3, 3)
both = torch.nn.Sequential(model, head)
other = torch.optim.SGD({of}.parameters(), lr=0.1)
"""
RULED = {
    "faulty_second_step": """
for _ in range(4):
    for _ in range(2):
        (loss() / 2).backward()
    optimizer.step()
    step()
""",
    "faulty_pass_of_another_optimizer": HEAD.format(of="both")
    + """
for _ in range(5):
    loss(model=both).backward()
    other.step()
    head.zero_grad()
    for _ in range(2):
        (loss() / 2).backward()
    step()
""",
    "sound_results_after_another_optimizer": HEAD.format(of="head")
    + """
for _ in range(5):
    loss(model=both).backward()
    other.step()
    other.zero_grad()
    model.zero_grad()
    parameters = [*model.parameters()]
    for p, g in zip(parameters, torch.autograd.grad(loss(), parameters)):
        p.grad = g
    step()
""",
    "sound_discarded_window": """
for number in range(6):
    for _ in range(2):
        (loss() / 2).backward()
    if number == 3:
        optimizer.zero_grad()
    else:
        step()
""",
    "faulty_noise_between": """
for _ in range(4):
    for _ in range(3):
        (loss() / 3).backward()
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad) * 0.1)
    step()
""",
    "faulty_clipped_to_nothing": """
for _ in range(4):
    for number in range(3):
        (loss() / 3).backward()
        if number < 2:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.0)
    step()
""",
    "faulty_head_clipped_between": """
for _ in range(4):
    for _ in range(3):
        (loss() / 3).backward()
        torch.nn.utils.clip_grad_norm_(model[2].parameters(), 0.05)
    step()
""",
    "faulty_clipped_between": """
for _ in range(4):
    for _ in range(3):
        (loss() / 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    step()
""",
    "faulty_scaled_between": """
for _ in range(4):
    for factor in (1, 0.7, 1.2, 0.5):
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= factor
        (loss() / 4).backward()
    step()
""",
    "faulty_expert_reset": """
experts = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
for _ in range(4):
    for number in (0, 1, 0):
        (loss(model=experts[number]) / 3).backward()
        if number:
            experts[1].zero_grad()
    step()
""",
    "faulty_backward_twice": """
for _ in range(4):
    for _ in range(2):
        half = loss() / 2
        half.backward(retain_graph=True)
        half.backward()
    step()
""",
    "faulty_zeroed_before_step": """
for _ in range(4):
    for _ in range(2):
        (loss() / 2).backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
""",
    "faulty_replaced_layer": """
loss().backward()
step()
loss().backward()
model[2] = torch.nn.Linear(4, 3)
optimizer.param_groups[0]["params"][2:] = [*model[2].parameters()]
optimizer.step()
""",
    "faulty_overlapping_gradients": """
buffer = torch.zeros(31)
for p, at in zip(model.parameters(), (0, 11, 15, 27)):
    p.grad = buffer[at : at + p.numel()].view_as(p)
for _ in range(3):
    for _ in range(2):
        (loss() / 2).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
""",
    "faulty_fewer_at_the_second_point": """
def moved(by, sign):
    with torch.no_grad():
        for p, d in zip(model.parameters(), by):
            p.add_(d, alpha=sign)
for _ in range(3):
    window = [batch() for _ in range(3)]
    for x, y in window:
        (F.cross_entropy(model(x), y) / 3).backward()
    by = [0.1 * p.grad for p in model.parameters()]
    moved(by, 1)
    optimizer.zero_grad()
    for x, y in window[:2]:
        (F.cross_entropy(model(x), y) / 3).backward()
    moved(by, -1)
    step()
""",
    "sound_plain_sum": """
for _ in range(3):
    for n in (3, 4):
        loss(n, reduction="sum").backward()
    step()
""",
    "finding_clipped_before_unscaling": """
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(4):
    for n in (3, 4):
        scaler.scale(mean(n)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    step()
""",
    "sound_unscaled_by_hand": """
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(4):
    for n in (3, 4):
        x, y = batch(n)
        out = model(x)
        both = F.cross_entropy(out, y) + 0.3 * out.square().mean()
        scaler.scale(both * n / 7).backward()
    for p in model.parameters():
        p.grad /= 64
    step()
""",
    "faulty_factor_left_out": """
for number in range(6):
    scale = 1.0 if number == 3 else 16.0
    for n in (3, 4):
        (scale * mean(n)).backward()
    for p in model.parameters():
        p.grad /= 16
    step()
""",
    "faulty_factor_left_in": """
for number in range(6):
    for n in (3, 4):
        (16 * mean(n)).backward()
    if number != 3:
        for p in model.parameters():
            p.grad /= 16
    step()
""",
    "faulty_begun_anew": """
for number in range(6):
    for n in (3, 3, 4) if number == 3 else (3, 4):
        mean(n).backward()
    step()
""",
    "faulty_shorter_than_stated": """
for _ in range(3):
    for _ in range(2):
        (loss() / 4).backward()
    step()
""",
    "faulty_step_per_pass": """
for _ in range(6):
    loss().backward()
    step()
""",
    "faulty_reset_inside_after_single_passes": """
for number in range(8):
    passes = 1 if number < 4 else 4
    for _ in range(passes):
        optimizer.zero_grad()
        (loss() / passes).backward()
    optimizer.step()
""",
    "sound_skipped_single_passes": """
for number in range(30):
    loss().backward()
    if number in (5, 6, 11, 12, 13, 20, 21):
        optimizer.zero_grad()
    else:
        step()
""",
    "faulty_count_of_nothing": """
count = 10
for sizes in ((4, 5), (6, 7), (5, 5), (8, 6), (7, 4), (9, 6), (5, 6)):
    for n in sizes:
        (loss(n, reduction="sum") / count).backward()
    count = sum(sizes) + torch.randint(-2, 3, ()).item()
    step()
""",
    "faulty_missing_step": """
for number in range(7):
    for _ in range(2):
        (loss() / 2).backward()
    if number != 3:
        step()
""",
    "finding_constant_count": """
for sizes in ((4, 5), (6, 7), (5, 5), (8, 6), (7, 4), (9, 6), (5, 6)):
    for n in sizes:
        (loss(n, reduction="sum") / 12).backward()
    step()
""",
    "finding_frozen_column": """
for _ in range(5):
    for _ in range(2):
        (loss() / 2).backward()
        model[0].weight.grad[:, 0] = 0
    step()
""",
    "faulty_masked_once": """
for _ in range(5):
    for number in range(2):
        (loss() / 2).backward()
        if number == 0:
            model[0].weight.grad[:, 0] = 0
    step()
""",
    "faulty_scaler_of_two_optimizers": HEAD.format(of="head")
    + """
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
for number in range(10):
    scaler.scale(loss(model=head)).backward()
    scaler.step(other)
    head.zero_grad()
    scaler.scale(loss() / 2).backward()
    if number % 2:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
""",
}
"""A script by its name, which says its verdict: those that are `finding` hold with one."""
