// The page of `batch-agent serve`: log in with a key; batches; one batch and its lines. The key stays in the tab and is
// sent as a header, so that no other site can use it.
import { h, fill, panel, text, value, number, short, seconds, when, share, table, address, link } from "./dom.js";

const SECONDS = 2, BATCHES = 50, LINES = 50;
const LIVE = ["validating", "in_progress", "finalizing", "cancelling"];
const KINDS = { completed: "ok", failed: "bad", expired: "bad", cancelled: "warn", succeeded: "ok", errored: "bad", waiting: "warn" };
const page = document.getElementById("page"), bar = document.getElementById("bar");
let key = safely(() => sessionStorage.getItem("batch-agent-key")) || "", timer = 0, visit = 0;
let cursors = [""]; // where each page before this one began

const theme = safely(() => localStorage.getItem("batch-agent-theme"));
if (theme) document.documentElement.dataset.theme = theme;

function safely(act) {
  try { return act(); } catch { return null; }
}

class Refused extends Error {}

async function ask(path, method = "GET") {
  const answer = await fetch("/serve/" + path, { method, headers: { Authorization: "Bearer " + key } });
  const told = await answer.json().catch(() => ({}));
  if (answer.status === 401) throw new Refused("The key is wrong, or it was revoked.");
  if (!answer.ok) throw new Error(told.error ? told.error.message : `status ${answer.status}`);
  return told;
}

const pill = (name) => h("span", { class: `state ${LIVE.includes(name) || name === "in flight" ? "live" : KINDS[name] || "warn"}` }, name.replace("_", " "));

const ended = (batch) => batch.completed_at || batch.failed_at || batch.expired_at || batch.cancelled_at;

// Lines that were not done when the batch was cancelled or expired.
const undone = (batch) => batch.cancelled + batch.expired;

// Lines per second: now, or of the whole batch if it has ended.
function rate(batch) {
  const { completed, failed } = batch.request_counts, answered = completed + failed - undone(batch);
  const value = batch.lines_per_second ?? (ended(batch) && batch.in_progress_at ? answered / Math.max(1, ended(batch) - batch.in_progress_at) : 0);
  return value ? `${value >= 10 ? number(value) : value.toFixed(1)}/s` : "–";
}

function progress(batch) {
  const { total, completed } = batch.request_counts, failed = batch.request_counts.failed - undone(batch);
  const part = (count, kind) => h("span", { class: kind, style: { width: `${(100 * count) / (total || 1)}%` } });
  return h("div", { class: "bar", title: batch.summary }, part(completed, "f-ok"), part(failed, "f-bad"));
}

// When a batch ended, or when it is expected to.
function end(batch) {
  if (ended(batch)) return [when(ended(batch))];
  const estimate = batch.x_estimated_completion_at;
  return estimate === null ? ["–"] : [`in ${seconds(Math.max(0, estimate - Date.now() / 1000))}`, estimate > batch.expires_at ? " (after its deadline)" : ""];
}

function cancel(batch) {
  if (!["validating", "in_progress"].includes(batch.status)) return null;
  return h("button", { class: "danger", onclick: async (event) => {
    event.stopPropagation();
    if (!confirm(`Cancel ${batch.id}? Lines that are done are kept.`)) return;
    event.target.disabled = true;
    await ask(`batches/${batch.id}/cancel`, "POST").catch((error) => alert(error.message));
    look();
  } }, "Cancel");
}

function heading(id) {
  fill(bar,
    h("nav", { class: "where" }, link("/", h("b", null, "Batches")), id ? [h("i", null, "/"), h("span", null, "batch")] : null),
    h("button", { class: "plain", title: "light or dark", "aria-label": "light or dark", onclick: () => {
      const root = document.documentElement;
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      safely(() => localStorage.setItem("batch-agent-theme", root.dataset.theme));
    } }, "◐"),
    key ? h("button", { class: "plain", onclick: () => login("") }, "Log out") : null);
}

