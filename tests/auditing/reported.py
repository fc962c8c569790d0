"""Scripts after public bug reports and public projects: what an audit says of each kind, sound and
faulty.
"""

from __future__ import annotations

from tests.auditing.scripts import Script

HEAD = """\
import torch
from torch import nn
F = nn.functional
torch.manual_seed(0)
"""
NET = (
    HEAD
    + """\
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def loss_of(n=4):
    return F.cross_entropy(net(torch.randn(n, 5)), torch.randint(0, 3, (n,)))
"""
)
AVERAGED = """\
import copy
ema = copy.deepcopy(net).requires_grad_(False)
def update():
    with torch.no_grad():
        for e, p in zip(ema.parameters(), net.parameters()):
            e.mul_(0.9).add_(p, alpha=0.1)

"""
HANDED_OVER = """\
import copy
worker = copy.deepcopy(net)
for step in range(4):
    worker.load_state_dict(net.state_dict())
    loss = F.cross_entropy(worker(torch.randn(4, 5)), torch.randint(0, 3, (4,)))
    worker.zero_grad(set_to_none=TO_NONE)
    loss.backward()
    for p, shared in zip(worker.parameters(), net.parameters()):
        if shared.grad is None: shared.grad = p.grad
    opt.step()
"""
OWN_BUFFER = """\
def add_up(p):
    p.main_grad.add_(p.grad)
    p.grad = None
for p in net.parameters():
    p.main_grad = torch.zeros_like(p)
    p.register_post_accumulate_grad_hook(add_up)
for step in range(5):
    for _ in range(3):
        (loss_of() / 3).backward()
    for p in net.parameters(): p.grad = p.main_grad
    opt.step()
    for p in net.parameters(): p.grad = None
"""
BEGUN_ANEW = """\
def window(x, y, size):
    for m, rows in enumerate(x.split(size)):
        if len(rows) > 4 and step == 3 and m == 1: raise MemoryError
        (F.cross_entropy(net(rows), y[m * size : (m + 1) * size]) / (16 // size)).backward()
size = 8
for step in range(6):
    x, y = torch.randn(16, 5), torch.randint(0, 3, (16,))
    while True:
        try:
            window(x, y, size)
            break
        except MemoryError:
            opt.zero_grad()  # anew
            size //= 2
    opt.step()
    opt.zero_grad()
"""
PENALTY = """\
for step in range(5):
    for _ in range(4):
        penalty = sum(p.norm() for p in net.parameters())
        (loss_of() / 4 + 0.1 * penalty).backward()
    opt.step()
    opt.zero_grad()
"""
SCALED_BY_HAND = """\
for step in range(7):
    for _ in range(3):
        (loss_of() / 3 * SCALE).backward()
    for p in net.parameters(): p.grad /= TAKEN
    opt.step()
    opt.zero_grad()
"""
IN_SOME = "(1024 if step % 3 else 1)"
MASKED = """\
for step in range(5):
    for _ in range(3):
        mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
        losses = F.cross_entropy(net(torch.randn(5, 5)), torch.randint(0, 3, (5,)), reduction="none")
        ((losses * mask).sum() / (mask.sum() + 1e-2)).backward()
    opt.step()
    opt.zero_grad()
"""
RETRIED = """\
calls = 0
class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        global calls
        calls += 1
        if calls % 7 == 0:
            raise RuntimeError("out of memory")
        return grad
def micro_batch():
    x, y = torch.randn(4, 5), torch.randint(0, 3, (4,))
    (F.cross_entropy(net[2](Raises.apply(net[1](net[0](x)))), y) / 3).backward()
"""
CHUNKED = """\
net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    chunks = torch.randn(12, 5).split(4)
    with torch.no_grad():
        rows = torch.cat([net(x) for x in chunks])
    rows.requires_grad_()
    F.cross_entropy(rows @ rows.T, torch.arange(12)).backward()
    for x, given in zip(chunks, rows.grad.split(4)):
        net(x).backward(given)
    opt.step()
    opt.zero_grad()
"""
MEAN, SHARE = "(F.cross_entropy(net(x), y) / 3)", "(F.cross_entropy(net(x), y) * len(y) / 12)"


