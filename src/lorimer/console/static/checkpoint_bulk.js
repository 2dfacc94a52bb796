// Actions on several checkpoints: each is confirmed once, with their number and size, and tells how many succeeded.

import { del, post, put } from "./api.js";
import { LIFETIMES, endpoint } from "./checkpoint_actions.js";
import { button, bytes, confirmDialog, formDialog, toast } from "./dom.js";

const MAX_RUNNING = 4;

/** Build the buttons for chosen checkpoints. Calls `changed` after something was changed. */
export function bulkActions(chosen, size, changed) {
  const what = `${chosen.length} ${chosen.length === 1 ? "checkpoint" : "checkpoints"}`;
  const total = `${what}, ${bytes(size)} together`;
  const act = (label, work, attrs) =>
    button(label, async () => (await work()) && changed(), { class: "small", ...attrs });
  return [
    act("Publish chosen", () => publish(chosen, what, total)),
    act("Unpublish chosen", () => unpublish(chosen, what, total)),
    act("Set lifetime", () => setLifetime(chosen, what, total)),
    act("Delete chosen", () => remove(chosen, what, total), { class: "small danger" }),
  ];
}

async function publish(chosen, what, total) {
  const text = `${total}. Every user of this server will be able to load, sample and download them.`;
  if (!(await confirmDialog({ title: `Publish ${what}?`, text, action: "Publish" }))) return false;
  const wanted = chosen.filter((one) => !one.public);
  return each(wanted, "published", (one) => post(endpoint(one, "/publish")));
}

async function unpublish(chosen, what, total) {
  const text = `${total}. Only you will be able to use them.`;
  if (!(await confirmDialog({ title: `Unpublish ${what}?`, text, action: "Unpublish" }))) return false;
  const wanted = chosen.filter((one) => one.public);
  return each(wanted, "unpublished", (one) => del(endpoint(one, "/publish")));
}

async function setLifetime(chosen, what, total) {
  const answer = await formDialog({
    title: `Lifetime of ${what}`,
    text: `${total}. They are deleted when their lifetime ends.`,
    fields: [{ name: "ttl", label: "Keep them until", options: LIFETIMES, value: "" }],
  });
  if (answer === null) return false;
  const body = { ttl_seconds: answer.ttl ? Number(answer.ttl) : null };
  return each(chosen, "changed", (one) => put(endpoint(one, "/ttl"), body));
}

async function remove(chosen, what, total) {
  const text = `${total}. They cannot be restored. Samplers that are using their weights keep working.`;
  if (!(await confirmDialog({ title: `Delete ${what}?`, text, action: `Delete ${what}`, danger: true }))) return false;
  return each(chosen, "deleted", (one) => del(endpoint(one)));
}

/** Change each checkpoint, a few at a time, and tell the result. Return true: some may have changed before an error. */
async function each(chosen, done, work) {
  const waiting = [...chosen];
  const errors = [];
  const next = async () => {
    while (waiting.length) {
      try {
        await work(waiting.shift());
      } catch (error) {
        if (error.status === 401) return;
        errors.push(error.message);
      }
    }
  };
  await Promise.all(Array.from({ length: MAX_RUNNING }, next));
  const count = `${chosen.length - errors.length} of ${chosen.length} ${done}`;
  if (errors.length) toast(`${count}; the first error: ${errors[0]}`, "bad");
  else toast(`${count}.`);
  return true;
}
