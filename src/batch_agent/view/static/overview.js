// The numbers of a run.
import { h, fill, panel, table, text, number, short, seconds, dollars, share, pace, when, link, address, rowAt, state, clock } from "./dom.js";
import { get, isReport } from "./source.js";
import { promise, score } from "./score.js";
import { timeChart, spark, bar, legend, stageGraph } from "./charts.js";

// Places in a sample: [kind, at, done, failed, running, queued, tools, backing off, prompt, cached, completion, cost, endpoints, slots]
const AT = 1, DONE = 2, RUNNING = 4, QUEUED = 5, TOOLS = 6, ENDPOINTS = 12, SLOTS = 13;
const CHARTS = 8; // endpoints that have their own chart

export async function overview({ key, page, go, onNews }) {
  let data = await get("run", { run: key }), live = null, loaded = data.index.rows, last = 0;

  const draw = () => {
    fill(page, head(data, live), tiles(data, live), stages(data, live, key),
      h("div", { class: "columns" },
        h("div", null, flights(data, live), tools(data, live), underWay(live, key)),
        h("div", null, promise(data), score(data, key), look(data, live, key), failures(data, key), endpoints(data, live), cache(data, live), asked(data))));
  };
  draw();
  let loading = false;
  onNews(async (news) => {
    const ended = live && !news.alive;
    live = news.alive ? news : null;
    const grown = news.index.rows !== loaded || ended || (news.alive && Date.now() - last > 3000);
    if (grown && !loading) {
      loading = true;
      last = Date.now();
      try { data = await get("run", { run: key }); loaded = data.index.rows; } finally { loading = false; }
    }
    if (!loading) draw();
  });
  return { keys: { Enter: () => go("rows") } };
}

const now = (data, live) => (live && live.status) || data.status;

function head({ run, index, unfinished }, live) {
  const status = live && live.status;
  const line = [run.model, run.backend].filter(Boolean).map((part) => h("span", { class: "clip", title: part }, text(part)));
  return h("div", { class: "line facts" }, line,
    run.started ? h("span", null, "started ", when(run.started)) : null,
    run.sessions > 1 ? h("span", null, `session ${run.sessions}`) : null,
    run.ended && !live ? h("span", null, "ended ", when(run.ended)) : null,
    unfinished ? h("span", { class: "warn" }, `${number(unfinished)} rows have started and are not done; this continues them: `, h("code", null, "batch-agent resume ", text(run.command))) : null,
    answers(status && run.sessions <= 1 ? status.answered_by : run.answered_by),
    run.degraded ? h("span", { class: "warn" }, "degraded: ", text(run.degraded, 300)) : null,
    run.trouble ? h("span", { class: "bad" }, "blocked: ", text(run.trouble, 300)) : null,
    run.why ? h("span", { class: "bad" }, text(run.why, 300)) : null,
    status && status.reason ? h("span", { class: "bad" }, text(status.reason, 300)) : null,
    index.complete ? null : h("span", { class: "quiet" }, `indexing rows: ${Math.round(index.share * 100)} %`));
}

// How many rows each model has answered, in a run with a standby.
function answers(counts) {
  const names = Object.entries(counts || {});
  return names.length ? h("span", null, "answers: ", text(names.map(([name, count]) => `${number(count)} by ${name}`).join(", "), 300)) : null;
}

function tile(label, big, small, extra) {
  return h("div", { class: "tile" }, h("label", null, label), h("div", { class: "big" }, big), h("div", { class: "small" }, small), extra);
}

