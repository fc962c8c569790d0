"""Training scripts whose fault shows only where the audit measures what it is told, and sound twins
of them: the second computation, custom functions outside of modules, and edits of `.grad`.
"""

from __future__ import annotations

from tests.auditing.scripts import Script

START = """
import torch
import torch.nn.functional as F
import numpy, random
torch.manual_seed(0)
numpy.random.seed(0)
random.seed(0)
"""
LOOP = """
for step in range({steps}):
    for _ in range({passes}):
        {backward}
    {after}
    optimizer.step()
    optimizer.zero_grad()
"""
BODY = "torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))"


def _script(
    backward: str,
    *,
    model: str = BODY,
    before: str = "",
    after: str = "pass",
    optimizer: str = "torch.optim.SGD(model.parameters(), lr=0.1)",
    passes: int = 1,
    steps: int = 5,
    tail: str = "",
) -> str:
    """Return a script: `backward` is what one micro-batch does."""
    made = f"model = {model}\noptimizer = {optimizer}\n"
    loop = LOOP.format(
        steps=steps,
        passes=passes,
        backward=backward.strip().replace("\n", "\n        "),
        after=after.strip().replace("\n", "\n    "),
    )
    return f"{START}{before}\n{made}{loop}{tail}\n"


def holds(backward: str, **pieces) -> Script:
    return Script(_script(backward, **pieces), "holds")


def violated(diagnosis: str, backward: str, **pieces) -> Script:
    return Script(_script(backward, **pieces), "violated", (diagnosis,))


def unjudged(reason: str, backward: str, **pieces) -> Script:
    return Script(_script(backward, **pieces), "unjudged", (reason,))


PRODUCT = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, {factor} * g.T @ x
w = torch.nn.Parameter(torch.randn(1, 4))
"""
OUTSIDE = {
    "model": "torch.nn.Linear(3, 4)",
    "optimizer": "torch.optim.SGD([*model.parameters(), w], lr=0.1)",
}
SQUARES = """
class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x - y)
        return (x - y).square().mean()
    @staticmethod
    def backward(ctx, g):
        (d,) = ctx.saved_tensors
        return {factor} * g * d / d.numel(), None
class Loss(torch.nn.Module):
    def forward(self, x, y):
        return Squares.apply(x, y)
loss_of = Loss()
"""
SIGN = """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()
    @staticmethod
    def backward(ctx, g):
        return g
"""
HARD_SWISH = """
class HardSwish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * (x + 3).clamp(0, 6) / 6
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        inner = (2 * x + 3) / 6
        return g * torch.where(x > 3, torch.ones_like(x), {inner})
class Activation(torch.nn.Module):
    def forward(self, x):
        return HardSwish.apply(x)
"""
THROUGH = """
class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(-1, 1)
    @staticmethod
    def backward(ctx, g):
        return g
class Activation(torch.nn.Module):
    def forward(self, x):
        return Clamped.apply(x)
"""
IN_BETWEEN = "torch.nn.Sequential(torch.nn.Linear(3, 8), Activation(), torch.nn.Linear(8, 1))"
FUNCTIONS = {
    "faulty_slope_of_a_part": violated(
        "wrong-backward",
        "model(5 * torch.randn(9, 3)).square().mean().backward()",
        before=HARD_SWISH.format(inner="inner"),
        model=IN_BETWEEN,
    ),
    "sound_slope_of_a_part": holds(
        "model(5 * torch.randn(9, 3)).square().mean().backward()",
        before=HARD_SWISH.format(inner="torch.where(x < -3, torch.zeros_like(x), inner)"),
        model=IN_BETWEEN,
    ),
    "sound_straight_through_a_clamp": holds(
        "model(5 * torch.randn(9, 3)).square().mean().backward()", before=THROUGH, model=IN_BETWEEN
    ),
    "faulty_weight_outside": violated(
        "wrong-backward",
        "Product.apply(model(torch.randn(5, 3)), w).square().mean().backward()",
        before=PRODUCT.format(factor=-1),
        **OUTSIDE,
    ),
    "faulty_weight_outside_in_windows": violated(
        "wrong-backward",
        "(Product.apply(model(torch.randn(5, 3)), w).square().mean() / 3).backward()",
        before=PRODUCT.format(factor=0.5),
        passes=3,
        **OUTSIDE,
    ),
    "faulty_loss_module": violated(
        "wrong-backward",
        "loss_of(model(torch.randn(5, 3)), torch.randn(5, 1)).backward()",
        before=SQUARES.format(factor=1),
    ),
    "faulty_function_without_module": violated(
        "wrong-backward",
        "Squares.apply(torch.randn(5, 3) @ model, torch.randn(5, 1)).backward()",
        before=SQUARES.format(factor=3),
        model="torch.nn.Parameter(torch.randn(3, 1))",
        optimizer="torch.optim.SGD([model], lr=0.1)",
    ),
    "sound_weight_outside": holds(
        "(Product.apply(model(torch.randn(5, 3)), w).square().mean() / 2).backward()",
        before=PRODUCT.format(factor=1),
        passes=2,
        **OUTSIDE,
    ),
    "sound_loss_module": holds(
        "loss_of(model(torch.randn(5, 3)), torch.randn(5, 1)).backward()",
        before=SQUARES.format(factor=2),
    ),
    "sound_straight_through_outside": holds(
        "(Sign.apply(model(torch.randn(5, 3))) - 0.3).square().mean().backward()", before=SIGN
    ),
    "sound_penalty_outside": holds(
        "(model(torch.randn(5, 3)).square().mean() + 0.1 * model[0].weight.square().sum()).backward()"
    ),
    "sound_prompt": holds(
        "model(torch.cat([prompt, torch.randn(5, 3)])).square().mean().backward()",
        before="prompt = torch.nn.Parameter(torch.randn(2, 3))\n",
        optimizer="torch.optim.SGD([*model.parameters(), prompt], lr=0.1)",
    ),
}
"""Custom functions and weights outside of recorded calls."""

IGNORING = """
class Dice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, t):
        both, all = (p * t).sum(), p.sum() + t.sum()
        ctx.save_for_backward(2 * both / all**2 - 2 * t / all)
        return 1 - 2 * both / all
    @staticmethod
    def backward(ctx, g):
        return {factor} * ctx.saved_tensors[0], None
"""
SWISH = """
@torch.library.custom_op("{name}::swish", mutates_args=())
def swish(x: torch.Tensor, beta: float) -> torch.Tensor:
    return x * torch.sigmoid(beta * x)
