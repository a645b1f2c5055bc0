"""Draw the architecture pictures of the model cards, with the sizes of the models that timm creates.

    python model_cards/draw_architectures.py [FOLDER]

Each picture has the stages of the networks, one block, and the token mixer.
"""
import sys
from pathlib import Path

import subquad  # noqa: F401  (before timm, with which it registers its models)

# isort: split
import timm
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

VARIANTS = {
    'ppma': ('tiny', 'small', 'base'),
    'mobilevitv2': ('050', '100', '200'),
    'myo': ('tiny', 'small', 'base'),
    'lcsm': ('tiny', 'small', 'base'),
    'rmt': ('tiny', 'base', 'large'),
    'mambavision': ('tiny', 'base', 'large'),
    'vmamba': ('tiny_s1l8', 'small_s2l15', 'base_s2l15'),
    'mlla': ('tiny', 'small', 'base'),
}
PREFIXES = {family: f"{'subquad_' * (family == 'mobilevitv2')}{family}_" for family in VARIANTS}
CONV, MIXER, DENSE, PLAIN = '#dbe7f3', '#f6d9b8', '#dcebd4', '#f2f2f2'
DARK, FIRST, SECOND = '#333333', '#c0504d', '#2f6fa8'


def box(axes, x, y, width, height, text, color, size=8):
    """Draw a box with a text, centered at (x, y)."""
    axes.add_patch(FancyBboxPatch((x - width / 2, y - height / 2), width, height, facecolor=color, edgecolor=DARK,
                                  boxstyle='round,pad=0,rounding_size=0.06', linewidth=0.8))
    axes.text(x, y, text, ha='center', va='center', fontsize=size)


def arrow(axes, start, end, color=DARK, bend=0.):
    """Draw an arrow between two points."""
    axes.annotate('', end, start, arrowprops=dict(arrowstyle='-|>', color=color, linewidth=1, shrinkA=0, shrinkB=0,
                                                  connectionstyle=f'arc3,rad={bend}'))


def chain(axes, y, steps, widths, height=0.62, gap=0.34, start=0.):
    """Draw boxes from left to right with arrows between them, and return the x of their centers."""
    centers, x = [], start
    for (text, color), width in zip(steps, widths):
        box(axes, x + width / 2, y, width, height, text, color)
        if centers:
            arrow(axes, (x - gap, y), (x, y))
        centers.append(x + width / 2)
        x += width + gap
    return centers


def description(stage):
    """Describe the blocks of a stage of a model in one or two lines."""
    if hasattr(stage, 'blocks') and not hasattr(stage.blocks[0], 'mixer'):
        return f"{len(stage.blocks)} convolutional block{'s' * (len(stage.blocks) > 1)}"
    if hasattr(stage, 'blocks'):
        kind = getattr(stage.blocks[0].mixer, 'attention', None)
        words = {'crisscross': 'criss-cross', None: ''}.get(kind, kind)
        return f"{len(stage.blocks)} block{'s' * (len(stage.blocks) > 1)}" + (f', {words}' if words else '')
    layers = [len(block.transformer) for block in stage if hasattr(block, 'transformer')]
    residuals = len(stage) - len(layers)
    return f'{residuals} MV2' + ''.join(f' + {n} layers' for n in layers)


