"""What a running script does, recorded: calls of losses and modules, backward passes, sketches of gradients.

Must not judge: `live.judging` does.
"""
