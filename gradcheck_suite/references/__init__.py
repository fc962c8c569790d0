"""The single-large-batch references: torch and JAX, each by itself."""
