// Shows the rollouts of a run: rewards by step, a histogram with bins to click, a filtered list read page by page, and
// one rollout, its group, or two steps compared. The URL contains all choices, so that a link shows the same view.

import { get, part } from "../api.js";
import { badge, button, choice, copyButton, empty, h, pageHead, replace, searchBox, short, span, toast } from "../dom.js";
import { save } from "../files.js";
import { rolloutsProgram } from "../getting_started.js";
import { whenChanged } from "../redraw.js";
import { histogram, stepStrip } from "../rollout_charts.js";
import { diffView, groupView } from "../rollout_compare.js";
import { SHADES, rewardChip, rolloutErrors, rolloutFacts, shadeLegend, turnList } from "../rollout_turns.js";
import { runTabs } from "../run_tabs.js";

export const title = "Rollouts";

const SECONDS = 5;
const PAGE_SIZE = 50;
const GROUP_SIZE = 64;
const MAX_SAME = 500; // rollouts with the same prompt that can be chosen to compare with
const SORTS = [
  ["step", "in order"],
  ["-reward", "best reward"],
  ["reward", "worst reward"],
  ["-length", "longest"],
  ["length", "shortest"],
  ["-advantage", "largest advantage"],
];
const BIN = /^([-+.e\d]+),([-+.e\d]+)(\]?)$/; // the last bin has its upper border
const CHOICES = ["step", "q", "split", "stop", "bin", "sort", "rollout", "view", "with", "shade"];
const ALL = "*"; // all splits; without a choice those of training are shown, if there are others too
const TYPING_MS = 250;
const MAX_QUESTION = 90; // characters
const NARROW = "(max-width: 860px)"; // where a rollout takes the place of the list

export async function render(root, context) {
  const run = await get(`/api/v1/runs/${part(context.params.run)}`, null, context.signal);
  context.setTitle(`Rollouts of ${run.name}`);
  const viewer = new Viewer(run, context);
  await context.live(async () => {
    await viewer.refresh();
    if (!viewer.element.isConnected)
      replace(root, pageHead([run.name, h("small", { class: "mono" }, run.run_id)]), runTabs(run.run_id, "rollouts"), viewer.element);
    viewer.follow();
  }, SECONDS);
}

/** Return the end of a prompt without the marks of chat templates, which say little in a heading. */
function question(prompt) {
  const text = prompt.replace(/<\|[^|>]{1,40}\|>/g, " ").replace(/\s+/g, " ").replace(/ (assistant|model) ?$/, "").trim();
  return text.length > MAX_QUESTION ? `…${text.slice(-MAX_QUESTION)}` : text;
}

const quoted = (text) => `"${text.replaceAll('"', "")}"`;

class Viewer {
  constructor(run, { query, setQuery, signal }) {
    this.path = `/api/v1/runs/${part(run.run_id)}`;
    this.signal = signal;
    this.setQuery = setQuery;
    this.chosen = Object.fromEntries(CHOICES.map((name) => [name, query.get(name) || ""]));
    if (!SORTS.some(([sort]) => sort === this.chosen.sort)) this.chosen.sort = "step";
    this.counts = { steps: [], edges: [], counts: [], values: {}, num_rollouts: 0 };
    this.known = { split: [], stop: [] }; // also those of rollouts that are filtered out
    this.listed = [];
    this.strip = stepStrip((step) => this.choose({ step: String(step), bin: "", rollout: "", view: "" }));
    this.controls = h("div", { class: "row rollout-controls" });
    this.steps = h("div", { class: "row rollout-steps" });
    this.times = h("span", { class: "muted rollout-times" });
    this.bins = h("div");
    this.list = h("div", { class: "rollout-list", "data-loading": "" });
    this.detail = h("div", { class: "rollout-detail" });
    this.body = h("div", { class: "rollout-body" }, this.list, this.detail);
    this.nothing = h("div");
    this.element = h("div", { class: "rollouts" }, this.nothing);
    this.drawCounts = whenChanged(() => this.showCounts());
  }

  // ── what is asked ─────────────────────────────────────────────────────────────────────────────────

  /** Return the conditions that do not depend on the step or the bin. */
  conditions() {
    const { split, chosen: { q, stop } } = this;
    return [split && `split=${quoted(split)}`, stop && `stop=${quoted(stop)}`, q].filter(Boolean);
  }

  /** Return the split shown, or "": rewards of training and of evaluations have no common mean. */
  get split() {
    const { split } = this.chosen;
    if (split) return split === ALL ? "" : split;
    return this.known.split.length > 1 && this.known.split.includes("train") ? "train" : "";
  }

