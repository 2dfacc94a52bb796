// Chats with a base model or a checkpoint, or completes text; with several samples, and with two models side by side that
// get the same history. The conversation, with all its branches, is kept in this browser until it is cleared.

import { key } from "../api.js";
import { addBatch, addTurn, chooseUsable, messagesTo, newAnswer, newFork, pathOf } from "../conversation.js";
import { fromDocument, keep, recall, toDocument } from "../conversation_files.js";
import { button, h, pageHead, toast } from "../dom.js";
import { openFile, save } from "../files.js";
import { MAX_SAMPLES, chat, complete, numSamples } from "../generation.js";
import { ModelPicker, loadModels, nameOf } from "../model_picker.js";
import { ImageField } from "../prompt_images.js";
import { legend } from "../tokens.js";
import { TurnList } from "../turns.js";

export const title = "Playground";

let memory = null;

const fresh = (user) => ({
  key: key(),
  user,
  mode: "chat",
  isCompared: false,
  isShaded: true,
  isScored: false,
  system: "",
  draft: { chat: "", complete: "" },
  images: [],
  settings: { samples: "1", temperature: "1", top_p: "1", max_tokens: "256", seed: "", stop: "" },
  models: ["", ""],
  forks: { chat: newFork(), complete: newFork() },
});

export async function render(root, { query, signal, account, live, setQuery }) {
  if (memory?.key !== key()) {
    memory = fresh(account?.user_id || "");
    for (const { mode, system, fork } of recall(memory.user)) {
      memory.forks[mode] = fork;
      if (mode === "chat") memory.system = system;
    }
  }
  let choices;
  await live(async () => (choices = await loadModels(signal)), 30);
  readAddress(query, choices);
  new Playground(root, () => choices, signal, setQuery);
}

/** Read the selection from the URL, or restore the previous one. */
function readAddress(query, choices) {
  const { models } = memory;
  if (query.get("mode")) memory.mode = query.get("mode") === "complete" ? "complete" : "chat";
  models[0] = query.get("checkpoint") || query.get("model") || models[0] || choices[0]?.id || "";
  if (query.get("other")) {
    models[1] = query.get("other");
    memory.isCompared = true;
  }
  models[1] ||= choices.find((one) => one.id !== models[0])?.id || models[0];
}

