// Lists the user's checkpoints, and shows one checkpoint with its actions.

import { get, part } from "../api.js";
import { checkpointActions, partsOf } from "../checkpoint_actions.js";
import { CheckpointList } from "../checkpoint_list.js";
import {
  ago,
  badge,
  button,
  bytes,
  choice,
  commandBlock,
  copyButton,
  empty,
  facts,
  h,
  pageHead,
  panel,
  replace,
  runLink,
  short,
  searchBox,
  table,
} from "../dom.js";
import { saveProgram } from "../getting_started.js";
import { redraw, whenChanged } from "../redraw.js";
import { intervalText, loadEvaluations, scoresByModel, settingsText, valueText } from "../scores.js";

export const title = "Checkpoints";

const PER_REQUEST = 1000;
const MOST = 10_000;
const PER_PAGE = 100;

export async function render(root, context) {
  return context.params.run ? renderOne(root, context) : renderAll(root, context);
}

// ── all ─────────────────────────────────────────────────────────────────────────────────────────────

async function renderAll(root, { query, signal, live, setQuery }) {
  const filter = { text: query.get("q") || "", kind: query.get("kind") || "" };
  let found = { checkpoints: [], total: 0, evaluations: [] };
  let numShown = PER_PAGE;
  const rest = h("div");
  const nothingFound = h("div");
  const summary = h("p", { class: "muted", role: "status" });
  const draw = () => {
    const fits = found.checkpoints.filter((one) => matches(one, filter));
    const size = fits.reduce((sum, one) => sum + (one.size_bytes || 0), 0);
    const isPart = found.checkpoints.length < found.total;
    replace(
      summary,
      `${fits.length} of ${found.total} checkpoints, ${bytes(size)}`,
      isPart && `; the newest ${found.checkpoints.length} are searched`,
    );
    list.set({ checkpoints: fits, scores: scoresByModel(found.evaluations), numShown });
    list.node.hidden = !fits.length;
    replace(nothingFound, !fits.length && nothing(found.total));
    redraw(
      rest,
      fits.length > numShown && button(`Show more of ${fits.length}`, () => ((numShown += PER_PAGE), draw())),
    );
  };
  const drawChanged = whenChanged((now) => ((found = now), draw()));
  const load = async () => {
    const [listed, { evaluations }] = await Promise.all([loadAll(signal), loadEvaluations(signal)]);
    drawChanged({ ...listed, evaluations });
  };
  const changed = async () => {
    await load();
    if (document.activeElement === document.body) root.querySelector("h1").focus();
  };
  const choose = (values) => {
    Object.assign(filter, values);
    numShown = PER_PAGE;
    setQuery({ q: filter.text, kind: filter.kind });
    draw();
  };
  const state = { sort: query.get("sort"), metric: query.get("metric") };
  const list = new CheckpointList({ state, onstate: setQuery, changed, signal, withRun: true });
  const head = pageHead("Checkpoints");
  root.append(head, panel(null, filters(filter, choose, summary), list.node, nothingFound, rest));
  await live(load, 10);
}

async function loadAll(signal) {
  const checkpoints = [];
  let total;
  do {
    const page = await get("/api/v1/checkpoints", { limit: PER_REQUEST, offset: checkpoints.length }, signal);
    total = page.cursor.total_count;
    checkpoints.push(...page.checkpoints);
    if (!page.checkpoints.length) break;
  } while (checkpoints.length < Math.min(total, MOST));
  return { checkpoints, total };
}

function filters(filter, choose, summary) {
  const kinds = [
    ["", "every kind"],
    ["sampler", "sampler"],
    ["training", "training state"],
    ["external", "export"],
    ["public", "published"],
  ];
  return h(
    "div",
    { class: "row" },
    searchBox("Search checkpoints", "Search name, run, metadata", filter.text, (text) => choose({ text })),
    choice("Kind", kinds, filter.kind, (kind) => choose({ kind })),
    summary,
  );
}

/** Return whether every word occurs in the path or the metadata. */
function matches(checkpoint, { text, kind }) {
  if (kind && (kind === "public" ? !checkpoint.public : checkpoint.checkpoint_type !== kind)) return false;
  const metadata = Object.entries(checkpoint.user_metadata || {}).map(([name, value]) => `${name}: ${value}`);
  const searched = [checkpoint.tinker_path, checkpoint.run_name || "", ...metadata].join("\n").toLowerCase();
  return text
    .toLowerCase()
    .split(/\s+/)
    .every((word) => searched.includes(word));
}

