"""The fields of a config.json, checked as they are asked for; hf_kinds.py asks."""

import re
from collections.abc import Mapping

from ostrya.capacity.chips import Dtype
from ostrya.capacity.spec import BF16, FP8, FP32, INT8, MXFP4, NVFP4, Storage
from ostrya.errors import ConfigError

_MAX_SIZE = 10**9
"""No count in a config.json is larger."""
_STORAGE_OF = (("mxfp4", MXFP4), ("nvfp4", NVFP4), ("fp8", FP8), ("float-quantized", FP8))
"""Words in quant_method, format or quant_algo; the first that is found counts."""
_WHOLE_NUMBER_FORMATS = ("pack-quantized", "int-quantized", "awq", "gptq")
"""As _STORAGE_OF, but the file says of how many bits: 8, or 4 with a scale per group."""
_SCALE_BITS = 16
_DTYPES = {"bfloat16": BF16, "float16": BF16, "float32": FP32}
"""torch_dtype, or dtype in newer files; float16 is as wide as bfloat16."""
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


class Fields:
    """A config's fields, checked as they are asked for."""

    def __init__(self, values: Mapping[str, object], *, outer: Mapping[str, object], where: str) -> None:
        self._values, self._outer, self._where = values, outer, where
        self._seen: set[str] = set()
        self._parts: list[Fields] = []

    def size(self, *names: str, default: int | None = None) -> int:
        """A whole number from 1, under the first of `names` that is there. ConfigError: what is missing or wrong."""
        self._seen.update(names)
        for name in names:
            value = self._values.get(name)
            if value is not None:
                return self._checked(name, value, lowest=1)
        if default is None:
            raise ConfigError([f"{self._where} lacks {' or '.join(names)}"])
        return default

    def count(self, name: str) -> int:
        """As size(), but 0 is allowed and means the same as absent."""
        self._seen.add(name)
        value = self._values.get(name)
        return 0 if value is None else self._checked(name, value, lowest=0)

    def flag(self, name: str) -> bool:
        """True or false; absent is false."""
        self._seen.add(name)
        value = self._values.get(name, self._outer.get(name))
        if value is not None and not isinstance(value, bool):
            raise self.refuse(f"{name} is {str(value)[:64]!r}; it must be true or false")
        return bool(value)

    def built_in(self, *names: str) -> None:
        """Fields whose usual value is part of the kind."""
        self._seen.update(names)

    def require_all_read(self) -> None:
        """ConfigError for a field that would change shapes and that the reader did not ask for."""
        for name, value in self._values.items():
            if name not in self._seen | _HARMLESS and _SHAPES.search(name) and value not in (None, False, 0, [], {}):
                raise self.refuse(f"{name} is {str(value)[:64]}, which this kind's reader cannot express")
        for part in self._parts:
            part.require_all_read()

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def part(self, name: str) -> "Fields":
        """The fields under `name`. ConfigError if there are none."""
        value = self._values.get(name)
        if not isinstance(value, dict):
            raise ConfigError([f"{self._where} lacks {name}"])
        part = Fields(value, outer=self._outer, where=f"{self._where}: {name}")
        self._parts.append(part)
        return part

    def sizes(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        self._seen.add(name)
        value = self._values.get(name)
        if not isinstance(value, list):
            raise ConfigError([f"{self._where} lacks the list {name}"])
        return tuple(self._checked(name, entry, lowest=0) for entry in value)

    def kinds(self, name: str) -> tuple[str, ...] | None:
        """A list of names, one per layer; None if it is not there."""
        value = self._values.get(name)
        return tuple(str(entry) for entry in value) if isinstance(value, list) else None

    def refuse(self, problem: str) -> ConfigError:
        """The error for something this reader cannot express."""
        return ConfigError([f"{self._where}: {problem}"])

    def storage(self) -> Storage | None:
        """Of a quantized checkpoint's matrices; None if it is not quantized. ConfigError for an unknown method."""
        found = self._outer.get("quantization_config", self._values.get("quantization_config"))
        if not isinstance(found, dict):
            return None
        method = str(found.get("quant_method"))
        form = str(found.get("format", "")) + str(found.get("quant_algo", ""))
        for word, storage in _STORAGE_OF:
            if word in method.lower() or word in form.lower():
                return storage
        if any(word in method.lower() or word in form.lower() for word in _WHOLE_NUMBER_FORMATS):
            return self._whole_numbers(found, f"quantization {method[:64]!r}{f' ({form[:64]})' if form else ''}")
        raise self.refuse(f"quantization {method[:64]!r} is not known; give --dtype and leave quantization_config out")

    def dtype(self) -> Storage:
        """Of weights that are not quantized; bf16 if the file does not say."""
        names = [fields.get(name) for fields in (self._values, self._outer) for name in ("torch_dtype", "dtype")]
        value = next((name for name in names if name is not None), "bfloat16")
        found = _DTYPES.get(str(value).removeprefix("torch."))
        if found is None:
            raise self.refuse(f"torch_dtype is {str(value)[:64]!r}; it must be one of {', '.join(_DTYPES)}")
        return found

    def _whole_numbers(self, found: Mapping[str, object], what: str) -> Storage:
        listed = found.get("config_groups")
        groups = listed if isinstance(listed, dict) else {}
        schemes = [one.get("weights") for one in groups.values() if isinstance(one, dict)]
        kinds = [
            (one.get("num_bits"), one.get("group_size"), one.get("symmetric") is False)
            for one in schemes
            if isinstance(one, dict)
        ]
        # AWQ and GPTQ checkpoints always have zero points beside their scales.
        kinds = kinds or [
            (found.get("bits", found.get("w_bit")), found.get("group_size", found.get("q_group_size")), True)
        ]
        bits, group_size, has_zero_points = kinds[0]
        if any(kind != kinds[0] for kind in kinds):
            raise self.refuse(f"{what} mixes formats, which cannot be expressed")
        if bits == INT8.bits:
            return INT8
        if bits != 4:
            raise self.refuse(f"{what} has {str(bits)[:64]} bits a weight; 4 and 8 are known")
        if group_size is None or group_size == -1:
            # One scale per channel: nothing beside the values.
            return Storage("int4", bits, Dtype.BF16)
        per_group = _SCALE_BITS + has_zero_points * bits
        return Storage("int4", bits + per_group / self._checked("group_size", group_size, lowest=1), Dtype.BF16)

    def _checked(self, name: str, value: object, *, lowest: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= _MAX_SIZE:
            raise ConfigError([f"{self._where}: {name} is {str(value)[:64]}; it must be {lowest} to {_MAX_SIZE}"])
        return value
