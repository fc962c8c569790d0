"""Training scripts that are drawn by pieces, with what is true of each known before it runs.

A program is windows of micro-batches with weights, calls of the model, resets, edits of `.grad`,
moves of parameters, optimizers and steps. It is sound as it is drawn, or has one fault, which
changes one of its pieces.

Pieces are drawn from a `Random`, which may be Hypothesis's own: then a program is made smaller
where it fails.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from gradcheck_suite.core.results import Result
from tests.auditing.running import audited

HEAD = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
F = nn.functional
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to({dtype})
other = nn.Linear(5, 3)
params = list(net.parameters())
opt = first = torch.optim.SGD(net.parameters(), lr=0.1)
body, head = (torch.optim.SGD(net[i].parameters(), lr=0.1) for i in (0, 2))
beside = torch.optim.SGD(other.parameters(), lr=0.1)
average = [p.detach().clone() for p in params]
buffer = torch.zeros(80, dtype={dtype})
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
def batch(n):
    return torch.randn(n, 5).to({dtype}), torch.randint(0, 3, (n,)), torch.randn(n, 3)
def move(by, sign):
    with torch.no_grad():
        for p, d in zip(params, by):
            p.add_(d, alpha=sign)
def noisy(x):
    return net[2](F.dropout(net[1](net[0](x)), 0.25))
def functional(x, between=torch.tanh):
    return F.linear(between(F.linear(x, net[0].weight, net[0].bias)), net[2].weight, net[2].bias)
def cast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return net(x)
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("gate", torch.tensor([0.5, 1.0, 2.0]))
    def forward(self, x):
        return self.gate * net(x)
gated = Gated()
class Cubed(torch.autograd.Function):
    power = 2
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + x ** 3
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (1 + 3 * x ** 2)
class WronglyCubed(Cubed):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (1 + x ** 2)
class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, t):
        ctx.save_for_backward(out, t)
        return (out - t) ** 2
    @staticmethod
    def backward(ctx, g):
        out, t = ctx.saved_tensors
        return 2 * g * (out - t), None
class WronglySquared(Squared):
    @staticmethod
    def backward(ctx, g):
        out, t = ctx.saved_tensors
        return 2 * g * out, None
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, keeps_state, x, *weights):
        ctx.run, ctx.state = run, torch.get_rng_state() if keeps_state else None
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return run(x)
    @staticmethod
    def backward(ctx, g):
        x, *weights = ctx.saved_tensors
        now = torch.get_rng_state()
        if ctx.state is not None:
            torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            out = ctx.run(x)
        if ctx.state is not None:
            torch.set_rng_state(now)
        return None, None, None, *torch.autograd.grad(out, weights, g)
"""
RESETS = (
    "{of}.zero_grad()",
    "{of}.zero_grad(set_to_none=False)",
    "for p in {of}.parameters(): p.grad = None",
    "for p in {of}.parameters():\n    if p.grad is not None: p.grad.zero_()",
    "torch._foreach_zero_([p.grad for p in {of}.parameters() if p.grad is not None] or [torch.zeros(1)])",
)
"""Ways of resetting a module's gradients."""


@dataclass(frozen=True)
class LossText:
    """A loss of the output `out` of a micro-batch.

    Attributes:
        mean: over its elements.
        total: over its elements.
        per: by what the count of samples is multiplied in its mean.
    """

    mean: str
    total: str
    per: str = ""


