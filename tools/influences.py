"""Pictures of a Myo's layers: which tokens reach one of them, over what distance, and the edges that let them."""
from pathlib import Path
from typing import Dict, Sequence

from .visualize import overlay, save


def draw(path: Path, names: Sequence[str], images, layers: Dict[str, 'object'], titles: Sequence[str]) -> None:
    """Three rows for each image: what every token contributes to the one under the cross (mean over heads, of its
    size), the finest level's edges, and the contributions' share by the height at which the trees of two tokens meet.

    Args:
        path: of the picture.
        names: of the images.
        images: (B, 3, H, W) tensor of 0 to 1.
        layers: by name, a `backbones.myo.Influence`.
        titles: of the layers.

    Raises:
        UserError: the picture cannot be written.
    """
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    columns = 1 + len(layers)
    page, axes = plt.subplots(3 * len(images), columns, figsize=(1.45 * columns + 0.6, 4.2 * len(images) + 0.4),
                              layout='constrained', squeeze=False)
    for n, image in enumerate(images):
        influences, edges, shares = axes[3 * n:3 * n + 3]
        pixels = image.permute(1, 2, 0)
        height, width = pixels.shape[:2]
        influences[0].imshow(pixels.numpy())
        for row, label in zip((influences, edges, shares), (names[n], 'edges', 'share by height')):
            row[0].set_ylabel(label, fontsize=8)
        for row in (edges, shares):
            row[0].set_frame_on(False)
        for column, layer in enumerate(layers.values(), 1):
            weights = layer.weights[n].abs().mean(0)
            influences[column].imshow(overlay(pixels, weights))
            y, x = ((place + 0.5) * size / count - 0.5
                    for place, size, count in zip(layer.place, (height, width), weights.shape))
            influences[column].plot(x, y, 'w+', markersize=9, markeredgewidth=1.5)
            edges[column].set_frame_on(bool(layer.edges))
            if layer.edges:
                edges[column].imshow(overlay(pixels, layer.edges[0][n].abs().mean(0)))
            share = layer.shares[n].tolist()
            shares[column].bar(range(len(share)), share, color='tab:blue')
            shares[column].set_ylim(0, 1)
            shares[column].set_xticks(range(len(share)), [str(height) for height in range(len(share))], fontsize=6)
    for column, title in enumerate(['image', *titles]):
        axes[0, column].set_title(title, fontsize=8)
    for row in range(axes.shape[0]):
        for column, axis in enumerate(axes[row]):
            axis.set_yticks([])
            if row % 3 < 2 or not column:
                axis.set_xticks([])
    save(page, path)
