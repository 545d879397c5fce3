"""What a small engine says of itself."""

from ostrya.engine.types import EngineInfo

INFO = EngineInfo(
    model="tiny",
    backend="cpu",
    dtype="float32",
    context_tokens=100,
    vocab_size=1000,
    page_size=4,
    num_pages=65,
    routing_stride=2,
    eos_token_ids=(2,),
    max_running=4,
    load_s=0,
    weights="bf16",
    warmup_s=0,
)
