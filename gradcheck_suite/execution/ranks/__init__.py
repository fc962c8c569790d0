"""Runs a loop on several ranks: processes of `torch.distributed` that live on from case to case.

The parent (`pool`) sends every rank a `Request`. A rank (`member`) imports the loop, runs it on its micro-batches and
sends its `Outcome` back. `server` is the process that imports torch once and forks the ranks, as often as one of them
dies or hangs; `launch` starts it. Ranks may run requests ahead of the parent. Judges nothing.
"""
