"""A second process that judges runs of loops on generated problems, while this one runs the loop on the next cases.

It never runs a loop: what it cannot say `holds` of, this process judges itself, with the same functions. So a verdict
does not depend on whether there is a second process. It must not import `cli`, `live` or `trainers`.
"""
