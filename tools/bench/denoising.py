"""Denoising by a single linear tree solve over the pixels in one order or another: what the order of a sequence is
worth.

A tree of four children over a Morton sequence groups squares, over a snake or raster sequence strips of a row. The
weights of the solve depend on neither the picture nor the place: one edge a level and head.
"""
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import tree_solve
from ...kernels.trees import Tree, grid_order, tree_blocks
from ..common.cli import UserError
from .records import figure

ORDERS = ('morton', 'snake', 'raster', 'random')
SIDE = 16


class LinearDenoiser(nn.Module):
    """x = sum over heads of g_h (T_h^-1 y) on the leaves, inner nodes empty; T_h symmetric, an edge a level and head.

    Args:
        order: (N,) raster index of each element of the sequence.
        heads: solves that are summed.
        arity: children of a node.
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
        """(n, N) noisy pixels in raster order -> (n, N)."""
        a, b, c = tree_blocks(self.tree, self.edges[:, self.level, None, None], 'symmetric', rho=0.999)
        u = F.pad(y[:, self.order], (0, len(self.tree) - y.shape[1])).T           # pictures are right-hand sides
        x = tree_solve(self.tree, a, b, c, u[:, None])[:, :len(self.order), 0]     # (heads, N, n)
        return torch.einsum('h,hin->ni', self.gain, x)[:, self.order.argsort()]


def denoise(train: Tensor, test: Tensor, order: str, seed: int, noise: float = 1.0, steps: int = 50
            ) -> Tuple[float, Tensor]:
    """Mean squared error on `test` of a denoiser fitted to `train`, as a share of the pictures' power; and the noisy
    and cleaned pictures of `test`, (2, n, SIDE, SIDE).

    Args:
        train, test: (n, SIDE, SIDE) clean pictures of mean 0, variance 1.
        order: one of ORDERS.
        seed: of the noise, and of the random order.
        noise: its standard deviation.
        steps: of Adam, on all of `train` at once.
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
    """(4000, 28, 28), kept: reading them takes longer than a fit."""
    from ..data.image_sets import mnist5k_arrays
    return torch.from_numpy(mnist5k_arrays('train')[0]).float()


def pictures(kind: str, seed: int, count: int = 128) -> List[Tensor]:
    """`count` pictures to train and as many to test, (count, 16, 16), each brought to mean 0 and variance 1.

    Args:
        kind: 'fields', Gaussian with a spectrum of 1 / f^2, or 'mnist5k', handwritten digits.
        seed: of the fields, or of which digits.
    """
    if kind == 'fields':
        from ..data.fields import random_fields
        images = torch.from_numpy(random_fields(2 * count, SIDE, SIDE, seed=seed))
    else:
        images = _digits()
        images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:2 * count]]
        images = F.interpolate(images[:, None], size=(SIDE, SIDE), mode='area')[:, 0]
        images = images - images.mean((1, 2), keepdim=True)
        images = images / images.std((1, 2), keepdim=True)
    return [images[:count], images[count:]]


def denoising(repeats: int, *, kinds: Sequence[str] = ('fields', 'mnist5k'), orders: Sequence[str] = ORDERS,
              ratio: float = 0.95) -> Dict[str, Any]:
    """Errors of denoisers in each order.

    Args:
        repeats: seeds.
        kinds: of pictures.
        orders: 'morton' and 'snake' among them.
        ratio: target, at most: Morton's error over snake's, the worst of the seeds.
    """
    results: List[Dict[str, Any]] = []
    for kind in kinds:
        errors = {order: [denoise(*pictures(kind, seed), order, seed)[0] for seed in range(repeats)]
                  for order in orders}
        worst = max(m / s for m, s in zip(errors['morton'], errors['snake']))
        results += [figure(f"{kind}, Morton's error over snake's, worst seed", worst, '', at_most=ratio),
                    *(figure(f'{kind}, error, {order}', sum(e) / len(e), '') for order, e in errors.items())]
    return {'times_ms': {}, 'peak_mb': {}, 'floor': None, 'figures': results}


def draw(record: Dict[str, Any], path: Path) -> None:
    """Four pictures of each kind: clean, noisy, and cleaned in Morton and in snake order, with the record's errors.

    Raises:
        UserError: the picture cannot be written, or matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError('the picture needs matplotlib: pip install "subquad[demo]"') from error
    kinds, shown = ('fields', 'mnist5k'), 4
    values = {f['name']: f['value'] for f in record['figures']}
    page = Figure(figsize=(9, 5), layout='constrained')
    FigureCanvasAgg(page)
    axes = page.subplots(4, shown * len(kinds))
    for n, kind in enumerate(kinds):
        train, test = pictures(kind, 0)
        cleaned = {order: denoise(train, test, order, 0)[1] for order in ('morton', 'snake')}
        rows = [('clean', test), ('noisy', cleaned['morton'][0])]
        rows += [(f"{order}, error {values[f'{kind}, error, {order}']:.3f}", cleaned[order][1]) for order in cleaned]
        for row, (title, images) in enumerate(rows):
            for column in range(shown):
                axis = axes[row, n * shown + column]
                drawn = axis.imshow(images[column], cmap='gray', vmin=-2, vmax=2)
                axis.set(xticks=[], yticks=[])
            axes[row, n * shown].set_title(f'{kind}: {title}' if row == 0 else title, fontsize=9, loc='left')
    page.suptitle('Noise taken out by one linear tree solve, in Morton and in snake order', fontsize=10)
    bar = page.colorbar(drawn, ax=axes, shrink=0.6, extend='both')
    bar.set_label('value, in standard deviations of a clean picture', fontsize=8)
    try:
        page.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}') from error
