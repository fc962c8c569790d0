"""The commands of the studies: records in `plain`, or modules with `add_arguments(parser)` and `run(arguments)`.

Nothing here may be imported before its command is asked for.
"""
