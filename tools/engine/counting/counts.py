"""Count parameters and MACs of timm models, in the three ways that `subquad stats --help` explains."""
import math
from typing import Any, Callable, Dict, Optional

import torch
from torch.utils.flop_counter import FlopCounterMode

from ...common.cli import UserError
from ..zoo import create, default_size, size_options

# Reported by the authors at the models' own input sizes: millions of parameters, GMACs or None, ImageNet-1k top-1.
REPORTED = {'ppma_tiny': (14, 2.7, 82.6), 'ppma_small': (27, 4.9, 84.2), 'ppma_base': (54, 10.6, 85.0),
            'rmt_tiny': (14, 2.5, 82.4), 'rmt_small': (27, 4.5, 84.1), 'rmt_base': (54, 9.7, 85.0),
            'rmt_large': (95, 18.2, 85.5),
            'mlla_tiny': (25, 4.2, 83.5), 'mlla_small': (43, 7.3, 84.4), 'mlla_base': (96, 16.2, 85.3),
            'mambavision_tiny': (31.8, 4.4, 82.3), 'mambavision_tiny2': (35.1, 5.1, 82.7),
            'mambavision_small': (50.1, 7.5, 83.3), 'mambavision_base': (97.7, 15.0, 84.2),
            'mambavision_large': (227.9, 34.9, 85.0), 'mambavision_large2': (241.5, 37.5, 85.3),
            'mambavision_large2_512': (241.5, 196.3, 87.3), 'mambavision_large3_256': (739.6, 122.3, 87.3),
            'mambavision_large3_512': (739.6, 489.1, 88.1),
            'vim_tiny': (7, None, 76.1), 'vim_tiny_stride8': (7, None, 78.3), 'vim_small': (26, None, 80.5),
            'vim_small_stride8': (26, None, 81.6), 'vim_base': (98, None, 81.9),
            'vmamba_tiny_s1l8': (30, 4.9, 82.6), 'vmamba_tiny_s2l5': (31, 4.9, 82.5),
            'vmamba_small_s2l15': (50, 8.7, 83.6), 'vmamba_small_s1l20': (49, 8.6, 83.3),
            'vmamba_base_s2l15': (89, 15.4, 83.9), 'vmamba_base_s1l20': (87, 15.2, 83.8),
            'vmamba_vanilla_tiny': (23, 5.6, 82.2), 'vmamba_vanilla_small': (44, 11.2, 83.5),
            'vmamba_vanilla_base': (76, 18.0, 83.7),
            'subquad_mobilevitv2_050': (1.4, 0.5, 70.2), 'subquad_mobilevitv2_075': (2.9, 1.0, 75.6),
            'subquad_mobilevitv2_100': (4.9, 1.8, 78.1), 'subquad_mobilevitv2_125': (7.5, 2.8, 79.6),
            'subquad_mobilevitv2_150': (10.6, 4.0, 80.4), 'subquad_mobilevitv2_175': (14.3, 5.5, 80.8),
            'subquad_mobilevitv2_200': (18.5, 7.2, 81.2)}
# Operators that multiply with weights. All other operators that a flop counter sees multiply tokens with tokens.
_WITH_WEIGHTS = ('convolution', '_convolution', 'mm', 'addmm')
# fvcore's multiply-adds per element of the input, or per element of the output for a resizing.
_NORMS = {'_native_batch_norm_legit': 2, 'native_group_norm': 5, 'native_layer_norm': 5, 'upsample_bilinear2d': 4}


def count(name: str, height: Optional[int] = None, width: Optional[int] = None, /, **options: Any) -> Dict[str, Any]:
    """Count the parameters of a model and its MACs for one image.

    The model runs on the meta device, which needs neither memory nor weights.

    Args:
        name: timm model name.
        height, width: Size of the image (default: the model's own input size).
        options: Options of the model. (An option `width` is not the image's: the arguments above are positional.)

    Returns:
        {'model', 'size', 'options', 'parameters', 'macs', 'macs_without_attention', 'macs_with_norms',
        'reported_by_authors'}.
    """
    height, width = (height or default_size(name)[0]), (width or default_size(name)[1])
    model = create(name, device='meta', **{**size_options(name, (height, width)), **options})
    channels = model.pretrained_cfg['input_size'][0]
    try:
        counts = three_counts(model, lambda images: model(torch.empty(images, channels, height, width, device='meta')))
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f'{name} at {height}x{width}: {str(error).splitlines()[0]}') from error
    return dict(model=name, size=[height, width], options=options,
                parameters=sum(p.numel() for p in model.parameters()), **counts,
                reported_by_authors={key: value for key, value in zip(
                    ('parameters_M', 'gmacs', 'top1'), REPORTED.get(name, ())) if value is not None})


def three_counts(model: Any, forward: Callable[[int], Any]) -> Dict[str, int]:
    """Count `macs`, `macs_without_attention` and `macs_with_norms` of one image. The model stays in training mode.

    Args:
        model: An nn.Module.
        forward: Function that runs the model on a given number of images.
    """
    def flops_of(images: int, **options: Any) -> Dict[str, int]:
        with torch.no_grad(), FlopCounterMode(display=False, **options) as counter:
            forward(images)
        return {str(op).split('.')[-1]: n for op, n in counter.get_flop_counts().get('Global', {}).items()}

    model.eval()
    flops = flops_of(1)
    # Norms are counted in training mode, which does not fold them into convolutions; BatchNorm of a single pixel then
    # needs two images.
    for module in model.modules():
        module.training = True
    norms = flops_of(2, custom_mapping={getattr(torch.ops.aten, op): _elements(n) for op, n in _NORMS.items()})
    weights = sum(n for op, n in flops.items() if op in _WITH_WEIGHTS) // 2
    return dict(macs=sum(flops.values()) // 2, macs_without_attention=weights,
                macs_with_norms=weights + sum(norms.get(op, 0) for op in _NORMS) // 2)


def _elements(each: int) -> Callable[..., int]:
    """A formula for torch's flop counter: `each` per element of the input or the output, whichever is larger."""
    def formula(x, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        shapes = [x] + ([out_shape] if isinstance(out_shape, (tuple, list)) else [])
        return each * max(math.prod(shape) for shape in shapes if all(isinstance(n, int) for n in shape))
    return formula
