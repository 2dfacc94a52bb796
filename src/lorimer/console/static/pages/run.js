// Shows one run: its charts, alone or compared with others, configuration, checkpoints and operations.

import { get, part } from "../api.js";
import { checkpointTable } from "../checkpoint_actions.js";
import { Curves } from "../curves.js";
import { ago, button, copyButton, empty, facts, h, pageHead, panel, replace, short } from "../dom.js";
import { saveProgram } from "../getting_started.js";
import { redraw, whenChanged } from "../redraw.js";
import { operationTable, timeline } from "../timeline.js";
import { sessionOf, stateOf } from "./runs.js";

export const title = "Run";

const SECONDS = 2;
const NUM_DRAWN = 120;
const NUM_LISTED = 12;

export async function render(root, context) {
  const { params, signal, live, setTitle } = context;
  setTitle(`Run ${params.run}`);
  const parts = { state: h("span", { class: "row" }), facts: h("div"), checkpoints: h("div"), operations: h("div") };
  const session = await sessionOfRun(params.run, signal);
  const view = { ...parts, runId: params.run, signal, session, numListed: NUM_LISTED };
  if (session) view.curves = new Curves(params.run, context);
  const changed = () => refresh(view);
  view.drawFacts = whenChanged((run) => redraw(view.facts, factsOf(run, session, context.account)));
  view.drawCheckpoints = whenChanged((found) =>
    redraw(view.checkpoints, checkpointsOf(found, changed, Boolean(session))),
  );
  view.drawOperations = whenChanged((found) => redraw(view.operations, operationsOf(found, view)));
  await live(async () => {
    await refresh(view);
    if (!view.facts.isConnected) compose(root, view);
  }, SECONDS);
}

function compose(root, view) {
  replace(
    root,
    pageHead(heading(view), view.state, copyButton(view.runId, "Copy id")),
    panel("Configuration", view.facts),
    view.session && panel("Curves", view.curves.element),
    panel("Checkpoints", view.checkpoints),
    view.session && panel("Operations", view.operations),
  );
}

/** Return the session's name, if any, and its id. */
function heading({ runId, session }) {
  const name = session?.display_name;
  return name ? [name, h("small", { class: "mono" }, runId)] : h("span", { class: "mono" }, runId);
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
  const path = `/api/v1/training_runs/${part(view.runId)}`;
  const own = (work) => (view.session ? work() : null);
  const [run, { checkpoints }, operations] = await Promise.all([
    get(path, { access_scope: "accessible" }, view.signal),
    get(`${path}/checkpoints`, null, view.signal),
    own(() => get(`${path}/operations`, { limit: NUM_DRAWN }, view.signal)),
    own(() => view.curves.poll()),
  ]);
  const found = operations?.operations || [];
  const step = view.curves?.lastStep ?? null;
  const numQueued = found.filter((one) => one.state === "queued").length;
  replace(view.state, stateOf(run, numQueued), step !== null && h("span", { class: "muted" }, `step ${short(step)}`));
  view.drawFacts(run);
  view.drawCheckpoints(checkpoints);
  view.drawOperations(found);
}

function factsOf(run, session, account) {
  const trained = { train_attn: "attention", train_mlp: "MLP", train_unembed: "output head" };
  const metadata = Object.entries({ ...session?.user_metadata, ...run.user_metadata });
  const known = facts([
    ["Base model", run.base_model],
    ["LoRA rank", run.lora_rank],
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
    ["Owner", session ? account?.name : run.model_owner],
    ["Project", run.project_id],
    ["Session", session && sessionLink(run.training_run_id, session)],
  ]);
  return h("div", { "data-row": "facts" }, known, metadata.length > 0 && [h("h3", null, "Metadata"), facts(metadata)]);
}

function sessionLink(runId, session) {
  const id = sessionOf(runId);
  return h("a", { href: `/console/sessions/${part(id)}` }, session.display_name || id);
}

function checkpointsOf(checkpoints, changed, isOwn) {
  if (!checkpoints.length) return empty("No checkpoint yet.", "Save one from the program that trains:", saveProgram());
  return checkpointTable(checkpoints, { changed, isOwn });
}

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
