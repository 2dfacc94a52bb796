// Lists the user's runs, newest first, with search and live state; ticked runs are compared in one chart.

import { get, part, post } from "../api.js";
import {
  ago,
  badge,
  button,
  empty,
  h,
  moment,
  pageHead,
  panel,
  replace,
  runLink,
  searchBox,
  short,
  shortRun,
  table,
} from "../dom.js";
import { officialEnvironment, trainingProgram } from "../getting_started.js";
import { redraw, whenChanged } from "../redraw.js";

export const title = "Runs";

const SECONDS = 4;
const PAGE = 100;
const NUM_SEARCHED = 1000;
const MAX_COMPARED = 8;
const ACTIVE_SECONDS = 60;

export async function render(root, { query, live, setQuery, navigate, signal }) {
  const state = {
    runs: [],
    total: 0,
    queued: new Map(),
    names: new Map(),
    search: query.get("q") || "",
    shown: PAGE,
    chosen: new Set(),
  };
  const list = h("div");
  const compare = button("Compare", () => navigate(comparison([...state.chosen])), {
    class: "primary",
    disabled: true,
  });
  const drawChanged = whenChanged(() => drawList(state, list, compare, more));
  const draw = () =>
    drawChanged([state.runs, state.total, [...state.queued], [...state.names], state.search, activity(state)]);
  const more = async () => {
    state.shown += state.search ? NUM_SEARCHED : PAGE;
    await load(state, signal);
    draw();
  };
  const search = searchBox("Search runs by id, model, name or metadata", "Search runs", state.search, (text) => {
    state.search = text;
    setQuery({ q: text });
    draw();
    if (text && state.shown < NUM_SEARCHED && state.runs.length < state.total) more();
  });
  await live(async () => {
    await load(state, signal);
    if (!list.isConnected) replace(root, pageHead(title, search, compare), panel(null, list));
    draw();
  }, SECONDS);
}

/** Return the URL that shows several runs in one chart. */
function comparison([first, ...others]) {
  return `/console/runs/${part(first)}${others.length ? `?compare=${others.map(part).join(",")}` : ""}`;
}

async function load(state, signal) {
  const [runs, overview] = await Promise.all([
    get("/api/v1/training_runs", { limit: state.shown }, signal),
    get("/api/v1/overview", null, signal),
  ]);
  state.runs = runs.training_runs;
  state.total = runs.cursor.total_count;
  state.queued = new Map();
  for (const row of overview.queue)
    if (row.run_id) state.queued.set(row.run_id, (state.queued.get(row.run_id) || 0) + row.num_requests);
  if (state.runs.some((run) => !state.names.has(sessionOf(run.training_run_id)))) await loadNames(state, signal);
}

/** Fetch the names of sessions; runs have no names. */
async function loadNames(state, signal) {
  const { sessions } = await post("/api/v1/sessions/search", { limit: 200 }, signal);
  for (const session of sessions) state.names.set(session.session_id, session.display_name || "");
  for (const run of state.runs) {
    const session = sessionOf(run.training_run_id);
    if (!state.names.has(session)) state.names.set(session, "");
  }
}

export const sessionOf = (runId) => runId.split(":")[0];

/** Build the state badge of a run; queued operations take precedence over the last activity. */
export function stateOf(run, numQueued) {
  if (run.corrupted) return badge("bad", "damaged");
  if (numQueued) return badge("busy", `${short(numQueued)} queued`);
  return isActive(run) ? badge("ok", "active") : badge("idle", "idle");
}

const isActive = (run) => Date.now() - moment(run.last_request_time) < ACTIVE_SECONDS * 1000;

/** Refresh badges: a run becomes idle with time alone. */
const activity = (state) => state.runs.map((run) => isActive(run));

function matches(run, state) {
  const metadata = Object.entries(run.user_metadata || {}).flat();
  const text = [run.training_run_id, run.base_model, state.names.get(sessionOf(run.training_run_id)), ...metadata]
    .join(" ")
    .toLowerCase();
  return state.search
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

function drawList(state, list, compare, more) {
  const found = state.runs.filter((run) => matches(run, state));
  const hidden = state.total - state.runs.length;
  redraw(
    list,
    found.length ? runTable(found, state, compare) : nothing(state),
    hidden > 0 &&
      h(
        "p",
        { class: "row" },
        h("span", { class: "muted" }, `${short(hidden)} older runs are not searched.`),
        button("Show more", more, { class: "small" }),
      ),
  );
  showChosen(state, compare);
}

function nothing(state) {
  if (state.total)
    return empty("No run matches.", "The search matches ids, base models, session names and metadata.");
  return [
    empty("No run yet.", "This trains the bundled model a little:", trainingProgram()),
    empty("Have a script for the tinker SDK?", "It runs unchanged with two variables set:", officialEnvironment()),
  ];
}

function runTable(runs, state, compare) {
  const tick = (run) => {
    const id = run.training_run_id;
    const box = h("input", {
      type: "checkbox",
      checked: state.chosen.has(id),
      "data-run": id,
      "aria-label": `Compare ${id}`,
      onchange: () => {
        state.chosen[box.checked ? "add" : "delete"](id);
        showChosen(state, compare);
      },
    });
    return box;
  };
  return table(
    [
      { label: "Compare", class: "tight", value: tick },
      { label: "Run", wide: true, value: (run) => nameOf(run, state) },
      { label: "State", class: "tight", value: (run) => stateOf(run, state.queued.get(run.training_run_id)) },
      { label: "Base model", class: "tight", value: (run) => run.base_model },
      { label: "Rank", number: true, value: (run) => run.lora_rank },
      { label: "Metadata", value: (run) => tags(run.user_metadata) },
      { label: "Last checkpoint", value: (run) => lastCheckpoint(run) },
      { label: "Last request", class: "tight", value: (run) => ago(run.last_request_time) },
    ],
    runs,
    (run) => ({ "data-row": run.training_run_id }),
  );
}

/** Build the link of a run, labelled with the name of its session if it has one. */
function nameOf({ training_run_id: id }, state) {
  const name = state.names.get(sessionOf(id));
  return h(
    "div",
    { class: "stack" },
    runLink(id, name),
    name && h("small", { class: "mono", title: id }, shortRun(id)),
  );
}

export function tags(metadata) {
  return h(
    "div",
    { class: "tags" },
    Object.entries(metadata || {}).map(([name, value]) => h("span", { class: "tag" }, `${name}: ${value}`)),
  );
}

function lastCheckpoint(run) {
  const found = [run.last_checkpoint, run.last_sampler_checkpoint]
    .filter(Boolean)
    .sort((a, b) => moment(b.time) - moment(a.time))[0];
  return found ? [found.checkpoint_id.split("/")[1], " ", h("small", null, ago(found.time))] : "–";
}

function showChosen(state, compare) {
  const count = state.chosen.size;
  compare.disabled = count < 1 || count > MAX_COMPARED;
  compare.textContent = count ? `Compare ${count}` : "Compare";
  compare.title =
    count > MAX_COMPARED ? `At most ${MAX_COMPARED} runs fit in one chart` : "Tick runs to see them in one chart";
}
