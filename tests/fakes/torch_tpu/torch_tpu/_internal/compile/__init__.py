"""What 0.2.0 exports here."""

from torch_tpu._internal.compile._backend import async_compile

__all__ = ["async_compile"]
