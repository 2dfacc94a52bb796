// Shows evaluations as a table of checkpoints and tasks, marks the best of each task, and compares two checkpoints.

import { get } from "../api.js";
import { ago, badge, button, empty, h, pageHead, panel, replace, searchBox, short, table } from "../dom.js";
import { redraw, whenChanged } from "../redraw.js";
import {
  columnKey,
  intervalText,
  loadEvaluations,
  modelName,
  modelText,
  newestOf,
  settingsText,
  valueText,
} from "../scores.js";

export const title = "Evaluations";

const PER_PAGE = 100;
const LEGEND =
  "Each cell has the newest value and its 95 % confidence interval. Only results with the same settings on the same " +
  "items share a column. Choose two rows for a paired test on the items that both were asked.";

export async function render(root, { query, signal, live, setQuery }) {
  const state = { text: query.get("q") || "", chosen: [query.get("first"), query.get("second")].filter(Boolean) };
  let found = { evaluations: [], total: 0 };
  let numShown = PER_PAGE;
  const parts = { summary: h("p", { class: "muted", role: "status" }), list: h("div"), comparison: h("div") };
  const draw = () => {
    const newest = newestOf(found.evaluations).filter((one) => matches(one, state.text));
    const rows = rowsOf(newest);
    const columns = columnsOf(newest);
    replace(parts.summary, summary(rows.length, columns.length, found));
    redraw(
      parts.list,
      rows.length ? scoreTable(rows.slice(0, numShown), columns, state.chosen, choose) : nothing(found.total),
      rows.length > numShown && button(`Show more of ${rows.length}`, () => ((numShown += PER_PAGE), draw())),
    );
  };
  const compare = async () => {
    if (state.chosen.length < 2) return replace(parts.comparison, hint(state.chosen.length, found.evaluations));
    const [first, second] = state.chosen;
    try {
      const { comparisons } = await get("/api/v1/evaluation_comparisons", { first, second }, signal);
      replace(parts.comparison, comparisonTable(comparisons));
    } catch (error) {
      if (signal.aborted || error.status === 401) return;
      replace(parts.comparison, empty("These two cannot be compared.", error.message));
    }
  };
  const choose = (model, isChosen) => {
    const others = state.chosen.filter((one) => one !== model);
    state.chosen = isChosen ? [...others, model].slice(-2) : others;
    setQuery({ first: state.chosen[0], second: state.chosen[1] });
    draw();
    compare();
  };
  const search = (text) => {
    state.text = text;
    numShown = PER_PAGE;
    setQuery({ q: text });
    draw();
  };
  const drawChanged = whenChanged((now) => ((found = now), draw(), compare()));
  root.append(
    pageHead(title),
    panel(
      null,
      h("div", { class: "row" }, searchBox("Search evaluations", "Search run, model, task", state.text, search), parts.summary),
      parts.list,
      h("p", { class: "muted" }, LEGEND),
    ),
    panel("Comparison", parts.comparison),
  );
  await live(async () => drawChanged(await loadEvaluations(signal)), 10);
}

function summary(numModels, numColumns, { evaluations, total }) {
  const isPart = evaluations.length < total;
  const models = numModels === 1 ? "1 model" : `${short(numModels)} models`;
  const tasks = numColumns === 1 ? "1 task" : `${short(numColumns)} tasks`;
  return `${models}, ${tasks}${isPart ? `; the newest ${short(evaluations.length)} of ${short(total)} results` : ""}`;
}

function matches(one, text) {
  const searched = [one.model, one.run_name, one.task, one.metric, one.base_model].join("\n").toLowerCase();
  return text
    .toLowerCase()
    .split(/\s+/)
    .every((word) => searched.includes(word));
}

/** Group results by model: checkpoints by run and step, base models first. */
function rowsOf(evaluations) {
  const rows = new Map();
  for (const one of evaluations) {
    const row = rows.get(one.model) || { model: one.model, first: one, results: new Map() };
    row.results.set(columnKey(one), one);
    rows.set(one.model, row);
  }
  const order = ({ first }) => [first.run_name ?? "", first.step ?? -1, first.model];
  return [...rows.values()].sort((a, b) => compareLists(order(a), order(b)));
}

function compareLists(first, second) {
  for (let place = 0; place < first.length; place += 1) {
    if (first[place] < second[place]) return -1;
    if (first[place] > second[place]) return 1;
  }
  return 0;
}

/** Return the columns in the order of their tasks, each with its best value if another model has a lower one. */
function columnsOf(evaluations) {
  const columns = new Map();
  for (const one of evaluations) {
    const column = columns.get(columnKey(one)) || { key: columnKey(one), first: one, values: [] };
    column.values.push(one.value);
    columns.set(column.key, column);
  }
  const order = ({ first }) => [first.task, first.metric, -first.num_items];
  return [...columns.values()]
    .map((column) => ({ ...column, best: Math.max(...column.values) > Math.min(...column.values) ? Math.max(...column.values) : null }))
    .sort((a, b) => compareLists(order(a), order(b)));
}

