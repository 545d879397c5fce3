"""`ostrya router`: one router, until SIGTERM."""

import asyncio

import typer

from ostrya.cli import check_config as configuration
from ostrya.cli.check_config import CheckConfig
from ostrya.cli.options import build, takes
from ostrya.cli.report import reported
from ostrya.cli.termination import ends_on_sigterm
from ostrya.router.settings import RouterSettings
from ostrya.text.source import check_reference


@takes(RouterSettings)
def router(check_config: CheckConfig = False, **values: object) -> None:
    """Run a router: it sends each request to the replica where its answer starts soonest."""
    with reported(), ends_on_sigterm():
        settings = build(RouterSettings, values)
        if check_config:
            configuration.report(settings.check, lambda: check_reference(settings.model))
        settings.check()
        from ostrya.router import app

        raise typer.Exit(asyncio.run(app.serve(settings)))
