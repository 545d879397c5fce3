"""Every name of torch_tpu that the bridge uses is one that the released package has, and nothing else touches it: the
stand-in that tests run against cannot hide a typo."""

import ast
from pathlib import Path

import ostrya
from ostrya.engine.backends import torchtpu_bridge

TORCH_TPU = {
    # torch_tpu/_internal/public_api.py, its one table; nothing there reports what the compile cache does, or warms up.
    "torch.tpu.pallas.jax_op",
    # Private, seen in the wheel; what vLLM's plug-in reads too.
    "torch.tpu._get_cache_stats",
    "torch_tpu._internal.compile.async_compile",
    "torch_tpu._internal.compile._backend.AsyncCompilationSubmitted",
}
"""Of torch-tpu 0.2.0, read in the wheel from PyPI, and found there by the bridge itself over an empty PJRT plug-in
(TPU_LIBRARY_PATH), without a device; PerfStats has num_compilations there."""
CALLS = {"async_compile": {"fn", "warmup_inputs"}, "jax_op": {"name", "fn", "donate_argnums"}}
"""Their parameters there, as far as we pass them."""


def names_used(path: Path) -> set[str]:
    """Of torch.tpu and torch_tpu, spelled out."""
    tree = ast.parse(path.read_text())
    imported = {
        f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch_tpu"
        for name in node.names
    }
    plain = {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
        if name.name.split(".")[0] == "torch_tpu"
    }
    chains = {chain for node in ast.walk(tree) if (chain := dotted(node)).startswith(("torch.tpu.", "torch_tpu."))}
    longest = {chain for chain in chains if not any(other.startswith(f"{chain}.") for other in chains)}
    return imported | plain | longest


def dotted(node: ast.AST) -> str:
    """a.b.c of an attribute of an attribute of a name; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def test_the_bridge_uses_names_that_torch_tpu_has() -> None:
    assert names_used(Path(torchtpu_bridge.__file__)) == TORCH_TPU


def test_only_the_bridge_touches_torch_tpu() -> None:
    package = Path(ostrya.__file__).parent
    others = [path for path in package.rglob("*.py") if path.name != "torchtpu_bridge.py"]
    assert {str(path): used for path in others if (used := names_used(path))} == {}


def test_the_bridge_passes_arguments_that_they_take() -> None:
    tree = ast.parse(Path(torchtpu_bridge.__file__).read_text())
    passed = {
        dotted(node.func).split(".")[-1]: {keyword.arg for keyword in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    for name, parameters in CALLS.items():
        assert passed[name] <= parameters
