// Runs that differ only in their seed: groups them, and computes the mean and deviation of their curves.

import { flatten } from "./run_identity.js";

const isSeed = (name) => name === "seed" || name.endsWith(".seed");

/** Return the runs of each group, in the order of their first runs; unknown runs and single ones are groups of one. */
export function seedGroups(runs, known) {
  const groups = new Map();
  for (const run of runs) {
    const one = known.get(run.runId);
    const fields = one && flatten(one.config).filter(([name]) => !isSeed(name));
    const hasConfig = fields?.length > 0;
    const key = hasConfig ? JSON.stringify([one.base_model, fields.sort()]) : run.runId;
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  return [...groups.values()];
}

/**
 * Return the mean of several curves `[xs, ys]` with its deviation: `{columns, band: [lows, highs]}`. A step counts if
 * every curve that reaches it has a finite value there; where only one does, the deviation is zero.
 */
export function meanOf(curves) {
  const maps = curves
    .map(([xs, ys]) => ({ first: xs[0], last: xs.at(-1), at: new Map(xs.map((x, i) => [x, ys[i]])) }))
    .filter(({ at }) => at.size);
  const xs = [...new Set(maps.flatMap(({ at }) => [...at.keys()]))].sort((a, b) => a - b);
  const rows = xs.flatMap((x) => {
    const there = maps.filter(({ first, last }) => first <= x && x <= last).map(({ at }) => at.get(x));
    return there.every((value) => value !== null && value !== undefined) ? [[x, ...meanAndDeviation(there)]] : [];
  });
  const column = (pick) => rows.map(pick);
  return {
    columns: [column(([x]) => x), column(([, mean]) => mean), column(([x]) => x)],
    band: [column(([, mean, dev]) => mean - dev), column(([, mean, dev]) => mean + dev)],
  };
}

/** Return the mean and the sample deviation, with n - 1 below. */
function meanAndDeviation(values) {
  const mean = values.reduce((a, b) => a + b, 0) / values.length;
  const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return [mean, values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0];
}
