"""A training script as somebody may have it, on a device of one's choice: the GPU's correctness
part audits it.

    gradcheck-suite audit studies/tests/training_script.py --device cuda [--mean-of-means]

Micro-batches have different numbers of targets. The loss of each is divided by the targets of the
window; with `--mean-of-means` it is the mean over its own targets, divided by the number of
micro-batches, which is wrong.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, LENGTH, ITEMS, MICRO_BATCHES, WINDOWS = 50, 12, 4, 4, 6


def main() -> None:
    """Train a small model of language."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mean-of-means", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, 32),
        nn.Linear(32, 64),
        nn.GELU(),
        nn.LayerNorm(64),
        nn.Linear(64, WORDS),
    )
    model.to(asked.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(WINDOWS):
        batches = []
        for number in range(MICRO_BATCHES):
            words = torch.randint(WORDS, (ITEMS, LENGTH + 1))
            inputs, targets = words[:, :-1], words[:, 1:].clone()
            targets[:, 3 + 2 * number :] = -100
            batches.append((inputs.to(asked.device), targets.to(asked.device)))
        total = sum(int((targets != -100).sum()) for _, targets in batches)
        for inputs, targets in batches:
            with torch.autocast(asked.device, dtype=torch.bfloat16):
                outputs = model(inputs).flatten(0, 1)
            if asked.mean_of_means:
                loss = cross_entropy(outputs.float(), targets.flatten()) / MICRO_BATCHES
            else:
                loss = cross_entropy(outputs.float(), targets.flatten(), reduction="sum") / total
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
