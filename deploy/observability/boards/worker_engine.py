"""Worker and engine: what each replica does with its steps, its tokens and its pages."""

from deploy.observability.panels import TOKENS_PER_S, Board, Panel, Query, Row, Step
from deploy.observability.promql import RANGE, mean, quantile, rate, ratio, worker, worker_process

PER_REPLICA = "{{replica}}"

REQUESTS = Row(
    "Requests",
    (
        Panel(
            title="Running",
            text="Requests that have a place in the batch. At the batch's size for long: the replica is full.",
            queries=(Query(f"sum by (replica) ({worker('requests_running')})", PER_REPLICA),),
            width=6,
        ),
        Panel(
            title="Waiting",
            text="Accepted and not yet in the batch. Short peaks are normal; a line that only rises is overload.",
            queries=(Query(f"sum by (replica) ({worker('requests_waiting')})", PER_REPLICA),),
            width=6,
        ),
        Panel(
            title="Prompt tokens waiting",
            text="Accepted and not yet computed. Divided by the prefill speed it is the wait that a new request faces.",
            queries=(Query(f"sum by (replica) ({worker('queued_tokens')})", PER_REPLICA),),
            width=6,
        ),
        Panel(
            title="Ended",
            text="By finish reason: stop and length are whole answers. cancelled is broken down under Faults.",
            queries=(Query(rate(worker("request_duration_seconds_count"), "finish_reason"), "{{finish_reason}}"),),
            unit="reqps",
            stacked=True,
            colors=(("stop", "green"), ("length", "blue"), ("cancelled", "gray")),
            width=6,
        ),
    ),
)

TOKENS = Row(
    "Tokens",
    (
        Panel(
            title="Decode",
            text="Tokens generated, which is what users wait for. Falls with as many running: steps got slower.",
            queries=(Query(rate(worker("generation_tokens_total"), "replica"), PER_REPLICA),),
            unit=TOKENS_PER_S,
            stacked=True,
            width=6,
        ),
        Panel(
            title="Prefill",
            text="Prompt tokens computed: all tokens computed without the generated ones. Cached tokens are not in it.",
            queries=(
                Query(
                    f"{rate(worker('scheduled_tokens_total'), 'replica')} - "
                    f"{rate(worker('generation_tokens_total'), 'replica')}",
                    PER_REPLICA,
                ),
            ),
            unit=TOKENS_PER_S,
            stacked=True,
            width=6,
        ),
        Panel(
            title="Prefill speed",
            text="How fast prompts are computed while they are: a moving average over steps that prefilled. Routers "
            "use it to estimate waits. A fall with the same batch sizes points at a slow host.",
            queries=(Query(f"max by (replica) ({worker('prefill_tokens_per_second')})", PER_REPLICA),),
            unit=TOKENS_PER_S,
            width=6,
        ),
        Panel(
            title="Padding waste",
            text="Share of the computed tokens that is padding to the next compiled shape. Above a half, shapes and "
            "traffic do not fit each other: fewer running requests, or other buckets.",
            queries=(
                Query(
                    f"1 - {ratio(worker('scheduled_tokens_total'), worker('padded_tokens_total'), 'replica')}",
                    PER_REPLICA,
                ),
            ),
            unit="percentunit",
            maximum=1,
            steps=(Step(0.5, "orange"),),
            width=6,
        ),
    ),
)

