// Caches the metrics of one run: fetches all points once, then only new or overwritten ones. A long run is fetched and
// cached downsampled, with more detail in the zoomed range. Also prepares data for a chart (x by step or time,
// smoothing) and exports CSV. charts.js draws.

import { get, part } from "./api.js";
import { cell } from "./csv.js";
import { Points } from "./thinning.js";

const MAX_POINTS = 2000;
const MAX_POINTS_CLOSE = 10_000;
const NUM_FIRST = 30_000;
const PAGE = 10_000;

const pathOf = (runId) => `/api/v1/runs/${part(runId)}/metrics`;

export class RunMetrics {
  constructor(runId) {
    this.runId = runId;
    /** By source and name: `{name, source, points: Points}`. */
    this.series = new Map();
    /** The zoomed range, or null: `{first, last, series}` with series like the above. */
    this.detail = null;
    this.wanted = null;
    this.firstTime = null;
    this.cursor = null;
    /** Whether there are further pages to fetch. */
    this.hasMore = false;
    this.polling = null;
  }

  /** Fetch the next page of new points. Return the keys of series that changed. */
  poll(signal) {
    this.polling ??= this.fetchNext(signal).finally(() => (this.polling = null));
    return this.polling;
  }

  async fetchNext(signal) {
    const limit = this.cursor ? null : NUM_FIRST; // a small first page is shown quickly
    const answer = await get(pathOf(this.runId), { after: this.cursor, max_points: MAX_POINTS, limit }, signal);
    const changed = new Set();
    if (answer.is_restarted) {
      // The run was resumed: its new part supersedes points that were read before.
      for (const key of this.series.keys()) changed.add(key);
      Object.assign(this, { series: new Map(), detail: null, wanted: null, firstTime: null });
    }
    for (const one of answer.series) changed.add(put(this.series, one, MAX_POINTS));
    for (const { points } of answer.series) {
      for (const [, time] of points) if (this.firstTime === null || time < this.firstTime) this.firstTime = time;
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

  /** Return the steps per bucket of the coarsest series; 1 if all are complete. */
  get stepsPerBucket() {
    return coarsest(this.series);
  }

  /** Fetch the points of these steps unless they are cached. Return the keys of series that changed. */
  async look(first, last, signal) {
    const { detail } = this;
    const isKnown = detail && detail.first <= first && last <= detail.last && coarsest(detail.series) === 1;
    if (isKnown || this.stepsPerBucket === 1) return new Set();
    const wanted = { first, last, series: new Map() };
    this.wanted = wanted;
    const query = { first_step: first, last_step: last, max_points: MAX_POINTS_CLOSE };
    for (let after = null, hasMore = true; hasMore;) {
      const answer = await get(pathOf(this.runId), { ...query, after }, signal);
      if (this.wanted !== wanted) return new Set(); // another range was chosen in the meantime
      for (const one of answer.series) put(wanted.series, one, MAX_POINTS_CLOSE);
      after = answer.cursor;
      hasMore = answer.has_more;
    }
    this.detail = wanted;
    return new Set(this.series.keys());
  }

  /** Return the first and last step between two positions of an axis, or null. */
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
   * Return columns x, y and step of a series, sorted by x; `axis` is step, elapsed (since the run's first point) or clock.
   * With `isSample` return unbiased points for averaging, without the extremes of buckets.
   */
  columns(key, axis, isSample = false) {
    const { detail } = this;
    const of = (series) => {
      const points = series.get(key)?.points;
      return points ? (isSample ? points.sample() : [...points.at]) : [];
    };
    const isOutside = ([step]) => !detail || step < detail.first || step > detail.last;
    const points = [...of(this.series).filter(isOutside), ...(detail ? of(detail.series) : [])];
    const rows = points
      .map((point) => [this.x(point, axis), point[1][1], point[0]])
      .sort((a, b) => a[0] - b[0]);
    // Two steps may have the same timestamp, and a chart needs strictly increasing x.
    const unique = rows.filter((row, i) => i === rows.length - 1 || row[0] !== rows[i + 1][0]);
    return [0, 1, 2].map((column) => unique.map((row) => row[column]));
  }
}

/** Merge a series of a response into the cached ones, keeping about `maxPoints` points. Return its key. */
function put(known, { name, source, points, steps_per_bucket: stepsPerBucket }, maxPoints) {
  const key = `${source} ${name}`;
  if (!known.has(key)) known.set(key, { name, source, points: new Points() });
  known.get(key).points.add(points, stepsPerBucket, maxPoints);
  return key;
}

const coarsest = (series) => Math.max(1, ...[...series.values()].map(({ points }) => points.stepsPerBucket));

/** Return a bias-corrected exponential moving average; `weight` 0 changes nothing, gaps stay. */
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

/** Export every point of the runs as CSV (run, source, metric, step, time, value), in parts for a Blob. */
export async function csv(runIds, signal) {
  const parts = ["run,source,metric,step,time,value\n"];
  for (const runId of runIds)
    for (const series of await everything(runId, signal)) parts.push(new Blob([linesOf(runId, series)]));
  return parts;
}

/** Fetch all stored metrics of a run: points in the order read, later ones overwrite earlier ones. */
async function everything(runId, signal) {
  const found = new Map();
  for (let after = null, hasMore = true; hasMore;) {
    const answer = await get(pathOf(runId), { after, limit: PAGE }, signal);
    if (answer.is_restarted) found.clear();
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
  const begin = [cell(runId), source, cell(name)].join(",");
  const order = steps.map((_, i) => i).sort((a, b) => steps[a] - steps[b] || a - b);
  return order
    .filter((i, n) => steps[i] !== steps[order[n + 1]])
    .map((i) => `${begin},${steps[i]},${times[i]},${Number.isNaN(values[i]) ? "" : values[i]}\n`)
    .join("");
}
