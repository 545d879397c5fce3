"""TPU hardware: what GKE's device plugin says of each chip. Its series are not ours; see README.md, "TPU series"."""

from deploy.observability.panels import TOKENS_PER_S, Board, Panel, Query, Row, Step, Variable
from deploy.observability.promql import rate, worker

# `model` is the exporter's word for the chip; a served model never stands there. `replica` is set while scraping.
CHIP = 'make="cloud-tpu", model=~"$tpu_model", tpu_topology=~"$tpu_topology", replica=~"$replica"'
EACH = "{{replica}} {{accelerator_id}}"
ABSENT = " No data means that the exporter does not say; it never means 0."

COMPUTE = Row(
    "Compute",
    (
        Panel(
            title="TensorCore utilization",
            text="Operations done, of those the chip could do, by chip. Decoding is bound by memory, so 10 to 40 % is "
            "usual there; prefill goes higher. One chip of a slice far from the others: a sick chip or bad sharding."
            + ABSENT,
            queries=(Query(f"tensorcore_utilization{{{CHIP}}}", EACH),),
            unit="percent",
            maximum=100,
        ),
        Panel(
            title="Duty cycle",
            text="Share of time in which the chip did anything. Low with requests waiting: the host is the bottleneck."
            + ABSENT,
            queries=(Query(f"duty_cycle{{{CHIP}}}", EACH),),
            unit="percent",
            maximum=100,
        ),
        Panel(
            title="TensorCore utilization by replica",
            text="Mean over the chips of a replica: which replica works least." + ABSENT,
            queries=(Query(f"avg by (replica) (tensorcore_utilization{{{CHIP}}})", "{{replica}}"),),
            unit="percent",
            maximum=100,
        ),
    ),
)

MEMORY = Row(
    "Memory",
    (
        Panel(
            title="Memory bandwidth utilization",
            text="Bytes moved to and from HBM, of what the chip could move. This, not the TensorCores, limits "
            "decoding: near 100 % the replica is as fast as it gets." + ABSENT,
            queries=(Query(f"memory_bandwidth_utilization{{{CHIP}}}", EACH),),
            unit="percent",
            maximum=100,
        ),
        Panel(
            title="HBM used",
            text="Bytes in use by chip: weights and KV pages are taken at start, so the line is flat. Rising is a leak."
            + ABSENT,
            queries=(Query(f"memory_used{{{CHIP}}}", EACH),),
            unit="bytes",
        ),
        Panel(
            title="HBM used, share",
            text="Of what the chip has. Above 97 % the next allocation may fail; far below, more KV pages would fit."
            + ABSENT,
            queries=(Query(f"memory_used{{{CHIP}}} / memory_total{{{CHIP}}}", EACH),),
            unit="percentunit",
            maximum=1,
            steps=(Step(0.97, "red"),),
        ),
    ),
)

BESIDE = Row(
    "Beside it",
    (
        Panel(
            title="Chips that report",
            text="Chips with utilization series, by type and topology. Fewer than the node pool has: an exporter is "
            "not scraped, or a chip is gone." + ABSENT,
            queries=(
                Query(
                    f"count by (model, tpu_topology) (tensorcore_utilization{{{CHIP}}})", "{{model}} {{tpu_topology}}"
                ),
            ),
            decimals=0,
        ),
        Panel(
            title="Tokens generated",
            text="By replica, to set beside the chips: tokens that fall while utilization stays are wasted work.",
            queries=(Query(rate(worker("generation_tokens_total"), "replica"), "{{replica}}"),),
            unit=TOKENS_PER_S,
        ),
        Panel(
            title="Exporters scraped",
            text="1 = Prometheus reads this node's device plugin. 0: its port 2112 cannot be reached.",
            queries=(Query('up{job="tpu-device-plugin"}', "{{instance}}"),),
            kind="state-timeline",
            names=((0, "not scraped", "red"), (1, "scraped", "green")),
        ),
    ),
)

BOARD = Board(
    uid="ostrya-tpu-hardware",
    title="Ostrya: TPU hardware",
    text="Chips, as GKE's TPU device plugin reports them. To see one pool, choose its replicas.",
    rows=(COMPUTE, MEMORY, BESIDE),
    variables=(
        Variable(
            name="tpu_model", label="TPU type", query='label_values(tensorcore_utilization{make="cloud-tpu"}, model)'
        ),
        Variable(
            name="tpu_topology",
            label="Topology",
            query='label_values(tensorcore_utilization{make="cloud-tpu", model=~"$tpu_model"}, tpu_topology)',
        ),
    ),
)
