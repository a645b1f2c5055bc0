"""Draw how fast the memories of LCSM decay, and how long they last."""
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from ...common.cli import UserError
from .pictures import save, text

# Figures of more columns are too wide to read.
_COLUMNS = 40
_ROW_LABELS = {'rows': 'length\nalong rows', 'columns': 'length\nalong columns', 'raster': 'length\nalong the scan'}


class Memory(NamedTuple):
    """The memories of a layer.

    Attributes:
        decays: mean log decay per token of each head, (B, heads, h, w), or (1, heads, 1, 1) if all tokens decay alike.
        lengths: direction ('rows' and 'columns', or 'raster') -> tokens until the product of decays falls to 1/e, mean
            of both ways unless the scan has one, of the shape of `decays`.
        elements: mean log decay of each element of each head's memory, (heads, elements).
        stride: pixels of a token in each direction.
    """
    decays: Any
    lengths: Dict[str, Any]
    elements: Any
    stride: int


def memories(model, inputs) -> Dict[str, Memory]:
    """Return the memories of each layer of an LCSM for images (B, 3, H, W).

    Raises:
        ValueError: The model's recurrence has no decay for each token.
    """
    from ....backbones.mixers.eos_decay import memory_lengths
    found = {}
    mixers = model.mixers()
    strides = [info['reduction'] for info in model.feature_info]
    for name, (logs, elements) in model.state_decays(inputs).items():
        if mixers[name].mode != 'axis':
            reverse = False if mixers[name].mode == 'forward' else None
            lengths = {'raster': memory_lengths(logs.flatten(2), 2, reverse).reshape(logs.shape)}
        else:
            lengths = {'rows': memory_lengths(logs, 3), 'columns': memory_lengths(logs, 2)}
        found[name] = Memory(logs, lengths, elements, strides[int(name.split('.')[1])])
    return found


class _Column(NamedTuple):
    """A column of the figure: maps (B, h, w), decays of elements (heads, n), and labels of the heads."""
    title: str
    decays: Any
    lengths: Dict[str, Any]
    elements: Any
    heads: List[str]


def _columns(layers: Dict[str, Memory], titles: Sequence[str], heads: bool) -> List[_Column]:
    """Return one column for each layer, with geometric means over heads, or one for each head."""
    columns = []
    for title, (decays, lengths, elements, stride) in zip(titles, layers.values()):
        if heads:
            columns += [_Column(f'{title}\nhead {n}', decays[:, n].exp(), {key: x[:, n] for key, x in lengths.items()},
                                elements[n:n + 1].exp(), [str(n)]) for n in range(len(elements))]
        else:
            columns.append(_Column(f'{title}\n1 token = {stride} px', decays.mean(1).exp(),
                                   {key: x.log().mean(1).exp() for key, x in lengths.items()},
                                   elements.exp(), [str(n) for n in range(len(elements))]))
    if len(columns) > _COLUMNS:
        raise UserError(f'--heads gives {len(columns)} columns, at most {_COLUMNS} can be drawn; choose layers with '
                        '--layers')
    return columns


def draw(path: Path, names: Sequence[str], images, layers: Dict[str, Memory], titles: Sequence[str], title: str,
         heads: bool = False) -> None:
    """Draw maps of decays and memory lengths for each image, then charts of the decays of each head.

    All maps of decays have one color scale, and all maps of lengths another. If all tokens decay alike, there are only
    charts.

    Args:
        path: Output file.
        names: Image names.
        images: Tensor (B, 3, H, W) of values from 0 to 1.
        layers: `Memory` by layer.
        titles: Titles of the layers.
        title: Title of the figure.
        heads: Draw one column for each head instead of one for each layer.

    Raises:
        UserError: There are too many columns, or the output file cannot be written.
    """
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    columns = _columns(layers, titles, heads)
    constant = all(column.decays.shape == (1, 1, 1) for column in columns)
    shown = [] if constant else list(images)
    kinds = ['decay', *columns[0].lengths]
    width = min(max(14 / (1 + len(columns)), 1.5), 4)
    height = width * images.shape[2] / images.shape[3]
    chart = 0.55 + 0.11 * max(len(column.heads) for column in columns)
    ratios = [height] * len(kinds) * len(shown) + [chart] * 2
    page, axes = plt.subplots(
        len(ratios), 1 + len(columns), squeeze=False, layout='constrained', height_ratios=ratios,
        figsize=(max(width * (1 + len(columns)) + 1.5, 7), sum(ratios) + 0.25 * len(ratios) + 1.2))
    for n, image in enumerate(shown):
        _draw_image(axes[len(kinds) * n:len(kinds) * (n + 1)], image, names[n])
    _draw_maps(page, axes, columns, kinds, shown)
    _draw_charts(axes[-2:], columns)
    for axis, column in zip(axes[0, 1:], columns):
        axis.set_title(text(column.title), fontsize=8)
    note = ('All tokens of all images decay alike. ' if constant else '') + (
        'Decay: factor per token, geometric mean over the memory' + ('' if heads else ' and over heads') + '.\n'
        'Length: tokens until the product of decays falls to 1/e, beyond the border with the mean decay of the line.\n'
        'Charts: all elements of the memory of each head, their middle half and their mean.')
    page.suptitle(text(f'{title}\n{note}'), fontsize=10)
    save(page, path)


