// The page: its current part, the bar above it, and the keyboard.
import { h, fill, link, address, state, text, number, dollars, when, short, table, selectable } from "./dom.js";
import { get, isReport, listen } from "./source.js";
import { overview } from "./overview.js";
import { rows } from "./rows.js";
import { row } from "./row.js";
import { timeline } from "./timeline.js";
import { compare } from "./compare.js";
import { control } from "./control.js";

const PARTS = { overview, rows, row, timeline, control };
const TABS = [["overview", "Overview"], ["rows", "Rows"], ["timeline", "Timeline"], ["control", "Control"]];
const place = document.getElementById("page"), top_bar = document.getElementById("bar");
let shown = null; // the current part: { page, news, leave, keys }. It draws in a page of its own, also when another part is shown by then.

const remembered = safely(() => localStorage.getItem("batch-agent-theme"));
if (remembered) document.documentElement.dataset.theme = remembered;

function safely(read) {
  try { return read(); } catch { return null; }
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  safely(() => localStorage.setItem("batch-agent-theme", root.dataset.theme));
  if (shown && shown.redraw) shown.redraw();
}

function bar(key, part, run) {
  const stage = key && key.includes("/") ? key.split("/") : null;
  const names = key ? (stage ? [[stage[0], stage[0]], [key, stage[1]]] : [[key, key]]) : [];
  fill(top_bar,
    h("nav", { class: "where" },
      isReport ? h("b", null, "Batch Agent") : link("/", h("b", null, "Batch Agent")),
      names.map(([id, name]) => [h("i", null, "/"), link(address("run", id), text(name))]),
      h("span", { id: "state" }, run ? state(run.state) : null)),
    key ? h("nav", { class: "tabs" }, TABS.filter(([name]) => !isReport || name !== "control").map(([name, title]) =>
      h("a", { href: "#" + address("run", key, name), class: part === name || (part === "row" && name === "rows") ? "on" : null }, title)),
      isReport ? null : h("a", { href: `/review?${new URLSearchParams({ run: key })}` }, "Review")) : null,
    h("button", { class: "plain", title: "light or dark", onclick: theme, "aria-label": "light or dark" }, "◐"));
}

async function open() {
  const [kind, ...rest] = location.hash.replace(/^#\/?/, "").split("?")[0].split("/").map(decodeURIComponent);
  if (shown) {
    if (shown.events) shown.events.close();
    if (shown.leave) shown.leave();
  }
  shown = { page: h("div"), news: [] };
  const mine = shown;
  fill(place, mine.page);
  try {
    if (kind === "run") await openRun(mine, rest[0], rest[1] || "overview", rest[2]);
    else if (kind === "compare") {
      bar(null);
      Object.assign(mine, await compare(mine.page, rest[0], rest[1]));
    } else await openList(mine);
  } catch (error) {
    if (mine !== shown) return;
    const begins = kind === "run" && error.message.includes("holds no run");
    fill(mine.page, h("p", { class: begins ? "quiet" : "error" }, begins ? "The run has not started." : text(error.message)));
    if (begins) mine.events = listen("events", { run: rest[0] }, (news) => { if (news.state !== "not begun") open(); });
  }
}

async function openRun(mine, key, part, detail) {
  bar(key, part, null);
  document.title = `${key} · ${part} · Batch Agent`;
  const context = {
    key, detail, page: mine.page,
    go: (...parts) => { location.hash = address("run", key, ...parts); },
    onNews: (hear) => mine.news.push(hear),
    onState: (name) => { const word = document.getElementById("state"); if (word && mine === shown) fill(word, state(name)); },
  };
  Object.assign(mine, await (PARTS[part] || overview)(context));
  if (mine !== shown) { if (mine.leave) mine.leave(); return; }
  mine.events = listen("events", { run: key }, (news) => {
    context.onState(news.alive && news.status ? news.status.state : news.state);
    mine.news.forEach((hear) => hear(news));
  });
}

async function openList(mine) {
  bar(null);
  document.title = "Runs · Batch Agent";
  const { runs, named } = await get("runs");
  if (mine !== shown) return;
  if (isReport && named.length === 2) { location.replace("#" + address("compare", ...named)); return; }
  if (isReport || (named.length === 1 && runs.length === 1)) { location.replace("#" + address("run", runs[0].key)); return; }
  const picked = new Set();
  const button = h("button", { disabled: true, onclick: () => { location.hash = address("compare", ...picked); } }, "Compare two");
  const lines = runs.map((run) => h("tr", { class: "opens", onclick: (event) => { if (event.target.type !== "checkbox") location.hash = address("run", run.key); } },
    h("td", null, h("input", { type: "checkbox", "aria-label": "compare", onchange: (event) => {
      event.target.checked ? picked.add(run.key) : picked.delete(run.key);
      button.disabled = picked.size !== 2;
    } })),
    h("td", null, link(address("run", run.key), text(run.name))), h("td", null, state(run.state)),
    h("td", { class: "r" }, run.ok === undefined ? "" : number(run.ok + run.failed) + (run.total ? ` of ${number(run.total)}` : "")),
    h("td", { class: "r" }, run.failed ? h("span", { class: "bad" }, number(run.failed)) : "–"),
    h("td", { class: "r" }, short(run.tokens)), h("td", { class: "r" }, dollars(run.cost, run.cost_is_minimum)),
    h("td", { class: "quiet" }, run.started ? when(run.started) : text(run.why || "")), h("td", { class: "quiet" }, text(run.model || ""))));
  fill(mine.page, h("div", { class: "line" }, h("h1", null, "Runs"), h("span", { class: "grow" }), button),
    table(["", "run", "state", ["rows", "r"], ["failed", "r"], ["tokens", "r"], ["cost", "r"], "started", "model"], lines, { class: "rows" }));
  mine.keys = selectable(lines, (line) => line.click());
}

document.addEventListener("keydown", (event) => {
  const writing = /INPUT|SELECT|TEXTAREA/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (writing && event.key === "Escape") event.target.blur();
  if (writing || event.metaKey || event.ctrlKey || event.altKey || !shown) return;
  const own = shown.keys && shown.keys[event.key];
  if (own) { own(event); event.preventDefault(); }
  else if (event.key === "Escape" && location.hash.split("/").length > 3) history.back();
});
addEventListener("hashchange", open);
// The token stays in a cookie. It is removed from the URL, so that a copied URL does not contain it.
if (location.search.includes("token=")) history.replaceState(null, "", location.pathname + location.hash);
open();
