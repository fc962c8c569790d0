"""The names of JAX that the audit needs and that no public promise covers.

They are looked for when the audit begins, so that another version of JAX is one clear line and no
traceback in a run.
"""

from __future__ import annotations

from importlib import import_module

LOWEST = (0, 9)
"""The lowest version of JAX that the audit is tested with."""
NEEDED = (
    ("jax", "make_jaxpr"),
    ("jax", "shard_map"),
    ("jax", "typeof"),
    ("jax._src.api_util", "infer_argnums_and_argnames"),
    ("jax._src.core", "trace_state_clean"),
    ("jax.core", "Tracer"),
    ("jax.core", "eval_jaxpr"),
    ("jax.extend.core", "Literal"),
    ("jax.extend.core", "Primitive"),
    ("jax.interpreters.ad", "primitive_jvps"),
    ("jax.interpreters.batching", "fancy_primitive_batchers"),
    ("jax.interpreters.mlir", "register_lowering"),
    ("jax.lax", "pcast"),
)
"""Modules, and names in them."""


def why_unsupported() -> str | None:
    """Return why the JAX that is imported cannot be audited; None where it can."""
    import jax

    version = jax.__version_info__
    if version < LOWEST:
        lowest = ".".join(map(str, LOWEST))
        return f"JAX {jax.__version__} cannot be audited: the audit needs JAX {lowest} or later"
    missing = [f"{module}.{name}" for module, name in NEEDED if not _has(module, name)]
    if not hasattr(jax.jit(lambda x: x), "trace"):
        missing.append("the `trace` of a compiled function")
    if missing:
        return (
            f"JAX {jax.__version__} has no {', '.join(missing)}, which the audit needs: use a JAX"
            " that is listed in the documents, and report it"
        )
    return None


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name)
    except ImportError:
        return False
