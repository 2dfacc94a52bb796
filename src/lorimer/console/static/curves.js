// The charts of a run and of runs compared with it: selection of runs and metrics, options, legend. The URL contains
// all choices, so that a link shows the same view.

import { get, part } from "./api.js";
import { MetricChart, NUM_COLOURS, colour } from "./charts.js";
import { button, choice, empty, h, replace, runLink, searchBox, shortRun, toast } from "./dom.js";
import { metricsProgram } from "./getting_started.js";
import { differing, flatten } from "./run_identity.js";
import { RunMetrics, csv, rankOf } from "./run_metrics.js";

const AXES = [
  ["step", "step"],
  ["elapsed", "time since start"],
  ["clock", "time of day"],
];

export class Curves {
  constructor(runId, { query, setQuery, signal }) {
    this.signal = signal;
    this.setQuery = setQuery;
    this.charts = new Map();
    /** What is known of each run by id: name and configuration. */
    this.known = new Map();
    this.legendBy = query.get("legend") === "fields" ? "fields" : "name";
    this.onRuns = () => {};
    const others = (query.get("compare") || "").split(",").filter(Boolean);
    this.runs = [...new Set([runId, ...others])].slice(0, NUM_COLOURS).map((id) => new RunMetrics(id));
    const smoothing = Number(query.get("smooth"));
    this.options = {
      axis: AXES.some(([axis]) => axis === query.get("x")) ? query.get("x") : "step",
      isLog: query.get("log") === "1",
      smoothing: smoothing > 0 && smoothing < 1 ? smoothing : 0,
    };
    this.filter = query.get("metric") || "";
    this.legend = h("ul", { class: "run-legend" });
    this.grid = h("div", { class: "charts" });
    this.nothing = h("div");
    this.thinned = h("p", { class: "muted", hidden: true });
    this.isReadingOn = false;
    this.isZooming = false;
    this.element = h("div", { class: "curves" }, this.controls(), this.legend, this.nothing, this.thinned, this.grid);
  }

  /**
   * Fetch and draw new points of every run shown; further pages follow after this returns. Remove an unknown run and
   * show a message.
   */
  async poll() {
    const runs = this.runs;
    await this.learn();
    const polled = await Promise.allSettled(runs.map((run) => run.poll(this.signal)));
    const failed = polled.findIndex((result) => result.status === "rejected");
    if (failed > 0 && polled[failed].reason.status === 404) {
      toast(polled[failed].reason.message, "bad");
      this.removeRun(runs[failed]);
    } else if (failed >= 0) {
      throw polled[failed].reason;
    }
    const changed = new Set(polled.flatMap((result) => [...(result.value || [])]));
    this.draw(changed);
    this.readOn();
  }

  /** Fetch names and configurations of runs that are not known yet. */
  async learn() {
    const missing = this.runs.filter((run) => !this.known.has(run.runId));
    const found = await Promise.allSettled(
      missing.map((run) => get(`/api/v1/runs/${part(run.runId)}`, null, this.signal)),
    );
    found.forEach(({ value }, n) => value && this.known.set(missing[n].runId, value));
    if (!missing.length) return;
    this.drawLegend();
    this.onRuns(this.runs.map((run) => this.known.get(run.runId)).filter(Boolean));
  }

  /** Return what a run is called in the legend: its name, or the fields in which the runs differ. */
  labelOf(run) {
    const known = this.known.get(run.runId);
    if (!known) return shortRun(run.runId);
    if (this.legendBy === "name" || this.runs.length < 2) return known.name;
    const names = differing([...this.runs].map((one) => this.known.get(one.runId)).filter(Boolean));
    const flat = new Map(flatten(known.config));
    return names.map((name) => `${name}=${flat.get(name) ?? "–"}`).join(", ") || known.name;
  }

  /** Draw the remaining pages of long runs as they arrive. */
  async readOn() {
    if (this.isReadingOn) return;
    this.isReadingOn = true;
    try {
      for (let run; (run = this.runs.find((one) => one.hasMore));) this.draw(await run.poll(this.signal));
    } catch {
      // The next poll fails the same way and reports it.
    } finally {
      this.isReadingOn = false;
    }
  }

