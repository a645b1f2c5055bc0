"""Count parameters, multiply-adds and kernel launches of models."""