function login(why) {
  key = "";
  safely(() => sessionStorage.removeItem("batch-agent-key"));
  clearTimeout(timer);
  visit++;
  heading("");
  const field = h("input", { type: "password", id: "key", autocomplete: "current-password", required: true, "aria-label": "key", style: { width: "100%" } });
  fill(page, h("form", { class: "panel", style: { maxWidth: "420px", margin: "12vh auto 0" }, onsubmit: (event) => {
    event.preventDefault();
    key = field.value.trim();
    safely(() => sessionStorage.setItem("batch-agent-key", key));
    open();
  } },
    h("h2", null, "Log in"), h("p", { class: "quiet" }, "The key is that of your API client, or the operator's key that the server prints when it starts."),
    h("div", { class: "line" }, h("span", { class: "grow" }, field), h("button", null, "Log in")), why ? h("p", { class: "bad", role: "alert" }, why) : null));
  field.focus();
}

const tile = (title, big, ...small) => h("div", { class: "tile" }, h("label", null, title), h("div", { class: "big" }, big), small.map((each) => (each instanceof Node ? each : h("div", { class: "small" }, each))));

// The server, and its batches.
function numbers(state) {
  const people = state.interactive, ratio = state.latency_ratio;
  return h("div", { class: "tiles" },
      tile("batches in work", number(state.batches), `${number(state.lines_left)} lines left`),
      tile("lines in flight", number(state.lines_in_flight), state.waiting_because ? h("div", { class: "small warn" }, state.waiting_because) : null),
      state.tokens_today === undefined ? null : tile("tokens today", short(state.tokens_today)),
      people ? tile("interactive requests", number(people.in_flight), `${number(people.waiting)} waiting, ${number(people.requests)} since the start`) : null,
      tile("interactive latency", ratio ? `${ratio.toFixed(1)} ×` : "–", state.latency_target ? `of an idle engine; target ${state.latency_target} ×` : "no target", state.target_given_up ? h("div", { class: "small warn" }, state.target_given_up) : null));
}

// For the operator.
function parts(state) {
  return h("div", { class: "columns", style: { marginTop: "14px" } },
      panel("Endpoints", null, table(["endpoint", "state", ["in flight", "r"], ["limit", "r"]], state.endpoints.map((each) => h("tr", null,
        h("td", { class: "clip" }, text(each.endpoint)), h("td", null, each.up ? h("span", { class: "good" }, "up") : h("span", { class: "bad", title: `${each.upstream}: ${each.reason}; it needs ${each.needs}` }, `down for ${seconds(each.down_seconds)}: ${each.why}: `, text(each.reason, 120), h("div", { class: "small" }, `needs ${each.needs}; tried again in ${each.next_trial_seconds} s`))), h("td", { class: "r" }, number(each.in_flight)), h("td", { class: "r" }, number(each.limit)))))),
      panel("Tenants", null, table(["tenant", ["share", "r"], ["tokens today", "r"], ["in flight", "r"]], Object.entries(state.tenants).map(([name, each]) => h("tr", null,
        h("td", { class: "clip" }, text(name)), h("td", { class: "r" }, each.share), h("td", { class: "r" }, short(each.tokens_today)), h("td", { class: "r" }, number(each.lines_in_flight)))))));
}

const turning = (next, again) => h("span", { class: "paging" },
  h("button", { class: "plain", title: "the page before", "aria-label": "the page before", disabled: cursors.length < 2, onclick: () => { cursors.pop(); again(); } }, "‹"),
  h("button", { class: "plain", title: "the next page", "aria-label": "the next page", disabled: !next, onclick: () => { cursors.push(String(next)); again(); } }, "›"));

