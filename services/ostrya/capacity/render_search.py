"""The SLO search and the comparison of slices as text; render.py does the same for one slice."""

from collections.abc import Sequence

from ostrya.capacity.chips import CHIPS, find_slice
from ostrya.capacity.compare import Row
from ostrya.capacity.estimate import fitted_generation
from ostrya.capacity.facts import ModelFacts, Setup, SliceFacts
from ostrya.capacity.fitted import fitted
from ostrya.capacity.points import Engine
from ostrya.capacity.queueing import Goal, Term
from ostrya.capacity.remedies import goal_text, nearest
from ostrya.capacity.search import Answer, Load, Market, Offer, Refusal
from ostrya.capacity.values import count, duration, per_time, size, table, three

_MARGINS = (
    "  Margins for arrivals at random: requests in flight are taken as mean + 1.645 sqrt(mean) (Poisson, 95 %);",
    "  ttft has the wait for others' prompts that 5 % exceed (M/D/1). Sharing bursts between replicas is not counted.",
)
_LIMITS = {
    Term.MEMORY: "one replica fewer would not hold the requests",
    Term.TTFT: "one replica fewer would miss ttft",
    Term.TPOT: "one replica fewer would miss tpot",
    None: "one replica is enough",
}


def answer_text(name: str, goal: Goal, load: Load, market: Market, answer: Answer, remedies: Sequence[str]) -> str:
    """The offers by generation, or why there is none and what would help."""
    asked = (
        f"{name}, {per_time(load.requests_per_s)} requests of {load.prompt_tokens:,} + {load.output_tokens:,} tokens"
        f" (hit ratio {load.hit_ratio:g} of each prompt): {goal_text(goal)} for 95 of 100 requests"
    )
    if drafted := market.drafting.num_draft_tokens:
        asked += f"; {drafted} tokens drafted, acceptance length {market.drafting.acceptance_length:.2f}"
    if answer.best is None:
        return "\n".join([asked, "", *_impossible(answer, remedies)])
    return "\n".join([asked, "", *_possible(answer.best, answer, market)])


def comparison_text(name: str, setup: Setup, rows: Sequence[Row]) -> str:
    """A line for each slice."""
    lines: list[tuple[str, ...]] = [("slice", "largest", "", "time per token", "", "tokens/s per chip", "", "ttft")]
    lines += [("", "batch", "limit", "estimate", "limit", "estimate", "limit", "estimate")]
    for row in rows:
        if row.decoding is None or row.largest is None or row.prompt is None:
            lines.append((row.slice_name, f"{row.max_requests:,}", f"lacks {size(row.missing_bytes)}"))
            continue
        tpot_s, per_chip, ttft_s = row.decoding.tpot_s, row.largest.tokens_per_s_per_chip, row.prompt.ttft_s
        lines.append(
            (
                row.slice_name,
                f"{row.max_requests:,}",
                duration(tpot_s.limit),
                duration(tpot_s.estimate),
                three(per_chip.limit),
                three(per_chip.estimate),
                duration(ttft_s.limit),
                duration(ttft_s.estimate),
            )
        )
    heading = f"{name}: {setup.num_requests:,} x {setup.context_tokens:,} tokens; per chip at the largest batch;"
    return "\n".join([f"{heading} ttft of {setup.prompt_tokens:,} tokens", _origin(setup.engine), *table(lines)])


def _origin(engine: Engine) -> str:
    """Where estimates of every slice come from."""
    own = [fitted(engine, of) for of in CHIPS if fitted_generation(engine, of) == of]
    chips = (" and ".join(map(str, one.num_chips)) for one in own)
    each = (
        f"{one.generation} ({number} chips, batch {one.min_requests} to {one.max_requests:,})"
        for one, number in zip(own, chips, strict=True)
    )
    rest = next(fitted(engine, of).generation for of in CHIPS if fitted_generation(engine, of) != of)
    return f"  Estimate: {engine}, fitted on {', '.join(each)}; elsewhere carried over from {rest}."


