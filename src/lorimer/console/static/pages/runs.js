// Lists the user's runs: searched, sorted, grouped and paged by the server, with columns of the user's choice. The URL
// contains all choices. Ticked runs are compared in one chart.

import { get, part } from "../api.js";
import { ago, badge, button, choice, empty, formDialog, h, pageHead, panel, replace, runLink, searchBox } from "../dom.js";
import { short, shortRun, sortButton, sortChoice, span, table } from "../dom.js";
import { officialEnvironment, trainingProgram } from "../getting_started.js";
import { redraw, whenChanged } from "../redraw.js";
import { Scatter } from "../scatter.js";

export const title = "Runs";

const SECONDS = 4;
const PAGE = 100;
const MAX_COMPARED = 16;
const MAX_DRAWN = 1000;
const TYPING_MS = 250;
const ARCHIVED = [
  ["no", "not archived"],
  ["yes", "archived"],
  ["any", "all runs"],
];

export async function render(root, { query, live, setQuery, navigate, signal }) {
  const state = {
    search: query.get("q") || "",
    sort: query.get("sort") || "-created",
    group: query.get("group") || "",
    columns: (query.get("columns") || "").split(",").filter(Boolean),
    archived: query.get("archived") || "no",
    plot: plotOf(query),
    drawn: [],
    shown: PAGE,
    runs: [],
    total: 0,
    groups: null,
    open: new Set(),
    fields: { config: [], metrics: [], tags: [] },
    problem: "",
    chosen: new Map(),
  };
  const list = h("div");
  const grouping = h("span");
  const compare = button("Compare", () => navigate(comparison([...state.chosen.keys()])), { class: "primary" });
  const plot = plotPanel(state, setQuery, () => reload());
  const drawChanged = whenChanged(() => drawList(state, list, compare, change));
  state.onChosen = () => plot.draw();
  const draw = () => {
    plot.draw();
    drawSorts([state.columns, state.sort]);
    drawChanged([state.runs, state.total, state.groups, [...state.open], state.columns, state.sort, state.problem]);
  };
  const reload = async () => {
    try {
      await load(state, signal);
    } catch (error) {
      if (signal.aborted) return; // the page was left meanwhile
      throw error;
    }
    replace(grouping, groupChoice(state, change));
    draw();
  };
  const drawSorts = whenChanged(() => redraw(sorting, sortChoice(sortFields(state), state.sort, (sort) => setSort(change, sort))));
  const change = async (values, names) => {
    Object.assign(state, values);
    if (names) setQuery(names);
    await reload();
  };
  let typing;
  const search = searchBox(
    "Search runs by name, id, model, tag, metadata, or conditions such as config.rank>8",
    "Search, or status=failed",
    state.search,
    (text) => {
      clearTimeout(typing);
      typing = setTimeout(() => change({ search: text, shown: PAGE }, { q: text }), TYPING_MS);
    },
  );
  const archived = choice("Archived runs", ARCHIVED, state.archived, (value) =>
    change({ archived: value }, { archived: value === "no" ? null : value }),
  );
  const sorting = h("span");
  const columns = button("Columns", () => chooseColumns(state, change), { class: "quiet" });
  await live(async () => {
    await load(state, signal);
    if (!list.isConnected) {
      replace(grouping, groupChoice(state, change));
      replace(root, pageHead(title, search, grouping, archived, sorting, columns, plot.toggle, compare), plot.element, panel(null, list));
    }
    draw();
  }, SECONDS);
}

/** Return the URL that shows several runs in one chart. */
function comparison([first, ...others]) {
  return `/console/runs/${part(first)}${others.length ? `?compare=${others.map(part).join(",")}` : ""}`;
}

// ── loading ─────────────────────────────────────────────────────────────────────────────────────────

async function load(state, signal) {
  const scope = { q: state.search, archived: state.archived };
  try {
    const [page, groups, fields, drawn] = await Promise.all([
      state.group ? null : fetchRuns(state, state.search, state.shown, signal),
      state.group ? get("/api/v1/run_groups", { ...scope, by: state.group }, signal) : null,
      get("/api/v1/run_fields", { archived: state.archived }, signal),
      state.plot.isOpen ? fetchDrawn(state, signal) : null,
    ]);
    state.drawn = drawn?.runs ?? [];
    state.fields = fields;
    state.runs = page?.runs || [];
    state.total = page?.total_count || 0;
    state.groups = groups && (await Promise.all(groups.groups.map((group) => loadGroup(state, group, signal))));
    state.problem = "";
  } catch (error) {
    if (error.status !== 400) throw error;
    state.problem = error.message; // a condition that is still being typed
  }
}