async function batches() {
  const after = cursors.at(-1);
  const [state, listed] = await Promise.all([ask("status"), ask(`batches?limit=${BATCHES}${after ? `&after=${after}` : ""}`)]);
  const many = Boolean(state.tenants), found = listed.data;
  const line = (batch) => {
    const counts = batch.request_counts, failed = counts.failed - undone(batch);
    return h("tr", { class: "opens", onclick: () => (location.hash = address("batch", batch.id)) },
      h("td", null, pill(batch.status)),
      h("td", { style: { minWidth: "130px" } }, progress(batch), h("span", { class: "quiet" }, `${batch.summary} (${share(counts.completed, counts.total)})`)),
      h("td", { class: "id" }, link(address("batch", batch.id), batch.id)), many ? h("td", { class: "clip" }, text(batch.tenant)) : null,
      h("td", { class: failed ? "r bad" : "r quiet" }, number(failed)), h("td", { class: "r" }, rate(batch)), h("td", { class: "r" }, short(batch.usage.total_tokens)),
      h("td", null, end(batch)), h("td", { class: "clip" }, text(batch.model || "")), h("td", { class: "r" }, cancel(batch)));
  };
  const next = found.length === BATCHES ? found.at(-1).id : "";
  return () => fill(page, numbers(state),
    found.length ? table(["status", "progress", "batch", ...(many ? ["tenant"] : []), ["failed", "r"], ["rate", "r"], ["tokens", "r"], "end", "model", ""], found.map(line), { class: "rows" }) : h("p", { class: "quiet empty" }, "No batches yet. Create one with your client."),
    next || cursors.length > 1 ? turning(next, look) : null, many ? parts(state) : null);
}

// One batch, and its lines.
const states = { succeeded: "Succeeded", failed: "Failed", waiting: "Not done" };
const opened = new Set(); // custom_ids whose line is shown in full
let chosen = "", sought = "";

const joined = (content) => (typeof content === "string" ? content : Array.isArray(content) ? content.map((part) => (typeof part === "string" ? part : part.text || joined(part.content) || `[${part.type || "…"}]`)).join(" ") : "");

function input(body) {
  if (!body || typeof body === "string") return body || "";
  const said = body.messages || body.input || body.prompt;
  return Array.isArray(said) && said.length && said.at(-1).content !== undefined ? joined(said.at(-1).content) : joined(said);
}

function output(answer) {
  if (!answer || typeof answer === "string") return answer || "";
  const choice = (answer.choices || [])[0];
  if (choice) return choice.message ? joined(choice.message.content) || JSON.stringify(choice.message.tool_calls || "") : choice.text || "";
  return joined(answer.content || answer.output) || (answer.data ? `${answer.data.length} embeddings` : "");
}