function scoreTable(rows, columns, chosen, choose) {
  const box = (row) =>
    h("input", {
      type: "checkbox",
      checked: chosen.includes(row.model),
      "aria-label": `Compare ${modelText(row.first)}`,
      onchange: (event) => choose(row.model, event.target.checked),
    });
  return table(
    [
      { label: "", head: h("span", { class: "offscreen" }, "Compare"), class: "choose", value: box },
      { label: "Model", wide: true, value: (row) => h("div", { class: "score-model" }, modelName(row.first)) },
      ...columns.map((column) => ({
        label: `${column.first.task}, ${column.first.metric}, ${settingsText(column.first)}`,
        head: columnHead(column),
        number: true,
        value: (row) => scoreCell(row.results.get(column.key), column.best),
      })),
    ],
    rows,
    (row) => ({ "data-row": row.model, class: chosen.includes(row.model) ? "chosen" : null }),
  );
}

function columnHead({ first }) {
  return [
    first.task,
    h("small", { class: "score-settings" }, first.metric),
    h("small", { class: "score-settings", title: settingsText(first) }, settingsText(first)),
  ];
}

function scoreCell(one, best) {
  if (!one) return h("span", { class: "muted score-none" }, "–");
  const passes = Object.entries(one.metrics)
    .filter(([name]) => name !== "pass@1")
    .map(([name, each]) => `${name} ${valueText(each)}`);
  const tested = `${one.num_items} items, stored ${new Date(one.created_at).toLocaleString()}`;
  return h(
    "div",
    { class: "score", title: tested },
    h("span", { class: "score-value" }, one.value === best && badge("ok", "best"), h("b", null, valueText(one))),
    h("small", { class: "muted" }, intervalText(one)),
    passes.length > 0 && h("small", { class: "muted" }, passes.join(", ")),
  );
}

// ── comparison ──────────────────────────────────────────────────────────────────────────────────────

function hint(numChosen, evaluations) {
  const numModels = new Set(evaluations.map((one) => one.model)).size;
  if (numModels < 2) return h("p", { class: "muted" }, "Two evaluated models are needed for a comparison.");
  return h("p", { class: "muted" }, numChosen ? "Choose one more row of the table." : "Choose two rows of the table.");
}

const TESTS = { mcnemar: "McNemar, exact", wilcoxon: "Wilcoxon signed-rank" };

function comparisonTable(comparisons) {
  const [{ first, second }] = comparisons;
  return [
    h("p", null, h("b", null, "A"), ` ${modelText(first)}, `, h("b", null, "B"), ` ${modelText(second)}`),
    table(
      [
        { label: "Task", wide: true, value: (one) => [one.task, h("br"), settingsNote(one)] },
        { label: "A", number: true, value: (one) => valueText(one.first) },
        { label: "B", number: true, value: (one) => valueText(one.second) },
        { label: "B − A", number: true, value: difference },
        { label: "Only A, only B better", number: true, value: counts },
        { label: "p", number: true, value: (one) => short(Number(one.p_value.toPrecision(2))) },
        { label: "Verdict", value: verdict },
        { label: "Test", value: (one) => TESTS[one.test] },
        { label: "Evaluated", value: (one) => [ago(one.first.created_at), h("br"), ago(one.second.created_at)] },
      ],
      comparisons,
      (one) => ({ "data-row": `${one.task} ${one.metric}` }),
    ),
  ];
}

function settingsNote(one) {
  const text = `${one.metric}, ${short(one.num_items)} items of both`;
  if (!one.differing_settings.length) return h("small", { class: "muted" }, text);
  return h("small", { class: "muted" }, `${text}; other ${one.differing_settings.join(", ")}`);
}

function difference({ difference: found, first, second }) {
  const isShare = [first, second].every((one) => valueText(one).endsWith("%"));
  const text = (value) => {
    const shown = isShare ? (100 * value).toFixed(1) : short(Number(value.toPrecision(3)));
    return value > 0 ? `+${shown}` : shown;
  };
  const interval = found.low === null ? "" : `${text(found.low)} to ${text(found.high)}`;
  const unit = isShare ? " points" : "";
  return h("div", { class: "score" }, h("b", null, text(found.value), unit), h("small", { class: "muted" }, interval));
}

const counts = (one) => `${short(one.num_first_better)}, ${short(one.num_second_better)}`;

function verdict(one) {
  if (!one.is_significant) return badge("idle", "no significant difference");
  return badge("ok", `${one.difference.value > 0 ? "B" : "A"} is better`);
}

function nothing(total) {
  if (total) return empty("Nothing matches.", "Search for fewer words.");
  return empty(
    "There are no evaluations yet.",
    "Evaluate a checkpoint or a base model:",
    `lorimer eval lorimer/tiny --on gsm8k --limit 100 --base-url ${location.origin}`,
  );
}
