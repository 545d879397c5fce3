"""Parameters and bytes of a model's weights, by part."""

from collections import Counter
from dataclasses import dataclass

from ostrya.capacity.spec import Drafter, Layers, ModelSpec, Part, Phase, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWeights:
    """The weights of one part over all layers."""

    part: Part
    num_params: int
    num_params_active: int
    """Multiplied with one token. An embedding or a table is looked up, not multiplied: 0."""
    storage: Storage

    @property
    def num_bytes(self) -> float:
        return self.num_params * self.storage.num_bytes


def weights(spec: ModelSpec, phase: Phase = Phase.DECODE) -> tuple[PartWeights, ...]:
    """Every part the model has, vision tower and tables too, the drafter not; active counts are those of `phase`.

    A tied embedding counts as the head, which is what reads all of it.
    """
    total, active = layer_params(spec.hidden, spec.layers, phase)
    table = spec.vocab_size * spec.hidden
    total[Part.HEAD] += table
    active[Part.HEAD] += table
    total[Part.EMBEDDING] += 0 if spec.tied_embeddings else table
    total[Part.NORMS] += spec.num_final_norm_params
    active[Part.NORMS] += spec.num_final_norm_params
    total[Part.TABLES] += sum(table.num_params for table in spec.tables)
    total[Part.VISION] += spec.num_vision_params
    return tuple(
        PartWeights(part=part, num_params=total[part], num_params_active=active[part], storage=spec.storage_of(part))
        for part in Part
        if total[part]
    )


def layer_params(hidden: int, layers: tuple[Layers, ...], phase: Phase) -> tuple[Counter[Part], Counter[Part]]:
    """Parameters of these layers by part: all, and those a token of `phase` is multiplied with."""
    total: Counter[Part] = Counter()
    active: Counter[Part] = Counter()
    for group in layers:
        common = {Part.ATTENTION: group.mixer.num_params(hidden), Part.NORMS: group.num_norm_params}
        for part, count in (common | dict(group.ffn.num_params(hidden))).items():
            total[part] += group.count * count
        if phase in group.phases:
            for part, count in (common | dict(group.ffn.num_params_active(hidden))).items():
                active[part] += group.count * count
    return total, active


_NOT_COUNTED = frozenset({Part.VISION, Part.TABLES})


def num_params(spec: ModelSpec) -> int:
    """Without vision tower, lookup tables and drafter; a tied embedding counts once. What "a 27B model" means."""
    return sum(part.num_params for part in weights(spec) if part.part not in _NOT_COUNTED)


def num_params_active(spec: ModelSpec, phase: Phase = Phase.DECODE, *, count_embedding: bool = False) -> int:
    """Per token, the output head included; the embedding lookup only where asked, as some makers do."""
    looked_up = spec.vocab_size * spec.hidden if count_embedding and not spec.tied_embeddings else 0
    return looked_up + sum(part.num_params_active for part in weights(spec, phase))


def weight_bytes(spec: ModelSpec) -> float:
    """All that has to lie in HBM but the drafter: vision tower and tables too."""
    return sum(part.num_bytes for part in weights(spec))


def drafter_params(drafter: Drafter) -> int:
    """Its own; the embedding and the head it shares with the model are not counted."""
    return layer_params(drafter.hidden, drafter.layers, Phase.DECODE)[0].total() + drafter.num_other_params


def drafter_bytes(spec: ModelSpec) -> float:
    """Of the drafter's own weights; 0 without one."""
    drafter = spec.drafter
    if drafter is None:
        return 0.0
    total, _ = layer_params(drafter.hidden, drafter.layers, Phase.DECODE)
    experts = total.pop(Part.ROUTED_EXPERTS, 0)
    storage = drafter.expert_storage or drafter.storage
    return (total.total() + drafter.num_other_params) * drafter.storage.num_bytes + experts * storage.num_bytes
