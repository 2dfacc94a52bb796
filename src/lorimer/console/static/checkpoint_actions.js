// Actions on a checkpoint, as a table and as buttons: copy its path, try, download, publish, set the TTL, delete. Used
// by the page of a run and the page of checkpoints.

import { del, get, part, post, put, downloadSigned } from "./api.js";
import { ago, badge, button, bytes, confirmDialog, copyButton, formDialog, h, iconLabel, runLink } from "./dom.js";
import { short, table, toast } from "./dom.js";
import { scoreTags } from "./scores.js";

const KINDS = { training: "training state", sampler: "sampler", external: "export" };
const ICONS = {
  "Copy path": "M9 9h11v12H9zM5 15H4V3h11v2",
  Try: "M4 5h16v11H9l-5 4z",
  Download: "M12 4v11M7 11l5 5 5-5M4 20h16",
  Publish: "M12 16V4M7 9l5-5 5 5M4 14v6h16v-6",
  Unpublish: "M6 11h12v9H6zM9 11V7a3 3 0 0 1 6 0v4",
  Lifetime: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16zM12 8v5l3 2",
  Delete: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13",
};
export const LIFETIMES = [
  ["", "keep for ever"],
  ["3600", "one hour from now"],
  ["86400", "one day from now"],
  ["604800", "one week from now"],
  ["2592000", "30 days from now"],
];