def draw_stages(axes, family):
    """Draw the chain of stages, and below it a line of sizes for each variant."""
    models = {f'{PREFIXES[family]}{name}': timm.create_model(f'{PREFIXES[family]}{name}', device='meta')
              for name in VARIANTS[family]}
    first = next(iter(models.values()))
    side = first.pretrained_cfg['input_size'][1]
    steps = [('image', PLAIN), ('stem', CONV)]
    for n, info in enumerate(first.feature_info, 1):
        size = -(-side // info['reduction'])
        blocks = getattr(first.stages[n - 1], 'blocks', ())
        mixes = hasattr(blocks[0], 'mixer') if blocks else n > 2      # MobileViTv2 mixes tokens from stage 3 on
        steps.append((f'stage {n}\n{size} x {size}', MIXER if mixes else CONV))
    steps.append(('head', DENSE))
    widths = [0.9, 0.9] + [1.5 if len(first.feature_info) == 5 else 1.9] * len(first.feature_info) + [0.9]
    centers = chain(axes, 1.9, steps, widths)
    for row, (name, model) in enumerate(models.items()):
        y = 1.15 - 0.5 * row
        axes.text(0, y, name, fontsize=7.5, va='center', family='monospace')
        for x, info, stage in zip(centers[2:], model.feature_info, model.stages):
            axes.text(x, y, f"{info['num_chs']} channels\n{description(stage)}", fontsize=7, ha='center', va='center')
    axes.set(xlim=(-0.1, centers[-1] + 0.6), ylim=(-0.3, 2.4))
    axes.set_title(f'Stages, for images of {side} x {side}', fontsize=9, loc='left')


def draw_block(axes, mixer, title, before, after):
    """Draw one block, from left to right: residual branches before that of the mixer, the mixer's, and those after."""
    x, y, ends = 0.4, 0., []
    arrow(axes, (0, y), (x, y))
    for part in (*before, [('LayerNorm', PLAIN), (mixer, MIXER)], *after):
        start = x - 0.2
        for text, color in part:
            width = 1.05 if text == 'LayerNorm' else 1.45
            box(axes, x + width / 2, y, width, 0.62, text, color, 6.5 if len(after) == 1 else 5.5)
            arrow(axes, (x + width, y), (x + width + 0.25, y))
            x += width + 0.25
        axes.text(x + 0.1, y, '+', ha='center', va='center', fontsize=9,
                  bbox=dict(boxstyle='circle,pad=0.12', facecolor='white', edgecolor=DARK, linewidth=0.8))
        axes.plot([start, start, x + 0.1], [y, 0.65, 0.65], color=DARK, linewidth=1)
        arrow(axes, (x + 0.1, 0.65), (x + 0.1, y + 0.1))
        x += 0.2
        ends.append(x)
        arrow(axes, (x, y), (x + 0.4, y))
        x += 0.4
    axes.set(xlim=(-0.1, x + 0.1), ylim=(-0.7, 1.))
    axes.set_title(title, fontsize=9, loc='left')


def draw_mobilevitv2_block(axes):
    """Draw an inverted residual (MV2) and the block with transformer layers."""
    for y, name, steps in (
            (0.75, 'MV2', [('Conv 1 x 1\nto 2 C', CONV), ('DWConv\n3 x 3', CONV), ('Conv 1 x 1', CONV)]),
            (-0.35, 'block', [('DWConv\n3 x 3', CONV), ('Conv 1 x 1\nto C / 2', CONV),
                              ('layers: separable\nattention, FFN', MIXER), ('GroupNorm', PLAIN),
                              ('Conv 1 x 1\nto C', CONV)])):
        axes.text(-0.1, y, name, ha='right', va='center', fontsize=8)
        chain(axes, y, steps, [1.7 if color == MIXER else 1.15 for _, color in steps], gap=0.25)
    axes.text(4.1, 0.75, 'adds its input\nif the shapes match', fontsize=7, va='center')
    axes.set(xlim=(-0.75, 7.6), ylim=(-0.9, 1.2))
    axes.set_title('Blocks of C channels', fontsize=9, loc='left')


def draw_polyline(axes):
    """Draw the two polyline paths from one token to another."""
    rows, columns, query, key = 5, 8, (1, 1), (3, 6)
    for i in range(rows):
        for j in range(columns):
            color = {query: MIXER, key: DENSE}.get((i, j), 'white')
            axes.add_patch(Rectangle((j, rows - 1 - i), 1, 1, facecolor=color, edgecolor='#bbbbbb', linewidth=0.7))

    def center(i, j):
        return j + 0.5, rows - i - 0.5
    for corner, color, name in (((key[0], query[1]), FIRST, 'vertical, then horizontal: L'),
                                ((query[0], key[1]), SECOND, 'horizontal, then vertical: L~')):
        (x0, y0), (x1, y1), (x2, y2) = (center(*place) for place in (query, corner, key))
        axes.plot([x0, x1], [y0, y1], color=color, linewidth=1.8)
        arrow(axes, (x1, y1), (x2, y2), color)
        axes.plot([], [], color=color, label=name)
    for place, name, shift in ((query, 'query', 0.3), (key, 'key', -0.3)):
        x, y = center(*place)
        axes.text(x, y + shift, name, ha='center', va='center', fontsize=7)
    axes.legend(fontsize=7, loc='upper center', bbox_to_anchor=(0.5, -0.01), frameon=False, ncols=2)
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(-0.1, rows + 0.1), aspect='equal')
    axes.set_title('Attention decays by a factor in each step of the path', fontsize=9)


