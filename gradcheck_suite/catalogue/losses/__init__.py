"""Losses, one file per family. Must not import a layer family."""