LOSSES = (
    LossText("F.cross_entropy(out, y)", "F.cross_entropy(out, y, reduction='sum')"),
    LossText("F.mse_loss(out, t)", "F.mse_loss(out, t, reduction='sum')", "3 * "),
    LossText("Squared.apply(out, t).mean()", "Squared.apply(out, t).sum()", "3 * "),
)
CALLS = (
    "net(x)",
    "net(x)",
    "functional(x)",
    "functional(x, Cubed.apply)",
    "Cubed.apply(net(x))",
    "gated(x)",
    "cast(x)",
    "checkpoint(noisy, x, use_reentrant=False)",
    "checkpoint(noisy, x.requires_grad_(), use_reentrant=True)",
    "Again.apply(noisy, True, x, *net.parameters())",
)
"""Calls of the model with a micro-batch: modules, weights outside of modules, Functions, buffers,
casts, and checkpoints of all forms with the random state of their first computation.
"""
EDITS = (
    "torch.nn.utils.clip_grad_norm_(params, 0.05)",
    "for p in params: p.grad.add_(p.detach(), alpha=0.01)",
    "for p in params: p.grad.sign_()",
    "for p in params: p.grad.add_(0.01 * torch.randn_like(p))",
    "for p in net[2].parameters(): p.grad = None",
    "if step % 2:\n    net[0].zero_grad()",
    "for p in params: p.grad = 0.5 * p.grad",
)
"""What a program may do to `.grad` after the last pass, on purpose; the first one alone hides no fault of a sum."""
BEFORE_BACKWARD = (
    "other.weight.data.mul_(1.1)",
    "before = net[2].weight.data.clone()\nnet[2].weight.data.zero_()\nnet[2].weight.data.copy_(before)",
    "average[0].mul_(0.9)",
    "loss.data.mul_(0.5)",
)
"""Writes between forward and backward that no gradient depends on."""
AFTER_BACKWARD = ("x.data.normal_()", "t.data.zero_()", "y.data.copy_((y + 1) % 3)")
"""Memory that is filled again once the backward is done."""
STATISTIC = (
    "F.cross_entropy(net(batch(6)[0]).float(), torch.zeros(6, dtype=torch.long)).backward()\n"
    "opt.zero_grad()"
)
TURNS = (
    "beside.zero_grad()\n"
    "other(net(batch(4)[0]).detach().float() @ torch.ones(3, 5)).square().mean().backward()\n"
    "beside.step()"
)
AVERAGE = "for a, p in zip(average, params): a.lerp_(p.detach(), 0.1)"
OVERLAP = (
    "for p, at in zip(params, (0, 40, 47, 71)): p.grad = buffer[at : at + p.numel()].view_as(p)"
)
"""One element is the last one of a layer's bias and the first one of the next layer's weight."""
KEEP = "kept.append([p.grad.clone() for p in params])"
COMPOSE = "for p, *of in zip(params, *kept): p.grad = sum(of)"
CLIMB = "by = [0.05 * p.grad / (p.grad.norm() + 1e-9) for p in params]\nmove(by, 1)"
BY_HAND = "for p, a in zip(params, added): p.grad = a"
NEW_LAYER = (
    "if step == 1:\n"
    "    net[2] = nn.Linear(8, 3).to(params[0].dtype)\n"
    "    params = list(net.parameters())\n"
    "    opt = torch.optim.SGD(net.parameters(), lr=0.1)"
)
NEW_OPTIMIZER = "if step == 1:\n    opt = torch.optim.Adam(net.parameters(), lr=0.01)"