def set_up(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.beta = inputs[1]
def backward(ctx, g):
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(ctx.beta * x)
    return g * (s + {factor} * x * s * (1 - s)), None
torch.library.register_autograd("{name}::swish", backward, setup_context=set_up)
class Activation(torch.nn.Module):
    def forward(self, x):
        return swish(x, 1.7)
"""
WRITING = """
class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        {written}
        return y.clone()
    @staticmethod
    def backward(ctx, g):
        return 0.5 * g
class Activation(torch.nn.Module):
    def forward(self, x):
        return Half.apply({before}(x))
"""
ODD = """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        rows = {rows}
        out = torch.zeros_like(x)
        out[:rows] = 2 * x[:rows] * g[:rows]
        return out
class Activation(torch.nn.Module):
    def forward(self, x):
        return Square.apply(x)
"""
PENALTY = """
class Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.softplus(x)
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.sigmoid({x})
class Activation(torch.nn.Module):
    def forward(self, x):
        return Softplus.apply(x)
"""
WITH_PENALTY = """
x = torch.randn(6, 3).requires_grad_()
(g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
(model(torch.randn(6, 3)).mean() + (g.norm(dim=1) - 1).square().mean()).backward()
"""
MEMORY = """
memory = torch.empty(8)
class Gain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        if w.dtype != memory.dtype:
            return g * w, (g * x).sum(0)
        torch.sum(g * x, 0, out=memory)
        return g * w, {given}
class Activation(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(8))
    def forward(self, x):
        return Gain.apply(x, self.w)
"""
FIVE = "model(torch.randn(5, 3)).square().mean().backward()"
LATE_ODD = "model(torch.randn(4 - step % 2 if step > 2 else 4, 3)).square().mean().backward()"
FUNCTIONS.update(
    {
        "faulty_ignores_its_gradient": violated(
            "wrong-backward",
            "y = model(torch.randn(5, 3))\nt = (torch.randn(5, 1) > 0).float()\n"
            "(y.square().mean() + 0.1 * Dice.apply(y.sigmoid(), t)).backward()",
            before=IGNORING.format(factor=1),
        ),
        "sound_takes_its_gradient": holds(
            "y = model(torch.randn(5, 3))\nt = (torch.randn(5, 1) > 0).float()\n"
            "(y.square().mean() + 0.1 * Dice.apply(y.sigmoid(), t)).backward()",
            before=IGNORING.format(factor="g"),
        ),
        "sound_ignores_a_gradient_of_1": holds(
            "y = model(torch.randn(5, 3))\nt = (torch.randn(5, 1) > 0).float()\n"
            "(y.square().mean() + Dice.apply(y.sigmoid(), t)).backward()",
            before=IGNORING.format(factor=1),
        ),
        "faulty_operator": violated(
            "wrong-backward",
            FIVE,
            before=SWISH.format(name="faulty_operator", factor=1),
            model=IN_BETWEEN,
        ),
        "sound_operator": holds(
            FIVE,
            before=SWISH.format(name="sound_operator", factor="ctx.beta"),
            model=IN_BETWEEN,
        ),
        "faulty_writes_what_another_reads": violated(
            "wrong-backward",
            FIVE,
            before=WRITING.format(written="y = x.data.mul_(0.5)", before="torch.tanh"),
            model=IN_BETWEEN,
        ),
        "sound_writes_what_none_reads": holds(
            FIVE,
            before=WRITING.format(written="y = x.data.mul_(0.5)", before="torch.neg"),
            model=IN_BETWEEN,
        ),
        "sound_writes_nothing": holds(
            FIVE,
            before=WRITING.format(written="y = x.detach() * 0.5", before="torch.tanh"),
            model=IN_BETWEEN,
        ),
        "faulty_for_a_later_shape": violated(
            "wrong-backward",
            LATE_ODD,
            before=ODD.format(rows="len(x) // 2 * 2"),
            model=IN_BETWEEN,
            steps=8,
        ),
        "sound_for_a_later_shape": holds(
            LATE_ODD, before=ODD.format(rows="len(x)"), model=IN_BETWEEN, steps=8
        ),
        "faulty_penalty_lost": violated(
            "wrong-backward", WITH_PENALTY, before=PENALTY.format(x="x.detach()"), model=IN_BETWEEN
        ),
        "sound_penalty": holds(WITH_PENALTY, before=PENALTY.format(x="x"), model=IN_BETWEEN),
        "faulty_same_memory": violated(
            "stolen-buffer",
            "(model(torch.randn(5, 3)).square().mean() / 3).backward()",
            before=MEMORY.format(given="memory.view(8)"),
            model=IN_BETWEEN,
            passes=3,
        ),
        "sound_same_memory_copied": holds(
            "(model(torch.randn(5, 3)).square().mean() / 3).backward()",
            before=MEMORY.format(given="memory.clone()"),
            model=IN_BETWEEN,
            passes=3,
        ),
        "sound_same_memory_of_one_pass": holds(
            FIVE, before=MEMORY.format(given="memory.view(8)"), model=IN_BETWEEN
        ),
    }
)
"""Functions whose fault shows at some call, in what came to them, or in what others read."""

AROUND = {
    "before": 'around = torch.autocast("cpu", dtype=torch.bfloat16)\naround.__enter__()\n',
    "tail": "around.__exit__(None, None, None)",
}
CASTS = {
    "faulty_autocast_around_the_run": violated(
        "stale-parameters", "model(torch.randn(5, 3)).float().square().mean().backward()", **AROUND
    ),
    "faulty_autocast_around_windows": violated(
        "stale-parameters",
        "(model(torch.randn(5, 3)).float().square().mean() / 2).backward()",
        **AROUND,
        passes=2,
        optimizer="torch.optim.Adam(model.parameters(), lr=0.05)",
    ),
    "faulty_autocast_around_a_head": violated(
        "stale-parameters",
        "(model(torch.randn(5, 3)).float() - 1).square().mean().backward()",
        **AROUND,
        model="torch.nn.Linear(3, 1)",
    ),
    "sound_autocast_without_cache": holds(
        "model(torch.randn(5, 3)).float().square().mean().backward()",
        before=AROUND["before"].replace("16)", "16, cache_enabled=False)"),
        tail=AROUND["tail"],
    ),
    "sound_autocast_cache_cleared": holds(
        "model(torch.randn(5, 3)).float().square().mean().backward()",
        **AROUND,
        after="optimizer.step()\noptimizer.zero_grad()\ntorch.clear_autocast_cache()\n"
        "model(torch.randn(5, 3)).float().square().mean().backward()\n"
        "optimizer.step()\noptimizer.zero_grad()\ntorch.clear_autocast_cache()\ncontinue",
    ),
    "sound_autocast_of_each_forward": holds(
        'with torch.autocast("cpu", dtype=torch.bfloat16):\n'
        "    loss = model(torch.randn(5, 3)).float().square().mean() / 2\n"
        "loss.backward()",
        passes=2,
    ),
}
"""Autocast's cache of casts."""

WRITTEN = {
    "faulty_clamped_between": violated(
        "stale-parameters",
        "loss = model(torch.randn(5, 3)).square().mean()\n"
        "for p in model.parameters():\n    p.data.clamp_(-0.2, 0.2)\nloss.backward()",
    ),
    "faulty_average_between": violated(
        "stale-parameters",
        "loss = model(torch.randn(5, 3)).square().mean() / 2\n"
        "for p, q in zip(model.parameters(), average):\n    p.data.copy_(q)\nloss.backward()",
        before="average = [torch.randn(4, 3), torch.randn(4), torch.randn(1, 4), torch.randn(1)]\n",
        passes=2,
    ),
    "faulty_by_numpy_between": violated(
        "stale-parameters",
        "loss = model(torch.randn(5, 3)).square().mean()\n"
        "model[2].weight.detach().numpy()[:] *= 0.5\nloss.backward()",
    ),
    "faulty_written_bfloat16": violated(
        "stale-parameters",
        "loss = model(torch.randn(5, 3).bfloat16()).float().square().mean()\n"
        "for p in model.parameters():\n    p.data.mul_(0.7)\nloss.backward()",
        model=f"{BODY}.bfloat16()",
    ),
    # the backward computes with the casts of the call
    "sound_written_under_autocast": holds(
        'with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):\n'
        "    loss = model(torch.randn(5, 3)).float().square().mean()\n"
        "for p in model.parameters():\n    p.data.mul_(0.5)\nloss.backward()",
    ),
    "faulty_written_float16": violated(
        "stale-parameters",
        "loss = model(torch.randn(5, 3).half()).float().square().mean()\n"
        "for p in model.parameters():\n    p.data.mul_(0.9)\nloss.backward()",
        model=f"{BODY}.half()",
    ),
    "sound_clamped_after_the_step": holds(
        "model(torch.randn(5, 3)).square().mean().backward()",
        after="optimizer.step()\noptimizer.zero_grad()\n"
        "for p in model.parameters():\n    p.data.clamp_(-0.2, 0.2)\n"
        "model(torch.randn(5, 3)).square().mean().backward()",
    ),
    "sound_written_after_the_backward": holds(
        "model(torch.randn(5, 3)).square().mean().backward()",
        after="for p in model.parameters():\n    p.data.mul_(0.99)",
    ),
    "sound_bias_written_between": holds(
        "loss = model(torch.randn(5, 3)).square().mean()\nmodel[2].bias.data.add_(1)\n"
        "loss.backward()\nmodel[2].bias.data.sub_(1)",
    ),
    "sound_bfloat16": holds(
        "(model(torch.randn(5, 3).bfloat16()).float().square().mean() / 2).backward()",
        model=f"{BODY}.bfloat16()",
        passes=2,
    ),
}
"""Parameters that are written between a call and its backward."""

BUFFER = 'buffer = numpy.random.randn(5, 3).astype("float32")\n'
FILL = "buffer[:] = numpy.random.randn(5, 3)"
INPUTS = {
    "faulty_refilled_between": violated(
        "changed-batch",
        f"loss = model(torch.from_numpy(buffer)).square().mean()\n{FILL}\nloss.backward()",
        before=BUFFER,
    ),
    "faulty_one_row_refilled_between": violated(
        "changed-batch",
        "loss = model(torch.from_numpy(buffer)).square().mean() / 2\n"
        "buffer[3] = 1 + step\nloss.backward()",
        before=BUFFER,
        passes=2,
    ),
    "faulty_data_refilled_between": violated(
        "changed-batch",
        "loss = model(x).square().mean()\nx.data.normal_()\nloss.backward()",
        before="x = torch.randn(5, 3)\n",
    ),
    "faulty_indices_refilled_between": violated(
        "changed-batch",
        "loss = model(torch.from_numpy(rows)).square().mean()\n"
        "rows[:] = (rows + 1) % 7\nloss.backward()",
        before="rows = numpy.arange(5)\n",
        model="torch.nn.Embedding(7, 3)",
    ),
    "sound_refilled_after": holds(
        f"(model(torch.from_numpy(buffer)).square().mean() / 2).backward()\n{FILL}",
        before=BUFFER,
        passes=2,
    ),
    "sound_refilled_where_it_is_not_needed": holds(
        f"loss = model(torch.from_numpy(buffer)).square().mean()\n{FILL}\nloss.backward()",
        before=BUFFER
        + "class Centred(torch.nn.Module):\n    def forward(self, x):\n        return x - x.mean()\n",
        model="torch.nn.Sequential(Centred(), torch.nn.Linear(3, 1))",
    ),
    "sound_scaled_in_place_after": holds(
        "x = torch.randn(5, 3)\n(model(x).square().mean() / 2).backward()\nx.mul_(0)", passes=2
    ),
}
"""Inputs whose memory is filled again."""

MOVING = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.move = torch.nn.Linear(3, 3)
    def forward(self, h, x):
        x += torch.tanh(self.move(x - x.mean(0)))
        return h, x
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
    def forward(self, x):
        h = x
        for layer in self.layers:
            h, x = layer(h, x)
        return x
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
    def forward(self, x):
        {scale}
        return self.linear(x)
data, target = torch.randn(5, 3), torch.randn(5, 3)
"""
MOVED = "F.mse_loss(model(torch.randn(5, 3)), target)"
BY_LAYERS = (
    "h = x = torch.randn(5, 3)\nfor layer in model.layers:\n    h, x = layer(h, x)\n"
    "loss = F.mse_loss(x, target) + h.square().mean()\n"
)
SELF_WRITING = {
    "sound_input_moved_in_place": holds(
        f"({MOVED} / 2).backward()",
        before=MOVING.replace("{scale}", "pass"),
        model="Net()",
        passes=2,
    ),
    "faulty_input_moved_in_place_and_reset_inside": violated(
        "reset-inside-window",
        f"optimizer.zero_grad()\n({MOVED} / 2).backward()",
        before=MOVING.replace("{scale}", "pass"),
        model="Net()",
        passes=2,
    ),
    "faulty_input_moved_in_place_and_parameters_written": violated(
        "stale-parameters",
        f"loss = {MOVED}\nmodel.layers[1].move.weight.data.mul_(0.5)\nloss.backward()",
        before=MOVING.replace("{scale}", "pass"),
        model="Net()",
    ),
    "sound_moved_in_place_from_layer_to_layer": holds(
        f"{BY_LAYERS}loss.backward()", before=MOVING.replace("{scale}", "pass"), model="Net()"
    ),
    "faulty_moved_from_layer_to_layer_and_written": violated(
        "stale-parameters",
        f"{BY_LAYERS}model.layers[1].move.weight.data.mul_(0.5)\nloss.backward()",
        before=MOVING.replace("{scale}", "pass"),
        model="Net()",
    ),
    "sound_data_scaled_in_place": holds(
        "F.mse_loss(model(data), target).backward()",
        before=MOVING.replace("{scale}", "x *= 1.1"),
        model="Scaled()",
    ),
    "sound_data_scaled_in_place_unseen": holds(
        "F.mse_loss(model(data), target).backward()",
        before=MOVING.replace("{scale}", "x.data.mul_(1.1)"),
        model="Scaled()",
    ),
}
"""Models that write to what they are given. The same batch is scaled again and again: a second
computation that wrote to it would change the run."""

AGAIN = """
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.parameters = block, parameters
        ctx.save_for_backward(x)
        ctx.random = torch.get_rng_state()
        return block(x)
    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng():
            {restore}
            y = ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), g)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.block = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(4, 1))
    def forward(self, x):
        return Again.apply(self.block, self.first(x), *self.block.parameters())
