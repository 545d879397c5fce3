"""From facts about an install to sentences about it. Pure: cli/probes.py asks, cli/doctor.py shows."""

from collections.abc import Callable, Iterable

from ostrya.cli.diagnosis import monitoring, replicas, routers, state
from ostrya.cli.diagnosis.facts import Facts
from ostrya.cli.diagnosis.findings import Finding, Status, fail

Check = Callable[[Facts], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    routers.routers,
    replicas.replicas,
    replicas.prefix_credit,
    routers.waiting,
    state.redis,
    routers.knowledge,
    state.schema,
    state.versions,
    state.clocks,
    monitoring.scraping,
    monitoring.rules,
    monitoring.tls,
)

_WORST_FIRST = list(Status)


def diagnose(facts: Facts, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Every finding, the worst first, else in the order of the checks. A check that breaks is a finding too."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(facts)
        except Exception as error:
            name = getattr(check, "__name__", "check")
            found.append(fail(name, f"this check broke ({type(error).__name__}: {error})", "Report it: it is our bug."))
    return sorted(found, key=lambda finding: _WORST_FIRST.index(finding.status))
