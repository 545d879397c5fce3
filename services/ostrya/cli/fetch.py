"""`ostrya fetch`: a model or a compile cache onto this machine, before what needs it starts. For init containers."""

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from ostrya.cli.report import reported
from ostrya.cli.termination import ends_at_once
from ostrya.errors import ConfigError
from ostrya.fetch.report import Phase, Result, StartReport, write

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="gs://bucket/path, hf://org/name or hf://org/name/file.gguf (@revision may follow), or a path here. "
        ".tar, .tar.gz and .tgz are unpacked.",
    ),
]
Target = Annotated[Path, typer.Argument(metavar="DESTINATION", help="A directory that is made, or found complete.")]
PhaseOption = Annotated[
    Phase,
    typer.Option("--phase", help="What it is for; a model's folder is filtered, a compile cache is taken whole."),
]
Only = Annotated[
    Literal["tokenizer"] | None,
    typer.Option("--only", help="What a router needs: the tokenizer's files; for GGUF that is the whole file."),
]
ReportDir = Annotated[
    Path | None,
    typer.Option("--report-dir", help="Leave a report for the worker's metrics here (--start-report-dir)."),
]
Absent = Annotated[bool, typer.Option("--optional", help="Nothing at SOURCE is no error: nothing is made, and exit 0.")]


def fetch(
    source: Source,
    destination: Target,
    phase: PhaseOption = "fetch_model",
    only: Only = None,
    report_dir: ReportDir = None,
    optional: Absent = False,
) -> None:
    """Fetch a model or a compile cache into a directory. What is there already is not fetched again."""
    with reported(), ends_at_once():
        from ostrya.fetch.fetching import fetch as fetch_into
        from ostrya.fetch.remote import Missing

        started_s = time.monotonic()
        is_cache = phase == "fetch_compile_cache"
        if only and is_cache:
            raise ConfigError(["--only tokenizer is for models; a compile cache is taken whole"])
        num_bytes = 0
        result: Result = "miss"
        try:
            done = fetch_into(source, destination, only or ("everything" if is_cache else "model"), say=_say)
            num_bytes, revision = done.marker.num_bytes, done.marker.revision
            # A cache that had to be pulled is a cache all the same.
            result = "hit" if done.was_there or is_cache else "miss"
            told = f"{destination} {'already has' if done.was_there else 'now has'} {source} at {revision}"
        except Missing as error:
            if not optional:
                raise
            told = f"{error}; going on without it"
        seconds = time.monotonic() - started_s
        _say(f"{told}: {num_bytes} bytes in {seconds:.1f} s ({result})")
        if report_dir is not None:
            write(report_dir, StartReport(phase=phase, result=result, seconds=seconds, bytes=num_bytes))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