class Playground {
  constructor(root, choices, signal, setQuery) {
    this.#signal = signal;
    this.#setQuery = setQuery;
    this.#pickers = memory.models.map(
      (value, i) =>
        new ModelPicker({
          label: i ? "Second model" : "Model",
          value,
          choices,
          onchange: (model) => ((memory.models[i] = model), this.#keepAddress()),
        }),
    );
    this.#list = new TurnList({
      nameOf: (model) => choices().find((one) => one.id === model)?.name ?? nameOf(model),
      onchange: () => this.#keep(),
      onprompt: ({ fork, turn }, text) => this.#ask(text, { fork, images: turn.images }),
      onanswer: ({ turn }, answer, text) => this.#branch(turn, answer, text),
      onswitch: () => this.#set({ mode: "complete" }),
    });
    this.#images = new ImageField(memory.images);
    this.#play = h(
      "div",
      { class: "play" },
      h(
        "div",
        { class: "play-work" },
        h(
          "section",
          { class: "panel" },
          h(
            "div",
            { class: "play-models" },
            this.#pickers.map((picker) => picker.node),
          ),
          this.#fairness,
          this.#legend,
          this.#list.node,
        ),
        this.#composer(),
      ),
      this.#settings(),
    );
    root.append(pageHead("Playground", this.#choices()), this.#play);
    this.#set({});
  }

  #signal;
  #setQuery;
  #pickers;
  #list;
  #images;
  #play;
  #modes;
  #compare;
  #scored;
  #system;
  #prompt;
  #send;
  #stop;
  #others;
  #files;
  #legend = legend();
  #fairness = h(
    "p",
    { class: "muted" },
    "Both models get the same history: of each turn, the answer marked \u201cGoes on\u201d.",
  );
  #stopper = null;

  get #fork() {
    return memory.forks[memory.mode];
  }

  /** Build the controls above the conversation. */
  #choices() {
    const mode = (value, label) => button(label, () => this.#set({ mode: value }), { dataset: { mode: value } });
    this.#modes = [mode("chat", "Chat"), mode("complete", "Complete")];
    this.#compare = button("Compare two", () => this.#set({ isCompared: !memory.isCompared }));
    this.#scored = checkBox("Score the prompt too", memory.isScored, (isOn) => (memory.isScored = isOn));
    this.#files = [
      button("Export", () => this.#export(), { class: "quiet", title: "Download the conversation with all its branches" }),
      button("Import", () => this.#import(), { class: "quiet", title: "Open a conversation that was exported" }),
    ];
    return [
      h("div", { class: "segments", role: "group", "aria-label": "Mode" }, this.#modes),
      this.#compare,
      checkBox("Shade by probability", memory.isShaded, (isOn) => this.#set({ isShaded: isOn })),
      this.#scored,
      h("a", { class: "button quiet", href: "/console/playground/prompts" }, "Prompt sets"),
      this.#files,
    ];
  }

  #composer() {
    this.#prompt = h("textarea", {
      oninput: () => (memory.draft[memory.mode] = this.#prompt.value),
      onkeydown: (event) => this.#key(event),
      onpaste: (event) => memory.mode === "chat" && this.#images.add(event.clipboardData.files),
    });
    this.#send = h("button", { type: "submit", class: "primary" });
    this.#stop = button("Stop", () => this.#stopper?.abort(), { class: "danger" });
    this.#others = [
      button("Try again", () => this.#again(), { class: "quiet" }),
      button("Clear", () => this.#clear(), { class: "quiet" }),
    ];
    return h(
      "form",
      { class: "composer panel", onsubmit: (event) => (event.preventDefault(), this.#submit()) },
      this.#images.node,
      this.#prompt,
      h("div", { class: "row" }, this.#send, this.#stop, this.#others, this.#images.adder),
    );
  }

  /** Update the selection without replacing elements, so that the focus stays. */
  #set(values) {
    Object.assign(memory, values);
    const { mode, isCompared, isShaded, draft } = memory;
    const isChat = mode === "chat";
    this.#play.classList.toggle("shaded", isShaded);
    this.#play.classList.toggle("compared", isCompared);
    for (const node of this.#modes) node.setAttribute("aria-pressed", String(node.dataset.mode === mode));
    this.#compare.setAttribute("aria-pressed", String(isCompared));
    this.#system.hidden = this.#images.adder.hidden = !isChat;
    this.#scored.hidden = isChat;
    this.#legend.hidden = !isShaded;
    this.#pickers[1].node.hidden = !isCompared;
    this.#fairness.hidden = !isCompared || !isChat;
    if ("mode" in values || !Object.keys(values).length) this.#list.draw(this.#fork, mode);
    this.#prompt.value = draft[mode];
    this.#prompt.rows = isChat ? 2 : 5;
    this.#prompt.placeholder = isChat
      ? "Type a message; Enter sends, Shift+Enter starts a new line"
      : "Text to complete; Ctrl+Enter sends";
    this.#prompt.setAttribute("aria-label", isChat ? "Message" : "Prompt");
    this.#send.textContent = isChat ? "Send" : "Complete";
    this.#enable();
    this.#keepAddress();
  }

  /** Enable or disable the buttons. */
  #enable() {
    const isRunning = this.#stopper !== null;
    const hasTurns = this.#fork.turns.length > 0;
    for (const node of [this.#send, this.#compare, this.#files[1], ...this.#modes]) node.disabled = isRunning;
    for (const node of [...this.#others, this.#files[0]]) node.disabled = isRunning || !hasTurns;
    this.#stop.disabled = !isRunning;
    this.#list.setBusy(isRunning);
  }

  #keepAddress() {
    const [model, second] = memory.models;
    const mode = memory.mode === "complete" ? "complete" : null;
    this.#setQuery({ mode, checkpoint: null, model, other: memory.isCompared ? second : null });
  }

  #key(event) {
    const isChat = memory.mode === "chat";
    const isSent =
      event.key === "Enter" && !event.isComposing && (isChat ? !event.shiftKey : event.ctrlKey || event.metaKey);
    if (isSent) {
      event.preventDefault();
      if (!this.#stopper) this.#submit();
    } else if (event.key === "Escape") {
      this.#stopper?.abort();
    }
  }

  // ── asking ────────────────────────────────────────────────────────────────────────────────────────

  /** Send what is typed, as the next turn of the path. */
  #submit() {
    const prompt = this.#prompt.value;
    this.#prompt.focus();
    if (!prompt.trim()) {
      toast("There is nothing to send: type a prompt first.");
      return;
    }
    const fork = pathOf(this.#fork).at(-1)?.answer.next ?? this.#fork;
    const isSent = this.#ask(prompt, { fork, images: memory.mode === "chat" ? [...memory.images] : [] });
    if (!isSent || memory.mode !== "chat") return;
    this.#prompt.value = memory.draft.chat = "";
    this.#images.take();
  }

  /** Add a turn with the answers of each model shown. Return whether it was sent. */
  #ask(prompt, { fork, images }) {
    const answers = this.#newAnswers();
    if (answers) this.#run(addTurn(fork, prompt, images, answers), answers);
    return Boolean(answers);
  }

  #again() {
    const answers = this.#newAnswers();
    if (!answers) return;
    const { turn } = pathOf(this.#fork).at(-1);
    addBatch(turn, answers);
    this.#run(turn, answers);
  }

  /** Return empty answers, or nothing if the number of samples is refused. */
  #newAnswers() {
    try {
      const count = numSamples(memory.settings.samples);
      const models = memory.models.slice(0, memory.isCompared ? 2 : 1);
      return models.flatMap((model, side) => Array.from({ length: count }, () => newAnswer(model, side)));
    } catch (error) {
      toast(error.message, "bad");
      return null;
    }
  }

  /** Request the answers of a turn, each model independently, and keep what has arrived when all have ended. */
  async #run(turn, answers) {
    this.#stopper = new AbortController();
    const signal = AbortSignal.any([this.#signal, this.#stopper.signal]);
    const fork = this.#fork;
    this.#list.draw(fork, memory.mode);
    this.#enable();
    this.#list.viewOf(answers[0]).node.closest(".play-turn").scrollIntoView({ block: "nearest" });
    const sides = [0, 1].map((side) => answers.filter((one) => one.side === side)).filter((side) => side.length);
    await Promise.all(sides.map((side) => this.#request(fork, turn, side, signal)));
    this.#stopper = null;
    chooseUsable(turn.batches[turn.shown]);
    this.#keep();
    const hadFocus = document.activeElement === this.#stop;
    if (turn.batches[turn.shown].chosen) this.#list.draw(fork, memory.mode);
    this.#enable();
    if (hadFocus) this.#prompt.focus();
  }

  /** Request the answers of one model. Shows errors instead of throwing. */
  async #request(fork, turn, answers, signal) {
    const { mode, system, settings, isScored } = memory;
    const [{ model }] = answers;
    const views = answers.map((one) => this.#list.viewOf(one));
    const onPart = (index, part) => {
      if (index !== null) return views[index].add(part);
      const { completion_tokens: count, ...usage } = part.usage; // of all answers together
      if (isScored && mode === "complete") for (const one of answers) one.numPrompt = usage.prompt_tokens;
      for (const view of views) view.add({ usage: answers.length > 1 ? usage : { ...usage, completion_tokens: count } });
    };
    const request = { model, n: answers.length, settings: { ...settings } };
    try {
      if (!model) throw new Error("no model is chosen: pick one from the list, or paste a tinker:// path");
      if (mode === "chat") await chat({ ...request, messages: messagesTo(fork, turn, system) }, onPart, signal);
      else await complete({ ...request, prompt: turn.prompt, scored: isScored }, onPart, signal);
      for (const one of answers) one.state = "done";
    } catch (error) {
      for (const one of answers) {
        one.state = signal.aborted ? "stopped" : "failed";
        if (!signal.aborted) one.error = { message: error.message, code: error.code };
      }
    }
    for (const view of views) view.finish();
  }

  /** Add an edited answer as a branch of its turn. */
  #branch(turn, answer, text) {
    addBatch(turn, [{ ...newAnswer(answer.model, answer.side), text, state: "edited", beganAt: null }]);
    this.#list.draw(this.#fork, memory.mode);
    this.#enable();
    this.#keep();
    this.#prompt.focus();
  }

  // ── keeping ───────────────────────────────────────────────────────────────────────────────────────

  #keep() {
    const { user, forks, system } = memory;
    const isKept = keep(user, [
      { mode: "chat", system, fork: forks.chat },
      { mode: "complete", system: "", fork: forks.complete },
    ]);
    if (!isKept) toast("This browser has no room for the conversation: export it, or it ends with the page.", "bad");
  }

  #clear() {
    memory.forks[memory.mode] = newFork();
    this.#keep();
    this.#list.draw(this.#fork, memory.mode);
    this.#enable();
    this.#prompt.focus();
  }

  #export() {
    const { mode, system } = memory;
    const found = toDocument({ mode, system: mode === "chat" ? system : "", fork: this.#fork });
    save(new Blob([JSON.stringify(found)], { type: "application/json" }), "conversation.json");
  }

  async #import() {
    try {
      const file = await openFile(".json,application/json");
      if (file === null) return;
      const { mode, system, fork } = fromDocument(JSON.parse(file.text));
      memory.forks[mode] = fork;
      if (mode === "chat") this.#system.querySelector("textarea").value = memory.system = system;
      this.#set({ mode });
      this.#keep();
      toast("The conversation is open.");
    } catch (error) {
      toast(`The file was not imported: ${error.message}`, "bad");
    }
  }

  #settings() {
    const { settings } = memory;
    this.#system = textArea(
      "System message",
      memory.system,
      "optional; instructions for the model",
      (text) => (memory.system = text),
      2,
    );
    const number = (name, label, attrs) =>
      h(
        "label",
        { class: "field" },
        h("span", null, label),
        h("input", {
          type: "number",
          name,
          value: settings[name],
          ...attrs,
          oninput: (event) => (settings[name] = event.target.value),
        }),
      );
    const isWide = matchMedia("(min-width: 1100px)").matches;
    return h(
      "details",
      { class: "panel settings", open: isWide },
      h("summary", null, h("h2", null, "Settings")),
      this.#system,
      number("samples", "Samples", { min: "1", max: String(MAX_SAMPLES), step: "1" }),
      number("temperature", "Temperature", { min: "0", max: "100", step: "any" }),
      number("top_p", "Top p", { min: "0", max: "1", step: "any" }),
      number("max_tokens", "Max tokens", { min: "0", step: "1", placeholder: "what the context holds" }),
      number("seed", "Seed", { step: "1", placeholder: "none" }),
      textArea(
        "Stop strings, one per line; \\n is a new line",
        settings.stop,
        "none",
        (text) => (settings.stop = text),
        2,
      ),
    );
  }
}

function textArea(label, value, placeholder, oninput, rows) {
  return h(
    "label",
    { class: "field" },
    h("span", null, label),
    h("textarea", { value, placeholder, rows: String(rows), oninput: (event) => oninput(event.target.value) }),
  );
}

function checkBox(label, checked, onchange) {
  return h(
    "label",
    { class: "check" },
    h("input", { type: "checkbox", checked, onchange: (event) => onchange(event.target.checked) }),
    label,
  );
}
