"""Draw the influences of Myo's layers."""
from pathlib import Path
from typing import Any, Dict, Sequence

from .pictures import draw_overlay, grid, overlay_bar, save, text


def draw(path: Path, names: Sequence[str], images, layers: Dict[str, Any], titles: Sequence[str], title: str) -> None:
    """Draw three rows per image: influences, edges and shares.

    The rows are the mean absolute influence of each token on the query token, which a cross marks; the edges of the
    finest level; and the share of the influence per tree level.

    Args:
        path: Output file.
        names: Image names.
        images: Tensor (B, 3, H, W) of values from 0 to 1.
        layers: `backbones.myo.Influence` by layer.
        titles: Titles of the layers.
        title: Title of the figure.

    Raises:
        UserError: The output file cannot be written.
    """
    page, axes = grid(3 * len(images), 1 + len(layers), images, title, width=1.5, labels=0.3)
    for n, image in enumerate(images):
        influences, edges, shares = axes[3 * n:3 * n + 3]
        pixels = image.permute(1, 2, 0)
        height, width = pixels.shape[:2]
        influences[0].imshow(pixels.numpy())
        influences[0].set_ylabel(text(names[n], 20), fontsize=8)
        for row in (edges, shares):
            row[0].axis('off')
        for row, label in zip((influences, edges, shares), ('influence', 'finest edges', 'share')):
            row[1].set_ylabel(label, fontsize=8)
        for column, layer in enumerate(layers.values(), 1):
            weights = layer.weights[n].abs().mean(0)
            draw_overlay(influences[column], pixels, weights)
            y, x = ((place + 0.5) * size / count - 0.5
                    for place, size, count in zip(layer.place, (height, width), weights.shape))
            influences[column].plot(x, y, 'w+', markersize=9, markeredgewidth=1.5)
            if layer.edges:
                draw_overlay(edges[column], pixels, layer.edges[0][n].abs().mean(0))
            else:
                edges[column].set_frame_on(False)
            _draw_shares(shares[column], layer.shares[n].tolist(), first=column == 1)
    for axis, name in zip(axes[0], ['image', *titles]):
        axis.set_title(text(name), fontsize=8)
    overlay_bar(page, axes[:, 1:], 'influence and edges')
    save(page, path)


def _draw_shares(axis, share: Sequence[float], first: bool) -> None:
    """Draw bars of the shares by level; only the first column has labels from 0 to 1."""
    axis.bar(range(len(share)), share, color='tab:blue')
    axis.set_ylim(0, 1)
    axis.set_yticks([0, 0.5, 1], ['0', '', '1'] if first else ['', '', ''], fontsize=6)
    axis.set_xticks(range(len(share)), [str(height) for height in range(len(share))], fontsize=6)
    axis.set_xlabel('height in the tree', fontsize=7)
