// Lists, creates and revokes the user's API keys. A secret is shown once, right after its key was created.

import { del, get, part, post } from "../api.js";
import {
  ago,
  badge,
  button,
  confirmDialog,
  copyButton,
  empty,
  h,
  pageHead,
  panel,
  quotaLine,
  replace,
  table,
  toast,
} from "../dom.js";
import { redraw, whenChanged } from "../redraw.js";

export const title = "Keys";

export async function render(root, { signal, live, account }) {
  if (account && !account.needs_key) {
    const hint =
      "Anyone who can reach it may use it. The operator creates the first key on the server's machine; after that every request needs one:";
    root.append(pageHead("Keys"), panel(null, empty("This server asks for no key.", hint, "lorimer key create NAME")));
    return;
  }
  const list = h("div", null);
  const made = h("div", { role: "status" });
  const draw = whenChanged(({ keys, quotas }) =>
    redraw(list, h("div", null, quotaLine(quotas), keyTable(keys, revoke))),
  );
  const load = async () => draw(await get("/api/v1/keys", null, signal));
  const revoke = async (one) => {
    if (await revokeKey(one)) await load();
    if (document.activeElement === document.body) root.querySelector("h1").focus();
  };
  const create = async (name) => {
    const created = await post("/api/v1/keys", { name });
    replace(made, secretOf(created));
    made.querySelector("button").focus();
    await load();
  };
  root.append(pageHead("Keys"), panel("Make a key", form(create), made), panel("Your keys", list));
  await live(load, 15);
}

function form(create) {
  const name = h("input", {
    name: "name",
    required: true,
    maxlength: "200",
    autocomplete: "off",
    placeholder: "what it is for, such as laptop",
  });
  const submit = h("button", { type: "submit", class: "primary" }, "Make key");
  const onsubmit = async (event) => {
    event.preventDefault();
    submit.disabled = true;
    try {
      await create(name.value.trim());
      name.value = "";
    } catch (error) {
      if (error.status !== 401) toast(error.message, "bad");
    } finally {
      submit.disabled = false;
    }
  };
  return h(
    "form",
    { class: "row", onsubmit },
    h("label", { class: "field grow" }, h("span", null, "Name"), name),
    submit,
  );
}

function secretOf({ secret, name }) {
  return h(
    "div",
    { class: "secret" },
    h("p", null, h("b", null, name), ": copy the key now, it is not shown again."),
    h("div", { class: "command" }, h("code", null, secret), copyButton(secret)),
    h(
      "p",
      { class: "muted" },
      "Programs read it from the variable LORIMER_API_KEY, those of the official SDK from TINKER_API_KEY.",
    ),
  );
}

function keyTable(keys, revoke) {
  const columns = [
    {
      label: "Name",
      wide: true,
      value: (one) =>
        h(
          "div",
          { class: "stack" },
          one.name || h("span", { class: "muted" }, "(no name)"),
          one.note && h("small", null, one.note),
        ),
    },
    { label: "Begins with", class: "mono", value: (one) => `${one.prefix}…` },
    { label: "Made", value: (one) => ago(one.created_at) },
    { label: "Last used", value: (one) => (one.last_used_at ? ago(one.last_used_at) : "never") },
    { label: "State", value: (one) => state(one) },
    {
      label: "",
      value: (one) =>
        !one.revoked_at &&
        !one.is_current &&
        button("Revoke", () => revoke(one), {
          class: "quiet small danger",
          "aria-label": `Revoke ${one.name || one.prefix}`,
        }),
    },
  ];
  return table(columns, keys, (one) => ({ "data-row": String(one.key_id) }));
}

function state(one) {
  if (one.revoked_at) return h("span", null, badge("idle", "revoked "), ago(one.revoked_at));
  return one.is_current ? badge("ok", "in use here") : badge("ok", "valid");
}

async function revokeKey(one) {
  const text = "Programs that use it are refused immediately. This cannot be undone; a new key can be made.";
  if (!(await confirmDialog({ title: `Revoke ${one.name || one.prefix}?`, text, action: "Revoke", danger: true })))
    return false;
  try {
    await del(`/api/v1/keys/${part(String(one.key_id))}`);
    toast("Revoked.");
  } catch (error) {
    if (error.status !== 401) toast(error.message, "bad");
  }
  return true;
}
