// Load a model with ONNX Runtime: on WebGPU where it works, else on WebAssembly.

const RUNTIME = './node_modules/onnxruntime-web/dist/ort';
const NAMES = {webgpu: 'WebGPU', wasm: 'WebAssembly on one thread'};

// An error whose message is one sentence for the reader.
export class Problem extends Error {}

export function oneLine(error) {
  return String(error?.message ?? error).split('\n')[0].slice(0, 300);
}

// Return why WebGPU is not used, or '' if it is. `wanted` is a key of NAMES or null.
async function obstacle(wanted) {
  if (wanted === 'wasm') return 'the address asks for it';
  if (!navigator.gpu) return isSecureContext ? 'this browser has no WebGPU' : 'WebGPU needs https or localhost';
  const adapter = await navigator.gpu.requestAdapter().catch(() => null);
  if (!adapter) return 'WebGPU finds no graphics processor';
  const software = adapter.info?.isFallbackAdapter ?? adapter.isFallbackAdapter;
  return software && wanted !== 'webgpu' ? 'WebGPU has only a software renderer, which is slower' : '';
}

async function start(device, bytes, shape) {
  let runtime;
  try {
    runtime = await import(`${RUNTIME}.${device}.bundle.min.mjs`);
  } catch {
    throw new Problem('onnxruntime-web is not installed; run “npm ci” in this folder and reload the page.');
  }
  runtime.env.wasm.numThreads = 1; // more threads need a server that sends cross-origin isolation headers
  const session = await runtime.InferenceSession.create(bytes, {executionProviders: [device], logSeverityLevel: 3});
  const run = (input, outputs) => session.run({[session.inputNames[0]]: new runtime.Tensor('float32', input, shape)},
    outputs);
  // The first run on WebGPU compiles shaders: it shows whether all of them work, and is not timed.
  if (device === 'webgpu') await run(new Float32Array(shape.reduce((a, b) => a * b)));
  return {session, run, device: NAMES[device]};
}

// Load a model from its bytes. Returns its `session`, the function `run(input, outputs)` from a Float32Array of `shape`
// and the names of outputs to these outputs, the name of the `device`, and the `reason` why it is not WebGPU.
export async function createModel(bytes, shape, wanted) {
  let reason = await obstacle(wanted);
  if (!reason) {
    try {
      return {...await start('webgpu', bytes, shape), reason};
    } catch (error) {
      if (error instanceof Problem) throw error;
      reason = `WebGPU fails: ${oneLine(error)}`;
    }
  }
  return {...await start('wasm', bytes, shape), reason};
}
