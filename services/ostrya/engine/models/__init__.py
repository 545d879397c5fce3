"""Decoders and how their weights are read. Called by backends; knows no scheduler, device or page table layout."""

from ostrya.engine.models.config import LoadedModel, ModelConfig

__all__ = ["LoadedModel", "ModelConfig"]
