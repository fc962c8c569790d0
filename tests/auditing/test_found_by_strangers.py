"""Kinds of faults, and of sound programs, that strangers have shown: each with its twin."""

from __future__ import annotations

import pytest

from tests.auditing.running import audited

WINDOWS = 6
HEAD = """
import contextvars
import torch
import torch.nn.functional as F

torch.manual_seed(0)
WINDOWS, K = 6, 4
"""
MODEL = """
model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def batch():
    return torch.randn(4, 5), torch.randint(0, 3, (4,))
"""


def _audited(text, tmp_path, *, model=MODEL, **options):
    path = tmp_path / "train.py"
    path.write_text(HEAD + model + text)
    return audited(path, quiet=True, **options)


def _names(result):
    return {one.name for one in result.named_findings}


def _faults(result):
    return {violation.diagnosis for violation in result.violations}


LATE = """
for _ in range(WINDOWS):
    losses = []
    for _ in range(K):
        x, y = batch()
        losses.append(lambda x=x, y=y: F.cross_entropy(model(x), y) / K)
    for loss in losses:
        loss().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("text", [LATE.replace("x=x, y=y", ""), LATE], ids=["late", "bound"])
def test_micro_batches_that_bring_the_same_are_said(text, tmp_path):
    result, _ = _audited(text, tmp_path)
    assert not result.violations, result
    assert ("same-micro-batches" in _names(result)) is (text is not LATE)


HOOKED = """
def average(optimizer, args, kwargs):
    for p in model.parameters():
        p.grad.div_(DIVISOR)


optimizer.register_step_pre_hook(average)
for _ in range(WINDOWS):
    for _ in range(K):
        x, y = batch()
        (F.cross_entropy(model(x), y) / K).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("divisor", "summed", "faults"),
    [("K", False, {"wrong-scale"}), ("K", True, set()), ("1", False, set())],
)
def test_what_a_hook_of_the_step_leaves_is_judged(divisor, summed, faults, tmp_path):
    text = HOOKED.replace("DIVISOR", divisor)
    result, names = _audited(text.replace(") / K", ")") if summed else text, tmp_path)
    assert _faults(result) == faults, result
    # what looked last is gone
    assert len(names["optimizer"]._optimizer_step_pre_hooks) == 1


CRITIC = """
for _ in range(WINDOWS):
    for sign in SIGNS:
        (sign * model(torch.randn(4, 5)).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("signs", "is_fault"),
    [("-1.0, 1.0", False), ("1.0, 1.0, -1.0, -1.0", False), ("1.0, -1.0, 1.0", True)],
)
def test_a_difference_of_two_losses_is_an_objective_and_one_flipped_sign_is_not(
    signs, is_fault, tmp_path
):
    result, _ = _audited(CRITIC.replace("SIGNS", f"({signs})"), tmp_path)
    assert bool(result.violations) is is_fault, result
    assert ("changing-coefficient" in _names(result)) is not is_fault


RETURNS = """
for _ in range(WINDOWS):
    for _ in range(K):
        actions = torch.distributions.Categorical(logits=model(torch.randn(5, 5)))
        gain = FACTOR
        (-gain * actions.log_prob(actions.sample()).mean() / K).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("factor", "faults"),
    [
        ("torch.randn(()).item()", set()),
        ("1.0", set()),
        # numbers of one sign may come from a wrong count
        ("1 + torch.rand(()).item()", {"unrecognised-weights"}),
    ],
)
def test_returns_of_both_signs_are_coefficients(factor, faults, tmp_path):
    result, _ = _audited(RETURNS.replace("FACTOR", factor), tmp_path)
    assert _faults(result) == faults, result
    assert ("changing-coefficient" in _names(result)) is ("randn" in factor)


def test_windows_without_a_gradient_are_judged_as_what_they_are(tmp_path):
    text = """
for window in range(2 * WINDOWS):
    for _ in range(K):
        x = torch.randn(3, 5) * (window % 3 != 1)
        (model(x).square().sum() / 12).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    model = """
model = torch.nn.Linear(5, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
    result, _ = _audited(text, tmp_path, model=model)
    assert result.verdict == "holds", result
    # in the window after the third, sampled elements alone were looked at, and it is said
    assert result.windows == 2 * WINDOWS - 1
    assert any("no element of its gradients" in said for said in result.findings)


FROZEN = """
for window in range(WINDOWS):
    for p in model.parameters():
        p.requires_grad_(RULE)
    for _ in range(K):
        x, y = batch()
        (F.cross_entropy(model(x), y) / K).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("rule", "is_said"), [("p.dim() > 1 or window == 0", True), ("True", False)]
)
def test_parameters_that_stay_frozen_are_said(rule, is_said, tmp_path):
    result, _ = _audited(FROZEN.replace("RULE", rule), tmp_path)
    assert ("parameter-without-later-gradient" in _names(result)) is is_said, result


TIED = """
class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 6)
        self.middle = torch.nn.Linear(6, 6)

    def forward(self, ids):
        return F.linear(self.middle(self.embedding(ids)), self.embedding.weightDATA)


model = Tied()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(WINDOWS):
    for _ in range(K):
        ids = torch.randint(0, 12, (5, 6))
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        (loss / K).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("data", [".data", ".detach()", ""])
def test_a_parameter_that_is_used_as_a_constant_is_said(data, tmp_path):
    result, _ = _audited(TIED.replace("DATA", data), tmp_path, model="")
    assert not result.violations, result
    said = [one for one in result.named_findings if one.name == "parameter-as-constant"]
    assert bool(said) is bool(data), result
    assert all("embedding.weight" in one.sentence for one in said)
    assert all(one.where.endswith("train.py:16") for one in said)


