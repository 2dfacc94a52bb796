// Charts with uPlot: one metric of one or several runs, drawn when scrolled into view and redrawn when its data, the
// theme or its size change; and sparklines. Colours are CSS variables of style.css; chart_tools.js has the buttons.

import uPlot from "./vendor/uPlot.esm.js";
import { X_SPACE, Y_SPACE, clamp, drawable, xRange, xTicks, yRange, ySize, yTicks } from "./chart_axes.js";
import { h, replace, short, span, svg } from "./dom.js";
import { smooth } from "./run_metrics.js";
import * as scales from "./scales.js";

export const NUM_COLOURS = 8;
const HEIGHT = 190;
const NEAR_PIXELS = 6;
const MIN_DRAG_PIXELS = 4;
const ROUNDING = 1e-12;

/** Return the colour of the nth run as a CSS variable. */
export const colour = (n) => `var(--c${n % NUM_COLOURS})`;
const faint = (rgb, alpha = 0.33) => rgb.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);

/** Return the colour of a mark: of a checkpoint, a resumption or a death of the engine. */
export const markColour = (kind) => computed({ resume: "--warn", death: "--bad" }[kind] ?? "--muted");

/** Resolve a CSS variable in the current theme, for a canvas. */
export function computed(name) {
  const probe = h("i", { class: "offscreen" });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/**
 * The chart of one metric. `update(lines, options)`: lines are `{label, colour: n, columns: [xs, ys, steps], sample:
 * [xs, ys], band: [lows, highs], isDashed, runId}`, where smoothing averages the sample and a band belongs to the xs of
 * the columns; options are `{axis: step|elapsed|clock, isLog, smoothing, marks: [{x, label, kind}], value: format}`. The
 * attributes `data-points` and `data-last` of its element describe what it shows. A drag calls `onZoom([low, high])`
 * with the x of both ends, a double click `onZoom(null)`, and a click `onStep(runId, step)`.
 */
export class MetricChart {
  constructor(name, source, signal, { onZoom = () => {}, onStep = null, tools = null, sync = "metrics" } = {}) {
    Object.assign(this, { name, onZoom, onStep, sync });
    this.lines = [];
    this.plot = null;
    this.isZoomed = false;
    this.isVisible = false;
    this.isStale = false;
    this.isExpanded = false;
    this.isLabelled = false;
    this.values = h("div", { class: "chart-values" });
    this.canvas = h("div", { class: "chart-canvas", role: "img" });
    this.origin = h("span");
    this.tip = h("div", { class: "chart-tip", hidden: true });
    this.element = h(
      "figure",
      { class: "chart", "data-metric": name, "data-source": source },
      h("figcaption", null, h("h3", { title: name }, breakable(name)), tools?.(this)),
      h("div", { class: "chart-head" }, this.values, this.origin),
      this.canvas,
    );
    this.setSource(source);
    this.follow(signal);
  }

  /** Draw when visible, when resized and when the theme changes, until the page is left. */
  follow(signal) {
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

  /** Say who measured what is shown: engine, client, or both, which agree or differ. */
  setSource(source, both = null) {
    if (this.element.dataset.source === source && this.both === both) return;
    this.element.dataset.source = source;
    this.both = both;
    const [text, title] = {
      null: source === "client" ? ["client", "Reported by the client"] : [],
      same: ["client = engine", "Client and engine report the same values; they are drawn once"],
      differ: ["client ≠ engine", "Client and engine report different values; the engine's are dashed"],
    }[both];
    replace(this.origin, text && h("span", { class: "tag", title }, text));
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

  get height() {
    return this.isExpanded ? Math.max(this.canvas.clientHeight, HEIGHT) : HEIGHT;
  }

  fit() {
    const [width, { height }] = [this.canvas.clientWidth, this];
    if (this.plot && width && (width !== this.plot.width || height !== this.plot.height))
      this.plot.setSize({ width, height });
  }

  /** Describe the chart for tests and screen readers. */
  describe() {
    const finite = this.lines.map((line) => line.columns[1].filter((value) => value !== null));
    const counts = finite.map((values) => values.length);
    this.extraDigits = extraDigitsOf(finite.flat());
    const last = this.lines.map((line) => this.format(lastOf(line.columns[1])));
    this.element.dataset.points = counts.join(" ");
    this.element.dataset.last = this.lines.map((line) => lastOf(line.columns[1]) ?? "").join(" ");
    this.canvas.setAttribute(
      "aria-label",
      `${this.name}: ${this.lines.map((line, i) => `${line.label}, ${counts[i]} points, last ${last[i]}`).join("; ")}`,
    );
  }

  format(value) {
    return this.options?.value ? this.options.value(value) : short(value, this.extraDigits);
  }

  /** Return uPlot's columns, in the order of `strokes`: a line, it smoothed, and both edges of its band. */
  data() {
    const { isLog, smoothing } = this.options;
    const usable = (values) => values.map((value) => drawable(value, isLog));
    const soft = (values) => (smoothing ? smooth(values, smoothing) : values);
    const tables = this.lines.flatMap(({ columns: [xs, ys], sample, band }) => [
      [xs, usable(ys)],
      ...(smoothing ? [[sample[0], usable(soft(sample[1]))]] : []),
      ...(band ? band.map((edge) => [xs, usable(soft(edge))]) : []),
    ]);
    if (!tables.length || tables.every(([xs]) => !xs.length)) return [[], ...tables.map(() => [])];
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
    this.plot = new uPlot({ width, height: this.height, ...this.settings() }, this.data(), this.canvas);
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
    const { series, bands } = this.strokes(smoothing);
    return {
      padding: [8, 18, 0, (plot) => (plot.scales.y.min == null ? 18 : 0)], // room for the first x label
      legend: { show: false },
      cursor: {
        sync: { key: this.sync, scales: ["x", null] },
        y: false,
        points: { size: (plot, i) => (plot.series[i].isEdge ? 0 : 7) },
        drag: { x: true, y: false, setScale: true, click: () => {} }, // `listen` tells clicks from drags
      },
      scales: {
        x: { time: axis === "clock", range: (plot, low, high) => xRange(plot.data[0], low, high, axis) },
        y: { distr: isLog ? 3 : 1, range: (_, low, high) => yRange(low, high, isLog) },
      },
      axes: [
        { ...axisLook, size: 26, gap: 3, space: X_SPACE, ...xTicks(axis) },
        { ...axisLook, size: ySize, gap: 4, space: Y_SPACE, ...yTicks(isLog, this.options.value) },
      ],
      series,
      bands,
      hooks: {
        setCursor: [(plot) => (this.showValues(plot.cursor.idx), this.showTip(plot))],
        setSelect: [(plot) => this.zoom(plot)],
        draw: [(plot) => this.markGaps(plot), (plot) => this.drawMarks(plot)],
        ready: [(plot) => this.listen(plot)],
      },
    };
  }

  /** Return uPlot's series and bands of all lines. */
  strokes(smoothing) {
    const [series, bands] = [[{}], []];
    for (const line of this.lines) {
      const stroke = computed(`--c${line.colour % NUM_COLOURS}`);
      series.push(...strokesOf(line, stroke, smoothing));
      if (!line.band) continue;
      const edge = { stroke: "transparent", width: 0, points: { show: false }, isEdge: true };
      series.push(edge, { ...edge });
      bands.push({ series: [series.length - 1, series.length - 2], fill: faint(stroke, 0.18) });
    }
    return { series, bands };
  }

  listen(plot) {
    plot.over.append(this.tip);
    plot.over.addEventListener("dblclick", () => this.onZoom(null));
    let pressed = null;
    plot.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    plot.over.addEventListener("click", (event) => {
      const isDrag = pressed !== null && Math.abs(event.clientX - pressed) >= MIN_DRAG_PIXELS;
      if (!isDrag) this.choose(plot, event.offsetX, event.offsetY);
    });
  }

  /** Tell which step of which run was clicked: of the line that is nearest to the pointer. */
  choose(plot, left, top) {
    if (!this.onStep || !plot.data[0].length) return;
    const x = plot.data[0][plot.posToIdx(left)];
    const near = this.lines.flatMap(({ runId, columns: [xs, ys, steps] }) => {
      const i = indexAt(xs, x);
      if (i < 0 || !runId || !steps) return [];
      const distance = ys[i] === null ? Infinity : Math.abs(plot.valToPos(ys[i], "y") - top);
      return [{ runId, step: steps[i], distance }];
    });
    near.sort((a, b) => a.distance - b.distance);
    if (near.length) this.onStep(near[0].runId, near[0].step);
  }

  zoom(plot) {
    const { left, width } = plot.select;
    if (!width) return;
    this.isZoomed = true;
    this.onZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  /** Return where values within the range shown are not finite. */
  gapsOf(plot) {
    const { min, max } = plot.scales.x;
    return this.lines.flatMap(({ columns: [xs, ys] }) => xs.filter((x, i) => ys[i] === null && min <= x && x <= max));
  }

  /** Draw non-finite values as ticks at the bottom: a gap in a long line is too narrow to see. */
  markGaps(plot) {
    const gaps = this.gapsOf(plot);
    if (!gaps.length) return;
    const { ctx, bbox } = plot;
    const [width, height] = [2 * uPlot.pxRatio, 7 * uPlot.pxRatio];
    ctx.fillStyle = computed("--bad");
    for (const x of gaps)
      ctx.fillRect(plot.valToPos(x, "x", true) - width / 2, bbox.top + bbox.height - height, width, height);
  }

  /** Return the marks within the range shown. Those just after the last point, as of a last checkpoint, stand there. */
  marksOf(plot) {
    const { min, max } = plot.scales.x;
    const last = plot.data[0].at(-1);
    const room = this.options.axis === "step" ? 1 : 0.05 * (last - plot.data[0][0]);
    const isAfter = ({ x }) => last < x && x <= last + room;
    const marks = (this.options.marks ?? []).map((mark) => (isAfter(mark) ? { ...mark, x: last } : mark));
    return marks.filter(({ x }) => min <= x && x <= max);
  }

  /** Draw checkpoints, resumptions and deaths of engines as dashed vertical lines with a small flag at the top. */
  drawMarks(plot) {
    const { ctx, bbox } = plot;
    const marks = this.marksOf(plot);
    if (!marks.length) return;
    const ratio = uPlot.pxRatio;
    ctx.save();
    ctx.lineWidth = ratio;
    for (const { x, kind } of marks) {
      const left = Math.round(plot.valToPos(x, "x", true)) + 0.5;
      ctx.strokeStyle = ctx.fillStyle = markColour(kind);
      ctx.globalAlpha = kind === "checkpoint" ? 0.55 : 0.9;
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(left - 4 * ratio, bbox.top - 5 * ratio);
      ctx.lineTo(left + 4 * ratio, bbox.top - 5 * ratio);
      ctx.lineTo(left, bbox.top + ratio);
      ctx.fill();
    }
    ctx.restore();
  }

  /** Show what a mark under the pointer says. */
  showTip(plot) {
    const { left } = plot.cursor;
    const near = this.marksOf(plot).filter(({ x }) => Math.abs(plot.valToPos(x, "x") - left) <= NEAR_PIXELS);
    this.tip.hidden = !near.length || left < 0;
    if (this.tip.hidden) return;
    replace(this.tip, near.slice(0, 4).map(({ label }) => h("div", null, label)));
    this.tip.style.left = `${Math.max(0, Math.min(left + 8, plot.over.clientWidth - this.tip.offsetWidth))}px`;
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
      const text = `${this.format(value)}${deviation(line, x)}`;
      const node = h("span", { class: "chart-value", title: line.label }, h("i", null), this.isLabelled && h("span", { class: "muted" }, line.label), text);
      node.firstChild.style.background = colour(line.colour);
      return node;
    });
    const gap = x === undefined && !this.isLabelled ? this.firstGap() : undefined;
    const notes = [
      x !== undefined && this.place(x),
      gap !== undefined && `first not finite at ${this.place(gap)}`,
      this.hasNothingToDraw() && "nothing above zero to draw",
    ].filter(Boolean);
    this.values.replaceChildren(...nodes, ...notes.map((note) => h("span", { class: "muted" }, note)));
  }
}

/** Return a name that may be broken after its slashes and underscores. */
const breakable = (name) => name.split(/(?<=[/_])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));

function strokesOf(line, stroke, smoothing) {
  const dash = line.isDashed || line.colour >= NUM_COLOURS ? [6, 4] : undefined;
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
  const shape = ({ label, colour: n, isDashed, band }) => [label, n, Boolean(isDashed), Boolean(band)].join("\n");
  return a.length === b.length && a.every((line, i) => shape(line) === shape(b[i]));
}

function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

/** Return the index of an x or of the last one before it, or -1. */
function indexAt(xs, x) {
  let [first, end] = [0, xs.length];
  while (first < end) {
    const middle = (first + end) >> 1;
    if (xs[middle] <= x) first = middle + 1;
    else end = middle;
  }
  return first - 1;
}

/** Return the value at an x or the last one before it: another run may have no point there. */
export function valueAt([xs, ys], x) {
  const i = indexAt(xs, x);
  return i < 0 ? null : ys[i];
}

/** Write the half width of a line's band at an x, or at its end. */
function deviation({ band, columns: [xs, ys], isRange }, x) {
  if (!band || isRange) return "";
  const i = x === undefined ? xs.length - 1 : indexAt(xs, x);
  if (i < 0) return "";
  const half = (band[1][i] - band[0][i]) / 2;
  return ` ± ${half < ROUNDING * Math.abs(ys[i]) ? "0" : short(Number(half.toPrecision(2)))}`;
}

function extraDigitsOf(values) {
  if (!values.length) return 0;
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return scales.extraDigits(clamp(low), clamp(high));
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
