"""Where the real one would be."""
