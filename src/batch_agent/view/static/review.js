// The review: a row, the form of its answer, and the keyboard. It asks the review's part of the API alone.
import { h, fill, text, value, number, doubted } from "./dom.js";

const KEYED = 9, AGAIN = 3000; // classes with a key of their own; milliseconds between two looks for new rows
const run = new URLSearchParams(location.search).get("run");
const page = document.getElementById("page"), bar = document.getElementById("bar");
let form = null, who = "", shown = null, draft = {}, at = 0, editing = false, search = null, busy = false, said = "", failed = false, timer = null, title = run;
let numbers = { left: {}, lines: [] };

function safely(act) {
  try { return act(); } catch { return null; }
}

async function ask(what, body) {
  const query = new URLSearchParams({ run, ...(body ? {} : { who }) });
  const response = await fetch(`/api/review${what}?${query}`, body && {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ who, ...body }),
  });
  const answer = await response.json().catch(() => ({ error: `status ${response.status}` }));
  if (!response.ok) throw new Error(answer.error || `status ${response.status}`);
  return answer;
}

// Classes and booleans can be chosen by a key; in the audit only fields that are judged.
function chosen() {
  const all = form.fields.filter((field) => field.choices.length);
  const judged = all.filter((field) => field.judged);
  return shown && shown.queue === "audit" && judged.length ? judged : all;
}

const field = () => chosen()[at] || null;
const label = (choice) => (typeof choice === "string" ? choice : JSON.stringify(choice));
const output = () => (form.whole ? draft[form.fields[0].name] : draft);

function found() {
  const choices = field() ? field().choices : [];
  if (search === null) return choices;
  const typed = search.toLowerCase(), has = choices.filter((choice) => label(choice).toLowerCase().includes(typed));
  const begins = (choice) => label(choice).toLowerCase().startsWith(typed);
  return [...has.filter(begins), ...has.filter((choice) => !begins(choice))];
}

function begin(answer) {
  clearTimeout(timer);
  numbers = answer;
  shown = answer.row;
  [draft, at, editing, search] = [{}, 0, false, null];
  if (shown && shown.model && shown.model.output !== null && shown.model.output !== undefined) {
    for (const each of form.fields) {
      const own = form.whole ? shown.model.output : shown.model.output[each.name];
      if (own !== undefined) draft[each.name] = own;
    }
  }
  if (!shown) timer = setTimeout(() => act(() => ask("/next", {})), AGAIN);
  scrollTo(0, 0);
}

async function act(asks, words) {
  if (busy) return;
  busy = true;
  try {
    const answer = await asks();
    said = answer.disputed ? "Two people differ about that row: a third decides." : words || "";
    failed = false;
    begin(answer);
  } catch (error) { // the row stays until its answer is recorded
    said = error.message;
    failed = true;
  }
  busy = false;
  draw();
}

const judge = (kind) => shown && act(() => ask("/judge", {
  row: shown.row, queue: shown.queue, input: shown.input, kind, output: kind === "answer" ? output() : null,
}));
const undo = () => act(() => ask("/undo", {}), "Your latest judgement is undone.");

function choose(choice) {
  draft[field().name] = choice;
  search = null;
  if (chosen().length === 1 && !missing().length) { judge("answer"); return; }
  at = (at + 1) % chosen().length;
  draw();
}

function missing() {
  const judged = form.fields.filter((each) => each.judged), needed = shown.queue === "audit" && judged.length ? judged : form.fields;
  return needed.filter((each) => draft[each.name] === undefined && !(shown.queue === "repair" && each.nullable)).map((each) => each.name);
}

function give() {
  if (!shown) return;
  if (editing && !read()) return;
  const lacks = missing();
  if (!lacks.length) { judge("answer"); return; }
  [said, failed] = [`${lacks.join(", ")}: no value yet. Choose one, or press e to edit.`, true];
  draw();
}

// Editing

function read() {
  for (const input of page.querySelectorAll("[data-field]")) {
    const own = form.fields.find((each) => each.name === input.dataset.field);
    if (input.value === "" && own.kind !== "text") { delete draft[own.name]; continue; }
    if (input.value === "" && draft[own.name] === undefined) continue;
    try {
      if (own.choices.length) draft[own.name] = own.choices[Number(input.value)];
      else if (own.kind === "json") draft[own.name] = JSON.parse(input.value);
      else if (own.kind === "integer" || own.kind === "number") draft[own.name] = Number(input.value);
      else draft[own.name] = input.value;
    } catch (error) {
      [said, failed] = [`${own.name} is no JSON: ${error.message}`, true];
      draw();
      return false;
    }
  }
  return true;
}

