"""The discriminator steps for each micro-batch and the generator once per window: both have a loss of their own."""

import torch
import torch.nn.functional as F
import toy

generator, discriminator = toy.classifier(5), toy.classifier(1)
of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.01)


def loss_of(x, is_real):
    with toy.autocast():
        logits = discriminator(x)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, is_real))


for window in toy.windows(*[4] * 8, steps=2):
    for x, _ in window:
        of_discriminator.zero_grad()
        loss_of(x, 1.0).backward()
        loss_of(generator(x).detach(), 0.0).backward()
        of_discriminator.step()
        (loss_of(generator(x), 1.0) / len(window)).backward()
    of_generator.step()
    of_generator.zero_grad()
