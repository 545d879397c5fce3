"""The families this engine computes, found by what a checkpoint calls itself. Called by the weight sources."""

from ostrya.engine.models.gemma import GEMMA3
from ostrya.engine.models.llama import LLAMA
from ostrya.engine.models.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

FAMILIES = (LLAMA, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, GEMMA3)

BY_ARCHITECTURE = {family.gguf_architecture: family for family in FAMILIES}
"""By a GGUF file's general.architecture."""
BY_KIND = {kind: family for family in FAMILIES for kind in family.config_kinds}
"""By a config.json's model_type."""
