"""Does Prometheus scrape everybody, has it our rules, what fires, and are certificates good? Pure."""

from collections import Counter
from collections.abc import Iterator

from ostrya.api.v1 import admin_pb2
from ostrya.cli.diagnosis.facts import Facts, PrometheusFacts, TlsFacts
from ostrya.cli.diagnosis.findings import Finding, counted, fail, listed, ok, skipped, warn

STALE_S = 120.0
"""Two scrapes of the slowest usual interval, one minute."""
EXPIRES_SOON_S = 14 * 86_400.0
"""Certificates for 90 days are renewed after 60: at 14 days two weeks of renewals have failed."""
_DAY_S = 86_400.0

_SCRAPE_ADVICE = (
    "Add the jobs ostrya-router and ostrya-worker (chart: monitoring.provider; by hand: deploy/observability), and "
    "check the targets page of Prometheus for why a scrape fails."
)


def scraping(facts: Facts) -> Iterator[Finding]:
    """Everybody is there, up, and fresh."""
    found = facts.prometheus
    if found is None:
        yield skipped("scraping", "not looked at; give --prometheus")
        return
    if found.error:
        yield fail(
            "scraping",
            f"Prometheus at {found.where} cannot be asked: {found.error}",
            "Check the URL (scheme, path prefix, user) and that it can be reached from here.",
        )
        return
    problems = [*_targets(found), *_missing(facts, found)]
    yield from problems
    if not problems:
        num_up = counted(len(found.targets), "target")
        yield ok("scraping", f"Prometheus at {found.where} has every router and replica: {num_up} up, samples fresh")


def rules(facts: Facts) -> Iterator[Finding]:
    """Our rules are loaded and work; what fires is told."""
    found = facts.prometheus
    if found is None or found.error:
        yield skipped("alerts", "not looked at")
        return
    if found.rules is None:
        yield skipped("rules", f"{found.where} does not show its rules")
    elif not found.rules:
        yield warn(
            "rules",
            f"Prometheus at {found.where} has none of Ostrya's rules, so nothing alerts and some panels stay empty",
            "Load deploy/observability/rules (chart: monitoring.rules).",
        )
    else:
        broken = [rule for rule in found.rules if rule.error]
        for rule in broken:
            yield warn("rules", f"rule {rule.name} fails: {rule.error}", "Load the rules of the running version.")
        if not broken:
            yield ok("rules", f"{counted(len(found.rules), 'rule')} of Ostrya loaded, none fails")
    yield from _alerts(found)


def tls(facts: Facts) -> Iterator[Finding]:
    """Dates and names of certificates."""
    for one in facts.tls:
        yield from _certificate(one, facts.now_s)
    if not facts.tls:
        yield skipped("tls", "no TLS endpoint to look at; give --tls HOST:PORT")


def _targets(found: PrometheusFacts) -> Iterator[Finding]:
    if not found.targets:
        yield fail(
            "scraping",
            f"Prometheus at {found.where} has no target of the jobs ostrya-router and ostrya-worker",
            _SCRAPE_ADVICE,
        )
    down = [target.name for target in found.targets if not target.is_up]
    if down:
        yield fail("scraping", f"Prometheus cannot scrape {listed(down)}", _SCRAPE_ADVICE)
    stale = {target.name: target.age_s for target in found.targets if target.age_s > STALE_S}
    if stale:
        yield fail(
            "scraping",
            f"the newest samples of {listed(stale)} are {max(stale.values()):.0f} s old",
            "Check that Prometheus itself keeps up (its own log and memory).",
        )
    if any(not target.pool or not target.replica for target in found.targets):
        yield warn(
            "scraping",
            "targets lack the labels pool and replica, by which dashboards, rules and this check tell them apart",
            "Use the scrape configuration of deploy/observability, or the chart's.",
        )


def _missing(facts: Facts, found: PrometheusFacts) -> Iterator[Finding]:
    """Who answers here and is not in Prometheus. Without labels there is nothing to compare."""
    if not found.targets or any(not target.replica for target in found.targets):
        return
    ready = admin_pb2.REPLICA_STATE_READY
    for pool in facts.pools:
        routers = [router for router in facts.answering if router.pool == pool]
        working = {name for router in routers for name, one in router.replicas.items() if one.state == ready}
        missing = working - {replica for of, replica in found.workers if of == pool}
        if missing:
            yield fail(
                "scraping",
                f"Prometheus has no metrics of {listed(missing)} of pool {pool!r}, which the routers use",
                f"{_SCRAPE_ADVICE} The target label replica must be the worker's id (its pod's name).",
            )
        num_scraped = Counter(of for of, _ in found.routers)[pool]
        if num_scraped < len(routers):
            yield fail(
                "scraping",
                f"{counted(len(routers), 'router')} of pool {pool!r} answered here, but Prometheus has the metrics of "
                f"{num_scraped or 'none'}",
                _SCRAPE_ADVICE,
            )


def _alerts(found: PrometheusFacts) -> Iterator[Finding]:
    for alert in found.alerts:
        tell = fail if alert.severity == "page" else warn
        advice = f"Follow {alert.runbook}." if alert.runbook else "Follow its runbook."
        yield tell("alerts", f"{alert.name} fires: {alert.summary}", advice)
    if not found.alerts:
        yield ok("alerts", "no alert of Ostrya fires")


def _certificate(one: TlsFacts, now_s: float) -> Iterator[Finding]:
    found = one.certificate
    if found is None:
        advice = "Check that this port speaks TLS, and that it can be reached from here."
        yield fail("tls", f"{one.endpoint} showed no certificate: {one.error}", advice)
        return
    span = _span(abs(found.not_after_s - now_s))
    renew = "Renew it; with cert-manager look at the Certificate's status, and restart who does not reload it."
    if now_s >= found.not_after_s:
        yield fail("tls", f"the certificate of {one.endpoint} expired {span} ago", renew)
    elif now_s < found.not_before_s:
        advice = "Compare the clocks of the issuer and of this machine."
        yield fail("tls", f"the certificate of {one.endpoint} is not valid yet", advice)
    elif found.not_after_s - now_s < EXPIRES_SOON_S:
        yield warn("tls", f"the certificate of {one.endpoint} expires in {span}", renew)
    elif found.covers(one.host):
        yield ok("tls", f"the certificate of {one.endpoint} is good for {span}")
    if not found.covers(one.host):
        yield fail(
            "tls",
            f"the certificate of {one.endpoint} is for {listed(found.names) or 'nobody'}, not for {one.host}",
            "Issue it for the name that clients dial (subjectAltName), or dial a name that it has.",
        )


def _span(seconds: float) -> str:
    days = int(seconds / _DAY_S)
    return counted(days, "day") if days else counted(int(seconds / 3600), "hour")
