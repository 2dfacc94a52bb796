// Shows the current state of the server: models and engines, throughput, queued requests and errors.

import { get } from "../api.js";
import { sparkline } from "../charts.js";
import { ago, badge, bytes, empty, h, pageHead, panel, replace, runLink, short, table } from "../dom.js";
import { errorTable } from "../error_table.js";
import { officialEnvironment, trainingProgram } from "../getting_started.js";
import { redraw, whenChanged } from "../redraw.js";
import { progress, statusBadge } from "./runs.js";

export const title = "Overview";

const SECONDS = 2;
const MAX_SAMPLES = 90;
const NUM_RUNS = 5;
const STATES = { ready: "ok", starting: "busy", failed: "bad" };

/** Tokens per second by model and kind, polled since the page was opened. */
const history = new Map();

export async function render(root, { live, signal }) {
  const parts = {
    summary: h("div"),
    models: h("div", { class: "models" }),
    queue: h("div"),
    errors: h("div"),
    runs: h("div"),
    start: h("div"),
  };
  parts.drawQueue = whenChanged((queue) => redraw(parts.queue, queueTable(queue)));
  parts.drawRuns = whenChanged((runs) => redraw(parts.runs, runs.length ? runTable(runs) : empty("No run yet.")));
  parts.drawErrors = whenChanged((errors) => redraw(parts.errors, errorTable(errors)));
  await live(async () => {
    const [overview, runs] = await Promise.all([
      get("/api/v1/overview", null, signal),
      get("/api/v1/runs", { sort: "-created", limit: NUM_RUNS }, signal),
    ]);
    draw(parts, overview, runs.total_count > 0 || overview.models.some((model) => model.num_runs > 0));
    parts.drawRuns(runs.runs);
    if (!parts.queue.isConnected) {
      replace(
        root,
        pageHead(title, parts.summary),
        parts.models,
        parts.start,
        h("div", { class: "columns" }, panel("Recent runs", parts.runs), panel("Queue", parts.queue)),
        panel("Recent errors", parts.errors),
      );
    }
  }, SECONDS);
}

function draw(parts, overview, hasRuns) {
  replace(
    parts.summary,
    h("span", { class: "muted" }, `version ${overview.version}, started `, ago(overview.started_at)),
  );
  replace(
    parts.models,
    overview.models.length
      ? overview.models.map(modelPanel)
      : panel("Models", empty("This server has no model.", "Start it with one:", "lorimer serve --model lorimer/tiny")),
  );
  parts.drawQueue(overview.queue);
  parts.drawErrors(overview.errors);
  if (hasRuns && parts.start.firstChild) replace(parts.start);
  if (!hasRuns && !parts.start.firstChild) replace(parts.start, firstSteps(overview.models[0]?.name));
}

function modelPanel(model) {
  return h(
    "section",
    { class: "panel model", "data-model": model.name },
    h(
      "header",
      { class: "row" },
      h("h2", null, model.name),
      badge(STATES[model.state] || "idle", [model.state, model.stage].filter(Boolean).join(": ")),
      model.num_deaths > 0 && badge("warn", `started again ${short(model.num_deaths)}×`),
      h("small", { class: "model-facts" }, nature(model)),
    ),
    model.error && h("p", { class: "error-text" }, model.error),
    h(
      "div",
      { class: "readings" },
      speed(model, "training", 0),
      speed(model, "sampling", 1),
      figure(short(model.num_runs), "runs of yours", `${short(model.num_resident_runs)} of all users in memory`),
      figure(short(model.num_running_samples), "samples running", `${short(model.num_waiting_samples)} waiting`),
      figure(bytes(model.memory.engine_bytes), "memory of the engine", machine(model.memory)),
    ),
  );
}

/** Describe the model; known once its engine has run. */
function nature({ architecture, num_parameters: parameters, dtype, quantize, device, max_context: context }) {
  if (!architecture) return "starts with the first request";
  const format = !quantize || quantize === "none" ? dtype : `${dtype} with ${quantize} weights`;
  return `${architecture}, ${short(parameters)} parameters, ${format} on ${device}, context ${short(context)}`;
}

function machine({ machine_bytes: total, available_bytes: available }) {
  return total ? `machine: ${bytes(available)} of ${bytes(total)} free` : null;
}

function speed(model, kind, n) {
  const key = `${model.name} ${kind}`;
  const samples = history.get(key) || [];
  const now = model.tokens_per_second?.[kind] ?? 0;
  samples.push(now);
  if (samples.length > MAX_SAMPLES) samples.shift();
  history.set(key, samples);
  const label = `${kind}: ${short(Math.round(now))} tokens per second`;
  return h(
    "div",
    { class: "reading", "data-speed": kind },
    h("b", null, short(Math.round(now))),
    h("small", null, `tokens/s ${kind}`),
    sparkline(samples, label, n),
  );
}

function figure(value, label, note) {
  return h("div", { class: "reading" }, h("b", null, value), h("small", null, label), note && h("small", null, note));
}

function runTable(runs) {
  const columns = [
    { label: "Run", wide: true, value: (run) => runLink(run.run_id, run.name) },
    { label: "Status", class: "tight", value: statusBadge },
    { label: "Steps", number: true, value: progress },
    { label: "Created", class: "tight", value: (run) => ago(run.created_at) },
  ];
  return table(columns, runs, (run) => ({ "data-row": run.run_id }));
}

function queueTable(queue) {
  if (!queue.length)
    return empty("Nothing waits.", "Requests of all runs and samples appear here while they are queued or running.");
  const hasOthers = new Set(queue.map((row) => row.user)).size > 1;
  return table(
    [
      hasOthers && { label: "User", value: (row) => row.user },
      {
        label: "Run",
        class: "tight",
        value: (row) => (row.run_id ? runLink(row.run_id) : "–"),
      },
      { label: "Kind", class: "tight", value: (row) => row.kind },
      { label: "Requests", number: true, value: (row) => short(row.num_requests) },
      { label: "Tokens", number: true, value: (row) => short(row.num_tokens) },
    ].filter(Boolean),
    queue,
    (row) => ({ "data-row": `${row.user} ${row.run_id} ${row.kind}` }),
  );
}

function firstSteps(model) {
  return panel(
    "First steps",
    empty(
      "No run yet.",
      "This trains the model for a few steps; the run appears here as soon as it starts.",
      trainingProgram(model),
    ),
    empty(
      "Have a script for the tinker SDK?",
      "It runs unchanged with two variables set. A server without keys takes any key that begins with tml-.",
      officialEnvironment(),
    ),
  );
}
