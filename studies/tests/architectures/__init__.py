"""The architectures of transformers on which the bridge is tried, a module for each kind: rows of
data.
"""

from studies.tests.architectures import (
    audio,
    decoders,
    encoders,
    mixtures,
    series,
    state_space,
    vision,
)

ARCHITECTURES = {
    row.name: (module.KIND, row)
    for module in (decoders, encoders, mixtures, state_space, vision, audio, series)
    for row in module.ARCHITECTURES
}
"""Name -> kind and row."""
