"""Libraries beneath `subquad train` and `subquad test`: options, starting weights, checkpoints, locks and messages."""
