"""An empty figure of matplotlib, drawn without a window and without matplotlib's global state."""
from typing import Any, Tuple


def figure(size: Tuple[float, float]) -> Any:
    """Return an empty figure of a size in inches, (width, height)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    page = Figure(figsize=size, layout='constrained')
    FigureCanvasAgg(page)
    return page