OWN = """\
K = 1
class Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(())
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)
    def forward(self, x):
        h = self.a(x)
        return self.b(Attach.apply(h, 0.01 * h.square().mean()))
model = Model()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    for _ in range(K):
        (model(torch.randn(5, 3)).square().mean() / K).backward()
    opt.step()
    opt.zero_grad()
"""
OF_FOUR = OWN.replace("K = 1", "K = 4")


def _script(
    verdict: str, text: str, said: tuple[str, ...] = (), finding: str = "", head: str = NET
) -> tuple[Script, str]:
    return Script(head + text, verdict, said), finding


REPORTED = {
    "sound_own_gradient": _script("holds", OWN, finding="adds a gradient of its own"),
    "sound_own_gradient_divided": _script(
        "holds",
        OF_FOUR.replace("torch.ones(())", "torch.ones(()) / K"),
        finding="adds a gradient of its own",
    ),
    "sound_own_gradient_of_a_divided_loss": _script(
        "holds",
        OF_FOUR.replace("h.square().mean()", "h.square().mean() / K"),
        finding="adds a gradient of its own",
    ),
    "faulty_own_gradient_undivided": _script(
        "violated", OF_FOUR, said=("wrong-scale",), finding="adds a gradient of its own"
    ),
    "sound_shared_trunk_and_own_heads": _script(
        "holds",
        """\
trunk, heads = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.ModuleList(nn.Linear(8, k) for k in (3, 2))
params = [*trunk.parameters(), *heads.parameters()]
opt = torch.optim.Adam(params, lr=0.01)
for step in range(6):
    x = torch.randn(10, 6); ys = [torch.randint(0, k, (10,)) for k in (3, 2)]
    grads = []
    for t in range(2):
        opt.zero_grad()
        F.cross_entropy(heads[t](trunk(x)), ys[t]).backward()
        grads.append([None if p.grad is None else p.grad.clone() for p in params])
    for p, a, b in zip(params, *grads):
        p.grad = a if b is None else b if a is None else (a + b) / 2
    opt.step()
""",
        finding="writes a combination into it",
        head=HEAD,
    ),
    "sound_signs_that_agree": _script(
        "holds",
        """\
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
params = list(model.parameters())
envs = [(torch.randn(20, 5), torch.randint(0, 3, (20,))) for _ in range(3)]
for step in range(6):
    kept = []
    for x, y in envs:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kept.append([p.grad.clone() for p in params])
    for i, p in enumerate(params):
        g = torch.stack([k[i] for k in kept])
        mask = (g.sign().sum(0).abs() == 3).float()
        p.grad = mask * g.mean(0)
    opt.step()
""",
        finding="writes a combination into it",
        head=HEAD,
    ),
    "sound_difference_of_two_results": _script(
        "holds",
        """\
one, two, alpha = nn.Linear(6, 3), nn.Linear(6, 3), nn.Parameter(torch.zeros(2))
ow = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
oa = torch.optim.SGD([alpha], lr=0.1)
def loss_of():
    x, y, mix = torch.randn(8, 6), torch.randint(0, 3, (8,)), alpha.softmax(0)
    return F.cross_entropy(mix[0] * one(x) + mix[1] * two(x), y)
for step in range(6):
    g1 = torch.autograd.grad(loss_of(), alpha)[0]
    g2 = torch.autograd.grad(loss_of(), alpha)[0]
    alpha.grad = g1 - 0.3 * g2
    oa.step()
    ow.zero_grad()
    loss_of().backward()
    ow.step()
""",
        head=HEAD,
    ),
    "sound_gradient_equal_to_its_parameter": _script(
        "holds",
        """\
w = nn.Parameter(torch.ones(20))
opt = torch.optim.SGD([w], lr=0.1)
for step in range(4):
    for _ in range(3):
        (w.square().sum() / 6).backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
""",
        finding="!is stepped with every micro-batch",
        head=HEAD,
    ),
    "sound_handed_over_once": _script("holds", HANDED_OVER.replace("TO_NONE", "False")),
    "faulty_handed_over_once": _script(
        "violated", HANDED_OVER.replace("TO_NONE", "True"), said=("stale-window",)
    ),
    "sound_own_buffer": _script(
        "holds",
        OWN_BUFFER + "    for p in net.parameters(): p.main_grad.zero_()\n",
        finding="!put together again",
    ),
    "faulty_own_buffer_of_running_sums": _script(
        "violated",
        OWN_BUFFER.replace("    p.grad = None\nfor", "for")
        + "    for p in net.parameters(): p.main_grad.zero_()\n",
        said=("repeated-micro-batch",),
    ),
    "faulty_own_buffer_never_zeroed": _script("violated", OWN_BUFFER, said=("stale-window",)),
    "sound_scaled_by_hand": _script(
        "holds",
        SCALED_BY_HAND.replace("SCALE", "1024").replace("TAKEN", "1024"),
        finding="!coefficient",
    ),
    "faulty_scaled_and_not_unscaled_in_some_steps": _script(
        "violated",
        SCALED_BY_HAND.replace("SCALE", "1024").replace("TAKEN", IN_SOME),
        said=("wrong-scale",),
    ),
    "faulty_unscaled_and_not_scaled_in_some_steps": _script(
        "violated",
        SCALED_BY_HAND.replace("SCALE", IN_SOME).replace("TAKEN", "1024"),
        said=("wrong-scale",),
    ),
    "faulty_masked_means_undivided": _script("violated", MASKED, said=("wrong-scale",)),
    "unjudged_given_gradients": _script(
        "unjudged", CHUNKED, said=("given a gradient whose elements differ",), head=HEAD
    ),
    "faulty_micro_batch_tried_again": _script(
        "violated",
        RETRIED
        + """\
for step in range(6):
    for _ in range(3):
        try:
            micro_batch()
        except RuntimeError:
            micro_batch()
    opt.step()
    opt.zero_grad()
""",
        said=("repeated-micro-batch",),
    ),
    "sound_window_tried_again": _script(
        "holds",
        RETRIED
        + """\
for step in range(6):
    while True:
        opt.zero_grad()
        try:
            for _ in range(3):
                micro_batch()
            break
        except RuntimeError:
            pass
    opt.step()
""",
        finding="a window was begun anew after an exception",
    ),
    "unjudged_optimizer_of_copies": _script(
        "unjudged",
        """\
import copy
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        said=("4 calls of backward were seen, and no parameter",),
        head=HEAD,
    ),
    "unjudged_all_frozen": _script(
        "unjudged",
        """\
for p in net.parameters(): p.requires_grad_(False)
for step in range(4):
    loss = loss_of()
    if loss.requires_grad: loss.backward()
    opt.step()
""",
        said=("every parameter of the optimizer is frozen",),
    ),
    "unjudged_never_stepped": _script(
        "unjudged",
        """\
for step in range(4):
    loss_of().backward()
    with torch.no_grad():
        for p in net.parameters(): p -= 0.1 * p.grad; p.grad = None
""",
        said=("that was made is never called",),
    ),
    "sound_frozen_later": _script(
        "holds",
        """\
for step in range(8):
    if step == 5: net.requires_grad_(False)
    loss = loss_of()
    if loss.requires_grad: loss.backward()
    opt.step()
    opt.zero_grad()
""",
        finding="3 of 8 steps not judged (5, 6, 7): every parameter",
    ),
    "finding_detached_body": _script(
        "holds",
        """\
body, head = nn.Linear(3, 3), nn.Linear(3, 1)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
for step in range(4):
    head(body(torch.randn(5, 3)).detach()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        finding="2 of 4 parameters of the optimizer got no gradient",
        head=HEAD,
    ),
    "finding_listed_twice": _script(
        "holds",
        """\
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
opt = torch.optim.SGD([*net.parameters(), net[2].weight], lr=0.1)
def loss_of(n=4):
    return F.cross_entropy(net(torch.randn(n, 5)), torch.randint(0, 3, (n,)))

for step in range(6):
    for _ in range(3):
        (loss_of() / 3).backward()


    opt.step()
    opt.zero_grad()
""",
        finding="lists 2.weight more than once",
        head=HEAD,
    ),
    "finding_overlaid": _script(
        "holds",
        """\
emb, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
head.weight = nn.Parameter(emb.weight.data)
opt = torch.optim.SGD([*emb.parameters(), *head.parameters()], lr=0.1)
for step in range(4):
    ids = torch.randint(0, 7, (6,))
    F.cross_entropy(head(emb(ids)), ids).backward()
    opt.step()
    opt.zero_grad()
""",
        finding="over one memory",
        head=HEAD,
    ),
    "finding_schedule": _script(
        "holds",
        """\
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50)

for step in range(6):
    for _ in range(3):
        (loss_of() / 3).backward()
        sched.step()

    opt.step()
    opt.zero_grad()
""",
        finding="a schedule of the learning rate is stepped",
    ),
    "finding_average": _script(
        "holds",
        AVERAGED
        + """\
for step in range(6):
    for _ in range(3):
        (loss_of() / 3).backward()
        update()

    opt.step()
    opt.zero_grad()
""",
        finding="an average of the parameters is stepped",
    ),
    "sound_schedule_and_average": _script(
        "holds",
        AVERAGED
        + """\
for step in range(6):
    for _ in range(3):
        (loss_of() / 3).backward()


    opt.step()
    opt.zero_grad()
    update()
""",
        finding="!moves",
    ),
    "finding_clipped_scaled": _script(
        "holds",
        """\
scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)

for step in range(4):
    for _ in range(2):
        scaler.scale(loss_of() / 2).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
""",
        finding="scaler.unscale_(optimizer)",
    ),
    "sound_clipped_unscaled": _script(
        "holds",
        """\
scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)

for step in range(4):
    for _ in range(2):
        scaler.scale(loss_of() / 2).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
""",
        finding="!unscale_",
    ),
    "faulty_skipped_and_reset": _script(
        "violated",
        """\
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(12):
    loss = model(torch.randn(5, 3)).square().mean() / 4
    if i == 5:                      # as after a loss of NaN
        optimizer.zero_grad()
        continue
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        said=("reset-inside-window",),
        head=HEAD,
    ),
    "sound_window_given_up": _script(
        "holds",
        """\
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in range(4):
    for i in range(4):
        loss = model(torch.randn(5, 3)).square().mean() / 4
        if (window, i) == (2, 1):       # as after a loss of NaN
            optimizer.zero_grad()
            break
        loss.backward()
    else:
        optimizer.step()
        optimizer.zero_grad()
""",
        finding="a window was given up before its end",
        head=HEAD,
    ),
    "faulty_rest_counted_on": _script(
        "violated",
        """\
step = 0
for epoch in range(3):
    opt.zero_grad()
    for i in range(10):
        step += 1
        (loss_of() / 4).backward()
        if step % 4 == 0:
            opt.step()
            opt.zero_grad()
""",
        said=("tail-dropped",),
    ),
    "finding_warm_up": _script(
        "holds",
        """\
def train_step(scale):
    (loss_of() / scale).backward()
train_step(1)
for step in range(5):
    for _ in range(3):
        train_step(3)
    opt.step()
    opt.zero_grad()
""",
        finding="before the first step and never again",
    ),
    "faulty_count_and_k_beside_a_short_window": _script(
        "violated",
        """\
for window in ((5,3,4,6),(2,3,4,7),(5,1,4)):
    items = sum(window)
    for n in window:
        (F.cross_entropy(net(torch.randn(n, 5)), torch.randint(0, 3, (n,)), reduction='sum') / items / 4).backward()
    opt.step()
    opt.zero_grad()
""",
        said=("wrong-scale",),
    ),
    "finding_always_removed": _script(
        "holds",
        """\
for step in range(5):
    opt.zero_grad()
    for _ in range(2):
        (loss_of() / 2).backward()
    torch._foreach_zero_([p.grad for p in net[2].parameters()])
    opt.step()
""",
        finding="the gradient of 2.weight, 2.bias was taken away between backward and the step in 5 of 5 steps",
    ),
    "faulty_zeroed_in_place": _script(
        "violated",
        """\
for step in range(4):
    opt.zero_grad(set_to_none=False)
    for i in range(3):
        (loss_of() / 3).backward()
        if i == 0:
            for p in net[0].parameters():
                p.grad.zero_()
    opt.step()
""",
        said=("reset-inside-window",),
    ),
    "faulty_clipped_inside": _script(
        "violated",
        """\
def clip():
    nn.utils.clip_grad_value_(net.parameters(), 0.001)
for step in range(4):
    for i in range(3):
        (loss_of() / 3).backward()
        clip()  # each
    opt.step()
    opt.zero_grad()
""",
        said=("clipped",),
    ),
    "faulty_zeroed_together": _script(
        "violated",
        """\
for step in range(4):
    for i in range(4):
        (loss_of() / 4).backward()
        if i == 1:
            torch._foreach_zero_([p.grad for p in net.parameters()])
    opt.step()
    opt.zero_grad(set_to_none=False)
""",
        said=("reset-inside-window",),
    ),
    "finding_called_with_other_tensors": _script(
        "holds",
        """\
for step in range(3):
    for _ in range(2):
        smaller = {name: 0.9 * p for name, p in net.named_parameters()}
        logits = torch.func.functional_call(net, smaller, (torch.randn(4, 5),))
        (F.cross_entropy(logits, torch.randint(0, 3, (4,))) / 2).backward()
    opt.step()
    opt.zero_grad()
""",
        finding="the model is called with other tensors than its parameters at",
    ),
    "faulty_most_parameters_reset": _script(
        "violated",
        """\
for step in range(4):
    for i in range(3):
        (loss_of() / 3).backward()
        if i == 1:
            net[0].weight.grad = None
            net[0].bias.grad = None
            net[2].weight.grad = None
    opt.step()
    opt.zero_grad()
""",
        said=("reset-inside-window",),
    ),
    "sound_curvature_last": _script(
        "holds",
        """\
for step in range(7):
    if step % 3 == 0:
        loss_of(6).backward()
        opt.zero_grad()
    for _ in range(2):
        (loss_of() / 2).backward()
    opt.step()
    opt.zero_grad()
loss_of(6).backward()
""",
    ),
    "sound_called_by_a_method": _script(
        "holds",
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.scale, self.b = nn.Linear(5, 8), nn.Parameter(torch.ones(8)), nn.Linear(8, 3)
    def forward(self, x):
        return self.b(self.a(x).tanh() * self.scale)
    def features(self, x):
        return self.a(x).tanh() * self.scale
    def logits(self, x):
        return self.b(self.features(x))
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)

for step in range(4):
    for _ in range(3):
        (F.cross_entropy(net.logits(torch.randn(4, 5)), torch.randint(0, 3, (4,))) / 3).backward()
    opt.step()
    opt.zero_grad()
""",
        finding="1 parameter had no part in a window computed again (used at",
        head=HEAD,
    ),
    "sound_begun_anew_by_less": _script(
        "holds", BEGUN_ANEW, finding="a window was begun anew (`.grad` was reset at"
    ),
    "faulty_begun_anew_by_less": _script(
        "violated",
        BEGUN_ANEW.replace("opt.zero_grad()  # anew", "pass"),
        said=("repeated-micro-batch",),
    ),
    "faulty_tails_of_a_while_loop": _script(
        "violated",
        """\
epoch = 0
while epoch < 3:
    opt.zero_grad()
    for i, n in enumerate((4,) * 8):
        (loss_of() / 3).backward()
        if i % 3 == 2:
            opt.step()
            opt.zero_grad()
    epoch += 1
""",
        said=("reset-inside-window", "tail-dropped"),
    ),
    "finding_penalty_not_divided": _script(
        "holds",
        PENALTY.replace("norm", "sum"),
        finding="no division of this term (Sum(parameter)) by the number",
    ),
    "sound_penalty_divided": _script(
        "holds",
        PENALTY.replace("/ 4 + 0.1 * penalty", "/ 4 + 0.1 * penalty / 4"),
        finding="!no division of this term",
    ),
    "faulty_means_beside_a_sum": _script(
        "violated",
        """\
for window in ((5, 3, 4, 6), (2, 3, 4, 7), (5, 1, 4)):
    for n in window:
        out = net(torch.randn(n, 5))
        first = F.cross_entropy(out, torch.randint(0, 3, (n,)), reduction="sum") / sum(window)
        second = F.l1_loss(out, torch.zeros(n, 3))  # means
        (first + 0.02 * second).backward()
    opt.step()
    opt.zero_grad()
""",
        said=("mean-of-means",),
    ),
    "sound_average_between_two_optimizers": _script(
        "holds",
        AVERAGED
        + """\
policy = nn.Linear(5, 5)
policy_opt = torch.optim.SGD(policy.parameters(), lr=0.1)
for step in range(6):
    opt.zero_grad()
    loss_of().backward()
    opt.step()
    policy_opt.zero_grad()
    (-net(policy(torch.randn(4, 5))).mean()).backward()
    policy_opt.step()
    update()
""",
        finding="!an average of the parameters",
    ),
}
"""Name -> a script, and what a finding of its audit says, or must not say where it begins with `!`."""
