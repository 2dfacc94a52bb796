// Axes of charts: compute the range to show, the ticks and their labels. The number of ticks is bounded before any is
// made. uPlot's own tick loop is not: on a range of zero span, or of a span below float precision, it adds ticks until
// memory is full.

/** Larger values are drawn here: the span of a range of larger ones would overflow. */
export const MAX_DRAWN = 0.4 * Number.MAX_VALUE;
/** Smaller values are drawn as zero, on a logarithmic axis here: near the smallest float a range has too few steps. */
export const MIN_DRAWN = 1e-300;
/** A series whose span is a smaller part of its values is drawn as a constant: that is rounding noise of float32. */
const MIN_RELATIVE_SPAN = 1e-6;
const PADDING = 0.1;
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86_400;
const LONG_STEPS = [10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, DAY];

// ── ranges ──────────────────────────────────────────────────────────────────────────────────────────

/** Whether a series of these extremes is drawn as a constant. */
function isConstant(low, high) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  return high - low < Math.max(size * MIN_RELATIVE_SPAN, MIN_DRAWN);
}

/** The extremes of a series with padding, which does not cross zero; a constant is centred. */
export function linearRange(low, high) {
  const span = high - low;
  if (isConstant(low, high)) {
    const middle = low + span / 2;
    const size = Math.abs(middle);
    const room = size < MIN_DRAWN ? 1 : size * PADDING;
    return [middle - room, middle + room];
  }
  const [min, max] = [low - span * PADDING, high + span * PADDING];
  return [low >= 0 ? Math.max(min, 0) : min, high <= 0 ? Math.min(max, 0) : max];
}

/** The same for a logarithmic axis; both are above zero. */
export function logRange(low, high) {
  const [min, max] = [Math.log10(low), Math.log10(high)];
  const room = Math.max((max - min) * PADDING * 0.5, Math.log10(1 + PADDING));
  return [Math.max(10 ** (min - room), Number.MIN_VALUE), Math.min(10 ** (max + room), Number.MAX_VALUE)];
}

/** Widen a range to a minimum span around its middle, not below zero. */
export function widened(low, high, minSpan) {
  if (high - low >= minSpan) return [low, high];
  const middle = Math.max(low + (high - low) / 2, minSpan / 2);
  return [middle - minSpan / 2, middle + minSpan / 2];
}

// ── ticks ───────────────────────────────────────────────────────────────────────────────────────────

/** At most `count` + 1 round numbers from low to high, `minStep` or more apart. */
export function linearTicks(low, high, count, minStep = 0) {
  return multiples(low, high, roundUp(Math.max((high - low) / Math.max(count, 1), minStep)));
}

/** Powers of ten, with 2 and 5 between them where there is room; within one power linear ticks. */
export function logTicks(low, high, count) {
  const decades = Math.log10(high) - Math.log10(low);
  if (decades < 1) return linearTicks(low, high, count);
  const factors = decades <= count / 2 ? [1, 2, 5] : [1];
  const stride = Math.ceil(decades / Math.max(count, 1));
  const powers = multiples(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)), stride);
  const ticks = powers.flatMap((power) => factors.map((factor) => Number(`${factor}e${power}`)));
  return ticks.filter((tick) => low <= tick && tick <= high);
}

/** Ticks in seconds: round ones, and above ten seconds those of a clock. */
export function durationTicks(low, high, count) {
  const min = (high - low) / Math.max(count, 1);
  if (min > DAY) return multiples(low, high, DAY * roundUp(min / DAY));
  return multiples(low, high, min <= 5 ? roundUp(min) : LONG_STEPS.find((step) => step >= min));
}

/** Return 1, 2 or 5 times a power of ten, at least `min`. */
function roundUp(min) {
  const power = Math.floor(Math.log10(min));
  return [1, 2, 5, 10].map((factor) => Number(`${factor}e${power}`)).find((step) => step >= min * (1 - 1e-9));
}

function multiples(low, high, step) {
  const first = Math.ceil(low / step);
  const count = Math.floor(high / step) - first + 1;
  return Array.from({ length: Math.max(count, 0) }, (_, i) => (first + i) * step + 0);
}

// ── labels ──────────────────────────────────────────────────────────────────────────────────────────

/** Write ticks with as many digits as distinguish neighbours. */
export function linearLabels(ticks) {
  const size = Math.max(...ticks.map(Math.abs));
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : size;
  const stepPower = power(step);
  if (size >= 1e9 || size < 1e-3) return ticks.map((tick) => exponential(tick, power(tick) - stepPower));
  const [unit, letter] = [
    [1e6, "M"],
    [1e4, "k"],
  ].find(([from]) => size >= from) ?? [1, ""];
  const divisor = letter === "k" ? 1e3 : unit;
  const digits = Math.max(0, power(divisor) - stepPower);
  const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return ticks.map((tick) => (tick ? `${(tick / divisor).toLocaleString("en", options)}${letter}` : "0"));
}

/** Write each tick on its own: neighbours differ in the first digit or the power of ten. */
export function logLabels(ticks) {
  const isNarrow = ticks.length > 1 && ticks.at(-1) < 10 * ticks[0];
  return isNarrow ? linearLabels(ticks) : ticks.flatMap((tick) => linearLabels([tick]));
}

export function durationLabels(ticks) {
  const [step, max] = [ticks.length > 1 ? ticks[1] - ticks[0] : ticks[0], ticks.at(-1)];
  const unit = [
    [DAY, "d"],
    [HOUR, "h"],
    [MINUTE, "min"],
  ].find(([size]) => step >= size && step % size === 0);
  const isPlain = unit ? max < (unit[0] === MINUTE ? 2 * HOUR : Infinity) : max < 2 * MINUTE;
  const digits = step < 1 ? Math.min(6, -power(step)) : 0;
  return ticks.map((tick) => {
    if (!tick) return "0";
    if (isPlain) return unit ? `${Math.round(tick / unit[0])} ${unit[1]}` : `${tick.toFixed(digits)} s`;
    return clock(tick, digits, Boolean(unit));
  });
}

/** 1:30 h, 2:05 min or 1:30:05 h. */
function clock(seconds, digits, isWhole) {
  const two = (number, places = 0) => number.toFixed(places).padStart(places ? 3 + places : 2, "0");
  const rounded = Number(seconds.toFixed(digits));
  const [hours, minutes] = [Math.floor(rounded / HOUR), Math.floor((rounded % HOUR) / MINUTE)];
  if (isWhole) return `${hours}:${two(minutes)} h`;
  const rest = two(rounded % MINUTE, digits);
  return hours ? `${hours}:${two(minutes)}:${rest} h` : `${minutes}:${rest} min`;
}

function exponential(value, digits) {
  if (!value) return "0";
  return value.toExponential(Math.min(Math.max(digits, 0), 15)).replace("e+", "e");
}

/** The power of ten of a number's first digit. */
function power(value) {
  return value ? Number(value.toExponential(6).split("e")[1]) : 0;
}

/** How many digits beyond the usual ones distinguish values within this range. */
export function extraDigits(low, high) {
  if (isConstant(low, high)) return 0;
  return Math.max(0, power(Math.max(Math.abs(low), Math.abs(high))) - power(high - low));
}