BRANCH = """
class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1.5, 1.5)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        inside = (x.abs() <= 1.5).to(g.dtype)
        return g if inside.all() else g * (inside + LEAK * (1 - inside))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 6), torch.nn.Linear(6, 1)

    def forward(self, x):
        return self.last(Clip.apply(self.first(x)))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for window in range(9):
    for _ in range(K):
        x = torch.randn(8, 5) * (0.2 if window < 5 else 2.0)
        (model(x).square().mean() / K).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("leak", "is_said"), [("0.01", True), ("0.0", False)])
def test_a_branch_of_a_function_that_comes_later_is_asked_for(leak, is_said, tmp_path):
    result, _ = _audited(BRANCH.replace("LEAK", leak), tmp_path, model="", every=1)
    assert ("custom-function" in _names(result)) is is_said, result


NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(5, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        h = ACTIVATION(self.body(x))
        BETWEEN
        return self.head(h)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(WINDOWS):
    for _ in range(K):
        x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
        (F.cross_entropy(model(x), y) / K).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _net(activation, between):
    return NET.replace("ACTIVATION", activation).replace("BETWEEN", between)


@pytest.mark.parametrize(("most", "is_fault"), [("0.2", False), ("0.053", True)])
def test_a_threshold_that_no_gradient_reaches_is_no_fault(most, is_fault, tmp_path):
    """Gradients here have norms up to 0.1; the audit's own second computation multiplies them by 8."""
    guard = f"h.register_hook(lambda g: torch.zeros_like(g) if g.norm() > {most} else None)"
    result, _ = _audited(_net("torch.tanh", guard), tmp_path, model="")
    assert bool(result.violations) is is_fault, result
    told = [*(v.explanation for v in result.violations), *result.findings]
    assert any("a hook that the forward sets on a tensor" in said for said in told)


STATE = """
count = contextvars.ContextVar("count", default=0)


class Net(torch.nn.Linear):
    def forward(self, x):
        global made
        count.set(count.get() + 1)
        made = globals().get("made", 0) + 1
        Net.calls = getattr(Net, "calls", 0) + 1
        return super().forward(x)


model = Net(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(WINDOWS):
    for _ in range(K):
        (model(torch.randn(2, 5)).square().mean() / K).backward()
    optimizer.step()
    optimizer.zero_grad()
counted = count.get(), made, Net.calls
"""


def test_counters_that_a_call_makes_are_put_back(tmp_path):
    result, names = _audited(STATE, tmp_path, model="")
    assert result.again, result
    assert names["counted"] == (24, 24, 24)


PREFETCHED = """
out = model(torch.randn(6, 5))
for index in range(WINDOWS * K):
    NEXT
    (F.cross_entropy(out, torch.randint(0, 3, (6,))) / K).backward()
    if index % K == K - 1:
        optimizer.step()
        optimizer.zero_grad()
    LAST
"""
LINEAR = """
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
"""


@pytest.mark.parametrize("is_early", [True, False])
def test_a_forward_before_the_step_has_one_name(is_early, tmp_path):
    """The layer saves no weight, so that torch does not raise; its value follows from others now."""
    follows = "following = model(torch.randn(6, 5))"
    text = PREFETCHED.replace("NEXT", follows if is_early else "")
    text = text.replace(
        "LAST", "out = following" if is_early else follows.replace("following", "out")
    )
    result, _ = _audited(text, tmp_path, model=LINEAR)
    assert _faults(result) == ({"stale-parameters"} if is_early else set()), result


UNFROZEN = """
import torch.nn.utils.parametrize as parametrize


class LowRank(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(2, 6) / 10)
        self.b = torch.nn.Parameter(torch.zeros(3, 2))

    def forward(self, weight):
        return weight + self.b @ self.a


model = torch.nn.Linear(6, 3)
model.weight.requires_grad_(False)
parametrize.register_parametrization(model, "weight", LowRank())
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for window in range(8):
    if window == 4:
        weight = model.parametrizations.weight.original.requires_grad_(True)
        optimizer.add_param_group({"params": [weight]})
    for _ in range(K):
        x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
        (F.cross_entropy(model(x), y) / K).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_parameter_that_joins_a_graph_that_was_known_is_seen(tmp_path):
    """Autograd makes as many nodes with it as without."""
    result, _ = _audited(UNFROZEN, tmp_path, model="", budget="none")
    assert result.windows == result.steps == 8, result
    assert "unseen-pass" not in _names(result)


MASK = "(torch.arange(8) % 2).float()"


@pytest.mark.parametrize(
    ("activation", "write", "faults"),
    [
        ("torch.tanh", f"h.data.mul_({MASK})", {"changed-batch"}),
        ("torch.tanh", "h.detach().numpy()[:, 0] = 0", {"changed-batch"}),
        ("torch.tanh", f"h = h * {MASK}", set()),
        # what is written is nothing that the backward reads
        ("torch.nn.Identity()", f"h.data.mul_({MASK})", set()),
        # the derivative of a ReLU is 0 where it has given 0, so that a mask over it has the right one
        ("torch.relu", f"h.data.mul_({MASK})", set()),
    ],
)
def test_a_forward_that_writes_to_what_it_has_saved_is_found(activation, write, faults, tmp_path):
    result, _ = _audited(_net(activation, write), tmp_path, model="")
    assert _faults(result) == faults, result
