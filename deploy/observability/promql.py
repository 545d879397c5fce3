"""Pieces of PromQL that the boards share. Pure text.

Every selector has the target labels pool and replica; a router is a replica of its Deployment, so it is chosen with
$router, a worker with $replica.
"""

ROUTER = 'pool=~"$pool", replica=~"$router"'
WORKER = 'pool=~"$pool", replica=~"$replica"'
POOL = 'pool=~"$pool"'
RANGE = "$__rate_interval"


def router(name: str, **labels: str) -> str:
    """A selector of a router's metric, narrowed to `labels`."""
    return f"ostrya_router_{name}{{{ROUTER}{_equal(labels)}}}"


def worker(name: str, **labels: str) -> str:
    """A selector of a worker's metric, narrowed to `labels`."""
    return f"ostrya_worker_{name}{{{WORKER}{_equal(labels)}}}"


def router_process(name: str) -> str:
    """A selector of a metric that every process has, of routers."""
    return f'{name}{{job="ostrya-router", {ROUTER}}}'


def worker_process(name: str) -> str:
    """The same of workers."""
    return f'{name}{{job="ostrya-worker", {WORKER}}}'


def rate(selector: str, by: str = "") -> str:
    """Events a second, summed; `by` keeps labels apart."""
    return f"sum{by and f' by ({by})'} (rate({selector}[{RANGE}]))"


def ratio(part: str, whole: str, by: str = "") -> str:
    """Rate of one counter over the rate of another: never a mean of means. NaN, not 0, where nothing happened."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def quantile(q: float, histogram: str, by: str = "") -> str:
    """Of all observations together; `histogram` is the selector of the _bucket series."""
    return f"histogram_quantile({q:g}, {rate(histogram, f'{by}, le' if by else 'le')})"


def mean(histogram: str) -> str:
    """By replica: sum of observations over their number; `histogram` is its selector without a suffix."""
    name, _, labels = histogram.partition("{")
    return ratio(f"{name}_sum{{{labels}", f"{name}_count{{{labels}", "replica")


def _equal(labels: dict[str, str]) -> str:
    return "".join(f', {name}="{value}"' for name, value in labels.items())
