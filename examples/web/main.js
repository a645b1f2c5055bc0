// Classify pictures with an exported model. Model and pictures stay in the browser.
import {readMetadata} from './metadata.js';
import {prepare} from './preprocessing.js';

const RUNTIME = './node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs';
const MODEL = 'model.onnx';
const TOP = 5;

const element = (id) => document.getElementById(id);
let runtime; // the module of ONNX Runtime
let model; // {name, session, metadata}
let picture; // {name, data: ImageData}
let queue = Promise.resolve(); // one thing after the other
let waiting = 0; // how many things are in the queue

// An error whose message is one sentence for the reader.
class Problem extends Error {}

async function loadRuntime() {
  if (runtime) return;
  try {
    const module = await import(RUNTIME);
    module.env.wasm.numThreads = 1; // more threads need a server that sends cross-origin isolation headers
    runtime = module;
  } catch {
    throw new Problem('onnxruntime-web is not installed; run “npm ci” in this folder and reload the page.');
  }
}

// Load a model from its bytes, and keep the last one if it cannot be used.
async function loadModel(name, bytes) {
  await loadRuntime();
  let metadata;
  try {
    metadata = readMetadata(bytes);
  } catch {
    throw new Problem(`${name} is not an ONNX file, or it is damaged.`);
  }
  if (!metadata?.preprocessing || !metadata.input || !metadata.labels) {
    throw new Problem(`${name} has no metadata of “subquad export”; export the model again.`);
  }
  if (metadata.task !== 'classification') {
    throw new Problem(`${name} is a model for ${metadata.task}, and this page only classifies.`);
  }
  let session;
  try {
    session = await runtime.InferenceSession.create(bytes, {executionProviders: ['wasm']});
  } catch (error) {
    throw new Problem(`ONNX Runtime cannot load ${name}: ${oneLine(error)}`);
  }
  await model?.session.release();
  model = {name, session, metadata};
  const [, , height, width] = metadata.input.shape;
  const weights = metadata.weights.startsWith(metadata.model) ? '' : `${metadata.model} · `;
  element('model').textContent = `${weights}${metadata.weights} · ${metadata.precision} · ` +
    `${height} × ${width} · ${(bytes.length / 1e6).toFixed(1)} MB`;
}

async function fetchModel() {
  const response = await fetch(MODEL).catch(() => null);
  if (!response?.ok) {
    throw new Problem(`There is no ${MODEL} beside this page; choose or drop the .onnx file of a classifier.`);
  }
  await loadModel(MODEL, new Uint8Array(await response.arrayBuffer()));
}

// Decode an image file to opaque RGBA pixels, upright, on white.
async function readPicture(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, {colorSpaceConversion: 'none'});
  } catch {
    throw new Problem(`${file.name} is not an image that this browser can read.`);
  }
  const canvas = element('picture');
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  const context = canvas.getContext('2d', {willReadFrequently: true});
  context.fillStyle = 'white';
  context.fillRect(0, 0, bitmap.width, bitmap.height);
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return {name: file.name, data: context.getImageData(0, 0, canvas.width, canvas.height)};
}

async function classify() {
  const start = performance.now();
  const {planes, input, shape} = prepare(picture.data, model.metadata);
  const prepared = performance.now();
  const [name] = model.session.inputNames;
  let outputs;
  try {
    outputs = await model.session.run({[name]: new runtime.Tensor('float32', input, shape)});
  } catch (error) {
    throw new Problem(`${model.name} cannot be run: ${oneLine(error)}`);
  }
  const finished = performance.now();
  const probabilities = softmax(outputs[model.session.outputNames[0]].data);
  if (!probabilities.every(Number.isFinite)) throw new Problem(`${model.name} returns numbers that are not finite.`);
  showInput(planes);
  showClasses(probabilities);
  element('time').textContent = `Prepared in ${(prepared - start).toFixed(1)} ms, ` +
    `classified in ${(finished - prepared).toFixed(1)} ms on one thread`;
  element('name').textContent = `${picture.name} · ${picture.data.width} × ${picture.data.height}`;
  document.body.classList.add('classified');
}

function softmax(logits) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const odds = Array.from(logits, (x) => Math.exp(x - most));
  const sum = odds.reduce((a, b) => a + b, 0);
  return odds.map((x) => x / sum);
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

function showClasses(probabilities) {
  const order = [...probabilities.keys()].sort((a, b) => probabilities[b] - probabilities[a]).slice(0, TOP);
  element('classes').replaceChildren(...order.map((n) => {
    const row = element('row').content.firstElementChild.cloneNode(true);
    const label = String(model.metadata.labels[n] ?? n);
    row.dataset.label = label;
    row.dataset.probability = probabilities[n];
    row.querySelector('.label').textContent = label;
    row.querySelector('.percent').textContent = `${(100 * probabilities[n]).toFixed(1)} %`;
    row.querySelector('.bar').style.width = `${100 * probabilities[n]}%`;
    return row;
  }));
}

function oneLine(error) {
  return String(error?.message ?? error).split('\n')[0].slice(0, 300);
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
      if (model && picture) await classify();
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
  if (/\.onnx$/i.test(file.name)) {
    perform(`Loading ${file.name}`, async () => loadModel(file.name, new Uint8Array(await file.arrayBuffer())));
  } else {
    perform(`Reading ${file.name}`, async () => {
      picture = await readPicture(file);
      document.body.classList.remove('classified');
      document.body.classList.add('shown');
      if (!model) throw new Problem('Choose a model first: the .onnx file of a classifier.');
    });
  }
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
perform(`Loading ${MODEL}`, fetchModel);