def _draw_image(axes, image, name: str) -> None:
    """Draw an image in the first row of the first column."""
    axes[0, 0].imshow(image.permute(1, 2, 0).numpy())
    axes[0, 0].set(xticks=[], yticks=[])
    axes[0, 0].set_ylabel(text(name, 20), fontsize=8)
    for axis in axes[1:, 0]:
        axis.axis('off')


def _draw_maps(page, axes, columns: Sequence[_Column], kinds: Sequence[str], images: Sequence[Any]) -> None:
    """Draw the maps of all images, with a color bar for each row of maps."""
    import torch
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize
    if not images:
        return
    maps = {kind: [column.decays if kind == 'decay' else column.lengths[kind] for column in columns] for kind in kinds}
    decays = torch.cat([x.double().flatten() for x in maps['decay']])
    lengths = torch.cat([x.flatten() for kind in kinds[1:] for x in maps[kind]])
    scales = {kind: ('viridis', Normalize(*_range(decays))) if kind == 'decay' else ('magma', LogNorm(*_range(lengths)))
              for kind in kinds}
    for n, image in enumerate(images):
        height, width = image.shape[1:]
        for row, kind in enumerate(kinds, len(kinds) * n):
            colors, norm = scales[kind]
            for axis, values in zip(axes[row, 1:], maps[kind]):
                axis.imshow(values[min(n, len(values) - 1)].numpy(), cmap=colors, norm=norm,
                            extent=(0, width, height, 0))
                axis.set(xticks=[], yticks=[])
            axes[row, 1].set_ylabel('decay' if kind == 'decay' else _ROW_LABELS[kind], fontsize=8)
            bar = page.colorbar(ScalarMappable(norm, colors), ax=axes[row, 1:], extend='both', aspect=12)
            bar.set_label('decay per token' if kind == 'decay' else 'tokens', fontsize=8)
            bar.minorticks_off()
            bar.set_ticks(**_ticks(norm.vmin, norm.vmax, logarithmic=kind != 'decay'), fontsize=7)


def _range(values) -> Tuple[float, float]:
    """Return the range of all values but the 1 % at each end, not empty."""
    ordered = values.sort().values
    low, high = (float(ordered[round(share * (len(ordered) - 1))]) for share in (0.01, 0.99))
    return (low, high) if high > low * (1 + 1e-6) else (low * 0.99, low * 1.01)


def _ends(values) -> Tuple[float, float]:
    return float(values.min()), float(values.max())


def _ticks(low: float, high: float, logarithmic: bool) -> Dict[str, Any]:
    """Return places and labels of ticks at the ends and in the middle, with three digits or more if they are close."""
    if high <= low * (1 + 1e-6):
        return dict(ticks=[low], labels=[f'{low:.3g}'])
    middle = (low * high) ** 0.5 if logarithmic else (low + high) / 2
    digits = 3
    while digits < 7 and len({f'{x:.{digits}g}' for x in (low, middle, high)}) < 3:
        digits += 1
    return dict(ticks=[low, middle, high], labels=[f'{x:.{digits}g}' for x in (low, middle, high)])


def _draw_charts(axes, columns: Sequence[_Column]) -> None:
    """Draw the decays of the elements of each head's memory, and below the lengths that belong to them."""
    import torch
    for axis in axes[:, 0]:
        axis.axis('off')
    for n, column in enumerate(columns):
        decays = column.elements.double().clamp(1e-35, 1 - 1e-6)
        for axis, values, label in ((axes[0, n + 1], decays, 'decay per token'),
                                    (axes[1, n + 1], -1 / decays.log(), 'length, tokens')):
            mean = decays.log().mean(1).exp()
            mean = mean if label == 'decay per token' else -1 / mean.log()
            ends = torch.quantile(values, torch.tensor([0, 0.25, 0.75, 1], dtype=values.dtype), 1)
            places = range(len(values))
            axis.hlines(places, ends[0], ends[3], color='tab:gray', linewidth=1)
            axis.hlines(places, ends[1], ends[2], color='tab:blue', linewidth=3)
            axis.plot(mean, places, 'o', color='black', markersize=3)
            axis.set_ylim(len(values) - 0.5, -0.5)
            step = 1 if len(values) <= 8 else 4
            axis.set_yticks(list(places)[::step], column.heads[::step], fontsize=6)
            axis.set_xlabel(label, fontsize=7)
            axis.set_xscale('linear' if label == 'decay per token' else 'log')
            axis.minorticks_off()
            axis.margins(x=0.2)
            axis.set_xticks(**_ticks(*_ends(values), logarithmic=label != 'decay per token'), fontsize=6)
    for axis in axes[:, 1]:
        axis.set_ylabel('head', fontsize=8)
