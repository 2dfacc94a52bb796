// Sampled tokens as text, each shaded by how likely it was. What else was likely in its place is shown beside it, under
// the pointer and under the keyboard's focus alike. What a token says is the model's word: it is only ever text.

import { h, replace } from "./dom.js";

const LEVELS = [0.9, 0.7, 0.4, 0.15, 0.03];
const MIN_LOGPROB = -9999;
const scores = new WeakMap();

/** Tokens of a chat answer, from `logprobs.content` of a chunk: `{bytes, logprob, top: [{bytes, logprob}]}`. */
export function chatTokens(logprobs) {
  const token = ({ bytes, logprob }) => ({ bytes: Uint8Array.from(bytes), logprob });
  return (logprobs?.content || []).map((one) => ({ ...token(one), top: one.top_logprobs.map(token) }));
}

/** The same of a completion, whose tokens are named by their text, or by their bytes where they are no text. */
export function completionTokens(logprobs) {
  return (logprobs?.tokens || []).map((name, i) => ({
    bytes: bytesOf(name),
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] || {}).map(([other, logprob]) => ({
      bytes: bytesOf(other),
      logprob,
    })),
  }));
}

function bytesOf(name) {
  const codes = /^bytes:((?:\\x[0-9a-f]{2})+)$/.exec(name)?.[1].match(/[0-9a-f]{2}/g);
  return codes ? Uint8Array.from(codes, (code) => parseInt(code, 16)) : new TextEncoder().encode(name);
}

/**
 * A growing row of tokens. Characters that several tokens make up are one piece of text with the scores of them all.
 * One token is in the tab order; the arrow keys go on from there.
 */
export class TokenView {
  constructor(label) {
    this.node = h("div", {
      class: "tokens",
      role: "group",
      "aria-label": label,
      onpointerover: (event) => showTip(event.target),
      onpointerout: (event) => hideTip(event.target),
      onfocusin: (event) => showTip(event.target),
      onfocusout: (event) => hideTip(event.target),
      onkeydown: (event) => this.#move(event),
    });
    this.count = 0;
    this.#decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  }

  #decoder;
  #begun = [];

  add(tokens) {
    for (const token of tokens) {
      this.count += 1;
      this.#begun.push(token);
      const text = this.#decoder.decode(token.bytes, { stream: true });
      if (text) this.#show(text);
    }
  }

  /** A character that was begun and will not be completed is shown as such. */
  finish() {
    const text = this.#decoder.decode();
    if (this.#begun.length) this.#show(text);
  }

  #show(text) {
    const minLogprob = Math.min(...this.#begun.map((token) => token.logprob ?? NaN));
    const shade = Number.isNaN(minLogprob) ? "unscored" : `p${level(minLogprob)}`;
    const classes = ["token", shade, text.includes("\n") && "newline"];
    const piece = h(
      "span",
      { class: classes.filter(Boolean).join(" "), tabindex: this.node.firstChild ? "-1" : "0" },
      text,
    );
    scores.set(piece, this.#begun);
    this.#begun = [];
    this.node.append(piece);
  }

  #move(event) {
    const now = event.target.closest(".token");
    const next = {
      ArrowRight: now?.nextElementSibling,
      ArrowLeft: now?.previousElementSibling,
      Home: this.node.firstElementChild,
      End: this.node.lastElementChild,
    }[event.key];
    if (event.key === "Escape") hideTip(now);
    if (!next) return;
    event.preventDefault();
    now.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

/** How unlikely, from 0 (hardly a choice) to 5. */
function level(logprob) {
  const found = LEVELS.findIndex((bound) => Math.exp(logprob) >= bound);
  return found < 0 ? LEVELS.length : found;
}

/** What the shades mean. */
export function legend() {
  const bounds = LEVELS.map((bound) => Number((bound * 100).toPrecision(2)));
  const words = [...bounds.map((bound) => `${bound} %+`), `below ${bounds.at(-1)} %`];
  const shades = words.map((word, i) => h("span", { class: `token p${i}` }, word));
  return h("p", { class: "legend" }, "Probability of a token", shades);
}

// ── the note beside a token ─────────────────────────────────────────────────────────────────────────

let tip = null;
let shown = null; // the token it belongs to

function showTip(target) {
  const piece = target.closest?.(".token");
  const found = piece && scores.get(piece);
  if (!found) return;
  shown?.removeAttribute("aria-describedby");
  shown = piece;
  tip ||= h("div", { id: "token-tip", role: "tooltip" });
  replace(tip, found.map(scoreTable));
  piece.setAttribute("aria-describedby", tip.id);
  document.body.append(tip);
  place();
}

function hideTip(target) {
  shown?.removeAttribute("aria-describedby");
  shown = null;
  tip?.remove();
  const focused = document.activeElement;
  if (focused !== target) showTip(focused);
}

/** Below the token, or above where there is no room, within the window. A token that is gone takes it along. */
function place() {
  if (!shown) return;
  const [box] = shown.getClientRects();
  if (!box) return hideTip(shown);
  const { width, height } = tip.getBoundingClientRect();
  const isAbove = box.bottom + height + 12 > window.innerHeight && box.top > height + 12;
  tip.style.left = `${Math.max(8, Math.min(box.left, window.innerWidth - width - 8))}px`;
  tip.style.top = `${isAbove ? box.top - height - 6 : box.bottom + 6}px`;
}

function scoreTable(token) {
  if (token.logprob === null)
    return h("p", null, h("code", null, visible(token.bytes)), " the first token; nothing comes before it");
  const isChosen = (other) => String(other.bytes) === String(token.bytes);
  const others = token.top.some(isChosen) ? token.top : [token, ...token.top];
  const rows = [...others].sort((a, b) => b.logprob - a.logprob);
  return h(
    "table",
    null,
    h(
      "tbody",
      null,
      rows.map((other) =>
        h(
          "tr",
          { class: isChosen(other) ? "chosen" : null },
          h("td", null, h("code", null, visible(other.bytes))),
          h("td", { class: "number" }, chance(other.logprob)),
          h("td", { class: "number muted" }, other.logprob <= MIN_LOGPROB ? "-∞" : other.logprob.toFixed(3)),
        ),
      ),
    ),
  );
}

function chance(logprob) {
  const share = Math.exp(logprob) * 100;
  return share >= 0.01 || share === 0 ? `${share.toFixed(share < 1 ? 2 : 1)} %` : "< 0.01 %";
}

/** Bytes so that spaces and half characters can be seen. */
export function visible(bytes) {
  if (!bytes.length) return "(nothing)";
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    return text
      .replaceAll("\n", "↵")
      .replaceAll("\t", "⇥")
      .replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
  } catch {
    return Array.from(bytes, (byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }
}

window.addEventListener("scroll", place, { passive: true, capture: true });
