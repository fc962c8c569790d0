"""Loops for several ranks that fail in ways which only processes can: the ranks of `test_ranks.py` import them."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from gradcheck_suite.loops.ranks.all_reduce import add_up_gradients
from gradcheck_suite.loops.windows import backward_window, part_of_window, window_count, windows


def right(run):
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        add_up_gradients(run)
        run.optimizer.step()


def not_reduced(run):
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()


def wrong_on_rank_1(run):
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        add_up_gradients(run)
        if run.rank == 1:
            for p in run.model.parameters():
                p.grad.mul_(2)
        run.optimizer.step()


def exits(run):
    if run.rank == 1:
        os._exit(7)
    right(run)


def raises(run):
    if run.rank == 1:
        raise ValueError("no data")
    right(run)


def waits_alone(run):
    right(run)
    if run.rank == 0:
        dist.all_reduce(torch.zeros(1))


def out_of_step(run):
    if run.rank == 0:
        dist.all_reduce(torch.zeros(100))
    right(run)


def never_ends(run):
    while run.rank == 1:
        pass


def sleeps_first(run):
    """Let rank 0 be away for longer than the ranks need to be still, as one that writes a checkpoint is."""
    if run.rank == 0:
        time.sleep(2.5)
    right(run)


def reduces_every_micro_batch(run):
    """Add up each micro-batch's own gradient over ranks: right where ranks have as many, and K times the traffic."""
    for window in windows(run):
        total = window_count(run, window)
        sums = {}
        for batch in window:
            run.optimizer.zero_grad()
            part_of_window(run, batch, total).backward()
            add_up_gradients(run)
            sums = {p: sums.get(p, 0) + p.grad for p in run.model.parameters() if p.requires_grad}
        for p, gradient in sums.items():
            p.grad = gradient
        run.optimizer.step()