function tiles(data, live) {
  const status = now(data, live), counts = data.counts, progress = data.progress;
  // What the process reports is about its own session; the record has all sessions.
  const own = data.run.sessions <= 1 && status, rows = own && live ? status.rows : progress;
  const done = rows.ok + rows.failed, total = rows.total, agents = (live && status && status.agents) || {};
  const alive = (agents.running || 0) + (agents.queued || 0) + (agents.tools || 0) + (agents.backing_off || 0);
  const tokens = own ? status.tokens : counts.tokens, cost = own && live ? status.cost : progress.cost;
  const budget = (status && status.budget) || {}, took = status ? status.seconds : data.summary && data.summary.seconds;
  const rate = live && status ? status.rows_per_second : progress.rows_per_second;
  const points = rates(data.samples);
  return h("div", { class: "tiles" },
    tile("Rows", [number(done), total ? h("small", null, ` of ${number(total)}`) : null],
      [h("span", { class: "good" }, number(rows.ok), " ok"), rows.failed ? h("span", { class: "bad" }, number(rows.failed), " failed") : null,
        alive ? `${number(alive)} running` : null, rows.resumed ? `${number(rows.resumed)} resumed` : null].filter(Boolean).map((each) => h("span", null, each)),
      bar([["f-ok", rows.ok, "ok"], ["f-bad", rows.failed, "failed"], ["f-live", alive, "running"]], total || done + alive)),
    tile("Pace", pace(rate), live && status.seconds_left !== null ? `${seconds(status.seconds_left)} left` : took ? `${seconds(took)} in total` : "", spark(points)),
    tile("Tokens", [short(tokens.prompt), h("small", null, " in  "), short(tokens.completion), h("small", null, " out")],
      [tokens.cached ? `${share(tokens.cached, tokens.prompt)} of the prompts cached` : "no cached tokens reported", data.run.sessions > 1 ? `${short(progress.tokens)} in all sessions` : null].filter(Boolean).map((each) => h("span", null, each)),
      bar([["f-cached", tokens.cached, "cached"], ["f-prompt", tokens.prompt - tokens.cached, "not cached"], ["f-out", tokens.completion, "answers"]])),
    tile("Cost", dollars(cost, progress.cost_is_minimum), budget.max_cost ? `of ${dollars(budget.max_cost)}` : cost && done ? `${dollars(cost / done)} per row` : "price unknown",
      budget.max_cost ? bar([["f-live", Math.min(cost || 0, budget.max_cost), "spent"]], budget.max_cost) : null),
    tile("Turns", number(own ? status.turns : counts.turns),
      [(own ? status : counts).retries ? `${number((own ? status : counts).retries)} retries` : "no retries", status && status.answers_rejected ? `${number(status.answers_rejected)} answers rejected` : null].filter(Boolean).join(", ")),
    live ? tile("In flight", [number(agents.running), status.max_inflight ? h("small", null, ` of ${number(status.max_inflight)}`) : null],
      `${number(agents.queued)} queued, ${number(agents.tools)} at tools${agents.backing_off ? `, ${agents.backing_off} backing off` : ""}`,
      spark(data.samples.map((sample) => sample[RUNNING]), { class: "c2" })) : null);
}

// Rows per second between samples.
function rates(samples) {
  const step = Math.max(1, Math.floor(samples.length / 60)), found = [];
  for (let place = step; place < samples.length; place += step) {
    const past = samples[place][AT] - samples[place - step][AT];
    found.push(past > 0 ? Math.max(0, samples[place][DONE] - samples[place - step][DONE]) / past : 0);
  }
  return found;
}

function stages({ run }, live, key) {
  const graph = (live && run.sessions <= 1 && live.status && live.status.stages) || run.graph;
  if (!graph || !graph.length) return null;
  return panel("Stages", "click to open", stageGraph(graph, (name) => { location.hash = address("run", `${key}/${name}`); }));
}

function outages(changes, endpoint, until) {
  const found = [];
  let since = null;
  for (const [kind, at, name, health, reason] of changes) {
    if (kind !== "health" || (endpoint !== null && name !== endpoint)) continue;
    if (health === "down" && since === null) since = [at, reason];
    else if (health === "healthy" && since !== null) { found.push({ at: since[0], to: at, class: "m-bad", title: `down: ${since[1]}` }); since = null; }
  }
  if (since !== null) found.push({ at: since[0], to: until, class: "m-bad", title: `down: ${since[1]}` });
  return found;
}

