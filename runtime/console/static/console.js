/* What a page can do better with a script: stay fresh without a jump, follow a session as it speaks, and be used by
   keyboard. Without it every page is readable, and every form works. */
"use strict";

const main = () => document.getElementById("main");

/* Fresh: the page is asked for again and only what differs is changed, so nothing that is read or typed moves. */
async function refresh() {
  const at = document.activeElement;
  const busy = document.hidden || document.querySelector("dialog[open]") || (at && at.matches("input, textarea, select"));
  if (busy || !main().dataset.live) return;
  try {
    const answer = await fetch(location.href, { headers: { "X-Refresh": "1" } });
    if (answer.redirected && answer.url.includes("/login")) return location.assign(answer.url);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
    if (!fresh) return;
    Idiomorph.morph(main(), fresh, {
      ignoreActiveValue: true,
      callbacks: {
        beforeNodeMorphed: (old) => !(old.nodeType === 1 && old.hasAttribute("data-keep")),
        beforeAttributeUpdated: (name, node) => !(name === "open" && node.tagName === "DETAILS"),
      },
    });
    mark(row);
    document.documentElement.removeAttribute("data-stale");
  } catch {
    document.documentElement.setAttribute("data-stale", "");
  }
}

/* What the model says, as it comes. */
function follow() {
  const talk = document.querySelector("[data-stream]");
  if (!talk) return;
  const source = new EventSource(`${talk.dataset.stream}?after=${talk.dataset.after}`);
  const soon = { timer: 0 };
  const again = () => {
    clearTimeout(soon.timer);
    soon.timer = setTimeout(refresh, 150);
  };
  let text = null;
  source.addEventListener("model.delta", (event) => {
    const { step, data } = JSON.parse(event.data);
    if (!text || text.dataset.step !== String(step)) {
      const article = document.createElement("article");
      article.className = "model fresh";
      const head = document.createElement("header");
      head.textContent = `model · step ${step}`;
      text = document.createElement("div");
      text.className = "text";
      text.dataset.step = step;
      article.append(head, text);
      talk.append(article);
    }
    text.textContent += data.text;
  });
  for (const type of ["message.accepted", "message.completed", "tool.requested", "tool.started", "tool.settled",
    "tool.approval_required", "tool.outcome_unknown", "step.completed", "step.retrying", "step.failed", "session.idle",
    "session.failed", "session.paused", "session.cancelled", "session.completed"])
    source.addEventListener(type, () => { text = null; again(); });
  addEventListener("pagehide", () => source.close());
}

/* Keyboard: / finds, j and k choose a row, Enter opens it, g and a letter goes to a page, ? says all of this. */
let row = -1;
let went = 0;
const rows = () => [...document.querySelectorAll("[data-row]")];

function mark(at) {
  const all = rows();
  all.forEach((one, index) => one.classList.toggle("at", index === at));
  if (all[at]) all[at].scrollIntoView({ block: "nearest" });
}

addEventListener("keydown", (event) => {
  const at = document.activeElement;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (at && at.matches("input, textarea, select")) {
    if (event.key === "Escape") at.blur();
    return;
  }
  if (went && Date.now() - went < 1500) {
    const link = document.querySelector(`.side nav a[data-key="${event.key}"]`);
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
    row = Math.max(0, Math.min(all.length - 1, row + (event.key === "j" ? 1 : -1)));
    mark(row);
  } else if (event.key === "Enter" && all[row] && (!at || at === document.body)) {
    const link = all[row].querySelector("a");
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
follow();
setInterval(refresh, 3000);
