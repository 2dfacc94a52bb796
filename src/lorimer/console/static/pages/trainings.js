// Starts trainings in processes of the server, and lists them: choose a kind and a model, look at data, measure, start.

import { del, get, part, post } from "../api.js";
import { PROBLEMS, dataPreview } from "../data_preview.js";
import {
  ago,
  badge,
  button,
  bytes,
  choice,
  confirmDialog,
  copyButton,
  empty,
  facts,
  h,
  pageHead,
  panel,
  replace,
  runLink,
  short,
  span,
  table,
  toast,
} from "../dom.js";
import { redraw, whenChanged } from "../redraw.js";
import { settingFields } from "../setting_fields.js";

export const title = "Train";

const STATES = { running: "busy", finished: "ok", failed: "bad", stopped: "warn", interrupted: "warn" };
const RECIPE = "recipe:";

export async function render(root, { query, signal, live, setQuery }) {
  const state = { chosen: query.get("training") || "" };
  const parts = { form: h("div"), list: h("div"), details: h("div") };
  root.append(pageHead(title), panel("New training", parts.form), panel("Trainings", parts.list), parts.details);
  const drawList = whenChanged((found) => redraw(parts.list, trainingTable(found, state.chosen, actions)));
  const drawDetails = whenChanged((found) => followEnd(parts.details, () => redraw(parts.details, found && details(found))));
  const load = async () => {
    const { trainings } = await get("/api/v1/trainings", { limit: 50 }, signal);
    drawList(trainings);
    if (!trainings.some((one) => one.training_id === state.chosen)) state.chosen = "";
    drawDetails(state.chosen ? await get(`/api/v1/trainings/${part(state.chosen)}`, null, signal) : null);
  };
  const choose = async (training) => {
    state.chosen = training.training_id;
    setQuery({ training: state.chosen });
    await load();
  };
  const act = (work) => async (training) => {
    try {
      await work(training);
      await load();
    } catch (error) {
      if (!signal.aborted && error.status !== 401) toast(error.message, "bad");
    }
  };
  const actions = {
    show: act(choose),
    stop: act((one) => post(`/api/v1/trainings/${part(one.training_id)}/stop`, {})),
    resume: act(async (one) => {
      await post(`/api/v1/trainings/${part(one.training_id)}/resume`, {});
      await choose(one);
    }),
    remove: act(async (one) => {
      const text = "Its data and output are deleted. Its run and checkpoints stay.";
      if (await confirmDialog({ title: "Delete this training?", text, action: "Delete", danger: true }))
        await del(`/api/v1/trainings/${part(one.training_id)}`);
    }),
  };
  await live(load, 2);
  await drawForm(parts.form, signal, choose);
}

/** Show the end of the output, as it grows, unless somebody reads further up. */
function followEnd(node, draw) {
  const find = () => node.querySelector(".output");
  const before = find();
  const id = before?.dataset.of;
  const top = before && before.scrollTop + before.clientHeight < before.scrollHeight - 1 ? before.scrollTop : null;
  draw();
  const after = find();
  if (after) after.scrollTop = after.dataset.of === id && top !== null ? top : after.scrollHeight;
}

// ── a new training ──────────────────────────────────────────────────────────────────────────────────

async function drawForm(place, signal, choose) {
  replace(place, h("p", { class: "muted", role: "status" }, "Reading the kinds of training …"));
  const [offer, models] = await Promise.all([
    get("/api/v1/training_kinds", null, signal),
    get("/v1/models", null, signal),
  ]);
  if (!offer.is_offered) {
    replace(place, empty("This server starts no trainings.", offer.reason, "lorimer train sft --config run.yaml"));
    return;
  }
  const names = models.data.map((one) => one.id).filter((id) => !id.startsWith("tinker://"));
  replace(place, form(offer.kinds, names, signal, choose));
}

