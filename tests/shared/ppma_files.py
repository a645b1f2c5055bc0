"""State dicts with the names of the authors of PPMA and RMT, written down from their code, not from our key maps."""
import argparse
import re

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

_STEM = {'stem.conv1.conv': 0, 'stem.conv1.norm': 1, 'stem.conv2.conv': 3, 'stem.conv2.norm': 4,
         'stem.conv3.conv': 6, 'stem.conv3.norm': 7, 'stem.conv4.conv': 9, 'stem.conv4.norm': 10}
_PARTS = {'norm1': 'retention_layer_norm', 'norm2': 'final_layer_norm', 'pos': 'pos.conv',
          'ffn.dwconv': 'ffn.dwconv.conv',
          'mixer.q': 'retention.q_proj', 'mixer.k': 'retention.k_proj', 'mixer.v': 'retention.v_proj',
          'mixer.out': 'retention.out_proj', 'mixer.lepe': 'retention.lepe.conv',
          'mixer.decay.proj': 'retention.path_embed.dt_linear', 'mixer.decay': 'retention.path_embed'}


def authors_name(key):
    """Return the authors' key for a key of this package's PPMA classifier."""
    module, _, leaf = key.rpartition('.')
    words = key.split('.')
    if words[0] == 'stem':
        return f'patch_embed.proj.{_STEM[module]}.{leaf}'
    if words[:2] == ['head', 'aux_fc']:
        return f'aux_head.{leaf}'
    if words[0] == 'head':
        return {'fc': f'head.{leaf}'}.get(words[1], f'{words[1]}.{leaf}')
    if words[0] == 'output_norms':
        return f'outnorm{words[1]}.{leaf}'
    if words[2] == 'downsample':
        return f"layers.{int(words[1]) - 1}.downsample.{'reduction' if words[3] == 'conv' else 'norm'}.{leaf}"
    block = f'layers.{words[1]}.blocks.{words[3]}'
    part = '.'.join(words[4:-1])
    if part in ('ls1', 'ls2'):
        return f'{block}.gamma_{part[-1]}'
    return f'{block}.{_PARTS.get(part, part)}.{leaf}'


def authors_state(model):
    """The state dict of a PPMA or RMT as its authors' files have it."""
    state = {authors_name(key): value[None, None, None] if key.endswith('.gamma') else value
             for key, value in model.state_dict().items()}
    for number, stage in enumerate(model.stages):
        mixer = stage.blocks[0].mixer
        angles = 1 / 10000 ** torch.linspace(0, 1, mixer.head_dim // 2)
        state[f'layers.{number}.Relpos.angle'] = angles.repeat_interleave(2)
        if mixer.paths == 'rmt':
            heads = torch.arange(mixer.num_heads) / mixer.num_heads
            state[f'layers.{number}.Relpos.decay'] = torch.log(1 - 2 ** (-2 - model.heads[number][1] * heads))
    if mixer.paths == 'rmt':
        state = {re.sub(r'^outnorm(?=\d)', 'extra_norms.', key): value for key, value in state.items()}
    return state


def save_authors_file(model, path, average=None):
    """Write a classifier as the authors' training does: a pickle with its options and, optionally, averaged weights."""
    content = {'model': authors_state(model), 'epoch': 299, 'args': argparse.Namespace(lr=5e-4, output='x')}
    torch.save({**content, 'model_ema': authors_state(average)} if average else content, path)


def save_training_file(model, path, average=None, key='models'):
    """Write what the authors' main.py writes: raw weights are under `models`, in its checkpoint.pth under `model`."""
    optimizer = create_optimizer_v2(model, 'adamw', lr=1e-3, weight_decay=0.05)
    sum(weight.sum() for weight in model.parameters()).backward()
    optimizer.step()
    model.zero_grad()
    content = {
        key: authors_state(model),
        'optimizer': optimizer.state_dict(),
        'lr_scheduler': CosineLRScheduler(optimizer, 300, lr_min=1e-5, warmup_t=5).state_dict(),
        'epoch': 20,
        'scaler': torch.amp.GradScaler('cpu').state_dict(),
        'args': argparse.Namespace(lr=1e-3, opt_betas=None, output_dir='exp'),
        'max_accuracy': 81.5,
        'max_accuracy_ema': 81.7,
    }
    torch.save({**content, 'model_ema': authors_state(average)} if average else content, path)