  /** Zoom to a range of the x axis, or with null to all of it, and fetch the points missing in that range. */
  async zoom(range) {
    if (!range) for (const chart of this.charts.values()) chart.isZoomed = false;
    if (!range || this.isZooming) return;
    this.isZooming = true;
    await null; // all visible charts follow a drag in the same frame and call this
    this.isZooming = false;
    try {
      const looked = this.runs.map((run) => {
        const steps = run.stepsBetween(this.options.axis, ...range);
        return steps ? run.look(...steps, this.signal) : new Set();
      });
      this.draw(new Set((await Promise.all(looked)).flatMap((keys) => [...keys])));
    } catch (error) {
      if (!this.signal.aborted && error.status !== 401) toast(error.message, "bad");
    }
  }

  /** Return the last step of the run itself, or null. */
  get lastStep() {
    return this.runs[0].lastStep;
  }

  // ── controls ──────────────────────────────────────────────────────────────────────────────────────

  controls() {
    const { axis, isLog, smoothing } = this.options;
    const labels = [
      ["name", "names"],
      ["fields", "differences"],
    ];
    this.legendChoice = choice("Legend", labels, this.legendBy, (value) => {
      this.legendBy = value;
      this.setQuery({ legend: value === "name" ? null : value });
      this.draw(null);
    });
    const filter = searchBox("Filter metrics by name", "Filter metrics", this.filter, (text) => {
      this.filter = text;
      this.setQuery({ metric: text });
      this.draw(new Set());
    });
    const select = choice("Horizontal axis", AXES, axis, (value) =>
      this.choose({ axis: value }, { x: value === "step" ? null : value }),
    );
    const log = h("input", {
      type: "checkbox",
      checked: isLog,
      onchange: () => this.choose({ isLog: log.checked }, { log: log.checked ? "1" : null }),
    });
    const slider = h("input", {
      type: "range",
      min: "0",
      max: "0.99",
      step: "0.01",
      value: String(smoothing),
      "aria-label": "Smoothing",
      oninput: () => {
        amount.textContent = Number(slider.value).toFixed(2);
        this.choose({ smoothing: Number(slider.value) }, { smooth: Number(slider.value) ? slider.value : null });
      },
    });
    const amount = h("output", { class: "muted" }, smoothing.toFixed(2));
    return h(
      "div",
      { class: "row chart-controls" },
      filter,
      h("label", { class: "check" }, h("span", { class: "muted" }, "x"), select),
      h("label", { class: "check" }, log, "log scale"),
      h("label", { class: "check" }, h("span", { class: "muted" }, "smoothing"), slider, amount),
      this.adding(),
      this.legendChoice,
      button("CSV", (event) => this.saveCsv(event.currentTarget), {
        class: "quiet small",
        title: "Download all values of the runs shown",
      }),
    );
  }

