"""Classification on mmengine's Runner, with timm's data pipeline and optimizers."""