function fetchRuns(state, q, limit, signal) {
  const query = { q, sort: state.sort, archived: state.archived, fields: state.columns.join(","), limit };
  return get("/api/v1/runs", query, signal);
}

/** Fetch the values of the runs that are drawn as points. */
function fetchDrawn({ plot, search, archived }, signal) {
  const fields = [plot.x, plot.y, plot.colour].filter(Boolean).join(",");
  return fields ? get("/api/v1/runs", { q: search, archived, fields, limit: MAX_DRAWN }, signal) : null;
}

/** Fetch the runs of a group that is open. */
async function loadGroup(state, { value, num_runs: count }, signal) {
  const key = value ?? "";
  if (!state.open.has(key)) return { key, count, runs: [] };
  const condition = `${state.group}="${key.replaceAll('"', "")}"`;
  const { runs } = await fetchRuns(state, `${state.search} ${condition}`, PAGE, signal);
  return { key, count, runs };
}

// ── controls ────────────────────────────────────────────────────────────────────────────────────────

function groupChoice(state, change) {
  const own = ["tag", "status", "base_model", "session"];
  const plain = own.map((name) => [name, `by ${name.replace("_", " ")}`]);
  const fields = state.fields.config.filter((name) => !own.includes(name)).map((name) => [`config.${name}`, `by ${name}`]);
  const known = [["", "not grouped"], ...plain, ...fields];
  if (state.group && !known.some(([name]) => name === state.group)) known.push([state.group, `by ${state.group}`]);
  return choice("Group runs", known, state.group, (value) =>
    change({ group: value, open: new Set(), groups: value ? [] : null }, { group: value || null }),
  );
}

async function chooseColumns(state, change) {
  const names = [
    ...state.fields.config.map((name) => `config.${name}`),
    ...state.fields.metrics.flatMap((name) => [`last.${name}`, `min.${name}`, `max.${name}`]),
  ];
  const answer = await formDialog({
    title: "Choose columns",
    text: "Fields of the configuration, and the last, smallest or largest value of metrics.",
    fields: [
      {
        name: "columns",
        label: "Fields to show",
        value: state.columns.join(", "),
        hint: names.length ? "Separated by commas; choose below, or type a part of a name." : "No run has a configuration or metrics yet.",
        names,
      },
    ],
  });
  if (!answer) return;
  const columns = answer.columns
    .split(",")
    .map((name) => name.trim())
    .filter(Boolean);
  await change({ columns }, { columns: columns.join(",") || null });
}

// ── scatter ─────────────────────────────────────────────────────────────────────────────────────────

const PLOTTED = { x: "plot_x", y: "plot_y", colour: "plot_colour" };

function plotOf(query) {
  const chosen = Object.fromEntries(Object.entries(PLOTTED).map(([name, key]) => [name, query.get(key) || ""]));
  const [isLogX, isLogY] = ["plot_logx", "plot_logy"].map((name) => query.get(name) === "1");
  return { ...chosen, isLogX, isLogY, isOpen: Boolean(chosen.x || chosen.y) };
}

