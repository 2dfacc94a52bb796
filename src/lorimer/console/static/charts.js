// Charts over uPlot: one metric of one or several runs, drawn when it comes into view and redrawn when its data, the
// theme or its width change; and small lines without axes. Colours come from the variables of style.css.

import uPlot from "./vendor/uPlot.esm.js";
import { h, short, span, svg } from "./dom.js";
import { smooth } from "./run_metrics.js";

export const NUM_COLOURS = 8;
const HEIGHT = 190;

/** The colour of the nth run, as a variable for styles. */
export const colour = (n) => `var(--c${n % NUM_COLOURS})`;
const faint = (rgb) => rgb.replace("rgb(", "rgba(").replace(")", ", 0.33)");

/** The colour that a variable stands for in the present theme, as a canvas takes it. */
function computed(name) {
  const probe = h("i", { class: "offscreen" });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/**
 * The chart of one metric. `update(lines, options)`: lines are `{label, colour: n, columns: [xs, ys], sample: [xs, ys]}`,
 * the sample is what smoothing averages; options are `{axis: step|elapsed|clock, isLog, smoothing}`. Its element tells
 * what it shows in `data-points` and `data-last`.
 * Whoever drags over it calls `onZoom([low, high])`, x of both ends; a double click calls `onZoom(null)`.
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

  /** What a test, or somebody who cannot see the chart, can know of it. */
  describe() {
    const counts = this.lines.map((line) => line.columns[1].filter((value) => value !== null).length);
    const last = this.lines.map((line) => short(lastOf(line.columns[1])));
    this.element.dataset.points = counts.join(" ");
    this.element.dataset.last = this.lines.map((line) => lastOf(line.columns[1]) ?? "").join(" ");
    this.canvas.setAttribute(
      "aria-label",
      `${this.name}: ${this.lines.map((line, i) => `${line.label}, ${counts[i]} points, last ${last[i]}`).join("; ")}`,
    );
  }

  /** uPlot's columns: the raw lines, and behind them, when smoothed, the smoothed ones. */
  data() {
    const { isLog, smoothing } = this.options;
    const usable = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
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
    const xValues = {
      step: (_, splits) => splits.map((x) => (Number.isInteger(x) ? short(x) : "")),
      elapsed: (_, splits) => splits.map((x) => (x ? span(x) : "0")),
    }[axis];
    return {
      padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: "metrics", scales: ["x", null] },
        y: false,
        points: { size: 7 },
        drag: { x: true, y: false, setScale: true },
      },
      scales: { x: { time: axis === "clock" }, y: { distr: isLog ? 3 : 1 } },
      axes: [
        { ...axisLook, size: 26, gap: 3, space: 64, ...(xValues ? { values: xValues } : {}) },
        {
          ...axisLook,
          size: 54,
          gap: 4,
          space: 32,
          values: (_, splits) => splits.map((y) => (y === null ? "" : short(y))),
        },
      ],
      series: [{}, ...this.lines.flatMap((one) => strokes(one, smoothing))],
      hooks: {
        setCursor: [(plot) => this.showValues(plot.cursor.idx)],
        setSelect: [(plot) => this.zoom(plot)],
        draw: [(plot) => this.markGaps(plot)],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => this.onZoom(null))],
      },
    };
  }

  zoom(plot) {
    const { left, width } = plot.select;
    if (!width) return;
    this.isZoomed = true;
    this.onZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  /** Values that are not finite as ticks at the bottom: a gap in a long line is too narrow to be seen. */
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

  /** Where the first value is that is not finite, as a place on the axis, or undefined. */
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

  /** The values under the cursor, or the last ones. */
  showValues(index) {
    const hasCursor = index !== null && index !== undefined && this.plot;
    const per = this.options?.smoothing ? 2 : 1;
    const nodes = this.lines.map((line, i) => {
      const value = hasCursor ? nearest(this.plot.data[1 + i * per], index) : lastOf(line.columns[1]);
      const node = h("span", { class: "chart-value", title: line.label }, h("i", null), short(value));
      node.firstChild.style.background = colour(line.colour);
      return node;
    });
    const x = hasCursor ? this.plot.data[0][index] : undefined;
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
  if (!smoothing) return [{ stroke, width: 1.75, dash }];
  return [
    { stroke: faint(stroke), width: 1, points: { show: false } },
    { stroke, width: 2, dash, points: { show: false } },
  ];
}

function sameLines(a, b) {
  return a.length === b.length && a.every((line, i) => line.label === b[i].label && line.colour === b[i].colour);
}

function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

/** The value at an index, or the last before it: another run may have no point there. */
function nearest(values, index) {
  for (let i = index; values && i >= 0; i--) if (values[i] !== undefined) return values[i];
  return null;
}

/** A small line without axes; newest at the right. */
export function sparkline(values, label, n = 0) {
  const width = 120;
  const height = 28;
  const most = Math.max(...values, 1e-9);
  const x = (i) => (values.length < 2 ? width : (i / (values.length - 1)) * width);
  const y = (value) => height - 2 - (value / most) * (height - 4);
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
