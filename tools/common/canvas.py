"""Figures of matplotlib, drawn without a window and without matplotlib's global state."""
import warnings
from pathlib import Path
from typing import Any, Tuple

from ...backbones.weights import write_atomically
from .cli import UserError, shown


def figure(size: Tuple[float, float]) -> Any:
    """Return an empty figure of a size in inches, (width, height)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    page = Figure(figsize=size, layout='constrained')
    FigureCanvasAgg(page)
    return page


def save(page: Any, path: Path, dpi: int = 120) -> None:
    """Write a figure atomically, in the format of the file's suffix."""
    try:
        with warnings.catch_warnings(), write_atomically(path) as temporary:
            warnings.filterwarnings('ignore', 'Glyph')       # the font lacks letters of a name
            page.savefig(temporary, dpi=dpi, format=path.suffix[1:].lower())
    except OSError as error:
        raise UserError(f'cannot write {shown(path)}: {error.strerror or error}') from error
