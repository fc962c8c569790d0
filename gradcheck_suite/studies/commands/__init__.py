"""The commands of the studies, each a module with `add_arguments(parser)` and `run(arguments) -> int`."""
