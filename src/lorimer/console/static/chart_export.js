// Exports what a chart shows: as a picture (SVG drawn again from its data, PNG from that) or as CSV.

import uPlot from "./vendor/uPlot.esm.js";
import { NUM_COLOURS, computed, markColour } from "./charts.js";
import { cell } from "./csv.js";
import { h } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const FONT = "system-ui, sans-serif";
const HEAD = 26; // pixels for the title
const LINE = 18; // pixels for each line of the legend
const MIN_WIDTH = 1200;

/** Return a file name for a metric. */
export const fileName = (chart, ending) => `${chart.name.replace(/[^\w.-]+/g, "_").slice(0, 80) || "chart"}.${ending}`;

const strokeOf = (line) => computed(`--c${line.colour % NUM_COLOURS}`);

/** Return the chart as a PNG of at least `MIN_WIDTH` pixels, drawn from its SVG: sharp in print, whatever the screen. */
export async function png(chart) {
  const [picture, image] = [h("canvas"), new Image()];
  image.src = `data:image/svg+xml,${encodeURIComponent(svgText(chart))}`;
  await image.decode();
  const ratio = Math.max(uPlot.pxRatio, MIN_WIDTH / image.width);
  Object.assign(picture, { width: Math.round(image.width * ratio), height: Math.round(image.height * ratio) });
  picture.getContext("2d").drawImage(image, 0, 0, picture.width, picture.height);
  return new Promise((resolve) => picture.toBlob(resolve, "image/png"));
}

// ── SVG ─────────────────────────────────────────────────────────────────────────────────────────────

