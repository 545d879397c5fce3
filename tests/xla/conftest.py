"""These tests need torch_xla and a torch that fits it: `make test-xla` has both. Elsewhere they are no part of it."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]
