"""Small models of timm with random weights, for tests of `subquad.graft`."""
import timm
import torch

from subquad.backbones.mixers.grafted import NeutralDecay

SMALL = dict(depth=3, embed_dim=48, num_heads=4, num_classes=5)
# Name -> timm name, options, size of images.
MODELS = {
    'vit': ('vit_tiny_patch16_224', dict(SMALL, img_size=(48, 80)), (48, 80)),
    'without-prefix': ('vit_tiny_patch16_224', dict(SMALL, img_size=(48, 80), class_token=False, global_pool='avg'),
                       (48, 80)),
    'deit-distilled': ('deit_tiny_distilled_patch16_224', dict(SMALL, img_size=(48, 80)), (48, 80)),
    'dinov2-registers': ('vit_small_patch14_reg4_dinov2', dict(SMALL, img_size=(42, 70), init_values=0.5), (42, 70)),
    'dinov3-rope': ('vit_small_patch16_dinov3', dict(SMALL, img_size=(48, 80), init_values=0.5), (48, 80)),
    'eva02': ('eva02_tiny_patch14_224', dict(SMALL, img_size=(42, 70)), (42, 70)),
    'eva02-fused-bias': ('eva02_base_patch14_224', dict(SMALL, img_size=(42, 70)), (42, 70)),
    'qk-norm': ('vit_tiny_patch16_224', dict(SMALL, img_size=(48, 80), qk_norm=True, scale_attn_norm=True), (48, 80)),
    'rope': ('vit_small_patch16_rope_224', dict(SMALL, img_size=(48, 80), init_values=0.5), (48, 80)),
    'swin': ('swin_tiny_patch4_window7_224', dict(depths=(2, 1), num_heads=(2, 4), embed_dim=24, img_size=(56, 84),
                                                  num_classes=5), (56, 84)),
    'swin-padded': ('swin_tiny_patch4_window7_224', dict(
        depths=(2, 1), num_heads=(2, 4), embed_dim=24, img_size=(48, 72), window_size=5, num_classes=5), (48, 72)),
    'swinv2': ('swinv2_tiny_window8_256', dict(depths=(2, 1), num_heads=(2, 4), embed_dim=24, img_size=(64, 96),
                                               num_classes=5), (64, 96)),
}


def make(kind, **options):
    """A model whose weights are large enough that the position and the mask of attention show in its outputs."""
    name, own, size = MODELS[kind]
    torch.manual_seed(0)
    model = timm.create_model(name, **{**own, **options}).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3 if 'qkv' in key or '_proj' in key else 0.15)
            elif 'gamma' not in key:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model, torch.randn(2, 3, *size)


def start_decays(model):
    """Set the decays of a graft as after training."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, NeutralDecay):
                module.strength.normal_().add_(0.4)


def grads(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
