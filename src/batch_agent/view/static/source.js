// The source of the page's data: its server, or in a report the file itself.

const report = document.getElementById("report");
const inside = report ? JSON.parse(report.textContent) : null;

export const isReport = inside !== null;

export async function get(what, parameters) {
  if (isReport) return reported(what, parameters);
  const response = await fetch(`/api/${what}?${new URLSearchParams(clean(parameters))}`);
  const answer = await response.json().catch(() => ({ error: `status ${response.status}` }));
  if (!response.ok) throw Object.assign(new Error(answer.error || `status ${response.status}`), answer);
  return answer;
}

export function exported(parameters) {
  return `/api/export?${new URLSearchParams(clean(parameters))}`;
}

export async function steer(run, request) {
  const response = await fetch(`/api/control?${new URLSearchParams({ run })}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request),
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

// Calls back with updates of a run or a row. Returns an object; its `close` ends them.
export function listen(what, parameters, onNews, onEnd) {
  if (isReport) return { close() {} };
  const events = new EventSource(`/api/${what}?${new URLSearchParams(clean(parameters))}`);
  events.onmessage = (event) => onNews(JSON.parse(event.data));
  events.addEventListener("end", () => { events.close(); if (onEnd) onEnd(); });
  return events;
}

function clean(parameters) {
  return Object.fromEntries(Object.entries(parameters || {}).filter(([, value]) => value !== "" && value !== null && value !== undefined));
}

// A report has the named runs, and each stage of a pipeline as another run; two named runs are compared.
function reported(what, asked) {
  if (what === "runs") return { runs: inside.runs.map((each) => each.overview.run), named: inside.named };
  if (what === "compare" && inside.compare) {
    const offset = Number(asked.offset) || 0;
    return { ...inside.compare, offset, rows: inside.compare.rows.slice(offset, offset + Number(asked.limit)) };
  }
  const own = inside.runs.find((each) => each.overview.run.key === asked.run);
  if (!own) throw new Error(`${asked.run} is not in this report`);
  if (what === "run") return own.overview;
  if (what === "timeline") {
    const { from, to } = asked;
    const spans = own.timeline.spans.filter((span) => (!from || span[2] >= from) && (!to || span[1] <= to));
    return { ...own.timeline, spans };
  }
  if (what === "row") {
    const known = own.rows.find((row) => row.job_id === asked.row);
    const found = own.details[known ? known.index : asked.row];
    if (!found) throw new Error(`row ${asked.row} is not in this report`);
    return found;
  }
  if (what === "rows") return reportedRows(own, asked);
  throw new Error("a report does not have this data");
}

const STATES = { ok: (row) => row.ok, failed: (row) => !row.ok, repaired: (row) => row.repaired, retried: (row) => row.attempts > 1, wrong: (row) => row.right && Object.values(row.right).includes(false) };
const SORTS = { index: "index", id: "job_id", state: "ok", turns: "turns", attempts: "attempts", seconds: "seconds", cost: "cost", doubt: "doubt" };

// Whether a row is in a cell of a confusion matrix.
function inCell(cell, rows) {
  const [name, gold, answer] = JSON.parse(cell), same = (value, label) => plain(value) === plain(label);
  const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value)).normalize("NFKC").toLowerCase().split(/\s+/).filter(Boolean).join(" ");
  const field = (output) => (output !== null && typeof output === "object" && name in output ? output[name] : name.split(".").reduce((at, step) => (at !== null && typeof at === "object" ? at[step] : at), output)) ?? null;
  const scored = (row) => row.gold && name in row.gold, classes = new Set(rows.filter(scored).map((row) => plain(row.gold[name])));
  const said = (row) => (!row.ok ? answer === "(failed)" : answer === "(other)" ? !classes.has(plain(field(row.output))) : same(field(row.output), answer));
  return (row) => scored(row) && same(row.gold[name], gold) && said(row);
}

// The words, fields and comparisons of a search, as the server reads them.
const COMPARED = ["turns", "seconds", "cost", "attempts", "index", "doubt"];
const SIGNS = { ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b, "=": (a, b) => a === b };
const texts = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? Object.values(value).map(texts).join("\n") : String(value).toLowerCase());

function found(q) {
  const parts = [...q.matchAll(/(?:([\w.-]+):)?(?:"([^"]*)"|(\S+))/g)].map(([, name, quoted, bare]) => {
    const word = quoted || bare, compared = /^(>=|<=|>|<|=)?(-?\d+(?:\.\d+)?)$/.exec(word || "");
    if (COMPARED.includes(name) && compared) return (row) => row[name] !== null && row[name] !== undefined && SIGNS[compared[1] || "="](row[name], Number(compared[2]));
    const wanted = (word || "").toLowerCase();
    if (!name) return (row) => [row.job_id, row.input, row.output, row.error, row.message].some((each) => texts(each).includes(wanted));
    return (row) => [row.input, row.output].some((each) => each !== null && typeof each === "object" && Object.entries(each).some(([own, value]) => own.toLowerCase() === name.toLowerCase() && texts(value).includes(wanted)));
  });
  return (row) => parts.every((part) => part(row));
}

function reportedRows(own, { offset = 0, limit = 50, sort = "index", dir, state, error, q, cell }) {
  let rows = own.rows;
  if (cell) rows = rows.filter(inCell(cell, rows));
  if (STATES[state]) rows = rows.filter(STATES[state]);
  if (error) rows = rows.filter((row) => row.error === error);
  if (q) rows = rows.filter(found(q));
  const by = sort === "tokens" ? (row) => row.prompt + row.completion : (row) => row[SORTS[sort] || "index"];
  const sign = dir === "desc" ? -1 : 1, missing = (row) => by(row) === null || by(row) === undefined;
  rows = [...rows].sort((a, b) => missing(a) - missing(b) || (by(a) < by(b) ? -sign : by(a) > by(b) ? sign : a.index - b.index));
  return { total: rows.length, offset: Number(offset), rows: rows.slice(Number(offset), Number(offset) + Number(limit)), index: own.overview.index };
}
