"""TPU slices of GKE, written out: which machine types make up which topology, and what the nodes are labelled.

Independent of the chart's own table; from GKE's "Plan TPUs" page and xpk's system characteristics.
"""

from typing import NamedTuple


class Slice(NamedTuple):
    generation: str
    accelerator: str
    """Value of the node label cloud.google.com/gke-tpu-accelerator."""
    machine_type: str
    topology: str
    chips_per_host: int
    hosts: int

    @property
    def chips(self) -> int:
        return self.chips_per_host * self.hosts

    @property
    def devices_per_chip(self) -> int:
        return 2 if self.generation == "tpu7x" else 1

    @property
    def devices(self) -> int:
        return self.chips * self.devices_per_chip


V5E = ("v5e", "tpu-v5-lite-podslice")
V5P = ("v5p", "tpu-v5p-slice")
V6E = ("v6e", "tpu-v6e-slice")
TPU7X = ("tpu7x", "tpu7x")

SLICES = (
    Slice(*V5E, "ct5lp-hightpu-1t", "1x1", 1, 1),
    Slice(*V5E, "ct5lp-hightpu-4t", "2x2", 4, 1),
    Slice(*V5E, "ct5lp-hightpu-8t", "2x4", 8, 1),
    Slice(*V5E, "ct5lp-hightpu-4t", "2x4", 4, 2),
    Slice(*V5E, "ct5lp-hightpu-4t", "4x4", 4, 4),
    Slice(*V5E, "ct5lp-hightpu-4t", "4x8", 4, 8),
    Slice(*V5E, "ct5lp-hightpu-4t", "8x8", 4, 16),
    Slice(*V5E, "ct5lp-hightpu-4t", "8x16", 4, 32),
    Slice(*V5E, "ct5lp-hightpu-4t", "16x16", 4, 64),
    Slice(*V6E, "ct6e-standard-1t", "1x1", 1, 1),
    Slice(*V6E, "ct6e-standard-4t", "2x2", 4, 1),
    Slice(*V6E, "ct6e-standard-8t", "2x4", 8, 1),
    Slice(*V6E, "ct6e-standard-4t", "2x4", 4, 2),
    Slice(*V6E, "ct6e-standard-4t", "4x4", 4, 4),
    Slice(*V6E, "ct6e-standard-4t", "4x8", 4, 8),
    Slice(*V6E, "ct6e-standard-4t", "8x8", 4, 16),
    Slice(*V6E, "ct6e-standard-4t", "8x16", 4, 32),
    Slice(*V6E, "ct6e-standard-4t", "16x16", 4, 64),
    Slice(*V5P, "ct5p-hightpu-4t", "2x2x1", 4, 1),
    Slice(*V5P, "ct5p-hightpu-4t", "2x2x2", 4, 2),
    Slice(*V5P, "ct5p-hightpu-4t", "2x2x4", 4, 4),
    Slice(*V5P, "ct5p-hightpu-4t", "2x4x4", 4, 8),
    Slice(*V5P, "ct5p-hightpu-4t", "4x4x4", 4, 16),
    Slice(*V5P, "ct5p-hightpu-4t", "4x4x8", 4, 32),
    Slice(*V5P, "ct5p-hightpu-4t", "4x4x12", 4, 48),
    Slice(*V5P, "ct5p-hightpu-4t", "4x8x8", 4, 64),
    Slice(*TPU7X, "tpu7x-standard-1t", "1x1x1", 1, 1),
    Slice(*TPU7X, "tpu7x-standard-4t", "2x2x1", 4, 1),
    Slice(*TPU7X, "tpu7x-standard-4t", "2x2x2", 4, 2),
    Slice(*TPU7X, "tpu7x-standard-4t", "2x2x4", 4, 4),
    Slice(*TPU7X, "tpu7x-standard-4t", "2x4x4", 4, 8),
    Slice(*TPU7X, "tpu7x-standard-4t", "4x4x4", 4, 16),
    Slice(*TPU7X, "tpu7x-standard-4t", "4x4x8", 4, 32),
    Slice(*TPU7X, "tpu7x-standard-4t", "4x4x12", 4, 48),
    Slice(*TPU7X, "tpu7x-standard-4t", "4x8x8", 4, 64),
)


MACHINES = {
    "ct5lp-hightpu-1t": (24, 48),
    "ct5lp-hightpu-4t": (112, 192),
    "ct5lp-hightpu-8t": (224, 384),
    "ct6e-standard-1t": (44, 176),
    "ct6e-standard-4t": (180, 720),
    "ct6e-standard-8t": (180, 1440),
    "ct5p-hightpu-4t": (208, 448),
    "tpu7x-standard-4t": (224, 960),
}
"""vCPUs and GB of a machine type, from Compute Engine's machine-family pages."""

HBM_GB = {"v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 192}
"""Of one chip, from Cloud TPU's page of each generation (docs.cloud.google.com/tpu/docs/v6e and its neighbours)."""

BFLOAT16_BYTES = 2


class Model(NamedTuple):
    """From the config.json and the model card of its repository on the hub."""

    billions: float
    """Of parameters."""
    layers: int
    kv_heads: int
    head_dim: int


MODELS = {
    "Qwen3-4B": Model(4.02, 36, 8, 128),
    "Qwen3-8B": Model(8.19, 36, 8, 128),
    "Qwen3-32B": Model(32.76, 64, 8, 128),
    "Qwen2.5-72B-Instruct": Model(72.71, 80, 8, 128),
    "Llama-3.1-405B-Instruct": Model(405.85, 126, 8, 128),
}
"""What the presets serve, by the last part of its path."""
