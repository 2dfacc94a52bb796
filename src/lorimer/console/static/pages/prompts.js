// Prompt sets: named lists of prompts, run against one or two models; the answers are a table that can be exported.

import { key } from "../api.js";
import { button, choice, confirmDialog, empty, h, pageHead, panel, replace, table, toast } from "../dom.js";
import { openFile, save } from "../files.js";
import { ModelPicker, loadModels, nameOf } from "../model_picker.js";
import { loadSets, parsePrompts, promptText, runJobs, storeSets, toLines } from "../prompt_sets.js";

export const title = "Prompt sets";

let memory = null;

const fresh = (user) => ({
  key: key(),
  user,
  name: "",
  text: "",
  models: ["", ""],
  isCompared: false,
  system: "",
  settings: { temperature: "0", top_p: "", max_tokens: "256", seed: "", stop: "" },
  rows: [],
  columns: [],
});

export async function render(root, { query, signal, account, live }) {
  if (memory?.key !== key()) memory = fresh(account?.user_id || "");
  let choices;
  await live(async () => (choices = await loadModels(signal)), 30);
  const { models } = memory;
  models[0] = query.get("model") || models[0] || choices[0]?.id || "";
  models[1] ||= choices.find((one) => one.id !== models[0])?.id || models[0];
  new PromptSets(root, () => choices, signal);
}

