"""Every values file the chart ships, rendered: a test that takes `shown` runs once for each."""

import pytest

from tests.chart.render import Render, preset, value_files


@pytest.fixture(params=list(value_files()))
def shown(request: pytest.FixtureRequest) -> Render:
    return preset(request.param)
