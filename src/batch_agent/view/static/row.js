// One row and its conversation, live while its agent runs.
import { h, fill, panel, text, number, seconds, dollars, short, share, clock, value, link, address, table, doubted, when } from "./dom.js";
import { get, listen, steer, isReport } from "./source.js";
import { bar } from "./charts.js";
import { golds } from "./score.js";

const LONG = 6000; // characters of a long text that are shown at first

export async function row({ key, detail, page, go, onNews }) {
  let following = null, raw = false;
  const keys = {};

  const done = (data) => {
    const record = data.record;
    fill(page, heading(record, data, key), h("div", { class: "columns row" },
      h("div", { class: "talk" }, data.conversation.map(message), ending(record)),
      h("aside", null, facts(record, data), attempts(data.failed_attempts), given(record), output(record), golds(data), people(data.people), trust(record), cascade(record), again(record, data.command), rawJson(record, raw))));
    keys.j = () => data.after !== null && go("row", String(data.after));
    keys.k = () => data.before !== null && go("row", String(data.before));
  };

  const live = (now) => {
    const down = innerHeight + scrollY >= document.body.scrollHeight - 80;
    const record = { index: now.index, job_id: now.job_id };
    fill(page, heading({ ...record, live: true }, {}, key), h("div", { class: "columns row" },
      h("div", { class: "talk" }, now.conversation.map(message), now.saying === null ? h("p", { class: "quiet waiting-for" }, "waiting for a slot or a tool") : null),
      h("aside", null, liveFacts(now), steering(key, now))));
    if (down) scrollTo(0, document.body.scrollHeight);
  };

  const load = async () => {
    let data = await get("row", { run: key, row: detail });
    while (!data.record && !data.index.complete) {
      fill(page, h("p", { class: "quiet" }, `indexing rows: ${Math.round(data.index.share * 100)} %`));
      data = await get("row", { run: key, row: detail });
    }
    if (data.record) done(data);
    return Boolean(data.record);
  };
  const follow = () => {
    let heard = false;
    following = listen("follow", { run: key, row: detail }, (now) => { heard = true; live(now); }, async () => {
      // The result is in the files shortly after the row has ended.
      for (const wait of [0, 300, 1000, 3000]) {
        await new Promise((resume) => setTimeout(resume, wait));
        if (await load()) return;
        if (!heard && wait === 0) fill(page, h("p", { class: "quiet" }, `row ${detail} has no result yet, and is not running`));
      }
    });
  };
  if (!(await load())) follow();
  return { keys, leave: () => following && following.close() };
}

function heading(record, data, key) {
  const state = record.live ? h("span", { class: "state live" }, "running") : record.ok ? h("span", { class: "state ok" }, record.repaired ? "ok, repaired" : "ok") : h("span", { class: "state bad" }, text(record.error && record.error.type));
  const step = (index, word, title) => index === null || index === undefined ? null : h("a", { href: "#" + address("run", key, "row", String(index)), title }, word);
  return h("div", { class: "line title" }, h("h1", null, "row ", String(record.index)), record.job_id !== String(record.index) ? h("span", { class: "id" }, text(record.job_id, 120)) : null, state,
    h("span", { class: "grow" }), step(data.before, "‹ before", "the row before (k)"), step(data.after, "next ›", "the next row (j)"));
}

function message(each) {
  switch (each.role) {
    case "system": return folded("system", each.text, "m-system");
    case "input": return h("article", { class: "m-user" }, h("header", null, h("b", null, "input"), each.task ? h("span", { class: "quiet" }, "the task: ", text(each.task, 200)) : null), value(each.value));
    case "user": return h("article", { class: "m-user" }, h("header", null, h("b", null, "user")), long(each.text));
    case "repair": return h("article", { class: "m-repair" }, h("header", null, h("b", null, "repair prompt"), h("span", null, each.error ? text(each.error) : "the answer did not validate")), each.text ? long(each.text) : null);
    case "cut": return folded(`the conversation was cut here; messages before message ${each.kept_from} are no longer sent`, each.text, "m-cut");
    default: return turn(each);
  }
}

