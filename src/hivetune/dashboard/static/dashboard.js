// Keeps a page up to date: it is fetched again, and its main part takes the place of the old one. Without this script the
// page reads the same. Texts of people and models were escaped by the server.
"use strict";

const LOOK_MS = 3000, OLD_AFTER_MS = 9000; // three answers that did not come
let timer = null, heard = Date.now(), shown = "";

function follow(after) { // a hidden page asks for nothing
  clearTimeout(timer);
  timer = document.hidden ? null : setTimeout(look, after);
}

async function look() {
  try {
    const response = await fetch(location.href, { signal: AbortSignal.timeout(OLD_AFTER_MS) });
    if (response.redirected) return location.reload(); // signed out: the login page
    const answer = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("content");
    if (answer.innerHTML !== shown) replace(document.getElementById("content"), answer.innerHTML);
    shown = answer.innerHTML;
    heard = Date.now();
  } catch { /* no answer, or no page: after a while the line below says so */ }
  const line = document.getElementById("connection"), when = new Date(heard).toLocaleTimeString();
  line.hidden = Date.now() - heard <= OLD_AFTER_MS;
  line.textContent = `The dashboard does not answer. What is shown here is of ${when}.`;
  if (line.hidden) document.querySelector(".when").textContent = `As it was at ${when}.`;
  follow(LOOK_MS);
}

function replace(old, html) {
  const open = new Set([...old.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
  const scrolled = [...old.querySelectorAll("ol, pre")].map((each) => each.scrollTop);
  old.innerHTML = html;
  for (const each of old.querySelectorAll("details > summary"))
    if (open.has(each.textContent)) each.parentElement.open = true;
  old.querySelectorAll("ol, pre").forEach((each, number) => { each.scrollTop = scrolled[number] || 0; });
}

if (document.body.dataset.live === "yes") {
  document.addEventListener("visibilitychange", () => follow(0));
  follow(LOOK_MS);
}

// Review by keyboard: keys choose a row and press its buttons; an act changes only its row.
const review = document.getElementById("review");
const rows = () => [...review.querySelectorAll("article.review")];
let current = 0;

function choose(number) {
  const all = rows();
  if (!all.length) return;
  current = Math.min(Math.max(number, 0), all.length - 1);
  all.forEach((each, place) => each.classList.toggle("current", place === current));
  all[current].focus();
  all[current].scrollIntoView({ block: "nearest" });
}

async function act(form, values, moved = false) {
  const body = new URLSearchParams({ ...Object.fromEntries(new FormData(form)), ...values });
  const said = document.getElementById("said");
  try {
    const response = await fetch(form.action, { method: "POST", body, headers: { Accept: "application/json" } });
    if (!response.ok) throw new Error(`it was refused (${response.status})`);
    const answer = await response.json();
    const old = document.getElementById(`row-${answer.id}`);
    if (old) old.outerHTML = answer.html;
    said.textContent = `${values.act} done`;
    choose(old && !moved ? rows().findIndex((each) => each.dataset.id === answer.id) : current);
  } catch (error) {
    said.textContent = `${values.act} was not done: ${error.message}`;
  }
}

function key(event) {
  const row = rows()[current], form = row && row.querySelector("form");
  if (event.target.tagName === "TEXTAREA") {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) act(form, { act: "correct" });
    else if (event.key === "Escape") choose(current);
    else return;
    return event.preventDefault();
  }
  if (event.ctrlKey || event.altKey || event.metaKey || /INPUT|SELECT/.test(event.target.tagName)) return;
  const acts = { u: "up", d: "down", s: "aside" };
  if (event.key === "j") choose(current + 1);
  else if (event.key === "k") choose(current - 1);
  else if (event.key === "n" && document.getElementById("next")) document.getElementById("next").click();
  else if (event.key === "z" && form) act(form, { act: "undo" });
  else if (event.key === "f" && row) row.querySelector("[data-act=forget]").click();
  else if (event.key === "c" && row && row.querySelector("details")) {
    row.querySelector("details").open = true;
    row.querySelector("textarea").focus();
  } else if (acts[event.key] && form) { // the next key means the next row, however long this takes
    choose(current + 1);
    act(form, { act: acts[event.key] }, true);
  } else return;
  event.preventDefault();
}

if (review) {
  document.addEventListener("keydown", key);
  review.addEventListener("submit", (event) => {
    event.preventDefault();
    choose(rows().indexOf(event.target.closest("article")));
    act(event.target, { act: event.submitter.value });
  });
  choose(0);
}
