// Shows one run: its charts, alone or compared with others, configuration, checkpoints and operations.

import { get, part } from "../api.js";
import { CheckpointList } from "../checkpoint_list.js";
import { Curves } from "../curves.js";
import {
  ago,
  badge,
  button,
  bytes,
  copyButton,
  empty,
  facts,
  h,
  moment,
  pageHead,
  panel,
  replace,
  short,
} from "../dom.js";
import { saveProgram } from "../getting_started.js";
import { redraw, whenChanged } from "../redraw.js";
import { followSteps, runTabs } from "../run_tabs.js";
import { differences, flatten, runActions, runFacts } from "../run_identity.js";
import { loadEvaluations, scoresByModel } from "../scores.js";
import { operationTable, timeline } from "../timeline.js";
import { sessionOf, statusBadge } from "./runs.js";

export const title = "Run";

const SECONDS = 2;
const NUM_DRAWN = 120;
const NUM_LISTED = 12;

export async function render(root, context) {
  const { params, signal, live, setTitle } = context;
  setTitle(`Run ${params.run}`);
  const parts = { state: h("span", { class: "row" }), facts: h("div"), checkpoints: h("div"), operations: h("div") };
  const tracked = await runOf(params.run, signal);
  const runId = tracked?.run_id ?? params.run;
  const session = await sessionOfRun(runId, signal);
  const view = { ...parts, runId, partId: tracked?.training_run_id ?? runId, signal, session, tracked, numListed: NUM_LISTED };
  Object.assign(view, { identity: h("div"), actions: h("span", { class: "row" }), name: h("span"), compared: h("div") });
  view.gone = () => context.navigate("/console/runs");
  if (tracked) {
    view.curves = new Curves(runId, context);
    followSteps(context);
    view.curves.onRuns = (runs) => replace(view.compared, runs.length > 1 && panel("Differences", differences(runs)));
  }
  const changed = () => refresh(view);
  view.drawFacts = whenChanged((run) => redraw(view.facts, factsOf(run, session, context.account)));
  view.drawRun = whenChanged((run) => {
    replace(view.name, run.name);
    setTitle(run.name);
    redraw(view.identity, runFacts(run));
    replace(view.actions, runActions(run, () => refresh(view), view.gone));
  });
  const state = { sort: context.query.get("saved_sort"), metric: context.query.get("saved_metric") };
  const onstate = (values) =>
    context.setQuery(Object.fromEntries(Object.entries(values).map(([name, value]) => [`saved_${name}`, value])));
  const isOwn = Boolean(session);
  const list = new CheckpointList({ state, onstate, changed, signal, isOwn, runId: tracked?.run_id });
  view.drawCheckpoints = whenChanged(({ checkpoints, evaluations }) => {
    list.set({ checkpoints, scores: scoresByModel(evaluations) });
    if (checkpoints.length && list.node.isConnected) return; // moving it would lose the focus
    replace(view.checkpoints, checkpoints.length ? list.node : noCheckpoints());
  });
  view.drawOperations = whenChanged((found) => redraw(view.operations, operationsOf(found, view)));
  await live(async () => {
    await refresh(view);
    if (!view.facts.isConnected) compose(root, view);
  }, SECONDS);
}

function compose(root, view) {
  replace(
    root,
    pageHead(heading(view), view.state, view.actions, copyButton(view.runId, "Copy id")),
    view.tracked && runTabs(view.runId, ""),
    view.tracked && panel("Run", view.identity),
    view.tracked && panel("Curves", view.curves.element),
    view.compared,
    panel("Configuration", view.facts),
    panel("Checkpoints", view.checkpoints),
    view.session && panel("Operations", view.operations),
  );
}

/** Return the run's name, if it is the user's, and its id. */
function heading({ runId, tracked, name }) {
  return tracked ? [name, h("small", { class: "mono" }, runId)] : h("span", { class: "mono" }, runId);
}

