"""JAX implementations of ATen operations, one file per family.

Importing this package fills the table. An operation that torch decomposes, and that has no
derivative formula of its own in torch, needs none.

It must not import torch's automatic differentiation: every derivative comes from JAX.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
