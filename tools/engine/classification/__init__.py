"""Classification on MMEngine's Runner, with timm's data pipeline and optimizers."""
