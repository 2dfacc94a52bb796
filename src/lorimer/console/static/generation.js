// One answer of a model, asked for over the OpenAI-compatible API: what is sent, and what the chunks of a stream say.
// Nothing here is shown; the playground passes on what comes.

import { ApiError, post, stream } from "./api.js";
import { chatTokens, completionTokens } from "./tokens.js";

const NUM_TOP = 5;

/**
 * Ask for the next message after `messages`. `onPart` is given `{text, reasoning, tokens, finish, usage}`, each of them
 * only where a chunk has it.
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

/** Ask for the continuation of `prompt`; with `scored`, the prompt comes back before it, with its own probabilities. */
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

/** Parameters as the API has them; a field that was left empty is left out. */
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

/** `\n`, `\t` and `\\` as one types them. */
function unescaped(text) {
  return text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}
