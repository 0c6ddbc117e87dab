// The chat page: one conversation, streamed. Every text of people and models goes in as text, never as HTML.
"use strict";

const element = (id) => document.getElementById(id);
const session = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
let messages = [];
let running = null;

async function start() {
  const answer = await fetch("/v1/models");
  const known = answer.status !== 401;
  element("login").hidden = known;
  element("ask").hidden = !known;
  if (!known) { element("token").focus(); return; }
  const models = (await answer.json()).data.map((model) => model.id);
  element("model").replaceChildren(...models.map((id) => new Option(id, id)));
  element("model").disabled = models.length === 0;
  say(models.length ? "" : "No model is loaded yet.");
  element("text").focus();
}

function say(text, bad = false) {
  element("status").textContent = text;
  element("status").className = bad ? "error" : "";
}

function addTurn(role, text) {
  const turn = document.createElement("article");
  turn.className = `turn ${role}`;
  turn.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const body = document.createElement("pre");
  body.textContent = text;
  turn.append(body);
  element("log").append(turn);
  turn.scrollIntoView({ block: "end" });
  return turn;
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  const turn = addTurn("assistant", "");
  running = new AbortController();
  element("stop").hidden = false;
  element("send").disabled = true;
  say("");
  let answer = "", id = null, release = "";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Session-Id": session },
      body: JSON.stringify({ model: element("model").value, messages, stream: true }),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    release = response.headers.get("X-Hivetune-Release");
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      id = event.id;
      for (const choice of event.choices || []) answer += (choice.delta && choice.delta.content) || "";
      turn.firstChild.textContent = answer;
      turn.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else say(error.message, true);
  }
  running = null;
  element("stop").hidden = true;
  element("send").disabled = false;
  messages.push({ role: "assistant", content: answer });
  addMeta(turn, release, id);
  element("text").focus();
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function addMeta(turn, release, id) {
  const meta = document.createElement("div");
  meta.className = "meta";
  const label = document.createElement("span");
  label.textContent = release || "";
  meta.append(label);
  if (id) {
    for (const [rating, text] of [["up", "Good"], ["down", "Bad"]]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => rate(id, rating, meta, button));
      meta.append(button);
    }
  }
  turn.append(meta);
}

async function rate(id, rating, meta, button) {
  const response = await fetch("/v1/feedback", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ id, rating }),
  });
  if (!response.ok) { say((await response.json()).error.message, true); return; }
  for (const other of meta.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
  say("Thank you: the feedback is kept beside the answer.");
}

element("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const response = await fetch("/login", {
    method: "POST",
    headers: { Authorization: `Bearer ${element("token").value}` },
  });
  element("token").value = "";
  if (response.ok) start();
  else say((await response.json()).error.message, true);
});
element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("text").value.trim();
  if (!text || running) return;
  element("text").value = "";
  ask(text);
});
element("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("ask").requestSubmit();
  }
});
element("stop").addEventListener("click", () => running && running.abort());
element("new").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  element("log").replaceChildren();
  say("");
  element("text").focus();
});
start();
