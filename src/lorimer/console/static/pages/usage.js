// Shows tokens by hour or day and by model, kind and session, as bars and as tables; and the current checkpoint
// storage. Hours are UTC, as on the server.

import { get, part, post } from "../api.js";
import { stackedBars } from "../bars.js";
import { bytes, choice, commandBlock, empty, h, pageHead, panel, quotaLine, replace, table } from "../dom.js";
import { whenChanged } from "../redraw.js";

export const title = "Usage";

const HOUR = 3_600_000;
const DAY = 24 * HOUR;
const MAX_DAYS = 14; // per request
const MAX_NAMED = 100; // newest sessions whose names are shown
const RANGES = [
  ["1", "24 hours, by hour"],
  ["7", "7 days"],
  ["14", "14 days"],
  ["28", "28 days"],
  ["84", "12 weeks"],
];
const KINDS = [
  ["training", "Trained"],
  ["prompt", "Prompt"],
  ["cached", "Prompt, cached"],
  ["sampled", "Sampled"],
];

export async function render(root, { query, signal, live, setQuery }) {
  const chosen = {
    days: RANGES.some(([days]) => days === query.get("days")) ? query.get("days") : "7",
    by: query.get("by") === "model" ? "model" : "kind",
  };
  const body = h("div", { class: "stack-wide" });
  let found = null;
  const draw = () => found && replace(body, report(found, chosen.by));
  const drawChanged = whenChanged((now) => ((found = now), draw()));
  const load = async () => {
    const wanted = chosen.days;
    const usage = await loadUsage(Number(wanted), signal);
    if (wanted === chosen.days) drawChanged(usage);
  };
  const choose = async (values) => {
    Object.assign(chosen, values);
    setQuery({ days: chosen.days, by: chosen.by });
    if ("by" in values) draw();
    else await load();
  };
  root.append(
    pageHead(
      "Usage",
      choice("Time", RANGES, chosen.days, (days) => choose({ days })),
      choice(
        "Bars by",
        [
          ["kind", "bars by kind"],
          ["model", "bars by model"],
        ],
        chosen.by,
        (by) => choose({ by }),
      ),
    ),
    body,
  );
  await live(load, 30);
}

// ── what was used ───────────────────────────────────────────────────────────────────────────────────

/** Fetch the usage events of the last days, by hour or day, and the current storage. */
async function loadUsage(days, signal) {
  const size = days === 1 ? HOUR : DAY;
  const end = (Math.floor(Date.now() / size) + 1) * size;
  const start = end - days * DAY;
  const requests = [];
  for (let from = start; from < end; from += MAX_DAYS * DAY) {
    const to = Math.min(end, from + MAX_DAYS * DAY);
    requests.push(get("/api/v1/billing/usage/events", { starting_on: iso(from), ending_before: iso(to) }, signal));
  }
  const [storage, { sessions }, ...pages] = await Promise.all([
    get("/api/v1/billing/usage/checkpoints/current", null, signal),
    post("/api/v1/sessions/search", { limit: MAX_NAMED }, signal),
    ...requests,
  ]);
  const events = pages
    .flatMap((page) => page.data)
    .map((event) => ({
      slot: Math.floor(Date.parse(event.bucket_start) / size) * size,
      model: event.base_model || "(none)",
      session: event.session_id || "",
      ...amountOf(event.event_info),
    }));
  return {
    events,
    storage: storage.data,
    quotas: storage.quotas,
    names: new Map(sessions.map((one) => [one.session_id, one.display_name])),
    slots: Array.from({ length: (end - start) / size }, (_, i) => start + i * size),
    size,
  };
}

const iso = (time) => new Date(time).toISOString();

function amountOf(info) {
  if (info.type === "checkpoint") return { kind: "checkpoints", amount: info.count };
  const kind = {
    training: "training",
    sampling_sample: "sampled",
    sampling_prefill: info.cached ? "cached" : "prompt",
  }[info.type];
  return kind ? { kind, amount: info.token_count } : { kind: "other", amount: 0 };
}

/** Sum amounts by kind for each value of a key. Return a map from the key. */
function sums(events, key) {
  const found = new Map();
  for (const event of events) {
    const row = found.get(event[key]) || { key: event[key] };
    row[event.kind] = (row[event.kind] || 0) + event.amount;
    found.set(event[key], row);
  }
  return found;
}

const total = (rows, kind) => rows.reduce((sum, row) => sum + (row[kind] || 0), 0);
const count = (value) => (value || 0).toLocaleString("en");