function turn(each) {
  const times = each.queued === undefined ? [] : [["f-queue", each.queued, `queue ${seconds(each.queued)}`], ["f-model", each.model, `model ${seconds(each.model)}`], ["f-tools", each.tools, `tools ${seconds(each.tools)}`]];
  const usage = each.usage;
  return h("article", { class: `m-turn${each.streaming ? " streaming" : ""}` },
    h("header", null, h("b", null, each.turn ? `turn ${each.turn}` : "assistant"),
      each.endpoint ? h("span", null, text(each.endpoint, 60)) : null,
      each.at ? h("span", null, clock(each.at)) : null,
      each.cached ? h("span", { class: "good" }, "from the response cache") : null,
      each.answered_by ? h("span", { class: "warn" }, text(each.answered_by, 60), ", a standby") : null,
      usage ? h("span", { title: `${number(usage.cached)} cached, ${number(usage.reasoning)} reasoning` }, `${short(usage.prompt)} in, ${short(usage.completion)} out`) : null,
      each.cost ? h("span", null, dollars(each.cost)) : null,
      each.finish_reason && !["stop", "tool_calls", "end_turn", "tool_use"].includes(each.finish_reason) ? h("span", { class: "warn" }, text(each.finish_reason)) : null,
      h("span", { class: "grow" }), times.length ? h("span", { class: "times", title: times.map((part) => part[2]).join(", ") }, times.map(([, amount], place) => amount > 0.0005 ? h("i", { class: times[place][0] }, seconds(amount)) : null)) : null),
    times.length ? bar(times) : null,
    each.reasoning ? folded("reasoning", each.reasoning, "m-reasoning") : null,
    each.text || each.streaming ? long(each.text, each.streaming) : null,
    (each.calls || []).map(call));
}

function call(each) {
  let given = each.arguments;
  try { given = JSON.parse(each.arguments || "{}"); } catch { /* unchanged */ }
  const source = { shared: "shared with another row's call", cache: "from the cache" }[each.source];
  return h("div", { class: `call${each.ok === false ? " failed" : ""}` },
    h("header", null, h("b", null, text(each.name)), each.seconds === null || each.seconds === undefined ? null : h("span", null, seconds(each.seconds)), source ? h("span", { class: "good" }, source) : null, each.ok === false ? h("span", { class: "bad" }, "failed") : null),
    typeof given === "object" && given !== null && Object.keys(given).length ? h("div", { class: "given" }, value(given)) : typeof given === "string" && given ? h("pre", { class: "said" }, text(given, LONG)) : null,
    each.result === null || each.result === undefined ? h("p", { class: "quiet" }, each.begun ? "started; no result yet" : "no result") : h("div", { class: "result" }, long(each.result)));
}

function folded(title, content, kind) {
  return h("details", { class: kind }, h("summary", null, text(title), h("span", { class: "quiet" }, ` ${number(content.length)} characters`)), long(content));
}

function long(content, grows) {
  const place = h("pre", { class: "said" });
  const whole = () => fill(place, text(content));
  if (grows || content.length <= LONG) whole();
  else fill(place, text(content.slice(0, LONG)), h("button", { class: "plain more", onclick: whole }, `… all ${number(content.length)} characters`));
  return place;
}

function ending(record) {
  if (record.ok || !record.error) return null;
  return h("article", { class: "m-error" }, h("header", null, h("b", null, text(record.error.type)), h("span", null, "in ", text(record.error.stage)), record.error.retryable ? h("span", null, "a retry may succeed") : null), long(record.error.message || ""), record.error.traceback ? long(record.error.traceback) : null);
}

function facts(record, data) {
  const times = record.timings || {}, usage = record.usage || {};
  const rest = Math.max(0, (times.total || 0) - times.queued - times.inference - times.tool_wait);
  const lines = [
    ["time", seconds(times.total)], ["turns", number(record.turns)], ["attempts", number(record.attempts)],
    ["tokens in", number(usage.prompt_tokens)], ["cached", usage.cached_tokens ? share(usage.cached_tokens, usage.prompt_tokens) : "–"], ["tokens out", number(usage.completion_tokens)],
    usage.reasoning_tokens ? ["reasoning", number(usage.reasoning_tokens)] : null, record.cost === undefined ? null : ["cost", dollars(record.cost)],
    times.first_token ? ["first token", seconds(times.first_token)] : null, record.chunks ? ["parts", number(record.chunks)] : null, record.shortened ? ["shortened", "yes"] : null,
    record.answered_by ? ["answered by", text(record.answered_by, 80)] : null,
  ].filter(Boolean);
  return panel("Numbers", null,
    bar([["f-queue", times.queued || 0, "queue"], ["f-model", times.inference || 0, "model"], ["f-tools", times.tool_wait || 0, "tools"], ["f-rest", rest, "other"]]),
    h("p", { class: "legend quiet" }, [["f-queue", "queue", times.queued], ["f-model", "model", times.inference], ["f-tools", "tools", times.tool_wait]].map(([kind, name, took]) => h("span", null, h("i", { class: kind }), `${name} ${seconds(took)}`))),
    h("dl", { class: "pairs" }, lines.map(([name, amount]) => [h("dt", null, name), h("dd", null, amount)])),
    data.recorded ? null : h("p", { class: "quiet" }, "The answers are not in the journal."));
}

