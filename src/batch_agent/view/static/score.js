// The score of a run with gold: numbers per field, and the confusion matrix, whose cells open their rows.
import { h, panel, table, text, number, link, address } from "./dom.js";

const CLASSES = 12; // of a matrix that is shown
const percent = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 0.99 || value === 1 ? 2 : 4));
const down = (value) => percent(value === null || value === undefined ? value : Math.floor(value * 10000) / 10000);

export function score({ score: found, answers }, key) {
  if (!found) return null;
  const own = answers ? `${key}/${answers}` : key, names = Object.keys(found.fields);
  const line = (name, each) => h("tr", null, h("td", null, text(name, 60)), h("td", { class: "r" }, percent(each.accuracy)), h("td", { class: "r" }, `${number(each.right)} of ${number(each.rows)}`),
    h("td", { class: "r" }, down(each.bound)), h("td", { class: "r" }, each.interval ? `${down(each.interval[0])}–${percent(each.interval[1])}` : "–"),
    h("td", { class: "r", title: each.majority_class ? `always saying ${each.majority_class}` : "" }, percent(each.majority)), h("td", { class: "r" }, percent(each.coverage)));
  const lines = names.map((name) => line(name, found.fields[name]));
  if (names.length > 1) lines.push(line("all", found.all));
  const notes = [found.pending ? `${number(found.pending)} rows are not finished: they count as wrong in the bounds.` : null, found.excluded ? `${number(found.excluded)} rows are examples in the prompt, and left out.` : null,
    found.sealed ? `The gold of ${number(found.sealed)} rows is sealed.` : null, ...(found.notes || []), ...(found.require || []).map((each) => `${each.require}: ${each.met ? "met" : "not met"}`)].filter(Boolean);
  return panel("Score", `of ${found.sample}`,
    table(["field", ["accuracy", "r"], ["right", "r"], ["at least", "r"], ["interval", "r"], ["most frequent", "r"], ["answered", "r"]], lines),
    notes.map((note) => h("p", { class: "quiet" }, text(note, 300))),
    h("p", null, link(address("run", own, "rows") + "?state=wrong", "the wrong rows")),
    names.map((name) => matrix(name, found.fields[name].confusion, own)));
}

function matrix(name, confusion, key) {
  const golds = Object.keys(confusion || {});
  if (!golds.length) return null;
  const said = [...new Set([...golds, ...golds.flatMap((gold) => Object.keys(confusion[gold]))])].sort((a, b) => a.startsWith("(") - b.startsWith("("));
  if (said.length > CLASSES) return h("p", { class: "quiet" }, text(name, 60), `: ${number(golds.length)} classes, too many for a matrix here`);
  const cell = (gold, answer) => {
    const count = confusion[gold][answer] || 0, at = JSON.stringify([name, gold, answer === "(other)" ? "" : answer]);
    return h("td", { class: `r ${gold === answer ? "good" : count ? "bad" : "quiet"}` }, count ? link(`${address("run", key, "rows")}?cell=${encodeURIComponent(at)}`, number(count)) : "0");
  };
  return h("div", { class: "matrix" }, h("h3", null, text(name, 60), h("span", { class: "quiet" }, ": gold by line, answers by column")),
    table(["gold", ...said.map((answer) => [text(answer, 24), "r"])], golds.map((gold) => h("tr", null, h("th", null, text(gold, 40)), said.map((answer) => cell(gold, answer))))));
}

// The gold of one row.
export function golds({ gold, right, record }) {
  if (!gold) return null;
  const shown = (value) => text(typeof value === "string" ? value : JSON.stringify(value), 300);
  return panel("Gold", null, table(["field", "gold", ""], Object.keys(gold).map((name) => h("tr", null, h("td", null, text(name, 60)), h("td", null, shown(gold[name])),
    h("td", { class: right[name] ? "good" : "bad" }, right[name] ? "right" : record.ok ? "wrong" : "failed")))));
}
