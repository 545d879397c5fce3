"""`ostrya router`: one router, until SIGTERM."""

import asyncio

import typer

from ostrya.cli.options import build, takes
from ostrya.cli.report import reported
from ostrya.router.settings import RouterSettings


@takes(RouterSettings)
def router(**values: object) -> None:
    """Run a router: it sends each request to the replica where its answer starts soonest."""
    with reported():
        settings = build(RouterSettings, values)
        settings.check()
        from ostrya.router import app

        raise typer.Exit(asyncio.run(app.serve(settings)))
