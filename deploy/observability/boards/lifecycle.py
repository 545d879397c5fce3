"""Lifecycle: how processes start, what they compile, how they drain, and how often they do so."""

from deploy.observability.panels import Board, Panel, Query, Row, Step
from deploy.observability.promql import RANGE, rate, router, router_process, worker, worker_process

_WORKER_STATE = (
    f"sum by (replica) ({worker('lifecycle_state', state='ready')})"
    f" + 2 * sum by (replica) ({worker('lifecycle_state', state='cordoned')})"
    f" + 3 * sum by (replica) ({worker('lifecycle_state', state='draining')})"
    f" + 4 * sum by (replica) ({worker('lifecycle_state', state='restarting')})"
    f" + 5 * sum by (replica) ({worker('lifecycle_state', state='dead')})"
)

STATES = Row(
    "States",
    (
        Panel(
            title="Workers",
            text="starting until every shape is compiled, then ready; cordoned takes nothing new; draining also ends. "
            "Restarting: it lost its engine and starts another. Starting for longer than a cold compile takes, or "
            "dead, is bad. A gap: not scraped.",
            queries=(Query(_WORKER_STATE, "{{replica}}"),),
            kind="state-timeline",
            names=(
                (0, "starting", "blue"),
                (1, "ready", "green"),
                (2, "cordoned", "purple"),
                (3, "draining", "yellow"),
                (4, "restarting", "orange"),
                (5, "dead", "red"),
            ),
            width=12,
        ),
        Panel(
            title="Routers",
            text="A draining router takes nothing new and finishes its streams; then it ends.",
            queries=(Query(f"sum by (replica) ({router('lifecycle_state', state='draining')})", "{{replica}}"),),
            kind="state-timeline",
            names=((0, "serving", "green"), (1, "draining", "yellow")),
            width=6,
        ),
        Panel(
            title="Leases",
            text="Whether Redis has each worker's lease. A ready worker without one is used while it answers the "
            "routers that know it; those that start now do not find it through Redis.",
            queries=(Query(f"max by (replica) ({worker('registered')})", "{{replica}}"),),
            kind="state-timeline",
            names=((0, "no lease", "red"), (1, "registered", "green")),
            width=6,
        ),
        Panel(
            title="Redis takes writes",
            text="Whether Redis takes what each worker writes. Refused: it answers and will not, so leases run out and "
            "routers ask the workers themselves; nothing fails, but nobody can register.",
            queries=(Query(f"max by (replica) ({worker('redis_writable')})", "{{replica}}"),),
            kind="state-timeline",
            names=((0, "refused", "red"), (1, "writable", "green")),
            width=12,
        ),
        Panel(
            title="Writes refused by Redis",
            text="By Redis' reason: oom = memory full, readonly = a replica, noreplicas = too few replicas, misconf = "
            "disk. Each worker tries again every 2 s at most. Anything above 0 is a fault of Redis.",
            queries=(Query(rate(worker("redis_refusals_total"), "reason"), "{{reason}}"),),
            unit="ops",
            width=12,
        ),
    ),
)

START = Row(
    "Start",
    (
        Panel(
            title="Start-up phases",
            text="How long each phase of the last start took: fetching the model, fetching the compile cache, loading, "
            "warm-up (compiling). Warm-up in minutes on a warm cache: the cache did not fit; see the cache panel.",
            queries=(Query(f"max by (replica, phase) ({worker('startup_phase_seconds')})", "{{replica}} {{phase}}"),),
            kind="barchart",
            unit="s",
            matrix=("replica", "phase"),
            width=8,
        ),
        Panel(
            title="Start-up caches",
            text="Whether the last start found the model and the compile cache already there. Misses on every start: "
            "the volume does not persist, or the cache's key changes.",
            queries=(Query(f"sum by (phase, result) ({worker('startup_cache_total')})", "{{phase}} {{result}}"),),
            decimals=0,
            width=6,
        ),
        Panel(
            title="Reading the weights",
            text="Part of the start that no cache helps. Much longer than before: the volume or the network is slow.",
            queries=(Query(f"max by (replica) ({worker('model_load_seconds')})", "{{replica}}"),),
            unit="s",
            width=5,
        ),
        Panel(
            title="Reading speed",
            text="Bytes of the checkpoint by the time that reading and packing took. Far below the volume's own: the "
            "host is short of CPU.",
            queries=(
                Query(
                    f"max by (replica) ({worker('load_bytes')}) / "
                    f"max by (replica) ({worker('model_load_seconds')} > 0)",
                    "{{replica}}",
                ),
            ),
            unit="Bps",
            width=5,
        ),
    ),
)

