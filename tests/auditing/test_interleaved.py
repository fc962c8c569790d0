"""Windows of several optimizers that are open at the same time are computed again, each with all of
its passes, and the calls of a pass are kept no longer than a window needs them.
"""

from __future__ import annotations

import pytest
import torch

import gradcheck_suite
from tests.auditing.running import audited

HEAD = """
import torch
import torch.nn.functional as F
torch.manual_seed(0)
a = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
b = torch.nn.Linear(3, 1)
def sgd(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
def loss_of(module):
    return module(torch.randn(4, 3)).square().mean()
"""
INTERLEAVED = """
opt_a, opt_b = sgd(a), sgd({owned})
for step in range(8):
    for micro in range(3):
        a.train({mode})
        (loss_of(a) / 3).backward()
        if micro == 1:
            opt_b.zero_grad()
            loss_of(b).backward()
            opt_b.step()
    opt_a.step()
    opt_a.zero_grad()
"""
ONE_SCALER = """
opt_a, opt_b = sgd(a), sgd(b)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval={interval})
for i in range(8):
    scaler.scale(loss_of(b)).backward()
    scaler.step(opt_b)
    opt_b.zero_grad()
    scaler.scale(loss_of(a) / 2).backward()
    if i % 2:
        scaler.step(opt_a)
        opt_a.zero_grad()
    scaler.update()
"""
# the names of the parameters are those of their variables: all modules have a `weight`
ACTOR_AND_CRITIC = """
trunk, actor, critic = torch.nn.Linear(5, 6), torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)
opt_actor = torch.optim.SGD([*trunk.parameters(), *actor.parameters()], lr=0.05)
opt_critic = torch.optim.Adam([*trunk.parameters(), *critic.parameters()], lr=0.01)
for update in range(8):
    for micro in range(4):
        obs, ret = torch.randn(4, 5), torch.randn(4, 1)
        (F.mse_loss(actor(torch.tanh(trunk(obs))), ret) / 4).backward()
        if micro == 1:
            features = torch.tanh(trunk(obs)).detach()
            opt_critic.zero_grad()
            F.smooth_l1_loss(critic(features), ret).backward()
            opt_critic.step()
    opt_actor.step()
    opt_actor.zero_grad()
"""
ADVERSARIES = """
gen = torch.nn.Linear(4, 4)
dis = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
opt_g = torch.optim.SGD(gen.parameters(), lr=0.05)
opt_d = torch.optim.SGD(dis.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
of = F.binary_cross_entropy_with_logits
for i in range(16):
    real, z = torch.randn(4, 4) + 1, torch.randn(4, 4)
    opt_d.zero_grad()
    logits = dis(torch.cat([real, gen(z).detach()]))
    loss_d = of(logits, torch.cat([torch.ones(4, 1), torch.zeros(4, 1)]))
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)
    loss_g = of(dis(gen(z)), torch.ones(4, 1)) / 2
    scaler.scale(loss_g).backward()
    if i % 2 == 1:
        scaler.step(opt_g)
        opt_g.zero_grad()
    scaler.update()
"""
FAULTY = {
    "a critic that has the trunk, too": (ACTOR_AND_CRITIC, "reset-inside-window"),
    "one scaler for adversaries": (ADVERSARIES, "step-per-micro-batch"),
    "a reset by the optimizer that has the module, too": (
        INTERLEAVED.format(owned="a, b", mode=True),
        "reset-inside-window",
    ),
    # nothing but the second computation shows it
    "another mode in one micro-batch": (
        INTERLEAVED.format(owned="b", mode="micro != 1"),
        "wrong-mode",
    ),
    "a scale that is updated inside of a window": (
        ONE_SCALER.format(interval=3),
        "step-per-micro-batch",
    ),
}
SOUND = {
    "a step inside of the window": INTERLEAVED.format(owned="b", mode=True),
    "one scaler": ONE_SCALER.format(interval=1000),
}


def _audited(text, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    result, _ = audited(path, every=1)
    # modules lead to every loss
    assert not any("no call of a module" in said for said in result.findings), result
    return result


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_of_a_window_with_another_inside_is_found(name, tmp_path):
    text, expected = FAULTY[name]
    result = _audited(text, tmp_path)
    assert [v.diagnosis for v in result.violations] == [expected], result
    # the first window of an optimizer alone is one of whose parameters not all owners are known
    not_kept = [one for one in result.named_findings if "were not kept" in one.sentence]
    assert all(one.steps == 1 for one in not_kept), result


@pytest.mark.parametrize("name", SOUND)
def test_each_window_of_a_sound_run_is_computed_again(name, tmp_path):
    result = _audited(SOUND[name], tmp_path)
    assert result.verdict == "holds", result
    assert not any(one.name == "not-recomputed" for one in result.named_findings), result
    assert sum(result.again.values()) == result.steps, result.again


def test_it_is_said_whose_parameters_are_hit_where_several_modules_have_one_name(tmp_path):
    (violation,) = _audited(ACTOR_AND_CRITIC, tmp_path).violations
    assert violation.parameter == "trunk.weight"
    assert "in trunk.weight, trunk.bias:" in violation.explanation


IN_A_CLASS = """
class Trainer:
    def __init__(self):
        self.encoder, self.head = a[0], torch.nn.Linear(4, 1)
        self.opt = sgd(self.encoder, self.head)
    def train(self):
        for step in range(4):
            code = self.encoder(torch.randn(4, 3))
            for micro in range(2):
                (self.head(code).square().mean() / 2).backward()
                code = code.detach()
            self.opt.step()
            self.opt.zero_grad()
Trainer().train()
"""


def test_modules_that_an_object_of_the_programs_holds_have_their_names_there(tmp_path):
    result = _audited(IN_A_CLASS.replace("a[0]", "torch.nn.Linear(3, 4)"), tmp_path)
    assert any("encoder.weight, encoder.bias got" in said for said in result.findings), result


def test_calls_are_not_kept_for_an_optimizer_that_steps_no_more():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    with gradcheck_suite.audit(every=1) as audit:
        for _ in range(2):  # the second phase has an optimizer of its own
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(5):
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert len(audit._torch._running) <= 1
    assert audit.result.verdict == "holds"
