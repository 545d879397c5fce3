"""Decoders and how their weights are read. Called by backends; knows no scheduler, device or page table layout."""