"""
ADDING = """
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        ctx.random = torch.get_rng_state()
        return block(x)
    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng():
            {restore}
            y = ctx.block(x)
        y.backward(g)
        return x.grad, None
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    def block(self, x):
        return self.last({dropped})
    def forward(self, x):
        return Again.apply(self.first(x), self.block)
"""
OF_TORCH = """
from torch.utils.checkpoint import checkpoint
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.block = torch.nn.Sequential(torch.nn.Dropout({p}), torch.nn.Linear(4, 1))
    def forward(self, x):
        return checkpoint(
            self.block, self.first(x), use_reentrant={reentrant}, preserve_rng_state={preserves}
        )
"""
SQUARED = "(model(torch.randn(5, 3)).square().mean() / 2).backward()"
BY_SCRIPT = "checkpoint(model, torch.randn(5, 3).requires_grad_(), {}).square().mean().backward()"
IMPORT = "from torch.utils.checkpoint import checkpoint\n"
DROPPED = "torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))"


def _of_torch(p: float, *, reentrant: bool, preserves: bool) -> dict:
    text = OF_TORCH.format(p=p, reentrant=reentrant, preserves=preserves)
    return {"before": text, "model": "Model()", "passes": 2}


NOISY = """
from torch.utils.checkpoint import checkpoint
class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
    def forward(self, x):
        {drawn}
        return self.inner(x * scale).tanh()