def list_text(models: Sequence[ModelFacts], slices: Sequence[SliceFacts]) -> str:
    """What --model and --slice can be."""
    lines: list[tuple[str, ...]] = [
        ("model", "parameters", "active", "weights", "KV per token", "state", "context", "drafter")
    ]
    lines += [
        (
            one.name,
            count(one.num_params),
            count(one.num_params_active_with_embedding or one.num_params_active_decode),
            size(one.weights_bytes),
            size(one.kv_bytes_per_token),
            size(one.state_bytes_per_request) if one.state_bytes_per_request else "-",
            f"{one.max_context_tokens:,}",
            one.drafter or "-",
        )
        for one in models
    ]
    names: dict[str, list[str]] = {}
    for one in slices:
        names.setdefault(one.generation, []).append(one.name)
    return "\n".join([*table(lines, left=(0, 7)), "", *(f"  {', '.join(found)}" for found in names.values())])


def _possible(best: Offer, answer: Answer, market: Market) -> list[str]:
    where = find_slice(best.slice_name)
    replicas = "1 replica" if best.num_replicas == 1 else f"{best.num_replicas:,} replicas"
    chips = "1 chip" if best.num_chips_total == 1 else f"{best.num_chips_total:,} chips"
    price = _price(best) if best.price_per_hour_total is not None else "no prices given, so the fewest chips win"
    beyond = fitted(market.engine, best.generation).warning(where, best.burst_requests)
    lines = [
        f"{replicas} on {best.slice_name} ({where.topology_label}, {where.machine_type}): {chips}; {price}",
        *table(
            [
                ("of each replica", ""),
                ("  requests", per_time(best.requests_per_s)),
                ("  requests in flight, mean", f"{best.mean_requests:.1f}"),
                ("  requests in flight, exceeded 5 % of the time", f"{best.burst_requests:,}"),
                ("  batch that memory and the objective allow", f"{best.max_requests:,}"),
                ("  utilisation (of requests/s at that batch)", f"{best.utilisation_ratio:.0%}"),
                ("  ttft, waiting included", duration(best.ttft_s)),
                ("  tpot", duration(best.tpot_s)),
            ]
        ),
        f"  {_LIMITS[best.limited_by]}",
        *([f"  {beyond}"] if beyond else []),
        "",
        "THE BEST OF EACH GENERATION",
        _origin(market.engine),
    ]
    heading = ("", "replicas", "chips", "price/h", "per M output tokens", "batch", "use", "ttft", "tpot")
    rows = [heading, *(_offer_row(offer) for offer in answer.best_by_generation)]
    if market.prices is None:
        rows = [(*row[:3], *row[5:]) for row in rows]
    lines += table(rows)
    offered = {offer.generation for offer in answer.offers}
    for generation in dict.fromkeys(one.generation for one in answer.refusals):
        if generation not in offered:
            close = nearest(Answer(offers=(), refusals=tuple(r for r in answer.refusals if r.generation == generation)))
            assert close
            lines.append(f"  {generation}: none; {_why(close)}")
    lines += ["", *_MARGINS]
    return lines


def _offer_row(offer: Offer) -> tuple[str, ...]:
    per_hour, per_million = offer.price_per_hour_total, offer.price_per_million_output_tokens
    return (
        offer.slice_name,
        f"{offer.num_replicas:,}",
        f"{offer.num_chips_total:,}",
        "" if per_hour is None else f"{per_hour:,.2f}",
        "" if per_million is None else f"{per_million:,.2f}",
        f"{offer.burst_requests:,}",
        f"{offer.utilisation_ratio:.0%}",
        duration(offer.ttft_s),
        duration(offer.tpot_s),
    )


def _price(offer: Offer) -> str:
    per_million = f"{offer.price_per_million_output_tokens:,.2f} per million output tokens"
    return f"{offer.price_per_hour_total:,.2f} per hour, {per_million}"


def _impossible(answer: Answer, remedies: Sequence[str]) -> list[str]:
    close = nearest(answer)
    if close is None:
        return ["impossible: no slice has a price"]
    lines = [f"impossible on any number of replicas; nearest: {_why(close)}"]
    help_ = ["What would help:", *(f"  - {one}" for one in remedies)]
    return [*lines, *(help_ if remedies else ["Nothing that was tried would help."])]


def _why(one: Refusal) -> str:
    if one.term is Term.MEMORY:
        lacks = f"lacks {size(one.value - one.allowed)} for the model and one request"
        return f"{one.slice_name} {lacks} ({size(one.value)} of {size(one.allowed)} usable)"
    over = f"{duration(one.value - one.allowed)} ({one.value / one.allowed - 1:.0%}) over {duration(one.allowed)}"
    alone = f"{one.term} of a request alone on {one.slice_name} is {duration(one.value)}"
    return f"{alone}, {over}; most of it is {one.bound_by}"