function flights({ samples, changes }, live) {
  if (samples.length < 2) return panel("In flight", null, h("p", { class: "quiet empty" }, "no samples yet"));
  const names = [...new Set(samples.flatMap((sample) => Object.keys(sample[ENDPOINTS] || {})))];
  const from = samples[0][AT], to = samples[samples.length - 1][AT];
  const charts = names.length > 1 && names.length <= CHARTS ? h("div", { class: "several" }, names.map((name) => h("div", null,
    h("h3", { class: "clip" }, text(name || "server")),
    timeChart([
      { points: samples.map((sample) => [sample[AT], (sample[ENDPOINTS][name] || [])[0] ?? null]), kind: "area", class: "c1" },
      { points: samples.map((sample) => [sample[AT], (sample[ENDPOINTS][name] || [])[1] ?? null]), kind: "step", class: "c-limit" },
    ], { height: 84, left: 26, marks: outages(changes, name, to), from, to })))) : null;
  const limit = samples.map((sample) => [sample[AT], sample[SLOTS]]);
  const whole = timeChart([
    { points: samples.map((sample) => [sample[AT], sample[RUNNING]]), kind: "area", class: "c1" },
    { points: samples.map((sample) => [sample[AT], sample[TOOLS]]), kind: "line", class: "c3" },
    { points: samples.map((sample) => [sample[AT], sample[QUEUED]]), kind: "line", class: "c4" },
    { points: limit, kind: "step", class: "c-limit" },
  ], { height: charts ? 130 : 190, marks: outages(changes, null, to), from, to });
  return panel("In flight", legend({ c1: "requests", c3: "at tools", c4: "queued", "c-limit": "limit" }), whole, charts);
}

function endpoints(data, live) {
  const status = now(data, live), list = (status && status.endpoints) || [];
  if (!list.length) return null;
  const colour = { healthy: "good", down: "bad", "given up": "bad" };
  const lines = list.map((each) => h("tr", null,
    h("td", { class: "place" }, text(each.name || (status.backend || "server")).map(breakable), each.model ? h("div", { class: "quiet" }, text(each.model)) : null),
    h("td", { class: live ? colour[each.state] || "warn" : "quiet" }, each.state, each.reason ? h("div", { class: "quiet" }, text(each.reason, 160)) : null, live ? reasons(each) : null),
    h("td", { class: "r" }, live ? number(each.inflight) : "–"), h("td", { class: "r" }, each.limit === null ? "none" : number(each.limit)),
    h("td", { class: "r" }, seconds(each.seconds_per_turn))));
  return panel("Endpoints", status.outage_seconds ? `down for ${seconds(status.outage_seconds)} in total` : null,
    table(["endpoint", "health", ["in flight", "r"], ["limit", "r"], ["per turn", "r"]], lines));
}

// An address may break after its scheme.
const breakable = (part) => (typeof part === "string" ? part.split(/(?<=:\/\/)/).flatMap((piece, place) => (place ? [h("wbr"), piece] : [piece])) : part);

// Which rules decided about a server, and their evidence: the present ones, and the earlier ones behind a click.
function reasons(each) {
  const line = (why) => h("div", { class: "quiet" }, text(`${why.about}: ${why.rule} (${why.evidence}), since ${clock(why.since)}`, 240));
  const now = (each.why || []).map(line), past = (each.history || []).toReversed();
  return h("div", null, now, past.length ? h("details", null, h("summary", null, `${past.length} earlier`), past.map(line)) : null);
}

function cache(data, live) {
  const status = now(data, live), kv = status && status.kv;
  if (!kv) return null;
  const line = (name, value, hint) => h("tr", { title: hint }, h("td", null, name), h("td", { class: "r" }, value));
  const lines = [
    kv.tokens ? line("capacity", `${short(kv.tokens)} tokens`, "tokens that the caches can hold") : null,
    kv.usage !== null ? line("in use", share(kv.usage, 1), "held by running requests") : null,
    line("contexts of agents", `${short(kv.contexts)} tokens`, "of the agents that are admitted"),
    live ? line("held back", number(kv.held), "agents whose contexts do not fit; they wait between two turns") : null,
    line("total time held back", seconds(kv.held_seconds), "sum over all agents"),
    line("recomputed", `${short(kv.recomputed)} tokens, ${seconds(kv.recompute_seconds)}`, "evicted contexts that were computed again, and the time of the engines"),
    kv.touches || kv.kept_alive ? line("touched", `${number(kv.touches)} contexts, prefix ${number(kv.kept_alive)} times`, "requests that only keep contexts in the cache") : null,
  ].filter(Boolean);
  return panel("KV cache", kv.held && live ? "contexts do not fit" : null, table(["", ["", "r"]], lines));
}

