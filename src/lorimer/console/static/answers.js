// One answer of the playground, shown while it streams in: as text or as shaded tokens, with its statistics. Model
// output is rendered as text only.

import { meanLogprob } from "./generation.js";
import { button, h, replace, short, span } from "./dom.js";
import { TokenView } from "./tokens.js";

/** Renders an answer into `node`. `name` is the readable name of its model, `actions` are buttons below it. */
export class AnswerView {
  constructor(answer, { name, actions = [], onswitch }) {
    this.#answer = answer;
    this.#onswitch = onswitch;
    this.#text = document.createTextNode(answer.text);
    this.#thought = document.createTextNode(answer.reasoning);
    this.#thoughts = h(
      "details",
      { class: "thoughts", hidden: !answer.reasoning },
      h("summary", null, "Thoughts"),
      h("div", null, this.#thought),
    );
    this.#tokens = new TokenView("Answer by tokens; arrow keys move from one to the next");
    this.#foot = h("div", { class: "answer-foot" });
    const isEdited = answer.state === "edited";
    this.node = h(
      "article",
      { class: isEdited ? "answer edited" : "answer" },
      h("h3", { title: answer.model }, isEdited ? `${name}, edited by you` : name),
      h("div", { class: "answer-text" }, this.#thoughts, h("div", { class: "prose" }, this.#text)),
      this.#tokens.node,
      this.#foot,
      h("footer", { class: "row" }, actions),
    );
    this.#tokens.add(answer.tokens);
    if (answer.state === "running") this.node.setAttribute("aria-busy", "true");
    else this.finish();
  }

  #answer;
  #onswitch;
  #text;
  #thought;
  #thoughts;
  #tokens;
  #foot;

  add({ text = "", reasoning = "", tokens = [], finish, usage }) {
    const answer = this.#answer;
    answer.text += text;
    answer.reasoning += reasoning;
    answer.tokens.push(...tokens);
    answer.finish ||= finish;
    answer.usage ||= usage;
    if (tokens.length) {
      answer.lastAt = performance.now();
      answer.firstAt ??= answer.lastAt;
      answer.numFirst ||= tokens.length;
    }
    this.#text.appendData(text);
    this.#thought.appendData(reasoning);
    this.#thoughts.hidden = !answer.reasoning;
    this.#tokens.add(tokens);
    replace(this.#foot, figures(answer));
  }

  finish() {
    const answer = this.#answer;
    this.node.removeAttribute("aria-busy");
    this.node.classList.toggle("untokened", !answer.tokens.length);
    this.#tokens.finish();
    replace(
      this.#foot,
      answer.error && h("p", { class: "error-text", role: "alert" }, answer.error.message),
      answer.error?.code === "no_chat_template" && button("Complete text instead", this.#onswitch, { class: "small" }),
      figures(answer),
    );
  }
}

const MIN_SECONDS = 0.2; // for shorter streams, compute tokens per second over the whole request
const ENDS = {
  length: "cut off at max tokens",
  stop: "ended",
  stopped: "stopped by you",
  failed: "failed",
};

/** Format the known token counts, throughput and mean logprob in one line. */
function figures(answer) {
  const sampled = answer.tokens.slice(answer.numPrompt);
  const count = answer.usage?.completion_tokens ?? sampled.length;
  const seconds = (answer.lastAt - answer.firstAt) / 1000;
  const isStreamed = seconds > MIN_SECONDS && count > answer.numFirst;
  const speed = isStreamed ? (count - answer.numFirst) / seconds : (count * 1000) / (answer.lastAt - answer.beganAt);
  const mean = meanLogprob(sampled);
  const words = [];
  if (answer.usage) {
    const cached = answer.usage.prompt_tokens_details?.cached_tokens;
    words.push(`prompt ${answer.usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`);
  }
  if (answer.lastAt !== null) {
    words.push(`${count} ${count === 1 ? "token" : "tokens"}`);
    if (count) words.push(`${short(Number(speed.toPrecision(3)))} tokens/s`);
    if (isStreamed) words.push(`first in ${span((answer.firstAt - answer.beganAt) / 1000)}`);
  }
  if (mean !== null) words.push(`mean logprob ${mean.toFixed(2)}`);
  const end = ENDS[answer.state === "done" ? answer.finish : answer.state];
  if (end) words.push(end);
  return words.length ? h("p", { class: "figures" }, words.join(" · ")) : null;
}
