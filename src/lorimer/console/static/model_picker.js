// A combobox for a base model or a checkpoint: choose from a list that filters while typing, or paste a path.

import { get } from "./api.js";
import { copyButton, h, replace, short, shortRun } from "./dom.js";

const MAX_SHOWN = 50;
const MAX_CHECKPOINTS = 2000;
let numPickers = 0;

/** Return what can be sampled, `{id, name, group}`: base models, then sampler checkpoints, then others. */
export async function loadModels(signal) {
  const [models, saved] = await Promise.all([
    get("/v1/models", null, signal),
    get("/api/v1/checkpoints", { limit: MAX_CHECKPOINTS }, signal),
  ]);
  const known = new Map(saved.checkpoints.map((one) => [one.tinker_path, one]));
  for (const { id } of models.data) if (!known.has(id)) known.set(id, null);
  const choices = [...known].map(([id, checkpoint]) => choice(id, checkpoint)).filter((one) => one.rank < OTHER);
  return choices.sort((a, b) => a.rank - b.rank);
}

const OTHER = 3;
const PATH = /^tinker:\/\/([^/]+)\/(sampler_weights|weights|external_weights)\/(.+)$/;

function choice(id, checkpoint) {
  const found = PATH.exec(id);
  if (!found) return { id, name: id, group: "base model", rank: 0 };
  const rank = { sampler_weights: 1, weights: 2 }[found[2]] || OTHER;
  const group = `${rank === 1 ? "sampler" : "training"} checkpoint of ${found[1]}`;
  return { id, name: nameOf(id, checkpoint), group, rank };
}

/** Name a model: the run, step and name of a checkpoint; the end of the run's id if the run is not known. */
export function nameOf(model, checkpoint = null) {
  const [, run, , name] = PATH.exec(model) || [];
  if (!run) return model || "no model";
  if (!checkpoint?.run_name) return `${name} (${shortRun(run)})`;
  const step = typeof checkpoint.step === "number" ? ` · step ${short(checkpoint.step)}` : "";
  return `${checkpoint.run_name}${step} · ${name}`;
}

/** The field; read `value`, an id. Shows the name of a known model, and calls `onchange` with each new id. */
export class ModelPicker {
  constructor({ label, value, choices, onchange }) {
    const id = `picker-${++numPickers}`;
    this.#choices = choices;
    this.#onchange = onchange;
    this.#list = h("ul", { id: `${id}-list`, role: "listbox", "aria-label": "Choices", hidden: true });
    this.input = h("input", {
      id,
      type: "text",
      role: "combobox",
      placeholder: "base model or tinker:// path",
      spellcheck: "false",
      autocomplete: "off",
      "aria-autocomplete": "list",
      "aria-expanded": "false",
      "aria-controls": `${id}-list`,
      onfocus: () => this.input.select(),
      onclick: () => this.#open(""),
      oninput: () => this.#open(this.input.value),
      onblur: () => this.#close(),
      onchange: () => this.#commit(this.input.value),
      onkeydown: (event) => this.#key(event),
    });
    const head = h("div", { class: "row" }, h("label", { for: id }, label), this.#copy);
    this.node = h("div", { class: "picker" }, head, this.input, this.#list);
    this.#set(value);
  }

  #choices;
  #onchange;
  #list;
  #found = [];
  #active = -1;
  #copy = h("span");

  #set(value) {
    this.input.value = this.#labelOf(value);
    if (value === this.value) return; // keep the button: leaving the field for it must not replace it
    this.value = this.input.title = value;
    replace(this.#copy, value && copyButton(value, "Copy path"));
  }

  #labelOf(value) {
    return this.#choices().find((one) => one.id === value)?.name ?? value;
  }

  #open(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const isOther = (one) => !one.name.toLowerCase().includes(words.join(" "));
    const fits = this.#choices()
      .filter((one) => words.every((word) => `${one.name} ${one.id}`.toLowerCase().includes(word)))
      .sort((a, b) => isOther(a) - isOther(b)); // "seed 0" before "seed 1 · step 60"
    this.#found = fits.slice(0, MAX_SHOWN);
    this.#active = -1;
    const rest = fits.length - this.#found.length;
    replace(
      this.#list,
      this.#found.map((one, i) =>
        h(
          "li",
          {
            id: `${this.input.id}-${i}`,
            role: "option",
            "aria-selected": "false",
            title: one.id,
            // Keep the focus in the field: losing it would close the list before the click arrives.
            onpointerdown: (event) => event.preventDefault(),
            onclick: () => this.#pick(i),
          },
          h("span", { class: "choice-name" }, one.name),
          h("span", { class: "choice-group" }, one.group),
        ),
      ),
      !fits.length &&
        h(
          "li",
          { class: "muted", role: "presentation" },
          "No match; the path of a published checkpoint is used as it is.",
        ),
      rest > 0 && h("li", { class: "muted", role: "presentation" }, `and ${rest} more: type to narrow`),
    );
    this.#list.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
    this.input.removeAttribute("aria-activedescendant");
  }

  #close() {
    this.#list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
    this.input.removeAttribute("aria-activedescendant");
  }

  #key(event) {
    const isOpen = !this.#list.hidden;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      if (!isOpen) this.#open("");
      this.#activate(this.#active + step);
    } else if (event.key === "Enter") {
      event.preventDefault();
      if (isOpen && this.#active >= 0) this.#pick(this.#active);
      else this.#commit(this.input.value);
      this.#close();
    } else if (event.key === "Escape" && isOpen) {
      event.preventDefault();
      this.#set(this.value);
      this.#close();
    }
  }

  #activate(index) {
    const count = this.#found.length;
    if (!count) return;
    this.#active = (index + count) % count;
    for (const [i, node] of [...this.#list.children].slice(0, count).entries()) {
      node.setAttribute("aria-selected", String(i === this.#active));
      if (i === this.#active) node.scrollIntoView({ block: "nearest" });
    }
    this.input.setAttribute("aria-activedescendant", `${this.input.id}-${this.#active}`);
  }

  #pick(index) {
    this.#commit(this.#found[index].id);
    this.#close();
  }

  /** Take an id or the name of a known model. */
  #commit(text) {
    const typed = text.trim();
    const isSame = typed === this.#labelOf(this.value);
    const value = isSame ? this.value : (this.#choices().find((one) => one.name === typed)?.id ?? typed);
    const isNew = value !== this.value;
    this.#set(value);
    if (isNew) this.#onchange(value);
  }
}
