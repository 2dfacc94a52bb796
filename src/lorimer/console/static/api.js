// The only module that calls the server: the public HTTP API, with the key of this browser. A rejected key dispatches
// the event `lorimer:signin`, for which app.js shows the sign-in page.

const KEY = "lorimer.key";

export class ApiError extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

export const key = () => localStorage.getItem(KEY) || "";

/** Persist a key for later visits; an empty one deletes it. */
export function setKey(value) {
  if (value) localStorage.setItem(KEY, value);
  else localStorage.removeItem(KEY);
}

export const get = (path, query, signal) => send("GET", withQuery(path, query), { signal });
export const post = (path, body, signal) => send("POST", path, { body, signal });
export const put = (path, body, signal) => send("PUT", path, { body, signal });
export const del = (path, signal) => send("DELETE", path, { signal });

/** Append query parameters to a path, except null, undefined and empty ones. */
export function withQuery(path, query) {
  const pairs = Object.entries(query || {}).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  return pairs.length ? `${path}?${new URLSearchParams(pairs.map(([name, value]) => [name, String(value)]))}` : path;
}

/** Escape one segment of a path, such as a name with slashes. */
export const part = (text) => encodeURIComponent(text);

/** Return the response as JSON (null if empty), or throw ApiError; `as` is "response" for the Response itself. */
export async function send(method, path, { body, signal, as, anonymousKey } = {}) {
  const response = await fetch(path, {
    method,
    signal,
    headers: headers(body, anonymousKey),
    body: body === undefined ? undefined : JSON.stringify(body),
    credentials: "omit",
    cache: "no-store",
  });
  if (!response.ok) throw await failure(response, anonymousKey !== undefined);
  if (as === "response") return response;
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

/** Validate a key without persisting it: return its user, or throw ApiError with status 401. */
export const tryKey = (candidate) => send("GET", "/api/v1/whoami", { anonymousKey: candidate });

/** POST and read server-sent events: call `onEvent({event, data})` for each; `data` is parsed, except "[DONE]". */
export async function stream(path, body, onEvent, signal) {
  const response = await send("POST", path, { body, signal, as: "response" });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) emit(block, onEvent);
  }
  if (rest.trim()) emit(rest, onEvent);
}

function emit(block, onEvent) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  if (!data.length) return;
  const text = data.join("\n");
  onEvent({ event, data: text === "[DONE]" ? text : JSON.parse(text) });
}

/**
 * Download a file under a name. Signed URLs need no key, so the browser fetches them itself and the page never holds a
 * large file in memory; for an API path that redirects to one, resolve the redirect first.
 */
export async function downloadSigned(path, name) {
  let address = new URL(path, location.href);
  if (!address.pathname.startsWith("/api/v1/downloads/")) {
    const asked = new AbortController();
    const response = await send("GET", address.pathname + address.search, { as: "response", signal: asked.signal });
    address = new URL(response.url);
    asked.abort();
  }
  const link = document.createElement("a");
  link.href = address.pathname + address.search;
  link.download = name;
  link.click();
}

function headers(body, anonymousKey) {
  const found = { accept: "application/json" };
  const shown = anonymousKey ?? key();
  if (!/^[\x21-\x7e]*$/.test(shown))
    throw new ApiError(401, "unauthorized", "a key consists of letters, digits and dashes");
  if (shown) found["x-api-key"] = shown;
  if (body !== undefined) found["content-type"] = "application/json";
  return found;
}

async function failure(response, isTrial) {
  let detail = `the server answered ${response.status}`;
  let code = "http_error";
  try {
    const body = await response.json();
    detail = body.detail || body.error?.message || detail;
    code = body.code || code;
  } catch {
    // A proxy may respond with an HTML page; the status is enough.
  }
  if (response.status === 401 && !isTrial) window.dispatchEvent(new CustomEvent("lorimer:signin", { detail }));
  return new ApiError(response.status, code, detail);
}
