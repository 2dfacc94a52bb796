// Named lists of prompts, kept in this browser for each user: parsing, storing and running them with a bounded number of
// requests at a time.

import { answer, meanLogprob } from "./generation.js";

const STORED = "lorimer.prompts.";
const MAX_PROMPTS = 1000;
const MAX_RUNNING = 4; // requests at a time: a set must not crowd out other users of the server
const MAX_TRIES = 6;
const ROLES = ["system", "user", "assistant"];

/** Return the sets of a user, texts by name. */
export function loadSets(user) {
  try {
    const found = JSON.parse(localStorage.getItem(STORED + user)) || {};
    return new Map(Object.entries(found).filter(([, text]) => typeof text === "string"));
  } catch {
    return new Map();
  }
}

/** Store the sets of a user; throws if the browser has no room. */
export function storeSets(user, sets) {
  if (sets.size) localStorage.setItem(STORED + user, JSON.stringify(Object.fromEntries(sets)));
  else localStorage.removeItem(STORED + user);
}

/**
 * Parse a set to lists of messages. A text whose first line starts with `{` is JSONL with `prompt` or `messages` in each
 * line, any other has one prompt per line. Throw with the number of a line that is neither.
 */
export function parsePrompts(text) {
  const lines = text.split(/\r?\n/).map((line, i) => ({ line: line.trim(), number: i + 1 }));
  const used = lines.filter(({ line }) => line);
  if (!used.length) throw new Error("the set has no prompts: write one per line, or upload a file");
  if (used.length > MAX_PROMPTS) throw new Error(`the set has ${used.length} prompts; at most ${MAX_PROMPTS} are accepted`);
  if (!used[0].line.startsWith("{")) return used.map(({ line }) => [{ role: "user", content: line }]);
  return used.map(({ line, number }) => parseRow(line, number));
}

function parseRow(line, number) {
  let row;
  try {
    row = JSON.parse(line);
  } catch {
    throw new Error(`line ${number} is not JSON`);
  }
  if (typeof row?.prompt === "string") return [{ role: "user", content: row.prompt }];
  const isMessage = (one) => ROLES.includes(one?.role) && typeof one.content === "string";
  if (Array.isArray(row?.messages) && row.messages.length && row.messages.every(isMessage))
    return row.messages.map(({ role, content }) => ({ role, content }));
  throw new Error(`line ${number} has neither a text "prompt" nor "messages" with a role and a text each`);
}

/** Return the text of a prompt as it is shown: its last message, and how many come before. */
export function promptText(messages) {
  const before = messages.length - 1;
  return `${messages.at(-1).content}${before ? ` (after ${before} ${before === 1 ? "message" : "messages"})` : ""}`;
}

/** Run every job, a few at a time. Each sets `job.result`, and calls `onDone(job)`; those after an abort are not begun. */
export async function runJobs(jobs, { settings, system }, onDone, signal) {
  const waiting = [...jobs];
  const work = async () => {
    while (waiting.length && !signal.aborted) {
      const job = waiting.shift();
      job.result = await resultOf(job, settings, system, signal);
      if (job.result) onDone(job);
    }
  };
  await Promise.all(Array.from({ length: MAX_RUNNING }, work));
}

async function resultOf({ model, messages }, settings, system, signal) {
  const hasSystem = !system.trim() || messages[0].role === "system";
  const sent = hasSystem ? messages : [{ role: "system", content: system }, ...messages];
  try {
    if (!model) throw new Error("no model is chosen");
    const { text, finish, tokens } = await patiently(() => answer({ model, messages: sent, settings }, signal), signal);
    return { text, finish, numTokens: tokens.length, meanLogprob: meanLogprob(tokens) };
  } catch (error) {
    return signal.aborted ? null : { error: error.message };
  }
}

/** Repeat a request that the rate limit refused, after 1, 2, 4, ... seconds. */
async function patiently(request, signal) {
  for (let tries = 1; ; tries++) {
    try {
      return await request();
    } catch (error) {
      if (error.status !== 429 || tries === MAX_TRIES || signal.aborted) throw error;
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, 500 * 2 ** tries);
        signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
      });
    }
  }
}

/** Return the results as JSONL: a line for each prompt with the answers of all models. */
export function toLines(rows) {
  const shown = ({ model, result }) => ({
    model,
    text: result?.text ?? null,
    finish_reason: result?.finish ?? null,
    num_tokens: result?.numTokens ?? null,
    mean_logprob: result?.meanLogprob ?? null,
    error: result?.error ?? null,
  });
  return rows.map(({ messages, jobs }) => `${JSON.stringify({ messages, answers: jobs.map(shown) })}\n`);
}
