"""A gradient that is reset before its step, though another optimizer steps on its pass, is a finding;
what a pass leaves in parameters that it only goes through is none.
"""

from __future__ import annotations

import pytest

from gradcheck_suite.__main__ import main
from tests.auditing.running import audited

HEAD = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
def sgd(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
def data():
    return torch.randn(6, 5)
encoder = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh())
first, second = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)
of_encoder, of_first, of_second = sgd(encoder), sgd(first), sgd(second)
def task(head, detach=False):
    z = encoder(data())
    return head(z.detach() if detach else z).square().mean()
"""
SHARED_ENCODER = """
for step in range(6):
    of_first.zero_grad()
    of_encoder.zero_grad()
    task(first).backward()
    of_first.step()
    of_second.zero_grad()
    of_encoder.zero_grad()  # here
    task(second).backward()
    of_second.step()
    of_encoder.step()
"""
FOUND = {
    "the encoder steps last": SHARED_ENCODER,
    "the encoder steps on a pass of its own": SHARED_ENCODER.replace(
        "of_second.step()\n    of_encoder.step()", "of_encoder.step()\n    of_second.step()"
    ),
    "one reset for both": SHARED_ENCODER.replace(
        "of_second.zero_grad()\n    of_encoder.zero_grad()  # here",
        "(of_second.zero_grad(), of_encoder.zero_grad())  # here",
    ),
    "zeroed in place": SHARED_ENCODER.replace("    of_second.zero_grad()\n", "")
    .replace("of_second.step()", "of_second.step()\n    of_second.zero_grad()")
    .replace("of_encoder.zero_grad()  # here", "of_encoder.zero_grad(set_to_none=False)  # here"),
    # of this one no measurement tells whether the encoder should have learned
    "a probe that is not detached": """
for step in range(6):
    of_first.zero_grad()
    task(first).backward()
    of_first.step()
    of_encoder.zero_grad()  # here
    of_second.zero_grad()
    task(second).backward()
    of_second.step()
    of_encoder.step()
""",
}
GAN = """
generator, critic = torch.nn.Linear(3, 5), torch.nn.Linear(5, 1)
of_generator, of_critic = sgd(generator), sgd(critic)
for step in range(6):
    fake = generator(torch.randn(6, 3))
    of_critic.zero_grad()
    (critic(fakeOF_CRITIC).mean() - critic(data()).mean()).backward()
    of_critic.step()
    LOSS
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()
"""
GENERATOR_LOSS = "loss = -critic(generator(torch.randn(6, 3))).mean()"
FEATURES = """known = critic(data()).mean()
    loss = (critic(generator(torch.randn(6, 3))).mean() - known).square()"""
SOUND = {
    "each task resets its head alone": SHARED_ENCODER.replace(
        "    of_encoder.zero_grad()  # here\n", ""
    ),
    "a probe that is detached": SHARED_ENCODER.replace("task(first)", "task(first, detach=True)"),
    "adversaries": GAN.replace("OF_CRITIC", ".detach()").replace("LOSS", GENERATOR_LOSS),
    "adversaries that are not detached": GAN.replace("OF_CRITIC", "").replace(
        "LOSS", GENERATOR_LOSS
    ),
    # the critic is used before the generator and behind it
    "features are matched": GAN.replace("OF_CRITIC", ".detach()").replace("LOSS", FEATURES),
    "an actor through a critic": """
actor, critic = torch.nn.Linear(5, 2), torch.nn.Linear(7, 1)
of_actor, of_critic = sgd(actor), sgd(critic)
def value(x, action):
    return critic(torch.cat([x, action], 1))
for step in range(6):
    x = data()
    of_critic.zero_grad()
    (value(x, torch.randn(6, 2)) - torch.randn(6, 1)).square().mean().backward()
    of_critic.step()
    of_actor.zero_grad()
    (-value(x, actor(x)).mean()).backward()
    of_actor.step()
""",
    "an adversarial autoencoder": """
decoder, critic = torch.nn.Linear(4, 5), torch.nn.Linear(4, 1)
of_decoder, of_critic, of_adversary = sgd(decoder), sgd(critic), sgd(encoder)
optimizers = of_encoder, of_decoder, of_critic, of_adversary
def reset():
    for optimizer in optimizers:
        optimizer.zero_grad()
for step in range(6):
    x = data()
    reset()
    F.mse_loss(decoder(encoder(x)), x).backward()
    of_decoder.step()
    of_encoder.step()
    reset()
    (critic(torch.randn(6, 4)).mean() - critic(encoder(x)).mean()).backward()
    of_critic.step()
    reset()
    critic(encoder(x)).mean().backward()
    of_adversary.step()
""",
    "the other optimizer has the encoder, too": """
of_both = sgd(encoder, first)
for step in range(6):
    of_both.zero_grad()
    task(first).backward()
    of_both.step()
    of_encoder.zero_grad()
    of_second.zero_grad()
    task(second).backward()
    of_second.step()
    of_encoder.step()
""",
    "once, before the encoder is trained": """
for step in range(6):
    of_first.zero_grad()
    task(first).backward()
    of_first.step()
of_encoder.zero_grad()
for step in range(6):
    of_second.zero_grad()
    of_encoder.zero_grad()
    task(second).backward()
    of_second.step()
    of_encoder.step()
""",
}


def _shared(text, tmp_path):
    """Return the findings of a script, and the line that throws a gradient away."""
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    result, _ = audited(path)
    assert result.verdict == "holds", result
    lines = path.read_text().splitlines()
    line = next((n for n, line in enumerate(lines, 1) if "# here" in line), None)
    return [one for one in result.named_findings if one.name == "reset-shared-pass"], line


@pytest.mark.parametrize("name", FOUND)
def test_a_gradient_that_another_optimizers_task_throws_away_is_found_at_its_reset(name, tmp_path):
    found, line = _shared(FOUND[name], tmp_path)
    assert [one.place.rpartition(":")[2] for one in found] == [str(line)], found
    assert found[0].severity == "warning"
    assert "in 5 of 6 windows" in found[0].sentence


@pytest.mark.parametrize("name", SOUND)
def test_what_a_pass_leaves_on_its_way_to_others_is_none(name, tmp_path):
    found, _ = _shared(SOUND[name], tmp_path)
    assert not found


def test_it_may_fail_the_command(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(HEAD + SHARED_ENCODER)
    assert main(["audit", "--fail-on", "reset-shared-pass", str(path)]) == 1
    assert "reset-shared-pass" in capsys.readouterr().err
