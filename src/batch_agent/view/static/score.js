// The score of a run with gold: numbers per field, and the confusion matrix, whose cells open their rows.
import { h, panel, table, text, number, link, address } from "./dom.js";

const CLASSES = 12; // of a matrix that is shown
const none = (value) => value === null || value === undefined;
// A bound is rounded away from the measured value: rounding it up would promise more. What is not 1 does not look like 1.
const rounded = (value, round) => {
  const digits = value >= 0.99 && value < 1 ? 4 : 2;
  return (round(value * 10 ** digits) / 10 ** digits).toFixed(digits);
};
const measured = (value) => (none(value) ? "–" : value < 0.99 || value === 1 ? value.toFixed(2) : rounded(value, Math.floor));
const down = (value) => (none(value) ? "–" : rounded(value, (each) => Math.floor(each + 1e-9)));
const up = (value) => (none(value) ? "–" : (Math.ceil(value * 100 - 1e-9) / 100).toFixed(2));
const interval = (found) => (found ? `${down(found[0])}–${up(found[1])}` : "–");
const short = (value) => (none(value) ? "unlimited" : String(Number(value.toPrecision(4))));
const opened = new Set(); // parts that stay open when the page is drawn again
const fold = (name, title, ...content) => h("details", { class: "scroll", open: opened.has(name), ontoggle: (event) => (event.target.open ? opened.add(name) : opened.delete(name)) }, h("summary", null, title), content);
const right = (content, attributes) => h("td", { class: "r", ...attributes }, content);

export function score({ score: found, answers }, key) {
  if (!found) return null;
  const own = answers ? `${key}/${answers}` : key, names = Object.keys(found.fields);
  const line = (name, each) => h("tr", null, h("td", null, text(name, 60)), right(measured(each.accuracy)), right(`${number(each.right)} of ${number(each.rows)}`),
    right(down(each.bound)), right(interval(each.interval)), right(measured(each.majority), { title: each.majority_class ? `always saying ${each.majority_class}` : "" }), right(measured(each.coverage)));
  const every = (fields, all) => [...names.map((name) => [name, fields[name]]), ...(names.length > 1 ? [["all", all]] : [])];
  const looks = found.looks && found.basis !== "random" ? `This gold was looked at ${found.looks === 1 ? "once" : `${number(found.looks)} times`} before.` : null;
  const notes = [looks, found.pending ? `${number(found.pending)} rows are not finished: they count as wrong in the bounds.` : null, found.excluded ? `${number(found.excluded)} rows are examples in the prompt, and left out.` : null,
    found.sealed ? `The gold of ${number(found.sealed)} rows is sealed.` : null, ...(found.notes || []), ...(found.require || []).map((each) => `${each.require}: ${each.met ? "met" : "not met"}`)].filter(Boolean);
  return panel("Score", `of ${found.sample}`,
    table(["field", ["accuracy", "r"], ["right", "r"], ["at least", "r"], ["interval", "r"], ["most frequent", "r"], ["answered", "r"]], every(found.fields, found.all).map(([name, each]) => line(name, each))),
    notes.map((note) => h("p", { class: "quiet" }, text(note, 300))),
    h("p", null, link(address("run", own, "rows") + "?state=wrong", "the wrong rows")),
    names.map((name) => [errors(name, found.fields[name]), matrix(name, found.fields[name].confusion, own), classes(name, found.fields[name].classes)]),
    found.by && fold("by", ["by ", text(found.by.column, 60)], table([[text(found.by.column, 60), null], "field", ["accuracy", "r"], ["right", "r"], ["at least", "r"], ["interval", "r"]],
      Object.entries(found.by.values).flatMap(([value, fields]) => every(fields, fields.all).map(([name, each]) => h("tr", null, h("td", null, text(value, 60)), h("td", null, text(name, 60)),
        right(measured(each.accuracy)), right(`${number(each.right)} of ${number(each.rows)}`), right(down(each.bound)), right(interval(each.interval))))))));
}

// How the promise of a run stands; a report has its certificate too.
export function promise({ promise: found }) {
  if (!found) return null;
  const [state, ...lines] = found.lines;
  return panel("Promise", found.state, h("p", { class: found.state === "kept" ? null : "warn" }, text(state, 300)), lines.map((line) => h("p", { class: "quiet" }, text(line, 300))),
    found.certificate ? fold("certificate", "the certificate", h("pre", null, JSON.stringify(found.certificate, null, 1))) : null);
}

// How far numbers are from their gold.
function errors(name, { median_error: middle, mean_absolute_error: mean, bias }) {
  if (!middle) return null;
  const means = mean && bias ? `; mean absolute error ${short(mean.value)}, bias ${short(bias.value)} (approximate)` : "";
  return h("p", { class: "quiet" }, text(name, 60), `: median error ${short(middle.value)}, at most ${short(middle.at_most)}${means}`);
}

function classes(name, found) {
  if (!found) return null;
  const share = (each) => [right(measured(each.value)), right(down(each.bound))];
  const lines = Object.entries(found).slice(0, CLASSES).map(([own, each]) => h("tr", null, h("td", null, text(own, 40)), right(number(each.rows)), share(each.precision), share(each.recall), share(each.f1)));
  return fold(`of ${name}`, ["classes of ", text(name, 60)],
    table(["class", ["rows", "r"], ["precision", "r"], ["at least", "r"], ["recall", "r"], ["at least", "r"], ["F1", "r"], ["at least", "r"]], lines));
}

function matrix(name, confusion, key) {
  const golds = Object.keys(confusion || {});
  if (!golds.length) return null;
  const said = [...new Set([...golds, ...golds.flatMap((gold) => Object.keys(confusion[gold]))])].sort((a, b) => a.startsWith("(") - b.startsWith("("));
  if (said.length > CLASSES) return h("p", { class: "quiet" }, text(name, 60), `: ${number(golds.length)} classes, too many for a matrix here`);
  const cell = (gold, answer) => {
    const count = confusion[gold][answer] || 0, at = JSON.stringify([name, gold, answer]);
    return h("td", { class: `r ${gold === answer ? "good" : count ? "bad" : "quiet"}` }, count ? link(`${address("run", key, "rows")}?cell=${encodeURIComponent(at)}`, number(count)) : "0");
  };
  return h("div", { class: "matrix" }, h("h3", null, text(name, 60), h("span", { class: "quiet" }, ": gold by line, answers by column")),
    table(["gold", ...said.map((answer) => [text(answer, 24), "r"])], golds.map((gold) => h("tr", null, h("th", null, text(gold, 40)), said.map((answer) => cell(gold, answer))))));
}

// The gold of one row.
export function golds({ gold, right: rights, record }) {
  if (!gold) return null;
  const shown = (value) => text(typeof value === "string" ? value : JSON.stringify(value), 300);
  return panel("Gold", null, table(["field", "gold", ""], Object.keys(gold).map((name) => h("tr", null, h("td", null, text(name, 60)), h("td", null, shown(gold[name])),
    h("td", { class: rights[name] ? "good" : "bad" }, rights[name] ? "right" : record.ok ? "wrong" : "failed")))));
}
