// The metrics of one run as the page knows them: fetched once, then only what is new or was rewritten. A long run is
// fetched and kept thinned, and less so where somebody looks closely. Also what is made of them for a chart: x by step or
// time, and smoothing; and all of it as CSV. Drawing is left to charts.js.

import { get, part } from "./api.js";
import { Points } from "./thinning.js";

const MAX_POINTS = 2000;
const MAX_POINTS_CLOSE = 10_000;
const NUM_FIRST = 30_000;
const PAGE = 10_000;

const pathOf = (runId) => `/api/v1/training_runs/${part(runId)}/metrics`;

export class RunMetrics {
  constructor(runId) {
    this.runId = runId;
    /** By source and name: `{name, source, points: Points}`. */
    this.series = new Map();
    /** Where somebody looks closely, or null: `{first, last, series}` with series like the above. */
    this.detail = null;
    this.wanted = null;
    this.firstTime = null;
    /** The greatest step of any series. */
    this.lastStep = null;
    this.cursor = null;
    /** Whether there is more than was fetched: a very long run comes in parts. */
    this.hasMore = false;
    this.polling = null;
  }

  /** Fetch what is new, of much of it the next part; the keys of series that changed. */
  poll(signal) {
    this.polling ??= this.fetchNext(signal).finally(() => (this.polling = null));
    return this.polling;
  }

  async fetchNext(signal) {
    const limit = this.cursor ? null : NUM_FIRST; // something is shown soon
    const answer = await get(pathOf(this.runId), { after: this.cursor, max_points: MAX_POINTS, limit }, signal);
    const changed = new Set(answer.series.map((one) => put(this.series, one, MAX_POINTS)));
    for (const { points } of answer.series) {
      for (const [step, time] of points) {
        if (this.firstTime === null || time < this.firstTime) this.firstTime = time;
        if (this.lastStep === null || step > this.lastStep) this.lastStep = step;
      }
    }
    for (const detail of [this.detail, this.wanted].filter(Boolean)) {
      for (const one of answer.series) {
        const points = one.points.filter(([step]) => detail.first <= step && step <= detail.last);
        if (points.length) put(detail.series, { ...one, points }, MAX_POINTS_CLOSE);
      }
    }
    this.cursor = answer.cursor;
    this.hasMore = answer.has_more;
    return changed;
  }

  /** Of how many steps the points of the coarsest series are a choice; 1 if all are here. */
  get stepsPerBucket() {
    return coarsest(this.series);
  }

  /** Fetch the points of these steps, unless they are here; the keys of series that changed. */
  async look(first, last, signal) {
    const { detail } = this;
    const isKnown = detail && detail.first <= first && last <= detail.last && coarsest(detail.series) === 1;
    if (isKnown || this.stepsPerBucket === 1) return new Set();
    const wanted = { first, last, series: new Map() };
    this.wanted = wanted;
    const query = { first_step: first, last_step: last, max_points: MAX_POINTS_CLOSE };
    for (let after = null, hasMore = true; hasMore;) {
      const answer = await get(pathOf(this.runId), { ...query, after }, signal);
      if (this.wanted !== wanted) return new Set(); // somebody looks elsewhere by now
      for (const one of answer.series) put(wanted.series, one, MAX_POINTS_CLOSE);
      after = answer.cursor;
      hasMore = answer.has_more;
    }
    this.detail = wanted;
    return new Set(this.series.keys());
  }

  /** The first and the last step that may be drawn between two places of an axis, or null. */
  stepsBetween(axis, low, high) {
    if (axis === "step") return [Math.max(0, Math.floor(low)), Math.max(0, Math.ceil(high))];
    let [first, last] = [Infinity, -Infinity];
    for (const { points } of this.series.values()) {
      let [before, after] = [-Infinity, Infinity];
      for (const point of points.at) {
        const x = this.x(point, axis);
        if (x <= low) before = Math.max(before, point[0]);
        else if (x >= high) after = Math.min(after, point[0]);
        else [first, last] = [Math.min(first, point[0]), Math.max(last, point[0])];
      }
      if (before > -Infinity) first = Math.min(first, before);
      if (after < Infinity) last = Math.max(last, after);
    }
    return first <= last ? [first, last] : null;
  }

  x([step, [time]], axis) {
    return { step, elapsed: time - this.firstTime, clock: time }[axis];
  }

  /**
   * Columns x and y of a series, by rising x; `axis` is step, elapsed (since the run's first point) or clock. With
   * `isSample` they are to be averaged over, and not to show extremes.
   */
  columns(key, axis, isSample = false) {
    const { detail } = this;
    const of = (series) => {
      const points = series.get(key)?.points;
      return points ? (isSample ? points.sample() : [...points.at]) : [];
    };
    const isOutside = ([step]) => !detail || step < detail.first || step > detail.last;
    const points = [...of(this.series).filter(isOutside), ...(detail ? of(detail.series) : [])];
    const rows = points.map((point) => [this.x(point, axis), point[1][1]]).sort((a, b) => a[0] - b[0]);
    // Two steps may have been recorded in the same instant, and a chart wants rising x.
    const unique = rows.filter((row, i) => i === rows.length - 1 || row[0] !== rows[i + 1][0]);
    return [unique.map((row) => row[0]), unique.map((row) => row[1])];
  }
}

/** Put a series of an answer into those that are known, of which about `most` points are kept; its key. */
function put(known, { name, source, points, steps_per_bucket: stepsPerBucket }, maxPoints) {
  const key = `${source} ${name}`;
  if (!known.has(key)) known.set(key, { name, source, points: new Points() });
  known.get(key).points.add(points, stepsPerBucket, maxPoints);
  return key;
}

const coarsest = (series) => Math.max(1, ...[...series.values()].map(({ points }) => points.stepsPerBucket));

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

/** Every point of the given runs as CSV (run, source, metric, step, time, value), in parts for a Blob. */
export async function csv(runIds, signal) {
  const parts = ["run,source,metric,step,time,value\n"];
  for (const runId of runIds)
    for (const series of await everything(runId, signal)) parts.push(new Blob([linesOf(runId, series)]));
  return parts;
}

/** All stored metrics of a run: a series has its points in the order they were read, one corrects those before. */
async function everything(runId, signal) {
  const found = new Map();
  for (let after = null, hasMore = true; hasMore;) {
    const answer = await get(pathOf(runId), { after, limit: PAGE }, signal);
    for (const { name, source, points } of answer.series) {
      const key = `${source} ${name}`;
      if (!found.has(key)) found.set(key, { name, source, steps: [], times: [], values: [] });
      const { steps, times, values } = found.get(key);
      for (const [step, time, value] of points) {
        steps.push(step);
        times.push(time);
        values.push(value ?? NaN);
      }
    }
    after = answer.cursor;
    hasMore = answer.has_more;
  }
  return found.values();
}

function linesOf(runId, { name, source, steps, times, values }) {
  // A spreadsheet takes a text that begins like this for a formula, and runs it.
  const plain = (text) => (/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);
  const quote = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const begin = [quote(plain(runId)), source, quote(plain(name))].join(",");
  const order = steps.map((_, i) => i).sort((a, b) => steps[a] - steps[b] || a - b);
  return order
    .filter((i, n) => steps[i] !== steps[order[n + 1]])
    .map((i) => `${begin},${steps[i]},${times[i]},${Number.isNaN(values[i]) ? "" : values[i]}\n`)
    .join("");
}
