// The value of a metric at the step of each checkpoint, from the metrics of its run.

import { get, part } from "./api.js";

const MAX_POINTS = 10_000;
const MAX_RUNS = 200; // whose metrics are fetched
const MAX_RUNNING = 4;

/** Return the names of metrics of the user's runs. */
export async function metricNames(signal) {
  return (await get("/api/v1/run_fields", null, signal)).metrics;
}

/**
 * Return a Map from paths to `{step, value}`: the point at the checkpoint's step or, if there is none, the last one
 * before it. Checkpoints of runs without the metric are not in it.
 */
export async function valuesAt(checkpoints, metric, runId, signal) {
  const byRun = Map.groupBy(
    checkpoints.filter((one) => (one.run_id ?? runId) && typeof one.step === "number"),
    (one) => one.run_id ?? runId,
  );
  const waiting = [...byRun].slice(0, MAX_RUNS);
  const found = new Map();
  const next = async () => {
    while (waiting.length && !signal.aborted) {
      const [run, saved] = waiting.shift();
      const points = await pointsOf(run, metric, signal);
      for (const { tinker_path: path, step } of saved) {
        const last = lastUntil(points, step);
        if (last) found.set(path, last);
      }
    }
  };
  await Promise.all(Array.from({ length: MAX_RUNNING }, next));
  return found;
}

/** Return the points of a metric, in the order of steps. */
async function pointsOf(run, metric, signal) {
  const points = [];
  for (let after = null, hasMore = true; hasMore; ) {
    const query = { names: metric, max_points: MAX_POINTS, after };
    const page = await get(`/api/v1/runs/${part(run)}/metrics`, query, signal);
    for (const series of page.series) points.push(...series.points);
    after = page.cursor;
    hasMore = page.has_more;
  }
  return points.sort(([a], [b]) => a - b);
}

function lastUntil(points, step) {
  let low = 0;
  let high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= step) low = middle + 1;
    else high = middle;
  }
  return low ? { step: points[low - 1][0], value: points[low - 1][2] } : null;
}
