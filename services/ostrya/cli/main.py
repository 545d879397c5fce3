"""The `ostrya` command. One module per subcommand; each imports what is heavy only when it runs."""

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
    app()


if __name__ == "__main__":
    main()
