"""Code that the operators share: launches, tiles, argument checks, decays, memory, autocast and tracing."""