async function batch(id) {
  const found = await ask(`batches/${encodeURIComponent(id)}`), counts = found.request_counts, usage = found.usage;
  const left = counts.total - counts.completed - counts.failed, failed = counts.failed - undone(found);
  if (!chosen) chosen = counts.completed ? "succeeded" : counts.failed ? "failed" : "waiting";
  const query = new URLSearchParams({ state: chosen, limit: LINES, ...(cursors.at(-1) ? { after: cursors.at(-1) } : {}), ...(sought ? { custom_id: sought } : {}) });
  const lines = await ask(`batches/${encodeURIComponent(id)}/rows?${query}`);
  const rows = lines.data.flatMap((row) => {
    const wide = opened.has(row.custom_id);
    const shown = row.error === null ? h("span", null, text(output(row.output), 200)) : h("span", { class: "bad" }, text(row.error, 200));
    const flip = () => { opened[wide ? "delete" : "add"](row.custom_id); look(); };
    return [
      h("tr", { class: wide ? "opens at" : "opens", onclick: flip },
        h("td", { class: "r quiet" }, row.line), h("td", { class: "id clip" }, h("button", { class: "plain", "aria-expanded": String(wide), title: row.custom_id }, text(row.custom_id, 60))),
        h("td", null, pill(row.state)), h("td", { class: "clip", style: { maxWidth: "320px" } }, text(input(row.input), 200)), h("td", { class: "clip", style: { maxWidth: "420px" } }, shown)),
      wide ? h("tr", null, h("td", { colspan: 5, style: { whiteSpace: "normal" } }, h("div", { class: "two" },
        h("div", { class: "side" }, h("b", null, "Input"), value(row.input)),
        h("div", { class: "side" }, h("b", null, row.error === null ? "Output" : "Error"), row.error === null ? null : h("p", { class: "bad said" }, text(row.error)), row.output === null ? (row.error === null ? h("p", { class: "quiet" }, "No answer yet.") : null) : value(row.output))))) : null,
    ];
  });
  const again = (change) => () => { change(); cursors = [""]; look(); };
  const search = h("input", { type: "search", placeholder: "a custom_id", "aria-label": "custom_id", value: sought, onchange: (event) => again(() => (sought = event.target.value.trim()))() });
  const amounts = { succeeded: counts.completed, failed: counts.failed, waiting: left };
  return () => {
    if (document.activeElement && document.activeElement.type === "search" && document.activeElement.value !== sought) return; // someone types
    fill(page,
      h("div", { class: "line title" }, h("h1", { class: "id" }, found.id), pill(found.status), h("span", { class: "grow" }), cancel(found)),
      h("div", { class: "line facts" }, h("span", null, found.endpoint), h("span", null, text(found.model || "several models")), h("span", null, "tenant ", text(found.tenant)), h("span", null, `created ${when(found.created_at)}`), h("span", null, `deadline ${when(found.expires_at)}`),
        Object.entries(found.metadata || {}).map(([name, each]) => h("span", { class: "clip" }, text(`${name}: ${each}`)))),
      found.errors ? panel("The file was refused", null, table([["line", "r"], "code", "message"], found.errors.data.map((each) => h("tr", null, h("td", { class: "r" }, each.line ?? ""), h("td", { class: "id" }, text(each.code)), h("td", null, text(each.message)))))) : null,
      h("div", { class: "tiles" },
        tile("done", [number(counts.completed), h("small", null, ` of ${number(counts.total)}`)], `${share(counts.completed, counts.total)}: ${found.summary}`, progress(found)),
        tile("failed", h("span", { class: failed ? "bad" : null }, number(failed)), share(failed, counts.completed + failed)),
        tile("rate", rate(found)), tile("tokens", short(usage.total_tokens), `${short(usage.input_tokens)} in, of these ${short(usage.input_tokens_details.cached_tokens)} cached`, `${short(usage.output_tokens)} out`),
        tile(LIVE.includes(found.status) ? "estimated end" : "ended", end(found)[0], end(found)[1])),
      h("div", { class: "line filters" }, h("div", { class: "choice" }, Object.entries(states).map(([name, title]) => h("button", { class: chosen === name && !sought ? "on" : null, onclick: again(() => { chosen = name; sought = ""; }) }, `${title} ${number(amounts[name])}`))), search, h("span", { class: "grow" }), lines.note ? h("span", { class: "quiet" }, lines.note) : null, turning(lines.next, look)),
      rows.length ? table([["line", "r"], "custom_id", "state", "input", "output or error"], rows, { class: "rows" }) : h("p", { class: "quiet empty" }, sought ? "No line has this custom_id." : "No lines."));
  };
}

async function look() {
  clearTimeout(timer);
  const mine = ++visit, [kind, id] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  let wait = SECONDS;
  try {
    const draw = await (kind === "batch" && id ? batch(id) : batches());
    if (mine !== visit) return;
    if (String(getSelection())) wait = SECONDS; // selected text stays
    else draw();
  } catch (error) {
    if (mine !== visit) return;
    if (error instanceof Refused) return login(error.message);
    let told = document.getElementById("told");
    if (!told) page.prepend((told = h("p", { id: "told", class: "bad", role: "status" })));
    fill(told, error instanceof TypeError ? "The server cannot be reached; the page tries again." : text(error.message));
  }
  if (mine === visit) timer = setTimeout(look, wait * 1000);
}

function open() {
  const [kind, id] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  if (!key) return login("");
  cursors = [""];
  chosen = sought = "";
  opened.clear();
  heading(kind === "batch" ? id : "");
  look();
}

addEventListener("hashchange", open);
open();