function form(kinds, models, signal, choose) {
  const state = { kind: Object.keys(kinds)[0], model: models[0], fields: null };
  const parts = { about: h("p", { class: "muted" }), settings: h("div"), report: h("div", { role: "status" }) };
  const forget = () => replace(parts.report); // it is of other rows, or of another form
  const files = { data: fileField("Rows to train on", forget), held_out_data: fileField("Held-out rows (optional)", forget) };
  const setKind = (kind) => {
    state.kind = kind;
    state.fields = settingFields(kinds[kind]);
    replace(parts.about, kinds[kind].description);
    replace(parts.settings, state.fields.node);
    forget();
    const isRecipe = kind.startsWith(RECIPE);
    const rows = kinds[kind]["x-rows"];
    files.data.input.required = rows === "needed";
    files.data.node.hidden = rows === "none";
    files.held_out_data.node.hidden = isRecipe;
    checking.hidden = isRecipe; // what a recipe makes of its rows is its own
    measuring.hidden = isRecipe;
  };
  const rows = async () => ({ data: await files.data.text(), held_out_data: await files.held_out_data.text() });
  const busy = (node, work) => async () => {
    node.disabled = true;
    try {
      await work();
    } catch (error) {
      if (signal.aborted || error.status === 401) return;
      toast(error.message, "bad");
    } finally {
      node.disabled = false;
    }
  };
  const check = async () => {
    const sent = await rows();
    if (sent.data === null) return toast("Choose a file of rows first.", "bad");
    const { max_length, train_on } = state.fields.values();
    const asked = { model: state.model, form: state.kind === "full" ? "sft" : state.kind, max_length, train_on };
    replace(parts.report, h("p", { class: "muted" }, "Checking the rows …"));
    try {
      replace(parts.report, dataPreview(await post("/api/v1/data/check", { ...asked, ...sent }, signal)));
    } catch (error) {
      replace(parts.report, empty("The rows cannot be used.", error.message));
    }
  };
  const start = async (isDryRun) => {
    if (!node.reportValidity()) return;
    const settings = { base_model: state.model, ...state.fields.values() };
    const body = { kind: state.kind, settings, dry_run: isDryRun, ...(await rows()) };
    const made = await post("/api/v1/trainings", body, signal);
    toast(isDryRun ? "The dry run has started." : "The training has started.");
    await choose(made);
  };
  const checking = button("Check data", () => busy(checking, check)());
  const measuring = button("Dry run", () => busy(measuring, () => start(true))());
  const starting = h("button", { type: "submit", class: "primary" }, "Start");
  const onsubmit = (event) => {
    event.preventDefault();
    busy(starting, () => start(false))();
  };
  const labelled = (label, input) => h("label", { class: "field" }, h("span", null, label), input);
  const titles = Object.keys(kinds).map((kind) => [kind, kind.startsWith(RECIPE) ? `recipe ${kind.slice(RECIPE.length)}` : kind]);
  const node = h(
    "form",
    { class: "spaced", onsubmit },
    h(
      "div",
      { class: "setting-fields" },
      labelled("Kind", choice("Kind", titles, state.kind, setKind)),
      labelled("Model", choice("Model", models.map((id) => [id, id]), state.model, (id) => (state.model = id))),
      files.data.node,
      files.held_out_data.node,
    ),
    parts.about,
    parts.settings,
    h("div", { class: "row" }, checking, measuring, starting),
    parts.report,
  );
  setKind(state.kind);
  return node;
}

function fileField(label, onchange) {
  const input = h("input", { type: "file", accept: ".jsonl,application/jsonl", "aria-label": label, onchange });
  return {
    input,
    node: h("label", { class: "field" }, h("span", null, label), input),
    text: async function () {
      return input.files.length && !this.node.hidden ? input.files[0].text() : null;
    },
  };
}

// ── trainings ───────────────────────────────────────────────────────────────────────────────────────

