"""Write checkpoints, find them, and continue from them after an interruption."""