@dataclass
class Pieces:
    """A program in pieces, each a few statements.

    Attributes:
        windows: the sizes of the micro-batches of each window.
        loss: of a micro-batch.
        reset: all gradients.
        reset_first: whether at the beginning of a window, or after the step.
        flat: whether one loop runs over the micro-batches of all windows.
        call: of the model, in a micro-batch.
        dtype: of the model.
        two_points: whether each window goes backward at moved parameters once more, and steps on
            that.
        begin: of a window.
        before: each backward, once the loss is there.
        inside: after each pass.
        end: after the last pass.
        after: after the step.
        backward: of a micro-batch.
        step: of the optimizers.
        between: the passes at the two points.
        second: the micro-batches at the second point.
        left_over: micro-batches of an epoch that no step follows.
        around: what the whole training runs in.
    """

    windows: list[list[int]]
    loss: str
    reset: str
    reset_first: bool
    flat: bool
    call: str = "net(x)"
    dtype: str = "torch.float32"
    two_points: bool = False
    begin: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    backward: str = "loss.backward()"
    step: str = "opt.step()"
    between: str = ""
    second: str = "seen"
    left_over: int = 0
    around: str = ""

    def text(self) -> str:
        """Return the script."""
        head = HEAD.replace("{dtype}", self.dtype)
        lines = self._epochs() if self.left_over else self._flat() if self.flat else self._nested()
        if self.around:
            lines = [self.around, *_indented(lines)]
        return head + "\n".join(lines) + "\n"

    @property
    def _begin(self) -> list[str]:
        begin = [*([self.reset] if self.reset_first else []), *self.begin]
        return ["seen = []", *begin] if self.two_points else begin

    @property
    def _losses(self) -> list[str]:
        return [f"out = {self.call}.float()", f"loss = {self.loss}"]

    @property
    def _pass(self) -> list[str]:
        drawn = ["x, y, t = batch(n)"]
        if self.two_points:
            drawn.append("seen.append((n, x, y, t))")
        return [*drawn, *self._losses, *self.before, self.backward, *self.inside]

    @property
    def _step(self) -> list[str]:
        """What follows the last pass of a window."""
        after = [*self.after, *([] if self.reset_first else [self.reset])]
        end = [*self.end]
        if self.two_points:
            again = [
                f"for n, x, y, t in {self.second}:",
                *_indented([*self._losses, "loss.backward()"]),
            ]
            end = [CLIMB, self.between, *again, "move(by, -1)", *end]
        return [*end, self.step, *after]

    def _epochs(self) -> list[str]:
        """Return a loop where a window ends by the number of micro-batches, and so does an epoch."""
        k = len(self.windows[0])
        inner = [
            f"n, N, K, step = {self.windows[0][0]}, {sum(self.windows[0])}, {k}, i // {k}",
            f"j = i % {k}",
            *self._pass,
            f"if i % {k} == {k - 1}:",
            *_indented([*self._step, self.reset]),
        ]
        number = len(self.windows) * k + self.left_over
        body = ["opt.zero_grad()", *self.begin, f"for i in range({number}):", *_indented(inner)]
        return ["for epoch in range(2):", *_indented(body)]

    def _flat(self) -> list[str]:
        """Return one loop over the micro-batches of all windows."""
        rows = []
        for s, sizes in enumerate(self.windows):
            rows += [(s, j, n, sum(sizes), len(sizes)) for j, n in enumerate(sizes)]
        inner = [
            "if j == 0:",
            *_indented(["pass", *self._begin]),
            *self._pass,
            "if j == K - 1:",
            *_indented(self._step),
        ]
        return [f"for step, j, n, N, K in {rows}:", *_indented(inner)]

    def _nested(self) -> list[str]:
        """Return a loop over windows with one over micro-batches in it."""
        inner = [
            "N, K = sum(sizes), len(sizes)",
            *self._begin,
            "for j, n in enumerate(sizes):",
            *_indented(self._pass),
            *self._step,
        ]
        return [f"for step, sizes in enumerate({self.windows}):", *_indented(inner)]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for piece in lines for line in piece.splitlines()]


@dataclass(frozen=True)
class Program:
    """A script, the name of its fault, and what an audit may call that; nothing of a sound one."""

    text: str
    fault: str = ""
    diagnoses: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{self.fault or 'sound'}:\n{self.text}"


@dataclass(frozen=True)
class Fault:
    """A fault of a program.

    Attributes:
        diagnoses: what it may be called.
        plant: puts it into the pieces of a sound program.
        of: what it needs: `equal` or `unequal` sizes, `mean` or `total` losses, `plain` ends of
            windows without a clipping, the plain `net` as its call, one that is `not-reentrant` or
            `uncast`, a `single` precision.
        least: micro-batches of a window that it needs.
    """

    diagnoses: tuple[str, ...]
    plant: Callable[[Pieces, Random], object]
    of: str = ""
    least: int = 1

    def needs(self, word: str) -> bool:
        """Return whether it needs something."""
        return word in self.of.split()


FAULTS: dict[str, Fault] = {}


def fault(*diagnoses: str, of: str = "", least: int = 1) -> Callable[[Callable], Callable]:
    """Name what changes the pieces of a program."""

    def add(plant: Callable) -> Callable:
        FAULTS[plant.__name__] = Fault(diagnoses, plant, of, least)
        return plant

    return add