  /** Build a field that finds runs as one types, by name or any other text of them. */
  adding() {
    const input = h("input", {
      placeholder: "Compare with a run",
      "aria-label": "Compare with another run, by its name or id",
      size: "18",
      autocomplete: "off",
    });
    const found = h("ul", { class: "found-runs", hidden: true });
    const pick = (runId) => {
      this.addRun(runId);
      input.value = "";
      found.hidden = true;
    };
    const look = async () => {
      const q = input.value.trim();
      const { runs } = q ? await get("/api/v1/runs", { q, limit: 8 }, this.signal) : { runs: [] };
      if (q !== input.value.trim()) return;
      const others = runs.filter((run) => !this.runs.some((one) => one.runId === run.run_id));
      replace(
        found,
        others.map((run) => h("li", null, button(run.name, () => pick(run.run_id), { class: "quiet", title: run.run_id }))),
      );
      found.hidden = !others.length;
    };
    let typing;
    input.addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => look().catch(() => (found.hidden = true)), 200);
    });
    const add = async (event) => {
      event.preventDefault();
      const text = input.value.trim();
      clearTimeout(typing);
      await look().catch(() => {});
      pick(text.includes(":train:") ? text : (found.querySelector("button")?.title ?? text));
    };
    return h(
      "form",
      { class: "adding", onsubmit: add },
      input,
      h("button", { type: "submit", class: "small" }, "Add"),
      found,
    );
  }

  choose(options, query) {
    Object.assign(this.options, options);
    this.setQuery(query);
    this.draw(null);
  }

  async addRun(runId) {
    if (!runId || this.runs.some((run) => run.runId === runId)) return;
    if (this.runs.length >= NUM_COLOURS) return toast(`At most ${NUM_COLOURS} runs fit in one chart.`, "bad");
    const run = new RunMetrics(runId);
    try {
      await run.poll(this.signal);
    } catch (error) {
      if (!this.signal.aborted && error.status !== 401) toast(error.message, "bad");
      return;
    }
    this.runs.push(run);
    await this.learn();
    this.keepRuns();
    this.readOn();
  }

  removeRun(run) {
    this.runs = this.runs.filter((one) => one !== run);
    this.onRuns(this.runs.map((one) => this.known.get(one.runId)).filter(Boolean));
    this.keepRuns();
  }

  keepRuns() {
    this.setQuery({
      compare: this.runs
        .slice(1)
        .map((run) => run.runId)
        .join(","),
    });
    this.draw(null);
  }

  async saveCsv(pressed) {
    pressed.disabled = true;
    try {
      const parts = await csv(
        this.runs.map((run) => run.runId),
        this.signal,
      );
      const url = URL.createObjectURL(new Blob(parts, { type: "text/csv" }));
      h("a", { href: url, download: "metrics.csv" }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10_000);
    } catch (error) {
      if (!this.signal.aborted && error.status !== 401) toast(error.message, "bad");
    } finally {
      pressed.disabled = false;
    }
  }

  // ── drawing ───────────────────────────────────────────────────────────────────────────────────────

  /** Draw the charts of these keys, or all of them if null. */
  draw(changed) {
    if (changed === null || this.legend.childElementCount !== this.runs.length) this.drawLegend();
    const words = this.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const keys = this.keys();
    for (const [key, { name, source }] of keys) {
      const isNew = !this.charts.has(key);
      if (isNew) this.charts.set(key, new MetricChart(name, source, this.signal, (range) => this.zoom(range)));
      const chart = this.charts.get(key);
      chart.element.hidden = !words.every((word) => name.toLowerCase().includes(word));
      if (isNew || changed === null || changed.has(key)) chart.update(this.lines(key), { ...this.options });
    }
    this.place(keys);
    this.showNothing(keys);
    this.showThinned();
  }

  showThinned() {
    const number = Math.max(1, ...this.runs.map((run) => run.stepsPerBucket));
    this.thinned.hidden = number === 1;
    this.thinned.textContent =
      `Of every ${number.toLocaleString("en")} steps the first, last, least and greatest value are drawn. ` +
      "Drag over a part of a chart to see more of it; CSV has every value.";
  }

  /** Return names and sources of all series of all runs by key, in display order. */
  keys() {
    const found = new Map();
    for (const run of this.runs) for (const [key, series] of run.series) found.set(key, series);
    return new Map([...found].sort(([, a], [, b]) => rankOf(a.name) - rankOf(b.name) || a.name.localeCompare(b.name)));
  }

  lines(key) {
    const { axis, smoothing } = this.options;
    return this.runs.flatMap((run, n) => {
      if (!run.series.has(key)) return [];
      const sample = smoothing ? run.columns(key, axis, true) : null;
      return [{ label: this.labelOf(run), colour: n, columns: run.columns(key, axis), sample }];
    });
  }

  /** Reorder charts only if their set changed: moving a chart would end a drag in it. */
  place(keys) {
    const wanted = [...keys.keys()].map((key) => this.charts.get(key).element);
    if (wanted.length === this.grid.childElementCount && wanted.every((node, i) => node === this.grid.children[i]))
      return;
    this.grid.replaceChildren(...wanted);
  }

  showNothing(keys) {
    const hasVisible = [...keys.keys()].some((key) => !this.charts.get(key).element.hidden);
    if (hasVisible) return this.nothing.replaceChildren();
    if (this.nothing.firstChild && !keys.size) return undefined;
    return replace(
      this.nothing,
      keys.size
        ? empty("No metric matches the filter.")
        : empty(
            "No numbers yet.",
            "Losses and norms appear with the first forward_backward and optim_step. Report your own metrics with:",
            metricsProgram(),
          ),
    );
  }

  drawLegend() {
    replace(
      this.legend,
      this.runs.map((run, n) => {
        const swatch = h("i", { class: "swatch" });
        swatch.style.background = colour(n);
        return h(
          "li",
          { "data-run": run.runId },
          swatch,
          n ? runLink(run.runId, this.labelOf(run)) : h("span", { title: run.runId }, this.labelOf(run)),
          n > 0 &&
            button("×", () => this.removeRun(run), {
              class: "quiet small",
              "aria-label": `Take ${run.runId} out of the charts`,
            }),
        );
      }),
    );
    this.legend.hidden = this.runs.length < 2;
    this.legendChoice.hidden = this.runs.length < 2;
  }
}
