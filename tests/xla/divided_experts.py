"""The program of test_experts.py: experts over four of XLA's virtual CPU devices, in both ways. Prints how far each is
from the plain ones; the compiler writes what it made of them where XLA_FLAGS says.
"""

import importlib
import json
from functools import partial

import torch

from ostrya.engine.backends.exchange import StackedExchange, exchanged
from ostrya.engine.backends.kernels.experts import experts_plain
from ostrya.engine.backends.static_experts import StaticExperts
from ostrya.engine.backends.static_ops import gated
from ostrya.engine.models.spec import Activation

NUM_DEVICES, NUM_EXPERTS, TOP_K, HIDDEN, INNER, NUM_TOKENS = 4, 16, 4, 64, 32, 10


def main() -> None:
    torch_xla, spmd = (importlib.import_module(name) for name in ("torch_xla", "torch_xla.distributed.spmd"))
    importlib.import_module("torch_xla.runtime").use_spmd()
    mesh = spmd.Mesh(list(range(NUM_DEVICES)), (NUM_DEVICES,), ("tensor",))
    device = torch_xla.device()

    def divided(tensor: torch.Tensor) -> torch.Tensor:
        spmd.mark_sharding(tensor, mesh, ("tensor", *[None] * (tensor.dim() - 1)))
        return tensor

    generator = torch.Generator().manual_seed(0)
    x_TD, router_DE, gate_up_EDF, down_EID = (
        torch.randn(*shape, generator=generator) / 8
        for shape in (
            (NUM_TOKENS, HIDDEN),
            (HIDDEN, NUM_EXPERTS),
            (NUM_EXPERTS, HIDDEN, 2 * INNER),
            (NUM_EXPERTS, INNER, HIDDEN),
        )
    )

    def route(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights_Tk, experts_Tk = (x_TD @ router_DE.to(x_TD.device)).softmax(-1).topk(TOP_K)
        return weights_Tk, experts_Tk

    gate = partial(gated, activation=Activation.SILU)
    expected_TD = experts_plain(x_TD, *route(x_TD), gate_up_EDF, down_EID, gate)
    here = NUM_EXPERTS // NUM_DEVICES
    own = StaticExperts(
        gate_up_EDF=divided(gate_up_EDF.view(NUM_DEVICES, here, HIDDEN, 2 * INNER).to(device)),
        down_EID=divided(down_EID.view(NUM_DEVICES, here, INNER, HIDDEN).to(device)),
        first_expert=(torch.arange(NUM_DEVICES) * here)[:, None, None].to(device),
        gate=gate,
    )
    x_TD = x_TD.to(device)
    over_all_TD = own(x_TD, *route(x_TD)).sum(0).cpu()
    exchange = StackedExchange(NUM_DEVICES, divided=divided)
    exchanged_TD = exchanged(x_TD, exchange, route, own, sent_as=torch.float32).cpu()
    print(json.dumps([float((found_TD - expected_TD).abs().max()) for found_TD in (over_all_TD, exchanged_TD)]))


if __name__ == "__main__":
    main()
