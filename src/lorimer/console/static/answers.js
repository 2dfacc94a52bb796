// The panes of the playground: each holds a model and its conversation, and shows answers as they stream in. Model
// output is rendered as text only.

import { chat, complete } from "./generation.js";
import { button, h, replace, short, shortRun, span } from "./dom.js";
import { ModelPicker } from "./model_picker.js";
import { TokenView } from "./tokens.js";

/** One prompt and the part of its answer received so far. */
const newTurn = (prompt, model) => ({
  prompt,
  model,
  text: "",
  reasoning: "",
  tokens: [],
  finish: null,
  usage: null,
  error: null,
  state: "running",
  beganAt: performance.now(),
  firstAt: null,
  lastAt: null,
  numFirst: 0,
});

/** A model and its turns. `kept` is `{model, chat: [], complete: []}`, which survives navigation. */
export class Pane {
  constructor({ label, kept, choices, onchange, onswitch }) {
    this.kept = kept;
    this.#onswitch = onswitch;
    this.#picker = new ModelPicker({
      label,
      value: kept.model,
      choices,
      onchange: (model) => ((kept.model = model), onchange()),
    });
    this.#log = h("div", { class: "turns", role: "log", "aria-label": `Answers of ${label.toLowerCase()}` });
    this.node = h("section", { class: "pane panel" }, this.#picker.node, this.#log);
  }

  #picker;
  #log;
  #onswitch;
  #mode = "chat";

  /** Show the turns of a mode. */
  draw(mode) {
    this.#mode = mode;
    const turns = this.kept[mode];
    const hint = mode === "chat" ? "Messages and answers appear here." : "Completions of your prompt appear here.";
    replace(this.#log, turns.length ? turns.map((turn) => this.#show(turn).nodes) : h("p", { class: "muted" }, hint));
  }

  /** Send a prompt to the model; `request` has `system`, `scored` and `settings`. Shows errors instead of throwing. */
  async ask(prompt, request, signal) {
    const { model } = this.kept;
    const turns = this.kept[this.#mode];
    const messages = conversation(turns, request.system, prompt);
    const turn = newTurn(prompt, model);
    turns.push(turn);
    if (turns.length === 1) replace(this.#log);
    const view = this.#show(turn);
    this.#log.append(...view.nodes);
    view.nodes[0].scrollIntoView({ block: "nearest" });
    const isChat = this.#mode === "chat";
    try {
      if (!model) throw new Error("no model is chosen: pick one from the list, or paste a tinker:// path");
      const work = isChat
        ? chat({ ...request, model, messages }, (part) => view.add(part), signal)
        : complete({ ...request, model, prompt }, (part) => view.add(part), signal);
      await work;
      turn.state = "done";
    } catch (error) {
      turn.state = signal.aborted ? "stopped" : "failed";
      if (!signal.aborted) turn.error = { message: error.message, code: error.code };
    }
    view.finish();
  }

  /** Remove the last turn. Return its prompt, or null. */
  takeLast() {
    const turn = this.kept[this.#mode].pop();
    this.draw(this.#mode);
    return turn?.prompt ?? null;
  }

  #show(turn) {
    return new AnswerView(turn, this.#mode, this.#onswitch);
  }
}

/** Return the messages before an answer, without failed turns. */
function conversation(turns, system, prompt) {
  const said = turns
    .filter((turn) => turn.state !== "failed" && turn.text)
    .flatMap((turn) => [
      { role: "user", content: turn.prompt },
      { role: "assistant", content: turn.text },
    ]);
  return [...(system.trim() ? [{ role: "system", content: system }] : []), ...said, { role: "user", content: prompt }];
}

/** Render a turn: the prompt, the answer either as text or as shaded tokens, and its statistics. */
class AnswerView {
  constructor(turn, mode, onswitch) {
    this.#turn = turn;
    this.#onswitch = onswitch;
    this.#text = document.createTextNode(turn.text);
    this.#thought = document.createTextNode(turn.reasoning);
    this.#thoughts = h(
      "details",
      { class: "thoughts", hidden: !turn.reasoning },
      h("summary", null, "Thoughts"),
      h("div", null, this.#thought),
    );
    this.#tokens = new TokenView("Answer by tokens; arrow keys move from one to the next");
    this.#foot = h("footer", null);
    this.#answer = h(
      "article",
      { class: "answer" },
      h("h3", { title: turn.model }, shortName(turn.model)),
      h("div", { class: "answer-text" }, this.#thoughts, h("div", { class: "prose" }, this.#text)),
      this.#tokens.node,
      this.#foot,
    );
    this.nodes = [
      h(
        "article",
        { class: "asked" },
        h("h3", null, mode === "chat" ? "You" : "Prompt"),
        h("div", { class: "prose" }, turn.prompt),
      ),
      this.#answer,
    ];
    this.#tokens.add(turn.tokens);
    if (turn.state === "running") this.#answer.setAttribute("aria-busy", "true");
    else this.finish();
  }

  #turn;
  #onswitch;
  #text;
  #thought;
  #thoughts;
  #tokens;
  #answer;
  #foot;

  add({ text = "", reasoning = "", tokens = [], finish, usage }) {
    const turn = this.#turn;
    turn.text += text;
    turn.reasoning += reasoning;
    turn.tokens.push(...tokens);
    turn.finish ||= finish;
    turn.usage ||= usage;
    if (tokens.length) {
      turn.lastAt = performance.now();
      turn.firstAt ??= turn.lastAt;
      turn.numFirst ||= tokens.length;
    }
    this.#text.appendData(text);
    this.#thought.appendData(reasoning);
    this.#thoughts.hidden = !turn.reasoning;
    this.#tokens.add(tokens);
    replace(this.#foot, figures(turn));
  }

  finish() {
    const turn = this.#turn;
    this.#answer.removeAttribute("aria-busy");
    this.#tokens.finish();
    replace(
      this.#foot,
      turn.error && h("p", { class: "error-text", role: "alert" }, turn.error.message),
      turn.error?.code === "no_chat_template" && button("Complete text instead", this.#onswitch, { class: "small" }),
      figures(turn),
    );
  }
}

const MIN_SECONDS = 0.2; // for shorter streams, compute tokens per second over the whole request

/** Format the known token counts and throughput in one line. */
function figures(turn) {
  const count = turn.usage?.completion_tokens ?? turn.tokens.length;
  const seconds = (turn.lastAt - turn.firstAt) / 1000;
  const isStreamed = seconds > MIN_SECONDS && count > turn.numFirst;
  const speed = isStreamed ? (count - turn.numFirst) / seconds : (count * 1000) / (turn.lastAt - turn.beganAt);
  const words = [];
  if (turn.usage) {
    const cached = turn.usage.prompt_tokens_details?.cached_tokens;
    words.push(`prompt ${turn.usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`);
  }
  if (turn.lastAt !== null) {
    words.push(`${count} ${count === 1 ? "token" : "tokens"}`);
    if (count) words.push(`${short(Number(speed.toPrecision(3)))} tokens/s`);
    if (isStreamed) words.push(`first in ${span((turn.firstAt - turn.beganAt) / 1000)}`);
  }
  const ends = {
    length: "cut off at max tokens",
    stop: "ended",
    stopped: "stopped by you",
    failed: "failed",
  };
  const end = ends[turn.state === "done" ? turn.finish : turn.state];
  if (end) words.push(end);
  return words.length ? h("p", { class: "figures" }, words.join(" · ")) : null;
}

/** Shorten a model's name: for a checkpoint, its name and the end of its run's id. */
function shortName(model) {
  const found = /^tinker:\/\/([^/]+)\/[^/]+\/(.+)$/.exec(model);
  return found ? `${found[2]} (${shortRun(found[1])})` : model || "no model";
}
