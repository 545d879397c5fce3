"""The torchtpu backend: torch_tpu, one process a device. The engine sees only base.py.

Decides whether this process can load torch_tpu, and prepares it; nothing here imports torch or torch_tpu before that,
because a process that loads torch_tpu in vain ends without a word. The rest is torchtpu_runner.py.
"""

import os
from typing import TYPE_CHECKING

from ostrya.engine.backends.base import LoadedModel
from ostrya.engine.backends.torchtpu_machine import Machine, environment, hosts_of, problem, this_machine
from ostrya.engine.config import EngineConfig
from ostrya.engine.world import ALONE, World
from ostrya.errors import ConfigError

if TYPE_CHECKING:
    from ostrya.engine.backends.torchtpu_runner import TorchTpuRunner


def load_runner(
    config: EngineConfig, world: World = ALONE, *, machine: Machine | None = None
) -> tuple["TorchTpuRunner", LoadedModel]:
    """Reads the shard of this process. ConfigError with one line when torch_tpu would not run here, or when the model
    cannot be divided so; ModelLoadError when it cannot be read. In the engine's own process, which it may end."""
    machine = machine or this_machine()
    hosts = hosts_of(world, os.environ)
    if found := problem(machine, world, hosts=hosts, topology=config.slice_topology):
        raise ConfigError([found])
    topology = config.slice_topology or machine.topologies[world.size // world.num_hosts]
    os.environ.update(
        environment(world, hosts=hosts, topology=topology, compile_cache=config.compile_cache, given=os.environ)
    )
    from ostrya.engine.backends.torchtpu_runner import load

    return load(config, world, chip=machine.chip)
