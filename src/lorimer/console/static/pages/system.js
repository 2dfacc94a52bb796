// Shows the system over time: CPU, memory, GPUs, disk, queues and throughput, as the server samples them.

import { get } from "../api.js";
import { chartTools } from "../chart_tools.js";
import { MetricChart } from "../charts.js";
import { bytes, choice, empty, h, pageHead, replace, short } from "../dom.js";

export const title = "System";

const RANGES = [
  ["hour", "last hour"],
  ["day", "last day"],
  ["week", "last week"],
];
const SECONDS = { hour: 3600, day: 86_400, week: 604_800 };
const POLL_SECONDS = 5;
const percent = (value) => (value === null ? "–" : `${Number(value.toPrecision(3))} %`);
/** What is drawn: a chart for each kind, and how its values are written. */
const KINDS = [
  ["tokens", "Tokens per second", (value) => (value === null ? "–" : short(Math.round(value * 10) / 10))],
  ["queue", "Unfinished requests", short],
  ["cpu", "CPU, of all cores", percent],
  ["gpu", "GPU utilisation", percent],
  ["memory", "Memory", bytesOf],
  ["gpu_memory", "Memory of GPUs", bytesOf],
  ["disk", "Disk of the data directory", bytesOf],
];

export async function render(root, { query, setQuery, live, signal }) {
  const view = {
    range: SECONDS[query.get("range")] ? query.get("range") : "hour",
    series: new Map(),
    charts: new Map(),
    last: null,
    grid: h("div", { class: "charts system" }),
    note: h("p", { class: "muted" }),
    signal,
  };
  const ranges = choice("Range", RANGES, view.range, async (range) => {
    Object.assign(view, { range, series: new Map(), last: null });
    setQuery({ range: range === "hour" ? null : range });
    await refresh(view);
  });
  await live(async () => {
    await refresh(view);
    if (!view.grid.isConnected) replace(root, pageHead(title, ranges), view.note, view.grid);
  }, POLL_SECONDS);
}

/** Fetch what is new since the last answer, and draw it. */
async function refresh(view) {
  const { range } = view;
  const found = await get("/api/v1/system", { range, after: view.last }, view.signal);
  if (range !== view.range) return; // another range was chosen in the meantime
  for (const { source, kind, name, points } of found.series) {
    const key = JSON.stringify([source, kind, name]);
    if (!view.series.has(key)) view.series.set(key, { source, kind, name, points: [] });
    const known = view.series.get(key).points;
    const last = known.at(-1)?.[0] ?? -Infinity;
    for (const point of points) if (point[0] > last) known.push(point);
    view.last = Math.max(view.last ?? 0, points.at(-1)?.[0] ?? 0);
  }
  const first = found.now - SECONDS[range];
  for (const one of view.series.values()) one.points = one.points.filter(([at]) => at >= first);
  draw(view, found.period_seconds);
}

function draw(view, period) {
  const shown = [...view.series.values()].filter(({ points }) => points.length);
  const sources = new Set(shown.map(({ source }) => source));
  const by = sources.size === 1 ? "the server" : `${sources.size} processes`;
  const shades = period < 60 ? "" : " Shades reach to the highest sample.";
  view.note.textContent = shown.length ? `Sampled by ${by}; a point is ${written(period)}.${shades}` : "";
  const charts = KINDS.flatMap(([kind, label, value]) => {
    const series = shown.filter((one) => one.kind === kind);
    if (!series.length) return [];
    const chart = chartOf(view, kind, label);
    const lines = series.map((one, n) => lineOf(one, n, sources.size > 1, period));
    chart.isLabelled = true;
    chart.update(lines, { axis: "clock", isLog: false, smoothing: 0, value, marks: [] });
    return [chart.element];
  });
  const isSame = charts.length === view.grid.childElementCount && charts.every((node, i) => node === view.grid.children[i]);
  if (!charts.length)
    replace(view.grid, empty("No sample yet.", `The first point of this range follows ${written(period)} after the start.`));
  else if (!isSame) view.grid.replaceChildren(...charts);
}

const written = (period) => (period < 60 ? `${short(period)} s` : `${short(period / 60)} min`);

function chartOf(view, kind, label) {
  if (!view.charts.has(kind)) {
    const chart = new MetricChart(label, "engine", view.signal, { tools: (one) => chartTools(one), sync: "system" });
    chart.element.dataset.kind = kind;
    view.charts.set(kind, chart);
  }
  return view.charts.get(kind);
}

/** Return a line with the range up to the highest sample as its band; a pause in the samples is a gap. */
function lineOf({ source, name, points }, n, hasSources, period) {
  const rows = points.flatMap((point, i) => {
    const before = points[i - 1]?.[0] ?? point[0];
    return point[0] - before > 3 * Math.max(period, 5) ? [[before + period, null, null], point] : [point];
  });
  const column = (i) => rows.map((row) => row[i]);
  const [xs, means, highs] = [column(0), column(1), column(2)];
  const label = hasSources ? `${name} · ${source}` : name;
  const isRange = points.some(([, mean, most]) => most > mean);
  return { label, colour: n, columns: [xs, means], sample: null, band: isRange ? [means, highs] : null, isRange };
}

function bytesOf(value) {
  return value === null ? "–" : bytes(Math.round(value));
}