function tools(data, live) {
  const status = now(data, live), list = [...((status && status.tools) || [])].sort((a, b) => (b.seconds || 0) - (a.seconds || 0));
  if (!list.length) return null;
  const most = Math.max(...list.map((each) => each.seconds || 0), 1e-9);
  const lines = list.map((each) => h("tr", null,
    h("td", { class: "place" }, text(each.name), h("div", { class: "meter" }, h("span", { style: { width: `${(100 * (each.seconds || 0)) / most}%` } }))),
    h("td", { class: "r" }, number(each.calls)), h("td", { class: "r" }, number(each.shared + each.cached)),
    h("td", { class: each.failed ? "r bad" : "r", title: each.reason || "" }, number(each.failed)),
    h("td", { class: "r" }, seconds(each.seconds)), h("td", { class: "r" }, seconds(each.p50)), h("td", { class: "r" }, seconds(each.p99))));
  return panel("Tools", "by time", table(["tool", ["calls", "r"], ["saved", "r"], ["failed", "r"], ["time", "r"], ["median", "r"], ["99 %", "r"]], lines));
}

function look(data, live, key) {
  const status = now(data, live), items = [];
  for (const tool of (status && status.tools) || []) {
    if (tool.failed && tool.failed >= tool.runs && tool.runs) items.push([h("span", { class: "bad" }, `all calls of `, text(tool.name), " failed"), text(tool.reason || "", 160)]);
  }
  const far = new Map();
  for (const each of data.unusual) far.set(inStage(each), [...(far.get(inStage(each)) || []), each]);
  for (const [row, each] of far) {
    const words = each.map(({ kind, value, usual }) => ({ turns: `${number(value)} turns (usually ${number(usual)})`, seconds: `${seconds(value)} (${seconds(usual)})`, cost: `${dollars(value)} (${dollars(usual)})` })[kind]);
    items.push([link(rowAt(key, row), each[0].stage ? text(each[0].stage + ", ") : null, "row ", text(each[0].job_id, 40)), ` took ${words.join(", ")}`]);
  }
  if (data.counts.repaired) items.push([data.run.stages.length ? `${number(data.counts.repaired)} outputs` : link(address("run", key, "rows") + "?state=repaired", `${number(data.counts.repaired)} outputs`), " were read from repaired JSON"]);
  if (status && status.schema_note) items.push([h("span", { class: "warn" }, "schema"), text(" " + status.schema_note, 200)]);
  if (!items.length) return null;
  return panel("Needs attention", null, h("ul", { class: "list" }, items.map((item) => h("li", null, item))));
}

const inStage = (each) => (each.stage ? `${each.stage}/${each.row}` : each.row);

function failures({ failures: list, counts }, key) {
  if (!list.length) return panel("Failures", null, h("p", { class: "quiet empty" }, counts.rows ? "none" : "no row is done yet"));
  const most = Math.max(...list.map((each) => each.count));
  return panel("Failures", `${number(counts.failed)} ${counts.failed === 1 ? "row" : "rows"}`, h("ul", { class: "list" }, list.map((each) => h("li", null,
    h("div", { class: "line" }, link(address("run", each.stage ? `${key}/${each.stage}` : key, "rows") + "?error=" + encodeURIComponent(each.type), each.stage ? text(each.stage + ": ") : null, text(each.type)), h("span", { class: "grow" }), h("b", null, number(each.count))),
    h("div", { class: "meter bad" }, h("span", { style: { width: `${(100 * each.count) / most}%` } })),
    h("div", { class: "quiet clip" }, "row ", link(rowAt(key, inStage(each)), number(each.row)), ": ", text(each.message || "", 200))))));
}

function underWay(live, key) {
  if (!live || !live.rows || !live.rows.length) return null;
  const at = live.status.at;
  const lines = live.rows.slice(0, 12).map((row) => h("tr", null,
    h("td", null, link(address("run", row.stage ? `${key}/${row.stage}` : key, "row", String(row.index)), row.stage ? text(row.stage + "/") : null, text(row.job_id, 32))),
    h("td", null, h("span", { class: `does ${row.state.split(" ")[0]}` }, row.state)),
    h("td", { class: "r" }, `turn ${Math.max(1, row.turn)}`), h("td", { class: "r" }, seconds(at - row.began))));
  return panel("Running rows", `${number(live.rows.length)}${live.rows.length >= 200 ? " or more" : ""}, oldest first`, table(["row", "state", ["", "r"], ["time", "r"]], lines));
}

function asked(data) {
  return isReport ? panel("This file", null, h("p", { class: "quiet" }, "It needs no server and no network. ", text(data.report_note || ""))) : null;
}
