"""What a Prometheus knows of an install, by its HTTP API. Used by probes.py."""

import asyncio
import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import TypeAlias, cast

from ostrya.cli.diagnosis.facts import Alert, PrometheusFacts, Rule, ScrapeTarget

_Labels: TypeAlias = Mapping[str, str]
_Series: TypeAlias = list[tuple[_Labels, float]]

_NOT_PROMETHEUS = "its answer is not that of Prometheus"
MAX_ANSWER_BYTES = 16 << 20
_JOBS = 'job=~"(.*[/-])?ostrya-(router|worker)"'
"""Scrape configurations name the job so; the operator and GMP may put a namespace before it."""


def shown(url: str) -> str:
    """A URL without user, password and query."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


async def ask(url: str, timeout_s: float) -> PrometheusFacts:
    """What it has of us. OSError or ValueError in words."""
    http = _Http(url, timeout_s)
    up, ages, workers, routers, blind, loaded = await asyncio.gather(
        http.query(f"up{{{_JOBS}}}"),
        http.query(f"time() - timestamp(up{{{_JOBS}}})"),
        http.query("ostrya_worker_info"),
        http.query("ostrya_router_info"),
        http.query('ostrya_router_kubernetes_up{resource="nodes"} == 0'),
        _rules(http),
    )
    age_of = {_identity(labels): age_s for labels, age_s in ages}
    targets = tuple(
        ScrapeTarget(
            job=labels.get("job", ""),
            pool=labels.get("pool", ""),
            replica=labels.get("replica", ""),
            instance=labels.get("instance", ""),
            is_up=value == 1,
            age_s=age_of.get(_identity(labels), 0.0),
        )
        for labels, value in up
    )
    rules, alerts = loaded
    return PrometheusFacts(
        where=shown(url),
        targets=targets,
        workers=_replicas(workers),
        routers=_replicas(routers),
        blind_to_nodes=_replicas(blind),
        rules=rules,
        alerts=alerts,
    )


def _identity(labels: _Labels) -> frozenset[tuple[str, str]]:
    return frozenset((name, value) for name, value in labels.items() if name != "__name__")


def _replicas(series: _Series) -> frozenset[tuple[str, str]]:
    return frozenset((labels.get("pool", ""), labels.get("replica", "")) for labels, _ in series)


async def _rules(http: "_Http") -> tuple[tuple[Rule, ...] | None, tuple[Alert, ...]]:
    """Our rules are those that read our metrics."""
    try:
        answer = cast("Mapping[str, list[Mapping[str, object]]]", await http.get("rules", {}))
    except (OSError, ValueError):
        return None, ()
    every = [rule for group in answer["groups"] for rule in cast("list[Mapping[str, object]]", group["rules"])]
    ours = [rule for rule in every if "ostrya" in str(rule["query"])]
    rules = tuple(Rule(name=str(rule["name"]), error=str(rule.get("lastError") or "")) for rule in ours)
    alerts = [alert for rule in ours for alert in cast("list[Mapping[str, object]]", rule.get("alerts") or [])]
    return rules, tuple(_alert(alert) for alert in alerts if alert["state"] == "firing")


def _alert(alert: Mapping[str, object]) -> Alert:
    labels, notes = cast("_Labels", alert["labels"]), cast("_Labels", alert.get("annotations") or {})
    return Alert(
        name=labels.get("alertname", ""),
        severity=labels.get("severity", ""),
        summary=notes.get("summary", "no summary"),
        runbook=notes.get("runbook_url", ""),
    )


class _Http:
    """Prometheus's API, version 1."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self._base = f"{shown(url).rstrip('/')}/api/v1/"
        self._timeout_s = timeout_s
        self._headers = {}
        if parts.username:
            user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"

    async def query(self, expression: str) -> _Series:
        """An instant vector."""
        answer = cast("Mapping[str, list[Mapping[str, object]]]", await self.get("query", {"query": expression}))
        if "result" not in answer:
            raise ValueError(_NOT_PROMETHEUS)
        rows = answer["result"]
        return [(cast("_Labels", row["metric"]), float(cast("list[str]", row["value"])[1])) for row in rows]

    async def get(self, name: str, arguments: Mapping[str, str]) -> object:
        """The data of an answer. OSError or ValueError in words."""
        return await asyncio.to_thread(self._get, f"{self._base}{name}?{urllib.parse.urlencode(arguments)}")

    def _get(self, url: str) -> object:
        request = urllib.request.Request(url, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                body: object = json.loads(answer.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                raise OSError(f"HTTP {error.code} {error.reason}") from error
        except urllib.error.URLError as error:
            raise OSError(str(error.reason)) from error
        if not isinstance(body, dict) or body.get("status") != "success":
            raise ValueError(_NOT_PROMETHEUS)
        return body["data"]
