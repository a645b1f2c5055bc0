"""Random weights with the keys and shapes of files of the MobileViTv2 authors' library (cvnets)."""
import torch


def _unit(name, before, after, kernel=1, norm=True):
    """Yield keys and shapes of a convolution and its BatchNorm, in the order of the authors' files."""
    yield f'{name}.block.conv.weight', (after, before, kernel, kernel)
    if norm:
        yield from _pairs(f'{name}.block.norm', after, ('weight', 'bias', 'running_mean', 'running_var'))
        yield f'{name}.block.norm.num_batches_tracked', ()


def _linear(name, before, after):
    return (f'{name}.block.conv.weight', (after, before, 1, 1)), (f'{name}.block.conv.bias', (after,))


def _pairs(name, channels, parts=('weight', 'bias')):
    return ((f'{name}.{part}', (channels,)) for part in parts)


def encoder_entries(width):
    """Yield keys and shapes of the encoder of this width."""
    c = [int(width * n) for n in (32, 64, 128, 256, 384, 512)]
    yield from _unit('encoder.conv_1', 3, c[0], 3)
    for stage, block in ((1, 0), (2, 0), (2, 1), (3, 0), (4, 0), (5, 0)):
        before, name = c[stage - 1 + block], f'encoder.layer_{stage}.{block}.block'
        wide = 2 * before
        for part, *shape in (('exp_1x1', before, wide), ('conv_3x3', 1, wide, 3), ('red_1x1', wide, c[stage])):
            yield from _unit(f'{name}.{part}', *shape)
        if stage > 2:
            name, dim, depth = f'encoder.layer_{stage}.1', c[stage] // 2, {3: 2, 4: 4, 5: 3}[stage]
            yield from _unit(f'{name}.local_rep.0', 1, c[stage], 3)
            yield from _unit(f'{name}.local_rep.1', c[stage], dim, norm=False)
            for layer in (f'{name}.global_rep.{n}' for n in range(depth)):
                yield from _pairs(f'{layer}.pre_norm_attn.0', dim)
                yield from _linear(f'{layer}.pre_norm_attn.1.qkv_proj', dim, 1 + 2 * dim)
                yield from _linear(f'{layer}.pre_norm_attn.1.out_proj', dim, dim)
                yield from _pairs(f'{layer}.pre_norm_ffn.0', dim)
                yield from _linear(f'{layer}.pre_norm_ffn.1', dim, 2 * dim)
                yield from _linear(f'{layer}.pre_norm_ffn.3', 2 * dim, dim)
            yield from _pairs(f'{name}.global_rep.{depth}', dim)
            yield from _unit(f'{name}.conv_proj', dim, c[stage])


def ssd_entries(width):
    """Yield keys and shapes of the extra layers and heads of SSDLite."""
    c4, c5 = int(384 * width), int(512 * width)
    for level, before, after in ((64, c5, 256), (128, 256, 128), (256, 128, 128)):
        yield from _unit(f'extra_layers.os_{level}.dw_conv', 1, before, 3)
        yield from _unit(f'extra_layers.os_{level}.pw_conv', before, after)
    yield from _unit('extra_layers.os_-1.1', 128, 64, norm=False)
    for level, (before, after) in enumerate(((c4, 512), (c5, 256), (256, 256), (128, 128), (128, 128))):
        if before != after:
            yield from _unit(f'ssd_heads.{level}.proj_layer', before, after)
        yield from _unit(f'ssd_heads.{level}.loc_cls_layer.dw_conv', 1, after, 3)
        yield from _linear(f'ssd_heads.{level}.loc_cls_layer.pw_conv', after, 510)
    yield from _linear('ssd_heads.5.loc_cls_layer', 64, 340)


def segmenter_entries(width, kind):
    """Yield keys and shapes of the heads of DeepLabv3 (`kind='deeplabv3'`) or PSPNet."""
    c4, c5 = int(384 * width), int(512 * width)
    middle, r = max(c4 // 4, 128), c5 // 4 // 16 * 16
    yield from _unit('seg_head.aux_head.0', c4, middle, 3)
    yield from _linear('seg_head.aux_head.2', middle, 150)
    if kind == 'deeplabv3':
        for n, kernel in enumerate((1, 3, 3, 3)):
            yield from _unit(f'seg_head.aspp.aspp_layer.convs.{n}', c5, 512, kernel)
        yield from _unit('seg_head.aspp.aspp_layer.convs.4.aspp_pool.conv_1x1', c5, 512)
        yield from _unit('seg_head.aspp.aspp_layer.project', 2560, 512)
    else:
        for n in range(4):
            yield from _unit(f'seg_head.psp_layer.psp_branches.{n}.1', c5, r)
        yield from _unit('seg_head.psp_layer.fusion.0', c5 + 4 * r, 512, 3)
    yield from _linear('seg_head.classifier', 512, 150)


def authors_file(*parts):
    """Return random weights with these keys and shapes, which keep activations in range."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for key, shape in (entry for part in parts for entry in part):
        fan, centered = torch.Size(shape[1:]).numel(), 0.5 * key.endswith(('conv.weight', 'running_mean'))
        weights[key] = (torch.rand(shape, generator=generator) - centered) / fan ** 0.5 if shape else torch.tensor(7)
    return weights


# Texts in a key of cvnets and in transformers' key, in the order of its conversion script.
_TRANSFORMERS = (
    ('.block.', '.'), ('.conv.', '.convolution.'), ('.norm.', '.normalization.'),
    (r'conv_1.', 'mobilevitv2.conv_stem.'),
    *((f'layer_{n}.', f'mobilevitv2.encoder.layer.{n - 1}.layer.') for n in (1, 2)),
    ('.exp_1x1.', '.expand_1x1.'), ('.red_1x1.', '.reduce_1x1.'),
    *((f'layer_{n}.{theirs}', f'mobilevitv2.encoder.layer.{n - 1}.{ours}') for n, depth in ((3, 2), (4, 4), (5, 3))
      for theirs, ours in (
          ('0.', 'downsampling_layer.'), ('1.local_rep.0.', 'conv_kxk.'), ('1.local_rep.1.', 'conv_1x1.'),
          *((f'1.global_rep.{j}.', f'transformer.layer.{j}.') for j in range(depth)),
          (f'1.global_rep.{depth}.', 'layernorm.'), ('1.conv_proj.', 'conv_projection.'))),
    ('pre_norm_attn.0.', 'layernorm_before.'), ('pre_norm_attn.1.', 'attention.'),
    ('pre_norm_ffn.0.', 'layernorm_after.'), ('pre_norm_ffn.1.', 'ffn.conv1.'), ('pre_norm_ffn.3.', 'ffn.conv2.'),
    ('classifier.1.', 'classifier.'), ('seg_head.', 'segmentation_head.'), ('.aspp_layer.', '.'), ('.aspp_pool.', '.'))


def transformers_names(weights):
    """Rename a file of cvnets as transformers did for `apple/mobilevitv2-*`; it leaves out the auxiliary head."""
    renamed = {}
    for key, value in weights.items():
        if '.aux_head.' in key:
            continue
        name = key.removeprefix('encoder.')
        for theirs, ours in _TRANSFORMERS:
            name = name.replace(theirs, ours)
        renamed[name] = value
    return renamed
