// Show what an exported model finds in pictures: classes, objects or segments. Nothing is uploaded.
import {readMetadata} from './metadata.js';
import {prepare} from './preprocessing.js';
import {TASKS} from './results.js';
import {createModel, oneLine, Problem} from './runtime.js';

const MODEL = 'model.onnx';

const element = (id) => document.getElementById(id);
const address = new URLSearchParams(location.search);
let model; // {name, metadata, and what createModel returns}
let picture; // {name, data: ImageData}
let camera; // a <video> while the camera runs
let queue = Promise.resolve(); // one thing after the other
let waiting = 0; // how many things are in the queue

// Load a model from its bytes, and keep the last one if it cannot be used.
async function loadModel(name, bytes) {
  let metadata;
  try {
    metadata = readMetadata(bytes);
  } catch {
    throw new Problem(`${name} is not an ONNX file, or it is damaged.`);
  }
  if (!metadata?.preprocessing || !metadata.input || !metadata.labels) {
    throw new Problem(`${name} has no metadata of “subquad export”; export the model again.`);
  }
  const task = TASKS[metadata.task];
  if (!task) {
    throw new Problem(`${name} is a model for ${metadata.task}, and this page classifies, detects and segments.`);
  }
  let created;
  try {
    created = await createModel(bytes, metadata.input.shape, address.get('device'));
  } catch (error) {
    throw error instanceof Problem ? error : new Problem(`ONNX Runtime cannot load ${name}: ${oneLine(error)}`);
  }
  const missing = task.needs.find((output) => !created.session.outputNames.includes(output));
  if (missing) {
    await created.session.release();
    throw new Problem(`${name} has no output “${missing}”; export the model again.`);
  }
  await model?.session.release();
  model = {name, metadata, task, ...created};
  const [, , height, width] = metadata.input.shape;
  const weights = metadata.weights.startsWith(metadata.model) ? '' : `${metadata.model} · `;
  element('model').textContent = `${weights}${metadata.weights} · ${metadata.precision} · ` +
    `${height} × ${width} · ${(bytes.length / 1e6).toFixed(1)} MB`;
  element('device').textContent = `Runs on ${model.device}${model.reason && `: ${model.reason}`}.`;
}

async function fetchFile(place, problem) {
  const response = await fetch(place).catch(() => null);
  if (!response?.ok) throw new Problem(problem);
  return {name: decodeURIComponent(new URL(place, location).pathname.split('/').pop()), file: await response.blob()};
}

// Load what the address names: ?model=ADDRESS&image=ADDRESS. The device wasm or webgpu may be chosen by ?device=.
async function openAddress() {
  const cannot = (place) => `${place} cannot be fetched; is it there, and does its server let this page read it?`;
  const place = address.get('model');
  const {name, file} = await fetchFile(place ?? MODEL,
    place ? cannot(place) : `There is no ${MODEL} beside this page; choose or drop an .onnx file.`);
  await loadModel(name, new Uint8Array(await file.arrayBuffer()));
  const image = address.get('image');
  if (image) {
    const found = await fetchFile(image, cannot(image));
    await readPicture(found.name, found.file);
  }
}

// Decode an image file to opaque RGBA pixels, upright, on white.
async function readPicture(name, file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, {colorSpaceConversion: 'none'});
  } catch {
    throw new Problem(`${name} is not an image that this browser can read.`);
  }
  showPicture(name, bitmap, bitmap.width, bitmap.height);
  bitmap.close();
  document.body.classList.remove('found');
}

function showPicture(name, source, width, height) {
  const canvas = element('picture');
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext('2d', {willReadFrequently: true});
  context.fillStyle = 'white';
  context.fillRect(0, 0, width, height);
  context.drawImage(source, 0, 0);
  picture = {name, data: context.getImageData(0, 0, width, height)};
  document.body.classList.add('shown');
}

