"""Weight files: published ones, conversions, folders of the Hub, and the start of a training."""
