"""`ostrya worker`: one replica, until SIGTERM. torch is imported by the engine's own process, never by this one."""

import asyncio
from typing import Annotated

import typer

from ostrya.cli.options import build, takes
from ostrya.cli.report import reported
from ostrya.engine.config import EngineConfig
from ostrya.worker.settings import WorkerSettings

Model = Annotated[
    str,
    typer.Option("--model", envvar="OSTRYA_MODEL", help="A .gguf file, a Hugging Face directory, or a known name."),
]
ModelName = Annotated[
    str, typer.Option("--model-name", envvar="OSTRYA_MODEL_NAME", help="The served name; empty = the source's own.")
]


@takes(WorkerSettings, EngineConfig, without=("model_path", "tokenizer_fingerprint"))
def worker(model: Model = "smollm2-135m-instruct", model_name: ModelName = "", **values: object) -> None:
    """Run a worker: one replica of a model."""
    with reported():
        settings = build(WorkerSettings, values)
        settings.check()
        from ostrya.text.source import resolve_model
        from ostrya.text.tokenizer import load_tokenizer
        from ostrya.worker import app

        source = resolve_model(model)
        identity = {
            "model_path": str(source.path),
            "model_name": model_name or source.name,
            "tokenizer_fingerprint": load_tokenizer(source.path).fingerprint,
        }
        config = build(EngineConfig, {**values, **identity})
        config.check()
        raise typer.Exit(asyncio.run(app.serve(settings, config)))
