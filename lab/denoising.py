"""Denoising by one linear tree solve over the pixels in different orders: how much the order of a sequence matters.

In a tree with four children per node, a Morton sequence groups squares, and a snake or raster sequence groups strips of
rows. The weights of the solve depend neither on the picture nor on the position: there is one edge per level and head.
"""
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels import tree_solve
from subquad.kernels.trees import Tree, grid_order, tree_blocks
from subquad.tools.bench.metrics import metric
from subquad.tools.common.canvas import figure

ORDERS = ('morton', 'snake', 'raster', 'random')
SIDE = 16


class LinearDenoiser(nn.Module):
    """x = sum over heads h of g_h T_h^-1 y on the leaves, with empty inner nodes.

    T_h is symmetric and has one edge weight per level.

    Args:
        order: (N,) raster index of each element of the sequence.
        heads: Number of solves that are summed.
        arity: Number of children of a node.
    """

    def __init__(self, order: Tensor, heads: int = 16, arity: int = 4):
        super().__init__()
        self.register_buffer('order', order)
        self.tree = Tree.over_sequence(len(order), arity)
        level = torch.empty(len(self.tree), dtype=torch.int64)
        for n, generation in enumerate(reversed(self.tree.generations)):
            level[generation.nodes] = n
        self.register_buffer('level', level)
        first = torch.linspace(-2, 2, heads)[:, None].exp() * torch.linspace(1, 2, len(self.tree.generations))
        self.edges = nn.Parameter(-first)                                        # (heads, levels)
        self.gain = nn.Parameter(torch.full((heads,), 1 / heads))

    def forward(self, y: Tensor) -> Tensor:
        """Denoise (n, N) pixels in raster order."""
        a, b, c = tree_blocks(self.tree, self.edges[:, self.level, None, None], 'symmetric', rho=0.999)
        u = F.pad(y[:, self.order], (0, len(self.tree) - y.shape[1])).T           # one right-hand side per picture
        x = tree_solve(self.tree, a, b, c, u[:, None])[:, :len(self.order), 0]     # (heads, N, n)
        return torch.einsum('h,hin->ni', self.gain, x)[:, self.order.argsort()]


def denoise(train: Tensor, test: Tensor, order: str, seed: int, noise: float = 1.0, steps: int = 50
            ) -> Tuple[float, Tensor]:
    """Fit a denoiser to noisy pictures and test it on others.

    Args:
        train: (n, SIDE, SIDE) clean pictures with mean 0 and variance 1.
        test: The same for the test.
        order: One of ORDERS.
        seed: Seed of the noise and of the random order.
        noise: Standard deviation of the noise.
        steps: Steps of Adam, each on all of `train`.

    Returns:
        The mean squared error on `test` as a share of the pictures' power, and (2, n, SIDE, SIDE): the noisy and the
        cleaned pictures of `test`.
    """
    generator = torch.Generator().manual_seed(seed)
    index = (torch.randperm(SIDE * SIDE, generator=generator) if order == 'random' else grid_order(SIDE, SIDE, order))
    model = LinearDenoiser(index)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    clean, unseen = (x.flatten(1) for x in (train, test))
    noisy, unseen_noisy = (x + noise * torch.randn(x.shape, generator=generator) for x in (clean, unseen))
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(noisy), clean).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        cleaned = model(unseen_noisy)
        share = (F.mse_loss(cleaned, unseen) / unseen.square().mean()).item()
    return share, torch.stack([unseen_noisy, cleaned]).view(2, -1, SIDE, SIDE)


@lru_cache(maxsize=1)
def _digits() -> Tensor:
    """The digits, (4000, 28, 28); cached, because reading them takes longer than a fit."""
    from subquad.tools.data.image_sets import mnist5k_arrays
    return torch.from_numpy(mnist5k_arrays('train')[0]).float()


def pictures(kind: str, seed: int, count: int = 128) -> List[Tensor]:
    """Make pictures for training and as many for the test, each normalized to mean 0 and variance 1.

    Args:
        kind: 'fields' (Gaussian fields with a 1 / f^2 spectrum) or 'mnist5k' (handwritten digits).
        seed: Seed of the fields, or of the choice of digits.
        count: Number of pictures in each part.

    Returns:
        Two tensors (count, SIDE, SIDE).
    """
    if kind == 'fields':
        from .fields import random_fields
        images = torch.from_numpy(random_fields(2 * count, SIDE, SIDE, seed=seed))
    else:
        images = _digits()
        images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:2 * count]]
        images = F.interpolate(images[:, None], size=(SIDE, SIDE), mode='area')[:, 0]
        images = images - images.mean((1, 2), keepdim=True)
        images = images / images.std((1, 2), keepdim=True)
    return [images[:count], images[count:]]


def denoising(repeats: int, *, kinds: Sequence[str] = ('fields', 'mnist5k'), orders: Sequence[str] = ORDERS,
              max_error_ratio: float = 0.95) -> Dict[str, Any]:
    """Measure the error of denoisers in each order.

    Args:
        repeats: Number of seeds.
        kinds: Kinds of pictures.
        orders: Orders, with 'morton' and 'snake' among them.
        max_error_ratio: Target: error in Morton order over error in snake order, for the worst seed.
    """
    results: List[Dict[str, Any]] = []
    for kind in kinds:
        errors = {order: [denoise(*pictures(kind, seed), order, seed)[0] for seed in range(repeats)]
                  for order in orders}
        worst = max(m / s for m, s in zip(errors['morton'], errors['snake']))
        results += [metric(f'{kind}: error in Morton order / snake order, worst seed', worst, '',
                           at_most=max_error_ratio),
                    *(metric(f'{kind}: error in {order} order', sum(e) / len(e), '') for order, e in errors.items())]
    return {'times_ms': {}, 'peak_mb': {}, 'floor': None, 'metrics': results}


def draw(record: Dict[str, Any], path: Path) -> None:
    """Draw four pictures of each kind: clean, noisy, and cleaned in Morton and in snake order, with their errors."""
    kinds, shown = ('fields', 'mnist5k'), 4
    values = {m['name']: m['value'] for m in record['metrics']}
    page = figure((9, 5))
    axes = page.subplots(4, shown * len(kinds))
    for n, kind in enumerate(kinds):
        train, test = pictures(kind, 0)
        cleaned = {order: denoise(train, test, order, 0)[1] for order in ('morton', 'snake')}
        rows = [('clean', test), ('noisy', cleaned['morton'][0])]
        rows += [(f"{order}, error {values[f'{kind}: error in {order} order']:.3f}", images)
                 for order, (_, images) in cleaned.items()]
        for row, (title, images) in enumerate(rows):
            for column in range(shown):
                axis = axes[row, n * shown + column]
                drawn = axis.imshow(images[column], cmap='gray', vmin=-2, vmax=2)
                axis.set(xticks=[], yticks=[])
            axes[row, n * shown].set_title(f'{kind}: {title}' if row == 0 else title, fontsize=9, loc='left')
    page.suptitle('Denoising by one linear tree solve, in Morton and in snake order', fontsize=10)
    bar = page.colorbar(drawn, ax=axes, shrink=0.6, extend='both')
    bar.set_label('value, in standard deviations of a clean picture', fontsize=8)
    page.savefig(path, dpi=110)
