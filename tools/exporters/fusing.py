"""Fuse BatchNorm into the layers before it, as every runtime would do on loading."""
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

# Names of a layer and of its norm in one module: convolutions of MobileViTv2, convolutions and head of the skeleton.
PAIRS = (('conv', 'bn'), ('conv', 'norm'), ('proj', 'norm'))


def fuse_norms(model: nn.Module) -> nn.Module:
    """Fuse every BatchNorm of the package's own modules into the convolution or linear layer before it, in place.

    nn.Identity replaces the norm, or the activation that timm's BatchNormAct2d includes. Outputs change by rounding
    only.

    Raises:
        ValueError: the model is in training mode, where BatchNorm uses the statistics of the batch.
    """
    if model.training:
        raise ValueError('norms can be fused in evaluation mode only; call model.eval() first')
    for module in model.modules():
        for layer_name, norm_name in PAIRS:
            layer, norm = getattr(module, layer_name, None), getattr(module, norm_name, None)
            if type(norm) not in (nn.BatchNorm2d, BatchNormAct2d) or type(layer) not in (nn.Conv2d, nn.Linear):
                continue
            if norm.num_features != layer.weight.shape[0]:         # a norm before the layer, as in timm's DenseNet
                continue
            fuse = fuse_conv_bn_weights if isinstance(layer, nn.Conv2d) else fuse_linear_bn_weights
            layer.weight, layer.bias = fuse(layer.weight, layer.bias, norm.running_mean, norm.running_var, norm.eps,
                                            norm.weight, norm.bias)
            setattr(module, norm_name, norm.act if isinstance(norm, BatchNormAct2d) else nn.Identity())
    return model
