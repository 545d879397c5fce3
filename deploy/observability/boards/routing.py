"""Routing and prefix index: why requests go where they go, and whether the routers know what they think they know."""

from deploy.observability.panels import TOKENS_PER_S, Board, Panel, Query, Row, Step
from deploy.observability.promql import quantile, rate, ratio, router, worker

DECISIONS = Row(
    "Decisions",
    (
        Panel(
            title="Time to decide",
            text="Hashing the prompt, looking it up and scoring every replica, per try. Far below a millisecond is "
            "normal; 5 ms is felt by everybody behind it, as a router has one event loop.",
            queries=(
                Query(quantile(0.5, router("routing_decision_seconds_bucket")), "decision p50"),
                Query(quantile(0.99, router("routing_decision_seconds_bucket")), "decision p99"),
                Query(quantile(0.99, router("index_lookup_seconds_bucket")), "of it look-up p99"),
            ),
            unit="s",
            steps=(Step(0.005, "red"),),
        ),
        Panel(
            title="Why a replica was chosen",
            text="prefix = it holds the prompt's beginning, load = it is less busy, tie = equals, fallback = the "
            "router had no index or no load data. Fallback for long means Redis or the journals are away.",
            queries=(Query(rate(router("routing_decisions_total"), "reason"), "{{reason}}"),),
            unit="ops",
            stacked=True,
        ),
        Panel(
            title="Tries after the first",
            text="A replica failed and another one took over: before the first token (invisible) or after it (the "
            "answer went on from the tokens already sent). Steady retries point at a sick replica.",
            queries=(Query(rate(router("retries_total"), "phase"), "{{phase}}"),),
            unit="ops",
        ),
    ),
)