def draw_manhattan(axes):
    """Draw the decay around a query token, for two heads of stage 3 of RMT-T."""
    for x, head in ((0., 0), (8.5, 4)):
        decay = 1 - 2 ** (-2 - 6 * head / 8)
        for i in range(7):
            for j in range(7):
                axes.add_patch(Rectangle((x + j, i), 1, 1, facecolor=SECOND, edgecolor='#bbbbbb', linewidth=0.7,
                                         alpha=decay ** (abs(i - 3) + abs(j - 3))))
        axes.text(x + 3.5, -0.7, f'head {head} of 8: {decay:.3g} per step', ha='center', va='center', fontsize=7)
    axes.set(xlim=(-0.1, 15.6), ylim=(-1.1, 7.1), aspect='equal')
    axes.set_title('Attention decays by a constant in each row and column', fontsize=9)


def draw_mambavision_block(axes):
    """Draw the two kinds of blocks in windows."""
    for y, name, mixer in (
            (0.75, 'first half', 'selective\nscan'), (-0.35, 'second half', 'softmax\nattention')):
        steps = [('LayerNorm', PLAIN), (mixer, MIXER), ('LayerNorm', PLAIN), ('MLP', DENSE)]
        axes.text(-0.1, y, name, ha='right', va='center', fontsize=7)
        chain(axes, y, steps, [1.3] * len(steps), gap=0.25)
    axes.set(xlim=(-1.3, 6.2), ylim=(-0.9, 1.2))
    axes.set_title('Blocks of stages 3 and 4 (each mixer and MLP adds its input)', fontsize=9, loc='left')


def draw_windows(axes):
    """Draw a map of 5 x 7 tokens in windows of 3 x 3, with its padding, and the order of a scan."""
    for i in range(6):
        for j in range(9):
            color = '#dddddd' if i >= 5 or j >= 7 else MIXER if i < 3 and j < 3 else 'white'
            axes.add_patch(Rectangle((j, 5 - i), 1, 1, facecolor=color, edgecolor='#bbbbbb', linewidth=0.7))
    for row in (0, 3):
        for column in (0, 3, 6):
            axes.add_patch(Rectangle((column, 3 - row), 3, 3, fill=False, edgecolor=DARK, linewidth=1.4))
    for i in range(3):
        arrow(axes, (0.2, 5.5 - i), (2.8, 5.5 - i), FIRST)
    axes.set(xlim=(-0.1, 9.1), ylim=(-0.1, 6.1), aspect='equal')
    axes.set_title('Windows, their order of tokens, and padding (gray)', fontsize=9)


def draw_separable(axes):
    """Draw separable self-attention as a data flow."""
    box(axes, 0.6, 0, 1.2, 0.6, 'tokens', PLAIN, 6.5)
    for y, text, color in ((1.1, 'one logit each,\nsoftmax over tokens', MIXER), (0, 'keys', CONV),
                           (-1.1, 'ReLU(values)', CONV)):
        box(axes, 3.2, y, 2.8, 0.7, text, color, 6.5)
        arrow(axes, (1.2, 0), (1.8, y))
    box(axes, 6.4, 0.55, 2.2, 0.7, 'weighted sum:\ncontext vector', MIXER, 6.5)
    arrow(axes, (4.6, 1.1), (5.3, 0.7))
    arrow(axes, (4.6, 0), (5.3, 0.4))
    box(axes, 8.9, -0.5, 1.8, 0.7, 'product for\neach token', MIXER, 6.5)
    arrow(axes, (7.5, 0.55), (8.3, -0.15))
    arrow(axes, (4.6, -1.1), (8.0, -0.65))
    box(axes, 11.0, -0.5, 1.2, 0.7, 'linear', CONV, 6.5)
    arrow(axes, (9.8, -0.5), (10.4, -0.5))
    axes.set(xlim=(-0.1, 11.7), ylim=(-1.6, 1.6))
    axes.set_title('Separable self-attention', fontsize=9)


