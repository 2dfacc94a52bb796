// Results of evaluations as other pages show them: loading, the name of a model, values with their intervals.

import { get, part } from "./api.js";
import { h, short } from "./dom.js";

const PER_REQUEST = 1000;
const MAX_RESULTS = 10_000;
const MAX_TAGS = 6;

/** Load the caller's evaluations, newest first; `query` selects those of a model, a task or a run. */
export async function loadEvaluations(signal, query = {}) {
  const evaluations = [];
  let total;
  do {
    const page = await get("/api/v1/evaluations", { ...query, limit: PER_REQUEST, offset: evaluations.length }, signal);
    total = page.total_count;
    evaluations.push(...page.evaluations);
    if (!page.evaluations.length) break;
  } while (evaluations.length < Math.min(total, MAX_RESULTS));
  return { evaluations, total };
}

/** Return the newest evaluation of each model, task, metric and variant. */
export function newestOf(evaluations) {
  const kept = new Map();
  for (const one of evaluations) {
    const key = JSON.stringify([one.model, columnKey(one)]);
    if (!kept.has(key)) kept.set(key, one);
  }
  return [...kept.values()];
}

/** Identify what can be ranked: the same task, metric, settings and items. */
export const columnKey = (one) => JSON.stringify([one.task, one.metric, one.variant]);

/** Group the newest evaluations by model: a Map from the model's name to its results. */
export function scoresByModel(evaluations) {
  const found = new Map();
  for (const one of newestOf(evaluations)) found.set(one.model, [...(found.get(one.model) || []), one]);
  return found;
}

/** Show the value as a percentage if it is a share, else as a number. */
export function valueText(one) {
  return isShare(one) ? `${(100 * one.value).toFixed(1)}\u00a0%` : short(one.value);
}

export function intervalText(one) {
  if (one.low === null || one.low === undefined) return "";
  const text = (value) => (isShare(one) ? (100 * value).toFixed(1) : short(value));
  return `${text(one.low)} – ${text(one.high)}`;
}

const isShare = ({ value, low, high, metric }) =>
  metric !== "rating" && value >= 0 && value <= 1 && (low ?? 0) >= 0 && (high ?? 1) <= 1;

/** Say what a result depends on besides the model, in few words. */
export function settingsText(one) {
  const known = new Set(["grader", "temperature", "max_tokens", "seed", "num_samples", "grader_digest"]);
  const { settings } = one;
  const said = [
    `${short(one.num_items)} items`,
    one.num_samples > 1 && `${one.num_samples} samples`,
    settings.temperature ? `T ${settings.temperature}` : null,
    settings.max_tokens && `${settings.max_tokens} tokens`,
    ...Object.entries(settings)
      .filter(([name]) => !known.has(name))
      .map(([name, value]) => `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`),
  ];
  return said.filter(Boolean).join(" · ");
}

/** Build small tags with the scores of one checkpoint, for lists of checkpoints. */
export function scoreTags(evaluations) {
  if (!evaluations?.length) return "–";
  const tag = (one) =>
    h(
      "span",
      { class: "tag", title: `${one.metric}, 95 % interval ${intervalText(one)}; ${settingsText(one)}` },
      `${one.task}: ${valueText(one)}`,
    );
  const rest = evaluations.length - MAX_TAGS;
  return h(
    "div",
    { class: "score-tags" },
    evaluations.slice(0, MAX_TAGS).map(tag),
    rest > 0 && h("span", { class: "muted" }, `and ${rest} more`),
  );
}

/** Build the name of a model: run and step of a checkpoint, linked to its page, or the base model. */
export function modelName(one) {
  const parsed = /^tinker:\/\/([^/]+)\/([^/]+)\/([^/]+)$/.exec(one.model);
  if (!parsed) return h("b", null, one.model);
  const [, run, segment, name] = parsed;
  const href = `/console/checkpoints/${part(run)}/${part(`${segment}/${name}`)}`;
  const step = one.step === null || one.step === undefined ? name : `step ${short(one.step)}`;
  return [
    h("a", { href, title: one.model }, one.run_name ? `${one.run_name}, ${step}` : `${name} of ${run.slice(0, 7)}…`),
    h("br"),
    h("small", { class: "muted" }, `${segment === "weights" ? "training state" : "sampler"} ${name}`),
  ];
}

/** Name a model in one line, for headings and lists to choose from. */
export function modelText(one) {
  const name = one.model.split("/").pop();
  if (!one.model.startsWith("tinker://")) return one.model;
  return one.run_name ? `${one.run_name} ${name}` : one.model;
}