def _condition(random: Random, pieces: Pieces, *, last: bool = False) -> str:
    """Draw in which step something happens, and after which pass; all windows are long enough."""
    least = min(map(len, pieces.windows))
    j = least - 1 if last else random.randint(0, least - 2)
    return random.choice([f"if j == {j}:", f"if j == {j} and step == 1:"])


@fault("mean-of-means", of="unequal mean", least=2)
def means_of_unequal_micro_batches(pieces, random):
    pieces.loss = pieces.loss.replace("* (n / N)", "/ K")


@fault("mean-of-means", of="unequal mean", least=2)
def a_second_term_of_means(pieces, random):
    pieces.loss += " + 0.3 * F.l1_loss(out, t) / K"


@fault("wrong-scale", of="equal mean plain", least=2)
def undivided(pieces, random):
    pieces.loss = pieces.loss.replace(" * (n / N)", "")


@fault("wrong-scale", of="equal mean plain", least=3)
def divided_twice(pieces, random):
    pieces.loss = pieces.loss.replace("* (n / N)", "/ K / K")


@fault("wrong-scale", of="equal mean plain", least=3)
def divided_in_the_loss_and_after(pieces, random):
    pieces.loss = pieces.loss.replace("* (n / N)", "/ K")
    pieces.end.insert(0, "for p in params: p.grad.div_(K)")


@fault("wrong-count", "wrong-scale", of="unequal total plain", least=2)
def divided_by_the_last_count(pieces, random):
    _divide_after(pieces, "n")


@fault("wrong-count", "wrong-scale", of="unequal total plain")
def a_count_that_is_never_reset(pieces, random):
    pieces.begin.append("if step == 0: count = 0")
    pieces.inside.append("count += n")
    _divide_after(pieces, "count")


@fault("wrong-scale", of="equal mean plain", least=2)
def a_short_window_divided_by_k(pieces, random):
    pieces.loss = pieces.loss.replace("* (n / N)", f"/ {len(pieces.windows[0])}")
    pieces.windows.append(pieces.windows[0][1:])


@fault("stale-window")
def never_reset(pieces, random):
    conditional = "if step != 1:\n" + "\n".join(_indented([pieces.reset]))
    pieces.reset = random.choice(["", conditional])


@fault("stale-window")
def one_layer_never_reset(pieces, random):
    pieces.reset = random.choice(RESETS).format(of="net[2]")


@fault("stale-window", of="reset first")
def a_new_layer_that_the_first_optimizer_does_not_reset(pieces, random):
    pieces.begin.append(NEW_LAYER)
    pieces.reset = random.choice(RESETS[:2]).format(of="first")


@fault("no-gradient", of="plain")
def emptied(pieces, random):
    reset = "\n".join(_indented([random.choice(RESETS).format(of="net")]))
    pieces.end.append(random.choice(["if True:\n", "if step == 1:\n"]) + reset)


@fault("reset-inside-window", "dropped-micro-batch", least=2)
def reset_inside(pieces, random):
    reset = random.choice(RESETS).format(of=random.choice(["net", "net[0]"]))
    pieces.inside += [_condition(random, pieces), *_indented([reset])]


@fault("repeated-micro-batch")
def twice_backward(pieces, random):
    condition = _condition(random, pieces, last=True)
    pieces.backward = "\n".join(
        [condition, "    loss.backward(retain_graph=True)", "loss.backward()"]
    )


@fault("tail-dropped", of="equal", least=2)
def a_rest_of_the_epoch(pieces, random):
    pieces.left_over = random.randint(1, len(pieces.windows[0]) - 1)


@fault("stale-parameters", least=2)
def moved_inside(pieces, random):
    moved = random.choice(
        [
            "move([torch.randn_like(p) for p in params], 0.05)",
            "move([p / 9 for p in params], 1)",
        ]
    )
    pieces.inside += [_condition(random, pieces), *_indented([moved])]


# autocast's backward reads the copies that it has made before the write
@fault("stale-parameters", of="uncast")
def weights_written_before_the_backward(pieces, random):
    pieces.before.append(
        # one number in all rows would move all logits alike, which a cross entropy does not see
        random.choice(["net[2].weight.data.mul_(1.3)", "net[2].weight.data[0].add_(0.2)"])
    )


