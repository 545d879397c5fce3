"""`ostrya worker`: one replica, until SIGTERM. torch is imported by the engine's own process, never by this one."""

import asyncio
import os
from typing import Annotated

import typer

from ostrya.cli import check_config as configuration
from ostrya.cli.check_config import CheckConfig
from ostrya.cli.options import build, takes
from ostrya.cli.report import reported
from ostrya.cli.termination import ends_on_sigterm
from ostrya.engine.config import AUTO_PAGES, EngineConfig
from ostrya.engine.world import ranks_per_host
from ostrya.service import logs
from ostrya.text.source import ModelSource, check_reference, resolve_model
from ostrya.worker.role import role
from ostrya.worker.settings import WorkerSettings

Model = Annotated[
    str,
    typer.Option("--model", envvar="OSTRYA_MODEL", help="A .gguf file, a Hugging Face directory, or a known name."),
]
ModelName = Annotated[
    str, typer.Option("--model-name", envvar="OSTRYA_MODEL_NAME", help="The served name; empty = the source's own.")
]


_UNREAD = {"tokenizer_fingerprint": ""}
"""Known once the model is there."""


@takes(
    WorkerSettings,
    EngineConfig,
    without=("model_path", "tokenizer_fingerprint", "eos_token_ids", "vocab_size"),
    words={"num_pages": {"auto": AUTO_PAGES}},
)
def worker(
    model: Model = "smollm2-135m-instruct",
    model_name: ModelName = "",
    check_config: CheckConfig = False,
    **values: object,
) -> None:
    """Run a worker: one replica of a model."""
    with reported(), ends_on_sigterm():
        settings = build(WorkerSettings, values)
        config = build(EngineConfig, {**values, "model_path": model, "model_name": model_name, **_UNREAD})
        if check_config:
            configuration.report(
                settings.check, config.check, lambda: check_reference(model), lambda: _place(settings, config)
            )
        settings.check()
        config.check()
        _place(settings, config)
        from ostrya.text.tokenizer import load_tokenizer
        from ostrya.worker import app

        # Reading a model has something to say, too.
        logs.setup("worker", settings.log_level)
        served, source = _resolved(model, config)
        tokenizer = load_tokenizer(source.path)
        identity = {
            "model_path": served,
            "model_name": model_name or source.name,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "eos_token_ids": tokenizer.eos_token_ids,
            "vocab_size": tokenizer.vocab_size,
        }
        config = build(EngineConfig, {**values, **identity})
        raise typer.Exit(asyncio.run(app.serve(settings, config, vocabulary=tokenizer.vocabulary)))


def _resolved(model: str, config: EngineConfig) -> tuple[str, ModelSource]:
    """What the engine opens; the served name, and where the tokenizer is."""
    if config.backend != "roofline":
        source = resolve_model(model)
        return str(source.path), source
    from ostrya.cli.simulated import resolve_simulated

    found = resolve_simulated(model)
    return found.model, ModelSource(path=resolve_model(found.tokenizer).path, name=found.name)


def _place(settings: WorkerSettings, config: EngineConfig) -> None:
    """ConfigError if this host has no place in a slice, or its devices cannot be shared out."""
    ranks_per_host(config, role(settings, os.environ).num_hosts)
