import torch
import torch.nn.functional as F
import toy

generator, critic = toy.classifier(5), toy.classifier(1)
generating = torch.optim.Adam(generator.parameters())
judging = torch.optim.Adam(critic.parameters())
for x, _ in toy.batches(4, 4, 4, 4):
    with toy.autocast():
        fake = generator(torch.randn_like(x))
        logits = critic(fake)
        loss = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
    generating.zero_grad()
    loss.backward()
    generating.step()
    for part, label in ((x, 1.0), (fake.detach(), 0.0)):
        with toy.autocast():
            logits = critic(part)
            loss = F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label)) / 2
        loss.backward()
    judging.step()
    judging.zero_grad()
