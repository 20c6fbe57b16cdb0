/* What a page can do better with a script: stay fresh without a jump, follow a session as it speaks, and be used by
   keyboard. Without it every page is readable, and every form works. */
"use strict";

const main = () => document.getElementById("main");

/* Fresh: the page is asked for again and only what differs is changed, so nothing that is read or typed moves. */
const stale = document.getElementById("stale");
let asking = false;
let heard = new Date();

async function refresh() {
  const at = document.activeElement;
  const busy = document.hidden || document.querySelector("dialog[open]") || (at && at.matches("input, textarea, select"));
  if (busy || asking || !main().dataset.live) return;
  asking = true;
  try {
    const answer = await fetch(location.href, { headers: { "X-Refresh": "1" } });
    if (answer.redirected && answer.url.includes("/login")) return location.assign(answer.url);
    if (!answer.ok && answer.status !== 503) throw new Error(answer.status);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
    if (!fresh) throw new Error("no page");
    Idiomorph.morph(main(), fresh, {
      callbacks: {
        beforeNodeMorphed: (old) => !(old.nodeType === 1 && old.hasAttribute("data-keep")),
        beforeNodeRemoved: (old) => !(old.nodeType === 1 && old.matches(".flash[data-keep]")),
        beforeAttributeUpdated: (name, node) => !(name === "open" && node.tagName === "DETAILS"),
      },
    });
    if (chosen) chosen.classList.add("at");
    heard = new Date();
    stale.hidden = true;
  } catch {
    stale.querySelector("span").textContent = `at ${heard.toLocaleTimeString()}`;
    stale.hidden = false;
  } finally {
    asking = false;
  }
}

/* What the model says, as it comes; while the page is in sight, for a browser has few connections for all its pages. */
const TELLING = ["message.accepted", "message.completed", "tool.requested", "tool.started", "tool.settled",
  "tool.approval_required", "tool.outcome_unknown", "step.completed", "step.retrying", "step.failed", "session.idle",
  "session.failed", "session.paused", "session.cancelled", "session.completed"];
const OVER = ["session.cancelled", "session.completed"];
let source = null;
let speaking = null;
let soon = 0;

function follow() {
  const talk = document.querySelector("[data-stream]");
  if (!talk || source || document.hidden) return;
  source = new EventSource(`${talk.dataset.stream}?after=${talk.dataset.after}`);
  source.addEventListener("model.delta", (event) => say(talk, JSON.parse(event.data)));
  for (const type of TELLING)
    source.addEventListener(type, () => {
      if (OVER.includes(type)) silence();
      speaking = null;
      clearTimeout(soon);
      soon = setTimeout(refresh, 150);
    });
}

function say(talk, { step, data }) {
  if (!speaking?.isConnected || speaking.dataset.step !== String(step))
    speaking = talk.querySelector(`.text[data-step="${Number(step)}"]`);
  if (!speaking) {
    const article = document.createElement("article");
    article.className = "model fresh";
    const head = document.createElement("header");
    head.textContent = `model · step ${step}`;
    speaking = document.createElement("div");
    speaking.className = "text";
    speaking.dataset.step = step;
    article.append(head, speaking);
    talk.append(article);
  }
  speaking.textContent = data.offset ? speaking.textContent + data.text : data.text; // else it begins, maybe anew
}

function silence() {
  if (source) source.close();
  source = null;
}

addEventListener("pagehide", silence);
addEventListener("pageshow", follow);
document.addEventListener("visibilitychange", async () => {
  if (document.hidden) return silence();
  await refresh();
  follow();
});

/* Keyboard: / finds, j and k choose a row, Enter opens it, g and a letter goes to a page, ? says all of this. */
let chosen = null; // a row; it stays the one however the rows move
let went = 0;
const rows = () => [...document.querySelectorAll("[data-row]")];

function choose(one) {
  if (chosen) chosen.classList.remove("at");
  chosen = one;
  chosen?.classList.add("at");
  chosen?.scrollIntoView({ block: "nearest" });
}

addEventListener("keydown", (event) => {
  const at = document.activeElement;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (at && at.matches("input, textarea, select")) {
    if (event.key === "Escape") at.blur();
    return;
  }
  if (went && Date.now() - went < 1500) {
    const link = document.querySelector(`.side nav a[data-key="${CSS.escape(event.key)}"]`);
    went = 0;
    if (link) return link.click();
  }
  const all = rows();
  if (event.key === "g") went = Date.now();
  else if (event.key === "/") {
    const find = document.querySelector("[data-find]");
    if (find) { event.preventDefault(); find.focus(); find.select(); }
    else location.assign(document.querySelector('.side nav a[data-key="s"]').href + "?find=1");
  } else if (event.key === "j" || event.key === "k") {
    choose(all[Math.max(0, Math.min(all.length - 1, all.indexOf(chosen) + (event.key === "j" ? 1 : -1)))]);
  } else if (event.key === "Enter" && chosen?.isConnected && !at?.matches("a, button, summary")) {
    const link = chosen.querySelector("a");
    if (link) link.click();
  } else if (event.key === "?") {
    const help = document.getElementById("help");
    if (help.open) help.close(); else help.showModal();
  }
});

document.getElementById("theme")?.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === "dark" ||
    (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
});
document.getElementById("keys")?.addEventListener("click", () => document.getElementById("help").showModal());
document.getElementById("shut")?.addEventListener("click", () => document.getElementById("help").close());
if (new URLSearchParams(location.search).has("find")) document.querySelector("[data-find]")?.focus();
document.querySelector(".side [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
follow();
setInterval(refresh, 3000);