function editor(own) {
  const now = draft[own.name], attributes = { "data-field": own.name, "aria-label": own.name };
  if (own.choices.length) {
    const place = own.choices.findIndex((choice) => JSON.stringify(choice) === JSON.stringify(now));
    const options = own.choices.map((choice, each) => h("option", { value: each }, text(label(choice))));
    const input = h("select", attributes, h("option", { value: "" }, "–"), options);
    options.forEach((option, each) => { option.value = each; option.selected = each === place; });
    return input;
  }
  const plain = now === undefined || now === null ? "" : typeof now === "string" && own.kind !== "json" ? now : JSON.stringify(now, null, 1);
  if (own.kind === "integer" || own.kind === "number") {
    return h("input", { ...attributes, type: "number", step: own.kind === "integer" ? 1 : "any", value: plain });
  }
  return h("textarea", { ...attributes, rows: own.judged ? 1 : 4, value: plain });
}

// Drawing

function draw() {
  drawBar();
  if (!who) { drawName(); return; }
  if (!shown) { drawEnd(); return; }
  const files = shown.files.map((file) => {
    const source = `/api/review/file?${new URLSearchParams({ run, who, row: shown.row, number: file.number })}`;
    const picture = file.type.startsWith("image/");
    return h("figure", { class: "attached" },
      picture ? h("a", { href: source, target: "_blank" }, h("img", { src: source, alt: file.name })) : h("iframe", { src: source, title: file.name }),
      h("figcaption", null, h("a", { href: source, target: "_blank" }, text(file.field), ": ", text(file.name))));
  });
  fill(page, h("div", { class: "columns review" },
    h("section", { class: "panel given-row" }, h("h2", null, text(shown.id), h("small", null, shown.queue)), value(shown.value), files),
    h("div", null, shown.model ? model() : null, answer(),
      h("p", { class: failed ? "bad note" : "quiet note", role: "status" }, text(said)))));
  const first = editing && page.querySelector("[data-field]"), typing = page.querySelector("input[type=search]");
  if (first && !page.contains(document.activeElement)) first.focus();
  if (search !== null && typing) { typing.focus(); typing.setSelectionRange(search.length, search.length); }
}

function model() {
  const own = shown.model, earlier = own.earlier || [];
  return h("section", { class: "panel" }, h("h2", null, "The model", own.doubt === null || own.doubt === undefined ? null : h("small", null, "doubt ", doubted(own.doubt))),
    own.error ? h("p", { class: "bad" }, text(own.error, 2000)) : null,
    own.output !== null && own.output !== undefined ? value(own.output) : own.text ? h("pre", { class: "said" }, text(own.text, 20000)) : null,
    earlier.map((each) => h("details", null, h("summary", null, text(each.name)), each.output === null ? text(JSON.stringify(each.error)) : value(each.output))));
}

function answer() {
  const own = field(), choices = found(), many = own && own.choices.length > KEYED;
  const buttons = own && !editing ? h("ol", { class: "classes" }, choices.slice(0, many && search === null ? KEYED : 40).map((choice, place) =>
    h("li", null, h("button", { class: JSON.stringify(draft[own.name]) === JSON.stringify(choice) ? "on" : null, onclick: () => choose(choice) },
      place < KEYED ? h("kbd", null, place + 1) : null, text(label(choice)))))) : null;
  const seeker = many && !editing ? h("input", { type: "search", placeholder: `${own.choices.length} classes: type to search`, value: search || "", "aria-label": "search a class",
    oninput: (event) => { search = event.target.value; draw(); } }) : null;
  const rest = form.fields.filter((each) => each !== own && draft[each.name] !== undefined);
  return h("section", { class: "panel" }, h("h2", null, "Your answer"),
    editing ? h("dl", { class: "fields" }, form.fields.map((each) => [h("dt", null, text(each.name)), h("dd", null, editor(each), each.description ? h("small", { class: "quiet" }, text(each.description)) : null)]))
      : [own ? h("p", null, h("b", null, text(own.name)), own.description ? [" ", h("small", { class: "quiet" }, text(own.description))] : null) : null, seeker, buttons,
        rest.length ? h("dl", { class: "fields" }, rest.map((each) => [h("dt", null, text(each.name)), h("dd", null, value(draft[each.name]))])) : null],
    h("div", { class: "line acts" },
      key("Enter", "give", give), key("e", editing ? "stop editing" : "edit", edit), key("x", "no right answer", () => judge("none")),
      key("s", "skip", () => judge("skip")), key("u", "undo", undo)));
}

