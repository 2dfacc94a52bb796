// Arranges the metrics of runs: which are copies of each other, which are constant, in which section and order they
// are shown, and which sections are folded and charts pinned. Draws nothing.

/** Sections whose metrics have the same rank, in this order; others follow by name, and the last ones come last. */
const SECTIONS = { rl: ["env", "", "train", "test", "optim"], sft: ["train", "", "test", "env", "optim"] };
const LAST = ["async", "grader", "time", "health"];
const LOSS = /(^|[/_])(loss|nll)/i;
const REWARD = /reward|return|score|accuracy|correct/i;
const OTHERS = [/kl/i, /ratio|entropy/i, /grad|norm/i, /lr|learning/i];
const RELATIVE_NOISE = 1e-6;

/** Return the kind of runs with these metrics: RL if a reward of episodes is among them, else SFT. */
export function kindOf(names) {
  return names.some((name) => /(^|\/)reward/i.test(name) && !/^test\//.test(name)) ? "rl" : "sft";
}

/** Return the sort key of a metric: in RL the reward comes first, in SFT the loss. */
export function rankOf(name, kind = "sft") {
  const order = [...(kind === "rl" ? [REWARD, LOSS] : [LOSS, REWARD]), ...OTHERS];
  const place = order.findIndex((pattern) => pattern.test(name));
  return place < 0 ? order.length : place;
}

/** Compare two metrics: by rank, the total of a reward before its parts, then by name. */
function compare(a, b, kind) {
  const part = (name) => (/(^|\/)(all|total|mean)(\/|$)/.test(name) ? 0 : 1) + (/total$/.test(name) ? -1 : 0);
  return rankOf(a, kind) - rankOf(b, kind) || part(a) - part(b) || a.localeCompare(b);
}

/** Return the section of a metric: what stands before its first slash, or an empty string. */
export const sectionOf = (name) => (name.includes("/") ? name.slice(0, name.indexOf("/")) : "");

/** Return `[section, names]` pairs in the order in which they are shown. */
export function sections(names, kind) {
  const found = Map.groupBy([...names].sort((a, b) => compare(a, b, kind)), sectionOf);
  const late = (section) => LAST.indexOf(section) + 1;
  const usual = (section) => (SECTIONS[kind].indexOf(section) + 1 || SECTIONS[kind].length + 1);
  const best = (members) => Math.min(...members.map((name) => rankOf(name, kind)));
  return [...found].sort(
    ([a, ours], [b, theirs]) =>
      late(a) - late(b) || best(ours) - best(theirs) || usual(a) - usual(b) || a.localeCompare(b),
  );
}

/**
 * Return what is shown in one chart, by name: `{name, client, engine}` with the names of the client's and the engine's
 * series. The cookbook reports numbers of the engine as `optim/NAME`, without the suffix `:mean`.
 */
export function panels(series) {
  const [clients, engines] = ["client", "engine"].map(
    (source) => new Set(series.filter((one) => one.source === source).map((one) => one.name)),
  );
  const found = new Map([...clients].map((name) => [name, { name, client: name, engine: null }]));
  for (const engine of engines) {
    const copies = [engine, `optim/${engine}`, `optim/${engine.replace(/:mean$/, "")}`];
    const copy = copies.find((name) => clients.has(name));
    if (copy && !found.get(copy).engine) found.get(copy).engine = engine;
    else found.set(engine, { name: engine, client: null, engine });
  }
  return found;
}

/** Whether two series, maps of step to [time, value], have the same values where both have one. */
export function agree(a, b) {
  for (const [step, [, value]] of a) {
    const other = b.get(step)?.[1];
    if (other === undefined || other === value) continue;
    if (value === null || other === null) return false;
    if (Math.abs(value - other) > RELATIVE_NOISE * Math.max(Math.abs(value), Math.abs(other))) return false;
  }
  return true;
}

/** Return the only value of a series, or undefined if it has several, a gap, or fewer than two points. */
export function constantOf(points) {
  if (!points || points.size < 2) return undefined;
  let first;
  for (const [, value] of points.values()) {
    if (value === null || (first !== undefined && value !== first)) return undefined;
    first = value;
  }
  return first;
}

// ── what is remembered ──────────────────────────────────────────────────────────────────────────────

const keyOf = (what, kind) => `lorimer.${what}.${kind}`;

/** Return the remembered list of `what` (folds or pins) of a kind of runs. */
export function remembered(what, kind) {
  try {
    const found = JSON.parse(localStorage.getItem(keyOf(what, kind)));
    return Array.isArray(found) ? found.filter((one) => typeof one === "string") : [];
  } catch {
    return [];
  }
}

/** Remember a list for all runs of a kind. */
export function remember(what, kind, names) {
  try {
    if (names.length) localStorage.setItem(keyOf(what, kind), JSON.stringify(names));
    else localStorage.removeItem(keyOf(what, kind));
  } catch {
    // A browser may forbid it; the choice is kept in the URL.
  }
}
