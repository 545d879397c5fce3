"""The picture: made for every model, small, the same each time, and clear about what is missing."""

import builtins
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ostrya.capacity.chips import find_slice
from ostrya.capacity.facts import Setup
from ostrya.capacity.models import find_model
from ostrya.capacity.plot import draw
from ostrya.capacity.published import Engine
from ostrya.capacity.report import report
from ostrya.errors import ConfigError

MAX_SVG_BYTES = 200_000


def drawn(path: Path, name: str = "kimi-k3", where: str = "tpu7x-16") -> Path:
    spec, slice_ = find_model(name), find_slice(where)
    setup = Setup(context_tokens=8192, num_requests=1, prompt_tokens=8192, engine=Engine.SERVING)
    draw(spec, slice_, report(spec, slice_, setup), path)
    return path


def test_the_svg_of_the_readme_is_small_and_always_the_same(tmp_path: Path) -> None:
    first, second = (drawn(tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    assert len(first) < MAX_SVG_BYTES
    assert ElementTree.fromstring(first).tag.endswith("svg")


@pytest.mark.parametrize(("name", "where"), [("smollm2-135m", "v5e-1"), ("llama-3.1-70b", "v6e-8")])
def test_a_png_is_drawn_of_models_without_experts_or_state_too(tmp_path: Path, name: str, where: str) -> None:
    assert drawn(tmp_path / "a.png", name, where).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'ostrya\[plot\]'"):
        drawn(tmp_path / "a.svg")
