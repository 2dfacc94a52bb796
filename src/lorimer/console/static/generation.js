// Generates one answer through the OpenAI-compatible API: builds the request and parses the chunks of the stream. The
// playground renders them.

import { ApiError, post, stream } from "./api.js";
import { chatTokens, completionTokens } from "./tokens.js";

const NUM_TOP = 5;

/**
 * Request the next message after `messages`. Calls `onPart` with those of `{text, reasoning, tokens, finish, usage}`
 * that a chunk contains.
 */
export function chat({ model, messages, settings }, onPart, signal) {
  const body = { model, messages, ...sampling(settings), logprobs: true, top_logprobs: NUM_TOP, ...STREAMED };
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

/** Request the completion of `prompt`; with `scored`, the response starts with the prompt and its logprobs. */
export async function complete({ model, prompt, scored, settings }, onPart, signal) {
  const part = (choice) => ({ text: choice.text, tokens: completionTokens(choice.logprobs) });
  const body = { model, prompt, ...sampling(settings), logprobs: NUM_TOP };
  if (!scored) return follow("/v1/completions", { ...body, ...STREAMED }, part, onPart, signal);
  const {
    choices: [choice],
    usage,
  } = await post("/v1/completions", { ...body, echo: true }, signal);
  onPart({ ...part(choice), finish: choice.finish_reason, usage });
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
      const [choice] = data.choices;
      if (choice) onPart({ ...partOf(choice), finish: choice.finish_reason });
      if (data.usage) onPart({ usage: data.usage });
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

/** Unescape typed `\n`, `\t` and `\\`. */
function unescaped(text) {
  return text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}
