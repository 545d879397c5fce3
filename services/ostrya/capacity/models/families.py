"""Shapes that many models share, so that ready specs and config.json readers build them in one place."""

from collections.abc import Sequence

from ostrya.capacity.layers import Ffn, Mixer
from ostrya.capacity.spec import Layers

Pattern = Sequence[tuple[Mixer, Ffn]]
"""Mixer and feed-forward network of every layer, in order."""


def stacked(pattern: Pattern, *, num_norm_params: int) -> tuple[Layers, ...]:
    """The layers with equal ones taken together: in which order they run costs nothing."""
    counts: dict[tuple[Mixer, Ffn], int] = {}
    for kind in pattern:
        counts[kind] = counts.get(kind, 0) + 1
    return tuple(
        Layers(count=count, mixer=mixer, ffn=ffn, num_norm_params=num_norm_params)
        for (mixer, ffn), count in counts.items()
    )


def every(interval: int, special: Mixer, usual: Mixer, num_layers: int) -> tuple[Mixer, ...]:
    """Every `interval`-th layer is `special`, counting from one: 3:1 and 5:1 hybrids."""
    return tuple(special if layer % interval == 0 else usual for layer in range(1, num_layers + 1))
