"""Decays for another resolution than that of training, without training."""
import math

from torch import nn

from .mixers import EosMixer, PolylineMixer, SeparableSelfAttention, TreeMixer
from .observation import check_model


def set_decay_scale(model: nn.Module, scale: float) -> None:
    """Scale the decays of a model to images `scale` times as large as those of its training, in pixels of a side.

    A decay acts at each token. On an image of twice the height and width, the same two points lie twice as many tokens
    apart, so that the decay between them is squared. This function keeps the decay of a fraction of the image:

    - PPMA, RMT: `log_alpha` and `log_beta` are divided by the scale.
    - LCSM: the step logs of the recurrences are divided by the scale. State space models (s4, s4d, s5, dss, tnn, mamba)
      divide their steps, and so their angles and inputs, as for signals with another sampling rate.
    - Myo: level l of the tree takes the biases of level l - log2(scale), or those of level 0 if that is negative.
      Between powers of 2, the biases of two levels are interpolated. `max_levels` grows by log2(scale).

    Mixers without a decay, such as the attention of a hybrid, stay as they are if another mixer has one.

    Weights and state dicts do not change, and a loaded model has the scale 1, which computes what a model without
    scale computes. Set the scale before export or tracing.

    Args:
        model: a model with mixers of this package; a module that contains one, such as a detector, also works.
        scale: size of the images divided by that of training, such as 2 for 448 pixels after 224.

    Raises:
        TypeError: the model is not a module.
        ValueError: the scale is not a positive finite number, the model has no decay, or one of its mixers has a decay
            that no scale fits; the message says why. Then the model keeps its scale.
    """
    check_model(model)
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 0 < scale < math.inf:
        raise ValueError(f'scale must be a positive finite number, got {scale!r}')
    mixers = {name: module for name, module in model.named_modules()
              if isinstance(module, (PolylineMixer, TreeMixer, EosMixer))}
    if not mixers:
        separable = any(isinstance(module, SeparableSelfAttention) for module in model.modules())
        reason = ': separable self-attention weights tokens by their content only' if separable else ''
        raise ValueError(f'{type(model).__name__} has no decay to scale{reason}')
    # If none has a decay, the reason of the first is the error's.
    mixers = {name: mixer for name, mixer in mixers.items() if _has_decay(mixer)} or mixers
    for name, mixer in mixers.items():
        reason = mixer.why_not_scale(scale)
        if reason:
            raise ValueError(f'the decay of {name or type(mixer).__name__} cannot be scaled by {scale}: {reason}')
    for mixer in mixers.values():
        mixer.decay_scale = float(scale)


def _has_decay(mixer: nn.Module) -> bool:
    if isinstance(mixer, PolylineMixer):
        return mixer.paths != 'none'
    return not isinstance(mixer, EosMixer) or mixer.recurrence.has_decay
