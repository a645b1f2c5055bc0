"""State dicts with the names of the authors of VMamba, written down from their code, not from our key maps."""

_PARTS = {'norm1': 'norm', 'mixer.in_proj': 'op.in_proj', 'mixer.conv': 'op.conv2d', 'mixer.norm': 'op.out_norm',
          'mixer.out_proj': 'op.out_proj'}
_SCAN = {'x_proj.weight': 'x_proj_weight', 'dt_proj.weight': 'dt_projs_weight', 'dt_bias': 'dt_projs_bias',
         'A_log': 'A_logs', 'D': 'Ds'}


def authors_name(key, vanilla):
    """Return the authors' key for a key of this package, of a dense backbone or of a classifier."""
    words, leaf = key.split('.'), key.rpartition('.')[2]
    if words[0] == 'stem':
        return f"patch_embed.{dict(conv1=0, norm1=2, conv2=5, norm2=7)[words[1]]}.{leaf}"
    if words[0] == 'head':
        return f"classifier.{dict(norm='norm', fc='head')[words[1]]}.{leaf}"
    if words[0] == 'output_norms':
        return f'outnorm{words[1]}.{leaf}'
    if words[2] == 'downsample':
        names = dict(norm='norm', reduction='reduction') if vanilla else dict(conv='1', norm='3')
        return f'layers.{int(words[1]) - 1}.downsample.{names[words[3]]}.{leaf}'
    block, part = f'layers.{words[1]}.blocks.{words[3]}', '.'.join(words[4:-1])
    if words[4:6] == ['mixer', 'scan']:
        return f"{block}.op.{_SCAN['.'.join(words[6:])]}"
    return f'{block}.{_PARTS.get(part, part)}.{leaf}'


def authors_state(model):
    """The state dict of a VMamba as its authors' files have it."""
    vanilla, state = any(key.endswith('reduction.weight') for key in model.state_dict()), {}
    for key, value in model.state_dict().items():
        if key.endswith(('.A_log', '.D')):
            value = value.reshape(-1, *value.shape[2:])
        elif key.endswith('.x_proj.weight'):
            value = value.reshape(4, -1, value.shape[1])
        state[authors_name(key, vanilla)] = value
    return state
