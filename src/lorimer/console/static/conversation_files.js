// Conversations as JSON: kept in this browser for each user, exported to a file and imported. Everything read back is
// checked, because a file may come from anybody.

import { newAnswer, newFork } from "./conversation.js";

const FORMAT = "lorimer-conversation";
const STORED = "lorimer.conversation.";
const IMAGE = /^data:image\/(png|jpeg);base64,[A-Za-z0-9+/]+=*$/;
const STATES = new Set(["done", "stopped", "failed", "edited"]);
const MAX_DEPTH = 1000;
const TAB = "lorimer.tab";
const MAX_TABS = 8;

export const isImage = (url) => typeof url === "string" && IMAGE.test(url);

/** Return a document of the conversation; `detail` 2 has tokens and alternatives, 1 has tokens, 0 has texts only. */
export function toDocument({ mode, system, fork }, detail = 2) {
  return { format: FORMAT, version: 1, mode, system, fork: packFork(fork, detail) };
}

/** Check a document and return `{mode, system, fork}`; throw with the place of what is wrong. */
export function fromDocument(found) {
  check(found?.format === FORMAT, `the file is not a conversation: its format is not "${FORMAT}"`);
  check(found.version === 1, `the version of the file is ${JSON.stringify(found.version)}; 1 is accepted`);
  check(["chat", "complete"].includes(found.mode), "mode must be chat or complete");
  check(typeof found.system === "string", "system must be a text");
  return { mode: found.mode, system: found.system, fork: unpackFork(found.fork, "fork", 0) };
}

/**
 * Keep both conversations of a tab in this browser, with less detail if there is no room. Return whether it worked.
 * Every tab has its own, so that none overwrites those of another; those of the tabs used last are kept.
 */
export function keep(user, conversations) {
  const used = conversations.filter(({ fork }) => fork.turns.length);
  const own = nameOf(user, tabId());
  if (!used.length) {
    localStorage.removeItem(own);
    return true;
  }
  for (const { name } of stored(user).filter((one) => one.name !== own).slice(MAX_TABS - 1)) localStorage.removeItem(name);
  for (const detail of [2, 1, 0]) {
    try {
      const documents = used.map((one) => toDocument(one, detail));
      localStorage.setItem(own, JSON.stringify({ at: Date.now(), conversations: documents }));
      return true;
    } catch (error) {
      if (error.name !== "QuotaExceededError") throw error;
    }
  }
  return false;
}

/** Return the conversations that `keep` stored for this tab; a new tab begins with a copy of those used last. */
export function recall(user) {
  const isNew = !sessionStorage.getItem(TAB);
  const found = stored(user);
  const own = isNew ? found[0] : found.find(({ name }) => name === nameOf(user, tabId()));
  try {
    return (own?.conversations || []).map(fromDocument);
  } catch {
    return [];
  }
}

const nameOf = (user, tab) => `${STORED}${user}.${tab}`;

/** Return what all tabs of a user have stored, the newest first. */
function stored(user) {
  return Object.keys(localStorage)
    .filter((name) => name.startsWith(`${STORED}${user}.`) || name === STORED + user)
    .map((name) => ({ name, ...parsed(localStorage.getItem(name)) }))
    .sort((a, b) => b.at - a.at);
}

function parsed(text) {
  try {
    const found = JSON.parse(text);
    return Array.isArray(found) ? { at: 0, conversations: found } : { at: Number(found.at) || 0, conversations: found.conversations };
  } catch {
    return { at: 0, conversations: [] };
  }
}

/** Return the id of this tab, which outlives a reload. */
function tabId() {
  if (!sessionStorage.getItem(TAB)) sessionStorage.setItem(TAB, randomId());
  return sessionStorage.getItem(TAB);
}

const randomId = () => Array.from(crypto.getRandomValues(new Uint32Array(2)), (one) => one.toString(36)).join("");

/** A duplicated tab has a copy of the id: the tab that was there first says so, and the other is a new one. */
function watchCopies() {
  const page = randomId();
  const channel = new BroadcastChannel("lorimer.tabs");
  channel.onmessage = ({ data }) => {
    if (data.taken === page) sessionStorage.removeItem(TAB);
    else if (data.page && data.tab === sessionStorage.getItem(TAB)) channel.postMessage({ taken: data.page });
  };
  channel.postMessage({ page, tab: sessionStorage.getItem(TAB) });
}

watchCopies();

/** Delete the conversations of every user; called when somebody signs out. */
export function forgetAll() {
  for (const name of Object.keys(localStorage)) if (name.startsWith(STORED)) localStorage.removeItem(name);
}

// ── packing ─────────────────────────────────────────────────────────────────────────────────────────