  /** Return the step shown: the chosen one, or the nearest that has rollouts; the newest if none was chosen. */
  get step() {
    const { steps } = this.counts;
    if (this.chosen.step === "all" || !steps.length) return null;
    if (!/^\d+$/.test(this.chosen.step)) return steps.at(-1).step;
    const wanted = Number(this.chosen.step);
    return steps.reduce((best, { step }) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), steps[0].step);
  }

  query() {
    const [, low, high, end] = BIN.exec(this.chosen.bin) || [];
    return [
      this.step !== null && `step=${this.step}`,
      low !== undefined && `reward>=${low} reward<${end ? "=" : ""}${high}`,
      ...this.conditions(),
    ]
      .filter(Boolean)
      .join(" ");
  }

  async refresh() {
    if (!this.known.split.length) this.learn(await this.count([]));
    const split = this.split;
    this.counts = await this.count(this.conditions());
    this.learn(this.counts);
    if (split !== this.split) this.counts = await this.count(this.conditions());
    this.drawCounts([this.counts, this.step, this.chosen.bin, this.split, this.known]);
    await Promise.all([this.asked !== this.key() && this.load(), this.timed !== this.step && this.loadTimes()]);
  }

  count(conditions) {
    return get(`${this.path}/rollout_steps`, { q: conditions.join(" ") }, this.signal);
  }

  learn({ values }) {
    for (const name of Object.keys(this.known)) this.known[name] = [...new Set([...this.known[name], ...(values[name] ?? [])])];
  }

  /** Return what the list depends on; a step that grows is read again. */
  key() {
    const step = this.counts.steps.find((one) => one.step === this.step);
    return JSON.stringify([this.query(), this.chosen.sort, step?.num_rollouts ?? this.counts.num_rollouts]);
  }

  async choose(values) {
    Object.assign(this.chosen, values);
    this.setQuery(this.chosen.sort === "step" ? { ...this.chosen, sort: "" } : this.chosen);
    try {
      await this.refresh();
      await this.showDetail();
    } catch (error) {
      if (!this.signal.aborted && error.status !== 401) toast(error.message, "bad");
    }
  }

  // ── steps, bins and controls ──────────────────────────────────────────────────────────────────────

  showCounts() {
    const { steps, edges } = this.counts;
    const isFiltered = this.conditions().length > 0;
    if (!steps.length && !isFiltered && !this.controls.isConnected)
      return replace(this.nothing, empty("No rollouts yet.", "The RL, distillation and evaluation loops log them. From a program:", rolloutsProgram()));
    if (!this.controls.isConnected) this.compose();
    this.strip.update(steps, edges, this.step ?? -1);
    const index = steps.findIndex((one) => one.step === this.step);
    const here = steps[index] ?? null;
    replace(this.steps, this.stepControls(index, here));
    const counts = here ? here.counts : this.counts.counts;
    replace(this.bins, edges.length > 1 && histogram(edges, counts, this.binOf(edges), (i) => this.chooseBin(i)));
    this.stops.update(this.known.stop, this.chosen.stop);
    this.splits.update(this.known.split, this.split);
    return undefined;
  }

  compose() {
    const { q, sort } = this.chosen;
    let typing;
    const search = searchBox("Search rollouts", "Text, or reward<0.5 length>100 group=2 error=yes", q, (text) => {
      clearTimeout(typing);
      typing = setTimeout(() => this.choose({ q: text, bin: "" }), TYPING_MS);
    });
    this.splits = menu("Split", "all splits", (split) => this.choose({ split: split || ALL, bin: "" }));
    this.stops = menu("Stop reason", "any stop", (stop) => this.choose({ stop, bin: "" }));
    const sorts = choice("Sort", SORTS, sort, (value) => this.choose({ sort: value }));
    const saver = button("Export JSONL", (event) => this.exportLines(event.currentTarget), {
      class: "quiet small",
      title: "Download the rollouts of this list with all their turns",
    });
    replace(this.controls, search, this.splits.element, this.stops.element, sorts, saver);
    replace(
      this.element,
      h("section", { class: "panel" }, this.steps, h("div", { class: "rollout-charts" }, this.strip.element, this.bins)),
      h("section", { class: "panel" }, this.controls, this.body),
    );
    this.showDetail();
  }

  stepControls(index, here) {
    const { steps, num_rollouts: total } = this.counts;
    const go = (offset, label, text) =>
      button(text, () => this.choose({ step: String(steps[index + offset].step), rollout: "", view: "", bin: "" }), {
        class: "small",
        disabled: index < 0 || !steps[index + offset],
        "aria-label": label,
      });
    const input = h("input", {
      type: "number",
      min: "0",
      value: here ? String(here.step) : "",
      placeholder: "all",
      "aria-label": "Step",
      onchange: (event) => this.choose({ step: event.target.value, rollout: "", view: "", bin: "" }),
    });
    const count = here ? here.num_rollouts : total;
    return [
      h("label", { class: "check" }, h("b", null, "Step"), input),
      go(-1, "Previous step", "‹"),
      go(1, "Next step", "›"),
      button("All steps", () => this.choose({ step: "all", rollout: "", view: "", bin: "" }), {
        class: "quiet small",
        "aria-pressed": String(!here),
      }),
      this.chosen.bin &&
        button(`reward ${this.chosen.bin.replace("]", "").split(",").map(Number).map((one) => short(one)).join(" to ")} ×`, () => this.chooseBin(-1), {
          class: "small",
          title: "Show all rewards",
        }),
      h("span", { class: "muted" }, `${short(count)} rollouts`),
      here?.mean_reward !== null && here && h("span", { class: "muted" }, `mean reward ${short(here.mean_reward)}`),
      here?.mean_tokens && h("span", { class: "muted" }, `${short(here.mean_tokens)} tokens on average`),
      this.times,
    ];
  }

  /** Show how long the step took, as the program reported it: the metrics `time/...`. */
  async loadTimes() {
    const { step } = this;
    const asked = { first_step: step, last_step: step };
    const { series } = step === null ? { series: [] } : await get(`${this.path}/metrics`, asked, this.signal);
    if (step !== this.step) return;
    const times = series.filter(({ name, points }) => name.startsWith("time/") && points.at(-1)?.[2] > 0);
    replace(this.times, times.map(({ name, points }) => `${name.slice(5).replace("_seconds", "")} ${span(points.at(-1)[2])}`).join(", "));
    this.timed = times.length ? step : undefined; // the program may report them after the rollouts
  }

  binOf(edges) {
    const low = BIN.exec(this.chosen.bin)?.[1];
    return low === undefined ? -1 : edges.slice(0, -1).indexOf(Number(low));
  }

  chooseBin(number) {
    const { edges } = this.counts;
    const end = number === edges.length - 2 ? "]" : "";
    this.choose({ bin: number < 0 ? "" : `${edges[number]},${edges[number + 1]}${end}`, rollout: "", view: "" });
  }

  // ── the list ──────────────────────────────────────────────────────────────────────────────────────

  async load() {
    const key = this.key();
    this.asked = key;
    const asked = { q: this.query(), sort: this.chosen.sort, limit: PAGE_SIZE };
    const page = await get(`${this.path}/rollouts`, asked, this.signal).catch((error) => {
      this.asked = null; // the next poll tries again
      throw error;
    });
    if (key !== this.asked) return;
    Object.assign(this, { listed: page.rollouts, cursor: page.next_cursor, total: page.total_count });
    this.showList();
  }

  async more() {
    const key = this.asked;
    const asked = { q: this.query(), sort: this.chosen.sort, limit: PAGE_SIZE, after: this.cursor };
    const page = await get(`${this.path}/rollouts`, asked, this.signal);
    if (key !== this.asked) return;
    this.listed = [...this.listed, ...page.rollouts];
    this.cursor = page.next_cursor;
    this.showList();
  }

  showList() {
    this.list.removeAttribute("data-loading");
    this.list.dataset.total = this.total;
    if (!this.listed.length) return replace(this.list, empty("No rollout matches."));
    const isGrouped = this.step !== null && this.chosen.sort === "step" && this.listed.some((one) => one.group);
    const groupOf = (one) => JSON.stringify([one.kind, one.split, one.group]);
    const isSame = (one, other) => other !== undefined && groupOf(one) === groupOf(other);
    const items = this.listed.flatMap((one, i) => {
      const isNew = isGrouped && !isSame(one, this.listed[i - 1]);
      const isAlone = isNew && !isSame(one, this.listed[i + 1]); // needs no heading of its own
      return [isNew && !isAlone && this.groupHead(one), this.item(one, isGrouped && !isAlone, isAlone)];
    });
    const rest = this.total - this.listed.length;
    replace(
      this.list,
      h("ul", null, items),
      this.cursor && h("p", null, button(`Show more of ${short(rest)}`, () => this.more(), { class: "small" })),
    );
    // The buttons that lead to the neighbours need the list, which may come after the rollout of a link.
    const head = this.detail.querySelector(".rollout-head");
    if (head && !head.contains(document.activeElement)) head.replaceWith(this.detailHead(this.opened));
    return this.follow();
  }

  /** Scroll the list, which is beside the opened rollout, to where that is; once, then the reader scrolls. */
  follow() {
    const { rollout } = this.chosen;
    const item = this.list.querySelector(".rollout a[aria-current]");
    if (!item || this.followed === rollout || !this.body.classList.contains("has-detail")) return;
    const [there, frame] = [item, this.list].map((one) => one.getBoundingClientRect());
    if (!frame.height) return;
    this.followed = rollout;
    const offset = there.top - frame.top; // the page itself may scroll when the list becomes shorter
    if (offset < 0 || offset + there.height > innerHeight / 2) this.list.scrollTop += offset - innerHeight / 4;
  }

  groupHead(one) {
    return h(
      "li",
      { class: "rollout-group" },
      h("b", null, one.kind === "sample" ? `${one.split} ${one.group}` : `group ${one.group}`),
      h("span", { class: "muted rollout-prompt", title: one.prompt }, question(one.prompt)),
      button("Side by side", () => this.open(one.rollout_id, "group"), { class: "quiet small" }),
    );
  }

  item(one, isGrouped, isAlone) {
    const isOpen = String(one.rollout_id) === this.chosen.rollout;
    const said = [
      this.step === null && `step ${short(one.step)}`,
      isAlone && (one.kind === "sample" ? `${one.split} ${one.group}` : `group ${one.group}`),
      one.split !== "train" && !isGrouped && !isAlone && one.split,
      one.group && !isGrouped && !isAlone && `group ${one.group}`,
      !isAlone && `#${one.number}`,
      one.num_tokens !== null && `${short(one.num_tokens)} tokens`,
      one.num_turns > 2 && `${one.num_turns} turns`,
    ];
    return h(
      "li",
      { class: "rollout", "data-rollout": one.rollout_id },
      h(
        "a",
        {
          href: `${location.pathname}?${new URLSearchParams({ rollout: one.rollout_id, step: one.step, split: one.split })}`,
          "aria-current": isOpen ? "true" : null,
          onclick: (event) => {
            if (event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
            event.preventDefault();
            this.open(one.rollout_id, "");
          },
        },
        h(
          "span",
          { class: "row" },
          rewardChip(one.reward, this.counts.edges),
          h("span", { class: "muted" }, said.filter(Boolean).join(" · ")),
          one.stop_reason && one.stop_reason !== "stop" && badge("warn", one.stop_reason),
          one.has_errors && badge("bad", "error"),
        ),
        isAlone && h("span", { class: "muted rollout-asked", title: one.prompt }, question(one.prompt)),
        h("span", { class: "rollout-answer" }, one.answer || "(nothing)"),
      ),
    );
  }

  // ── one rollout, a group, a comparison ────────────────────────────────────────────────────────────

  open(id, view) {
    // The step stays while somebody reads, although newer ones arrive.
    const step = this.step === null ? "all" : String(this.step);
    const opened = this.choose({ rollout: String(id), view, with: "", step });
    return opened.then(() => matchMedia(NARROW).matches && this.detail.scrollIntoView());
  }

  async showDetail() {
    const id = this.chosen.rollout;
    this.body.classList.toggle("has-detail", Boolean(id));
    for (const link of this.list.querySelectorAll(".rollout a"))
      link.toggleAttribute("aria-current", link.parentElement.dataset.rollout === id);
    if (!id) this.followed = "";
    this.follow();
    if (!id) return replace(this.detail);
    try {
      if (this.opened?.rollout_id !== Number(id)) this.opened = await get(`${this.path}/rollouts/${part(id)}`, null, this.signal);
      const content = await this.content(this.opened);
      if (id === this.chosen.rollout) replace(this.detail, this.detailHead(this.opened), content);
    } catch (error) {
      if (this.signal.aborted || error.status === 401) return undefined;
      replace(this.detail, this.closing(), empty(error.message, "It may have been thinned out: older steps are kept in part."));
    }
    return undefined;
  }

  closing() {
    return button("Close", () => this.choose({ rollout: "", view: "", with: "" }), { class: "quiet small" });
  }

  detailHead(one) {
    const tab = (view, label) =>
      button(label, () => this.choose({ view }), { class: "small", "aria-pressed": String(this.chosen.view === view) });
    const index = this.listed.findIndex((row) => row.rollout_id === one.rollout_id);
    const go = (offset, label, text) =>
      button(text, () => this.open(this.listed[index + offset].rollout_id, this.chosen.view), {
        class: "quiet small",
        "aria-label": label,
        disabled: index < 0 || !this.listed[index + offset],
      });
    return h(
      "header",
      { class: "row rollout-head" },
      h("h2", null, `Step ${short(one.step)}${one.group ? `, group ${one.group}` : ""}, #${one.number}`),
      go(-1, "Previous rollout", "‹"),
      go(1, "Next rollout", "›"),
      h("span", { class: "row" }, tab("", "Rollout"), one.group && tab("group", "Group"), tab("diff", "Other steps")),
      this.chosen.view !== "diff" && choice("Shading", SHADES, this.chosen.shade, (shade) => this.choose({ shade })),
      h("span", { class: "row closing" }, copyButton(location.href, "Copy link"), this.closing()),
    );
  }

  async content(one) {
    const options = { shade: this.chosen.shade, edges: this.counts.edges };
    if (this.chosen.view === "group") {
      const q = `step=${one.step} kind=${one.kind} split=${quoted(one.split)} group=${quoted(one.group)}`;
      const asked = { q, sort: "step", content: "yes", limit: GROUP_SIZE };
      const { rollouts } = await get(`${this.path}/rollouts`, asked, this.signal);
      return [shadeLegend(options.shade), groupView(rollouts, options, (id) => this.open(id, ""))];
    }
    if (this.chosen.view === "diff") return this.comparison(one);
    return [shadeLegend(options.shade), rolloutErrors(one), rolloutFacts(one), turnList(one.content.turns, one, options)];
  }

  async comparison(one) {
    const q = `prompt=${one.prompt_key} split=${quoted(one.split)}`;
    const { rollouts } = await get(`${this.path}/rollouts`, { q, sort: "step", limit: MAX_SAME }, this.signal);
    const others = rollouts.filter((row) => row.rollout_id !== one.rollout_id);
    if (!others.length) return empty("No other rollout has this prompt.");
    const earlier = others.findLast((row) => row.step < one.step)?.step;
    const step = earlier ?? others.find((row) => row.step > one.step)?.step ?? one.step;
    const there = others.filter((row) => row.step === step);
    const nearest = there.find((row) => row.number === one.number) ?? there[0];
    const id = others.some((row) => String(row.rollout_id) === this.chosen.with) ? this.chosen.with : String(nearest.rollout_id);
    const other = await get(`${this.path}/rollouts/${id}`, null, this.signal);
    const pairs = others.map((row) => [String(row.rollout_id), `step ${row.step}, #${row.number}, reward ${short(row.reward)}`]);
    const pick = choice("Compare with", pairs, id, (value) => this.choose({ with: value }));
    const inOrder = other.step <= one.step ? [other, one] : [one, other];
    return [h("label", { class: "row" }, "The same prompt at", pick), diffView(...inOrder, this.counts.edges)];
  }

  // ── export ────────────────────────────────────────────────────────────────────────────────────────

  async exportLines(pressed) {
    pressed.disabled = true;
    const lines = [];
    try {
      for (let after = null; after !== undefined; ) {
        const asked = { q: this.query(), sort: this.chosen.sort, content: "yes", limit: 100, after };
        const page = await get(`${this.path}/rollouts`, asked, this.signal);
        for (const one of page.rollouts) lines.push(`${JSON.stringify(one)}\n`);
        after = page.next_cursor ?? undefined;
        pressed.textContent = `${short(lines.length)} of ${short(this.total)}`;
      }
      save(new Blob(lines, { type: "application/jsonl" }), "rollouts.jsonl");
    } catch (error) {
      if (!this.signal.aborted && error.status !== 401) toast(error.message, "bad");
    } finally {
      pressed.disabled = false;
      pressed.textContent = "Export JSONL";
    }
  }
}

/** Build a select whose values change; the chosen one stays, also when nothing has it any more. */
function menu(label, all, onValue) {
  const element = h("span");
  const draw = whenChanged(([values, chosen]) => {
    const pairs = [["", all], ...[...new Set([...values, ...(chosen ? [chosen] : [])])].map((one) => [one, one])];
    replace(element, choice(label, pairs, chosen, onValue));
  });
  return { element, update: (values, chosen) => draw([values, chosen]) };
}