def draw_linear(axes):
    """Draw the data flow of MLLA's mixer."""
    box(axes, 0.6, 0, 1.2, 0.6, 'tokens', PLAIN, 6.5)
    for start, x, y, width, text, color in (
            ((1.2, 0), 3.0, 1.1, 2.2, 'linear, DWConv,\nSiLU: v', CONV),
            ((1.2, 0), 3.0, -1.1, 2.2, 'linear, SiLU:\ngate', CONV),
            ((4.1, 1.1), 6.3, 0., 2.8, 'linear, elu + 1,\nrotated: q and k', CONV),
            ((4.1, 1.1), 6.3, 1.1, 2.8, 'mean of k v\' over\nall tokens', MIXER),
            ((7.7, 1.1), 9.6, 0.55, 2.2, 'q (k v\'),\nnormalized', MIXER)):
        arrow(axes, start, (x - width / 2, y))
        box(axes, x, y, width, 0.7, text, color, 6.5)
    arrow(axes, (6.3, 0.35), (6.3, 0.75))
    arrow(axes, (7.7, 0.), (8.5, 0.35))
    box(axes, 9.6, -0.8, 2.2, 0.9, '(y + DWConv v)\ntimes gate,\nlinear', MIXER, 6.5)
    arrow(axes, (9.6, 0.2), (9.6, -0.35))
    arrow(axes, (4.1, -1.1), (8.5, -0.9))
    axes.set(xlim=(-0.1, 10.8), ylim=(-1.6, 1.6))
    axes.set_title('Linear attention in the block of Mamba', fontsize=9)