const KEPT = ["model", "side", "text", "reasoning", "numPrompt", "finish", "usage", "error", "state"];
const TIMES = ["beganAt", "firstAt", "lastAt", "numFirst"];

const packFork = ({ turns, shown }, detail) => ({ shown, turns: turns.map((turn) => packTurn(turn, detail)) });

const packTurn = ({ prompt, images, batches, shown }, detail) => ({
  prompt,
  images,
  shown,
  batches: batches.map(({ answers, chosen }) => ({ chosen, answers: answers.map((one) => packAnswer(one, detail)) })),
});

function packAnswer(answer, detail) {
  const packed = Object.fromEntries([...KEPT, ...TIMES].map((name) => [name, answer[name]]));
  packed.tokens = detail > 0 ? answer.tokens.map((token) => packToken(token, detail)) : [];
  packed.next = packFork(answer.next, detail);
  return packed;
}

/** Pack a token to `[text, logprob, [[text, logprob], ...]]`; bytes that are not valid text are a list of numbers. */
function packToken({ bytes, logprob, top }, detail) {
  const pair = (one) => [textOf(one.bytes), one.logprob === null ? null : Number(one.logprob.toFixed(4))];
  return [...pair({ bytes, logprob }), detail > 1 ? top.map(pair) : []];
}

function textOf(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return [...bytes];
  }
}

function unpackFork(found, where, depth) {
  check(depth < MAX_DEPTH, `${where} is deeper than ${MAX_DEPTH} turns`);
  check(Array.isArray(found?.turns), `${where}.turns must be a list`);
  const turns = found.turns.map((turn, i) => unpackTurn(turn, `${where}.turns[${i}]`, depth));
  return { ...newFork(), turns, shown: turns.length ? index(found.shown, turns, `${where}.shown`) : 0 };
}

function unpackTurn(found, where, depth) {
  check(typeof found?.prompt === "string", `${where}.prompt must be a text`);
  const images = found.images ?? [];
  check(Array.isArray(images) && images.every(isImage), `${where}.images must be data URLs of PNG or JPEG files`);
  check(Array.isArray(found.batches) && found.batches.length > 0, `${where}.batches must be a list with answers`);
  const batches = found.batches.map((batch, i) => {
    const here = `${where}.batches[${i}]`;
    check(Array.isArray(batch?.answers) && batch.answers.length > 0, `${here}.answers must be a list with answers`);
    const answers = batch.answers.map((one, k) => unpackAnswer(one, `${here}.answers[${k}]`, depth));
    return { answers, chosen: index(batch.chosen, answers, `${here}.chosen`) };
  });
  return { prompt: found.prompt, images, batches, shown: index(found.shown, batches, `${where}.shown`) };
}

function unpackAnswer(found, where, depth) {
  for (const name of ["model", "text"]) check(typeof found?.[name] === "string", `${where}.${name} must be a text`);
  const answer = newAnswer(found.model, found.side === 1 ? 1 : 0);
  answer.text = found.text;
  answer.reasoning = typeof found.reasoning === "string" ? found.reasoning : "";
  answer.state = STATES.has(found.state) ? found.state : "stopped";
  answer.finish = typeof found.finish === "string" ? found.finish : null;
  if (typeof found.usage?.prompt_tokens === "number") answer.usage = found.usage;
  if (typeof found.error?.message === "string") answer.error = { message: found.error.message, code: found.error.code };
  answer.numPrompt = Number.isInteger(found.numPrompt) ? found.numPrompt : 0;
  for (const name of TIMES) answer[name] = typeof found[name] === "number" ? found[name] : null;
  answer.tokens = (Array.isArray(found.tokens) ? found.tokens : []).map((one, i) => unpackToken(one, `${where}.tokens[${i}]`));
  answer.next = unpackFork(found.next ?? newFork(), `${where}.next`, depth + 1);
  return answer;
}

function unpackToken(found, where) {
  const pair = (one) => {
    check(Array.isArray(one), `${where} must be a list`);
    check(one[1] === null || typeof one[1] === "number", `${where} must have a logprob or null`);
    return { bytes: bytesOf(one[0], where), logprob: one[1] };
  };
  return { ...pair(found), top: (found[2] ?? []).map(pair) };
}

function bytesOf(found, where) {
  if (typeof found === "string") return new TextEncoder().encode(found);
  check(Array.isArray(found) && found.every((one) => one >= 0 && one < 256), `${where} must be a text or bytes`);
  return Uint8Array.from(found);
}

function index(value, list, where) {
  check(Number.isInteger(value) && value >= 0 && value < list.length, `${where} must be 0 to ${list.length - 1}`);
  return value;
}

function check(isRight, message) {
  if (!isRight) throw new Error(message);
}