@fault("changed-batch", of="gated")
def a_buffer_written_before_the_backward(pieces, random):
    pieces.call = "gated(x)"
    pieces.before.append("gated.gate.data.mul_(1.5)")


@fault("changed-batch", of="uncast")
def inputs_refilled_before_the_backward(pieces, random):
    pieces.before.append(random.choice(["x.data.normal_()", "x.data.zero_()"]))


@fault("changed-batch", of="targets")
def targets_refilled_before_the_backward(pieces, random):
    pieces.before.append("y.data.copy_((y + 1) % 3)\nt.data.normal_()")


@fault("stale-parameters", of="single net")
def autocast_around_the_training(pieces, random):
    pieces.around = "with torch.autocast('cpu', torch.bfloat16):"


@fault("wrong-backward")
def a_wrong_function(pieces, random):
    pieces.call = random.choice(["WronglyCubed.apply(net(x))", "functional(x, WronglyCubed.apply)"])


@fault("wrong-backward", of="mean")
def a_wrong_function_of_the_loss(pieces, random):
    pieces.loss = "WronglySquared.apply(out, t).mean() * (n / N)"


@fault("wrong-backward")
def a_checkpoint_that_draws_again(pieces, random):
    pieces.call = random.choice(
        [
            "checkpoint(noisy, x, use_reentrant=False, preserve_rng_state=False)",
            "checkpoint(noisy, x.requires_grad_(), use_reentrant=True, preserve_rng_state=False)",
            "Again.apply(noisy, False, x, *net.parameters())",
        ]
    )


@fault("not-linear", "rescaled-accumulator", "clipped", of="plain", least=2)
def edited_inside(pieces, random):
    pieces.inside.append(
        random.choice([EDITS[0].replace("0.05", "0.001"), EDITS[1], EDITS[2], EDITS[3], EDITS[6]])
    )


@fault("wrong-scale", of="plain")
def scaled_and_not_unscaled(pieces, random):
    pieces.backward = "scaler.scale(loss).backward()"


@fault("not-linear", of="plain")
def gradients_that_overlap(pieces, random):
    pieces.begin.append(f"if step == 0:\n    {OVERLAP}")
    pieces.reset = RESETS[1].format(of="net")


@fault("no-gradient", of="plain")
def replaced(pieces, random):
    new = "net[2].weight = opt.param_groups[0]['params'][2] = nn.Parameter(net[2].weight.detach().clone())"
    pieces.end.append(f"if step == 1:\n    {new}\n    params = list(net.parameters())")


@fault("dropped-micro-batch", of="two-points", least=2)
def fewer_at_the_second_point(pieces, random):
    pieces.second = random.choice(["seen[1:]", "seen[:-1]"])


@fault("stale-parameters", of="two-points")
def a_rest_of_the_first_point(pieces, random):
    pieces.between = "pass"


@fault("mean-of-means", of="two-points unequal mean", least=2)
def means_at_the_first_point(pieces, random):
    # the second point reads the loss of `text`, which stays right
    first = pieces.loss.replace("* (n / N)", "/ K")
    pieces.backward = f"loss = {first}\n{pieces.backward}"


@fault("reset-inside-window", "dropped-micro-batch", of="plain", least=2)
def kept_and_never_used(pieces, random):
    pieces.begin.append("kept = []")
    pieces.inside += [KEEP, "if j < K - 1:", *_indented([RESETS[0].format(of="net")])]


@fault("reset-inside-window", "dropped-micro-batch", of="plain", least=3)
def one_of_the_kept_is_left_out(pieces, random):
    _compose(pieces)
    pieces.end[0] = COMPOSE.replace("sum(of)", random.choice(["sum(of[1:])", "sum(of[:-1])"]))


@fault("rescaled-accumulator", of="plain equal", least=3)
def kept_and_halved_each_time(pieces, random):
    _compose(pieces)
    pieces.end[0] = COMPOSE.replace("sum(of)", "sum(g * 0.5 ** i for i, g in enumerate(of))")


