// One rollout as people read it: facts, then its turns with rewards, tool calls, logs and errors in between. Sampled
// text is shaded by logprob or advantage. All text is untrusted and rendered as text only.

import { badge, facts, h, short, span } from "./dom.js";
import { TokenView, legend } from "./tokens.js";

const MAX_CHARS = 20_000; // of a turn, before the rest is folded
export const SHADES = [
  ["", "not shaded"],
  ["logprob", "shaded by logprob"],
  ["advantage", "shaded by advantage"],
];

/** Build a mark with a reward, coloured by its place between the least and the greatest one. */
export function rewardChip(reward, edges, name = "reward") {
  if (reward === null || reward === undefined) return h("span", { class: "reward-chip" }, "–");
  const [low, high] = edges?.length ? [edges[0], edges.at(-1)] : [reward, reward];
  const place = high > low ? Math.min(Math.max((reward - low) / (high - low), 0), 1) : 0.5;
  return h("span", { class: `reward-chip r${Math.round(place * 4)}`, title: `${name} ${reward}` }, short(reward));
}

export const isSampled = (turn) => Boolean(turn.logprobs) || turn.role === "assistant";

/** Return the turns before the first sampled one, and the others. */
export function split(turns) {
  const first = turns.findIndex(isSampled);
  return first < 0 ? [turns, []] : [turns.slice(0, first), turns.slice(first)];
}

/** Build the facts of a rollout. */
export function rolloutFacts(rollout) {
  const { reward_parts: parts = {}, seconds = {}, logs = {} } = rollout.content;
  const each = (values) =>
    Object.entries(values)
      .map(([name, value]) => `${name} ${typeof value === "number" ? short(value) : value}`)
      .join(", ");
  return facts([
    ["Reward", rollout.reward === null ? null : short(rollout.reward, 2)],
    ["Of which", each(parts)],
    ["Advantage", rollout.advantage === null ? null : short(rollout.advantage, 2)],
    ["Stopped by", rollout.stop_reason],
    ["Sampled tokens", rollout.num_tokens === null ? null : short(rollout.num_tokens)],
    [
      "Time",
      Object.entries(seconds)
        .map(([name, value]) => `${name} ${span(value)}`)
        .join(", "),
    ],
    ["Tags", rollout.tags.join(", ")],
    ["Logs", each(logs)],
  ]);
}

/** Build what went wrong, or nothing. */
export function rolloutErrors({ content: { errors = [] } }) {
  return errors.length > 0 && h("ul", { class: "rollout-errors" }, errors.map((text) => h("li", null, text)));
}

/** Build all turns. `options`: `shade`, and `edges` of the histogram. */
export function turnList(turns, rollout, options) {
  return h(
    "ol",
    { class: "turns" },
    turns.map((turn) => turnItem(turn, rollout, options)),
  );
}

function turnItem(turn, rollout, { shade, edges }) {
  const logs = Object.entries(turn.logs || {});
  return h(
    "li",
    { class: isSampled(turn) ? "turn sampled" : "turn" },
    h(
      "header",
      { class: "row turn-head" },
      h("b", null, turn.role),
      turn.tokens && h("span", { class: "muted" }, `${short(turn.tokens.length)} tokens`),
      typeof turn.seconds === "number" && h("span", { class: "muted" }, span(turn.seconds)),
      turn.stop_reason && turn.stop_reason !== "stop" && badge("warn", turn.stop_reason),
      typeof turn.reward === "number" && [h("span", { class: "muted" }, "reward"), rewardChip(turn.reward, edges)],
    ),
    isSampled(turn) ? sampledText(turn, rollout, shade) : plainText(turn.content),
    (turn.tool_calls || []).map(toolCall),
    logs.length > 0 && h("div", { class: "turn-logs" }, facts(logs.map(([name, value]) => [name, String(value)]))),
  );
}

function toolCall(call) {
  return h(
    "div",
    { class: call.error ? "tool-call failed" : "tool-call" },
    h("code", null, h("b", null, call.name || "not a call"), ` ${call.arguments || ""}`),
    h("pre", null, call.error ?? call.result ?? ""),
  );
}

/** Build a text; what is very long is shown when asked for. */
function plainText(text) {
  if (text.length <= MAX_CHARS) return h("div", { class: "prose turn-text" }, text);
  return h(
    "div",
    { class: "prose turn-text" },
    text.slice(0, MAX_CHARS),
    h("details", null, h("summary", null, `${short(text.length - MAX_CHARS)} more characters`), text.slice(MAX_CHARS)),
  );
}

function sampledText(turn, rollout, shade) {
  const values = shade === "logprob" ? turn.logprobs : shade === "advantage" ? advantagesOf(turn, rollout) : null;
  if (!values || !turn.offsets) return plainText(turn.content);
  const pieces = piecesOf(turn);
  if (shade === "logprob") {
    const view = new TokenView("Sampled tokens, shaded by probability");
    const encoder = new TextEncoder();
    view.add(pieces.map((text, i) => ({ bytes: encoder.encode(text), logprob: values[i], top: [] })));
    view.finish();
    view.node.classList.add("turn-text");
    return view.node;
  }
  const largest = Math.max(...values.map((value) => Math.abs(value ?? 0))) || 1;
  return h(
    "div",
    { class: "tokens turn-text" },
    pieces.map((text, i) => text && h("span", { class: advantageClass(values[i], largest), title: titleOf(values[i]) }, text)),
  );
}

const titleOf = (value) => (value === null ? "no advantage" : `advantage ${short(value, 2)}`);

/** Cut the content of a turn where its tokens begin; offsets count code points. */
function piecesOf({ content, offsets }) {
  const chars = Array.from(content);
  return offsets.map((begin, i) => chars.slice(i ? begin : 0, offsets[i + 1] ?? chars.length).join(""));
}

function advantagesOf(turn, rollout) {
  if (turn.advantages) return turn.advantages;
  return rollout.advantage === null || !turn.tokens ? null : turn.tokens.map(() => rollout.advantage);
}

function advantageClass(value, largest) {
  const level = Math.ceil((Math.abs(value ?? 0) / largest) * 4);
  return level ? `token ${value > 0 ? "gain" : "loss"}${level}` : "token";
}

/** Build the legend of a shade, or nothing. */
export function shadeLegend(shade) {
  if (shade === "logprob") return legend();
  if (shade !== "advantage") return null;
  const words = [
    ["loss4", "most negative"],
    ["loss2", "negative"],
    ["gain2", "positive"],
    ["gain4", "most positive"],
  ];
  return h("p", { class: "legend" }, "Advantage of a token", words.map(([name, word]) => h("span", { class: `token ${name}` }, word)));
}