COMPILES = Row(
    "Compiles",
    (
        Panel(
            title="Programs compiled since the start",
            text="By phase and by whether the compile cache had them. All must be in warm-up; misses are what makes a "
            "start slow.",
            queries=(Query(f"sum by (phase, cache) ({worker('compilations_total')})", "{{phase}}, cache {{cache}}"),),
            decimals=0,
        ),
        Panel(
            title="Compiled after ready",
            text="Must be 0: each one stops every request of the replica for seconds to minutes.",
            queries=(
                Query(
                    f"sum by (replica) (increase({worker('compilations_total', phase='serving')}[{RANGE}]))",
                    "{{replica}} programs",
                ),
                Query(f"sum by (replica) (increase({worker('late_shapes_total')}[{RANGE}]))", "{{replica}} shapes"),
            ),
            steps=(Step(1, "red"),),
            decimals=0,
        ),
        Panel(
            title="Shapes",
            text="Distinct shapes compiled. Grows during warm-up, then never.",
            queries=(Query(f"max by (replica) ({worker('shapes')})", "{{replica}}"),),
            decimals=0,
        ),
    ),
)

CHANGES = Row(
    "Drains, restarts, endpoints",
    (
        Panel(
            title="Draining",
            text="Workers and routers on their way out. One after another during a rollout; the same one for long is a "
            "stream that does not end.",
            queries=(
                Query(f"sum({worker('lifecycle_state', state='draining')})", "workers"),
                Query(f"sum({router('lifecycle_state', state='draining')})", "routers"),
            ),
            decimals=0,
            width=6,
        ),
        Panel(
            title="Cut off by a drain",
            text="Requests that a worker ended because the drain's time was up. Routers continue them elsewhere; "
            "steady values mean that the drain is too short for the answers.",
            queries=(Query(rate(worker("cancelled_requests_total", cause="drain"), "replica"), "{{replica}}"),),
            unit="reqps",
            width=6,
        ),
        Panel(
            title="Restarts in the last 15 min",
            text="Of processes that keep their name. 1 is a rollout; 3 is a crash loop.",
            queries=(
                Query(
                    f"sum by (replica) (changes({worker_process('process_start_time_seconds')}[15m]))", "{{replica}}"
                ),
                Query(
                    f"sum by (replica) (changes({router_process('process_start_time_seconds')}[15m]))", "{{replica}}"
                ),
            ),
            steps=(Step(3, "red"),),
            decimals=0,
            width=6,
        ),
        Panel(
            title="Endpoints",
            text="Of the workers' Service, as a router watches them. serving without ready is draining. No data "
            "without Kubernetes discovery.",
            queries=(Query(f"max by (condition) ({router('endpoints')})", "{{condition}}"),),
            decimals=0,
            width=6,
        ),
        Panel(
            title="Engines started again",
            text="Engine processes that died, or hung and were killed; the worker stays and its streams go elsewhere. "
            "Each one is a fault.",
            queries=(
                Query(
                    f"sum by (replica, cause) (increase({worker('engine_restarts_total')}[{RANGE}]))",
                    "{{replica}} {{cause}}",
                ),
            ),
            steps=(Step(1, "red"),),
            decimals=0,
            width=12,
        ),
        Panel(
            title="Open files, of the limit",
            text="Each connection is one. Clients may hold 75 %; beyond that new connections are refused.",
            queries=tuple(
                Query(
                    f"max by (replica) ({of('process_open_fds')}) / max by (replica) ({of('process_max_fds')})",
                    "{{replica}}",
                )
                for of in (router_process, worker_process)
            ),
            unit="percentunit",
            steps=(Step(0.7, "red"),),
            width=12,
        ),
        Panel(
            title="Age of processes",
            text="Time since each process started. Steps down to 0 are restarts.",
            queries=(
                Query(f"time() - max by (replica) ({worker_process('process_start_time_seconds')})", "{{replica}}"),
                Query(f"time() - max by (replica) ({router_process('process_start_time_seconds')})", "{{replica}}"),
            ),
            unit="s",
            width=24,
            height=6,
        ),
    ),
)

BOARD = Board(
    uid="ostrya-lifecycle",
    title="Ostrya: lifecycle",
    text="How processes start, compile, drain and restart.",
    rows=(STATES, START, COMPILES, CHANGES),
)