function liveFacts(now) {
  const usage = now.usage || {};
  const lines = [["time", seconds(now.seconds)], ["turns", number(now.turns)], ["attempts", number(now.attempts)], ["endpoint", text(now.endpoint || "–")], ["tokens in", number(usage.prompt_tokens)], ["tokens out", number(usage.completion_tokens)], ["cost", dollars(now.cost)]];
  return panel("Numbers", "live", h("dl", { class: "pairs" }, lines.map(([name, amount]) => [h("dt", null, name), h("dd", null, amount)])));
}

function attempts(list) {
  if (!list || !list.length) return null;
  return panel("Failed attempts", number(list.length), table(["turn", "error", ["time", "r"]], list.map((each) => h("tr", null, h("td", null, String(each.turn)),
    h("td", null, h("span", { class: "bad" }, text(each.type)), each.endpoint ? h("span", { class: "quiet" }, " at ", text(each.endpoint, 40)) : null, h("div", { class: "quiet" }, text(each.message, 300))), h("td", { class: "r" }, seconds(each.seconds))))));
}

const given = (record) => panel("Input", null, value(record.input));

function output(record) {
  return record.ok ? panel("Output", record.repaired ? "repaired JSON" : null, value(record.output)) : record.raw_text ? panel("Last text", null, long(record.raw_text)) : null;
}

// Votes and doubts by field, and the outputs of the samples.
function people(judged) {
  if (!judged || !judged.length) return null;
  return panel("People", null, judged.map((each) => h("article", null,
    h("p", null, h("b", null, text(each.who, 80)), h("span", { class: "quiet" }, ` ${each.queue === "audit" ? "blind" : "repair"}, ${when(each.at)}`)),
    each.kind === "none" ? h("p", null, "no right answer") : value(each.output))));
}

function trust(record) {
  const votes = record.votes || {}, doubts = record.doubts || {}, samples = record.samples || [];
  const names = [...new Set([...Object.keys(votes), ...Object.keys(doubts)])];
  if (!names.length) return null;
  const counts = (vote) => vote ? Object.entries(vote.counts).map(([name, count]) => h("div", null, text(name, 60), h("span", { class: "quiet" }, ` ${number(count)}`))) : "–";
  const lines = names.map((name) => h("tr", null, h("td", null, text(name, 60)), h("td", null, counts(votes[name])), h("td", { class: "r" }, votes[name] ? number(votes[name].against) : "–"), h("td", { class: "r" }, doubted(doubts[name]))));
  return panel("Votes and doubt", samples.length ? `${number(samples.length)} samples` : null,
    table(["field", "votes", ["against", "r"], ["doubt", "r"]], lines),
    samples.map((each, place) => h("details", null, h("summary", null, `sample ${place + 1}`, each === null ? h("span", { class: "bad" }, " failed") : null), each === null ? null : value(each))),
    samples.length ? h("p", { class: "quiet" }, "The conversation is that of the first sample.") : null);
}

// Answers of other entries of a cascade, and whom the row waits for.
function cascade(record) {
  const earlier = record.earlier || [];
  if (!earlier.length && !record.waits_for) return null;
  const lines = earlier.map((each) => h("tr", null, h("td", null, text(each.name, 60)),
    h("td", null, each.error ? h("span", { class: "bad" }, text(each.error.type)) : value(each.output)), h("td", { class: "r" }, doubted(each.doubt))));
  return panel("Cascade", record.answered_by ? `answered by ${record.answered_by}` : null,
    record.waits_for ? h("p", null, "This row waits for ", text(record.waits_for, 60), ".") : null,
    earlier.length ? table(["asked too", "answer", ["doubt", "r"]], lines) : null);
}

function steering(key, now) {
  const said = h("span", { class: "quiet" });
  const act = (what) => async () => { try { await steer(key, { do: what, row: now.job_id }); fill(said, "done"); } catch (error) { fill(said, text(error.message)); } };
  return panel("Control", null, h("div", { class: "line" }, h("button", { onclick: act("retry-row") }, "Restart"), h("button", { class: "danger", onclick: act("cancel-row") }, "Cancel this row"), said));
}

function again(record, command) {
  if (isReport || record.ok) return null;
  return panel("Retry this row", null, h("p", { class: "quiet" }, "When the run has ended, this command retries its failed rows:"), h("pre", { class: "command" }, "batch-agent retry-failed ", text(command), record.error ? ` --type ${record.error.type}` : ""));
}

function rawJson(record) {
  return h("details", { class: "panel raw" }, h("summary", null, "Raw JSON"), h("pre", { class: "said" }, text(JSON.stringify(record, null, 2))));
}