/** Build the panel that draws the runs found, or those that are ticked, as points. */
function plotPanel(state, setQuery, reload) {
  const { plot } = state;
  const scatter = new Scatter();
  const controls = h("div", { class: "row scatter-controls" });
  const element = panel("Scatter", controls, scatter.element);
  const keep = () =>
    setQuery({
      ...Object.fromEntries(Object.entries(PLOTTED).map(([name, key]) => [key, plot.isOpen ? plot[name] : null])),
      plot_logx: plot.isOpen && plot.isLogX ? "1" : null,
      plot_logy: plot.isOpen && plot.isLogY ? "1" : null,
    });
  const set = (values) => {
    Object.assign(plot, values);
    keep();
    return reload();
  };
  const toggle = button("Scatter", () => set({ isOpen: !plot.isOpen, ...firstFields(state) }), {
    class: "quiet",
    title: "Draw a field of the runs against another one",
  });
  const draw = whenChanged(() => {
    replace(controls, plotControls(state, set));
    const chosen = state.drawn.filter((run) => !state.chosen.size || state.chosen.has(run.run_id));
    scatter.draw(chosen, plot);
  });
  return {
    element,
    toggle,
    draw() {
      element.hidden = !plot.isOpen;
      toggle.setAttribute("aria-expanded", String(plot.isOpen));
      if (plot.isOpen) draw([plot, state.drawn.map((run) => [run.run_id, run.name, run.values]), state.fields, [...state.chosen.keys()]]);
    },
  };
}

// What a run is judged by, the best first: held-out measures, then the reward or the loss of training.
const MEASURED = [/^test\/(accuracy|nll)/, /^test\/.*(accuracy|reward)/, /reward\/total$|^reward$/, /nll|loss|reward/];

/** Return what a scatter plot shows first: a field of the configuration against the last value of a metric. */
function firstFields({ plot, fields }) {
  const told = ["learning_rate", "rank", "batch_size"].find((name) => fields.config.includes(name)) ?? fields.config[0];
  const x = plot.x || (told ? `config.${told}` : "steps");
  const measured = MEASURED.map((form) => fields.metrics.find((name) => form.test(name))).find(Boolean) ?? fields.metrics[0];
  return { x, y: plot.y || (measured ? `last.${measured}` : "duration") };
}

function plotControls({ plot, fields }, set) {
  const names = [
    ...["duration", "steps"],
    ...fields.config.map((name) => `config.${name}`),
    ...fields.metrics.flatMap((name) => [`last.${name}`, `min.${name}`, `max.${name}`]),
  ];
  const pick = (label, key, first) => {
    const known = [...new Set([...names, plot[key]])].filter(Boolean).map((name) => [name, name]);
    const field = choice(label, [...first, ...known], plot[key], (value) => set({ [key]: value }));
    return h("label", { class: "check" }, h("span", { class: "muted" }, label.toLowerCase()), field);
  };
  const log = (label, key) => {
    const box = h("input", { type: "checkbox", checked: plot[key], onchange: () => set({ [key]: box.checked }) });
    return h("label", { class: "check" }, box, label);
  };
  return [
    pick("X", "x", []),
    log("log x", "isLogX"),
    pick("Y", "y", []),
    log("log y", "isLogY"),
    pick("Colour", "colour", [["", "none"]]),
  ];
}

// ── drawing ─────────────────────────────────────────────────────────────────────────────────────────

export const sessionOf = (runId) => runId.split(":")[0];

const KINDS = { running: "ok", finished: "idle", failed: "bad", interrupted: "warn" };

/** Build the badge of a run's status, with the error as its title. */
export function statusBadge(run) {
  const node = badge(KINDS[run.status] || "idle", run.status);
  if (run.error) node.title = run.error;
  return node;
}

/** Describe how many steps are done of those planned. */
export function progress(run) {
  if (run.steps_done === null && run.num_steps === null) return null;
  return run.num_steps === null ? short(run.steps_done) : `${short(run.steps_done ?? 0)} of ${short(run.num_steps)}`;
}

function drawList(state, list, compare, change) {
  const hidden = state.total - state.runs.length;
  redraw(
    list,
    state.problem && h("p", { class: "bad", role: "alert" }, state.problem),
    state.groups ? drawGroups(state, compare, change) : state.runs.length ? runTable(state.runs, state, compare, change) : nothing(state),
    !state.groups &&
      hidden > 0 &&
      h(
        "p",
        { class: "row" },
        h("span", { class: "muted" }, `${short(state.runs.length)} of ${short(state.total)} runs are shown.`),
        button("Show more", () => change({ shown: state.shown + PAGE }), { class: "small" }),
      ),
  );
  showChosen(state, compare);
}