const key = (name, words, does) => h("button", { onclick: does }, h("kbd", null, name), words);

function edit() {
  if (!shown) return;
  if (editing && !read()) return;
  editing = !editing;
  draw();
}

function drawBar() {
  const left = Object.entries(numbers.left || {}).filter(([, each]) => each.yours);
  fill(bar, h("nav", { class: "where" }, h("b", null, "Review"), h("i", null, "/"), h("span", null, text(title))),
    h("span", { class: "grow" }),
    who ? h("span", { id: "left" }, left.length ? left.map(([queue, each]) => h("span", { class: "count" }, h("b", null, number(each.yours)), ` left in the ${queue}`)) : "nothing left for you") : null,
    who ? h("button", { class: "plain", title: "another name", onclick: rename }, text(who)) : null);
}

function drawEnd() {
  fill(page, h("section", { class: "panel end" }, h("h2", null, "No row is left for you"),
    numbers.works ? h("p", null, "The run works: rows that end appear here.") : null,
    numbers.models_have_work ? h("p", null, "The models have work again: whoever runs them can resume the run.") : null,
    (numbers.lines || []).map((line) => h("p", { class: "quiet" }, text(line))),
    h("div", { class: "line acts" }, key("u", "undo", undo)),
    said ? h("p", { class: failed ? "bad" : "quiet" }, text(said)) : null));
}

function drawName() {
  const input = h("input", { type: "text", "aria-label": "your name", maxlength: 80, autofocus: true });
  fill(page, h("form", { class: "panel end", onsubmit: (event) => { event.preventDefault(); named(input.value); } },
    h("h2", null, "Your name"), h("p", { class: "quiet" }, "It is recorded with each of your answers."),
    h("div", { class: "line" }, input, h("button", null, "Begin")), said ? h("p", { class: "bad" }, text(said)) : null));
  input.focus();
}

async function named(name) {
  who = name.trim();
  if (!who) return;
  await act(() => ask("/next", {}));
  if (failed && !shown) { who = ""; draw(); return; }
  safely(() => localStorage.setItem("batch-agent-reviewer", who));
}

async function rename() {
  await ask("/leave", {}).catch(() => null);
  clearTimeout(timer);
  safely(() => localStorage.removeItem("batch-agent-reviewer"));
  [who, shown, said] = ["", null, ""];
  draw();
}

document.addEventListener("keydown", (event) => {
  if (!who || event.metaKey || event.altKey) return;
  const writing = /INPUT|SELECT|TEXTAREA/.test(event.target.tagName);
  if (event.key === "Escape") { [editing, search] = [false, null]; document.activeElement.blur(); draw(); return; }
  if (event.key === "Enter") {
    if (event.target.tagName === "TEXTAREA" && !event.ctrlKey) return;
    if (/BUTTON|A/.test(event.target.tagName) && !writing) return;
    event.preventDefault();
    if (search !== null) { const [first] = found(); if (first !== undefined) choose(first); return; }
    give();
    return;
  }
  if (writing || event.ctrlKey) return;
  const choices = found(), place = Number(event.key) - 1;
  if (shown && !editing && place >= 0 && place < Math.min(KEYED, choices.length)) choose(choices[place]);
  else if (event.key === "e") edit();
  else if (event.key === "x") judge("none");
  else if (event.key === "s") judge("skip");
  else if (event.key === "u") undo();
  else if (shown && field() && field().choices.length > KEYED && event.key.length === 1) { search = event.key === "/" ? "" : event.key; draw(); }
  else return;
  event.preventDefault();
});
// Whoever closes the page frees the row.
addEventListener("pagehide", () => {
  if (who && shown) fetch(`/api/review/leave?${new URLSearchParams({ run })}`, { method: "POST", keepalive: true, headers: { "Content-Type": "application/json" }, body: JSON.stringify({ who }) });
});

async function start() {
  // The token stays in a cookie. It is removed from the URL, so that a copied URL does not contain it.
  if (location.search.includes("token=")) history.replaceState(null, "", `${location.pathname}?${new URLSearchParams({ run })}`);
  const remembered = safely(() => localStorage.getItem("batch-agent-theme"));
  if (remembered) document.documentElement.dataset.theme = remembered;
  const name = safely(() => localStorage.getItem("batch-agent-reviewer")) || "";
  try {
    const overview = await ask("");
    [form, numbers, title] = [overview.form, overview, overview.run];
    document.title = `Review · ${overview.run} · Batch Agent`;
    if (name) await named(name);
    draw();
  } catch (error) {
    fill(page, h("p", { class: "error" }, text(error.message)));
  }
}

start();