@fault("mean-of-means", of="plain unequal mean", least=3)
def kept_means(pieces, random):
    means_of_unequal_micro_batches(pieces, random)
    _compose(pieces)


@fault("reset-inside-window", "dropped-micro-batch", of="plain not-reentrant", least=2)
def the_last_result_alone_is_written(pieces, random):
    _by_hand(pieces, "added = list(got)")


@fault("reset-inside-window", "dropped-micro-batch", of="plain not-reentrant", least=2)
def one_result_is_not_added(pieces, random):
    _by_hand(pieces, "if j != K - 1: added = [a + g for a, g in zip(added, got)]")


@fault("rescaled-accumulator", of="plain equal not-reentrant", least=3)
def results_added_to_a_half(pieces, random):
    _by_hand(pieces, "added = [0.5 * a + g for a, g in zip(added, got)]")


def _compose(pieces: Pieces) -> None:
    """Let the program keep the gradient of each pass apart, and put `.grad` together from them."""
    pieces.begin.append("kept = []")
    pieces.inside += [KEEP, RESETS[0].format(of="net")]
    pieces.end.insert(0, COMPOSE)


def _by_hand(pieces: Pieces, add: str = "added = [a + g for a, g in zip(added, got)]") -> None:
    """Let the program add up results of `torch.autograd.grad`, and write the sum into `.grad`."""
    pieces.begin.append("added = [torch.zeros_like(p) for p in params]")
    pieces.backward = f"got = torch.autograd.grad(loss, params)\n{add}"
    pieces.end.insert(0, BY_HAND)


def _divide_after(pieces: Pieces, count: str) -> None:
    """Leave the division out of the loss, and divide the sum of gradients before the step."""
    total, _, divisor = pieces.loss.partition(" / (")
    pieces.loss = total
    pieces.end.insert(0, f"for p in params: p.grad.div_({divisor[:-2]}{count})")


def _stop(pieces: Pieces) -> None:
    """Give one window up after its first micro-batch, on purpose."""
    pieces.flat = False
    pieces.begin.append("stopped = False")
    pieces.inside += ["if step == 1 and j == 0:", "    stopped = True", "    break"]
    give_up = _indented([RESETS[0].format(of="net"), "continue"])
    pieces.end.insert(0, "\n".join(["if stopped:", *give_up]))


def _scale(pieces: Pieces, random: Random) -> None:
    """Scale the losses, and unscale the gradients anywhere among the edits."""
    pieces.backward = "scaler.scale(loss).backward()"
    pieces.end.insert(random.randint(0, len(pieces.end)), "scaler.unscale_(opt)")
    pieces.after.append("scaler.update()")


def _flip(random: Random, one_in: int = 2) -> bool:
    return random.randint(1, one_in) == one_in


def _windows(random: Random, planted: Fault, *, is_sound: bool) -> list[list[int]]:
    """Draw the sizes of the micro-batches of each window."""
    k = random.randint(planted.least, 4)
    number = random.randint(3, 5)
    if planted.needs("unequal") or (not planted.needs("equal") and _flip(random)):
        windows = [random.sample(range(1, 7), k) for _ in range(number)]
    else:
        windows = [[random.randint(1, 6)] * k] * number
    if k > 2 and is_sound and _flip(random):
        windows = [*windows, windows[0][1:]]  # a short window that is divided by its own count
    return windows


def _loss(random: Random, planted: Fault, *, is_sound: bool) -> str:
    """Draw the loss of a micro-batch, with its share of the window."""
    losses = LOSSES if not planted.needs("targets") else LOSSES[1:]
    of = random.choice(losses)
    shares = [f"{of.mean} * (n / N)", f"{of.total} / ({of.per}N)"]
    share = random.choice(shares)
    if planted.needs("mean"):
        share = shares[0]
    if planted.needs("total"):
        share = shares[1]
    if not is_sound:
        return share
    second = random.choice(["", "", " + 0.3 * F.l1_loss(out, t) * (n / N)"])
    return random.choice(["", "0.3 * ", "1.7 * "]) + share + second


