// The server that has sent this page, and no other. Addresses are relative, so a prefix in front is kept.

const KEY = "epdg-api-key"; // of sessionStorage: until the tab is closed

export class ApiError extends Error {
  /** `fields`: OpenAI's error object. `retryAfter`: seconds, or null. */
  constructor(status, fields, retryAfter = null) {
    super(fields?.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.param = fields?.param ?? null;
    this.code = fields?.code ?? null;
    this.retryAfter = retryAfter;
  }

  /** The same request may succeed later, or with a key. */
  get isTemporary() {
    return [0, 401, 429, 503].includes(this.status);
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** Connections that fail raise a TypeError, as mistakes in a script do: from here on it has a name. */
function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError(0, { message: "The server cannot be reached. Is `epdg serve` still running?" });
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const always = { headers, cache: "no-store", redirect: "error" };
  const response = await fetch(path, { ...options, ...always }).catch(lost);
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error, response.headers.get("retry-after"));
}

export const getJson = async (path, signal) => (await request(path, { signal })).json();

/** Chunks of a streamed chat completion, the timeline among them. Raises ApiError, also in mid-stream. */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", "x-epdg-ledger": "1" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(response.status, chunk.error);
    yield chunk;
  }
  throw new ApiError(response.status, { message: "the connection ended before the answer did" });
}

/** The data of server-sent events. An event ends with an empty line, which may lie across two reads. */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(lost);
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {}); // the reader of this generator has stopped, or the connection is gone
  }
}

/** An error in words that help. `names`: of the request's files, in order. */
export function explain(error, names = []) {
  if (!(error instanceof ApiError)) return error.message;
  const message = sentence(error.message).replace(/^Item (\d+)/, (all, idx) => names[idx] ?? all);
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : " Try again in a moment.";
  switch (error.status) {
    case 401:
      return key.get() ? `The API key was refused. ${message}` : "This server asks for an API key.";
    case 413:
      return `The files are too large. ${message}`;
    case 429:
      return error.code === "rate_limit_exceeded"
        ? `This API key has reached its limit. ${message}${wait}`
        : `The cluster has more requests than it can serve in time. ${message}${wait}`;
    case 503:
      return `No worker could take the request. ${message}${wait} The pools show what is missing.`;
    default:
      return error.param ? `${message} (Field: ${error.param})` : message;
  }
}

const sentence = (text) => text.replace(/^./, (first) => first.toUpperCase()).replace(/[^.!?]$/, "$&.");
