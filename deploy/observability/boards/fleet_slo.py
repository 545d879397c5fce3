"""Fleet and SLO: do users get what was promised, and if not, since when and how fast."""

from deploy.observability.panels import TOKENS_PER_S, Board, Panel, Query, Row, Step
from deploy.observability.promql import POOL, quantile, rate, router, worker

AVAILABILITY_BUDGET = 0.001
"""99.9 % of the requests we are answerable for."""
TTFT_BUDGET = 0.05
"""95 % of first tokens within 2.56 s."""

_BURN = (Step(1, "yellow"), Step(6, "orange"), Step(14.4, "red"))
_LATENCY = (Step(2.56, "red"),)


def _sli(name: str, window: str) -> str:
    return f"ostrya:{name}:ratio_rate{window}{{{POOL}}}"


def _burns(name: str, budget: float) -> tuple[Query, ...]:
    windows = ("5m", "1h", "6h")
    return tuple(Query(f"(1 - {_sli(name, w)}) / {budget}", f"{{{{pool}}}} over {w}") for w in windows)


def _left(name: str, budget: float) -> str:
    return f"1 - (1 - {_sli(name, '30d')}) / {budget}"


LEVEL = Row(
    "Service level",
    (
        Panel(
            title="Availability, last hour",
            text="Requests that did not fail for a reason of ours, of all but the client's own mistakes and cancels. "
            "The promise is 99.9 %. Nothing is shown while nobody asks.",
            queries=(Query(_sli("availability", "1h"), "{{pool}}"),),
            kind="stat",
            unit="percentunit",
            decimals=3,
            maximum=1,
            below="red",
            steps=(Step(0.999, "green"),),
            width=6,
            height=5,
        ),
        Panel(
            title="First token within 2.56 s, last hour",
            text="Of the requests that got a first token. The promise is 95 %. 2.56 s is a bound of the histogram, "
            "so the share is exact, and the first one that an idle replica keeps with a long cold prompt.",
            queries=(Query(_sli("ttft", "1h"), "{{pool}}"),),
            kind="stat",
            unit="percentunit",
            decimals=2,
            maximum=1,
            below="red",
            steps=(Step(0.95, "green"),),
            width=6,
            height=5,
        ),
        Panel(
            title="Error budget left, 30 days: availability",
            text="What remains of the failures that 99.9 % allows. 100 % is untouched; below 0 the promise is broken. "
            "With less than 30 days of data, over what there is.",
            queries=(Query(_left("availability", AVAILABILITY_BUDGET), "{{pool}}"),),
            kind="stat",
            unit="percentunit",
            decimals=1,
            minimum=None,
            maximum=1,
            below="red",
            steps=(Step(0, "orange"), Step(0.25, "yellow"), Step(0.5, "green")),
            width=6,
            height=5,
        ),
        Panel(
            title="Error budget left, 30 days: first token",
            text="What remains of the late first tokens that 95 % allows. Below 0 the promise is broken.",
            queries=(Query(_left("ttft", TTFT_BUDGET), "{{pool}}"),),
            kind="stat",
            unit="percentunit",
            decimals=1,
            minimum=None,
            maximum=1,
            below="red",
            steps=(Step(0, "orange"), Step(0.25, "yellow"), Step(0.5, "green")),
            width=6,
            height=5,
        ),
        Panel(
            title="Burn rate: availability",
            text="How many times faster than allowed the budget is spent. 1 spends it in exactly 30 days. "
            "14.4 over an hour and 6 over six hours page somebody; a 5 min line that has fallen says it is over.",
            queries=_burns("availability", AVAILABILITY_BUDGET),
            steps=_BURN,
            width=12,
        ),
        Panel(
            title="Burn rate: first token",
            text="The same for late first tokens. At most 20: then every first token is late.",
            queries=_burns("ttft", TTFT_BUDGET),
            steps=_BURN,
            width=12,
        ),
    ),
)

TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            title="Requests by outcome",
            text="Generate calls that ended, by gRPC code; codes that did not occur are left out. UNAVAILABLE, "
            "RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED and INTERNAL count against availability; CANCELLED is the client's.",
            queries=(Query(f"{rate(router('requests_total'), 'code')} > 0", "{{code}}"),),
            unit="reqps",
            stacked=True,
            colors=(
                ("OK", "green"),
                ("CANCELLED", "gray"),
                ("UNAVAILABLE", "red"),
                ("RESOURCE_EXHAUSTED", "orange"),
                ("DEADLINE_EXCEEDED", "yellow"),
                ("INTERNAL", "purple"),
            ),
        ),
        Panel(
            title="Time to first token",
            text="From a request's arrival at the router to its first message, all selected routers together. "
            "The red line is the promise. If p99 alone is high, look for queues and cold prompts; if p50 is, for load.",
            queries=tuple(Query(quantile(q, router("ttft_seconds_bucket")), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)),
            unit="s",
            steps=_LATENCY,
        ),
        Panel(
            title="Whole requests",
            text="From arrival to the last token. Depends on how long answers are; compare with last week, not with "
            "a limit.",
            queries=tuple(
                Query(quantile(q, router("request_duration_seconds_bucket")), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)
            ),
            unit="s",
        ),
        Panel(
            title="Tokens",
            text="Prompt tokens taken in, those of them that a cache already held, and tokens sent out. The gap "
            "between prompt and cached is what the replicas had to compute.",
            queries=(
                Query(rate(router("prompt_tokens_total")), "prompt"),
                Query(rate(router("actual_cached_tokens_total")), "of them cached"),
                Query(rate(router("generation_tokens_total")), "generated"),
            ),
            unit=TOKENS_PER_S,
        ),
        Panel(
            title="Inside the routers",
            text="Requests in flight, and those of them that wait because no replica is routable. Waiting above 0 "
            "for long is an outage that clients do not see as errors yet.",
            queries=(
                Query(f"sum by (replica) ({router('requests_in_flight')})", "in flight, {{replica}}"),
                Query(f"sum by (replica) ({router('queue_depth')})", "waiting, {{replica}}"),
            ),
        ),
        Panel(
            title="Refused",
            text="Requests that got no place: queue_full = too many at once, no_replica = waited for a replica in "
            "vain. Anything above 0 was seen by a client.",
            queries=(Query(rate(router("shed_total"), "reason"), "{{reason}}"),),
            unit="reqps",
        ),
    ),
)

FLEET = Row(
    "Fleet",
    (
        Panel(
            title="Replicas ready",
            text="Replicas that each router can send requests to. Routers that differ for more than a moment do not "
            "see the same fleet.",
            queries=(Query(f"max by (pool, replica) ({router('workers_ready')})", "{{pool}}, seen by {{replica}}"),),
            decimals=0,
        ),
        Panel(
            title="Requests in the engines",
            text="In a batch, and waiting for a place in one, over all replicas. Waiting that keeps growing means "
            "more load than the pool can carry: add replicas.",
            queries=(
                Query(f"sum({worker('requests_running')})", "running"),
                Query(f"sum({worker('requests_waiting')})", "waiting"),
            ),
            stacked=True,
        ),
        Panel(
            title="Wait for a replica",
            text="How long requests waited because none was routable; only those that had to wait. Empty is normal: "
            "nobody waited.",
            queries=tuple(
                Query(quantile(q, router("queue_wait_seconds_bucket")), f"p{q * 100:g}") for q in (0.5, 0.99)
            ),
            unit="s",
        ),
    ),
)

BOARD = Board(
    uid="ostrya-fleet-slo",
    title="Ostrya: fleet and SLO",
    text="Do users get what was promised? Availability, time to first token, error budgets, traffic, fleet size.",
    rows=(LEVEL, TRAFFIC, FLEET),
)
