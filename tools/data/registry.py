"""Register the data sets and the samplers that classification and sequence configs name.

Configs import it by `custom_imports`.
"""
from . import image_sets, imagenet_sets, samplers, sequences, timm_sets, token_sets  # noqa: F401
