// A list of checkpoints that can be sorted, with a metric beside each, and in which several are chosen to publish, expire
// or delete together.

import { bulkActions } from "./checkpoint_bulk.js";
import { checkpointTable, partsOf } from "./checkpoint_actions.js";
import { metricNames, valuesAt } from "./checkpoint_metrics.js";
import { bytes, choice, h, moment, replace, short, sortButton, sortChoice, toast } from "./dom.js";
import { redraw } from "./redraw.js";

const DEFAULT_SORT = "-saved";
const SORTED = [
  ["Saved", "saved"],
  ["Checkpoint", "name"],
  ["Run", "run"],
  ["Step", "step"],
  ["Kind", "kind"],
  ["Size", "size"],
  ["Ends", "ends"],
];

/**
 * The list. `state` is `{sort, metric}`, and `onstate` is called with what the user changes of it; `changed` reloads after
 * an action; `runId` is the run of all checkpoints, where they do not name one.
 */
export class CheckpointList {
  constructor({ state, onstate, changed, signal, withRun = false, isOwn = true, runId = null }) {
    this.#state = { sort: state.sort || DEFAULT_SORT, metric: state.metric || "" };
    this.#onstate = onstate;
    this.#changed = changed;
    this.#signal = signal;
    this.#options = { withRun, isOwn, changed };
    this.#runId = runId;
    const controls = h("div", { class: "row" }, this.#metrics, this.#sorts, this.#bar);
    this.node = h("div", { class: "checkpoint-list" }, controls, this.#table);
    if (isOwn) this.#loadNames();
  }

  #state;
  #onstate;
  #changed;
  #signal;
  #options;
  #runId;
  #checkpoints = [];
  #scores = null;
  #numShown = Infinity;
  #chosen = new Set();
  #values = new Map();
  #valuesFor = "";
  #metrics = h("span");
  #sorts = h("span");
  #bar = h("div", { class: "row bulk", role: "group", "aria-label": "Chosen checkpoints" });
  #table = h("div");

  /** Show these checkpoints, at most `numShown` of them. */
  set({ checkpoints, scores = null, numShown = Infinity }) {
    this.#checkpoints = checkpoints;
    this.#scores = scores;
    this.#numShown = numShown;
    const known = new Set(checkpoints.map((one) => one.tinker_path));
    for (const path of this.#chosen) if (!known.has(path)) this.#chosen.delete(path);
    this.#draw();
    this.#loadValues();
  }

  // ── metrics ───────────────────────────────────────────────────────────────────────────────────────

  /** Offer the names of metrics, and again when the choice is about to be opened: runs may have reported others since. */
  async #loadNames() {
    try {
      const { metric } = this.#state;
      const names = new Set([...(await metricNames(this.#signal)), ...(metric ? [metric] : [])]);
      let select = this.#metrics.firstElementChild;
      if (!select) {
        select = choice("Metric beside each checkpoint", [["", "no metric"]], "", (value) => this.#change({ metric: value }));
        select.addEventListener("focus", () => this.#loadNames());
        replace(this.#metrics, select);
      }
      for (const { value } of select.options) names.delete(value);
      select.append(...[...names].map((name) => h("option", { value: name, selected: name === metric }, name)));
    } catch (error) {
      if (!this.#signal.aborted && error.status !== 401) toast(error.message, "bad");
    }
  }

  /** Fetch the metric of the runs, if it or the checkpoints have changed. */
  async #loadValues() {
    const { metric } = this.#state;
    const wanted = JSON.stringify([metric, this.#checkpoints.map((one) => one.tinker_path)]);
    if (wanted === this.#valuesFor || !this.#options.isOwn) return;
    this.#valuesFor = wanted;
    try {
      const found = metric ? await valuesAt(this.#checkpoints, metric, this.#runId, this.#signal) : new Map();
      if (this.#valuesFor !== wanted) return;
      this.#values = found;
      this.#draw();
    } catch (error) {
      if (this.#valuesFor === wanted) this.#valuesFor = "";
      if (!this.#signal.aborted && error.status !== 401) toast(error.message, "bad");
    }
  }

  // ── drawing ───────────────────────────────────────────────────────────────────────────────────────

  #change(values) {
    Object.assign(this.#state, values);
    this.#onstate({ ...values, ...(values.sort === DEFAULT_SORT && { sort: null }) });
    this.#draw();
    this.#loadValues();
  }

  #draw() {
    const shown = this.#shown;
    const head = (label, field, startsHigh) =>
      sortButton(label, field, this.#state.sort, startsHigh, (sort) => this.#change({ sort }));
    const { metric, sort: current } = this.#state;
    const fields = [...SORTED.filter(([, field]) => this.#options.withRun || field !== "run"), ...(metric ? [[metric, "metric"]] : [])];
    redraw(this.#sorts, sortChoice(fields, current, (sort) => this.#change({ sort })));
    redraw(
      this.#table,
      checkpointTable(shown, {
        ...this.#options,
        scores: this.#scores,
        head,
        box: this.#options.isOwn ? (one) => this.#box(one) : null,
        metric: metric && { name: metric, value: (one) => this.#valueCell(one) },
      }),
    );
    this.#drawBar(shown);
  }

  #valueCell(checkpoint) {
    const found = this.#values.get(checkpoint.tinker_path);
    return found ? h("span", { title: `at step ${found.step}` }, short(found.value)) : "–";
  }

  get #shown() {
    return this.#sorted().slice(0, this.#numShown);
  }

  #sorted() {
    const { sort } = this.#state;
    const sign = sort.startsWith("-") ? -1 : 1;
    const keyOf = {
      name: (one) => partsOf(one.tinker_path).name,
      run: (one) => one.run_name || one.tinker_path,
      step: (one) => one.step,
      kind: (one) => one.checkpoint_type,
      saved: (one) => moment(one.time).getTime(),
      size: (one) => one.size_bytes,
      ends: (one) => moment(one.expires_at)?.getTime(),
      metric: (one) => this.#values.get(one.tinker_path)?.value,
    }[sort.replace("-", "")];
    if (!keyOf) return this.#checkpoints;
    const isMissing = (value) => value === null || value === undefined;
    return this.#checkpoints
      .map((one) => [keyOf(one), one])
      .sort(([a], [b]) => {
        if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b); // unknown values are last in both directions
        return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
      })
      .map(([, one]) => one);
  }

  // ── choosing ──────────────────────────────────────────────────────────────────────────────────────

  #box(checkpoint) {
    const path = checkpoint.tinker_path;
    const box = h("input", {
      type: "checkbox",
      checked: this.#chosen.has(path),
      "aria-label": `Choose ${path}`,
      onchange: () => (this.#chosen[box.checked ? "add" : "delete"](path), this.#drawBar(this.#shown)),
    });
    return box;
  }

  #drawBar(shown) {
    if (!this.#options.isOwn) return;
    const chosen = this.#checkpoints.filter((one) => this.#chosen.has(one.tinker_path));
    const size = chosen.reduce((sum, one) => sum + (one.size_bytes || 0), 0);
    const isAll = shown.length > 0 && shown.every((one) => this.#chosen.has(one.tinker_path));
    const all = h("input", {
      type: "checkbox",
      checked: isAll,
      indeterminate: chosen.length > 0 && !isAll,
      onchange: () => {
        for (const one of shown) this.#chosen[isAll ? "delete" : "add"](one.tinker_path);
        this.#draw();
        this.#bar.querySelector("input").focus();
      },
    });
    const focused = document.activeElement;
    const at = [...this.#bar.querySelectorAll("input, button")].indexOf(focused);
    replace(
      this.#bar,
      h("label", { class: "check" }, all, "Choose all shown"),
      chosen.length > 0 && h("span", { class: "muted", role: "status" }, `${chosen.length} chosen, ${bytes(size)}`),
      chosen.length > 0 && bulkActions(chosen, size, () => (this.#chosen.clear(), this.#changed())),
    );
    if (at >= 0) this.#bar.querySelectorAll("input, button")[at]?.focus();
  }
}
