// Creates elements from values. Strings become text nodes and attributes and are never parsed as HTML, because any of
// them may come from an attacker. Also the widgets that pages share: tables, empty states, copy buttons, dialogs and
// toasts. Does not call the server.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "selected", "indeterminate"]);
const FORBIDDEN = new Set(["script", "iframe", "object", "embed", "base", "meta", "link", "style"]);
const TICK = "M5 13l4 4L19 7";
const LINK = /^(\/(?!\/)|[?#]|blob:)/;

/** Create an element. `on*` attributes are listeners, null and false are skipped; children are nodes, text or lists. */
export function h(tag, attrs, ...children) {
  if (FORBIDDEN.has(tag)) throw new Error(`<${tag}> is not made here`);
  return fill(document.createElement(tag), attrs, children);
}

/** Create an SVG element. */
export function svg(tag, attrs, ...children) {
  if (FORBIDDEN.has(tag) || tag === "foreignObject") throw new Error(`<${tag}> is not made here`);
  return fill(document.createElementNS(SVG, tag), attrs, children);
}

function fill(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs || {})) {
    if (value === null || value === undefined || value === false) {
      if (PROPERTIES.has(name)) node[name] = value ?? "";
      continue;
    }
    if (name.startsWith("on")) {
      if (typeof value !== "function") throw new Error(`${name} must be a function`);
      node.addEventListener(name.slice(2).toLowerCase(), value);
    } else if (name === "dataset") {
      Object.assign(node.dataset, value);
    } else if (PROPERTIES.has(name)) {
      node[name] = value;
    } else if (["style", "srcdoc", "src", "action", "formaction"].includes(name)) {
      throw new Error(`attribute ${name} is not set here`);
    } else {
      if (name === "href" && !LINK.test(value)) throw new Error(`links lead within this server, not to ${value}`);
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(node, children);
  return node;
}

/** Append children to a node: nodes as they are, lists flattened, null and false skipped, the rest as text. */
export function append(node, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** Replace a node's children; focus and scroll position of the node itself are kept. */
export function replace(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

// ── parts of pages ──────────────────────────────────────────────────────────────────────────────────

/** Build the header of a page: its title and actions. */
export function pageHead(title, ...actions) {
  return h(
    "header",
    { class: "page-head" },
    h("h1", { tabindex: "-1" }, title),
    h("div", { class: "actions" }, actions),
  );
}

/** Build a framed section with a heading. */
export function panel(heading, ...children) {
  return h("section", { class: "panel" }, heading && h("h2", null, heading), children);
}

/**
 * Build a table. Columns: `{label, head?, value(row), number?, wide?, class?}`, where `value` returns children of the
 * cell, and `head` replaces the label at the top. `attrs(row)` returns attributes of the row. On a phone each row becomes
 * a card: a wide column at the beginning is its title, the others are below with their labels.
 */
export function table(columns, rows, attrs) {
  const title = columns.slice(0, 2).find((column) => column.wide);
  const cell = (column) =>
    [column.number && "number", column.wide && "wide", column === title && "title", column.class]
      .filter(Boolean)
      .join(" ") || null;
  return h(
    "div",
    { class: "table" },
    h(
      "table",
      null,
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          columns.map((c) => h("th", { scope: "col", class: cell(c) }, c.head ?? c.label)),
        ),
      ),
      h(
        "tbody",
        null,
        rows.map((row) =>
          h(
            "tr",
            attrs ? attrs(row) : null,
            columns.map((c) =>
              h("td", { class: cell(c), "data-label": c.label }, h("div", { class: "cell" }, c.value(row))),
            ),
          ),
        ),
      ),
    ),
  );
}

/** Build the heading of a column that sorts by it: first by the likelier direction, then by the other one. */
export function sortButton(label, field, sort, startsHigh, onsort) {
  const isSorted = sort.replace("-", "") === field;
  const isDescending = sort.startsWith("-");
  const next = isSorted ? (isDescending ? field : `-${field}`) : `${startsHigh ? "-" : ""}${field}`;
  const mark = isSorted ? (isDescending ? " ↓" : " ↑") : "";
  const pieces = breakable(label);
  const name = pieces.length > 1 ? label + mark : null; // breaks would be read as spaces
  const attrs = { class: "sort", title: `Sort by ${label.toLowerCase()}`, "aria-label": name };
  return button([pieces, mark], () => onsort(next), attrs);
}

/** Build a list of what to sort by, `[label, field]`, for phones, where the headings of a table are not shown. */
export function sortChoice(fields, sort, onsort) {
  const pairs = fields.flatMap(([label, field]) => [
    [field, `${label} ↑`],
    [`-${field}`, `${label} ↓`],
  ]);
  const node = choice("Sort", pairs, sort, onsort);
  node.classList.add("sort-choice");
  return node;
}

/** Build an empty state: what is missing, what to do next, and a command to copy. */
export function empty(title, hint, command) {
  return h(
    "div",
    { class: "empty" },
    h("p", { class: "empty-title" }, title),
    hint && h("p", null, hint),
    command && commandBlock(command),
  );
}

/** Build a code block with a copy button. */
export function commandBlock(command) {
  return h("div", { class: "command" }, h("pre", { tabindex: "0" }, command), copyButton(command));
}

/** Build a list of names and values in two columns, without pairs whose value is null. */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl",
    { class: "facts" },
    shown.map(([name, value]) => h("div", null, h("dt", null, breakable(name)), h("dd", null, value))),
  );
}

