"""Ready specs, one module per family; the docstring of each spec names the sources of its figures."""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

from ostrya.capacity.models import deepseek, dense, kimi, qwen, sparse
from ostrya.capacity.spec import ModelSpec
from ostrya.capacity.values import unknown
from ostrya.errors import ConfigError

_SPECS: tuple[Callable[[], ModelSpec], ...] = (
    kimi.kimi_k3,
    kimi.kimi_k2_5,
    qwen.qwen3_8_27b,
    qwen.qwen3_5_397b_a17b,
    deepseek.deepseek_v4_flash,
    deepseek.deepseek_v4_1_flash,
    sparse.beam_1_0_501b,
    dense.llama_3_1_8b,
    dense.llama_3_1_70b,
    dense.qwen3_8b,
    dense.qwen3_32b,
    qwen.qwen3_30b_a3b,
    dense.gemma_3_270m,
    sparse.gpt_oss_120b,
    dense.smollm2_135m,
    sparse.muse_spark_1_2,
)


@cache
def models() -> Mapping[str, ModelSpec]:
    """All ready specs by name."""
    return MappingProxyType({spec.name: spec for spec in (build() for build in _SPECS)})


def find_model(name: str) -> ModelSpec:
    """By name, such as kimi-k3. ConfigError names the models there are."""
    found = models().get(name)
    if found is None:
        known = ", ".join(models())
        raise ConfigError([f"{unknown('model', name, models())}; models: {known}; or give a config.json"])
    return found