def _call(random: Random, planted: Fault) -> str:
    """Draw a call of the model that is right."""
    if planted.needs("net"):
        return CALLS[0]
    calls = list(CALLS)
    if planted.needs("not-reentrant"):
        calls = [call for call in calls if "use_reentrant=True" not in call]
    if planted.needs("uncast"):
        # the backward reads the cast, and not what was cast
        calls.remove("cast(x)")
    return random.choice(calls)


def _decorate(pieces: Pieces, random: Random) -> None:
    """Add to a sound program what a program may do."""
    if (
        "/ (" in pieces.loss
        and "+" not in pieces.loss
        and pieces.loss[0].isalpha()
        and _flip(random)
    ):
        _divide_after(pieces, "N")
    special = random.choice(
        ["", "compose", "by hand", "scale", "stop", "new optimizer", "new layer", "before", "after"]
    )
    if special == "compose":
        _compose(pieces)
    elif special == "by hand" and "use_reentrant=True" not in pieces.call:
        _by_hand(pieces)
    elif special == "scale" and pieces.step == "opt.step()":
        _scale(pieces, random)
    elif special == "stop":
        _stop(pieces)
    elif special == "new optimizer":
        pieces.begin.append(NEW_OPTIMIZER)
    elif special == "new layer" and pieces.step == "opt.step()":
        pieces.begin.append(NEW_LAYER)
    elif special == "before":
        pieces.before.append(random.choice(BEFORE_BACKWARD))
    elif special == "after":
        pieces.inside.append(random.choice(AFTER_BACKWARD))


def program_of(random: Random, *, faulty: bool | None = None, name: str = "") -> Program:
    """Draw a program: a sound one, and in half of the cases a fault in it.

    Args:
        random: from which it is drawn.
        faulty: whether it has a fault; None for one of both.
        name: of the fault; empty for any one.
    """
    is_sound = not (_flip(random) if faulty is None else faulty)
    name = "" if is_sound else name or random.choice([*FAULTS])
    planted = Fault((), lambda pieces, random: None) if is_sound else FAULTS[name]
    two_points = planted.needs("two-points") or (is_sound and _flip(random, 6))
    pieces = Pieces(
        _windows(random, planted, is_sound=is_sound),
        _loss(random, planted, is_sound=is_sound),
        random.choice(RESETS).format(of="net"),
        planted.needs("first") or _flip(random),
        _flip(random),
        call=_call(random, planted),
        dtype="torch.float32"
        if planted.needs("single") or not _flip(random, 4)
        else "torch.bfloat16",
        two_points=two_points,
    )
    pieces.between = pieces.reset
    is_plain = planted.needs("plain") or (pieces.two_points and not is_sound)
    if not is_plain and _flip(random):
        pieces.end.append(random.choice(EDITS[:1] if name else EDITS))
    if _flip(random, 4):
        both = is_sound and pieces.reset_first
        pieces.begin.append(random.choice([TURNS, STATISTIC]) if both else TURNS)
    if _flip(random, 4):
        pieces.after.append(AVERAGE)
    if not is_plain and not planted.needs("first") and _flip(random, 4):
        pieces.step = "body.step()\nhead.step()"
    if is_sound and not pieces.two_points:
        _decorate(pieces, random)
    planted.plant(pieces, random)
    return Program(pieces.text(), name, planted.diagnoses)


def audit_of(program: Program) -> Result:
    """Run a program under an audit."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "drawn.py"
        script.write_text(program.text)
        return audited(script, quiet=True)[0]


def outcome(program: Program, result: Result) -> str:
    """Return what the verdict on a program is: `right`, or what is wrong with it."""
    named = {violation.diagnosis for violation in result.violations}
    if not program.fault:
        return "right" if result.verdict == "holds" else "blamed" if named else "unjudged"
    if named:
        return "right" if named <= set(program.diagnoses) else "misnamed"
    return "held" if result.verdict == "holds" else "unjudged"


def said(program: Program) -> str:
    """Return what the audit says where the verdict on a program is wrong, else nothing."""
    result = audit_of(program)
    return "" if outcome(program, result) == "right" else str(result)