// ── how it is shown ─────────────────────────────────────────────────────────────────────────────────

function report({ events, storage, quotas, names, slots, size }, by) {
  const models = [...sums(events, "model").values()];
  const figures = KINDS.map(([kind, label]) => [label, count(total(models, kind))]);
  figures.push(["Checkpoints saved", count(total(models, "checkpoints"))]);
  const unit = size === HOUR ? "hour" : "day";
  return [
    panel(
      null,
      h(
        "div",
        { class: "figures-row" },
        figures.map(([label, text]) =>
          h("div", { class: "figure" }, h("b", null, text), h("span", { class: "muted" }, label)),
        ),
      ),
    ),
    events.length
      ? [
          panel(
            `Tokens by ${unit} (UTC)`,
            stackedBars({
              name: `Tokens by ${unit}`,
              labels: slots.map((slot) => slotName(slot, size)),
              series: seriesOf(events, slots, by),
            }),
          ),
          panel(
            "By model",
            usageTable("Model", models, (row) => row.key, true),
          ),
          panel(
            `By ${unit} (UTC)`,
            usageTable(
              unit === "hour" ? "Hour" : "Day",
              [...sums(events, "slot").values()].sort((a, b) => b.key - a.key),
              (row) => slotName(row.key, size).long,
            ),
          ),
          panel(
            "By session",
            usageTable("Session", bySize(sums(events, "session")), (row) =>
              row.key
                ? sessionLink(row.key, names.get(row.key))
                : "none: playground and OpenAI API",
            ),
          ),
        ]
      : panel(
          null,
          empty(
            "Nothing was used in this time.",
            "Train or sample, or choose a longer time.",
            `lorimer demo --base-url ${location.origin}`,
          ),
        ),
    panel(
      "Storage of checkpoints",
      storageTable(storage),
      quotaLine(quotas),
      commandBlock(`lorimer usage --by day --base-url ${location.origin}`),
    ),
  ];
}

const sessionLink = (id, name) =>
  h(
    "div",
    { class: "stack" },
    h("a", { class: name ? null : "mono", href: `/console/sessions/${part(id)}` }, name || id),
    name && h("small", { class: "mono" }, id),
  );

const bySize = (found) =>
  [...found.values()]
    .sort((a, b) => KINDS.reduce((sum, [kind]) => sum + (b[kind] || 0) - (a[kind] || 0), 0))
    .slice(0, 100);

/** Return the series of the chart: one per kind or per model. */
function seriesOf(events, slots, by) {
  const tokens = events.filter((event) => KINDS.some(([kind]) => kind === event.kind));
  const names =
    by === "kind"
      ? KINDS.filter(([kind]) => tokens.some((event) => event.kind === kind))
      : [...new Set(tokens.map((event) => event.model))].sort().map((model) => [model, model]);
  return names.map(([value, name]) => {
    const amounts = new Map(slots.map((slot) => [slot, 0]));
    for (const event of tokens)
      if (event[by] === value) amounts.set(event.slot, amounts.get(event.slot) + event.amount);
    return { name, values: [...amounts.values()] };
  });
}

function slotName(slot, size) {
  const text = iso(slot);
  return size === HOUR
    ? { short: text.slice(11, 16), long: `${text.slice(0, 10)} ${text.slice(11, 16)}` }
    : { short: text.slice(5, 10), long: text.slice(0, 10) };
}

function usageTable(label, rows, name, withTotal = false) {
  const columns = [{ label, wide: true, value: name }];
  for (const [kind, text] of [...KINDS, ["checkpoints", "Checkpoints"]])
    columns.push({ label: text, number: true, value: (row) => count(row[kind]) });
  const sum = Object.fromEntries(
    [...KINDS.map(([kind]) => kind), "checkpoints"].map((kind) => [kind, total(rows, kind)]),
  );
  return table(columns, withTotal && rows.length > 1 ? [...rows, { key: "Total", ...sum }] : rows, (row) => ({
    "data-row": String(row.key),
  }));
}

function storageTable(storage) {
  if (!storage.length) return empty("No checkpoints are kept.");
  return table(
    [
      { label: "Project", wide: true, value: (row) => row.project_id || "default" },
      { label: "Checkpoints", number: true, value: (row) => count(row.checkpoint_count) },
      { label: "Size", number: true, value: (row) => bytes(row.size_bytes) },
    ],
    storage,
  );
}
