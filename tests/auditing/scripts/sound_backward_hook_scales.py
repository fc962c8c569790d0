import torch
import torch.nn.functional as F
import toy

model = toy.classifier()
model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * -0.5,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for window in toy.windows(*[4] * 8):
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
