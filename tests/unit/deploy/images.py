"""The images by name, read once for the tests of this folder."""

import tomllib
from pathlib import Path

from tests.ops.dockerfile import Dockerfile, parse

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "docker"
FILES = {path.name.removesuffix(".Dockerfile"): path for path in sorted(FOLDER.glob("*.Dockerfile"))}
IMAGES: dict[str, Dockerfile] = {name: parse(path.read_text()) for name, path in FILES.items()}
PYPROJECT = (ROOT / "pyproject.toml").read_text()
VERSION: str = tomllib.loads(PYPROJECT)["project"]["version"]
