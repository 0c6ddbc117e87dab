// The chat page: one conversation, streamed. Every text of people and models goes in as text, never as HTML.
"use strict";

const element = (id) => document.getElementById(id);
const newSession = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
let talk = { session: newSession(), messages: [], running: null };
let defaults = {}; // of each model: what the gateway adds, and the system prompt that it was trained with
let captured = false; // whether the gateway keeps answers, so that feedback has something to join

async function start() {
  const answer = await fetch("/v1/models");
  const known = answer.status !== 401;
  element("login").hidden = known;
  element("ask").hidden = element("new").hidden = element("pick").hidden = !known;
  if (!known) { element("token").focus(); return; }
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const served = (await answer.json()).data;
  const models = served.map((model) => model.id);
  defaults = Object.fromEntries(served.map((model) => [model.id, model.defaults || {}]));
  element("model").replaceChildren(...models.map((id) => new Option(id, id)));
  element("model").disabled = models.length === 0;
  const health = await (await fetch("/health")).json();
  captured = Boolean(health.capture);
  say(models.length ? "" : ["No model is loaded yet.", ...(health.problems || [])].join(" "), models.length === 0);
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
  body.dir = "auto";
  body.textContent = text;
  turn.append(body);
  element("log").append(turn);
  turn.scrollIntoView({ block: "end" });
  return turn;
}

function show(running) {
  element("stop").hidden = !running;
  element("send").hidden = running;
  element("log").setAttribute("aria-busy", String(running));
}

async function ask(text) {
  const mine = talk; // "New chat" may come while this is answered
  const question = { role: "user", content: text };
  const trained = (defaults[element("model").value] || {}).system;
  const first = trained ? [{ role: "system", content: trained }] : [];
  const asked = addTurn("user", text);
  const turn = addTurn("assistant", "");
  mine.running = new AbortController();
  show(true);
  say("");
  let answer = "", id = null, release = "", whole = false;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Session-Id": mine.session },
      body: JSON.stringify({ model: element("model").value, messages: [...first, ...mine.messages, question], stream: true }),
      signal: mine.running.signal,
    });
    if (response.status === 401) await start(); // the token was revoked: sign in with another one
    if (!response.ok) throw new Error((await response.json()).error.message);
    release = response.headers.get("X-Hivetune-Release");
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      id = event.id;
      for (const choice of event.choices || []) answer += (choice.delta && choice.delta.content) || "";
      turn.firstChild.textContent = answer;
      turn.scrollIntoView({ block: "end" });
    }
    whole = true;
  } catch (error) {
    if (mine === talk) say(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
  }
  mine.running = null;
  if (mine !== talk) return;
  show(false);
  if (whole || answer) {
    mine.messages.push(question, { role: "assistant", content: answer });
    addMeta(turn, release, whole && captured ? id : null);
  } else { // nothing was said: the question goes back to where it can be sent again
    asked.remove();
    turn.remove();
    element("text").value ||= text;
  }
  element("text").focus();
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection was lost in the middle of the answer.");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith(":")) continue; // a comment
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
  turn.scrollIntoView({ block: "end" });
}

async function rate(id, rating, meta, button) {
  try {
    const response = await fetch("/v1/feedback", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ id, rating }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
  } catch (error) {
    say(error.message, true);
    return;
  }
  for (const other of meta.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
  say("Thank you: the feedback is kept beside the answer.");
}

element("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const response = await fetch("/login", {
    method: "POST",
    headers: { Authorization: `Bearer ${encodeURIComponent(element("token").value.trim())}` },
  });
  element("token").value = "";
  if (response.ok) start();
  else say((await response.json()).error.message, true);
});
element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("text").value.trim();
  if (!text || talk.running) return;
  element("text").value = "";
  ask(text);
});
element("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("ask").requestSubmit();
  }
});
element("stop").addEventListener("click", () => talk.running && talk.running.abort());
element("new").addEventListener("click", () => {
  if (talk.running) talk.running.abort();
  talk = { session: newSession(), messages: [], running: null };
  show(false);
  element("log").replaceChildren();
  say("");
  element("text").focus();
});
start().catch((error) => say(error.message, true));
