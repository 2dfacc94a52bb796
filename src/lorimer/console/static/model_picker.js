// A combobox for a base model or a checkpoint: choose from a list that filters while typing, or paste a path.

import { get } from "./api.js";
import { h, replace } from "./dom.js";

const MAX_SHOWN = 50;
const MAX_CHECKPOINTS = 2000;
let numPickers = 0;

/** Return what can be sampled, `{id, name, group}`: base models, then sampler checkpoints, then others. */
export async function loadModels(signal) {
  const [models, saved] = await Promise.all([
    get("/v1/models", null, signal),
    get("/api/v1/checkpoints", { limit: MAX_CHECKPOINTS }, signal),
  ]);
  const paths = [...saved.checkpoints.map((one) => one.tinker_path), ...models.data.map((one) => one.id)];
  const choices = [...new Set(paths)].map(choice).filter((one) => one.rank < OTHER);
  return choices.sort((a, b) => a.rank - b.rank);
}

const OTHER = 3;

function choice(id) {
  const found = /^tinker:\/\/([^/]+)\/(sampler_weights|weights|external_weights)\/(.+)$/.exec(id);
  if (!found) return { id, name: id, group: "base model", rank: 0 };
  const rank = { sampler_weights: 1, weights: 2 }[found[2]] || OTHER;
  return { id, name: found[3], group: `${rank === 1 ? "sampler" : "training"} checkpoint of ${found[1]}`, rank };
}

/** The field; read `value`. Calls `onchange` with each new value. */
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
      value,
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
    this.input.title = value;
    this.node = h("div", { class: "picker" }, h("label", { for: id }, label), this.input, this.#list);
    this.value = value;
  }

  #choices;
  #onchange;
  #list;
  #found = [];
  #active = -1;

  #open(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = this.#choices().filter((one) => words.every((word) => one.id.toLowerCase().includes(word)));
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
      this.input.value = this.value;
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

  #commit(text) {
    const value = text.trim();
    this.input.value = this.input.title = value;
    if (value === this.value) return;
    this.value = value;
    this.#onchange(value);
  }
}
