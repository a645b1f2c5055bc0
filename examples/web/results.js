// What the outputs of a model mean, and how they are drawn over the picture.

const TOP = 5; // classes of a classifier
const LEAST = 0.3; // score of objects
const DRAWN = 800; // pixels of the longer side, below which boxes and text are drawn larger than the picture

// Each task has the past tense of its verb, the outputs that it needs, and a function that draws on a canvas over
// `picture`, {width, height}, and returns rows {label, value, color} with the largest value first. `size` is the size
// of the picture in the model's input.
export const TASKS = {
  classification: {done: 'classified', needs: [], show: classes},
  detection: {done: 'detected', needs: ['boxes', 'scores', 'labels'], show: objects},
  segmentation: {done: 'segmented', needs: ['labels'], show: segments},
};

// Return different colors [red, green, blue], those of examples/export/pictures.py.
export function palette(count) {
  return Array.from({length: count}, (_, n) => {
    const [hue, saturation, value] = [(n * 0.618) % 1, 0.9 - 0.3 * (n % 2), 1 - 0.25 * (n % 3)];
    return [5, 3, 1].map((offset) => {
      const k = (offset + hue * 6) % 6;
      return Math.trunc(255 * value * (1 - saturation * Math.max(0, Math.min(k, 4 - k, 1))));
    });
  });
}

const css = (color) => `rgb(${color})`;
const descending = (rows) => rows.sort((a, b) => b.value - a.value);

function softmax(logits) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const odds = Array.from(logits, (x) => Math.exp(x - most));
  const sum = odds.reduce((a, b) => a + b, 0);
  return odds.map((x) => x / sum);
}

const sigmoid = (logits) => Array.from(logits, (x) => 1 / (1 + Math.exp(-x)));

function classes({logits}, {labels, postprocessing}) {
  const probabilities = postprocessing.type === 'sigmoid' ? sigmoid : softmax;
  return descending(probabilities(logits.data).map((value, n) => ({label: String(labels[n] ?? n), value}))).slice(0, TOP);
}

function objects({boxes, scores, labels}, metadata, size, picture, canvas) {
  const colors = palette(metadata.labels.length).map(css);
  const rows = [];
  scores.data.forEach((value, n) => {
    if (value < LEAST) return;
    const place = (at, side) => Math.min(Math.max(boxes.data[4 * n + at], 0), size[side]) * picture[side] / size[side];
    const box = [place(0, 'width'), place(1, 'height'), place(2, 'width'), place(3, 'height')];
    const label = Number(labels.data[n]);
    rows.push({label: metadata.labels[label], value, color: colors[label], box});
  });
  drawBoxes(descending(rows), picture, canvas);
  return rows;
}

function drawBoxes(rows, {width, height}, canvas) {
  const zoom = Math.max(1, DRAWN / Math.max(width, height));
  [canvas.width, canvas.height] = [Math.round(width * zoom), Math.round(height * zoom)];
  const pen = canvas.getContext('2d');
  const unit = Math.max(canvas.width, canvas.height) / DRAWN;
  pen.lineWidth = 4 * unit;
  pen.font = `600 ${24 * unit}px system-ui, sans-serif`;
  pen.textBaseline = 'top';
  for (const {label, value, color, box} of [...rows].reverse()) { // the best on top
    const [left, top, right, bottom] = box.map((x) => x * zoom);
    const text = `${label} ${Math.round(100 * value)} %`;
    pen.strokeStyle = color;
    pen.strokeRect(left, top, right - left, bottom - top);
    const [wide, high] = [pen.measureText(text).width + 12 * unit, 32 * unit];
    const x = Math.max(0, Math.min(left, canvas.width - wide));
    const y = top >= high ? top - high : top;
    pen.fillStyle = color;
    pen.fillRect(x, y, wide, high);
    pen.fillStyle = 'black';
    pen.fillText(text, x + 6 * unit, y + 5 * unit);
  }
}

function segments({labels}, metadata, size, {width, height}, canvas) {
  const colors = palette(metadata.labels.length);
  const counts = new Array(colors.length).fill(0);
  const pixels = new Uint8ClampedArray(4 * width * height).fill(255);
  const stride = labels.dims.at(-1); // the model's input may be padded
  const nearest = (n, to, from) => Math.floor((n + 0.5) * from / to);
  for (let y = 0, at = 0; y < height; y++) {
    const line = nearest(y, height, size.height) * stride;
    for (let x = 0; x < width; x++, at += 4) {
      const label = Number(labels.data[line + nearest(x, width, size.width)]);
      counts[label] += 1;
      pixels.set(colors[label], at);
    }
  }
  [canvas.width, canvas.height] = [width, height];
  canvas.getContext('2d').putImageData(new ImageData(pixels, width, height), 0, 0);
  const rows = counts.map((count, n) => (
    {label: metadata.labels[n], value: count / (width * height), color: css(colors[n])}));
  return descending(rows.filter(({value}) => value));
}
