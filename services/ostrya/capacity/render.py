"""Reports as text for a terminal: lines of at most about 100 columns, no colours, and no printing.

Bytes are decimal (GB = 1e9), as vendors count bandwidth; JSON has the exact figures.
"""

from ostrya.capacity.facts import Both, Report, Speculation
from ostrya.capacity.memory import Placement
from ostrya.capacity.published import Engine
from ostrya.capacity.values import FLOP_SCALES, count, duration, scaled, size, table, three

_SMALLEST_SHARE_RATIO = 0.005
"""Terms below are left out of the table of bounds."""
_ENGINES = {
    Engine.FUSED: "what one fused kernel reaches",
    Engine.SERVING: "what serving engines reach (--engine fused: one kernel)",
}
_PLACEMENTS = {
    Placement.SPREAD: "spread: each request's once in the slice (data-parallel attention)",
    Placement.TENSOR_PARALLEL: "tensor-parallel: by heads, copied where there are too few",
}


def as_text(report: Report) -> str:
    """The whole report."""
    sections = [_head(report), _model(report), _fit(report), _speed(report), _bounds(report), _batches(report)]
    if report.speculation:
        sections.append(_speculation(report, report.speculation))
    if report.prefix_hits:
        sections.append(_prefix(report))
    return "\n\n".join("\n".join(section) for section in sections)


def _head(report: Report) -> list[str]:
    where = report.slice
    chips = "1 chip" if where.num_chips == 1 else f"{where.num_chips} chips"
    hosts = "1 host" if where.num_hosts == 1 else f"{where.num_hosts} hosts"
    peaks = ", ".join(f"{scaled(peak, FLOP_SCALES)} {name}" for name, peak in where.peak_flops_per_s.items())
    return [
        f"{report.model.name} on {where.name}",
        f"  {chips} on {hosts} ({where.topology}, {where.machine_type}): {size(where.hbm_bytes)} HBM at "
        f"{size(where.hbm_bytes_per_s)}/s; FLOP/s: {peaks}",
    ]


def _model(report: Report) -> list[str]:
    model = report.model
    active = f"{count(model.num_params_active_decode)} active per token"
    if model.num_params_active_prefill != model.num_params_active_decode:
        active += f" ({count(model.num_params_active_prefill)} over a prompt)"
    if model.num_params_active_with_embedding:
        active += f", {count(model.num_params_active_with_embedding)} as its makers count, with the embedding"
    rows: list[tuple[str, ...]] = [("part", "parameters", "active", "stored as", "bytes")]
    rows += [
        (part.part, count(part.num_params), count(part.num_params_active), part.storage, size(part.num_bytes))
        for part in model.parts
        if part.num_params
    ]
    keeps = f"  A request keeps {size(model.kv_bytes_per_token)} per token"
    if model.window_bytes_per_request:
        keeps += f" beyond its windows, which hold {size(model.window_bytes_per_request)}"
    keeps += f" ({model.kv_storage})"
    if model.state_bytes_per_request:
        keeps += f" and {size(model.state_bytes_per_request)} of recurrent state ({model.state_storage})"
    heading = f"MODEL  {count(model.num_params)} parameters, {active}"
    return [heading, *table(rows, left=(0, 3)), keeps + "."]


def _fit(report: Report) -> list[str]:
    fit, setup = report.fit, report.setup
    requests = _requests(setup.num_requests)
    rows = [("weights", fit.weights_bytes), ("drafter", fit.drafter_bytes), ("scratch", fit.scratch_bytes)]
    rows += [(f"cache, {requests} of {setup.context_tokens:,} tokens", fit.cache_bytes)]
    rows += [(f"recurrent state, {requests}", fit.state_bytes), ("free", fit.free_bytes)]
    cells = [(name, size(used), f"{used / fit.usable_bytes:.1%}") for name, used in rows if used]
    limit = " (all it can)" if fit.max_context_tokens >= report.model.max_context_tokens else ""
    most = [(_PLACEMENTS[Placement(name)], f"{most:,}") for name, most in fit.max_requests_by_placement.items()]
    return [
        f"FIT  {size(fit.usable_bytes)} usable of {size(fit.hbm_bytes)} HBM; cache {setup.placement.value}",
        *table(cells),
        f"  Largest batch at {setup.context_tokens:,} tokens, by placement of the cache:",
        *(f"  {line}" for line in table(most)),
        f"  Longest context of {requests}: {fit.max_context_tokens:,} tokens{limit}.",
    ]