function nothing(total) {
  if (total) return empty("Nothing matches.", "Search for fewer words or for another kind.");
  return empty("There are no checkpoints yet.", "A training client saves them:", saveProgram());
}

// ── one ─────────────────────────────────────────────────────────────────────────────────────────────

async function renderOne(root, { params, signal, account, live, navigate, setTitle }) {
  const path = `tinker://${params.run}/${params.checkpoint || `${params.segment}/${params.name}`}`;
  const { name } = partsOf(path);
  setTitle(name || path);
  const run = await get(`/api/v1/training_runs/${part(params.run)}`, { access_scope: "accessible" }, signal);
  const isOwn = Boolean(account) && run.model_owner === `tml:user:${account.user_id}`;
  const body = h("div", { class: "stack-wide" });
  const find = async () => {
    const { checkpoints } = await get(`/api/v1/training_runs/${part(params.run)}/checkpoints`, null, signal);
    const found = checkpoints.find((one) => one.tinker_path === path);
    return found ? { ...found, scores: (await loadEvaluations(signal, { model: path })).evaluations } : null;
  };
  const draw = whenChanged((found) => redraw(body, found ? details(found, run, isOwn, changed) : gone(path)));
  const load = async () => draw(await find());
  const changed = async () => ((await find()) ? load() : navigate("/console/checkpoints"));
  root.append(pageHead(name || path, h("a", { href: "/console/checkpoints" }, "All checkpoints")), body);
  await live(load, 10);
}

const gone = (path) =>
  panel(
    null,
    empty("There is no such checkpoint.", `${path} was deleted, has expired, or is not yours and not published.`),
  );

function details(checkpoint, run, isOwn, changed) {
  const metadata = Object.entries(checkpoint.user_metadata || {});
  return [
    panel(
      "Checkpoint",
      h("div", { class: "row" }, h("code", null, checkpoint.tinker_path), copyButton(checkpoint.tinker_path)),
      facts([
        ["Run", runLink(run.run_id || run.training_run_id, run.run_name)],
        ["Step", typeof checkpoint.step === "number" ? short(checkpoint.step) : null],
        ["Base model", run.base_model],
        [run.is_lora ? "LoRA rank" : "Method", run.is_lora ? run.lora_rank : "full"],
        [
          "Kind",
          { sampler: "for sampling", training: "training state", external: "export" }[checkpoint.checkpoint_type],
        ],
        ["Saved", ago(checkpoint.time)],
        ["Size", bytes(checkpoint.size_bytes)],
        ["Ends", checkpoint.expires_at ? ago(checkpoint.expires_at) : "never"],
        ["Access", checkpoint.public ? badge("ok", "published") : "private"],
      ]),
      h("div", { "data-row": "actions" }, checkpointActions(checkpoint, changed, isOwn)),
    ),
    metadata.length > 0 && panel("Metadata", facts(metadata)),
    checkpoint.scores.length > 0 && panel("Evaluations", scoreTable(checkpoint.scores)),
    panel(
      "Use it",
      uses(checkpoint).map(([what, command]) => [h("h3", null, what), commandBlock(command)]),
    ),
  ];
}

function scoreTable(evaluations) {
  return table(
    [
      { label: "Task", wide: true, value: (one) => [one.task, h("br"), h("small", { class: "muted" }, settingsText(one))] },
      { label: "Metric", value: (one) => one.metric },
      { label: "Value", number: true, value: (one) => valueText(one) },
      { label: "95 % interval", number: true, value: (one) => intervalText(one) },
      { label: "Evaluated", value: (one) => ago(one.created_at) },
    ],
    evaluations,
    (one) => ({ "data-row": one.evaluation_id }),
  );
}

/** Return commands and programs that use the checkpoint from any machine. */
function uses({ tinker_path: path, checkpoint_type: kind }) {
  const command = (words) => `lorimer ${words} --base-url ${location.origin}`;
  const download = ["Download the adapter", command(`checkpoint download ${path}`)];
  if (kind === "external") return [download];
  const service = `service = lorimer.ServiceClient(base_url="${location.origin}")`;
  const [what, client] =
    kind === "sampler"
      ? ["Sample from it", `service.create_sampling_client(model_path="${path}")`]
      : ["Resume training", `service.create_training_client_from_state_with_optimizer("${path}")`];
  return [
    [what, `import lorimer\n\n${service}\nclient = ${client}`],
    ["Talk to it", command(`chat ${path}`)],
    ["Evaluate it", command(`eval ${path} --on gsm8k`)],
    ["Merge it into its base model", command(`export ${path} --to merged`)],
    download,
  ];
}
