"""The losses, one file per family."""
