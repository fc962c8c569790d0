"""A case brought to life: its model and data, the observer of its steps, optimizers, time limits,
child processes.
"""
