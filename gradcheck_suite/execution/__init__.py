"""Runs a loop on a case: model, data, loader, optimizer, observer, time limit.

Judges nothing. Must not import `references`, `diagnosis` or `verification`.
"""