/** Let a long name continue on the next line after its punctuation. */
export function breakable(name) {
  return name.split(/(?<=[/._])/).flatMap((piece, n) => (n ? [h("wbr"), piece] : [piece]));
}

/** Build a badge; kinds are ok, busy, warn, bad and idle. */
export function badge(kind, text) {
  return h("span", { class: `badge badge-${kind}` }, text);
}

export function button(label, onclick, attrs) {
  return h("button", { type: "button", ...attrs, onclick }, label);
}

/** Build a search field; `/` focuses it. */
export function searchBox(label, placeholder, value, onText) {
  const oninput = (event) => onText(event.target.value);
  return h("input", { type: "search", "data-search": "", "aria-label": label, placeholder, value, oninput });
}

/** Build a select from pairs of value and label. */
export function choice(label, pairs, chosen, onValue) {
  return h(
    "select",
    { "aria-label": label, onchange: (event) => onValue(event.target.value) },
    pairs.map(([value, text]) => h("option", { value, selected: value === chosen }, text)),
  );
}

/** Build the content of a button: an icon with a label, which lists show to screen readers only. */
export function iconLabel(path, label) {
  const drawing = svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true", class: "icon" }, svg("path", { d: path }));
  return [drawing, h("span", { class: "icon-label" }, label)];
}

/** Build a button that copies a text to the clipboard and confirms it; with an icon, that turns into a tick. */
export function copyButton(text, label = "Copy", icon = null) {
  const content = () => (icon ? iconLabel(icon, label) : label);
  const node = button(
    content(),
    async () => {
      await copy(text);
      replace(node, icon ? iconLabel(TICK, "Copied") : "Copied");
      setTimeout(() => replace(node, content()), 1200);
    },
    { class: "quiet small", title: `Copy ${text.length > 200 ? "the text" : text}` },
  );
  return node;
}

async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  // Pages served over plain HTTP from another machine have no clipboard object.
  const area = h("textarea", { value: text, class: "offscreen", "aria-hidden": "true" });
  (document.querySelector("dialog[open]") || document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// ── values as people read them ──────────────────────────────────────────────────────────────────────

/** Parse an ISO string or Unix seconds to a Date, or null. */
export function moment(time) {
  if (time === null || time === undefined || time === "") return null;
  const date = typeof time === "number" ? new Date(time * 1000) : new Date(time);
  return Number.isNaN(date.getTime()) ? null : date;
}

/** Build a relative time that updates itself, with the full time in its title. */
export function ago(time) {
  const date = moment(time);
  if (!date) return "–";
  return h("time", { datetime: date.toISOString(), title: date.toLocaleString(), "data-ago": "" }, distance(date));
}

function distance(date) {
  const seconds = (Date.now() - date.getTime()) / 1000;
  return seconds >= -1 ? (seconds < 10 ? "just now" : `${span(seconds)} ago`) : `in ${span(-seconds)}`;
}

setInterval(() => {
  for (const node of document.querySelectorAll("time[data-ago]")) node.textContent = distance(new Date(node.dateTime));
}, 10_000);

/** Format seconds as 40 s, 5 min, 3 h, 2 d. */
export function span(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  for (const [unit, size, limit] of [
    ["s", 1, 90],
    ["min", 60, 5400],
    ["h", 3600, 129_600],
  ]) {
    if (seconds < limit) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(seconds / 86_400)} d`;
}

/** Shorten the id of a run: `7248534…:train:0`. */
export function shortRun(runId) {
  return runId.replace(/^([0-9a-f]{7})[0-9a-f]{25}(?=:train:\d+$)/, "$1…");
}

/** Build a link to the page of a run, labelled with its short id or another text. */
export function runLink(runId, text) {
  const attrs = {
    class: text ? null : "mono run-id",
    href: `/console/runs/${encodeURIComponent(runId)}`,
    title: runId,
  };
  return h("a", attrs, text || shortRun(runId));
}

/** Format bytes as 12.3 MB. */
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let size = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 1000) return `${unit === "B" ? size : size.toPrecision(3)} ${unit}`;
    size /= 1000;
  }
  return `${size.toFixed(2)} TB`;
}

/** Describe the user's quotas and their usage in a sentence, or nothing if there are none. */
export function quotaLine(quotas) {
  const said = [];
  if (quotas?.max_stored_bytes)
    said.push(`${bytes(quotas.stored_bytes)} of the ${bytes(quotas.max_stored_bytes)} of checkpoints and rollouts you may store`);
  if (quotas?.requests_per_second) said.push(`${quotas.requests_per_second} requests per second`);
  if (!said.length) return null;
  const used = quotas.max_stored_bytes ? quotas.stored_bytes / quotas.max_stored_bytes : 0;
  return h(
    "p",
    { class: "muted quota" },
    `Your quota, for all of your keys together: ${said.join("; ")}. `,
    used >= 0.9 && badge("bad", used >= 1 ? "used up" : "nearly used up"),
  );
}

/** Format a number in few characters: 1,234, 12.3k, 0.0123, 1.2e-7; `extra` adds digits. */
export function short(value, extra = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9 || (size > 0 && size < 1e-4)) return value.toExponential(2 + extra);
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3 + extra)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3 + extra)}k`;
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4 + extra)));
}

