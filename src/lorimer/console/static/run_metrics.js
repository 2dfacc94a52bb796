// The metrics of one run as the page knows them: fetched once, then only what is new or was rewritten. Also what is
// made of them for a chart: x by step or time, and smoothing. Drawing is left to charts.js.

import { get, part } from "./api.js";

const PAGE = 5000;

export class RunMetrics {
  constructor(runId) {
    this.runId = runId;
    /** By source and name: `{name, source, points: Map(step → [time, value])}`. */
    this.series = new Map();
    this.firstTime = null;
    /** The greatest step of any series. */
    this.lastStep = null;
    this.cursor = null;
  }

  /** Fetch what is new; the keys of series that changed. */
  async poll(signal) {
    const changed = new Set();
    for (;;) {
      const answer = await get(
        `/api/v1/training_runs/${part(this.runId)}/metrics`,
        { after: this.cursor, limit: PAGE },
        signal,
      );
      for (const { name, source, points } of answer.series) {
        if (!points.length) continue;
        const key = `${source} ${name}`;
        if (!this.series.has(key)) this.series.set(key, { name, source, points: new Map() });
        const known = this.series.get(key).points;
        for (const [step, time, value] of points) {
          known.set(step, [time, value]);
          if (this.firstTime === null || time < this.firstTime) this.firstTime = time;
          if (this.lastStep === null || step > this.lastStep) this.lastStep = step;
        }
        changed.add(key);
      }
      this.cursor = answer.cursor ?? this.cursor;
      if (!answer.has_more) return changed;
    }
  }

  /** Columns x and y of a series, by rising x; `axis` is step, elapsed (since the run's first point) or clock. */
  columns(key, axis) {
    const points = [...(this.series.get(key)?.points || [])];
    const at = { step: ([step]) => step, elapsed: ([, [time]]) => time - this.firstTime, clock: ([, [time]]) => time }[
      axis
    ];
    const rows = points.map((point) => [at(point), point[1][1]]).sort((a, b) => a[0] - b[0]);
    // Two steps may have been recorded in the same instant, and a chart wants rising x.
    const unique = rows.filter((row, i) => i === rows.length - 1 || row[0] !== rows[i + 1][0]);
    return [unique.map((row) => row[0]), unique.map((row) => row[1])];
  }
}

/** An exponential moving average whose beginning is not drawn towards zero; `weight` 0 changes nothing, gaps stay. */
export function smooth(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** Where a metric stands among the others: what people look at first comes first. */
export function rankOf(name) {
  const order = [
    /(^|[/_])(loss|nll)/i,
    /reward|return|score|accuracy|correct/i,
    /kl/i,
    /ratio|entropy/i,
    /grad|norm/i,
    /lr|learning/i,
  ];
  const place = order.findIndex((pattern) => pattern.test(name));
  return place < 0 ? order.length : place;
}

/** All of the given runs' series as lines of CSV: run, source, metric, step, time, value. */
export function csv(runs) {
  // A spreadsheet takes a text that begins like this for a formula, and runs it.
  const plain = (text) => (/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);
  const quote = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = ["run,source,metric,step,time,value"];
  for (const run of runs) {
    for (const { name, source, points } of run.series.values()) {
      for (const [step, [time, value]] of points)
        lines.push([quote(plain(run.runId)), source, quote(plain(name)), step, time, value ?? ""].join(","));
    }
  }
  return `${lines.join("\n")}\n`;
}
