"""Orders of the cells of a grid as a sequence: raster, snake and Morton."""
import torch
from torch import Tensor

ORDERS = ('morton', 'snake', 'raster')


def grid_order(height: int, width: int, order: str) -> Tensor:
    """Return the raster index of each cell of the sequence, (height * width,), int64.

    'raster' reads row by row. 'snake' reads every second row backwards, so neighbors in the sequence are neighbors on
    the grid. 'morton' (z-order) sorts by the interleaved binary digits of row and column: if height and width are the
    same power of 2, each 4^l consecutive cells, from a multiple of 4^l on, form a square.

    Raises:
        ValueError: the order is unknown, or the grid has no cell.
    """
    if order not in ORDERS:
        raise ValueError(f"grid_order: order must be one of {', '.join(map(repr, ORDERS))}, got {order!r}")
    height, width = int(height), int(width)      # a tracer passes tensors
    if height < 1 or width < 1:
        raise ValueError(f'grid_order: height and width must be at least 1, got {height} and {width}')
    rows, columns = (x.flatten() for x in torch.meshgrid(torch.arange(height), torch.arange(width), indexing='ij'))
    if order == 'raster':
        return torch.arange(height * width)
    if order == 'snake':
        return rows * width + torch.where(rows % 2 == 0, columns, width - 1 - columns)
    code = torch.zeros_like(rows)
    for bit in range((max(height, width) - 1).bit_length()):
        code += (rows >> bit & 1) << 2 * bit + 1 | (columns >> bit & 1) << 2 * bit
    return code.argsort()
