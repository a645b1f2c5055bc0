"""One self-contained HTML file: the pictures, and maps that follow a pixel. It loads nothing from elsewhere."""
import base64
import html
import io
import json
import math
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import matplotlib
from PIL import Image

from ...common.cli import shown
from ...common.paths import write_text
from .figures import Picture, png
from .panels import SCALES, Panel, limits

_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1500px; padding: 0 1em; color: #111;
       background: #fff }
h1 { font-size: 1.3em } h2 { font-size: 1.1em; margin-top: 2em }
img.figure { max-width: 100%; border: 1px solid #ccc }
.maps { display: flex; flex-wrap: wrap; gap: 1em } figure { margin: 0; width: 250px }
figcaption { min-height: 2.9em; font-size: .85em; white-space: pre-line }
.map { position: relative; cursor: crosshair } .map canvas, .map img { width: 100%; display: block;
       image-rendering: pixelated }
.cross { position: absolute; width: 17px; height: 17px; margin: -8px; pointer-events: none;
         background: linear-gradient(#fff, #fff) center/17px 1.5px no-repeat,
                     linear-gradient(#fff, #fff) center/1.5px 17px no-repeat; filter: drop-shadow(0 0 1px #000)
                     drop-shadow(0 0 1px #000) }
.bar { height: 10px; margin-top: 4px } .ends { display: flex; justify-content: space-between; font-size: .8em }
label { margin-right: 1.5em }
"""
_SCRIPT = """
function bytes(text) { return Uint8Array.from(atob(text), c => c.charCodeAt(0)); }
const number = x => Math.abs(x) < 1e-12 ? '0' : Number(x.toPrecision(3)).toString();
for (const root of document.querySelectorAll('.viewer')) {
  const data = JSON.parse(root.querySelector('script').textContent);
  for (const panel of data.panels) { panel.levels = bytes(panel.levels); panel.colors = bytes(panel.colors); }
  const [rows, columns] = data.positions, [height, width] = data.size;
  const sliders = root.querySelectorAll('input'), area = height * width;
  function show(row, column) {
    sliders[0].value = row; sliders[1].value = column;
    const frame = row * columns.length + column;
    root.querySelectorAll('output').forEach((out, n) => { out.textContent = n ? columns[column] : rows[row]; });
    data.panels.forEach((panel, n) => {
      const canvas = root.querySelectorAll('canvas')[n], context = canvas.getContext('2d');
      const pixels = context.createImageData(width, height);
      for (let i = 0; i < area; i++) {
        const level = panel.levels[frame * area + i];
        for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = panel.colors[3 * level + c];
        pixels.data[4 * i + 3] = 255;
      }
      context.putImageData(pixels, 0, 0);
      const ends = canvas.closest('figure')
        .querySelectorAll('.ends span'), numbers = panel.limits[frame];
      ends.forEach((end, n) => { end.textContent = number(numbers[n]); });
    });
    for (const cross of root.querySelectorAll('.cross')) {
      cross.style.top = 100 * (rows[row] + .5) / height + '%';
      cross.style.left = 100 * (columns[column] + .5) / width + '%';
    }
  }
  const nearest = (list, x) => list.reduce((best, v, n) => Math.abs(v - x) < Math.abs(list[best] - x) ? n : best, 0);
  for (const map of root.querySelectorAll('.map')) map.addEventListener('click', event => {
    const box = map.getBoundingClientRect();
    show(nearest(rows, (event.clientY - box.top) / box.height * height - .5),
         nearest(columns, (event.clientX - box.left) / box.width * width - .5));
  });
  for (const slider of sliders) slider.addEventListener('input', () => show(+sliders[0].value, +sliders[1].value));
  show(...data.start);
}
"""


class Viewer(NamedTuple):
    """Maps of one layer that follow a pixel."""
    layer: str                   # label of the layer
    image: Any                   # pixels of the image, (H, W, 3) from 0 to 1
    rows: List[int]              # rows of the tokens that can be chosen
    columns: List[int]           # columns of these tokens
    start: Tuple[int, int]       # numbers of the row and column that are shown first
    frames: List[List[Panel]]    # for each of these tokens, row by row, its panels


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _image(pixels: Any) -> str:
    buffer = io.BytesIO()
    Image.fromarray((pixels * 255).round().astype('uint8')).save(buffer, 'JPEG', quality=85)
    return f'data:image/jpeg;base64,{_text(buffer.getvalue())}'


def _levels(panel: Panel) -> Tuple[bytes, Tuple[float, float, float]]:
    """Return a map as numbers of colors from 0 to 255, and the values of the first, middle and last color."""
    low, high, logarithmic = limits(panel)
    values, middle = panel.values.double().clamp(low, high), (low + high) / 2
    levels = (values - low) / (high - low)
    if logarithmic:
        levels, middle = (values / low).log() / math.log(high / low), math.sqrt(low * high)
    return bytes((levels * 255).round().byte().flatten().tolist()), (low, middle, high)


def _data(viewer: Viewer) -> Dict[str, Any]:
    """Return what the script needs: for each panel the color numbers of all frames, the limits and the colors."""
    panels = []
    for maps in zip(*viewer.frames):
        levels, ends = zip(*map(_levels, maps))
        colors = matplotlib.colormaps[SCALES[maps[0].scale][0]](range(256), bytes=True)[:, :3]
        panels.append(dict(levels=_text(b''.join(levels)), limits=ends, colors=_text(colors.tobytes())))
    return dict(panels=panels, positions=[viewer.rows, viewer.columns], start=viewer.start,
                size=list(viewer.frames[0][0].values.shape))


def _viewer(viewer: Viewer) -> str:
    # All frames of a panel have the same kind of scale, the most general that one of them has.
    scales = [next((kind for kind in ('signed', 'decades') if kind in {panel.scale for panel in maps}), maps[0].scale)
              for maps in zip(*viewer.frames)]
    viewer = viewer._replace(frames=[[panel._replace(scale=scale) for panel, scale in zip(frame, scales)]
                                     for frame in viewer.frames])
    height, width = viewer.frames[0][0].values.shape
    figures = ['<figure><figcaption>the image\nclick to choose the pixel</figcaption><div class="map"><img alt="image" '
               f'src="{_image(viewer.image)}"><div class="cross"></div></div></figure>']
    for panel in viewer.frames[0]:
        colors = matplotlib.colormaps[SCALES[panel.scale][0]](range(0, 256, 15), bytes=True)[:, :3].tolist()
        gradient = ', '.join(f'rgb({r},{g},{b})' for r, g, b in colors)
        aspect = viewer.image.shape[1] / viewer.image.shape[0]
        label = panel.label + (', logarithmic' if limits(panel)[2] else '')
        figures.append(
            f'<figure><figcaption>{html.escape(panel.title)}</figcaption><div class="map"><canvas width="{width}" '
            f'height="{height}" style="aspect-ratio: {aspect:.4f}"></canvas><div class="cross"></div></div>'
            f'<div class="bar" style="background: linear-gradient(to right, {gradient})"></div><div class="ends">'
            f'<span></span><span></span><span></span></div><div class="ends">{html.escape(label)}</div></figure>')
    sliders = ''.join(
        f'<label>{name} of the token <input type="range" min="0" max="{len(places) - 1}" step="1"> <output></output>'
        '</label>' for name, places in (('row', viewer.rows), ('column', viewer.columns)))
    return (f'<section class="viewer"><h2>{html.escape(viewer.layer)}</h2><p>{sliders}</p><div class="maps">'
            f'{"".join(figures)}</div><script type="application/json">{json.dumps(_data(viewer))}</script></section>')


def write_page(path: Path, pictures: Sequence[Picture], viewers: Sequence[Viewer], title: str, dpi: int) -> None:
    """Write the HTML file with the pictures, which are embedded as PNG, and the maps that follow a pixel.

    The first line of the title is the page's, and the others are a paragraph.
    """
    heading, _, notes = title.partition('\n')
    figures = [f'<h2>{html.escape(shown(picture.name))}</h2><img class="figure" alt="panels of '
               f'{html.escape(shown(picture.name))}" src="data:image/png;base64,{_text(png(picture, dpi))}">'
               for picture in pictures]
    moving = ''
    if viewers:
        moving = ('<h1>Maps that follow the pixel</h1><p>Click on the image or on a map, or move the sliders. The '
                  'numbers below each color bar are those of the chosen pixel; each pixel has its own range.</p>'
                  f'{"".join(map(_viewer, viewers))}<script>{_SCRIPT}</script>')
    page = (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(heading)}</title>'
            f'<style>{_STYLE}</style></head><body><h1>{html.escape(heading)}</h1><p>'
            f'{html.escape(notes).replace(chr(10), "<br>")}</p>{"".join(figures)}{moving}</body></html>\n')
    write_text(path, page)
