"""What `--backend roofline` serves: a model known by name or by a file, and whose tokenizer stands in for it.

Called by `ostrya up` and `ostrya worker`.
"""

from dataclasses import dataclass
from pathlib import Path

from ostrya.capacity.models import find_model, models
from ostrya.text.packaged import PACKAGED
from ostrya.text.source import resolve_model

STAND_IN = "smollm2-135m-instruct"
"""Its tokenizer spells the tokens of a model that has no files here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """A model that will not be computed."""

    model: str
    """Name, config.json or file, for EngineConfig.model_path."""
    name: str
    """What requests call it."""
    tokenizer: str
    """A model whose tokenizer it has, as --model of a router takes it."""

    def notice(self, slice_: str) -> str:
        """What a person must know before any number is shown."""
        is_stand_in = self.tokenizer == STAND_IN and self.name != STAND_IN
        spelled = f", spelled by {STAND_IN}'s tokenizer," if is_stand_in else ""
        return (
            f"simulated: nothing of {self.name} is computed. Every time shown is what `ostrya capacity` expects of "
            f"{slice_}; its text{spelled} means nothing"
        )


def resolve_simulated(reference: str) -> SimulatedModel:
    """A name that `ostrya capacity --list` shows, a config.json or a directory with nothing else, or any model that
    could be served. ConfigError or ModelLoadError if it is none of them."""
    path = Path(reference).expanduser()
    if reference in models():
        return SimulatedModel(model=reference, name=reference, tokenizer=STAND_IN)
    config = path / "config.json" if path.is_dir() else path
    if config.name.endswith(".json") and config.is_file() and not (path / "tokenizer.json").is_file():
        name = config.resolve().parent.name.lower() or "model"
        return SimulatedModel(model=str(config), name=name, tokenizer=STAND_IN)
    if not path.exists() and reference not in PACKAGED:
        find_model(reference)  # its refusal names the models there are
    source = resolve_model(reference)
    return SimulatedModel(model=str(source.path), name=source.name, tokenizer=reference)
