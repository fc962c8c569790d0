"""A case brought to life and run: model, data, loader, optimizer, observer, time limit.

Judges nothing: does not import the references.
"""
