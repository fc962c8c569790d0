import torch
import torch.nn.functional as F
import toy

torch.manual_seed(0)
layers = torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)
model = torch.nn.Sequential(*layers).to(toy.dtype())
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
average = torch.optim.swa_utils.AveragedModel(model)
for window in toy.windows(*[4] * 12):
    for x, y in window:
        with toy.autocast():
            loss = F.cross_entropy(model(x), y) / len(window)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    average.update_parameters(model)