function trainingTable(found, chosen, actions) {
  if (!found.length) return empty("No trainings yet.", "Those started in a terminal are among the runs.");
  const named = (label, act, one, attrs) =>
    button(label, () => act(one), { class: "quiet small", "aria-label": `${label} ${nameOf(one)}`, ...attrs });
  const columns = [
    { label: "Training", wide: true, class: "tight", value: (one) => button(nameOf(one), () => actions.show(one), { class: "link" }) },
    { label: "Kind", class: "tight", value: kindOf },
    { label: "Model", class: "tight", value: (one) => one.base_model },
    {
      label: "State",
      value: (one) => [badge(STATES[one.state], one.state), one.error && h("div", { class: "error-text" }, one.error)],
    },
    { label: "Started", value: (one) => ago(one.started_at) },
    { label: "Run", value: (one) => (one.run_id ? runLink(one.run_id, one.run_name) : "–") },
    {
      label: "",
      class: "tight",
      value: (one) => [
        one.state === "running" && named("Stop", actions.stop, one),
        !["running", "finished"].includes(one.state) && named("Resume", actions.resume, one),
        one.state !== "running" && named("Delete", actions.remove, one, { class: "quiet small danger" }),
      ],
    },
  ];
  return table(columns, found, (one) => ({
    "data-row": one.training_id,
    "aria-selected": one.training_id === chosen ? "true" : null,
  }));
}

function kindOf({ kind, dry_run: isDryRun }) {
  if (kind.startsWith(RECIPE)) return "recipe"; // its name has which one
  return isDryRun ? `${kind}, dry run` : kind;
}

const nameOf = (one) =>
  one.kind.startsWith(RECIPE)
    ? `${one.kind.slice(RECIPE.length)} ${one.training_id.slice(0, 6)}`
    : one.settings.name || one.training_id.slice(0, 6);

/** Return what a dry run found, as `lorimer train --dry-run` prints it. */
function measured(result) {
  const problems = Object.entries(result.problems ?? {}).map(([name, count]) => `${count} ${PROBLEMS[name] ?? name}`);
  return [
    ["Examples", result.num_examples && `${short(result.num_examples)}, and ${short(result.num_held_out)} held out`],
    ["Steps", result.num_steps && short(result.num_steps)],
    ["Tokens", result.num_tokens && short(result.num_tokens)],
    ["Truncated", result.num_truncated ? `${short(result.num_truncated)} examples` : null],
    ["Problems", problems.join(", ")],
    ["A step takes", result.seconds_per_step && span(result.seconds_per_step)],
    ["All steps take", result.seconds && `${span(result.seconds)}, without evaluations and checkpoints`],
    ["Evaluations", result.num_evaluations || null],
    ["Memory", result.engine_bytes && `${bytes(result.engine_bytes)} of the engine at its peak, ${bytes(result.available_bytes)} free`],
    ["Learning rate", result.learning_rate && short(result.learning_rate)],
  ];
}

/** Return the last held-out metrics of a training. */
function reached({ metrics = {} }) {
  return Object.entries(metrics).flatMap(([name, value]) => (name.startsWith("test/") ? [[name, short(value)]] : []));
}

function details(one) {
  const result = one.result || {};
  return panel(
    nameOf(one),
    h(
      "div",
      { class: "spaced", "data-training": one.training_id },
      facts([
        ["State", badge(STATES[one.state], one.state)],
        ["Error", one.error],
        ["Run", one.run_id && runLink(one.run_id, one.run_name)],
        ["Starts", one.num_starts > 1 ? one.num_starts : null],
        ...(one.dry_run ? measured(result) : reached(result)),
      ]),
      result.sampler_path && h("div", { class: "row" }, h("code", null, result.sampler_path), copyButton(result.sampler_path)),
      h("pre", { class: "output", tabindex: "0", "aria-label": "Output", "data-of": one.training_id }, one.output || "Nothing was printed yet."),
    ),
  );
}
