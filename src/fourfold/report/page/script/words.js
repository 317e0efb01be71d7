/* Quantities in units, as words.py writes them. */

const SECONDS = [["s", 1], ["ms", 1e-3], ["us", 1e-6]];
const BYTES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];

/** Three digits: 12,345, 3.14, 0.25. */
function digits(value) {
  if (Math.abs(value) >= 999.5) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

function isBytes(unit) {
  return unit === "B" || unit === "bytes";
}

/** A number with its unit: 12.3 ms, 44.4 GiB, 21.5 F. */
function quantity(value, unit) {
  if (Number.isNaN(value)) return "unknown";
  if (isBytes(unit)) return bytesText(value);
  if (unit !== "s") return `${digits(value)} ${unit}`.trim();
  const fitting = value ? ([, scale]) => Math.abs(value) >= scale * 0.9995 : () => true;
  const [name, scale] = SECONDS.find(fitting) ?? SECONDS[2];
  return `${digits(value / scale)} ${name}`;
}

/** 12.3%, and what is less than 0.1% but not nothing. */
function shareWords(share) {
  return share > 0 && share < 0.0005 ? "<0.1%" : `${(share * 100).toFixed(1)}%`;
}

function bytesText(value) {
  const [unit, size] = BYTES.find(([, size]) => Math.abs(value) >= size * 0.9995) ?? BYTES[4];
  return `${size === 1 ? value.toFixed(0) : threeDigits(value / size)} ${unit}`;
}

function threeDigits(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

/** One unit for all instants of a step, so that two of them can be compared: [name, scale, decimals]. */
function instantUnit(span, unit) {
  const [name, scale] = unit === "s" ? SECONDS.find(([, scale]) => span >= scale) ?? SECONDS[2] : [unit, 1];
  // To a hundred-thousandth of the step.
  return { name, scale, decimals: Math.max(0, 5 - Math.ceil(Math.log10(Math.max(span / scale, 1e-9)))) };
}

/** An instant in such a unit: 1,234.56 ms, 21 F. */
function instant(time, { name, scale, decimals }) {
  return `${number(time / scale, decimals)} ${name}`;
}

/** Grouped, without trailing zeros. */
function number(value, decimals) {
  return (value || 0).toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, 20) });
}

/** The first steps of 1, 2, 5, 10 ... that is at least this. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find((factor) => factor * power >= least * 0.999999) ?? 10);
}