function element(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Return the chart as an SVG text, with the ticks and ranges that are on the screen. */
export function svgText(chart) {
  const { plot, lines } = chart;
  const [width, height] = [plot.width, plot.height + HEAD + LINE * lines.length];
  const area = box(plot);
  const root = element("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}`, "font-family": FONT });
  root.append(
    element("rect", { width, height, fill: computed("--surface") }),
    element("text", { x: 10, y: 19, "font-size": 14, "font-weight": 600, fill: computed("--text") }, chart.name),
    element("clipPath", { id: "plot" }, element("rect", area)),
    ...axes(plot, area),
    ...marks(chart, plot, area),
    ...gaps(chart, plot, area),
    element("g", { "clip-path": "url(#plot)", fill: "none", "stroke-linejoin": "round", "stroke-linecap": "round" }, ...curves(chart, plot)),
    ...lines.flatMap((line, n) => legend(line, plot.height + HEAD + n * LINE)),
  );
  return new XMLSerializer().serializeToString(root);
}

/** Return the drawing area in pixels of the page. */
function box({ bbox }) {
  const ratio = uPlot.pxRatio;
  const [x, y] = [bbox.left / ratio, bbox.top / ratio + HEAD];
  return { x, y, width: bbox.width / ratio, height: bbox.height / ratio };
}

const place = (plot, value, scale) => plot.valToPos(value, scale, true) / uPlot.pxRatio + (scale === "y" ? HEAD : 0);

function axes(plot, area) {
  const [line, muted] = [computed("--line"), computed("--muted")];
  const label = (attributes, text) => element("text", { "font-size": 11, fill: muted, ...attributes }, text);
  return plot.axes.flatMap((axis, n) =>
    (axis._splits ?? []).flatMap((split, i) => {
      const at = place(plot, split, n ? "y" : "x").toFixed(1);
      const text = String(axis._values?.[i] ?? "");
      if (n) {
        const y = { x1: area.x, x2: area.x + area.width, y1: at, y2: at, stroke: line };
        return [element("line", y), label({ x: area.x - 6, y: Number(at) + 4, "text-anchor": "end" }, text)];
      }
      const x = { x1: at, x2: at, y1: area.y, y2: area.y + area.height, stroke: line };
      return [element("line", x), label({ x: at, y: area.y + area.height + 16, "text-anchor": "middle" }, text)];
    }),
  );
}

function marks(chart, plot, area) {
  return chart.marksOf(plot).map(({ x, kind, label }) => {
    const at = place(plot, x, "x").toFixed(1);
    const colour = markColour(kind);
    const line = { x1: at, x2: at, y1: area.y, y2: area.y + area.height, stroke: colour, "stroke-dasharray": "3 3" };
    const flag = { transform: `translate(${at} ${area.y})`, points: "-4,-5 4,-5 0,1", fill: colour };
    return element("g", { class: "mark" }, element("title", {}, label), element("line", line), element("polygon", flag));
  });
}

/** Return a tick for each value that is not finite. */
function gaps(chart, plot, area) {
  const [width, height] = [2, 7];
  const y = area.y + area.height - height;
  return chart.gapsOf(plot).map((gap) =>
    element("rect", { class: "gap", x: (place(plot, gap, "x") - width / 2).toFixed(1), y, width, height, fill: computed("--bad") }),
  );
}

/** Return one path for each series of uPlot, and one for each band. */
function curves(chart, plot) {
  const path = (index) => pathOf(plot, plot.data[0], plot.data[index]);
  const bands = plot.bands.map(({ series: [top, bottom], fill }) => {
    const points = (index) => pointsOf(plot, plot.data[0], plot.data[index]).flat();
    const outline = [...points(top), ...points(bottom).reverse()].map((point) => point.join(",")).join(" ");
    return element("polygon", { points: outline, fill: fillOf(fill, plot) });
  });
  const drawn = plot.series.flatMap((series, n) => {
    if (!n || series.isEdge) return [];
    const attributes = { d: path(n), stroke: strokeAt(series, plot, n), "stroke-width": series.width };
    return [element("path", series.dash ? { ...attributes, "stroke-dasharray": series.dash.join(" ") } : attributes)];
  });
  return [...bands, ...drawn];
}

const strokeAt = (series, plot, n) => (typeof series.stroke === "function" ? series.stroke(plot, n) : series.stroke);
const fillOf = (fill, plot) => (typeof fill === "function" ? fill(plot, 0) : fill);

/** Return the runs of consecutive finite points; a value that is undefined belongs to another line. */
function pointsOf(plot, xs, ys) {
  const runs = [[]];
  xs.forEach((x, i) => {
    if (ys[i] === null) runs.push([]);
    else if (ys[i] !== undefined)
      runs.at(-1).push([place(plot, x, "x").toFixed(1), place(plot, ys[i], "y").toFixed(1)]);
  });
  return runs.filter((run) => run.length);
}

function pathOf(plot, xs, ys) {
  return pointsOf(plot, xs, ys)
    .map((run) => `M${(run.length > 1 ? run : [run[0], run[0]]).map((point) => point.join(" ")).join("L")}`)
    .join("");
}

function legend(line, top) {
  return [
    element("rect", { x: 10, y: top + 3, width: 10, height: 10, fill: strokeOf(line) }),
    element("text", { x: 26, y: top + 12, "font-size": 12, fill: computed("--text") }, line.label),
  ];
}

// ── CSV ─────────────────────────────────────────────────────────────────────────────────────────────

/** Return the points of a chart within the range shown: a row for each x, a column for each line. */
export function csvText(chart) {
  const { axis } = chart.options;
  const { min, max } = chart.plot.scales.x;
  const columns = chart.lines.flatMap(({ label, columns: [xs, ys], band }) => [
    [label, new Map(xs.map((x, i) => [x, ys[i]]))],
    ...(band ?? []).map((edge, n) => [`${label} ${n ? "upper" : "lower"}`, new Map(xs.map((x, i) => [x, edge[i]]))]),
  ]);
  const all = new Set(chart.lines.flatMap(({ columns: [xs] }) => xs.filter((x) => min <= x && x <= max)));
  const rows = [...all].sort((a, b) => a - b).map((x) => [x, ...columns.map(([, values]) => values.get(x) ?? "")]);
  return [[axis, ...columns.map(([label]) => cell(label))], ...rows].map((row) => row.join(",")).join("\n") + "\n";
}
