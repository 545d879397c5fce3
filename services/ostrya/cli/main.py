"""The `ostrya` command. One module per subcommand; each imports what is heavy only when it runs."""

import os

import typer

from ostrya.cli import bench, capacity, chat, doctor, explain, fetch, generate, router, up, worker, workers

app = typer.Typer(
    name="ostrya",
    help="Serves large language models with prefix-aware routing over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("up")(up.up)
app.command("router")(router.router)
app.command("worker")(worker.worker)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.add_typer(workers.app, name="workers")
app.command("explain")(explain.explain)
app.command("bench")(bench.bench)
app.command("capacity")(capacity.capacity)
app.command("doctor")(doctor.doctor)
app.command("fetch")(fetch.fetch)


def main() -> None:
    """The console script."""
    # Where torch_tpu is installed, `import torch` loads it, and that ends a process that has no TPU. Its backend loads
    # it, in the engine's own process.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    app()


if __name__ == "__main__":
    main()
