// Draws runs as points: one field or metric against another, coloured by a third. A point leads to its run.

import { colour, NUM_COLOURS } from "./charts.js";
import { h, replace, short, svg } from "./dom.js";
import * as scales from "./scales.js";

const WIDTHS = [260, 1600];
const HEIGHT = 320;
const EDGE = { left: 64, right: 18, top: 12, bottom: 44 };

/** The scatter plot. `draw(runs, {x, y, colour, isLogX, isLogY})`: names of fields, which each run has in `values`. */
export class Scatter {
  constructor() {
    this.note = h("p", { class: "muted" });
    this.legend = h("ul", { class: "run-legend" });
    this.place = h("div", { class: "scatter" });
    this.tip = h("p", { class: "scatter-tip", role: "status" });
    this.element = h("div", { class: "stack wide-stack" }, this.place, this.tip, this.legend, this.note);
    new ResizeObserver(() => this.place.clientWidth && this.given && this.draw(...this.given)).observe(this.place);
  }

  draw(runs, chosen) {
    this.given = [runs, chosen];
    const { x, y, colour: by, isLogX, isLogY } = chosen;
    this.width = Math.min(Math.max(this.place.clientWidth, WIDTHS[0]), WIDTHS[1]);
    const xAxis = new Axis(runs.map((run) => run.values?.[x]), isLogX, [EDGE.left, this.width - EDGE.right]);
    const yAxis = new Axis(runs.map((run) => run.values?.[y]), isLogY, [HEIGHT - EDGE.bottom, EDGE.top]);
    const shown = runs.filter((run) => xAxis.has(run.values?.[x]) && yAxis.has(run.values?.[y]));
    const groups = by ? coloursOf(shown.map((run) => run.values?.[by])) : new Map();
    const points = shown.map((run) => this.point(run, { x, y, by }, xAxis, yAxis, groups));
    replace(this.place, this.frame(x, y, xAxis, yAxis, points));
    replace(this.legend, by && [...groups].map(([value, n]) => legendItem(`${by} ${value}`, n)));
    const numMissing = runs.length - shown.length;
    this.note.textContent =
      `${short(shown.length)} ${shown.length === 1 ? "run is" : "runs are"} drawn.` +
      (numMissing
        ? ` ${short(numMissing)} without both values${isLogX || isLogY ? " above zero" : ""} ${numMissing === 1 ? "is" : "are"} left out.`
        : "");
  }

  frame(x, y, xAxis, yAxis, points) {
    const { width } = this;
    const label = (attrs, text) => svg("text", { class: "scatter-label", ...attrs }, text);
    const grid = [
      ...xAxis.ticks().flatMap(([at, text]) => [
        svg("line", { class: "scatter-grid", x1: at, x2: at, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
        label({ x: at, y: HEIGHT - EDGE.bottom + 16, "text-anchor": "middle" }, text),
      ]),
      ...yAxis.ticks().flatMap(([at, text]) => [
        svg("line", { class: "scatter-grid", x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at }),
        label({ x: EDGE.left - 6, y: at + 4, "text-anchor": "end" }, text),
      ]),
    ];
    const middle = (EDGE.left + width - EDGE.right) / 2;
    const names = [
      label({ x: middle, y: HEIGHT - 8, "text-anchor": "middle" }, x),
      label({ x: EDGE.left, y: EDGE.top - 2, "text-anchor": "start" }, y),
    ];
    const attrs = { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": `${y} against ${x}` };
    return svg("svg", attrs, grid, names, points);
  }

  point(run, { x, y, by }, xAxis, yAxis, groups) {
    const text = [x, y, by].filter(Boolean).map((name) => `${name} ${written(run.values?.[name])}`).join(", ");
    const circle = svg("circle", { cx: xAxis.at(run.values[x]), cy: yAxis.at(run.values[y]), r: 5 });
    circle.style.fill = by ? colour(groups.get(written(run.values?.[by])) ?? NUM_COLOURS - 1) : colour(0);
    const href = `/console/runs/${encodeURIComponent(run.run_id)}`;
    const show = () => (this.tip.textContent = `${run.name}: ${text}`);
    const link = svg("a", { href, "data-run": run.run_id, "aria-label": `${run.name}: ${text}` }, circle);
    for (const kind of ["mouseenter", "focus"]) link.addEventListener(kind, show);
    return link;
  }
}

const written = (value) => (typeof value === "number" ? short(value) : String(value ?? "none"));

/** Return a colour for each of the most frequent values; the rest share the last one. */
function coloursOf(values) {
  const counts = new Map();
  for (const value of values.map(written)) counts.set(value, (counts.get(value) ?? 0) + 1);
  const order = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a) || a.localeCompare(b, "en", { numeric: true }));
  const kept = order.slice(0, NUM_COLOURS).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  return new Map(kept.map((value, n) => [value, n]));
}

function legendItem(text, n) {
  const swatch = h("i", { class: "swatch" });
  swatch.style.background = colour(n);
  return h("li", null, swatch, h("span", null, text));
}

/** An axis of numbers, linear or logarithmic, or of texts, which stand beside each other in order. */
class Axis {
  constructor(values, isLog, [start, end]) {
    Object.assign(this, { isLog, start, end });
    const known = values.filter((value) => value !== null && value !== undefined);
    const numbers = known.filter((value) => typeof value === "number" && Number.isFinite(value) && (!isLog || value > 0));
    this.texts = numbers.length ? null : [...new Set(known.map(String))].sort();
    const [low, high] = numbers.length ? [Math.min(...numbers), Math.max(...numbers)] : [0, 1];
    this.range = isLog && numbers.length ? scales.logRange(low, high) : padded(low, high);
  }

  has(value) {
    if (value === null || value === undefined) return false;
    return this.texts ? true : typeof value === "number" && Number.isFinite(value) && (!this.isLog || value > 0);
  }

  at(value) {
    const share = this.texts ? (this.texts.indexOf(String(value)) + 0.5) / this.texts.length : this.share(value);
    return Number((this.start + share * (this.end - this.start)).toFixed(1));
  }

  share(value) {
    const [low, high] = this.range.map((end) => (this.isLog ? Math.log10(end) : end));
    return ((this.isLog ? Math.log10(value) : value) - low) / (high - low);
  }

  /** Return `[place, label]` pairs. */
  ticks() {
    if (this.texts) return this.texts.slice(0, 20).map((text) => [this.at(text), text.slice(0, 24)]);
    const count = Math.abs(this.end - this.start) / (this.end > this.start ? 90 : 45);
    const ticks = (this.isLog ? scales.logTicks : scales.linearTicks)(...this.range, count);
    const labels = ticks.length ? (this.isLog ? scales.logLabels : scales.linearLabels)(ticks) : [];
    return ticks.map((tick, i) => [this.at(tick), labels[i]]);
  }
}

/** Return a range with room at both ends, so that no point lies on the frame. */
function padded(low, high) {
  const clamp = (value) => Math.min(Math.max(value, -scales.MAX_DRAWN), scales.MAX_DRAWN);
  const [min, max] = scales.linearRange(clamp(low), clamp(high));
  const room = 0.04 * (max - min);
  return [min - (low > 0 && min === 0 ? 0 : room), max + room];
}