function drawGroups(state, compare, change) {
  if (!state.groups.length) return nothing(state);
  return state.groups.map(({ key, count, runs }) => {
    const toggle = () => {
      const open = new Set(state.open);
      if (!open.delete(key)) open.add(key);
      return change({ open });
    };
    const isOpen = state.open.has(key);
    return h(
      "section",
      { class: "run-group", "data-row": `group ${key}` },
      button(
        [h("b", null, key || "none"), " ", h("small", null, `${short(count)} ${count === 1 ? "run" : "runs"}`)],
        toggle,
        { class: "quiet", "aria-expanded": isOpen ? "true" : "false" },
      ),
      isOpen && runTable(runs, state, compare, change),
      isOpen && count > runs.length && h("p", { class: "muted" }, `The first ${short(runs.length)} are shown.`),
    );
  });
}

function nothing(state) {
  if (state.problem) return null;
  if (state.search || state.archived !== "no")
    return empty("No run matches.", "The search matches names, ids, base models, tags, notes, session names and metadata.");
  return [
    empty("No run yet.", "This trains the bundled model a little:", trainingProgram()),
    empty("Have a script for the tinker SDK?", "It runs unchanged with two variables set:", officialEnvironment()),
  ];
}

const setSort = (change, sort) => change({ sort }, { sort: sort === "-created" ? null : sort });

const sortFields = (state) => [
  ["Created", "created"],
  ["Run", "name"],
  ["Status", "status"],
  ["Steps", "steps"],
  ["Base model", "base_model"],
  ["Duration", "duration"],
  ...state.columns.map((name) => [name, name]),
];

function runTable(runs, state, compare, change) {
  const tick = (run) => {
    const box = h("input", {
      type: "checkbox",
      checked: state.chosen.has(run.run_id),
      "data-run": run.run_id,
      "aria-label": `Compare ${run.name} (${run.run_id})`,
      onchange: () => {
        if (box.checked) state.chosen.set(run.run_id, run.name);
        else state.chosen.delete(run.run_id);
        showChosen(state, compare);
        state.onChosen?.();
      },
    });
    return box;
  };
  const onsort = (sort) => setSort(change, sort);
  const startsHigh = (field) => ["created", "duration", "steps"].includes(field) || field.startsWith("max.");
  const head = (label, field) => sortButton(label, field, state.sort, startsHigh(field), onsort);
  const sorted = (label, field, more) => ({ label, head: head(label, field), ...more });
  return table(
    [
      { label: "", head: h("span", { class: "offscreen" }, "Compare"), class: "choose", value: tick },
      sorted("Run", "name", { wide: true, class: "run-name", value: nameOf }),
      sorted("Status", "status", { class: "tight", value: statusBadge }),
      sorted("Steps", "steps", { number: true, value: progress }),
      ...state.columns.map((name) => sorted(name, name, { number: true, class: "chosen-field", value: (run) => shown(run.values?.[name]) })),
      { label: "Tags", value: labels },
      sorted("Base model", "base_model", { class: "tight", value: (run) => run.base_model }),
      sorted("Duration", "duration", { number: true, value: (run) => span(run.duration_seconds) }),
      sorted("Created", "created", { class: "tight", value: (run) => ago(run.created_at) }),
    ],
    runs,
    (run) => ({ "data-row": run.run_id }),
  );
}

const shown = (value) => (typeof value === "number" ? short(value) : (value ?? "–"));

/** Build the link of a run with its id and session below. */
function nameOf(run) {
  return h(
    "div",
    { class: "stack" },
    runLink(run.run_id, run.name),
    h("small", { title: run.run_id }, h("span", { class: "mono" }, shortRun(run.run_id)), run.session_name && ` · ${run.session_name}`),
  );
}

/** Build the tags and metadata of a run. */
export function labels(run) {
  const metadata = Object.entries(run.user_metadata || {}).map(([name, value]) => `${name}: ${value}`);
  const texts = [...run.tags, ...metadata];
  if (!texts.length) return null;
  return h(
    "div",
    { class: "tags" },
    texts.map((text) => h("span", { class: "tag" }, text)),
  );
}

function showChosen(state, compare) {
  const count = state.chosen.size;
  compare.disabled = count < 1 || count > MAX_COMPARED;
  compare.textContent = count ? `Compare ${count}` : "Compare";
  compare.title =
    count > MAX_COMPARED ? `At most ${MAX_COMPARED} runs fit in one chart` : "Tick runs to see them in one chart";
}