STEPS = Row(
    "Steps",
    (
        Panel(
            title="Batch size",
            text="Mean rows of a step. Larger is cheaper a token, and slower each.",
            queries=(Query(mean(worker("batch_size")), PER_REPLICA),),
            width=6,
        ),
        Panel(
            title="Step time",
            text="Each step generates one token for every running request, so this is the pace of all of them.",
            queries=(
                Query(quantile(0.5, worker("step_seconds_bucket"), "replica"), "{{replica}} p50"),
                Query(quantile(0.99, worker("step_seconds_bucket"), "replica"), "{{replica}} p99"),
            ),
            unit="s",
            width=6,
        ),
        Panel(
            title="What a step takes",
            text="Learned from steps: a base, and so much for each row, for 1,000 prompt tokens and for 1,000 KV "
            "tokens. Where steps never differ, only the sum means something. All 0: too few steps were seen.",
            queries=(
                *(
                    Query(f"max by (replica) ({worker('step_time_fit_seconds', part=part)})", f"{{{{replica}}}} {part}")
                    for part in ("base", "row")
                ),
                *(
                    Query(
                        f"1000 * max by (replica) ({worker('step_time_fit_seconds', part=f'{part}_token')})",
                        f"{{{{replica}}}} 1,000 {part} tokens",
                    )
                    for part in ("prefill", "kv")
                ),
            ),
            unit="s",
            width=12,
        ),
        Panel(
            title="Share of the limit",
            text="The least time in which the hardware could do the steps, of the time they took: 100 % is the "
            "physical limit. decode = one token for each row, prefill = chunks of prompts, mixed = both. Low with few "
            "rows: the host or launching is what a step waits for. On CPU the limit is measured at the start.",
            queries=(
                Query(
                    ratio(worker("step_limit_seconds_total"), worker("step_taken_seconds_total"), "replica, kind"),
                    "{{replica}} {{kind}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
            width=8,
        ),
        Panel(
            title="Share of the limit, step by step",
            text="Of single steps: a tenth of them was nearer to the limit than p90, a tenth further than p10. Above "
            "100 % the limit itself is wrong: this machine was busy when it was measured.",
            queries=tuple(
                Query(quantile(q, worker("step_limit_ratio_bucket"), "replica"), f"{{{{replica}}}} p{round(100 * q)}")
                for q in (0.1, 0.5, 0.9)
            ),
            unit="percentunit",
            width=8,
        ),
        Panel(
            title="What the limit is made of",
            text="Seconds that the hardware needs at least in each second of steps: to read memory (weights and KV "
            "pages), or to compute. What is missing to 100 % is lost to everything else.",
            queries=(
                Query(
                    f"{rate(worker('step_limit_seconds_total'), 'replica, bound')} / on (replica) group_left "
                    f"{rate(worker('step_taken_seconds_total'), 'replica')}",
                    "{{replica}} {{bound}}",
                ),
            ),
            unit="percentunit",
            stacked=True,
            width=8,
        ),
        Panel(
            title="Steps",
            text="Steps of the engine. 0 with running requests is a stalled engine.",
            queries=(Query(rate(worker("steps_total"), "replica"), PER_REPLICA),),
            unit="ops",
            width=6,
        ),
        Panel(
            title="Against which limit",
            text="Memory bandwidth in bytes/s and rate of products in FLOP/s (bfloat16) of all devices together: as "
            "published for TPU, measured at the start on CPU. 0: this backend does not say.",
            queries=(
                Query(f"max by (replica) ({worker('peak_bytes_per_second')})", "{{replica}} bytes/s"),
                Query(f"max by (replica) ({worker('peak_flops_per_second')})", "{{replica}} FLOP/s"),
            ),
            kind="stat",
            width=6,
        ),
        Panel(
            title="Simulated replicas",
            text="simulated = the replica has backend roofline: it computes nothing, and every time on these boards "
            "that depends on it is a prediction by the capacity model.",
            queries=(Query(f"max by (replica) ({worker('simulated')})", "{{replica}}"),),
            kind="state-timeline",
            names=((0, "computes", "green"), (1, "simulated", "purple")),
            width=6,
        ),
        Panel(
            title="Since the step loop spoke",
            text="The engine's sign of life; it speaks when idle too. After 5 s the worker takes it for stuck, sends "
            "its streams elsewhere and starts it again; 0 meanwhile.",
            queries=(Query(f"max by (replica) ({worker('engine_report_age_seconds')})", PER_REPLICA),),
            unit="s",
            steps=(Step(10, "red"),),
            width=6,
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            title="Between tokens",
            text="Time from token to token, as the worker sends them. Above 0.1 s reading feels halting.",
            queries=(
                Query(quantile(0.5, worker("inter_token_latency_seconds_bucket"), "replica"), "{{replica}} p50"),
                Query(quantile(0.99, worker("inter_token_latency_seconds_bucket"), "replica"), "{{replica}} p99"),
            ),
            unit="s",
            width=6,
        ),
        Panel(
            title="First token, p99",
            text="From arrival at the worker. Its parts stand beside: waiting for a step, then computing the prompt.",
            queries=(Query(quantile(0.99, worker("time_to_first_token_seconds_bucket"), "replica"), PER_REPLICA),),
            unit="s",
            steps=(Step(2.56, "red"),),
            width=6,
        ),
        Panel(
            title="Queue before the first step, p99",
            text="If this is most of the first token's time, the replica is full.",
            queries=(Query(quantile(0.99, worker("request_queue_seconds_bucket"), "replica"), PER_REPLICA),),
            unit="s",
            width=6,
        ),
        Panel(
            title="Prefill, p99",
            text="If this is most of the first token's time, prompts are long and cold.",
            queries=(Query(quantile(0.99, worker("prefill_seconds_bucket"), "replica"), PER_REPLICA),),
            unit="s",
            width=6,
        ),
    ),
)

CACHE = Row(
    "KV cache",
    (
        Panel(
            title="KV pages in use",
            text="Pages that requests refer to, of all pages. Above 95 % requests are put back to the queue.",
            queries=(Query(f"max by (replica) ({worker('kv_cache_usage_ratio')})", PER_REPLICA),),
            unit="percentunit",
            maximum=1,
            steps=(Step(0.95, "red"),),
            width=6,
        ),
        Panel(
            title="KV pages by state",
            text="referenced = in use, reusable = kept for the next prompt with that beginning, free = empty. No free "
            "pages is normal on a warm replica; no reusable ones means that prefixes are lost.",
            queries=(Query(f"sum by (state) ({worker('kv_cache_blocks')})", "{{state}}"),),
            stacked=True,
            colors=(("free", "gray"), ("reusable", "blue"), ("referenced", "orange")),
            width=6,
        ),
        Panel(
            title="Prefix cache hits",
            text="Prompt tokens found, of those looked up. Depends on the traffic and on routing.",
            queries=(
                Query(
                    ratio(
                        worker("prefix_cache_hit_tokens_total"), worker("prefix_cache_queried_tokens_total"), "replica"
                    ),
                    PER_REPLICA,
                ),
            ),
            unit="percentunit",
            maximum=1,
            width=6,
        ),
        Panel(
            title="Resume points told to routers",
            text="stored and removed. removed close to stored means that the cache turns over as fast as it fills.",
            queries=(Query(rate(worker("cache_events_published_total"), "type"), "{{type}}"),),
            unit="ops",
            width=6,
        ),
        Panel(
            title="Memory of a device",
            text="weights, scratch (what the largest step takes beside them), kv (the pool of pages) and free, for the "
            "mean replica's first device. free below 0: more pages were asked for than there is memory for; numPages "
            "auto takes as many as fit.",
            queries=(Query(f"avg by (part) ({worker('memory_bytes')})", "{{part}}"),),
            unit="bytes",
            colors=(("weights", "purple"), ("scratch", "orange"), ("kv", "blue"), ("free", "green"), ("limit", "gray")),
            width=24,
        ),
    ),
)

FAULTS = Row(
    "Faults and resources",
    (
        Panel(
            title="Preemptions",
            text="Requests put back to the queue because pages ran out; their work is done twice. Should be 0.",
            queries=(Query(rate(worker("preemptions_total"), "replica"), PER_REPLICA),),
            unit="ops",
            width=8,
        ),
        Panel(
            title="Cancelled",
            text="client = the caller went away, deadline = its time was up, drain = cut off at the end of a drain, "
            "engine = the engine failed. The last two are faults.",
            queries=(Query(rate(worker("cancelled_requests_total"), "cause"), "{{cause}}"),),
            unit="reqps",
            width=8,
        ),
        Panel(
            title="Pages that do not add up",
            text="Times that KV pages were lost or still referenced while the engine had nothing to do, at most one "
            "look a minute. Must be 0; else pages run out in time, and a restart of the worker gives them back.",
            queries=(Query(f"sum by (replica) (increase({worker('page_leaks_total')}[{RANGE}]))", PER_REPLICA),),
            steps=(Step(1, "red"),),
            decimals=0,
            width=8,
        ),
        Panel(
            title="Memory",
            text="Resident memory of the worker process and of its engine, which holds weights and KV pages. A line "
            "that only rises is a leak.",
            queries=(
                Query(f"sum by (replica) ({worker_process('process_resident_memory_bytes')})", "{{replica}} worker"),
                Query(f"sum by (replica) ({worker('engine_resident_memory_bytes')})", "{{replica}} engine"),
            ),
            unit="bytes",
            width=12,
        ),
        Panel(
            title="CPU and asyncio tasks",
            text="Cores used by the worker process and by its engine, and the worker's asyncio tasks: about one a "
            "stream. Tasks that do not fall when the traffic does are leaked streams.",
            queries=(
                Query(rate(worker_process("process_cpu_seconds_total"), "replica"), "{{replica}} worker cores"),
                Query(rate(worker("engine_cpu_seconds_total"), "replica"), "{{replica}} engine cores"),
                Query(f"sum by (replica) ({worker_process('ostrya_process_tasks')})", "{{replica}} tasks"),
            ),
            width=12,
        ),
    ),
)

BOARD = Board(
    uid="ostrya-worker-engine",
    title="Ostrya: worker and engine",
    text="What each replica does: requests, tokens, steps, latency, KV cache, faults.",
    rows=(REQUESTS, TOKENS, STEPS, LATENCY, CACHE, FAULTS),
)
