// Shows sampled tokens as text, shaded by probability. A tooltip lists the most likely alternatives of the token under
// the pointer or the keyboard focus. Token text is untrusted model output and is rendered as text only.

import { h, replace } from "./dom.js";

const LEVELS = [0.9, 0.7, 0.4, 0.15, 0.03];
const MIN_LOGPROB = -9999;
const scores = new WeakMap();

/** Parse tokens of a chat answer from `logprobs.content` of a chunk: `{bytes, logprob, top: [{bytes, logprob}]}`. */
export function chatTokens(logprobs) {
  const token = ({ bytes, logprob }) => ({ bytes: Uint8Array.from(bytes), logprob });
  return (logprobs?.content || []).map((one) => ({ ...token(one), top: one.top_logprobs.map(token) }));
}

/** Parse tokens of a completion, given by their text, or by their bytes if they are not valid text. */
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
 * A growing row of tokens. Tokens that form one character together are one piece with all their scores. One token is in
 * the tab order; the arrow keys move from there.
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

  /** Flush an incomplete character. */
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

/** Return the shade of a logprob, from 0 (most likely) to 5. */
function level(logprob) {
  const found = LEVELS.findIndex((bound) => Math.exp(logprob) >= bound);
  return found < 0 ? LEVELS.length : found;
}

/** Build the legend of the shades. */
export function legend() {
  const bounds = LEVELS.map((bound) => Number((bound * 100).toPrecision(2)));
  const words = [...bounds.map((bound) => `${bound} %+`), `below ${bounds.at(-1)} %`];
  const shades = words.map((word, i) => h("span", { class: `token p${i}` }, word));
  return h("p", { class: "legend" }, "Probability of a token", shades);
}

// ── the tooltip of a token ──────────────────────────────────────────────────────────────────────────

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

/** Place the tooltip below the token, or above if there is no room, within the window; hide it if the token is gone. */
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

/** Format bytes so that spaces and partial characters are visible. */
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