REUSE = Row(
    "Prefix reuse",
    (
        Panel(
            title="Cached tokens: expected and found",
            text="What the index promised and what the replicas did reuse. The two lines belong together.",
            queries=(
                Query(rate(router("predicted_cached_tokens_total")), "expected"),
                Query(rate(router("actual_cached_tokens_total")), "found"),
            ),
            unit=TOKENS_PER_S,
        ),
        Panel(
            title="Prediction error",
            text="Expected minus found, of all prompt tokens, over 5 min. Above 0: evicted before the index hears. "
            "Below: siblings that arrived together, or an index that lags. Beyond 20 % either way routing is guessing.",
            queries=(
                Query(
                    f"(sum(rate({router('predicted_cached_tokens_total')}[5m]))"
                    f" - sum(rate({router('actual_cached_tokens_total')}[5m])))"
                    f" / sum(rate({router('prompt_tokens_total')}[5m]))",
                    "expected minus found",
                ),
            ),
            unit="percentunit",
            minimum=-0.5,
            maximum=0.5,
            steps=(Step(0.2, "red"),),
        ),
        Panel(
            title="Hit ratio",
            text="Prompt tokens that were not computed because a cache had them: as routers count (per request) and as "
            "replicas count (per look-up). Depends on the traffic; a sudden fall without a change of traffic is bad.",
            queries=(
                Query(
                    ratio(router("actual_cached_tokens_total"), router("prompt_tokens_total")),
                    "of all prompt tokens",
                ),
                Query(
                    ratio(
                        worker("prefix_cache_hit_tokens_total"), worker("prefix_cache_queried_tokens_total"), "replica"
                    ),
                    "in {{replica}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
        ),
    ),
)

INDEX = Row(
    "Index",
    (
        Panel(
            title="What routers know",
            text="fresh = index and load followed; frozen = Redis is away or refuses writes, the index ages; no index; "
            "no load = routing by two random choices. Only fresh is normal; none of them fails a request.",
            queries=(Query(f"max by (replica) ({router('knowledge_level')})", "{{replica}}"),),
            kind="state-timeline",
            names=(
                (1, "fresh", "green"),
                (2, "frozen index", "yellow"),
                (3, "no index", "orange"),
                (4, "no load data", "red"),
            ),
            width=8,
            height=6,
        ),
        Panel(
            title="Redis, as routers see it",
            text="Whether Redis answers a router. Down: the index freezes, new replicas stay unknown; nothing fails.",
            queries=(Query(f"max by (replica) ({router('redis_up')})", "{{replica}}"),),
            kind="state-timeline",
            names=((0, "down", "red"), (1, "up", "green")),
            width=8,
            height=6,
        ),
        Panel(
            title="Index age",
            text="Seconds since a router last heard of a replica through Redis; 0 while it follows. Rising means that "
            "Redis is away, or that no worker can write to it.",
            queries=(Query(f"max by (replica) ({router('index_age_seconds')})", "{{replica}}"),),
            unit="s",
            steps=(Step(10, "red"),),
            width=8,
            height=6,
        ),
        Panel(
            title="Routing blocks in the index",
            text="Distinct blocks that some replica holds. Grows to what the caches can hold, then stays. A fall to 0 "
            "means that the index was lost and is being read anew.",
            queries=(Query(f"max by (replica) ({router('index_entries')})", "{{replica}}"),),
        ),
        Panel(
            title="Staleness by replica",
            text="Seconds since a replica's part of the index was whole; 0 = it is. Above 30 s its journal or its "
            "snapshot cannot be read: requests still reach it, without prefix credit it has earned.",
            queries=(
                Query(
                    f"max by (worker, replica) ({router('index_staleness_seconds')})", "{{worker}}, seen by {{replica}}"
                ),
            ),
            unit="s",
            steps=(Step(30, "red"),),
        ),
        Panel(
            title="Index operations",
            text="Blocks stored and removed; cleared = a replica emptied its cache. snapshot and gap now and then are "
            "healing; corrupt or refused are faults.",
            queries=(Query(rate(router("index_ops_total"), "op"), "{{op}}"),),
            unit="ops",
        ),
        Panel(
            title="Skipped in Redis",
            text="Rows and entries that cannot be read, by kind, each time they were looked at. Anything for long "
            "means that somebody else, or another version, writes to this Redis. Nothing fails; they are not used.",
            queries=(Query(rate(router("unreadable_total"), "kind"), "{{kind}}"),),
            unit="ops",
        ),
        Panel(
            title="Parts of routers and workers",
            text="0 while a router's discovery, tracker, waiting room or gauges, or a worker's publisher, fail and are "
            "started again. Requests go on by what is known; what that part should tell goes stale. See its log.",
            queries=(
                Query(f"min by (replica, part) ({router('part_up')})", "{{replica}} {{part}}"),
                Query(f"min by (replica, part) ({worker('part_up')})", "{{replica}} {{part}}"),
            ),
            kind="state-timeline",
            names=((0, "failing", "red"), (1, "up", "green")),
        ),
        Panel(
            title="Parts started again",
            text="How often a part of a router was started after it failed. Never, normally: each is a fault of ours.",
            queries=(Query(rate(router("part_restarts_total"), "part"), "{{part}}"),),
            unit="ops",
        ),
    ),
)

FLEET = Row(
    "Replicas, as routers see them",
    (
        Panel(
            title="Replicas by state",
            text="Known replicas, the router that sees most of each. lost = it stopped answering; draining = it "
            "finishes what it has.",
            queries=(Query(f"max by (state) ({router('workers')})", "{{state}}"),),
            stacked=True,
            colors=(("ready", "green"), ("starting", "blue"), ("draining", "yellow"), ("lost", "red")),
            decimals=0,
        ),
        Panel(
            title="Kept from new work",
            text="Replicas that are known and get nothing new, by reason. no_lease = no sign of life, in Redis or when "
            "asked; maintenance = only long requests go elsewhere; lease_not_renewed = no lease, but it answers: it "
            "works as before, with fading prefix credit.",
            queries=(Query(f"max by (hold) ({router('replica_holds')})", "{{hold}}"),),
            decimals=0,
        ),
        Panel(
            title="Requests waiting for a replica",
            text="In each router's queue because no replica is routable. They go out as soon as one is; what waits too "
            "long fails with UNAVAILABLE.",
            queries=(Query(f"max by (replica) ({router('queue_depth')})", "{{replica}}"),),
            steps=(Step(1, "orange"),),
            decimals=0,
        ),
    ),
)

KUBERNETES = Row(
    "Kubernetes",
    (
        Panel(
            title="Watches on the Kubernetes API",
            text="Whether each router's watches stand. No data with another discovery. endpointslices down for a "
            "minute: pods that come and go are seen late. nodes (with maintenance only): their maintenance is missed.",
            queries=(Query(f"max by (replica, resource) ({router('kubernetes_up')})", "{{replica}} {{resource}}"),),
            kind="state-timeline",
            names=((0, "down", "red"), (1, "watching", "green")),
        ),
        Panel(
            title="What happened to the watches",
            text="listed: every few seconds, by design. reconnected and expired now and then are normal; "
            "failed means that the API server refuses or cannot be reached.",
            queries=(Query(rate(router("kubernetes_watch_total"), "resource, event"), "{{resource}} {{event}}"),),
            unit="ops",
        ),
        Panel(
            title="Endpoints and routable replicas",
            text="ready should equal routable. More ready than routable: Kubernetes sends pods that this router cannot "
            "use (no lease, unreachable). Fewer: pods on their way out.",
            queries=(
                Query(f"max by (condition) ({router('endpoints')})", "{{condition}}"),
                Query(
                    f"max({router('workers_ready')} and on (pool, replica) "
                    f"{router('kubernetes_up', resource='endpointslices')})",
                    "routable",
                ),
            ),
            decimals=0,
        ),
    ),
)

BOARD = Board(
    uid="ostrya-routing",
    title="Ostrya: routing and prefix index",
    text="Why requests go where they go: decisions, prefix reuse, the index, Redis, discovery.",
    rows=(DECISIONS, REUSE, INDEX, FLEET, KUBERNETES),
)
