"""Libraries beneath the commands: configs, training, evaluation, prediction, counting, drawing and their messages."""
