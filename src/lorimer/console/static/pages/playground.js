// Chats with a base model or a checkpoint, or completes text; with two models side by side. The conversation is kept
// only in memory, while the console is open and the same key is signed in.

import { key } from "../api.js";
import { Pane } from "../answers.js";
import { button, h, pageHead, toast } from "../dom.js";
import { loadModels } from "../model_picker.js";
import { legend } from "../tokens.js";

export const title = "Playground";

let memory = null;

const fresh = () => ({
  key: key(),
  mode: "chat",
  isCompared: false,
  isShaded: true,
  isScored: false,
  system: "",
  draft: { chat: "", complete: "" },
  settings: { temperature: "1", top_p: "1", max_tokens: "256", seed: "", stop: "" },
  panes: [0, 1].map(() => ({ model: "", chat: [], complete: [] })),
});

export async function render(root, { query, signal, live, setQuery }) {
  if (memory?.key !== key()) memory = fresh();
  let choices;
  await live(async () => (choices = await loadModels(signal)), 30);
  readAddress(query, choices);
  new Playground(root, () => choices, signal, setQuery);
}

/** Read the selection from the URL, or restore the previous one. */
function readAddress(query, choices) {
  const [first, second] = memory.panes;
  if (query.get("mode")) memory.mode = query.get("mode") === "complete" ? "complete" : "chat";
  first.model = query.get("checkpoint") || query.get("model") || first.model || choices[0]?.id || "";
  if (query.get("other")) {
    second.model = query.get("other");
    memory.isCompared = true;
  }
  second.model ||= choices.find((one) => one.id !== first.model)?.id || first.model;
}

class Playground {
  constructor(root, choices, signal, setQuery) {
    this.#signal = signal;
    this.#setQuery = setQuery;
    this.#panes = memory.panes.map(
      (kept, i) =>
        new Pane({
          label: i ? "Second model" : "Model",
          kept,
          choices,
          onchange: () => this.#keepAddress(),
          onswitch: () => this.#set({ mode: "complete" }),
        }),
    );
    this.#play = h(
      "div",
      { class: "play" },
      h(
        "div",
        { class: "play-work" },
        h(
          "div",
          { class: "panes" },
          this.#panes.map((pane) => pane.node),
        ),
        this.#legend,
        this.#composer(),
      ),
      this.#settings(),
    );
    root.append(pageHead("Playground", this.#choices()), this.#play);
    this.#set({});
  }

  #signal;
  #setQuery;
  #panes;
  #play;
  #modes;
  #compare;
  #scored;
  #system;
  #prompt;
  #send;
  #stop;
  #others;
  #legend = legend();
  #stopper = null;

  get #shown() {
    return memory.isCompared ? this.#panes : this.#panes.slice(0, 1);
  }

  /** Build the controls above the panes. */
  #choices() {
    const mode = (value, label) => button(label, () => this.#set({ mode: value }), { dataset: { mode: value } });
    this.#modes = [mode("chat", "Chat"), mode("complete", "Complete")];
    this.#compare = button("Compare two", () => this.#set({ isCompared: !memory.isCompared }));
    this.#scored = checkBox("Score the prompt too", memory.isScored, (isOn) => (memory.isScored = isOn));
    return [
      h("div", { class: "segments", role: "group", "aria-label": "Mode" }, this.#modes),
      this.#compare,
      checkBox("Shade by probability", memory.isShaded, (isOn) => this.#set({ isShaded: isOn })),
      this.#scored,
    ];
  }

  #composer() {
    this.#prompt = h("textarea", {
      oninput: () => (memory.draft[memory.mode] = this.#prompt.value),
      onkeydown: (event) => this.#key(event),
    });
    this.#send = h("button", { type: "submit", class: "primary" });
    this.#stop = button("Stop", () => this.#stopper?.abort(), { class: "danger" });
    this.#others = [
      button("Try again", () => this.#again(), { class: "quiet" }),
      button("Clear", () => this.#clear(), { class: "quiet" }),
    ];
    return h(
      "form",
      { class: "composer panel", onsubmit: (event) => (event.preventDefault(), this.#ask(this.#prompt.value)) },
      this.#prompt,
      h("div", { class: "row" }, this.#send, this.#stop, this.#others),
    );
  }

  /** Update the selection without replacing elements, so that the focus stays. */
  #set(values) {
    Object.assign(memory, values);
    const { mode, isCompared, isShaded, draft } = memory;
    this.#play.classList.toggle("shaded", isShaded);
    this.#play.classList.toggle("compared", isCompared);
    for (const node of this.#modes) node.setAttribute("aria-pressed", String(node.dataset.mode === mode));
    this.#compare.setAttribute("aria-pressed", String(isCompared));
    this.#system.hidden = mode !== "chat";
    this.#scored.hidden = mode !== "complete";
    this.#legend.hidden = !isShaded;
    this.#panes[1].node.hidden = !isCompared;
    if ("mode" in values || "isCompared" in values || !Object.keys(values).length)
      for (const pane of this.#panes) pane.draw(mode);
    const isChat = mode === "chat";
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
    const hasTurns = this.#shown.some((pane) => pane.kept[memory.mode].length);
    for (const node of [this.#send, this.#compare, ...this.#modes]) node.disabled = isRunning;
    for (const node of this.#others) node.disabled = isRunning || !hasTurns;
    this.#stop.disabled = !isRunning;
  }

  #keepAddress() {
    const [first, second] = memory.panes;
    const mode = memory.mode === "complete" ? "complete" : null;
    this.#setQuery({ mode, checkpoint: null, model: first.model, other: memory.isCompared ? second.model : null });
  }

  #key(event) {
    const isChat = memory.mode === "chat";
    const isSent =
      event.key === "Enter" && !event.isComposing && (isChat ? !event.shiftKey : event.ctrlKey || event.metaKey);
    if (isSent) {
      event.preventDefault();
      if (!this.#stopper) this.#ask(this.#prompt.value);
    } else if (event.key === "Escape") {
      this.#stopper?.abort();
    }
  }

  /** Send the prompt to each model shown; each ends or fails independently. */
  async #ask(prompt) {
    this.#prompt.focus();
    if (!prompt.trim()) {
      toast("There is nothing to send: type a prompt first.");
      return;
    }
    const { mode, system, settings, isScored } = memory;
    if (mode === "chat" && prompt === this.#prompt.value) this.#prompt.value = memory.draft.chat = "";
    this.#stopper = new AbortController();
    const signal = AbortSignal.any([this.#signal, this.#stopper.signal]);
    const request = { system, settings: { ...settings }, scored: isScored };
    this.#enable();
    await Promise.all(this.#shown.map((pane) => pane.ask(prompt, request, signal)));
    this.#stopper = null;
    const hadFocus = document.activeElement === this.#stop;
    this.#enable();
    if (hadFocus) this.#prompt.focus();
  }

  #again() {
    const prompts = this.#shown.map((pane) => pane.takeLast());
    const prompt = prompts.find((one) => one !== null);
    if (prompt) this.#ask(prompt);
  }

  #clear() {
    for (const pane of this.#shown) {
      pane.kept[memory.mode].length = 0;
      pane.draw(memory.mode);
    }
    this.#enable();
    this.#prompt.focus();
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
