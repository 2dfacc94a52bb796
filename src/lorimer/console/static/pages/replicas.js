// Shows the replicas of base models: which process computes each, since when, its load, and recent moves of own runs.

import { get } from "../api.js";
import { ago, badge, empty, h, pageHead, panel, replace, runLink, short, table } from "../dom.js";
import { redraw, whenChanged } from "../redraw.js";

export const title = "Replicas";

const SECONDS = 2;
const LEGEND =
  "Totals of all users: runs in memory, operations queued or running, samples, tokens per second over the last minute, " +
  "and deaths of the engine since its process started.";
const STATES = { ready: "ok", starting: "busy", failed: "bad", lost: "bad" };

export async function render(root, { live, signal }) {
  const parts = { summary: h("div"), replicas: h("div"), moves: h("div") };
  const drawReplicas = whenChanged((replicas) => redraw(parts.replicas, replicaTable(replicas)));
  const drawMoves = whenChanged((moves) => redraw(parts.moves, moveTable(moves)));
  await live(async () => {
    const found = await get("/api/v1/replicas", null, signal);
    replace(parts.summary, h("span", { class: "muted" }, summary(found.replicas)));
    drawReplicas(found.replicas);
    drawMoves(found.moves);
    if (!parts.replicas.isConnected) {
      replace(
        root,
        pageHead(title, parts.summary),
        panel(null, parts.replicas, h("p", { class: "muted" }, LEGEND)),
        panel("Moves of your runs in the last day", parts.moves),
      );
    }
  }, SECONDS);
}

function summary(replicas) {
  const owners = new Set(replicas.flatMap((one) => one.owner_id || []));
  const lost = replicas.filter((one) => !one.owner_id).length;
  const said = [
    counted(replicas.length, "replica"),
    counted(owners.size, "process", "processes"),
    lost > 0 && `${short(lost)} without one`,
  ];
  return said.filter(Boolean).join(", ");
}

function counted(count, noun, plural = `${noun}s`) {
  return `${short(count)} ${count === 1 ? noun : plural}`;
}

function replicaTable(replicas) {
  if (!replicas.length)
    return empty("This server has no model.", "Start it with one:", "lorimer serve --model lorimer/tiny");
  // A server that computes its replicas itself has no leases.
  const hasLeases = replicas.some((one) => one.lease_seconds !== null);
  const columns = [
    { label: "Replica", value: name },
    { label: "State", class: "tight", value: (one) => badge(STATES[one.state] || "idle", one.state) },
    { label: "Computed by", value: owner },
    hasLeases && { label: "Lease", class: "tight", value: lease },
    { label: "Since", class: "tight", value: (one) => ago(one.changed_at) },
    { label: "Runs", number: true, value: (one) => short(one.num_loaded_runs) },
    { label: "Operations", number: true, value: (one) => short(one.num_open_operations) },
    {
      label: "Samples",
      number: true,
      value: (one) => two(one.num_running_samples, "running", one.num_waiting_samples, "waiting"),
    },
    {
      label: "Tokens/s",
      number: true,
      value: ({ tokens_per_second: rate }) =>
        two(Math.round(rate.training), "trained", Math.round(rate.sampling), "sampled"),
    },
    { label: "Deaths", number: true, value: (one) => short(one.num_deaths) },
  ];
  return table(columns.filter(Boolean), replicas, (one) => ({ "data-row": one.name }));
}

function name(one) {
  return [
    h("b", null, one.name),
    one.stage && h("p", { class: "muted" }, one.stage),
    one.error && h("p", { class: "error-text" }, one.error),
  ];
}

function owner(one) {
  if (!one.owner_id) return h("span", { class: "muted" }, "nobody");
  return [h("span", { class: "mono" }, one.owner_id), h("br"), h("small", { class: "muted" }, `on ${one.node}`)];
}

function lease(one) {
  return one.lease_seconds === null ? "–" : `${Math.ceil(one.lease_seconds)} s left`;
}

/** Show two numbers below each other, each with its name. */
function two(first, firstName, second, secondName) {
  return [`${short(first)} ${firstName}`, h("br"), `${short(second)} ${secondName}`];
}

function moveTable(moves) {
  if (!moves.length)
    return empty(
      "No run moved.",
      "A run moves when its replica is lost, or when it was evicted and another replica has more room.",
    );
  return table(
    [
      { label: "When", class: "tight", value: (move) => ago(move.at) },
      { label: "Run", class: "tight", value: (move) => runLink(move.run_id) },
      { label: "From", value: (move) => move.from_replica },
      { label: "To", value: (move) => move.to_replica },
    ],
    moves,
    (move) => ({ "data-row": `${move.at} ${move.run_id}` }),
  );
}