class PromptSets {
  constructor(root, choices, signal) {
    this.#choices = choices;
    this.#signal = signal;
    this.#sets = loadSets(memory.user);
    root.append(
      pageHead("Prompt sets", h("a", { href: "/console/playground" }, "To the playground")),
      h("div", { class: "prompt-set-forms" }, panel("Set", this.#setForm()), panel("Run", this.#runForm())),
      panel("Answers", this.#results),
    );
    this.#drawSaved();
    this.#drawRows();
    this.#enable();
  }

  #choices;
  #signal;
  #sets;
  #saved = h("span");
  #name;
  #text;
  #second;
  #buttons;
  #progress = h("span", { class: "muted", role: "status" });
  #results = h("div");
  #stopper = null;
  #isDrawn = true;

  // ── the set ───────────────────────────────────────────────────────────────────────────────────────

  #setForm() {
    this.#name = h("input", { value: memory.name, oninput: () => (memory.name = this.#name.value) });
    this.#text = h("textarea", {
      value: memory.text,
      rows: "8",
      placeholder: 'one prompt per line, or JSONL: {"prompt": "..."} or {"messages": [...]}',
      oninput: () => (memory.text = this.#text.value),
    });
    return [
      h(
        "div",
        { class: "row" },
        this.#saved,
        button("Upload", () => this.#attempt(() => this.#upload())),
      ),
      h("label", { class: "field" }, h("span", null, "Name"), this.#name),
      h("label", { class: "field" }, h("span", null, "Prompts"), this.#text),
      h(
        "div",
        { class: "row" },
        button("Save set", () => this.#attempt(() => this.#saveSet())),
        button("Delete set", () => this.#attempt(() => this.#deleteSet()), { class: "quiet danger" }),
      ),
    ];
  }

  #drawSaved() {
    const pairs = [["", this.#sets.size ? "choose a saved set" : "no saved sets"], ...[...this.#sets.keys()].map((name) => [name, name])];
    const chosen = this.#sets.has(memory.name) ? memory.name : "";
    replace(this.#saved, choice("Saved sets", pairs, chosen, (name) => name && this.#open(name, this.#sets.get(name))));
  }

  #open(name, text) {
    this.#name.value = memory.name = name;
    this.#text.value = memory.text = text;
  }

  async #upload() {
    const file = await openFile(".txt,.jsonl,.json,text/plain");
    if (file === null) return;
    const count = parsePrompts(file.text).length;
    this.#open(memory.name || file.name.replace(/\.\w+$/, ""), file.text);
    toast(`The file has ${count} prompts; save the set to keep it.`);
  }

  #saveSet() {
    const name = memory.name.trim();
    if (!name) throw new Error("the set has no name");
    parsePrompts(memory.text);
    const changed = new Map(this.#sets).set(name, memory.text);
    storeSets(memory.user, changed);
    this.#sets = changed;
    memory.name = name;
    this.#drawSaved();
    toast(`Saved ${name} in this browser.`);
  }

  async #deleteSet() {
    const name = memory.name.trim();
    if (!this.#sets.has(name)) throw new Error(`there is no saved set ${JSON.stringify(name)}`);
    const text = "It is deleted from this browser.";
    if (!(await confirmDialog({ title: `Delete ${name}?`, text, action: "Delete", danger: true }))) return;
    this.#sets.delete(name);
    storeSets(memory.user, this.#sets);
    this.#open("", "");
    this.#drawSaved();
  }

  /** Do what a button asks for, and show its errors. */
  async #attempt(work) {
    try {
      await work();
    } catch (error) {
      toast(`${error.message[0].toUpperCase()}${error.message.slice(1)}.`, "bad");
    }
  }

  // ── running ───────────────────────────────────────────────────────────────────────────────────────

  #runForm() {
    const { settings, models } = memory;
    const picker = (label, i) =>
      new ModelPicker({ label, value: models[i], choices: this.#choices, onchange: (model) => (models[i] = model) });
    const number = (name, label, attrs) =>
      field(label, h("input", { type: "number", value: settings[name], ...attrs, oninput: (event) => (settings[name] = event.target.value) }));
    this.#second = picker("Second model", 1).node;
    this.#second.hidden = !memory.isCompared;
    const compare = h("input", {
      type: "checkbox",
      checked: memory.isCompared,
      onchange: () => (this.#second.hidden = !(memory.isCompared = compare.checked)),
    });
    const system = h("textarea", { value: memory.system, rows: "2", oninput: () => (memory.system = system.value) });
    this.#buttons = {
      run: button("Run set", () => this.#attempt(() => this.#run()), { class: "primary" }),
      stop: button("Stop", () => this.#stopper?.abort(), { class: "danger" }),
      save: button("Export JSONL", () => save(new Blob(toLines(memory.rows), { type: "application/jsonl" }), "answers.jsonl")),
    };
    return [
      picker("Model", 0).node,
      h("label", { class: "check" }, compare, "Compare two"),
      this.#second,
      h(
        "div",
        { class: "prompt-set-numbers" },
        number("temperature", "Temperature", { min: "0", step: "any" }),
        number("max_tokens", "Max tokens", { min: "0", step: "1" }),
        number("seed", "Seed", { step: "1", placeholder: "none" }),
      ),
      field("System message", system),
      h("div", { class: "row" }, Object.values(this.#buttons), this.#progress),
    ];
  }

  async #run() {
    const prompts = parsePrompts(memory.text);
    const models = memory.models.slice(0, memory.isCompared ? 2 : 1);
    memory.columns = models.map((model) => ({ model, name: this.#nameOf(model) }));
    memory.rows = prompts.map((messages) => ({ messages, jobs: models.map((model) => ({ model, messages, result: null })) }));
    const jobs = memory.rows.flatMap((row) => row.jobs);
    this.#stopper = new AbortController();
    const signal = AbortSignal.any([this.#signal, this.#stopper.signal]);
    let numDone = 0;
    this.#enable();
    this.#drawRows();
    const tell = (end = "") => replace(this.#progress, `${numDone} of ${jobs.length} answers${end}`);
    tell();
    const onDone = () => ((numDone += 1), tell(), this.#drawSoon());
    await runJobs(jobs, { settings: { ...memory.settings }, system: memory.system }, onDone, signal);
    this.#stopper = null;
    if (signal.aborted) tell(", stopped");
    this.#drawRows();
    this.#enable();
  }

  #nameOf(model) {
    return this.#choices().find((one) => one.id === model)?.name ?? nameOf(model);
  }

  #enable() {
    const isRunning = this.#stopper !== null;
    this.#buttons.run.disabled = isRunning;
    this.#buttons.stop.disabled = !isRunning;
    this.#buttons.save.disabled = isRunning || !memory.rows.length;
  }

  /** Draw once for all answers of a moment. */
  #drawSoon() {
    if (!this.#isDrawn) return;
    this.#isDrawn = false;
    requestAnimationFrame(() => this.#drawRows());
  }

  #drawRows() {
    this.#isDrawn = true;
    const { rows, columns } = memory;
    if (!rows.length) {
      replace(this.#results, empty("No answers yet.", "Write a set or choose a saved one, then run it."));
      return;
    }
    const cells = [
      { label: "Prompt", wide: true, value: (row) => h("div", { class: "prose" }, promptText(row.messages)) },
      ...columns.map(({ model, name }, i) => ({
        label: name,
        head: h("span", { title: model }, name),
        wide: true,
        value: (row) => answerCell(row.jobs[i].result),
      })),
    ];
    replace(this.#results, h("div", { class: "prompt-answers" }, table(cells, rows)));
  }
}

const ENDS = { stop: "ended", length: "cut off at max tokens" };

function answerCell(result) {
  if (!result) return h("span", { class: "muted" }, "–");
  if (result.error) return h("p", { class: "error-text" }, result.error);
  const words = [`${result.numTokens} ${result.numTokens === 1 ? "token" : "tokens"}`];
  if (result.meanLogprob !== null) words.push(`mean logprob ${result.meanLogprob.toFixed(2)}`);
  words.push(ENDS[result.finish] ?? result.finish);
  return [h("div", { class: "prose" }, result.text), h("p", { class: "figures" }, words.join(" · "))];
}

function field(label, control) {
  return h("label", { class: "field" }, h("span", null, label), control);
}
