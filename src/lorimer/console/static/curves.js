// The charts of a run and of runs compared with it: which runs and metrics, what is drawn of them, and the legend. The
// URL contains all choices, so that a link shows the same view. curve_sections.js arranges the charts.

import { get, part } from "./api.js";
import { save } from "./files.js";
import { chartTools } from "./chart_tools.js";
import { MetricChart, colour } from "./charts.js";
import { AXES, curveControls } from "./curve_controls.js";
import { CurveSections } from "./curve_sections.js";
import { button, empty, h, replace, runLink, shortRun, toast } from "./dom.js";
import { metricsProgram } from "./getting_started.js";
import { agree, constantOf, kindOf, panels } from "./metric_sections.js";
import { differing, flatten } from "./run_identity.js";
import { RunMetrics, csv } from "./run_metrics.js";
import { meanOf, seedGroups } from "./seed_groups.js";

export const MAX_RUNS = 16;

export class Curves {
  constructor(runId, { query, setQuery, signal }) {
    this.signal = signal;
    this.setQuery = setQuery;
    this.charts = new Map();
    /** What is known of each run by id: name and configuration. */
    this.known = new Map();
    this.legendBy = query.get("legend") === "fields" ? "fields" : "name";
    this.isGrouped = query.get("seeds") === "1";
    this.hasMarks = query.get("marks") !== "0";
    this.hasConstants = query.get("constants") === "1";
    this.onRuns = () => {};
    const others = (query.get("compare") || "").split(",").filter(Boolean);
    this.runs = [...new Set([runId, ...others])].slice(0, MAX_RUNS).map((id) => new RunMetrics(id));
    const smoothing = Number(query.get("smooth"));
    this.options = {
      axis: AXES.some(([axis]) => axis === query.get("x")) ? query.get("x") : "step",
      isLog: query.get("log") === "1",
      smoothing: smoothing > 0 && smoothing < 1 ? smoothing : 0,
    };
    this.filter = query.get("metric") || "";
    this.marks = [];
    this.legend = h("ul", { class: "run-legend" });
    this.sections = new CurveSections(query, setQuery, () => this.draw(new Set()));
    this.nothing = h("div");
    this.thinned = h("p", { class: "muted", hidden: true });
    this.isReadingOn = false;
    this.isZooming = false;
    const parts = [curveControls(this), this.legend, this.nothing, this.thinned, this.sections.element];
    this.element = h("div", { class: "curves" }, parts);
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
  labelOf(run, isGroup = false) {
    const known = this.known.get(run.runId);
    if (!known) return shortRun(run.runId);
    if (this.legendBy === "name" || this.runs.length < 2) return known.name;
    const names = differing([...this.runs].map((one) => this.known.get(one.runId)).filter(Boolean));
    const flat = new Map(flatten(known.config));
    const shown = isGroup ? names.filter((name) => !/(^|\.)seed$/.test(name)) : names;
    return shown.map((name) => `${name}=${flat.get(name) ?? "–"}`).join(", ") || known.name;
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

  // ── choices ───────────────────────────────────────────────────────────────────────────────────────

  choose(options, query) {
    Object.assign(this.options, options);
    this.setQuery(query);
    this.draw(null);
  }

  group(isGrouped) {
    this.isGrouped = isGrouped;
    this.setQuery({ seeds: isGrouped ? "1" : null });
    this.draw(null);
  }

  setHasMarks(hasMarks) {
    this.hasMarks = hasMarks;
    this.setQuery({ marks: hasMarks ? null : "0" });
    this.draw(null);
  }

  setHasConstants(hasConstants) {
    this.hasConstants = hasConstants;
    this.setQuery({ constants: hasConstants ? "1" : null });
    this.draw(null);
  }

  /** Take the marks of the run itself, `{step, time, kind, label}`, and draw them if they changed. */
  setMarks(marks) {
    if (JSON.stringify(marks) === JSON.stringify(this.marks)) return;
    this.marks = marks;
    this.draw(null);
  }

  async addRun(runId) {
    if (!runId || this.runs.some((run) => run.runId === runId)) return;
    if (this.runs.length >= MAX_RUNS) return toast(`At most ${MAX_RUNS} runs fit in one chart.`, "bad");
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
    const others = this.runs.slice(1).map((run) => run.runId);
    this.setQuery({ compare: others.join(",") });
    this.draw(null);
  }

  async saveCsv(pressed) {
    pressed.disabled = true;
    try {
      const runIds = this.runs.map((run) => run.runId);
      save(new Blob(await csv(runIds, this.signal), { type: "text/csv" }), "metrics.csv");
    } catch (error) {
      if (!this.signal.aborted && error.status !== 401) toast(error.message, "bad");
    } finally {
      pressed.disabled = false;
    }
  }

  // ── drawing ───────────────────────────────────────────────────────────────────────────────────────

  /** Draw the charts of these series, or all of them if null. */
  draw(changed) {
    if (changed === null || this.legend.childElementCount !== this.groups().length) this.drawLegend();
    const series = this.runs.flatMap((run) => [...run.series.values()]);
    const found = panels(series);
    this.sections.setKind(kindOf([...found.keys()]));
    const words = this.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (name) => words.every((word) => name.toLowerCase().includes(word));
    const [charts, constants] = [new Map(), []];
    for (const panel of found.values()) {
      const values = this.hasConstants ? null : this.constantsOf(panel);
      if (values && !this.sections.pins.has(panel.name)) {
        if (matches(panel.name)) constants.push({ name: panel.name, values });
        continue;
      }
      const chart = this.chartOf(panel, changed);
      chart.element.hidden = !matches(panel.name);
      charts.set(panel.name, chart);
    }
    this.sections.draw(charts, constants, this.runs.map((run) => this.labelOf(run)));
    const numShown = [...charts.values()].filter((chart) => !chart.element.hidden).length + constants.length;
    this.showNothing(found.size, numShown);
    this.showThinned();
  }

  /** Return the chart of a panel, drawn again if one of its series changed. */
  chartOf(panel, changed) {
    const isNew = !this.charts.has(panel.name);
    if (isNew) this.charts.set(panel.name, this.newChart(panel.name));
    const chart = this.charts.get(panel.name);
    const keys = keysOf(panel);
    if (!isNew && changed !== null && !keys.some((key) => changed.has(key))) return chart;
    const isBoth = panel.client && panel.engine;
    const isSame = isBoth && this.runs.every((run) => agree(pointsOf(run, keys[0]), pointsOf(run, keys[1])));
    chart.setSource(panel.client ? "client" : "engine", isBoth ? (isSame ? "same" : "differ") : null);
    const marks = this.hasMarks ? this.marksOnAxis() : [];
    chart.update(this.lines(keys, isBoth && !isSame), { ...this.options, marks });
    return chart;
  }

  newChart(name) {
    return new MetricChart(name, "engine", this.signal, {
      onZoom: (range) => this.zoom(range),
      onStep: (run, step) => window.dispatchEvent(new CustomEvent("lorimer:step", { detail: { run, step, metric: name } })),
      tools: (chart) => chartTools(chart, () => this.sections.togglePin(name)),
    });
  }

  /** Return the marks with their place on the x axis. */
  marksOnAxis() {
    const { firstTime } = this.runs[0];
    const place = { step: ({ step }) => step, elapsed: ({ time }) => time - firstTime, clock: ({ time }) => time };
    return this.marks
      .map((mark) => ({ x: place[this.options.axis](mark), kind: mark.kind, label: mark.label }))
      .filter(({ x }) => Number.isFinite(x));
  }

  /** Return the only value of a metric in each run, or null if it changes in one of them. */
  constantsOf(panel) {
    const keys = keysOf(panel);
    const found = this.runs.map((run) => {
      const values = keys.filter((key) => run.series.has(key)).map((key) => constantOf(pointsOf(run, key)));
      return !values.length ? null : values.every((value) => value !== undefined && value === values[0]) ? values[0] : NaN;
    });
    return found.some(Number.isNaN) || found.every((value) => value === null) ? null : found;
  }

  /** Return the runs that are drawn as one line each: by seeds, or one by one. */
  groups() {
    const canGroup = this.isGrouped && this.options.axis === "step";
    return canGroup ? seedGroups(this.runs, this.known) : this.runs.map((run) => [run]);
  }

  /** Return the lines of a chart: of the first series of each run, or of all of them, the engine's dashed. */
  lines(keys, hasBoth) {
    return this.groups().flatMap((group, n) =>
      (hasBoth ? keys : [null]).flatMap((key, i) => {
        const members = group.flatMap((run) => {
          const own = key ?? keys.find((one) => run.series.has(one));
          return own && run.series.has(own) ? [{ run, key: own }] : [];
        });
        if (!members.length) return [];
        const label = `${this.groupLabel(group)}${hasBoth && i ? ", engine" : ""}`;
        return [{ label, colour: n, isDashed: hasBoth && i > 0, ...this.curve(members) }];
      }),
    );
  }

  /** Return the columns of one run, or the mean of several with its band. */
  curve(members) {
    const { axis, smoothing } = this.options;
    const columns = members.map(({ run, key }) => run.columns(key, axis, members.length > 1));
    const { runId } = members[0].run;
    if (members.length > 1) {
      const mean = meanOf(columns);
      return { runId, ...mean, sample: mean.columns };
    }
    const sample = smoothing ? members[0].run.columns(members[0].key, axis, true) : null;
    return { runId, columns: columns[0], sample };
  }

  groupLabel(group) {
    const label = this.labelOf(group[0], group.length > 1);
    return group.length > 1 ? `${label} (${group.length} runs)` : label;
  }

  showThinned() {
    const number = Math.max(1, ...this.runs.map((run) => run.stepsPerBucket));
    this.thinned.hidden = number === 1;
    this.thinned.textContent =
      `Of every ${number.toLocaleString("en")} steps the first, last, least and greatest value are drawn. ` +
      "Drag over a part of a chart to see more of it; CSV has every value.";
  }

  showNothing(numKnown, numShown) {
    if (numShown) return this.nothing.replaceChildren();
    if (this.nothing.firstChild && !numKnown) return undefined;
    return replace(
      this.nothing,
      numKnown
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
      this.groups().map((group, n) => {
        const swatch = h("i", { class: "swatch" });
        swatch.style.background = colour(n);
        const [run] = group;
        const isMain = run === this.runs[0];
        const title = group.map((one) => this.known.get(one.runId)?.name ?? one.runId).join(", ");
        return h(
          "li",
          { "data-run": run.runId },
          swatch,
          isMain || group.length > 1
            ? h("span", { title: group.length > 1 ? title : run.runId }, this.groupLabel(group))
            : runLink(run.runId, this.labelOf(run)),
          !isMain &&
            group.length === 1 &&
            button("×", () => this.removeRun(run), {
              class: "quiet small",
              "aria-label": `Take ${run.runId} out of the charts`,
            }),
        );
      }),
    );
    this.legend.hidden = this.runs.length < 2;
    this.compareControls.hidden = this.runs.length < 2;
  }
}

/** Return the keys of a panel's series in a run, the client's first. */
function keysOf({ client, engine }) {
  return [client && `client ${client}`, engine && `engine ${engine}`].filter(Boolean);
}

const pointsOf = (run, key) => run.series.get(key)?.points.at ?? new Map();