async function find() {
  if (!model) throw new Problem('Choose a model first: an .onnx file of “subquad export”.');
  const {metadata, task} = model;
  const start = performance.now();
  const {planes, input, size} = prepare(picture.data, metadata);
  const prepared = performance.now();
  let outputs;
  try {
    outputs = await model.run(input, task.needs.length ? task.needs : undefined);
  } catch (error) {
    throw new Problem(`${model.name} cannot be run: ${oneLine(error)}`);
  }
  const finished = performance.now();
  if (!Object.values(outputs).every(({type, data}) => type !== 'float32' || data.every(Number.isFinite))) {
    throw new Problem(`${model.name} returns numbers that are not finite.`);
  }
  showInput(planes);
  const canvas = element('overlay');
  canvas.width = canvas.height = 0;
  showRows(task.show(outputs, metadata, size, picture.data, canvas));
  element('time').textContent = `Prepared in ${(prepared - start).toFixed(1)} ms, ` +
    `${task.done} in ${(finished - prepared).toFixed(1)} ms`;
  element('name').textContent = `${picture.name} · ${picture.data.width} × ${picture.data.height}`;
  document.body.dataset.task = metadata.task;
  document.body.classList.add('found');
}

// Show the pixels that the model sees.
function showInput(planes) {
  const {width, height} = planes[0];
  const data = new Uint8ClampedArray(4 * width * height).fill(255);
  for (let n = 0; n < width * height; n++) {
    for (let c = 0; c < 3; c++) data[4 * n + c] = planes[c % planes.length].pixels[n];
  }
  const canvas = element('input');
  [canvas.width, canvas.height] = [width, height];
  canvas.getContext('2d').putImageData(new ImageData(data, width, height), 0, 0);
}

function showRows(rows) {
  element('rows').replaceChildren(...rows.map(({label, value, color, box}) => {
    const row = element('row').content.firstElementChild.cloneNode(true);
    Object.assign(row.dataset, {label, value, ...box && {box}});
    row.querySelector('.label').textContent = label;
    row.querySelector('.percent').textContent = `${(100 * value).toFixed(1)} %`;
    row.querySelector('.bar').style.width = `${100 * value}%`;
    if (color) row.style.setProperty('--accent', color);
    return row;
  }));
  element('none').hidden = rows.length > 0;
}

// Run an action after those before it, and show what went wrong.
function perform(status, action) {
  waiting += 1;
  document.body.dataset.state = 'busy';
  queue = queue.then(async () => {
    element('problem').hidden = true;
    element('status').textContent = status;
    try {
      await action();
      if (picture) await find();
    } catch (error) {
      element('problem').textContent = error instanceof Problem ? error.message : `Something failed: ${oneLine(error)}`;
      element('problem').hidden = false;
    }
    element('status').textContent = '';
    waiting -= 1;
    document.body.dataset.state = waiting ? 'busy' : 'idle';
  });
}

function take(file) {
  if (!file) return;
  const {name} = file;
  if (/\.onnx$/i.test(name)) {
    perform(`Loading ${name}`, async () => loadModel(name, new Uint8Array(await file.arrayBuffer())));
  } else {
    stopCamera();
    perform(`Reading ${name}`, () => readPicture(name, file));
  }
}

// Show the pictures of a camera one after the other, each as soon as the model is done with the last one.
async function startCamera() {
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({video: {facingMode: 'environment'}});
  } catch (error) {
    throw new Problem(`The camera cannot be used: ${oneLine(error)}`);
  }
  const video = Object.assign(document.createElement('video'), {srcObject: stream, muted: true, playsInline: true});
  await video.play();
  camera = video;
  document.body.classList.add('live');
  const next = () => {
    if (camera !== video) return;
    perform('', () => camera === video && showPicture('Camera', video, video.videoWidth, video.videoHeight));
    queue.then(() => requestAnimationFrame(next));
  };
  requestAnimationFrame(next);
}

function stopCamera() {
  camera?.srcObject.getTracks().forEach((track) => track.stop());
  camera = undefined;
  document.body.classList.remove('live');
}

for (const input of [element('choose-picture'), element('choose-model')]) {
  input.addEventListener('change', () => {
    take(input.files[0]);
    input.value = ''; // the same file can be chosen again
  });
}
document.addEventListener('dragover', (event) => {
  event.preventDefault();
  document.body.classList.add('dragged');
});
document.addEventListener('dragleave', (event) => {
  if (!event.relatedTarget) document.body.classList.remove('dragged');
});
document.addEventListener('drop', (event) => {
  event.preventDefault();
  document.body.classList.remove('dragged');
  take(event.dataTransfer.files[0]);
});
element('camera').hidden = !navigator.mediaDevices; // browsers hide it from pages without https
element('camera').addEventListener('click', () => {
  if (camera) stopCamera();
  else perform('Starting the camera', startCamera);
});
perform(`Loading ${address.get('model') ?? MODEL}`, openAddress);
