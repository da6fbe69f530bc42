"""All models of the zoo by name."""

from __future__ import annotations

from zoo import (
    chance,
    decoders,
    encoder_decoders,
    encoders,
    experts,
    gradients,
    memory,
    multimodal,
    sharing,
    speech,
    state_space,
    timeseries,
    values,
    vision,
    wiring,
)
from zoo.entry import Entry

FAMILIES = (
    decoders,
    experts,
    state_space,
    encoders,
    encoder_decoders,
    vision,
    speech,
    multimodal,
    timeseries,
    wiring,
    sharing,
    values,
    memory,
    gradients,
    chance,
)

ZOO: dict[str, Entry] = {}
for _family in FAMILIES:
    for _entry in _family.ENTRIES:
        if _entry.name in ZOO:
            raise ValueError(f"two models of the zoo are called {_entry.name!r}")
        ZOO[_entry.name] = _entry
