"""Figures of panels: a photograph, then one row of panels for each layer."""
import io
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Union

from ...common.canvas import figure
from .panels import Chart, Panel, draw_panel, mark
from .pictures import text

# Width of a panel in inches, and room for its color bar, for a title of two lines, and for each further line.
_WIDTH, _BAR, _TITLE, _LINE = 1.9, 0.65, 0.62, 0.13
# A map that is taller than so many widths is drawn narrower.
_STEEPEST = 5


class Row(NamedTuple):
    """A row of panels with a label; an empty label for panels of the whole model."""
    label: str
    panels: List[Union[Panel, Chart]]


class Picture(NamedTuple):
    """What is drawn of one image."""
    name: str              # name of the image
    image: Any             # its pixels as the model sees them, (H, W, 3) from 0 to 1
    # the chosen pixel, as fractions of height and width; None if no panel belongs to one
    place: Optional[Tuple[float, float]]
    rows: List[Row]        # rows of panels
    predicted: str = ''    # the likeliest class and its probability; '' for a model without classes


def draw(pictures: Sequence[Picture], title: str) -> Any:
    """Return a matplotlib figure with all pictures, one below the other."""
    columns = 1 + max(len(row.panels) for picture in pictures for row in picture.rows)
    heights = [_TITLE + _LINE * max(panel.title.count('\n') - 1 for panel in row.panels)
               + _WIDTH * min(picture.image.shape[0] / picture.image.shape[1], _STEEPEST)
               for picture in pictures for row in picture.rows]
    page = figure(((_WIDTH + _BAR) * columns, sum(heights) + 0.2 + 0.2 * title.count('\n')))
    axes = page.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    page.suptitle(text(title), fontsize=9)
    first = 0
    for picture in pictures:
        _draw_picture(page, axes[first:first + len(picture.rows)], picture)
        first += len(picture.rows)
    return page


def _draw_picture(page: Any, axes: Any, picture: Picture) -> None:
    size = picture.image.shape[:2]
    photograph = axes[0, 0]
    photograph.imshow(picture.image, extent=(0, size[1], size[0], 0))
    caption = picture.predicted or 'what the model sees'
    photograph.set_title(f'{text(picture.name, 30)}, {size[0]} x {size[1]} pixels\n{text(caption, 40)}', fontsize=7.5)
    photograph.set_xticks([0, size[1]], ['0', str(size[1])], fontsize=6.5)
    photograph.set_yticks([0, size[0]], ['0', str(size[0])], fontsize=6.5)
    if picture.place is not None:
        mark(photograph, size, picture.place)
    for n, row in enumerate(picture.rows):
        for column, axis in enumerate(axes[n]):
            if 0 < column <= len(row.panels):
                draw_panel(page, axis, row.panels[column - 1], picture.image, picture.place)
            elif n or column:
                axis.axis('off')
        if row.label and isinstance(row.panels[0], Chart):           # a chart has the label of its own axis there
            axes[n, 1].annotate(text(row.label), (-0.35, 0.5), xycoords='axes fraction', rotation=90, fontsize=7.5,
                                ha='center', va='center')
        elif row.label:
            axes[n, 1].set_ylabel(text(row.label), fontsize=7.5)


def png(picture: Picture, dpi: int) -> bytes:
    """Return a picture as the bytes of a PNG file."""
    page, buffer = draw([picture], ''), io.BytesIO()
    page.savefig(buffer, format='png', dpi=dpi)
    return buffer.getvalue()
