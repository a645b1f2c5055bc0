// Read the metadata of `subquad export` from an .onnx file. ONNX Runtime's web version has no function for it.

const METADATA_PROPS = 14; // ModelProto.metadata_props in onnx.proto: entries with key = 1 and value = 2
const LENGTH_DELIMITED = 2;

// Yield [number, bytes] for each length-delimited field of a protobuf message; other fields are skipped.
function* fields(bytes) {
  let at = 0;
  const varint = () => {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      if (at >= bytes.length) throw new RangeError('the message is truncated');
      const byte = bytes[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const tag = varint();
    const type = tag & 7;
    if (tag < 8) throw new RangeError('0 is not the number of a field');
    if (type === LENGTH_DELIMITED) {
      const length = varint();
      if (at + length > bytes.length) throw new RangeError('the message is truncated');
      yield [tag >>> 3, bytes.subarray(at, at + length)];
      at += length;
    } else if (type === 0) {
      varint();
    } else if (type === 1 || type === 5) {
      at += type === 1 ? 8 : 4;
    } else {
      throw new RangeError(`${type} is not the type of a field`);
    }
  }
}

// Return what is stored under `key` in a model's metadata, parsed as JSON, or undefined if the key is missing.
// Throws a RangeError if the bytes are no protobuf message, and a SyntaxError if the text is not JSON.
export function readMetadata(bytes, key = 'subquad') {
  const decoder = new TextDecoder();
  for (const [number, content] of fields(bytes)) {
    if (number !== METADATA_PROPS) continue;
    const entry = Object.fromEntries([...fields(content)].map(([n, text]) => [n, decoder.decode(text)]));
    if (entry[1] === key) return JSON.parse(entry[2]);
  }
  return undefined;
}
