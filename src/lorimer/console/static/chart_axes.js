// Configures the axes of uPlot with the ranges, ticks and labels of scales.js, and clamps values to what can be drawn.

import uPlot from "./vendor/uPlot.esm.js";
import * as scales from "./scales.js";

/** Minimum span of the x axis: one step, or this many seconds. */
const MIN_SPANS = { step: 1, elapsed: 1e-3, clock: 0.1 };
/** Margin on both sides of a single point. */
const ROOM = { step: 1, elapsed: 30, clock: 30 };
export const X_SPACE = 56; // pixels between two labels
export const Y_SPACE = 32;
const Y_SIZE = 54; // pixels for the labels of the axis
const CHAR_WIDTH = 6.5;

export const clamp = (value) => Math.min(Math.max(value, -scales.MAX_DRAWN), scales.MAX_DRAWN);

/** Clamp a value to the drawable range; gaps stay, and a logarithmic axis drops values that are not positive. */
export function drawable(value, isLog) {
  if (value === null || value === undefined) return value;
  if (!isLog) return clamp(value);
  return value > 0 ? clamp(Math.max(value, scales.MIN_DRAWN)) : null;
}

export function xRange(xs, low, high, axis) {
  if (low === null) return [null, null];
  if (xs.length === 1) return [Math.max(0, xs[0] - ROOM[axis]), xs[0] + ROOM[axis]];
  return scales.widened(low, high, MIN_SPANS[axis]);
}

export function yRange(low, high, isLog) {
  if (low === null) return [null, null];
  return isLog ? scales.logRange(low, high) : scales.linearRange(low, high);
}

/** Configure a uPlot axis with our ticks and labels. uPlot requires increments too. */
function ticksOf(make, label) {
  return {
    incrs: (_plot, _axis, low, high) => [Math.max(5, high - low)],
    splits: (plot, axis, low, high) => {
      const { width, height } = plot.bbox;
      const pixels = (axis ? height : width) / uPlot.pxRatio;
      return make(low, high, pixels / (axis ? Y_SPACE : X_SPACE));
    },
    filter: (_, ticks) => ticks,
    values: (_, ticks) => (ticks.length ? label(ticks) : []),
  };
}

export function xTicks(axis) {
  if (axis === "clock") return { values: (_, ticks) => clockLabels(ticks) };
  if (axis === "elapsed") return ticksOf(scales.durationTicks, scales.durationLabels);
  return ticksOf((low, high, count) => scales.linearTicks(low, high, count, 1), scales.linearLabels);
}

/** Configure the y axis; `format` writes one value in place of our labels. */
export function yTicks(isLog, format = null) {
  if (format) return ticksOf(scales.linearTicks, (ticks) => ticks.map(format));
  return isLog ? ticksOf(scales.logTicks, scales.logLabels) : ticksOf(scales.linearTicks, scales.linearLabels);
}

/** Return the width of the y labels in pixels. */
export function ySize(_, labels) {
  return Math.max(Y_SIZE, 12 + CHAR_WIDTH * Math.max(0, ...(labels ?? []).map((label) => label.length)));
}

/** Write times of day, as short as neighbours can be told apart; the first tick of another day is its date. */
function clockLabels(ticks) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : 60;
  const day = (tick) => new Date(tick * 1000).toLocaleDateString("en", { month: "short", day: "numeric" });
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(step < 60 ? { second: "2-digit" } : {}) };
  return ticks.map((tick, i) => {
    const isNewDay = i > 0 && day(tick) !== day(ticks[i - 1]);
    return isNewDay || step >= 86_400 ? day(tick) : new Date(tick * 1000).toLocaleTimeString("en", options);
  });
}
