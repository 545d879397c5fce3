"""The torchtpu backend: torch_tpu, one process a device. The engine sees only base.py.

Decides whether this process can load torch_tpu, and prepares it; nothing here imports torch or torch_tpu before that,
because a process that loads torch_tpu in vain ends without a word. The rest is torchtpu_runner.py.
"""

import logging
import os
from typing import TYPE_CHECKING

from ostrya.engine.backends.base import LoadedModel
from ostrya.engine.backends.torchtpu_machine import (
    Machine,
    cache_problem,
    environment,
    hosts_of,
    problem,
    shape_of,
    slice_of,
    this_machine,
)
from ostrya.engine.config import EngineConfig
from ostrya.engine.world import ALONE, World
from ostrya.errors import ConfigError

if TYPE_CHECKING:
    from ostrya.engine.backends.torchtpu_runner import TorchTpuRunner

log = logging.getLogger(__name__)


def load_runner(
    config: EngineConfig, world: World = ALONE, *, machine: Machine | None = None
) -> tuple["TorchTpuRunner", LoadedModel]:
    """Reads the shard of this process. ConfigError with one line when torch_tpu would not run here, or when the model
    cannot be divided so; ModelLoadError when it cannot be read. In the engine's own process, which it may end."""
    machine = machine or this_machine()
    hosts = hosts_of(world, os.environ)
    if found := problem(machine, world, hosts=hosts, topology=config.slice_topology):
        raise ConfigError([found])
    compile_cache = config.compile_cache
    if compile_cache and (reason := cache_problem(compile_cache)):
        log.warning(reason)
        compile_cache = ""
    if (here := world.size // world.num_hosts) < machine.num_devices:
        log.warning(
            "%d of this host's %d TPU devices are used; tensor_parallel says how many", here, machine.num_devices
        )
    shape = shape_of(machine, world, config.slice_topology)
    os.environ.update(environment(world, hosts=hosts, shape=shape, compile_cache=compile_cache, given=os.environ))
    from ostrya.engine.backends.torchtpu_runner import load

    return load(config, world, where=slice_of(machine, world.size), chip=machine.chip)
