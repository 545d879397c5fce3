"""The package; see ../README.md."""

import os

from torch_tpu._log import log

log("import", environment={name: value for name, value in os.environ.items() if name.startswith(("TORCH_", "TPU_"))})
