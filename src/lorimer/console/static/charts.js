// Charts with uPlot: one metric of one or several runs, drawn when scrolled into view and redrawn when its data, the
// theme or its width change; and sparklines. Colours are CSS variables of style.css.

import uPlot from "./vendor/uPlot.esm.js";
import { h, short, span, svg } from "./dom.js";
import { smooth } from "./run_metrics.js";
import * as scales from "./scales.js";

export const NUM_COLOURS = 8;
const HEIGHT = 190;
/** Minimum span of the x axis: one step, or this many seconds. */
const MIN_SPANS = { step: 1, elapsed: 1e-3, clock: 0.1 };
/** Margin on both sides of a single point. */
const ROOM = { step: 1, elapsed: 30, clock: 30 };
const X_SPACE = 56; // pixels between two labels
const Y_SPACE = 32;
const Y_SIZE = 54; // pixels for the labels of the axis
const CHAR_WIDTH = 6.5;
const DOUBLE_CLICK_MS = 300;

/** Return the colour of the nth run as a CSS variable. */
export const colour = (n) => `var(--c${n % NUM_COLOURS})`;
const faint = (rgb) => rgb.replace("rgb(", "rgba(").replace(")", ", 0.33)");

/** Resolve a CSS variable in the current theme, for a canvas. */
function computed(name) {
  const probe = h("i", { class: "offscreen" });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/**
 * The chart of one metric. `update(lines, options)`: lines are `{label, colour: n, columns: [xs, ys], sample: [xs,
 * ys]}`, where smoothing averages the sample; options are `{axis: step|elapsed|clock, isLog, smoothing}`. The
 * attributes `data-points` and `data-last` of its element describe what it shows. A drag calls `onZoom([low, high])`
 * with the x of both ends; a double click calls `onZoom(null)`.
 */
export class MetricChart {
  constructor(name, source, signal, onZoom) {
    this.onZoom = onZoom;
    this.lines = [];
    this.plot = null;
    this.isZoomed = false;
    this.isVisible = false;
    this.isStale = false;
    this.values = h("div", { class: "chart-values" });
    this.canvas = h("div", { class: "chart-canvas", role: "img" });
    this.element = h(
      "figure",
      { class: "chart", "data-metric": name, "data-source": source },
      h(
        "figcaption",
        null,
        h("h3", null, name),
        source === "client" && h("span", { class: "tag", title: "Reported by the client" }, "client"),
      ),
      this.values,
      this.canvas,
    );
    this.name = name;
    const seen = new IntersectionObserver((entries) => this.setVisible(entries.at(-1).isIntersecting), {
      rootMargin: "200px",
    });
    const resized = new ResizeObserver(() => this.fit());
    const restyle = () => this.rebuild();
    seen.observe(this.element);
    resized.observe(this.canvas);
    window.addEventListener("lorimer:theme", restyle);
    signal.addEventListener("abort", () => {
      seen.disconnect();
      resized.disconnect();
      window.removeEventListener("lorimer:theme", restyle);
      this.plot?.destroy();
    });
  }

  update(lines, options) {
    const isOther =
      !this.options || JSON.stringify(options) !== JSON.stringify(this.options) || !sameLines(lines, this.lines);
    this.lines = lines;
    this.options = options;
    this.describe();
    if (!this.isVisible) this.isStale = true;
    else if (isOther || !this.plot) this.rebuild();
    else {
      this.plot.setData(this.data(), !this.isZoomed);
      if (this.isZoomed) this.plot.redraw();
    }
    this.showValues(null);
  }

  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (isVisible && (this.isStale || !this.plot)) this.rebuild();
  }

  fit() {
    const width = this.canvas.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  /** Describe the chart for tests and screen readers. */
  describe() {
    const finite = this.lines.map((line) => line.columns[1].filter((value) => value !== null));
    const counts = finite.map((values) => values.length);
    this.extraDigits = extraDigitsOf(finite.flat());
    const last = this.lines.map((line) => short(lastOf(line.columns[1]), this.extraDigits));
    this.element.dataset.points = counts.join(" ");
    this.element.dataset.last = this.lines.map((line) => lastOf(line.columns[1]) ?? "").join(" ");
    this.canvas.setAttribute(
      "aria-label",
      `${this.name}: ${this.lines.map((line, i) => `${line.label}, ${counts[i]} points, last ${last[i]}`).join("; ")}`,
    );
  }

  /** Return uPlot's columns: the raw lines and, when smoothing, the smoothed ones after them. */
  data() {
    const { isLog, smoothing } = this.options;
    const usable = (values) => values.map((value) => drawable(value, isLog));
    const tables = this.lines.flatMap(({ columns: [xs, ys], sample }) => [
      [xs, usable(ys)],
      ...(smoothing ? [[sample[0], usable(smooth(sample[1], smoothing))]] : []),
    ]);
    if (!tables.length || tables.every(([xs]) => !xs.length))
      return [[], ...this.lines.flatMap(() => (smoothing ? [[], []] : [[]]))];
    return uPlot.join(tables);
  }

  rebuild() {
    if (!this.options || !this.isVisible) {
      this.isStale = true;
      return;
    }
    this.isStale = false;
    this.plot?.destroy();
    this.isZoomed = false;
    const width = this.canvas.clientWidth || 300;
    this.plot = new uPlot({ width, height: HEIGHT, ...this.settings() }, this.data(), this.canvas);
  }

  settings() {
    const { axis, isLog, smoothing } = this.options;
    const line = computed("--line");
    const axisLook = {
      stroke: computed("--muted"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: line, width: 1 },
      ticks: { stroke: line, width: 1, size: 4 },
    };
    return {
      padding: [8, 18, 0, (plot) => (plot.scales.y.min == null ? 18 : 0)], // room for the first x label
      legend: { show: false },
      cursor: {
        sync: { key: "metrics", scales: ["x", null] },
        y: false,
        points: { size: 7 },
        drag: { x: true, y: false, setScale: true },
      },
      scales: {
        x: { time: axis === "clock", range: (plot, low, high) => xRange(plot.data[0], low, high, axis) },
        y: { distr: isLog ? 3 : 1, range: (_, low, high) => yRange(low, high, isLog) },
      },
      axes: [
        { ...axisLook, size: 26, gap: 3, space: X_SPACE, ...xTicks(axis) },
        { ...axisLook, size: ySize, gap: 4, space: Y_SPACE, ...yTicks(isLog) },
      ],
      series: [{}, ...this.lines.flatMap((one) => strokes(one, smoothing))],
      hooks: {
        setCursor: [(plot) => this.showValues(plot.cursor.idx)],
        setSelect: [(plot) => this.zoom(plot)],
        draw: [(plot) => this.markGaps(plot)],
        ready: [(plot) => this.listen(plot)],
      },
    };
  }

  /** A double click shows all steps again; a single click, unless it ends a drag, dispatches its step. */
  listen(plot) {
    let begun = null;
    let waiting = null;
    plot.over.addEventListener("dblclick", () => (clearTimeout(waiting), this.onZoom(null)));
    plot.over.addEventListener("pointerdown", (event) => (begun = event.clientX));
    plot.over.addEventListener("click", (event) => {
      clearTimeout(waiting);
      const step = plot.data[0][plot.cursor.idx];
      if (this.options.axis !== "step" || step === undefined || Math.abs(event.clientX - begun) > 3) return;
      const picked = new CustomEvent("lorimer:step", { detail: step, bubbles: true });
      waiting = setTimeout(() => this.element.dispatchEvent(picked), DOUBLE_CLICK_MS);
    });
  }

  zoom(plot) {
    const { left, width } = plot.select;
    if (!width) return;
    this.isZoomed = true;
    this.onZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  /** Draw non-finite values as ticks at the bottom: a gap in a long line is too narrow to see. */
  markGaps(plot) {
    const { min, max } = plot.scales.x;
    const gaps = this.lines.flatMap(({ columns: [xs, ys] }) =>
      xs.filter((x, i) => ys[i] === null && min <= x && x <= max),
    );
    if (!gaps.length) return;
    const { ctx, bbox } = plot;
    const [width, height] = [2 * uPlot.pxRatio, 7 * uPlot.pxRatio];
    ctx.fillStyle = computed("--bad");
    for (const x of gaps)
      ctx.fillRect(plot.valToPos(x, "x", true) - width / 2, bbox.top + bbox.height - height, width, height);
  }

  /** Return the x of the first non-finite value, or undefined. */
  firstGap() {
    const found = this.lines.map(({ columns: [xs, ys] }) => xs[ys.indexOf(null)]).filter((x) => x !== undefined);
    return found.length ? Math.min(...found) : undefined;
  }

  place(x) {
    return {
      step: () => `step ${x.toLocaleString("en")}`,
      elapsed: () => span(x),
      clock: () => new Date(x * 1000).toLocaleTimeString(),
    }[this.options.axis]();
  }

  hasNothingToDraw() {
    return this.options?.isLog && this.lines.every((line) => !line.columns[1].some((value) => value > 0));
  }

  /** Show the values at the cursor, or the last ones. */
  showValues(index) {
    const hasCursor = index !== null && index !== undefined && this.plot;
    const x = hasCursor ? this.plot.data[0][index] : undefined;
    const nodes = this.lines.map((line) => {
      const value = x === undefined ? lastOf(line.columns[1]) : valueAt(line.columns, x);
      const node = h("span", { class: "chart-value", title: line.label }, h("i", null), short(value, this.extraDigits));
      node.firstChild.style.background = colour(line.colour);
      return node;
    });
    const gap = x === undefined ? this.firstGap() : undefined;
    const notes = [
      x !== undefined && this.place(x),
      gap !== undefined && `first not finite at ${this.place(gap)}`,
      this.hasNothingToDraw() && "nothing above zero to draw",
    ].filter(Boolean);
    this.values.replaceChildren(...nodes, ...notes.map((note) => h("span", { class: "muted" }, note)));
  }
}

function strokes(line, smoothing) {
  const stroke = computed(`--c${line.colour % NUM_COLOURS}`);
  const dash = line.colour >= NUM_COLOURS ? [6, 4] : undefined;
  if (!smoothing) return [{ stroke, width: 1.75, dash, points: { filter: isolated } }];
  return [
    { stroke: faint(stroke), width: 1, points: { show: false } },
    { stroke, width: 2, dash, points: { show: false, filter: isolated } },
  ];
}

/** Return the isolated points of a dense series: those without a neighbour to draw a line to. */
function isolated(plot, series, isMarked) {
  if (isMarked) return null;
  const values = plot.data[series];
  // A value is undefined if only another run has a point at this x.
  const here = [...values.keys()].filter((i) => values[i] !== undefined);
  const isGap = (i) => values[i] === null || values[i] === undefined;
  return here.filter((i, n) => values[i] !== null && isGap(here[n - 1]) && isGap(here[n + 1]));
}

function sameLines(a, b) {
  return a.length === b.length && a.every((line, i) => line.label === b[i].label && line.colour === b[i].colour);
}

function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

/** Return the value at an x or the last one before it: another run may have no point there. */
function valueAt([xs, ys], x) {
  let [first, end] = [0, xs.length];
  while (first < end) {
    const middle = (first + end) >> 1;
    if (xs[middle] <= x) first = middle + 1;
    else end = middle;
  }
  return first ? ys[first - 1] : null;
}

function extraDigitsOf(values) {
  if (!values.length) return 0;
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return scales.extraDigits(clamp(low), clamp(high));
}

// ── axes ────────────────────────────────────────────────────────────────────────────────────────────

const clamp = (value) => Math.min(Math.max(value, -scales.MAX_DRAWN), scales.MAX_DRAWN);

/** Clamp a value to the drawable range; gaps stay, and a logarithmic axis drops values that are not positive. */
function drawable(value, isLog) {
  if (value === null || value === undefined) return value;
  if (!isLog) return clamp(value);
  return value > 0 ? clamp(Math.max(value, scales.MIN_DRAWN)) : null;
}

function xRange(xs, low, high, axis) {
  if (low === null) return [null, null];
  if (xs.length === 1) return [Math.max(0, xs[0] - ROOM[axis]), xs[0] + ROOM[axis]];
  return scales.widened(low, high, MIN_SPANS[axis]);
}

function yRange(low, high, isLog) {
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

function xTicks(axis) {
  if (axis === "clock") return {};
  if (axis === "elapsed") return ticksOf(scales.durationTicks, scales.durationLabels);
  return ticksOf((low, high, count) => scales.linearTicks(low, high, count, 1), scales.linearLabels);
}

function yTicks(isLog) {
  return isLog ? ticksOf(scales.logTicks, scales.logLabels) : ticksOf(scales.linearTicks, scales.linearLabels);
}

/** Return the width of the y labels in pixels. */
function ySize(_, labels) {
  return Math.max(Y_SIZE, 12 + CHAR_WIDTH * Math.max(0, ...(labels ?? []).map((label) => label.length)));
}

/** Draw a sparkline; newest value at the right. */
export function sparkline(values, label, n = 0) {
  const width = 120;
  const height = 28;
  const max = Math.max(...values, 1e-9);
  const x = (i) => (values.length < 2 ? width : (i / (values.length - 1)) * width);
  const y = (value) => height - 2 - (value / max) * (height - 4);
  const points = values.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
  const area = svg("polygon", { points: `${x(0)},${height} ${points.join(" ")} ${width},${height}` });
  const line = svg("polyline", { points: points.join(" ") });
  const node = svg(
    "svg",
    {
      class: "sparkline",
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label,
    },
    area,
    line,
  );
  node.style.color = colour(n);
  return node;
}
