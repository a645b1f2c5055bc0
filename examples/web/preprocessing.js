// Prepare pixels for a model as in training. A canvas resizes with another filter than Pillow and OpenCV, and its
// pixels differ by several percent; the functions here give the same bytes as these. Where Pillow 13 resizes columns
// before lines, some bytes differ.

const FILTERS = {
  bilinear: {support: 1, weight: (x) => Math.max(0, 1 - Math.abs(x))},
  bicubic: {support: 2, weight: cubic},
};
const PRECISION = 22; // bits of Pillow's fixed-point weights

function cubic(x) {
  const a = -0.5;
  x = Math.abs(x);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

// Return for each output pixel along one side the first input pixel and the weights of it and its successors.
function weights(from, to, filter) {
  const scale = from / to;
  const stretch = Math.max(scale, 1); // a smaller picture is averaged over all pixels
  const support = filter.support * stretch;
  return Array.from({length: to}, (_, n) => {
    const center = (n + 0.5) * scale;
    const first = Math.max(0, Math.trunc(center - support + 0.5));
    const end = Math.min(from, Math.trunc(center + support + 0.5));
    const raw = Array.from({length: end - first}, (_, k) => filter.weight((first + k - center + 0.5) / stretch));
    const sum = raw.reduce((a, b) => a + b, 0);
    const fixed = raw.map((w) => (w / sum) * 2 ** PRECISION);
    return {first, weights: Int32Array.from(fixed, (w) => Math.trunc(w < 0 ? w - 0.5 : w + 0.5))};
  });
}

// Resize along one side: `lines` lines of `from` pixels become lines of `to` pixels. `step` and `line` are the distances
// of neighbours on a line and of lines.
function resizeSide(pixels, {from, to, lines, step, line}, result, resultStep, resultLine, filter) {
  weights(from, to, filter).forEach(({first, weights: row}, n) => {
    for (let y = 0; y < lines; y++) {
      let sum = 1 << (PRECISION - 1);
      let at = y * line + first * step;
      for (let k = 0; k < row.length; k++, at += step) sum += pixels[at] * row[k];
      result[y * resultLine + n * resultStep] = sum >> PRECISION; // clamped to 0..255 by the array
    }
  });
  return result;
}

// Resize one plane {width, height, pixels: Uint8ClampedArray}.
function resizePlane(plane, width, height, filter) {
  let {pixels} = plane;
  if (width !== plane.width) {
    pixels = resizeSide(pixels, {from: plane.width, to: width, lines: plane.height, step: 1, line: plane.width},
      new Uint8ClampedArray(width * plane.height), 1, width, filter);
  }
  if (height !== plane.height) {
    pixels = resizeSide(pixels, {from: plane.height, to: height, lines: width, step: width, line: 1},
      new Uint8ClampedArray(width * height), width, 1, filter);
  }
  return {width, height, pixels};
}

// Return for each output pixel along one side both neighbors and their weights in OpenCV's 11 bits.
function neighbors(from, to) {
  return Array.from({length: to}, (_, n) => {
    const place = Math.fround(((n + 0.5) * from) / to - 0.5);
    const first = Math.floor(place);
    const clip = (x) => Math.min(Math.max(x, 0), from - 1); // the pixels at the border repeat beyond it
    const part = [1 - (place - first), place - first].map((w) => roundHalfEven(2048 * w));
    return [clip(first), clip(first + 1), ...part];
  });
}

// Resize one plane by two neighbors a side, as OpenCV does, which does not average when the picture shrinks.
function resizePlaneLikeOpenCv(plane, width, height) {
  const columns = neighbors(plane.width, width);
  const rows = neighbors(plane.height, height);
  const {pixels: source, width: stride} = plane;
  const pixels = new Uint8ClampedArray(width * height);
  let at = 0;
  for (const [above, below, y0, y1] of rows) {
    for (const [left, right, x0, x1] of columns) {
      const mix = (row) => (source[row * stride + left] * x0 + source[row * stride + right] * x1) >> 4;
      pixels[at++] = (((mix(above) * y0) >> 16) + ((mix(below) * y1) >> 16) + 2) >> 2;
    }
  }
  return {width, height, pixels};
}

function resize(planes, steps) {
  const [{width, height}] = planes;
  const size = resizedSize(width, height, steps);
  const averaged = steps.antialias ?? true;
  const filter = FILTERS[steps.interpolation];
  if (!filter || !(averaged || steps.interpolation === 'bilinear')) {
    throw new Error(`this page cannot resize by ${steps.interpolation}${averaged ? '' : ' as OpenCV does'}`);
  }
  return planes.map((plane) => (averaged ? resizePlane : resizePlaneLikeOpenCv)(plane, ...size, filter));
}

// Return [width, height] to which `resize` of the metadata takes a picture.
export function resizedSize(width, height, resize) {
  if (typeof resize.size === 'number') { // the shorter side
    const longer = Math.trunc((resize.size * Math.max(width, height)) / Math.min(width, height));
    return width <= height ? [resize.size, longer] : [longer, resize.size];
  }
  const [h, w] = resize.size;
  if (!resize.keep_ratio) return [w, h];
  if (resize.enlarge === undefined) { // a classifier's picture covers the size, and is cropped
    const ratio = Math.min(height / h, width / w);
    return [roundHalfEven(width / ratio), roundHalfEven(height / ratio)];
  }
  const factor = Math.min(h / height, w / width, resize.enlarge ? Infinity : 1); // others lie within the size
  return [width, height].map((side) => Math.max(1, Math.floor(side * factor + 0.5)));
}

function roundHalfEven(x) {
  const low = Math.floor(x);
  return x - low === 0.5 ? low + (low % 2) : Math.round(x);
}

function margin(size, crop) {
  return size >= crop ? roundHalfEven((size - crop) / 2) : -Math.floor((crop - size) / 2);
}

function cropPlane(plane, width, height) {
  const [left, top] = [margin(plane.width, width), margin(plane.height, height)];
  const pixels = new Uint8ClampedArray(width * height); // black where the picture ends
  for (let y = Math.max(0, -top); y < Math.min(height, plane.height - top); y++) {
    for (let x = Math.max(0, -left); x < Math.min(width, plane.width - left); x++) {
      pixels[y * width + x] = plane.pixels[(y + top) * plane.width + x + left];
    }
  }
  return {width, height, pixels};
}

// Split opaque RGBA pixels into planes: red, green and blue, or gray as Pillow computes it.
function split({width, height, data}, color) {
  const plane = (value) => {
    const pixels = new Uint8ClampedArray(width * height);
    for (let n = 0; n < pixels.length; n++) pixels[n] = value(4 * n);
    return {width, height, pixels};
  };
  if (color === 'gray') return [plane((n) => (data[n] * 19595 + data[n + 1] * 38470 + data[n + 2] * 7471 + 32768) >> 16)];
  return [0, 1, 2].map((channel) => plane((n) => data[n + channel]));
}

// Resize, crop, normalize and pad the pixels of a picture {width, height, data} (RGBA) as the metadata says: returns
// the `planes` (8 bits) that the model sees, its `input`, a Float32Array of shape [1, channels, height, width], with this
// `shape`, and the `size` {width, height} to which the picture was resized.
export function prepare(picture, metadata) {
  const steps = metadata.preprocessing;
  let planes = split(picture, metadata.input.color);
  if (steps.resize) planes = resize(planes, steps.resize);
  const size = {width: planes[0].width, height: planes[0].height};
  if (steps.crop) planes = planes.map((plane) => cropPlane(plane, steps.crop[1], steps.crop[0]));
  const [{width, height}] = planes;
  const [rows, columns] = steps.pad?.to ?? [height, width];
  const input = new Float32Array(planes.length * rows * columns);
  const ordered = metadata.input.color === 'BGR' ? [...planes].reverse() : planes;
  ordered.forEach(({pixels}, channel) => {
    const [scale, mean, std] = steps.normalize_in_graph
      ? [metadata.input.range[1] / 255, 0, 1] : [steps.scale, steps.mean[channel], steps.std[channel]];
    const page = input.subarray(channel * rows * columns, (channel + 1) * rows * columns);
    if (steps.pad) page.fill(steps.pad.value[channel]);
    for (let y = 0, n = 0; y < height; y++) {
      for (let x = 0; x < width; x++, n++) page[y * columns + x] = (pixels[n] * scale - mean) / std;
    }
  });
  return {planes, input, shape: [1, planes.length, rows, columns], size};
}