def draw_quadtree(axes):
    """Draw three levels of the tree over a map, with the sweeps up and down."""
    x = 0.
    centers = []
    for cells, cell in ((4, 0.8), (2, 1.2), (1, 1.6)):
        side = cells * cell
        for i in range(cells):
            for j in range(cells):
                color = MIXER if i < max(cells // 2, 1) and j < max(cells // 2, 1) else 'white'
                axes.add_patch(Rectangle((x + j * cell, side / 2 - (i + 1) * cell), cell, cell, facecolor=color,
                                         edgecolor='#999999', linewidth=0.8))
        centers.append((x, x + side))
        x += side + 1.7
    for (_, left), (right, _) in zip(centers, centers[1:]):
        arrow(axes, (left + 0.15, 0.35), (right - 0.15, 0.35), FIRST)
        arrow(axes, (right - 0.15, -0.35), (left + 0.15, -0.35), SECOND)
    for color, name in ((FIRST, 'up: eliminate children'), (SECOND, 'down: substitute parents')):
        axes.plot([], [], color=color, label=name)
    axes.legend(fontsize=7, loc='upper center', bbox_to_anchor=(0.5, -0.01), frameon=False, ncols=2)
    axes.set(xlim=(-0.2, x - 1.5), ylim=(-1.8, 1.8), aspect='equal')
    axes.set_title('One solve on the quad tree: every token reaches every other', fontsize=9)


def draw_recurrence(axes):
    """Draw the passes over columns and rows of a map, both in two directions."""
    for x, color, title, vertical in ((0., FIRST, 'columns', True), (6.5, SECOND, 'then rows', False)):
        for i in range(4):
            for j in range(4):
                fill = MIXER if (j if vertical else i) == 1 else 'white'
                axes.add_patch(Rectangle((x + j, 1 - i), 1, 1, facecolor=fill, edgecolor='#999999', linewidth=0.8))
            place = x + i + 0.5 if vertical else 1.5 - i
            for start, end, shift in ((-1.8, 1.8, -0.15), (1.8, -1.8, 0.15)):
                if vertical:
                    arrow(axes, (place + shift, start), (place + shift, end), color)
                else:
                    arrow(axes, (x + 2 + start, place + shift), (x + 2 + end, place + shift), color)
        axes.text(x + 2, -2.5, title, ha='center', va='center', fontsize=8)
    axes.set(xlim=(-0.2, 10.7), ylim=(-2.8, 2.3), aspect='equal')
    axes.set_title('m = o m + e i\', y = m\' s along every line, in both directions', fontsize=9)


def draw_scans(axes):
    """Draw the lines of the four scans: through the rows and through the columns, from either end."""
    for x, color, title, vertical in ((0., FIRST, 'rows, and back', False), (6.5, SECOND, 'columns, and back', True)):
        for i in range(4):
            for j in range(4):
                axes.add_patch(Rectangle((x + j, 1 - i), 1, 1, facecolor='white', edgecolor='#999999', linewidth=0.8))
        places = [(x + j + 0.5, 1.5 - i) for i in range(4) for j in range(4)]
        if vertical:
            places.sort(key=lambda place: (place[0], -place[1]))
        for start, end in zip(places, places[1:]):
            axes.annotate('', end, start, arrowprops=dict(arrowstyle='<|-|>', color=color, linewidth=0.8, shrinkA=1,
                                                          shrinkB=1, mutation_scale=5))
        axes.text(x + 2, -2.5, title, ha='center', va='center', fontsize=8)
    axes.set(xlim=(-0.2, 10.7), ylim=(-2.8, 2.3), aspect='equal')
    axes.set_title('h = exp(step A) h + step b u, y = c\' h + D u on four lines', fontsize=9)


# The name and the picture of the mixer of each family on the skeleton.
MIXERS = {'ppma': ('polyline path\nattention', draw_polyline), 'rmt': ('Manhattan\nattention', draw_manhattan),
          'vmamba': ('SS2D', draw_scans),
          'mlla': ('linear\nattention', draw_linear), 'myo': ('quad-tree\nsolve', draw_quadtree),
          'lcsm': ('linear\nrecurrence', draw_recurrence)}
# What follows the mixer in the blocks of a family; None for others.
CONVOLUTION = [('DWConv\n3 x 3', CONV)]
# Branches of a block before and after the mixer's.
AROUND = {
    'mlla': ((CONVOLUTION,), (CONVOLUTION, [('LayerNorm', PLAIN), ('MLP', DENSE)])),
    'vmamba': ((), ([('LayerNorm', PLAIN), ('MLP', DENSE)],)),
    None: ((CONVOLUTION,), ([('LayerNorm', PLAIN), ('FFN, with a\nDWConv 3 x 3', DENSE)],)),
}


def draw(family):
    """Draw the picture of a family: a matplotlib figure."""
    figure = Figure(figsize=(9.2, 5.2), layout='constrained')
    FigureCanvasAgg(figure)
    left = 1.15 if family == 'mobilevitv2' else 1.4
    grid = figure.add_gridspec(3, 2, height_ratios=(2.3, 1.5, 0.9), width_ratios=(left, 1))
    stages, block, mixer = (figure.add_subplot(grid[place]) for place in
                            ((0, slice(None)), (slice(1, None), 0), (slice(1, None), 1)))
    draw_stages(stages, family)
    if family == 'mobilevitv2':
        draw_mobilevitv2_block(block)
        draw_separable(mixer)
    elif family == 'mambavision':
        draw_mambavision_block(block)
        draw_windows(mixer)
    else:
        name, draw_mixer = MIXERS[family]
        draw_block(block, name, 'One block of a stage', *AROUND.get(family, AROUND[None]))
        draw_mixer(mixer)
    for axes in (stages, block, mixer):
        axes.axis('off')
    return figure


def main(folder):
    for family in VARIANTS:
        draw(family).savefig(Path(folder) / f'{family}_architecture.png', dpi=130)


if __name__ == '__main__':
    main(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
