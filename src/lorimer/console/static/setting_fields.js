// Fields of a form from the JSON schema of settings: one for each setting, with its default as the placeholder.

import { choice, h } from "./dom.js";

const FIRST = [
  "task",
  "max_tokens",
  "learning_rate",
  "rank",
  "batch_size",
  "epochs",
  "max_steps",
  "num_steps",
  "sft_steps",
  "steps",
  "group_size",
  "max_length",
  "train_on",
  "eval_every",
  "save_every",
  "eval_tasks",
  "name",
];

/** Build the fields of a schema: `{node, values()}`. `values` returns what was filled in, by name. */
export function settingFields(schema) {
  const names = Object.keys(schema.properties).filter((name) => name !== "base_model" && kindOf(schema, name));
  const fields = new Map(names.map((name) => [name, field(schema, name)]));
  const isFirst = (name) => FIRST.includes(name) || schema.required.includes(name);
  const first = names.filter(isFirst).sort((a, b) => FIRST.indexOf(a) - FIRST.indexOf(b));
  const rest = names.filter((name) => !isFirst(name));
  return {
    node: h(
      "div",
      { class: "spaced" },
      h("div", { class: "setting-fields" }, first.map((name) => fields.get(name).node)),
      rest.length > 0 && h(
        "details",
        null,
        h("summary", null, `${rest.length} more settings`),
        h("div", { class: "setting-fields" }, rest.map((name) => fields.get(name).node)),
      ),
    ),
    values: () =>
      Object.fromEntries(
        names.map((name) => [name, fields.get(name).value()]).filter(([, value]) => value !== undefined),
      ),
  };
}

/** Return the type of a setting; null for a table, which a line of text cannot have. */
function kindOf(schema, name) {
  const found = schema.properties[name];
  const one = (found.anyOf || [found]).find((each) => each.type !== "null");
  if (one.enum) return { type: "enum", values: one.enum };
  return one.type === "object" ? null : { type: one.type };
}

function field(schema, name) {
  const { type, values } = kindOf(schema, name);
  const { description, default: initial } = schema.properties[name];
  const isNeeded = schema.required.includes(name);
  const label = name.replaceAll("_", " ");
  const hint = initial === undefined ? (isNeeded ? "needed" : "") : String(initial);
  let input;
  if (type === "enum" || type === "boolean") {
    const others = (values || [true, false]).map(String).filter((value) => isNeeded || value !== hint);
    const options = others.map((value) => [value, value]);
    const none = isNeeded ? [] : [["", hint || "–"]];
    input = choice(label, [...none, ...options], "", () => {});
  } else {
    const isNumber = type === "number" || type === "integer";
    input = h("input", {
      type: isNumber ? "number" : "text",
      step: type === "integer" ? "1" : isNumber ? "any" : null,
      min: isNumber ? "0" : null,
      placeholder: hint,
      "aria-label": label,
      autocomplete: "off",
    });
  }
  input.required = isNeeded;
  const read = () => {
    const text = input.value.trim();
    if (!text) return undefined;
    if (type === "number" || type === "integer") return Number(text);
    if (type === "boolean") return text === "true";
    if (type === "array") return text.split(",").map((part) => part.trim());
    return text;
  };
  return {
    node: h("label", { class: "field", title: description || "" }, h("span", null, label), input),
    value: read,
  };
}