/** Fetch the run that has a training run of this id, or null: other users' runs are private, and copies are not runs. */
async function runOf(runId, signal) {
  try {
    return await get(`/api/v1/runs/${part(runId)}`, null, signal);
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

/** Fetch the session of a run, or null: other users' sessions are private, even if their checkpoints are published. */
async function sessionOfRun(runId, signal) {
  try {
    return await get(`/api/v1/sessions/${part(sessionOf(runId))}`, null, signal);
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

async function refresh(view) {
  const own = (work) => (view.session ? work() : null);
  if (view.tracked) {
    view.tracked = await get(`/api/v1/runs/${part(view.runId)}`, null, view.signal);
    view.partId = view.tracked.training_run_id;
  }
  const path = `/api/v1/training_runs/${part(view.partId)}`;
  const ids = view.tracked?.parts.map((one) => one.training_run_id) ?? [view.partId];
  const [run, saved, operations, scored] = await Promise.all([
    get(path, { access_scope: "accessible" }, view.signal),
    Promise.all(ids.map((id) => get(`/api/v1/training_runs/${part(id)}/checkpoints`, null, view.signal))),
    own(() => get(`${path}/operations`, { limit: NUM_DRAWN }, view.signal)),
    own(() => loadEvaluations(view.signal, { run_id: view.runId })),
    view.curves?.poll(),
  ]);
  const checkpoints = saved.flatMap((one) => one.checkpoints).sort((a, b) => moment(b.time) - moment(a.time));
  view.curves?.setMarks(marksOf(view.tracked, checkpoints));
  const found = operations?.operations || [];
  const numQueued = found.filter((one) => one.state === "queued").length;
  replace(
    view.state,
    view.tracked && statusBadge(view.tracked),
    run.corrupted && badge("bad", "damaged"),
    numQueued > 0 && badge("busy", `${short(numQueued)} queued`),
  );
  view.drawFacts({ ...run, config: view.tracked?.config ?? {} });
  if (view.tracked) view.drawRun(view.tracked);
  view.drawCheckpoints({ checkpoints, evaluations: scored?.evaluations || [] });
  view.drawOperations(found);
}

/** Return what is marked in the charts: checkpoints, where the run was resumed, and where an engine died. */
function marksOf(run, checkpoints) {
  const saved = checkpoints
    .filter((one) => typeof one.step === "number")
    .map((one) => ({
      step: one.step,
      time: moment(one.time).getTime() / 1000,
      kind: "checkpoint",
      label: `checkpoint ${one.checkpoint_id.split("/").at(-1)}, after ${short(one.step)} steps`,
    }));
  const resumed = run.parts.slice(1).map((one) => ({
    step: one.first_step ?? one.optim_steps_before,
    time: moment(one.created_at).getTime() / 1000,
    kind: "resume",
    label: `resumed ${moment(one.created_at).toLocaleString()}`,
  }));
  const died = run.engine_deaths.map((one) => ({
    step: one.step,
    time: moment(one.time).getTime() / 1000,
    kind: "death",
    label: `engine died during ${one.kind}${one.num_deaths > 1 ? `, ${one.num_deaths} times` : ""}; it was computed again`,
  }));
  return [...saved, ...resumed, ...died].sort((a, b) => a.time - b.time);
}

function factsOf(run, session, account) {
  const trained = { train_attn: "attention", train_mlp: "MLP", train_unembed: "output head" };
  if (!run.is_lora) Object.assign(trained, { train_embed: "embedding", train_norms: "norms" });
  const metadata = Object.entries({ ...session?.user_metadata, ...run.user_metadata });
  const known = facts([
    ["Base model", run.base_model],
    [run.is_lora ? "LoRA rank" : "Method", run.is_lora ? run.lora_rank : "full"],
    [
      "Trained",
      Object.entries(trained)
        .flatMap(([name, text]) => (run[name] ? [text] : []))
        .join(", "),
    ],
    ["Optimiser", run.optimizer_type],
    ["Seed", run.seed],
    ["Created", run.created_at && ago(run.created_at)],
    ["Last request", ago(run.last_request_time)],
    ["Snapshots", run.snapshot_bytes && bytes(run.snapshot_bytes)],
    ["Owner", session ? account?.name : run.model_owner],
    ["Project", run.project_id],
    ["Session", session && sessionLink(run.training_run_id, session)],
  ]);
  const config = flatten(run.config);
  return h(
    "div",
    { "data-row": "facts" },
    config.length > 0 && facts(config),
    config.length > 0 && h("h3", null, "Adapter and session"),
    known,
    metadata.length > 0 && [h("h3", null, "Metadata"), facts(metadata)],
  );
}

function sessionLink(runId, session) {
  const id = sessionOf(runId);
  return h("a", { class: "run-id", href: `/console/sessions/${part(id)}`, title: id }, session.display_name || id);
}

const noCheckpoints = () => empty("No checkpoint yet.", "Save one from the program that trains:", saveProgram());

function operationsOf(operations, view) {
  const hidden = operations.length - view.numListed;
  const listed = h("div", null, operations.length > 0 && operationTable(operations.slice(0, view.numListed)));
  const more = button(
    `Show ${short(hidden)} more`,
    () => {
      view.numListed = NUM_DRAWN;
      replace(listed, operationTable(operations));
      more.remove();
    },
    { class: "small" },
  );
  return [timeline(operations), listed, hidden > 0 && h("p", null, more)];
}
