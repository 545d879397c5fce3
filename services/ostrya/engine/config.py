"""The engine's settings. Frozen; checked once, all problems at once."""

import math
import re
from typing import Literal

import msgspec

from ostrya.capacity.chips import find_slice
from ostrya.errors import ConfigError

Weights = Literal["auto", "int4", "int8", "bf16", "f32"]
_DTYPE_OF = {"int4": "bfloat16", "int8": "bfloat16", "bf16": "bfloat16", "f32": "float32"}
AUTO_PAGES = 0
"""As EngineConfig.num_pages."""
_PAGES_OF_BACKEND = -1
CPU_PAGES = 4096


def weights_problem(weights: Weights, dtype: str) -> str | None:
    """Why they cannot go together."""
    needed = _DTYPE_OF.get(weights, dtype)
    return None if dtype == needed else f"weights is {weights} and dtype {dtype}; with these weights dtype is {needed}"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is built. Every default serves SmolLM2-135M on two CPU cores."""

    model_path: str
    """A .gguf file, or a directory with config.json and *.safetensors."""
    model_name: str
    """The served name; part of the digest chain."""
    tokenizer_fingerprint: str
    """Part of the digest chain; see text/tokenizer.py."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, as text/turns.py finds them; given by the worker's command."""
    vocab_size: int = 0
    """Of the tokenizer; given by the worker's command. 0 = as the model says."""
    backend: Literal["cpu", "xla", "torchtpu", "roofline"] = "cpu"
    """What computes; roofline computes nothing and takes the time that the model would take on `slice`."""
    slice: str = ""
    """With backend roofline: the TPU slice that is simulated, as `ostrya capacity --list` names them, like tpu7x-16."""
    tensor_parallel: int = 1
    """Devices that share each layer: all chips of the slice. With backend cpu: processes, which meet over gloo."""
    expert_parallel: int = 1
    """Groups into which those devices are divided, each with some of a mixture's experts; within a group, as everywhere
    with 1, each device has a part of every expert."""
    expert_exchange_tokens: int | None = None
    """Steps of so many tokens and more send them to the devices of their experts and back (all-to-all). None: each
    device runs its experts over all tokens, which sends fewer bytes."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of products, dense weights and KV pages; the residual stream and the norms are float32."""
    weights: Weights = "auto"
    """Of matrices. auto: as the checkpoint has them, at 4 or 8 bits where that is measured to be faster; int4, int8: at
    no more bits than that, wider ones rounded (the last matrix to 8); bf16, f32: dense."""
    page_size: int = 16
    """Tokens a page."""
    num_pages: int = _PAGES_OF_BACKEND
    """KV pages; page 0 is scratch for padding. auto: as many as memory has room for. Absent: 4096 with backend cpu,
    else auto. With backend roofline as many as the slice has room for, whatever this says."""
    memory_limit_bytes: int | None = None
    """Of each device, for weights, KV pages and intermediate results. Absent: what the device has; with backend cpu,
    what is available on this machine and in its cgroup, shared among the processes of the replica."""
    routing_stride: int = 2
    """Every routing_stride-th page is a resume point that routers see."""
    max_context_tokens: int | None = None
    """None: the model's own limit."""
    max_running: int = 16
    """Rows of a step; also the largest row bucket."""
    max_step_tokens: int = 512
    """The token budget of one step; also the largest token bucket."""
    max_prefill_chunk_tokens: int = 512
    """Longest part of one prompt in one step."""
    max_inter_token_s: float = 0.2
    """While answers are written, a step takes so much of prompts that it lasts about this long, or twice as long as
    without any; 0 = as much as max_step_tokens allows."""
    overlap: bool = True
    """Plan and launch a step while the one before runs, so that the device does not wait for the host."""
    num_threads: int = 0
    """Compute threads of this host, shared among its processes; 0 = all cores."""
    slice_topology: str = ""
    """How the chips of a slice lie, as Kubernetes has it (2x2x4); backend torchtpu, empty = as on this one host."""
    compile_cache: str = ""
    """A directory where compiled programs stay from one start to the next; empty = none."""

    def __post_init__(self) -> None:
        if self.num_pages == _PAGES_OF_BACKEND:
            msgspec.structs.force_setattr(self, "num_pages", CPU_PAGES if self.backend == "cpu" else AUTO_PAGES)

    def check(self) -> None:
        """ConfigError with every problem. Looks at no file: whether the model is there shows at the start."""
        problems = []
        if self.tensor_parallel < 1:
            problems.append(f"tensor_parallel is {self.tensor_parallel}; it must be at least 1")
        if self.expert_parallel < 1 or self.tensor_parallel % self.expert_parallel:
            problems.append(
                f"expert_parallel is {self.expert_parallel}; it must divide tensor_parallel ({self.tensor_parallel})"
            )
        if self.expert_exchange_tokens is not None and self.expert_exchange_tokens < 1:
            problems.append(f"expert_exchange_tokens is {self.expert_exchange_tokens}; it must be at least 1")
        problems += self._slice_problems()
        if problem := weights_problem(self.weights, self.dtype):
            problems.append(problem)
        elif self.backend in ("xla", "torchtpu") and self.weights in ("int4", "int8"):
            problems.append(
                f"weights is {self.weights}; backend {self.backend} keeps matrices dense: set auto, bf16 or f32"
            )
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            problems.append(f"page_size is {self.page_size}; it must be a power of two")
        if self.num_pages != AUTO_PAGES and self.num_pages < 2:
            problems.append(f"num_pages is {self.num_pages}; it must be at least 2")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 1:
            problems.append(f"memory_limit_bytes is {self.memory_limit_bytes}; it must be at least 1")
        if self.routing_stride < 1:
            problems.append(f"routing_stride is {self.routing_stride}; it must be at least 1")
        if self.max_running < 1:
            problems.append(f"max_running is {self.max_running}; it must be at least 1")
        if self.max_step_tokens < self.max_running:
            problems.append(
                f"max_step_tokens is {self.max_step_tokens}; it must be at least max_running ({self.max_running})"
            )
        if self.max_prefill_chunk_tokens < 1:
            problems.append(f"max_prefill_chunk_tokens is {self.max_prefill_chunk_tokens}; it must be at least 1")
        if not 0 <= self.max_inter_token_s < math.inf:
            problems.append(f"max_inter_token_s is {self.max_inter_token_s}; it must be 0 or more")
        if not re.fullmatch(r"(\d+(x\d+){0,3})?", self.slice_topology):
            problems.append(f"slice_topology is {self.slice_topology}; it must be numbers of chips like 2x4 or 2x2x4")
        elif self.slice_topology and self.backend != "torchtpu":
            problems.append(
                f"slice_topology is {self.slice_topology}; backend {self.backend} does not ask for it: remove it"
            )
        if problems:
            raise ConfigError(problems)

    def context_within(self, model_limit: int) -> int:
        """Tokens a sequence may have; ConfigError if they are more than the model can."""
        wanted = self.max_context_tokens
        if wanted is not None and not 1 <= wanted <= model_limit:
            raise ConfigError([f"max_context_tokens is {wanted}; the model allows 1 to {model_limit}"])
        return wanted or model_limit

    def _slice_problems(self) -> list[str]:
        if self.backend != "roofline":
            return [f"slice is {self.slice}; only backend roofline simulates one"] if self.slice else []
        problems = []
        if self.tensor_parallel > 1:
            problems.append(
                f"tensor_parallel is {self.tensor_parallel}; backend roofline simulates all of a slice: it must be 1"
            )
        if not self.slice:
            return [*problems, "slice is empty; backend roofline needs the one to simulate, such as tpu7x-16"]
        try:
            find_slice(self.slice)
        except ConfigError as error:
            problems += error.problems
        return problems