def _speed(report: Report) -> list[str]:
    now, prompt, setup = report.decoding, report.prompt, report.setup
    rows = [
        ("", "limit", "estimate", "of limit"),
        ("step = time per output token", *_times(now.tpot_s)),
        ("tokens/s per user", *_rates(now.tokens_per_s_per_user)),
        ("tokens/s per chip", *_rates(now.tokens_per_s_per_chip)),
        ("tokens/s", *_rates(now.tokens_per_s)),
        (f"time to first token, {prompt.prompt_tokens:,} tokens", *_times(prompt.ttft_s)),
        ("prefill tokens/s", *_rates(prompt.prefill_tokens_per_s)),
    ]
    return [
        f"SPEED  {_requests(now.num_requests)} of {setup.context_tokens:,} tokens; estimate: {_ENGINES[setup.engine]}",
        *table(rows),
        f"  The prompt: limit, in one step, bound by {prompt.limit_bound_by};",
        f"  estimate, in chunks of {setup.chunk_tokens:,}, by {prompt.bound_by}.",
        *([f"  {report.warning}"] if report.warning else []),
    ]


def _bounds(report: Report) -> list[str]:
    rows: list[tuple[str, ...]] = [("", "bytes", "FLOPs", "limit", "", "estimate", "", "bound by")]
    rest = Both(limit=0.0, estimate=0.0)
    by: dict[str, float] = {}
    for one in report.bounds:
        share = one.share_ratio
        by[one.bound_by] = by.get(one.bound_by, 0.0) + share.estimate
        if max(share.limit, share.estimate) < _SMALLEST_SHARE_RATIO:
            rest = Both(limit=rest.limit + share.limit, estimate=rest.estimate + share.estimate)
            continue
        rows.append(
            (
                one.name,
                size(one.num_bytes) if one.num_bytes else "",
                scaled(one.num_flops, FLOP_SCALES) if one.num_flops else "",
                duration(one.seconds.limit) if one.seconds.limit else "",
                f"{share.limit:.1%}",
                duration(one.seconds.estimate) if one.seconds.estimate else "",
                f"{share.estimate:.1%}",
                one.bound_by if one.bound_by != one.name else "",
            )
        )
    rows.append(("the rest", "", "", "", f"{rest.limit:.1%}", "", f"{rest.estimate:.1%}"))
    shares = sorted(by.items(), key=lambda item: -item[1])
    summary = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= _SMALLEST_SHARE_RATIO)
    return [f"WHAT BOUNDS A STEP  estimate: {summary}", *table(rows, left=(0, 7))]


def _batches(report: Report) -> list[str]:
    rows: list[tuple[str, ...]] = [("batch", "", "time per token", "", "tokens/s per user", "", "tokens/s per chip")]
    rows += [("", *("limit", "estimate") * 3)]
    rows += [
        (
            f"{one.num_requests:,}",
            *map(duration, _pair(one.tpot_s)),
            *_rates(one.tokens_per_s_per_user)[:2],
            *_rates(one.tokens_per_s_per_chip)[:2],
        )
        for one in report.batches
    ]
    return [f"BATCHES  of {report.setup.context_tokens:,} tokens, decoding alone", *table(rows)]


def _speculation(report: Report, one: Speculation) -> list[str]:
    rows: list[tuple[str, ...]] = [("", "limit", "estimate"), ("round", *_times(one.round_s)[:2])]
    rows += [("breaks even at acceptance length", *(f"{x:.2f}" for x in _pair(one.break_even_length)))]
    if one.tokens_per_s and one.speedup_ratio and one.acceptance_length:
        rows += [(f"tokens/s at length {one.acceptance_length:.2f}", *_rates(one.tokens_per_s)[:2])]
        rows += [("times plain decoding", *(f"{x:.2f}" for x in _pair(one.speedup_ratio)))]
    lines = table(rows)
    if one.tokens_per_s_by_draft:
        by_draft = [("drafted tokens", *map(str, range(len(one.tokens_per_s_by_draft))))]
        by_draft += [("tokens/s, limit", *(three(x.limit) for x in one.tokens_per_s_by_draft))]
        by_draft += [("tokens/s, estimate", *(three(x.estimate) for x in one.tokens_per_s_by_draft))]
        best = one.best_num_draft_tokens
        lines += [*table(by_draft), f"  Best: {best} drafted tokens." if best else "  Best: no speculation."]
    drafter = f"drafted by {one.drafter}" if one.drafter else "drafting taken as free (n-gram)"
    batch = _requests(report.setup.num_requests)
    return [f"SPECULATION  {one.num_draft_tokens} tokens {drafter}, {batch}", *lines]


def _prefix(report: Report) -> list[str]:
    total = report.prompt.prompt_tokens
    rows: list[tuple[str, ...]] = [("hit saves", "at the limit", "by the estimate")]
    rows += [
        (f"{one.hit_tokens:,} of {total:,} tokens", *(duration(x) for x in _pair(one.saves_s)))
        for one in report.prefix_hits
    ]
    return ["PREFIX HIT  to the first token", *table(rows)]


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number:,} requests"


def _pair(both: Both) -> tuple[float, float]:
    return both.limit, both.estimate


def _times(both: Both) -> tuple[str, str, str]:
    return duration(both.limit), duration(both.estimate), f"{both.limit / both.estimate:.0%}"


def _rates(both: Both) -> tuple[str, str, str]:
    return three(both.limit), three(both.estimate), f"{both.estimate / both.limit:.0%}"
