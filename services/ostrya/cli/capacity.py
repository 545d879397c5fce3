"""`ostrya capacity`: what a model does on a slice, how far that is from the limit, which slice an objective needs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from ostrya.cli.report import FAILED, AsJson, reported
from ostrya.errors import ConfigError

if TYPE_CHECKING:
    from ostrya.capacity.facts import Setup
    from ostrya.capacity.queueing import Goal
    from ostrya.capacity.search import Load, Market
    from ostrya.capacity.spec import ModelSpec, Storage

_DEFAULT_TOKENS = 8192
"""Context and prompt where none is asked for, or the model's limit if that is less."""
_DEFAULT_OUTPUT_TOKENS = 500

Text: TypeAlias = str | None
_Answer: TypeAlias = "tuple[object, Callable[[], str]]"
"""What --json prints, and what a person reads."""


def capacity(
    model: Annotated[Text, typer.Option("--model", help="A ready spec; --list names them.")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="config.json of a Hugging Face model of a known kind."),
    ] = None,
    slice_: Annotated[Text, typer.Option("--slice", help="Such as tpu7x-16 or v6e-8; --list names them.")] = None,
    context: Annotated[Text, typer.Option("--context", help="Tokens in each request's cache. Otherwise 8192.")] = None,
    batch: Annotated[Text, typer.Option("--batch", help="Requests that decode together. Otherwise 1.")] = None,
    prompt: Annotated[Text, typer.Option("--prompt", help="Tokens, for the first token. Otherwise 8192.")] = None,
    chunk: Annotated[Text, typer.Option("--chunk", help="Of a prompt in one step, in tokens. Otherwise 2048.")] = None,
    dtype: Annotated[Text, typer.Option("--dtype", help="Narrow the weights to bf16, fp8, int8, mxfp4, …")] = None,
    kv_dtype: Annotated[Text, typer.Option("--kv-dtype", help="Keep keys and values as bf16, fp8, …")] = None,
    engine: Annotated[Text, typer.Option("--engine", help="Of the estimate: serving (the default) or fused.")] = None,
    placement: Annotated[
        Text, typer.Option("--placement", help="The cache's: spread or tensor-parallel. Otherwise spread.")
    ] = None,
    speculate: Annotated[Text, typer.Option("--speculate", help="Tokens to draft in each round.")] = None,
    acceptance: Annotated[
        Text, typer.Option("--acceptance", help="Rates by drafted position, such as 0.86,0.71,0.59.")
    ] = None,
    acceptance_length: Annotated[
        Text, typer.Option("--acceptance-length", help="Tokens a round emits, bonus token included, such as 3.4.")
    ] = None,
    slo: Annotated[Text, typer.Option("--slo", help="Find slice and replicas for, say, ttft=1s,tpot=20ms.")] = None,
    rate: Annotated[Text, typer.Option("--rate", help="With --slo: arrivals, such as 5/s or 300/min.")] = None,
    output: Annotated[Text, typer.Option("--output", help="With --slo: tokens of an answer. Otherwise 500.")] = None,
    hit_ratio: Annotated[
        Text, typer.Option("--hit-ratio", help="With --slo: share of each prompt's tokens that is cached. Otherwise 0.")
    ] = None,
    price: Annotated[
        Text, typer.Option("--price", help="With --slo: per chip-hour, such as v6e=1.2,tpu7x=5; others are left out.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="The model on every slice.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Published measurements against the model.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="The ready models and the slices.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the report too: file.svg or file.png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a model does on a slice: what fits, how fast it can be and will probably be, and what bounds it."""
    words = {
        "--model": model,
        "--config": str(config) if config else None,
        "--slice": slice_,
        "--context": context,
        "--batch": batch,
        "--prompt": prompt,
        "--chunk": chunk,
        "--dtype": dtype,
        "--kv-dtype": kv_dtype,
        "--engine": engine,
        "--placement": placement,
        "--speculate": speculate,
        "--acceptance": acceptance,
        "--acceptance-length": acceptance_length,
        "--slo": slo,
        "--rate": rate,
        "--output": output,
        "--hit-ratio": hit_ratio,
        "--price": price,
        "--plot": str(plot) if plot else None,
    }
    asked = [mode for mode, is_asked in (("--list", list_), ("--check", check), ("--compare", compare)) if is_asked]
    given = {option: word for option, word in words.items() if word is not None}
    with reported():
        document, text = _answer(given, mode_of(asked, given))
        print(_json(document) if as_json else text())
        if isinstance(document, dict) and document.get("offers") == ():
            raise typer.Exit(FAILED)


_MODEL = frozenset({"--model", "--config", "--dtype", "--kv-dtype"})
_JUDGED = _MODEL | {"--engine", "--placement", "--prompt", "--chunk"}
_DRAFTED = frozenset({"--speculate", "--acceptance", "--acceptance-length"})
_GOES_WITH = {
    "--list": frozenset[str](),
    "--check": frozenset[str](),
    "--compare": _JUDGED | {"--context", "--batch"},
    "--slo": _JUDGED | _DRAFTED | {"--slo", "--slice", "--rate", "--output", "--hit-ratio", "--price"},
    "--slice": _JUDGED | _DRAFTED | {"--slice", "--context", "--batch", "--plot"},
}
"""Every way to use the command, by the option that chooses it."""


def mode_of(asked: list[str], given: dict[str, str]) -> str:
    """Which of _GOES_WITH; ConfigError for options that contradict each other, or too few of them."""
    chosen = [*asked, *(["--slo"] if "--slo" in given else [])]
    if len(chosen) > 1:
        raise ConfigError([f"{' and '.join(chosen)} exclude each other; give one"])
    mode = chosen[0] if chosen else "--slice"
    problems = [f"{option} does not go with {mode}" for option in given if option not in _GOES_WITH[mode]]
    if mode == "--slice":
        wants = {"--rate", "--output", "--hit-ratio", "--price"}
        problems = [f"{option} goes with --slo only" for option in given if option in wants]
        if "--slice" not in given:
            problems.append("no slice is given; use --slice NAME, --compare for all, or --slo to have one found")
    for one, other in (("--model", "--config"), ("--acceptance", "--acceptance-length")):
        if one in given and other in given:
            problems.append(f"{one} and {other} exclude each other; give one")
    if "--model" in _GOES_WITH[mode] and not given.keys() & {"--model", "--config"}:
        problems.append("no model is given; use --model NAME (--list names them) or --config PATH")
    if mode == "--slo" and "--rate" not in given:
        problems.append("--slo needs --rate, such as 5/s")
    if problems:
        raise ConfigError(problems)
    return mode


def _answer(given: dict[str, str], mode: str) -> _Answer:
    answers = {"--list": _list, "--check": _check, "--compare": _compare, "--slo": _search, "--slice": _report}
    return answers[mode](given)


def _json(document: object) -> str:
    import msgspec

    # msgspec writes an infinite number, such as the time of an objective not asked for, as null.
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _list(given: dict[str, str]) -> _Answer:
    from ostrya.capacity.chips import SLICES
    from ostrya.capacity.models import models
    from ostrya.capacity.render_search import list_text
    from ostrya.capacity.report import model_facts, slice_facts

    known = [model_facts(spec) for spec in models().values()]
    slices = [slice_facts(where) for where in SLICES]
    return {"models": known, "slices": slices}, lambda: list_text(known, slices)


def _check(given: dict[str, str]) -> _Answer:
    from ostrya.capacity.estimate import FACTORS, leave_one_out, residuals
    from ostrya.capacity.render_check import check_text

    rows, unseen = residuals(), leave_one_out()
    without = {one.point: one.error_ratio for one in unseen}
    points = [
        {
            "point": one.point,
            "limit": one.limit,
            "estimate": one.estimate,
            "error_ratio": one.error_ratio,
            "unseen_error_ratio": without.get(one.point),
        }
        for one in rows
    ]
    factors = [{"engine": engine, "generation": of, "factors": one} for (engine, of), one in FACTORS.items()]
    return {"points": points, "factors": factors}, lambda: check_text(rows, unseen, FACTORS)


def _compare(given: dict[str, str]) -> _Answer:
    from ostrya.capacity.compare import compare
    from ostrya.capacity.render_search import comparison_text

    spec = _spec(given)
    setup = _setup(spec, given)
    rows = compare(spec, setup)
    return {"model": spec.name, "setup": setup, "slices": rows}, lambda: comparison_text(spec.name, setup, rows)


def _report(given: dict[str, str]) -> _Answer:
    from ostrya.capacity.chips import find_slice
    from ostrya.capacity.render import as_text
    from ostrya.capacity.report import report
    from ostrya.cli.capacity_input import picture

    where, spec = find_slice(given["--slice"]), _spec(given)
    setup = _setup(spec, given)
    path = picture("--plot", given["--plot"]) if "--plot" in given else None
    found = report(spec, where, setup)
    if path:
        from ostrya.capacity.plot import draw

        try:
            draw(spec, where, found, path)
        except OSError as error:
            raise ConfigError([f"--plot {str(path)[:64]!r} cannot be written: {error.strerror or error}"]) from error
    return found, lambda: as_text(found)


def _search(given: dict[str, str]) -> _Answer:
    from ostrya.capacity.remedies import remedies
    from ostrya.capacity.render_search import answer_text
    from ostrya.capacity.search import search

    spec = _spec(given)
    goal, load, market = _wanted(spec, given)
    answer = search(spec, goal, load, market)
    help_ = remedies(spec, goal, load, market, answer)
    document = {
        "model": spec.name,
        "goal": goal,
        "load": load,
        "prices_per_chip_hour": market.prices,
        "drafting": market.drafting,
        "engine": market.engine,
        "efficiency": {where.chip.name: market.efficiency(where) for where in market.slices},
        "best": answer.best,
        "offers": answer.offers,
        "refusals": answer.refusals,
        "remedies": help_,
    }
    return document, lambda: answer_text(spec.name, goal, load, market, answer, help_)


def _spec(given: dict[str, str]) -> "ModelSpec":
    from ostrya.capacity.hf_config import read_spec
    from ostrya.capacity.models import find_model
    from ostrya.capacity.spec import with_kv, with_weights
    from ostrya.capacity.weights import weight_bytes
    from ostrya.cli.capacity_input import existing

    spec = read_spec(existing("--config", given["--config"])) if "--config" in given else find_model(given["--model"])
    if "--dtype" in given:
        narrow = with_weights(spec, _storage("--dtype", given))
        if weight_bytes(narrow) >= weight_bytes(spec):
            raise ConfigError([f"--dtype {given['--dtype']} narrows nothing: no matrix of {spec.name} is wider"])
        spec = narrow
    return with_kv(spec, _storage("--kv-dtype", given)) if "--kv-dtype" in given else spec


def _storage(option: str, given: dict[str, str]) -> "Storage":
    from ostrya.capacity.spec import STORAGES

    found = STORAGES.get(given[option])
    if found is None:
        raise ConfigError([f"{option} is {given[option][:64]!r}; it must be one of {', '.join(STORAGES)}"])
    return found


def _setup(spec: "ModelSpec", given: dict[str, str]) -> "Setup":
    from ostrya.capacity.facts import Setup
    from ostrya.capacity.memory import CHUNK_TOKENS, MAX_DRAFT_TOKENS, MAX_REQUESTS, Placement
    from ostrya.capacity.published import Engine
    from ostrya.cli.capacity_input import choice, length, rates, whole

    by_position = rates("--acceptance", given["--acceptance"]) if "--acceptance" in given else ()
    drafts = given.get("--speculate", str(len(by_position)))
    if "--acceptance-length" in given and "--speculate" not in given:
        raise ConfigError(["--acceptance-length needs --speculate, the tokens drafted in each round"])
    num_draft_tokens = whole("--speculate", drafts, least=int("--speculate" in given), most=MAX_DRAFT_TOKENS)
    if by_position and num_draft_tokens > len(by_position):
        raise ConfigError([f"--speculate is {num_draft_tokens}; --acceptance has only {len(by_position)} rates"])
    # Room for what the next step or round adds.
    usual_context = str(max(0, min(_DEFAULT_TOKENS, spec.max_context_tokens - num_draft_tokens - 1)))
    usual_prompt = str(min(_DEFAULT_TOKENS, spec.max_context_tokens))
    return Setup(
        context_tokens=whole("--context", given.get("--context", usual_context), least=0),
        num_requests=whole("--batch", given.get("--batch", "1"), most=MAX_REQUESTS),
        prompt_tokens=whole("--prompt", given.get("--prompt", usual_prompt)),
        engine=choice("--engine", given.get("--engine", Engine.SERVING.value), Engine),
        placement=choice("--placement", given.get("--placement", Placement.SPREAD.value), Placement),
        chunk_tokens=whole("--chunk", given.get("--chunk", str(CHUNK_TOKENS))),
        num_draft_tokens=num_draft_tokens,
        acceptance_rates=by_position,
        acceptance_length=length("--acceptance-length", given["--acceptance-length"])
        if "--acceptance-length" in given
        else None,
    )


def _wanted(spec: "ModelSpec", given: dict[str, str]) -> "tuple[Goal, Load, Market]":
    from ostrya.capacity.chips import CHIPS, SLICES, find_slice
    from ostrya.capacity.queueing import Goal
    from ostrya.capacity.search import Load, Market
    from ostrya.capacity.speculation import Drafting
    from ostrya.cli.capacity_input import objective, prices, rate_per_s, ratio, whole

    setup = _setup(spec, {option: word for option, word in given.items() if option in _JUDGED | _DRAFTED})
    if setup.num_draft_tokens and setup.length is None:
        raise ConfigError(["--speculate with --slo needs --acceptance or --acceptance-length"])
    terms = objective("--slo", given["--slo"])
    goal = Goal(**{f"{name}_s": seconds for name, seconds in terms.items()})
    load = Load(
        requests_per_s=rate_per_s("--rate", given["--rate"]),
        prompt_tokens=setup.prompt_tokens,
        output_tokens=whole("--output", given.get("--output", str(_DEFAULT_OUTPUT_TOKENS))),
        hit_ratio=ratio("--hit-ratio", given.get("--hit-ratio", "0")),
    )
    slices = (find_slice(given["--slice"]),) if "--slice" in given else SLICES
    by_generation = prices("--price", given["--price"], tuple(CHIPS)) if "--price" in given else None
    if by_generation and not any(where.chip.name in by_generation for where in slices):
        raise ConfigError([f"--price has none for --slice {slices[0].name}; add {slices[0].chip.name}=…"])
    market = Market(
        engine=setup.engine,
        slices=slices,
        prices=by_generation,
        placement=setup.placement,
        chunk_tokens=setup.chunk_tokens,
        drafting=Drafting(num_draft_tokens=setup.num_draft_tokens, acceptance_length=setup.length or 1.0),
    )
    return goal, load, market
