// What the chat page and the arena share. Every text from a person or a model enters a page through textContent or
// value, never as markup.
const at = (id) => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "max_tokens"];

function element(parent, kind, text) {
  const made = document.createElement("div");
  made.className = kind;
  made.textContent = text;
  parent.append(made);
  return made;
}

// Each tab has a copy of its own, which survives a reload. A new tab starts with the copy that was stored last.
function store(name, value) {
  const settings = Object.fromEntries(SETTINGS.map((id) => [id, at(id).value]));
  const text = JSON.stringify({ ...value, settings });
  try { sessionStorage.setItem(name, text); localStorage.setItem(name, text); }
  catch { at("problem").textContent = "The browser could not store this page. A reload will lose it."; }
}

function restored(name) {
  let saved = {};
  try { saved = JSON.parse(sessionStorage.getItem(name) ?? localStorage.getItem(name)) || {}; } catch { saved = {}; }
  for (const id of SETTINGS) if (typeof saved.settings?.[id] === "string") at(id).value = saved.settings[id];
  at("key").value = sessionStorage.getItem("zerochat.key") || "";
  return saved;
}

// The messages of a request that ask `user` after `turns` of [question, answer], and the sampling settings.
function requestOf(turns, user) {
  const messages = at("system").value.trim() ? [{ role: "system", content: at("system").value }] : [];
  for (const [question, answer] of turns)
    messages.push({ role: "user", content: question }, { role: "assistant", content: answer });
  const body = { messages: [...messages, { role: "user", content: user }] };
  for (const id of SETTINGS.slice(1)) if (at(id).value !== "") body[id] = Number(at(id).value);
  return body;
}

async function call(path, options = {}) {
  const key = at("key").value;
  const headers = { ...(key ? { Authorization: "Bearer " + key } : {}), ...(options.body ? { "Content-Type": "application/json" } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) at("settings").open = true;
  const body = await response.json().catch(() => null);
  const problem = new Error(body?.error?.message || "The server answered with status " + response.status + ".");
  throw Object.assign(problem, { code: body?.error?.code });
}

const post = (path, body, signal) => call(path, { method: "POST", body: JSON.stringify(body), signal });

// The JSON events of a streamed response. Throws the error that an event has.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "", part; !(part = await reader.read()).done;) {
    const events = (held + part.value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const content = JSON.parse(data);
      if (content.error) throw new Error(content.error.message);
      yield content;
    }
  }
}

// Show the text of an answer, and follow its end if the reader is there.
function show(shown, text) {
  const box = document.querySelector("main");
  const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  shown.textContent = text;
  if (follows) box.scrollTop = box.scrollHeight;
}

function wire(send, saved, keyChanged) {
  document.querySelector("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  at("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  for (const id of SETTINGS) at(id).addEventListener("change", saved);
  at("key").addEventListener("change", () => { sessionStorage.setItem("zerochat.key", at("key").value); keyChanged(); });
}
