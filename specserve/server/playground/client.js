// Calls of the server's API: its models, and streamed answers.

export class ApiTrouble extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Returns whether the server drafts; true for a load balancer that does not tell.
export async function hasDrafts(key) {
  const found = await call("server_info", { headers: headers(key) }).then((response) => response.json(), () => null);
  return !found || found.speculative_algorithm !== "NONE";
}

export async function modelNames(key) {
  const response = await call("v1/models", { headers: headers(key) });
  return (await response.json()).data.map((model) => model.id);
}

// Yields what each event has of {text, reasoning, runs, pieces, calls, finish, usage}; the others are undefined.
export async function* streamChat(request, key, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "content-type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, return_speculation: true }),
    signal,
  });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    yield read(JSON.parse(data));
  }
  throw new ApiTrouble("The connection was lost before the answer was complete.");
}

function read(chunk) {
  if (chunk.error) throw new ApiTrouble(chunk.error.message);
  const choice = chunk.choices[0] ?? {};
  return {
    text: choice.delta?.content ?? undefined,
    reasoning: choice.delta?.reasoning_content ?? undefined,
    runs: choice.speculation?.runs,
    pieces: choice.speculation?.pieces,
    calls: choice.delta?.tool_calls,
    finish: choice.finish_reason ?? undefined,
    usage: chunk.usage ?? undefined,
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch(brokenOff);
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6); // others are comments
  }
}

function brokenOff(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiTrouble("The connection was lost before the answer was complete.");
}

const headers = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function call(path, options) {
  const response = await fetch(path, options).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new ApiTrouble("The server can’t be reached. Is it running?");
  });
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  if (response.status === 401) return new ApiTrouble("The server requires an API key: enter it in the settings.", 401);
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  return new ApiTrouble(message[0].toUpperCase() + message.slice(1), response.status);
}
