// Draws the operations of a run over time: one row per kind, with the queueing time (pale) and the compute time (solid)
// of each operation; failures are marked. Also shows them as a table.

import { ago, badge, empty, h, moment, short, span, svg, table } from "./dom.js";

const WIDTH = 1000;
const ROW = 22;
const STATES = {
  done: "ok",
  queued: "busy",
  running: "busy",
  failed: "bad",
  rejected: "bad",
  cancelled: "warn",
  abandoned: "warn",
};
const COLOURS = {
  forward_backward: 0,
  optim_step: 1,
  forward: 6,
  save_weights: 4,
  save_weights_for_sampler: 5,
  load_weights: 2,
  create_model: 7,
};

const colourOf = (kind) => `var(--c${COLOURS[kind] ?? 3})`;
const seconds = (time) => (moment(time)?.getTime() ?? NaN) / 1000;

/** Build the drawing and its legend; operations are newest first, as from the API. */
export function timeline(operations, now = Date.now() / 1000) {
  if (!operations.length)
    return empty("No operations yet.", "Each forward_backward, optim_step, save and load of the run appears here.");
  const kinds = [...new Set(operations.map((operation) => operation.kind))].sort();
  const end = Math.max(
    ...operations.map((operation) => (operation.finished_at ? seconds(operation.finished_at) : now)),
  );
  const begin = Math.min(...operations.map((operation) => seconds(operation.received_at)));
  const scale = WIDTH / Math.max(end - begin, 1e-3);
  const x = (time) => (time - begin) * scale;
  const bars = [...operations]
    .reverse()
    .map((operation) => bar(operation, kinds.indexOf(operation.kind) * ROW, x, now));
  const lines = kinds.map((_, row) =>
    svg("line", { x1: 0, x2: WIDTH, y1: (row + 1) * ROW, y2: (row + 1) * ROW, class: "timeline-line" }),
  );
  const numFailed = operations.filter((operation) => operation.error).length;
  const label = `${operations.length} operations over ${span(end - begin)}, ${numFailed} failed`;
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${kinds.length * ROW}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    lines,
    bars,
  );
  drawing.style.height = `${kinds.length * ROW}px`;
  return h(
    "div",
    { class: "timeline", "data-operations": operations.length },
    h(
      "div",
      { class: "timeline-rows" },
      h(
        "ul",
        null,
        kinds.map((kind) => kindLabel(kind)),
      ),
      drawing,
    ),
    h(
      "div",
      { class: "timeline-scale muted" },
      h("span", null, `${span(end - begin)} ending `, ago(end)),
      h("span", null, "pale: queued, solid: computed, red edge: failed"),
    ),
  );
}

function kindLabel(kind) {
  const swatch = h("i", { class: "swatch" });
  swatch.style.background = colourOf(kind);
  return h("li", null, swatch, h("span", null, kind));
}

function bar(operation, top, x, now) {
  const received = seconds(operation.received_at);
  const finished = operation.finished_at ? seconds(operation.finished_at) : now;
  const started = operation.started_at ? seconds(operation.started_at) : finished;
  const part = (from, to, name) =>
    svg("rect", {
      x: x(from).toFixed(2),
      y: top + 4,
      width: Math.max(x(to) - x(from), 1).toFixed(2),
      height: ROW - 8,
      class: name,
    });
  const group = svg(
    "g",
    { class: operation.error ? "failed" : null },
    svg("title", null, tip(operation, started - received, finished - started)),
    part(received, Math.max(started, received), "waiting"),
    operation.started_at && part(started, finished, "running"),
    operation.error &&
      svg("rect", { x: (x(finished) - 2).toFixed(2), y: top + 1, width: 4, height: ROW - 2, class: "failure" }),
  );
  group.style.color = colourOf(operation.kind);
  return group;
}

function tip(operation, waited, computed) {
  const times = `waited ${span(waited)}, computed ${span(computed)}`;
  return [`${operation.seq_id}: ${operation.kind}, ${operation.state}`, times, operation.error]
    .filter(Boolean)
    .join("\n");
}

/** Build the table of the latest operations. */
export function operationTable(operations) {
  const listed = table(
    [
      { label: "Number", number: true, value: (one) => one.seq_id },
      { label: "Kind", class: "tight", value: (one) => one.kind },
      { label: "State", class: "tight", value: (one) => badge(STATES[one.state] || "idle", one.state) },
      { label: "Received", class: "tight", value: (one) => ago(one.received_at) },
      {
        label: "Waited",
        number: true,
        value: (one) => (one.started_at ? span(Math.max(0, seconds(one.started_at) - seconds(one.received_at))) : "–"),
      },
      {
        label: "Computed",
        number: true,
        value: (one) =>
          one.started_at && one.finished_at ? span(seconds(one.finished_at) - seconds(one.started_at)) : "–",
      },
      { label: "Tokens", number: true, value: (one) => (one.tokens ? short(one.tokens) : "–") },
      { label: "Error", wide: true, value: (one) => one.error && h("span", { class: "error-text" }, one.error) },
    ],
    operations,
  );
  listed.classList.add("compact");
  return listed;
}
