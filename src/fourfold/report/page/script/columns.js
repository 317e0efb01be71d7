/* Reads what columns.py wrote: base64 of zlib-compressed typed arrays. */

const ARRAYS = { Int8Array, Int16Array, Int32Array, Float32Array };

/** The bytes of all columns. */
async function readBytes(text) {
  const packed = atob(text.trim());
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(unpacked).arrayBuffer();
}

/** One column. Times are stored as differences of ticks. */
function readColumn(bytes, { at, length, type, scale }) {
  const values = new ARRAYS[type](bytes, at, length);
  if (scale === undefined) return values;
  const times = new Float64Array(length);
  for (let i = 0, tick = 0; i < length; i++) times[i] = (tick += values[i]) * scale;
  return times;
}

/** An object of columns, each read. */
function readColumns(bytes, columns) {
  return Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, readColumn(bytes, column)]));
}
