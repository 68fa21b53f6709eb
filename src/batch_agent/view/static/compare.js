// Two runs side by side: only the rows whose outputs differ.
import { h, fill, panel, text, number, seconds, dollars, short, share, value, link, address, state, selectable } from "./dom.js";
import { get, exported, isReport } from "./source.js";

const PAGE = 20;
const VERDICTS = [["a", "A"], ["same", "equal"], ["b", "B"]];

export async function compare(page, a, b) {
  const store = `batch-agent-verdicts-${a}-${b}`;
  const verdicts = read(store), keys = {};
  let offset = 0, data = null;

  const load = async (to) => {
    offset = Math.max(0, to);
    data = await get("compare", { a, b, offset, limit: PAGE });
    draw();
  };
  const judge = (id, verdict) => {
    if (verdicts[id] === verdict) delete verdicts[id]; else verdicts[id] = verdict;
    try { localStorage.setItem(store, JSON.stringify(verdicts)); } catch { /* not kept */ }
    draw();
  };
  const draw = () => {
    const { agreement, sides, rows } = data;
    const judged = Object.values(verdicts), tally = VERDICTS.map(([name, title]) => `${title}: ${judged.filter((each) => each === name).length}`).join("  ");
    const lines = rows.map((row) => difference(row, a, b, verdicts[row.job_id], judge));
    fill(page, h("div", { class: "line title" }, h("h1", null, "Compare")), summary(sides, agreement, a, b),
      h("div", { class: "line" }, h("b", null, `${number(agreement.different)} rows differ`), h("span", { class: "quiet" }, judged.length ? `judged ${tally}` : "choose the better output of each row"), h("span", { class: "grow" }),
        h("span", { class: "quiet files" }, isReport ? null : ["export ", h("a", { href: exported({ a, b }), download: "" }, "CSV"), " "], h("button", { class: "plain", disabled: !judged.length, onclick: () => save(a, b, verdicts) }, "verdicts")),
        h("span", { class: "quiet" }, agreement.different ? `${number(offset + 1)}–${number(Math.min(offset + PAGE, agreement.different))}` : ""),
        h("button", { class: "plain", disabled: !offset, onclick: () => load(offset - PAGE) }, "‹"), h("button", { class: "plain", disabled: offset + PAGE >= agreement.different, onclick: () => load(offset + PAGE) }, "›")),
      lines.length ? lines : h("p", { class: "quiet empty" }, agreement.both ? "All outputs are the same." : "The runs have no rows in common: rows are matched by their ids."));
    Object.assign(keys, selectable(lines, (_, place) => { location.hash = address("run", a, "row", rows[place].job_id); }));
  };
  await load(0);
  document.title = `${a} and ${b} · Batch Agent`;
  return { keys: Object.assign(keys, { n: () => offset + PAGE < data.agreement.different && load(offset + PAGE), p: () => offset && load(offset - PAGE) }) };
}

function summary(sides, agreement, a, b) {
  const [one, other] = sides;
  const line = (name, read, better) => {
    const [x, y] = [read(one), read(other)];
    const mark = (mine, theirs) => (better && mine !== null && theirs !== null && mine !== theirs ? ((better === "low") === (mine < theirs) ? "r good" : "r") : "r");
    return [name, x, y, mark, better];
  };
  const cells = [
    ["rows", (side) => number(side.counts.rows)], ["failed", (side) => number(side.counts.failed)], ["cost", (side) => dollars(side.run.cost, side.run.cost_is_minimum)],
    ["time per row", (side) => seconds(side.counts.seconds)], ["turns", (side) => number(side.counts.turns)],
    ["tokens", (side) => `${short(side.counts.tokens.prompt)} in, ${short(side.counts.tokens.completion)} out`], ["repaired", (side) => number(side.counts.repaired)],
  ];
  return panel("Agreement", null, h("div", { class: "agree" },
    h("div", { class: "big" }, agreement.both_ok ? share(agreement.same, agreement.both_ok) : "–"),
    h("div", { class: "quiet" }, `${number(agreement.same)} of ${number(agreement.both_ok)} rows that are ok in both have the same output; `, `${number(agreement.only_a_ok)} are ok only in A, ${number(agreement.only_b_ok)} only in B; ${number(agreement.both)} rows are in both`)),
    h("table", { class: "sides" }, h("thead", null, h("tr", null, h("th"), [[one, "A", a], [other, "B", b]].map(([side, letter, key]) => h("th", { class: "r" }, `${letter} `, link(address("run", key), text(side.run.name)), " ", state(side.run.state))))),
      h("tbody", null, h("tr", null, h("td", null, "model"), [one, other].map((side) => h("td", { class: "r" }, text(side.run.model || "–")))), cells.map(([name, read]) => h("tr", null, h("td", null, name), h("td", { class: "r" }, read(one)), h("td", { class: "r" }, read(other)))))));
}

function difference(row, a, b, verdict, judge) {
  const side = (letter, key, each, other) => h("div", { class: "side" }, h("header", null, h("b", null, letter), link(address("run", key, "row", String(each.index)), `row ${each.index}`), h("span", null, seconds(each.seconds)), h("span", null, `${number(each.turns)} turns`), each.cost === null || each.cost === undefined ? null : h("span", null, dollars(each.cost))),
    each.ok ? h("div", { class: "said" }, changed(each.output, other.output)) : h("p", { class: "bad" }, text(each.error, 400)));
  return h("article", { class: "difference" }, h("header", null, h("b", null, text(row.job_id, 80)), h("span", { class: "quiet clip" }, text(typeof row.input === "string" ? row.input : JSON.stringify(row.input), 200)), h("span", { class: "grow" }),
    h("div", { class: "choice" }, VERDICTS.map(([name, title]) => h("button", { class: verdict === name ? "on" : null, onclick: () => judge(row.job_id, name) }, title)))),
  h("div", { class: "two" }, side("A", a, row.a, row.b), side("B", b, row.b, row.a)));
}

// Return an output with the fields marked that differ from the other run.
function changed(mine, theirs) {
  const both = mine && theirs && typeof mine === "object" && typeof theirs === "object" && !Array.isArray(mine);
  if (!both) return value(mine);
  return h("dl", { class: "fields" }, Object.entries(mine).map(([name, each]) => {
    const same = JSON.stringify(each) === JSON.stringify(theirs[name]);
    return [h("dt", { class: same ? null : "differs" }, text(name)), h("dd", { class: same ? "quiet" : "differs" }, value(each))];
  }));
}

function read(store) {
  try { return JSON.parse(localStorage.getItem(store) || "{}"); } catch { return {}; }
}

function save(a, b, verdicts) {
  const quoted = (cell) => `"${String(cell).replaceAll('"', '""')}"`;
  const lines = [["job_id", "verdict"], ...Object.entries(verdicts).map(([id, each]) => [id, { a, b, same: "same" }[each]])];
  const file = new Blob([lines.map((line) => line.map(quoted).join(",")).join("\n") + "\n"], { type: "text/csv" });
  const address = URL.createObjectURL(file);
  h("a", { href: address, download: "verdicts.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
