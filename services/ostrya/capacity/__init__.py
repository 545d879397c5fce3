"""What a model does on a slice, as arithmetic: what fits, how fast physics allows it, and how fast it will probably be.

chips.py, layers.py and spec.py (with models/) hold the facts; weights.py, memory.py, costs.py, step.py, speculation.py
and serving.py the formulas; published.py and estimate.py what others measured, and how far from the limit that was.
Pure: no torch, no clock, and no file but a config.json that is handed in (hf_config.py).
"""