// ── notes and dialogs ───────────────────────────────────────────────────────────────────────────────

/** Show a toast, announced by screen readers; kinds are info and bad. */
export function toast(text, kind = "info") {
  const note = h("div", { class: `toast toast-${kind}`, role: kind === "bad" ? "alert" : "status" }, text);
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), kind === "bad" ? 8000 : 3500);
}

/** Ask for confirmation of an irreversible action. Return true or false. */
export async function confirmDialog({ title, text, action = "Continue", danger = false }) {
  return (await formDialog({ title, text, action, danger, fields: [] })) !== null;
}

/**
 * Show a dialog with fields `{name, label, value?, type?, options?: [[value, text]], names?, hint?, required?}`. Return an
 * object of values by name, or null if it was cancelled. A field with `names` is a list of them, separated by commas.
 */
export function formDialog({ title, text, fields, action = "Save", danger = false }) {
  return new Promise((resolve) => {
    const inputs = fields.map((field) => [field, control(field)]);
    let answer = null;
    const form = h(
      "form",
      {
        method: "dialog",
        onsubmit: () => (answer = Object.fromEntries(inputs.map(([field, input]) => [field.name, input.value]))),
      },
      h("h2", { id: "dialog-title" }, title),
      text && h("p", null, text),
      inputs.map(([field, input]) => [
        h("label", { class: "field" }, h("span", null, field.label), input, field.hint && h("small", null, field.hint)),
        field.names && offeredNames(input, field.names),
      ]),
      h(
        "div",
        { class: "dialog-actions" },
        button("Cancel", () => dialog.close(), { class: "quiet" }),
        h("button", { type: "submit", class: danger ? "danger" : "primary" }, action),
      ),
    );
    const dialog = h(
      "dialog",
      { "aria-labelledby": "dialog-title", onclose: () => (dialog.remove(), resolve(answer)) },
      form,
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}

const MAX_OFFERED = 14;

/** Offer names for a field that lists some, those first that contain its last word; a click adds or removes one. */
function offeredNames(input, names) {
  const list = h("div", { class: "row offered-names", role: "group", "aria-label": "Names to choose from" });
  const words = () => input.value.split(",").map((word) => word.trim());
  const toggle = (name) => {
    const chosen = words().filter((word) => word && names.includes(word));
    input.value = (chosen.includes(name) ? chosen.filter((word) => word !== name) : [...chosen, name]).join(", ");
    draw();
  };
  const draw = () => {
    const chosen = words();
    const typed = names.includes(chosen.at(-1)) ? "" : chosen.at(-1);
    const found = names.filter((name) => chosen.includes(name) || name.toLowerCase().includes(typed.toLowerCase()));
    const shown = found.sort((a, b) => chosen.includes(b) - chosen.includes(a)).slice(0, MAX_OFFERED);
    replace(
      list,
      shown.map((name) =>
        button(name, () => toggle(name), { class: "small", "aria-pressed": String(chosen.includes(name)) }),
      ),
      found.length > shown.length && h("small", null, `and ${found.length - shown.length} more: type a part of a name`),
    );
  };
  input.addEventListener("input", draw);
  draw();
  return list;
}

function control({ name, value = "", type = "text", options, required = false }) {
  if (type === "textarea") return h("textarea", { name, value, rows: "4" });
  if (options) {
    return h(
      "select",
      { name, required },
      options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)),
    );
  }
  return h("input", { name, type, value, required, autocomplete: "off" });
}
