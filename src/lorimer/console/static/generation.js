// Generates answers through the OpenAI-compatible API: builds the request and parses the chunks of the stream. The
// playground renders them.

import { ApiError, post, stream } from "./api.js";
import { chatTokens, completionTokens } from "./tokens.js";

const NUM_TOP = 5;
export const MAX_SAMPLES = 16;

/**
 * Request `n` answers to `messages`. Calls `onPart(index, part)` with those of `{text, reasoning, tokens, finish}` that a
 * chunk contains, and `onPart(null, {usage})` with the tokens of all answers together.
 */
export function chat({ model, messages, n = 1, settings }, onPart, signal) {
  const body = { model, messages, n, ...sampling(settings), logprobs: true, top_logprobs: NUM_TOP, ...STREAMED };
  return follow(
    "/v1/chat/completions",
    body,
    (choice) => ({
      text: choice.delta.content || "",
      reasoning: choice.delta.reasoning_content || "",
      tokens: chatTokens(choice.logprobs),
    }),
    onPart,
    signal,
  );
}

/** Request `n` completions of `prompt`; with `scored`, each starts with the prompt and its logprobs. */
export async function complete({ model, prompt, n = 1, scored, settings }, onPart, signal) {
  const part = (choice) => ({ text: choice.text, tokens: completionTokens(choice.logprobs) });
  const body = { model, prompt, n, ...sampling(settings), logprobs: NUM_TOP };
  if (!scored) return follow("/v1/completions", { ...body, ...STREAMED }, part, onPart, signal);
  const { choices, usage } = await post("/v1/completions", { ...body, echo: true }, signal);
  for (const choice of choices) onPart(choice.index, { ...part(choice), finish: choice.finish_reason });
  onPart(null, { usage });
}

/** Request one answer without a stream: `{text, finish, tokens}`. */
export async function answer({ model, messages, settings }, signal) {
  const body = { model, messages, ...sampling(settings), logprobs: true };
  const { choices } = await post("/v1/chat/completions", body, signal);
  const [{ message, finish_reason: finish, logprobs }] = choices;
  return { text: message.content || "", finish, tokens: chatTokens(logprobs) };
}

const STREAMED = { stream: true, stream_options: { include_usage: true } };

async function follow(path, body, partOf, onPart, signal) {
  let isDone = false;
  await stream(
    path,
    body,
    ({ data }) => {
      if (data === "[DONE]") {
        isDone = true;
        return;
      }
      if (data.error) throw new ApiError(200, data.error.code, data.error.message);
      for (const choice of data.choices) onPart(choice.index, { ...partOf(choice), finish: choice.finish_reason });
      if (data.usage) onPart(null, { usage: data.usage });
    },
    signal,
  );
  if (!isDone) throw new ApiError(0, "connection_lost", "the connection ended before the answer did");
}

/** Convert settings to API parameters, without empty fields. */
export function sampling(settings) {
  const body = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const text = String(settings[name] ?? "").trim();
    if (text !== "") body[name] = Number(text);
  }
  const stop = settings.stop.split("\n").filter(Boolean).map(unescaped);
  if (stop.length) body.stop = stop;
  return body;
}

/** Return the number of samples, or throw if it is not one that the playground shows. */
export function numSamples(text) {
  const count = Number(String(text).trim() || "1");
  if (!Number.isInteger(count) || count < 1 || count > MAX_SAMPLES)
    throw new Error(`the number of samples is ${JSON.stringify(text)}; 1 to ${MAX_SAMPLES} are accepted`);
  return count;
}

/** Return the mean logprob of sampled tokens, or null if there are none. */
export function meanLogprob(tokens) {
  const known = tokens.filter((token) => token.logprob !== null);
  return known.length ? known.reduce((sum, token) => sum + token.logprob, 0) / known.length : null;
}

/** Unescape typed `\n`, `\t` and `\\`. */
function unescaped(text) {
  return text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}