class Activation(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.noisy = Noisy()
    def forward(self, x):
        return checkpoint(self.noisy, x, use_reentrant=False)
"""
FROM_PYTHON = {
    "faulty_python_draws_again": violated(
        "wrong-backward",
        FIVE,
        before=NOISY.format(drawn="scale = torch.tensor(random.choice((0.25, 1.0, 3.0)))"),
        model=IN_BETWEEN,
    ),
    "faulty_numpy_draws_again": violated(
        "wrong-backward",
        FIVE,
        before=NOISY.format(drawn="scale = torch.from_numpy(numpy.random.rand(8)).float()"),
        model=IN_BETWEEN,
    ),
    # the graph keeps a number that is no tensor
    "sound_python_draws_what_is_kept": holds(
        FIVE,
        before=NOISY.format(drawn="return random.choice((0.25, 1.0, 3.0)) * self.inner(x).tanh()"),
        model=IN_BETWEEN,
    ),
    "sound_python_draws_for_a_print": holds(
        FIVE, before=NOISY.format(drawn="scale = 1 + 0 * random.random()"), model=IN_BETWEEN
    ),
}
"""Checkpoints of modules that draw from Python's or numpy's generators."""
CHECKPOINTS = {
    "faulty_own_checkpoint": violated(
        "wrong-backward", SQUARED, before=AGAIN.format(restore="pass"), model="Model()", passes=2
    ),
    "faulty_own_checkpoint_of_the_script": violated(
        "wrong-backward",
        "Again.apply(model, torch.randn(5, 3), *model.parameters()).square().mean().backward()",
        before=AGAIN.format(restore="pass"),
        model=DROPPED,
    ),
    "faulty_reentrant_checkpoint": violated(
        "wrong-backward", SQUARED, **_of_torch(0.5, reentrant=True, preserves=False)
    ),
    "faulty_checkpoint": violated(
        "wrong-backward", SQUARED, **_of_torch(0.5, reentrant=False, preserves=False)
    ),
    "faulty_reentrant_checkpoint_of_the_script": violated(
        "wrong-backward",
        BY_SCRIPT.format("use_reentrant=True, preserve_rng_state=False"),
        before=IMPORT,
        model=DROPPED,
    ),
    "sound_own_checkpoint_that_adds_to_the_gradient": holds(
        SQUARED,
        before=ADDING.format(restore="torch.set_rng_state(ctx.random)", dropped="F.dropout(x)"),
        model="Model()",
        passes=2,
    ),
    "faulty_own_checkpoint_that_adds_to_the_gradient": violated(
        "wrong-backward",
        SQUARED,
        before=ADDING.format(restore="pass", dropped="F.dropout(x)"),
        model="Model()",
        passes=2,
    ),
    "sound_own_checkpoint": holds(
        SQUARED,
        before=AGAIN.format(restore="torch.set_rng_state(ctx.random)"),
        model="Model()",
        passes=2,
    ),
    "sound_own_checkpoint_of_the_script": holds(
        "Again.apply(model, torch.randn(5, 3), *model.parameters()).square().mean().backward()",
        before=AGAIN.format(restore="torch.set_rng_state(ctx.random)"),
        model=DROPPED,
    ),
    "sound_checkpoint_without_dropout": holds(
        SQUARED, **_of_torch(0.0, reentrant=False, preserves=False)
    ),
    "sound_reentrant_checkpoint": holds(SQUARED, **_of_torch(0.5, reentrant=True, preserves=True)),
    "sound_checkpoint_with_dropout": holds(
        SQUARED, **_of_torch(0.5, reentrant=False, preserves=True)
    ),
    "sound_reentrant_checkpoint_of_the_script": holds(
        BY_SCRIPT.format("use_reentrant=True"), before=IMPORT, model=DROPPED
    ),
}
"""Checkpoints of all forms."""

MEAN = "F.cross_entropy(model(torch.randn(5, 3)), torch.randint(0, 3, (5,))).backward()"
OF_CLASSES = {"model": "torch.nn.Linear(3, 3)", "passes": 4, "steps": 7}
DIVIDE = "for p in model.parameters():\n    p.grad /= 4"
NORM = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
BY_HAND = """
norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
for p in model.parameters():
    p.grad.mul_(min(1.0, 0.1 / float(norm)))
"""
EDITS = {
    "faulty_undivided_then_clipped": violated("wrong-scale", MEAN, after=NORM, **OF_CLASSES),
    "faulty_undivided_then_clipped_by_value": violated(
        "wrong-scale",
        MEAN,
        after="torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)",
        **OF_CLASSES,
    ),
    "faulty_divided_twice_then_clipped": violated(
        "wrong-scale", MEAN, after=f"{DIVIDE}\n{DIVIDE}\n{NORM}", **OF_CLASSES
    ),
    "sound_divided_then_clipped": holds(MEAN, after=f"{DIVIDE}\n{NORM}", **OF_CLASSES),
    "sound_divided_then_clipped_by_value": holds(
        MEAN,
        after=f"{DIVIDE}\ntorch.nn.utils.clip_grad_value_(model.parameters(), 0.05)",
        **OF_CLASSES,
    ),
    "sound_divided_then_clipped_by_hand": holds(MEAN, after=DIVIDE + BY_HAND, **OF_CLASSES),
    "sound_divided_then_clipped_in_two_steps": holds(
        MEAN,
        after=f"{DIVIDE}\n"
        "norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])\n"
        "torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)",
        **OF_CLASSES,
    ),
    "sound_sum_over_as_many_rows": holds(
        "(F.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 1), reduction='sum') / 4).backward()",
        passes=4,
    ),
}
"""Edits of `.grad` after the last pass, in their order."""

KEPT = """
kept = [torch.zeros_like(p) for p in model.parameters()]
for _ in range(4):
    (F.cross_entropy(model(torch.randn(5, 3)), torch.randint(0, 3, (5,))) / 4).backward()
    for p, b in zip(model.parameters(), kept):
        {add}
        p.grad = None
for p, b in zip(model.parameters(), kept):
    p.grad = b
"""
BY_KEEPING = {"backward": "pass", "model": "torch.nn.Linear(3, 3)"}
REPLAYED = """
window = [torch.randn(n, 3) for n in (2, 6)]
cached = [model(x).detach() for x in window]
for i, x in enumerate(window):
    rows = torch.cat([model(x) if j == i else c for j, c in enumerate(cached)])
    loss = F.cross_entropy(rows @ rows.T, torch.arange(8))
    (loss{factor}).backward()
"""
OF_HANDS = {
    "faulty_doubled_buffer": violated(
        "rescaled-accumulator", after=KEPT.format(add="b.add_(b).add_(p.grad)"), **BY_KEEPING
    ),
    "faulty_halved_buffer": violated(
        "rescaled-accumulator", after=KEPT.format(add="b.add_(p.grad).mul_(0.5)"), **BY_KEEPING
    ),
    "faulty_divided_buffer": violated(
        "rescaled-accumulator", after=KEPT.format(add="b.add_(p.grad).div_(4)"), **BY_KEEPING
    ),
    "sound_kept_buffer": holds(after=KEPT.format(add="b.add_(p.grad)"), **BY_KEEPING),
    "sound_tasks": holds(
        "pass",
        model="torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.Linear(4, 1),"
        " torch.nn.Linear(4, 2), torch.nn.Linear(4, 3)])",
        after="""
kept = [torch.zeros_like(p) for p in model.parameters()]
for task, weight in ((1, 4), (2, 2), (3, 1)):
    model[task](model[0](torch.randn(5, 3))).square().mean().backward()
    for p, b in zip(model.parameters(), kept):
        if p.grad is not None:
            b.add_(p.grad, alpha=weight)
            p.grad = None
for p, b in zip(model.parameters(), kept):
    p.grad = b
""",
    ),
    "faulty_replays_by_items": violated(
        "unrecognised-weights",
        "pass",
        model="torch.nn.Linear(3, 4)",
        after=REPLAYED.format(factor=" * len(x) / 4"),
    ),
    "faulty_replays_by_place": violated(
        "unrecognised-weights",
        "pass",
        model="torch.nn.Linear(3, 4)",
        after=REPLAYED.format(factor=" / (i + 1)"),
    ),
    "sound_replays": holds("pass", model="torch.nn.Linear(3, 4)", after=REPLAYED.format(factor="")),
    **{
        f"unjudged_written_{name}": unjudged(
            "no sum of what the backward passes of the window have brought",
            "(model(torch.randn(5, 3)).square().mean() / 2).backward()\nmodel.zero_grad()",
            model="torch.nn.Linear(3, 8)",
            passes=2,
            after=f"for p in model.parameters():\n    p.grad = {written}",
        )
        for name, written in {
            "parameters": "2 * p.detach()",
            "noise": "torch.randn_like(p)",
            "signs": "p.detach().sign()",
        }.items()
    },
    "sound_stopped": Script(
        START
        + f"""
model = {BODY}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for update in range(4):
    for i in range(4):
        (model(torch.randn(5, 3)).square().mean() / 2).backward()
        if update in (1, 2) and i == 2:
            optimizer.zero_grad(set_to_none=False)
            print("stopped")
            break
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
""",
        "holds",
    ),
    "faulty_rest_of_each_epoch": Script(
        START
        + f"""
model = {BODY}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    optimizer.zero_grad()
    for i in range(5):
        (model(torch.randn(5, 3)).square().mean() / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
""",
        "violated",
        ("tail-dropped",),
    ),
}
"""Gradients that the program puts together, and passes that it gives up."""

COUNTING = """
class Annealed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(3, 1), 0
    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1 + 1 / self.calls)
"""
WRITTEN_BESIDE = {
    "faulty_written_beside_max_norm": violated(
        "stale-parameters",
        "(model(torch.randint(0, 7, (5,))).square().mean() / 2).backward()\n"
        "model[1].weight.data.mul_(0.9)",
        model="torch.nn.Sequential(torch.nn.Embedding(7, 3, max_norm=0.5), torch.nn.Linear(3, 1))",
        passes=2,
    ),
}
UNUSUAL = {
    "sound_gradcache": holds(
        "pass",
        model="torch.nn.Linear(3, 4)",
        after="""
window = [torch.randn(n, 3) for n in (3, 5)]
with torch.no_grad():
    cached = [model(x) for x in window]
leaves = [c.detach().requires_grad_() for c in cached]
rows = torch.cat(leaves)
F.cross_entropy(rows @ rows.T, torch.arange(8)).backward()
for x, leaf in zip(window, leaves):
    (model(x) * leaf.grad).sum().backward()
""",
    ),
    "sound_func": holds(
        "grads = torch.func.grad(lambda ps, x: torch.func.functional_call(model, ps, (x,))"
        ".square().mean())({n: p.detach() for n, p in model.named_parameters()}, torch.randn(5, 3))\n"
        "model(torch.randn(5, 3)).square().mean().backward()",
    ),
    "sound_average_of_parameters": holds(
        "model(torch.randn(5, 3)).square().mean().backward()",
        before="average = None\n",
        after="""
optimizer.step()
optimizer.zero_grad()
average = average or [p.detach().clone() for p in model.parameters()]
for p, a in zip(model.parameters(), average):
    a.lerp_(p.detach(), 0.1)
model(torch.randn(5, 3)).square().mean().backward()
""",
    ),
    "sound_tied": holds(
        "(model(torch.randint(0, 7, (5,))).square().mean() / 2).backward()",
        before="class Tied(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.table, self.head = torch.nn.Embedding(7, 3), torch.nn.Linear(3, 7, bias=False)\n"
        "        self.head.weight = self.table.weight\n"
        "    def forward(self, x):\n        return self.head(self.table(x).tanh())\n",
        model="Tied()",
        passes=2,
    ),
    # the forward writes these rows of the table itself, at every micro-batch
    "sound_max_norm": holds(
        "(model(torch.randint(0, 7, (5,))).square().mean() / 2).backward()",
        model="torch.nn.Sequential(torch.nn.Embedding(7, 3, max_norm=0.5), torch.nn.Linear(3, 1))",
        passes=2,
    ),
    "sound_counting": holds(
        "(model(torch.randn(5, 3)).square().mean() / 2).backward()",
        before=COUNTING,
        model="Annealed()",
        passes=2,
    ),
    "sound_running_scale": holds(
        "(model(torch.randn(5, 3)).square().mean() / 2).backward()",
        before="class Scaled(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.linear = torch.nn.Linear(3, 1)\n"
        "        self.register_buffer('scale', torch.ones(1))\n"
        "    def forward(self, x):\n        y = self.linear(x) / self.scale\n"
        "        with torch.no_grad():\n"
        "            self.scale = 0.9 * self.scale + 0.1 * y.abs().mean()\n        return y\n",
        model="Scaled()",
        passes=2,
    ),
    "sound_cache": holds(
        "(model(torch.randn(5, 3)).square().mean() / 2).backward()",
        before="class Cached(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.linear, self.seen = torch.nn.Linear(3, 1), []\n"
        "    def forward(self, x):\n        y = self.linear(x)\n"
        "        z = y + sum(self.seen[-2:]) if self.seen else y\n"
        "        self.seen.append(y.detach().mean())\n        return z\n",
        model="Cached()",
        passes=2,
    ),
    "sound_own_generator": holds(
        "(model(torch.randn(5, 3)).square().mean() / 2).backward()",
        before="class Noisy(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.linear, self.draws = torch.nn.Linear(3, 1), torch.Generator().manual_seed(1)\n"
        "    def forward(self, x):\n"
        "        return self.linear(x * torch.rand(x.shape, generator=self.draws))\n",
        model="Noisy()",
        passes=2,
    ),
    "sound_recurrent": holds(
        "y, state = model(torch.randn(4, 2, 3), state)\nstate = state.detach()\n"
        "(y.square().mean() / 2).backward()",
        before="state = None\n",
        model="torch.nn.GRU(3, 4)",
        passes=2,
    ),
    "sound_augmented": holds(
        "(model(torch.randn(5, 3)).square().mean() / 2).backward()",
        before="class Augmented(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.linear = torch.nn.Linear(3, 1)\n"
        "    def forward(self, x):\n        x = x + 0.1 * torch.randn_like(x)\n"
        "        x = x.flip(0) if random.random() < 0.5 else x\n"
        "        return self.linear(x * float(numpy.random.rand()))\n",
        model="Augmented()",
        passes=2,
    ),
    "sound_batch_norm": holds(
        "(model(torch.randn(5, 3)).square().mean() / 2).backward()",
        model="torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))",
        passes=2,
    ),
    "sound_spectral_norm": holds(
        "(model(torch.randn(5, 3)).square().mean() / 2).backward()",
        model="torch.nn.Sequential(torch.nn.utils.parametrizations.spectral_norm("
        "torch.nn.Linear(3, 4)), torch.nn.Tanh(), torch.nn.Linear(4, 1))",
        passes=2,
    ),
    "sound_system_entropy": holds(
        "(model(torch.randn(5, 3)).square().mean() / 2).backward()",
        before="import os\nclass Dropped(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.linear = torch.nn.Linear(3, 1)\n"
        "    def forward(self, x):\n"
        "        return self.linear(x * (1 + os.urandom(1)[0] / 256))\n",
        model="Dropped()",
        passes=2,
    ),
    "sound_critic": holds(
        "critic(model(torch.randn(5, 3))).mean().backward()",
        before="critic = torch.nn.Linear(1, 1)\n"
        "of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)\n",
        after="""
of_critic.zero_grad()
critic(model(torch.randn(5, 3)).detach()).square().mean().backward()
of_critic.step()
for p in critic.parameters():
    p.data.clamp_(-0.1, 0.1)
""",
    ),
    "sound_reused_output_memory": holds(
        "x = torch.randn(5, 3, out=pool)\n(model(x).square().mean() / 2).backward()\npool.zero_()",
        before="pool = torch.empty(5, 3)\n",
        passes=2,
    ),
    "sound_half_precision_norms": holds(
        'with torch.autocast("cpu", dtype=torch.bfloat16):\n'
        "    loss = model(torch.randn(6, 8)).float().square().mean() / 2\nloss.backward()",
        model="torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16),"
        " torch.nn.GELU(), torch.nn.Linear(16, 4))",
        passes=2,
    ),
    "sound_float16": holds(
        "(model(torch.randn(5, 3).half()).float().square().mean() / 2).backward()",
        model=f"{BODY}.half()",
        passes=2,
    ),
}
"""Sound scripts in which something of a call changes, or looks as if it did."""
ELSEWHERE = """
import os
os.environ["FACTOR"] = "1"
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
    def forward(self, x):
        return self.linear(x) * float(os.environ["FACTOR"])
"""
UNEXPLAINED = {
    "unjudged_state_that_cannot_be_kept": unjudged(
        "the model gives other outputs when it is called again, by",
        'model(torch.randn(5, 3)).square().mean().backward()\nos.environ["FACTOR"] = str(2 + step)',
        before=ELSEWHERE,
        model="Scaled()",
    ),
    "unjudged_one_window_of_a_counting_model": unjudged(
        "from the state that it has at the step",
        "(model(torch.randn(5, 3)).square().mean() / 2).backward()",
        before=COUNTING,
        model="Annealed()",
        passes=2,
        steps=1,
    ),
}
"""Differences for which nothing that is measured is the cause."""
NEXT_LOSS = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
def loss_of_next():
    return (model(torch.randn(5, 6)) - 1).square().mean()
loss = loss_of_next()
for step in range(8):
    loss.backward()
    {before}
    optimizer.step()
    optimizer.zero_grad()
    {after}
"""
AHEAD = {
    "faulty_next_loss_before_the_step": Script(
        NEXT_LOSS.format(before="loss = loss_of_next()", after="pass"),
        "violated",
        ("stale-parameters",),
    ),
    "sound_next_loss_after_the_step": Script(
        NEXT_LOSS.format(before="pass", after="loss = loss_of_next()"), "holds"
    ),
}
BETWEEN_HEAD = """
labels = torch.randint(0, 4, (5,)).numpy()
targets = torch.from_numpy(labels)
weights = torch.ones(5).numpy()
of_items = torch.from_numpy(weights)
frozen = torch.nn.Linear(4, 2).requires_grad_(False)
loss_of = torch.nn.CrossEntropyLoss()
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.register_buffer("table", torch.ones(4))
    def forward(self, x):
        return self.linear(x) * self.table
hidden = []
class Kept(torch.nn.Module):
    def forward(self, x):
        y = x * 1
        hidden[:] = [y]
        return y
"""
LINEAR = "torch.nn.Linear(3, 4)"
TRAINED = "torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)"
LABELS = "labels[:] = torch.randint(0, 4, (5,)).numpy()"
BETWEEN_OF = {
    "targets": (
        "loss = F.cross_entropy(model(torch.randn(5, 3)), targets)",
        LABELS,
        LINEAR,
        "changed-batch",
    ),
    "targets_of_a_module": (
        "loss = loss_of(model(torch.randn(5, 3)), targets)",
        LABELS,
        LINEAR,
        "changed-batch",
    ),
    "predictions": (
        "found = model(torch.randn(5, 3))\nloss = F.mse_loss(found, torch.ones(5, 4))",
        "found.data.mul_(5)",
        LINEAR,
        "changed-batch",
    ),
    "sample_weights": (
        "loss = (of_items * (model(torch.randn(5, 3)) - 1).square()[:, 0]).mean()",
        "weights *= 1.5",
        LINEAR,
        "changed-batch",
    ),
    "frozen_module_beside": (
        "loss = (frozen(model(torch.randn(5, 3))) - 1).square().mean()",
        "frozen.weight.data.mul_(0.5)",
        LINEAR,
        "stale-parameters",
    ),
    "frozen_module_inside": (
        "loss = (model(torch.randn(5, 3)) - 1).square().mean()",
        "model[1].weight.data.mul_(0.5)",
        "torch.nn.Sequential(torch.nn.Linear(3, 4), frozen)",
        "stale-parameters",
    ),
    "buffer": (
        "loss = (model(torch.randn(5, 3)) - 1).square().mean()",
        "model.table.data.copy_(torch.randn(4))",
        "Scaled()",
        "changed-batch",
    ),
    "hidden_values": (
        "loss = model(torch.randn(5, 3)).square().mean()",
        "hidden[0].data.mul_(0)",
        "torch.nn.Sequential(torch.nn.Linear(3, 4), Kept(), torch.nn.Linear(4, 1))",
        "changed-batch",
    ),
}
"""Name -> what computes a loss, what writes to something of it, the model, and the fault where that
is done before the backward."""
BETWEEN = {
    f"faulty_{name}_written_between": violated(
        fault,
        f"{loss}\n{write}\nloss.backward()",
        model=model,
        before=BETWEEN_HEAD,
        optimizer=TRAINED,
    )
    for name, (loss, write, model, fault) in BETWEEN_OF.items()
} | {
    f"sound_{name}_written_after": holds(
        f"{loss}\nloss.backward()\n{write}", model=model, before=BETWEEN_HEAD, optimizer=TRAINED
    )
    for name, (loss, write, model, _) in BETWEEN_OF.items()
}
AGAIN_HEAD = """
from torch.utils.checkpoint import checkpoint
class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        noise = numpy.random.normal(1, 0.5, (1, 4)).astype("float32")
        return (self.linear(x) * torch.from_numpy(noise)).tanh()
class Plain(Noisy):
    def again(self, x):
        return Noisy.forward(self, x)
    def forward(self, x):
        return {call}
norm = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
last = torch.nn.Linear(4, 2)
"""
AGAIN_OF_ITS_OWN = AGAIN_HEAD.replace("{call}", "self.again(x)")
TWO = "torch.nn.Sequential(torch.nn.Linear(3, 4), {last})"
LOSS = "(model(torch.randn(5, 3)) - 1).square().mean().backward()"
DRAWING = """
out = checkpoint(lambda h: last(F.dropout(h, 0.4)), model(torch.randn(5, 3)), use_reentrant=False{})
(out - 1).square().mean().backward()
"""
MODES = """
model.train(), norm.train()
loss = (checkpoint(norm, model(torch.randn(6, 3)), use_reentrant=True) - 1).abs().mean()
{}
loss.backward()
"""
BOTH = "torch.optim.SGD([*model.parameters(), *norm.parameters(), *last.parameters()], lr=0.1)"
AGAIN = {
    "faulty_checkpoint_of_a_method_with_numpy": violated(
        "wrong-backward",
        LOSS,
        before=AGAIN_HEAD.replace("{call}", "checkpoint(self.again, x, use_reentrant=False)"),
        model=TWO.format(last="Plain()"),
    ),
    "faulty_reentrant_checkpoint_with_numpy": violated(
        "wrong-backward",
        "out = model[1](checkpoint(noisy, model[0](torch.randn(5, 3)), use_reentrant=True))\n"
        "(out - 1).square().mean().backward()",
        before=AGAIN_OF_ITS_OWN + "noisy = Noisy()\n",
        model=TWO.format(last="torch.nn.Linear(4, 1)"),
    ),
    "sound_numpy_without_checkpoint": holds(
        LOSS,
        before=AGAIN_OF_ITS_OWN,
        model=TWO.format(last="Plain()"),
    ),
    "faulty_checkpoint_of_a_function": violated(
        "wrong-backward",
        DRAWING.format(", preserve_rng_state=False"),
        before=AGAIN_OF_ITS_OWN,
        model="torch.nn.Linear(3, 4)",
        optimizer=BOTH,
    ),
    "sound_checkpoint_of_a_function": holds(
        DRAWING.format(""),
        before=AGAIN_OF_ITS_OWN,
        model="torch.nn.Linear(3, 4)",
        optimizer=BOTH,
    ),
    "faulty_mode_of_a_checkpoint": violated(
        "wrong-backward",
        MODES.format("norm.eval()"),
        before=AGAIN_OF_ITS_OWN,
        model="torch.nn.Linear(3, 4)",
        optimizer=BOTH,
    ),
    "sound_mode_of_a_checkpoint": holds(
        MODES.format("norm.train()"),
        before=AGAIN_OF_ITS_OWN,
        model="torch.nn.Linear(3, 4)",
        optimizer=BOTH,
    ),
}
WRITTEN_HEAD = """
from torch.utils.checkpoint import checkpoint
class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.register_buffer("gate", torch.tensor([0.5, 1.0, 2.0, 1.0]))
    def forward(self, x):
        return self.gate * self.linear(x).tanh()
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.parameters = block, parameters
        ctx.save_for_backward(x)
        return block(x)
    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), g)
class Scratch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, z):
        ctx.block = block
        ctx.save_for_backward(x)
        y = block(z.copy_(x))
        z.zero_()
        return y
    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            other = (3 * ctx.saved_tensors[0].detach()).requires_grad_()
            y = ctx.block(other)
        return None, torch.autograd.grad(y, other, g)[0], None
x = torch.randn(5, 3)
state = torch.zeros(5, 4)
last = torch.nn.Linear(4, 1).requires_grad_(False)
def later(x):
    return model(2 * x + 1)
"""
CALLED = {
    "reentrant": "checkpoint(model, x.requires_grad_(), use_reentrant=True)",
    "plain": "checkpoint(later, x, use_reentrant=False)",
    "own": "Again.apply(model, x, *model.parameters())",
}
WRITES = {
    "input": ("changed-batch", "x.data.normal_()"),
    "weight": ("stale-parameters", "model.linear.weight.data.mul_(1.5)"),
    "buffer": ("changed-batch", "model.gate.data.mul_(1.1)"),
}
AFTER_CALL = "loss = ({} - 1).square().mean()\n"
REWRITTEN = {
    f"faulty_{what}_of_a_checkpoint_written_{form}": violated(
        name,
        f"{AFTER_CALL.format(call)}{write}\nloss.backward()",
        before=WRITTEN_HEAD,
        model="Gated()",
    )
    for form, call in CALLED.items()
    for what, (name, write) in WRITES.items()
}
REWRITTEN |= {
    f"sound_checkpoint_and_written_after_{form}": holds(
        f"{AFTER_CALL.format(call)}loss.backward()\nx.data.normal_()",
        before=WRITTEN_HEAD,
        after="model.gate.data.mul_(1.1)",
        model="Gated()",
    )
    for form, call in CALLED.items()
}
REWRITTEN["sound_function_that_writes_to_what_it_is_given"] = holds(
    "Scratch.apply(last, model(x), state).square().mean().backward()",
    before=WRITTEN_HEAD,
    model="Gated()",
)
"""What a checkpoint reads, written between the forward and its backward."""
STOLEN_HEAD = """
work = torch.empty(4)
class Gain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        work.copy_((g * x).sum(0))
        return g * w, {returned}
class Gained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4))
    def forward(self, x):
        return Gain.apply(x, self.w)
"""
STOLEN = {
    "faulty_stolen_view": violated(
        "stolen-buffer",
        "((model(torch.randn(5, 3)) - 1).square().mean() / 3).backward()",
        before=STOLEN_HEAD.replace("{returned}", "work[:]"),
        model="torch.nn.Sequential(torch.nn.Linear(3, 4), Gained())",
        passes=3,
    ),
    "sound_view_cloned": holds(
        "((model(torch.randn(5, 3)) - 1).square().mean() / 3).backward()",
        before=STOLEN_HEAD.replace("{returned}", "work.clone()"),
        model="torch.nn.Sequential(torch.nn.Linear(3, 4), Gained())",
        passes=3,
    ),
}
ON_OUTPUT = """
out = model(torch.randn(5, 3))
out.register_hook(lambda g: {})
((out - 1).square().mean() / 2).backward()
"""
OUTPUT_HOOKS = {
    "faulty_hook_normalises_the_output": violated(
        "not-linear", ON_OUTPUT.format("g / g.norm()"), passes=2
    ),
    "sound_hook_doubles_the_output": holds(ON_OUTPUT.format("2 * g"), passes=2),
    "sound_hook_watches_the_output": holds(ON_OUTPUT.format("None"), passes=2),
}
DIVERGING = {
    "sound_diverging": holds(
        "(model(torch.randn(6, 3)) - 1).pow(4).mean().backward()",
        model="torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 1))",
        optimizer="torch.optim.SGD(model.parameters(), lr=1e18)",
        steps=12,
    ),
}
COUNTS = """
import torch
import torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
count = 0
for step in range(5):
    sizes = torch.randint(2, 9, (3,)).tolist()
    count {counts} sum(sizes)
    for n in sizes:
        loss = F.cross_entropy(model(torch.randn(n, 4)), torch.randint(0, 3, (n,)), reduction="sum")
        (loss{of_loss}).backward()
    for p in model.parameters():
        p.grad /= {of_gradient}
    optimizer.step()
    optimizer.zero_grad()
"""
RUNNING = {
    "faulty_running_count_of_losses": Script(
        COUNTS.format(counts="+=", of_loss=" / count", of_gradient="1"),
        "violated",
        ("wrong-count",),
    ),
    "faulty_running_count_of_gradients": Script(
        COUNTS.format(counts="+=", of_loss="", of_gradient="count"), "violated", ("wrong-count",)
    ),
    "sound_count_of_losses": Script(
        COUNTS.format(counts="=", of_loss=" / count", of_gradient="1"), "holds"
    ),
    "sound_count_of_gradients": Script(
        COUNTS.format(counts="=", of_loss="", of_gradient="count"), "holds"
    ),
}
"""Sums that are divided by a count which is never reset, and twins that begin anew."""
ANEW = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Softplus(), torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
have = 0
for i in range({rounds}):
    x = torch.randn(5, 4)
    if i in ({spike}, 16):
        x[1] = float("inf")
    loss = model(x).square().mean() / 3
    if not loss.isfinite():
        optimizer.zero_grad()
        {after}
        continue
    loss.backward()
    have += 1
    if have == 3:
        optimizer.step()
        optimizer.zero_grad()
        have = 0
"""
SKIPPED = {
    "faulty_counter_runs_on_after_a_reset": Script(
        ANEW.format(rounds=24, spike=1, after="have += 1"), "violated", ("reset-inside-window",)
    ),
    "sound_window_begun_anew": Script(ANEW.format(rounds=23, spike=7, after="have = 0"), "holds"),
    "sound_first_window_begun_anew": Script(
        ANEW.format(rounds=23, spike=1, after="have = 0"), "holds"
    ),
}
"""Windows that a spike throws away."""
KEPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
parameters = [*model.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)
for step in range(4):
    kept = []
    for _ in range(4):
        loss = (model(torch.randn(5, 3)) - 1).square().mean()
        kept.append(torch.autograd.grad(loss, parameters))
    for i, p in enumerate(parameters):
        p.grad = sum(one[i] for one in kept{which}) / 4
    optimizer.step()
"""
RESULTS = {
    "faulty_last_result_left_out": Script(
        KEPT.format(which="[:-1]"), "violated", ("dropped-micro-batch",)
    ),
    "faulty_last_result_alone": Script(
        KEPT.format(which="[-1:]"), "violated", ("reset-inside-window",)
    ),
    "sound_all_results": Script(KEPT.format(which=""), "holds"),
}
"""Results of `torch.autograd.grad` that the program puts together."""
IN_PLACE = """
import torch
from torch.utils.checkpoint import checkpoint_sequential
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(5, 8),
    torch.nn.ReLU(inplace=True),
    torch.nn.Dropout(0.2, inplace=True),
    torch.nn.Linear(8, 8),
    torch.nn.SiLU(inplace=True),
    torch.nn.Linear(8, 3),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks({pack}, {unpack}):
            out = checkpoint_sequential(model, 2, torch.randn(6, 5), use_reentrant=False)
            loss = torch.nn.functional.cross_entropy(out, torch.randint(0, 3, (6,))) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OFFLOADED = {
    "sound_checkpoint_of_layers_in_place": Script(
        IN_PLACE.format(pack="lambda t: t", unpack="lambda t: t"), "holds"
    ),
    "sound_offloaded_checkpoint_of_layers_in_place": Script(
        IN_PLACE.format(
            pack="lambda t: t.detach().numpy().copy()", unpack="lambda a: torch.from_numpy(a)"
        ),
        "holds",
    ),
}
"""Layers that write to their input, in a checkpoint that calls them again."""
SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
def loss(k=2):
    return F.cross_entropy(model(torch.randn(4, 3)), torch.randint(0, 3, (4,))) / k
"""
TWO_LINES = """
if step: scaler.update()
scaler.scale(loss()).backward()
{second}
scaler.unscale_(optimizer)
"""
BY_SCALER = {"model": "torch.nn.Linear(3, 3)"}
FUNCTIONAL = """
w = torch.nn.Linear(3, 4)
x = torch.randn(5, 3)
"""
OUTSIDE_OF_CALLS = {
    "before": FUNCTIONAL,
    "model": "torch.nn.ModuleList([w, torch.nn.Linear(4, 3)])",
}
UNRECORDED = """
x = torch.randn(5, 3)
h = F.linear(x, model[0].weight, model[0].bias).tanh()
loss = F.cross_entropy(F.linear(h, model[1].weight, model[1].bias), torch.randint(0, 3, (5,)))
{between}
loss.backward()
{after}
"""
SEVERAL = {"passes": 3, "model": "torch.nn.Linear(3, 3)"}
TARGETS = """
t = torch.randn(5, 3)
loss = {loss} / 3
{write}
loss.backward()
"""
TARGET_FUNCTION = """
class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, t):
        ctx.save_for_backward(out, t)
        return (out - t) ** 2
    @staticmethod
    def backward(ctx, g):
        out, t = ctx.saved_tensors
        return 2 * g * (out - t), None
"""
ACTOR = """
class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.sign(), alpha=-group["lr"])
critic = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
of_critic = Signs(critic.parameters(), 0.1)
def of_actor(x):
    return -critic(torch.cat([x, model(x)], 1)).mean()
"""
STEP_OF_CRITIC = """
of_critic.zero_grad()
error = (critic(torch.randn(6, 5)) - 1).square().mean()
{before}
error.backward()
of_critic.step()
{after}
loss.backward()
"""
KEPT_APART = """
kept = []
for _ in range({number}):
    (F.cross_entropy(model(torch.randn(5, 3)), torch.randint(0, 3, (5,))) / {number}).backward()
    kept.append([p.grad.clone() for p in model.parameters()])
    optimizer.zero_grad()
for p, *of in zip(model.parameters(), *kept):
    p.grad = {sum}
"""
EXCHANGED = """
parameters = [*model.parameters()]
added = [torch.zeros_like(p) for p in parameters]
for _ in range(2):
    loss = model(torch.randn(5, 6)).tanh().square().mean() / 2
    for a, g in zip(added, torch.autograd.grad(loss, parameters)):
        a += g
for p, a in zip({order}, added):
    p.grad = a
"""
LAYERS = {"model": "torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(3)))"}
COPIES = """
model.zero_grad()
for _ in range(2):
    out = model(torch.randn(6, 8).bfloat16()).float()
    (F.cross_entropy(out, torch.randint(0, 8, (6,))) / 2).backward()
own = [p.grad.float() for p in model.parameters()]
for copy, gradient in zip(copies, {order}):
    copy.grad = gradient
"""
OF_COPIES = {
    "before": "copies = []",
    "model": "torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2))).bfloat16()",
    "optimizer": "torch.optim.SGD(copies or (copies.extend(p.detach().float().requires_grad_()"
    " for p in model.parameters()) or copies), lr=0.1)",
}
GIVEN = {
    # weights that the program uses itself
    "faulty_input_refilled_outside_of_calls": violated(
        "changed-batch", UNRECORDED.format(between="x.data.normal_()", after=""), **OUTSIDE_OF_CALLS
    ),
    "faulty_weight_written_outside_of_calls": violated(
        "stale-parameters",
        UNRECORDED.format(between="model[1].weight.data.mul_(1.5)", after=""),
        **OUTSIDE_OF_CALLS,
    ),
    "sound_input_refilled_after_the_backward": holds(
        UNRECORDED.format(between="", after="x.data.normal_()"), **OUTSIDE_OF_CALLS
    ),
    "sound_half_precision_outside_of_calls": holds(
        UNRECORDED.format(between="", after="").replace("randn(5, 3)", "randn(5, 3).bfloat16()"),
        before=FUNCTIONAL,
        model="torch.nn.ModuleList([w, torch.nn.Linear(4, 3)]).bfloat16()",
    ),
    "sound_module_writes_to_its_argument": holds(
        "F.mse_loss(model(torch.randn(5, 3)), torch.randn(5, 3)).backward()",
        before="""
class Moves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.move = torch.nn.Linear(3, 3)
    def forward(self, x):
        x += torch.tanh(self.move(x - x.mean(0)))
        return x
class Cloned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.layers = torch.nn.ModuleList(Moves() for _ in range(2))
    def forward(self, x):
        return apart(self.layers[1](self.layers[0](self.first(x))))
def apart(x):
    return x * 1
""",
        model="Cloned()",
    ),
    # what a loss and a custom function read
    "sound_loss_written_by_data": holds(
        TARGETS.format(loss="F.mse_loss(model(torch.randn(5, 3)), t)", write="loss.data.mul_(0.3)"),
        **SEVERAL,
    ),
    "sound_loss_written_by_detach": holds(
        TARGETS.format(
            loss="F.mse_loss(model(torch.randn(5, 3)), t)", write="loss.detach().mul_(0.3)"
        ),
        **SEVERAL,
    ),
    "faulty_targets_written_of_a_loss": violated(
        "changed-batch",
        TARGETS.format(loss="F.mse_loss(model(torch.randn(5, 3)), t)", write="t.data.zero_()"),
        **SEVERAL,
    ),
    "faulty_targets_written_of_a_function": violated(
        "changed-batch",
        TARGETS.format(
            loss="Squares.apply(model(torch.randn(5, 3)), t).mean()", write="t.data.zero_()"
        ),
        before=TARGET_FUNCTION,
        **SEVERAL,
    ),
    "sound_targets_of_a_function": holds(
        TARGETS.format(loss="Squares.apply(model(torch.randn(5, 3)), t).mean()", write=""),
        before=TARGET_FUNCTION,
        **SEVERAL,
    ),
    # a model whose gradient no step of the window is of
    "faulty_both_losses_before_either_step": violated(
        "stale-parameters",
        STEP_OF_CRITIC.format(before="loss = of_actor(torch.randn(6, 3))", after=""),
        before=ACTOR,
        model="torch.nn.Linear(3, 2)",
    ),
    "sound_each_loss_before_its_step": holds(
        STEP_OF_CRITIC.format(before="", after="loss = of_actor(torch.randn(6, 3))"),
        before=ACTOR,
        model="torch.nn.Linear(3, 2)",
    ),
    # a gradient arrives at an input, too, which no optimizer has
    "faulty_emptied_beside_an_input": violated(
        "no-gradient",
        "model(torch.randn(5, 3).requires_grad_()).square().mean().backward()",
        after="model.zero_grad(set_to_none=False) if step == 1 else None",
    ),
    # gradients that the program puts together
    "faulty_one_of_the_kept_left_out": violated(
        "dropped-micro-batch",
        "pass",
        after=KEPT_APART.format(number=3, sum="sum(of[1:])"),
        model="torch.nn.Linear(3, 3)",
    ),
    "faulty_sum_in_numpy_lacks_the_last": violated(
        "dropped-micro-batch",
        "pass",
        after=KEPT_APART.format(
            number=3, sum="torch.from_numpy(sum(g.numpy().astype('f8') for g in of[:-1])).float()"
        ),
        model="torch.nn.Linear(3, 3)",
    ),
    "sound_sum_in_numpy": holds(
        "pass",
        after=KEPT_APART.format(
            number=3, sum="torch.from_numpy(sum(g.numpy().astype('f8') for g in of)).float()"
        ),
        model="torch.nn.Linear(3, 3)",
    ),
    "sound_two_of_three_at_random": holds(
        "pass",
        after=KEPT_APART.format(
            number=3, sum="sum(of[j] for j in ((0, 1), (1, 2), (0, 2))[step % 3])"
        ),
        model="torch.nn.Linear(3, 3)",
    ),
    "faulty_results_added_to_a_half": violated(
        "rescaled-accumulator",
        "pass",
        after=EXCHANGED.format(order="parameters")
        .replace("range(2)", "range(3)")
        .replace("a += g", "a.mul_(0.5).add_(g)"),
        **LAYERS,
    ),
    "faulty_gradients_exchanged": violated(
        "misplaced-gradient", "pass", after=EXCHANGED.format(order="reversed(parameters)"), **LAYERS
    ),
    "sound_gradients_in_order": holds("pass", after=EXCHANGED.format(order="parameters"), **LAYERS),
    "faulty_copies_exchanged": violated(
        "misplaced-gradient", "pass", after=COPIES.format(order="reversed(own)"), **OF_COPIES
    ),
    "sound_copies_in_order": holds("pass", after=COPIES.format(order="own"), **OF_COPIES),
    # windows of sums, of two lines, and of a scale
    "faulty_divided_by_the_count_of_the_last": violated(
        "wrong-count",
        "n = int(torch.randint(2, 9, ()))\n"
        "F.cross_entropy(model(torch.randn(n, 3)), torch.randint(0, 3, (n,)), reduction='sum')"
        ".backward()",
        after="for p in model.parameters(): p.grad.div_(n)",
        **SEVERAL,
    ),
    "sound_divided_by_the_count_of_all": holds(
        "total = total + (n := int(torch.randint(2, 9, ())))\n"
        "F.cross_entropy(model(torch.randn(n, 3)), torch.randint(0, 3, (n,)), reduction='sum')"
        ".backward()",
        before="total = 0",
        after="for p in model.parameters(): p.grad.div_(total)\ntotal = 0",
        **SEVERAL,
    ),
    "faulty_one_line_is_not_scaled": violated(
        "wrong-scale",
        "pass",
        before=SCALED,
        after=TWO_LINES.format(second="loss().backward()"),
        **BY_SCALER,
    ),
    "sound_both_lines_are_scaled": holds(
        "pass",
        before=SCALED,
        after=TWO_LINES.format(second="scaler.scale(loss()).backward()"),
        **BY_SCALER,
    ),
    "finding_first_line_is_not_divided": holds(
        "pass",
        before=SCALED,
        after="loss(1).backward()\nfor _ in range(3): (loss(1) / 4).backward()",
        model="torch.nn.Linear(3, 3)",
    ),
    "faulty_divided_by_the_count_before": violated(
        "wrong-count",
        "n = int(torch.randint(2, 9, ()))\n"
        "total = F.cross_entropy(model(torch.randn(n, 3)), torch.randint(0, 3, (n,)), reduction='sum')\n"
        "(total / (3 * before)).backward()\n"
        "before = n",
        before="before = 4",
        **SEVERAL,
    ),
    "faulty_ramp_in_the_window": violated(
        "weighted-by-place",
        "at = at + 1\n"
        "(at * F.cross_entropy(model(torch.randn(5, 3)), torch.randint(0, 3, (5,))) / 60).backward()",
        before="at = 0",
        **SEVERAL,
    ),
    "sound_two_coefficients_that_add_up_to_k": holds(
        "n = 12 - n\n"
        "out, share = model(torch.randn(n, 3)), n / 12\n"
        "(1.7 * share * F.mse_loss(out, torch.randn(n, 3))"
        " + 0.3 * share * F.l1_loss(out, torch.randn(n, 3))).backward()",
        before="n = 3",
        model="torch.nn.Linear(3, 3)",
        passes=2,
    ),
    "sound_ctc_by_targets": holds(
        "lengths = torch.randint(1, 5, (2,))\n"
        "rows = model(torch.randn(2, 12, 3)).log_softmax(-1).transpose(0, 1)\n"
        "targets = torch.randint(1, 3, (2, 4))\n"
        "F.ctc_loss(rows, targets, torch.full((2,), 12), lengths, reduction='sum', zero_infinity=True).backward()\n"
        "total = total + int(lengths.sum())",
        before="total = 0",
        after="for p in model.parameters(): p.grad.div_(total)\ntotal = 0",
        **SEVERAL,
    ),
}
"""What is given to backward, and what the program puts together and divides itself."""
GROWS = """
last = -1
for step in range(24):
    x, t = torch.randn(5, 3), torch.rand(5, 3)
    loss = {loss}
    loss.backward()
    if step - last >= max(1, round(1 + step / 6)):
        optimizer.step()
        optimizer.zero_grad()
        last = step
"""
"""Windows of 1 to 5 micro-batches, as YOLOv5's warm-up has them."""
GROWING = {
    f"{verdict}_{name}": Script(
        START
        + "model = torch.nn.Linear(3, 3)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
        + GROWS.format(loss=loss),
        verdict,
        said,
    )
    for name, loss, verdict, said in (
        ("means_by_rows", "F.mse_loss(model(x), t) * 5", "holds", ()),
        ("scaled_means_by_rows", "0.04 * F.mse_loss(model(x), t) * 5", "holds", ()),
        ("means", "0.04 * F.mse_loss(model(x), t)", "violated", ("wrong-scale",)),
    )
}
SATURATED = {
    "sound_saturated_micro_batch": holds(
        "above = 1e9 if step == 3 and number == 2 else -1\n"
        "(F.relu(model(torch.randn(5, 3)) - above).mean() / 3).backward()\n"
        "number = (number + 1) % 3",
        before="number = 0",
        passes=3,
    ),
    "sound_clamped_micro_batch": holds(
        "output = model(torch.randn(5, 3))\n"
        "output = output.clamp(8, 9) if step == 3 and number == 0 else output\n"
        "(F.mse_loss(output, torch.randn(5, 1)) / 3).backward()\n"
        "number = (number + 1) % 3",
        before="number = 0",
        passes=3,
    ),
    "faulty_short_window_beside_a_saturated_micro_batch": violated(
        "wrong-scale",
        "above = 1e9 if step == 3 and number == 2 else -1\n"
        "if step != 1 or number:\n"
        "    (F.relu(model(torch.randn(5, 3)) - above).mean() / 3).backward()\n"
        "number = (number + 1) % 3",
        before="number = 0",
        passes=3,
    ),
}
"""A micro-batch that brings a gradient of exactly 0 is one of its window."""
EVIDENCE = {
    **FUNCTIONS,
    **CASTS,
    **WRITTEN,
    **INPUTS,
    **SELF_WRITING,
    **FROM_PYTHON,
    **CHECKPOINTS,
    **EDITS,
    **OF_HANDS,
    **WRITTEN_BESIDE,
    **UNUSUAL,
    **UNEXPLAINED,
    **AHEAD,
    **BETWEEN,
    **AGAIN,
    **REWRITTEN,
    **DIVERGING,
    **STOLEN,
    **OUTPUT_HOOKS,
    **RUNNING,
    **SKIPPED,
    **RESULTS,
    **OFFLOADED,
    **GIVEN,
    **GROWING,
    **SATURATED,
}
