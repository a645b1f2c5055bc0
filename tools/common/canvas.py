"""An empty figure of matplotlib, drawn without a window and without matplotlib's global state."""
from typing import Any, Tuple

from .cli import UserError


def figure(size: Tuple[float, float]) -> Any:
    """Return an empty figure of a size in inches, (width, height).

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError('pictures need matplotlib: pip install matplotlib') from error
    page = Figure(figsize=size, layout='constrained')
    FigureCanvasAgg(page)
    return page
