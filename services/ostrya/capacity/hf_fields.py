"""The fields of a config.json, checked as they are asked for; the other hf_ modules ask."""

import re
from collections.abc import Mapping

from ostrya.errors import ConfigError

_MAX_SIZE = 10**9
"""No count in a config.json is larger."""
_MAX_LAYERS = 4096
"""Far above the deepest released model (126 layers); of every layer an entry is made."""
_MAX_SHOWN = 64
_SHAPES = re.compile(r"^(n|num)_|_(size|sizes|dim|rank|heads|layers|experts|window|groups|bias|gate)$|^sliding_window$")
"""Names of fields that change what a model weighs or keeps."""
_HARMLESS = frozenset(
    {
        # How experts are chosen, or the file was trained or split.
        *("ep_size", "n_group", "num_expert_group", "num_logits_to_keep", "num_labels", "initializer_range"),
        # The drafter's layers, which specs of files leave out.
        *("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "dspark_markov_rank"),
        # Sums of others, or of no use with latent attention.
        *("qk_head_dim", "max_window_layers", "num_key_value_heads", "head_dim"),
    }
)
"""Match _SHAPES and change nothing where a reader does not ask for them."""


def shown(value: object) -> str:
    """For a one-line message: text quoted and cut; of a list or an object only that it is one."""
    if isinstance(value, str):
        return repr(value[:_MAX_SHOWN])
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return str(value)[:_MAX_SHOWN]


def bare(name: str) -> str:
    """A name from the file, cut and without line breaks."""
    return shown(name)[1:-1]


class Fields:
    """A config's fields, checked as they are asked for. Every ConfigError says where, what is wrong and what is right.

    null means the same as absent.
    """

    def __init__(self, values: Mapping[str, object], *, outer: Mapping[str, object], where: str) -> None:
        self._values, self._outer, self._where = values, outer, where
        self._seen: set[str] = set()
        self._parts: list[Fields] = []

    def size(self, *names: str, default: int | None = None, lowest: int = 1, highest: int = _MAX_SIZE) -> int:
        """A whole number, under the first of `names` that is there."""
        self._seen.update(names)
        for name in names:
            value = self._values.get(name)
            if value is not None:
                return self._checked(name, value, lowest=lowest, highest=highest)
        if default is None:
            raise ConfigError([f"{self._where} lacks {' or '.join(names)}"])
        return default

    def num_layers(self) -> int:
        return self.size("num_hidden_layers", highest=_MAX_LAYERS)

    def count(self, name: str, *, highest: int = _MAX_SIZE) -> int:
        """As size(), but 0 is allowed and means the same as absent."""
        return self.size(name, default=0, lowest=0, highest=highest)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false, here or beside the text model's fields."""
        self._seen.add(name)
        value = self.anywhere(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(f"{name} is {shown(value)}; it must be true or false")
        return default if value is None else value

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(f"{name} is {shown(value)}; it must be text")
        return value

    def built_in(self, *names: str) -> None:
        """Fields whose usual value is part of the kind."""
        self._seen.update(names)

    def require_all_read(self) -> None:
        """ConfigError for a field that would change shapes and that the reader did not ask for."""
        for name, value in self._values.items():
            if name not in self._seen | _HARMLESS and _SHAPES.search(name) and value not in (None, False, 0, [], {}):
                raise self.refuse(f"{bare(name)} is {shown(value)}, which this kind's reader cannot express")
        for part in self._parts:
            part.require_all_read()

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def anywhere(self, *names: str) -> object:
        """The first that is there, here or beside the text model's fields; None if none is. Not checked."""
        places = ((values, name) for name in names for values in (self._values, self._outer))
        return next((values[name] for values, name in places if values.get(name) is not None), None)

    def part(self, name: str) -> "Fields":
        """The fields under `name`, of which a reader has to ask for all that change shapes."""
        if not self.has(name):
            raise ConfigError([f"{self._where} lacks {name}"])
        part = self.within(name, self._values[name])
        self._parts.append(part)
        return part

    def within(self, name: str, value: object) -> "Fields":
        """The fields of `value`, which was found under `name`."""
        if not isinstance(value, dict):
            raise self.refuse(f"{name} is {shown(value)}; it must be an object")
        return Fields(value, outer=self._outer, where=f"{self._where}: {name}")

    def entries(self, name: str) -> list[object] | None:
        """A list, or None if it is not there. Its entries are not checked."""
        self._seen.add(name)
        value = self._values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.refuse(f"{name} is {shown(value)}; it must be a list")
        return value

    def sizes(self, name: str, *, lowest: int = 0, highest: int = _MAX_SIZE) -> tuple[int, ...]:
        """A list of whole numbers."""
        entries = self.entries(name)
        if entries is None:
            raise ConfigError([f"{self._where} lacks the list {name}"])
        return tuple(self._checked(f"an entry of {name}", entry, lowest=lowest, highest=highest) for entry in entries)

    def names(self, name: str) -> tuple[str, ...]:
        """A list of text; empty if it is not there."""
        entries = self.entries(name) or []
        for entry in entries:
            if not isinstance(entry, str):
                raise self.refuse(f"an entry of {name} is {shown(entry)}; it must be text")
        return tuple(entry for entry in entries if isinstance(entry, str))

    def refuse(self, problem: str) -> ConfigError:
        """The error for something this reader cannot express."""
        return ConfigError([f"{self._where}: {problem}"])

    def _checked(self, name: str, value: object, *, lowest: int, highest: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise self.refuse(f"{name} is {shown(value)}; it must be a whole number from {lowest} to {highest}")
        return value