/** Split `tinker://<run>/<segment>/<name>`. */
export function partsOf(path) {
  const [run, segment, name] = path.replace(/^tinker:\/\//, "").split("/");
  return { run, segment, name };
}

/** Return the path of the API that changes a checkpoint. */
export function endpoint(checkpoint, rest = "") {
  const { run, segment, name } = partsOf(checkpoint.tinker_path);
  return `/api/v1/training_runs/${part(run)}/checkpoints/${part(segment)}/${part(name)}${rest}`;
}

/**
 * Build a table of checkpoints from the API. Calls `changed` after each change; `withRun` adds the run, `scores` (a Map
 * from paths to evaluations) the results of those that were evaluated, `box` a control that chooses one, `metric` a
 * column `{name, value}`; `head(label, field, startsHigh)` returns a heading that sorts.
 */
export function checkpointTable(checkpoints, { changed, withRun, isOwn, scores, box, metric, head }) {
  const hasScores = checkpoints.some((c) => scores?.has(c.tinker_path));
  const columns = [
    box && { label: "", class: "choose", value: box },
    {
      label: "Checkpoint",
      head: head("Checkpoint", "name"),
      wide: true,
      value: (c) => h("div", { class: "stack" }, h("a", { href: pageOf(c) }, partsOf(c.tinker_path).name), metadata(c)),
    },
    withRun && {
      label: "Run",
      head: head("Run", "run"),
      value: (c) => runLink(partsOf(c.tinker_path).run, c.run_name),
    },
    { label: "Step", head: head("Step", "step", true), number: true, value: (c) => short(c.step) },
    metric && { label: metric.name, head: head(metric.name, "metric"), number: true, value: metric.value },
    {
      label: "Kind",
      head: head("Kind", "kind"),
      class: "tight",
      value: (c) => KINDS[c.checkpoint_type] || c.checkpoint_type,
    },
    hasScores && { label: "Scores", value: (c) => scoreTags(scores.get(c.tinker_path)) },
    { label: "Saved", head: head("Saved", "saved", true), value: (c) => ago(c.time) },
    { label: "Size", head: head("Size", "size", true), number: true, value: (c) => bytes(c.size_bytes) },
    { label: "Ends", head: head("Ends", "ends"), class: "tight", value: (c) => (c.expires_at ? ago(c.expires_at) : "never") },
    { label: "Access", value: (c) => (c.public ? badge("ok", "published") : "private") },
    { label: "", class: "row-actions", value: (c) => checkpointActions(c, changed, isOwn) },
  ].filter(Boolean);
  return table(columns, checkpoints, (c) => ({ "data-checkpoint": c.tinker_path }));
}

export const pageOf = (checkpoint) => {
  const { run, segment, name } = partsOf(checkpoint.tinker_path);
  return `/console/checkpoints/${part(run)}/${part(`${segment}/${name}`)}`;
};

function metadata(checkpoint) {
  return Object.entries(checkpoint.user_metadata || {}).map(([name, value]) =>
    h("span", { class: "tag" }, `${name}: ${value}`),
  );
}

/** Build the buttons of one checkpoint; only its owner gets those that change it. */
export function checkpointActions(checkpoint, changed, isOwn = true) {
  const act = (label, work, attrs) =>
    button(iconLabel(ICONS[label], label), () => attempt(work, changed), { class: "quiet small", title: label, ...attrs });
  const isSampler = checkpoint.checkpoint_type === "sampler";
  return h(
    "div",
    { class: "row" },
    copyButton(checkpoint.tinker_path, "Copy path", ICONS["Copy path"]),
    isSampler &&
      h(
        "a",
        {
          class: "button quiet small",
          title: "Try in the playground",
          href: `/console/playground?mode=checkpoint&checkpoint=${part(checkpoint.tinker_path)}`,
        },
        iconLabel(ICONS.Try, "Try"),
      ),
    act("Download", () => download(checkpoint)),
    isOwn && act(checkpoint.public ? "Unpublish" : "Publish", () => publish(checkpoint)),
    isOwn && act("Lifetime", () => setLifetime(checkpoint)),
    isOwn &&
      act("Delete", () => remove(checkpoint), {
        class: "quiet small danger",
        "aria-label": `Delete ${checkpoint.tinker_path}`,
      }),
  );
}

/** Run an action that returns whether it changed something; show its errors. */
async function attempt(work, changed) {
  try {
    if (await work()) await changed?.();
  } catch (error) {
    if (error.status !== 401) toast(error.message, "bad");
  }
}

async function publish(checkpoint) {
  if (checkpoint.public) {
    await del(endpoint(checkpoint, "/publish"));
    toast("Only you can use the checkpoint now.");
    return true;
  }
  const text = "Every user of this server will be able to load, sample and download it.";
  if (!(await confirmDialog({ title: `Publish ${partsOf(checkpoint.tinker_path).name}?`, text, action: "Publish" })))
    return false;
  await post(endpoint(checkpoint, "/publish"));
  toast("Published.");
  return true;
}

async function setLifetime(checkpoint) {
  const answer = await formDialog({
    title: `Lifetime of ${partsOf(checkpoint.tinker_path).name}`,
    text: "The checkpoint is deleted when its lifetime ends.",
    fields: [{ name: "ttl", label: "Keep it until", options: LIFETIMES, value: "" }],
  });
  if (answer === null) return false;
  await put(endpoint(checkpoint, "/ttl"), { ttl_seconds: answer.ttl ? Number(answer.ttl) : null });
  toast(answer.ttl ? "The lifetime of the checkpoint is set." : "The checkpoint is kept for ever.");
  return true;
}

async function remove(checkpoint) {
  const title = `Delete ${partsOf(checkpoint.tinker_path).name}?`;
  const text = `${checkpoint.tinker_path} cannot be restored. Samplers that are using its weights keep working.`;
  if (!(await confirmDialog({ title, text, action: "Delete", danger: true }))) return false;
  await del(endpoint(checkpoint));
  toast("Deleted.");
  return true;
}

/** Download the adapter as a tar; exports have one URL per file instead. */
async function download(checkpoint) {
  if (checkpoint.checkpoint_type === "external") {
    const { urls } = await get(endpoint(checkpoint, "/external_weights_urls"));
    for (const [name, url] of Object.entries(urls)) await downloadSigned(url, name);
    return false;
  }
  await downloadSigned(endpoint(checkpoint, "/archive"), `${partsOf(checkpoint.tinker_path).name}.tar`);
  return false;
}
