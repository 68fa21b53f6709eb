// The table of rows: filtered, sorted and paged by the server.
import { h, fill, panel, text, number, seconds, dollars, short, address, link, selectable, doubted } from "./dom.js";
import { get, exported, isReport } from "./source.js";

const PAGE = 100;
const STATES = [["", "All"], ["ok", "ok"], ["failed", "failed"], ["repaired", "repaired"], ["retried", "retried"]], WRONG = ["wrong", "wrong"];
const COLUMNS = [["index", "#", "r"], ["id", "id", ""], ["state", "state", ""], ["turns", "turns", "r"], ["attempts", "tries", "r"], ["seconds", "time", "r"], ["tokens", "tokens", "r"], ["cost", "cost", "r"], ["doubt", "doubt", "r"], ["right", "right", ""]];

export async function rows({ key, page, go, onNews }) {
  const [place, given] = location.hash.split("?"), hash = new URLSearchParams(given || "");
  if (await stages(key, page)) return {};
  const asked = { offset: 0, sort: "index", dir: "asc", state: "", error: "", q: "", ...Object.fromEntries(hash) };
  asked.offset = Number(asked.offset);
  const keys = {};
  const search = h("input", { type: "search", placeholder: "search input and output; field:value, seconds:>10, doubt:>0.3", value: asked.q, "aria-label": "search", spellcheck: "false" });
  const body = h("div"), count = h("span", { class: "quiet" }), paging = h("span", { class: "paging" });
  const states = h("div", { class: "choice" }), failures = h("select", { "aria-label": "type of error" });
  const files = h("span", { class: "quiet files" }), ofCell = h("span");
  const chosen = h("details", { class: "menu" });
  const hidden = new Set(remembered(key));
  let data = null, loading = 0;

  const load = async (changes) => {
    if (!page.isConnected || location.hash.split("?")[0] !== place) return; // another part was opened: the address is its own
    Object.assign(asked, changes);
    const mine = ++loading;
    const { offset, ...rest } = asked;
    const parameters = new URLSearchParams(Object.entries({ ...rest, offset: offset || "" }).filter(([name, value]) => value && !(name === "sort" && value === "index") && !(name === "dir" && value === "asc")));
    history.replaceState(null, "", place + (parameters.size ? "?" + parameters : ""));
    body.classList.add("waiting");
    try {
      const found = await get("rows", { run: key, limit: PAGE, ...asked });
      if (mine === loading) { data = found; draw(); }
    } catch (error) {
      if (mine === loading) fill(body, h("p", { class: "error" }, text(error.message)));
    }
    body.classList.remove("waiting");
  };

  const draw = () => {
    const scored = data.rows.some((row) => row.right) || asked.state === "wrong" || asked.cell;
    fill(ofCell, asked.cell ? h("button", { class: "plain", title: "show all rows", onclick: () => load({ cell: "", offset: 0 }) }, cellWords(asked.cell), " ✕") : null);
    fill(states, [...STATES, ...(scored ? [WRONG] : [])].map(([name, title]) => h("button", { class: asked.state === name ? "on" : null, onclick: () => load({ state: name, error: name === "failed" ? asked.error : "", offset: 0 }) }, title)));
    const last = Math.min(asked.offset + PAGE, data.total);
    fill(count, data.total ? `${number(asked.offset + 1)}–${number(last)} of ${number(data.total)}` : "no rows", data.index.complete ? null : `, indexing ${Math.round(data.index.share * 100)} %`);
    const turn = (by, title, word) => h("button", { class: "plain", title, disabled: asked.offset + by < 0 || asked.offset + by >= data.total, onclick: () => load({ offset: asked.offset + by }) }, word);
    fill(paging, turn(-PAGE, "the page before (p)", "‹"), turn(PAGE, "the next page (n)", "›"));
    const { offset, ...filter } = asked;
    fill(files, isReport ? null : ["export ", h("a", { href: exported({ run: key, format: "csv", ...filter }), download: "" }, "CSV"), " ", h("a", { href: exported({ run: key, format: "jsonl", ...filter }), download: "" }, "JSONL")]);
    const inputs = fields(data.rows, "input"), outputs = fields(data.rows, "output");
    const named = data.rows.every((row) => row.input && row.input.id === row.job_id);
    const every = [...inputs.filter((name) => !(named && name === "id")).map((name) => ["input", name]), ...outputs.map((name) => ["output", name])];
    const shown = every.filter(([part, name]) => !hidden.has(`${part}.${name}`)).slice(0, 14);
    fill(chosen, h("summary", null, "columns"), h("div", null, every.map(([part, name]) => h("label", null, h("input", { type: "checkbox", checked: !hidden.has(`${part}.${name}`), onchange: (event) => {
      event.target.checked ? hidden.delete(`${part}.${name}`) : hidden.add(`${part}.${name}`);
      remember(key, [...hidden]);
      draw();
    } }), h("i", null, part), " ", text(name || "(text)")))));
    const heading = ([name, title, kind]) => h("th", { class: `${kind} sorts`, "aria-sort": asked.sort === name ? (asked.dir === "desc" ? "descending" : "ascending") : null, onclick: () => load({ sort: name, dir: asked.sort === name ? (asked.dir === "desc" ? "asc" : "desc") : name === "index" || name === "id" ? "asc" : "desc", offset: 0 }) }, title, asked.sort === name ? (asked.dir === "desc" ? " ↓" : " ↑") : "");
    const costs = data.rows.some((row) => row.cost !== null), ids = data.rows.some((row) => row.job_id !== String(row.index));
    const own = COLUMNS.filter(([name]) => (name !== "cost" || costs) && (name !== "id" || ids) && (name !== "doubt" || data.rows.some((row) => row.doubt !== null)) && (name !== "right" || scored) && (name !== "attempts" || data.rows.some((row) => row.attempts > 1)));
    const lines = data.rows.map((row) => h("tr", { class: "opens", onclick: (event) => event.target.tagName !== "A" && go("row", String(row.index)) },
      own.map(([name]) => cell(name, row, key)), shown.map(([part, name], place) => field(row, part, name, !place || shown[place - 1][0] !== part))));
    fill(body, h("div", { class: "scroll" }, h("table", { class: "rows" },
      h("thead", null, h("tr", null, own.map((each) => (each[0] === "right" ? h("th", null, each[1]) : heading(each))), shown.map(([part, name]) => h("th", { class: `${part} clip`, title: name }, text(name || part))))),
      h("tbody", null, lines))));
    Object.assign(keys, selectable(lines, (_, place) => go("row", String(data.rows[place].index))));
  };

  let typing = null;
  search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => load({ q: search.value, offset: 0 }), 250); });
  search.addEventListener("keydown", (event) => event.key === "Enter" && search.blur());
  failures.addEventListener("change", () => load({ error: failures.value, state: failures.value ? "failed" : asked.state, offset: 0 }));
  fill(page, h("div", { class: "line filters" }, states, failures, ofCell, search, chosen, h("span", { class: "grow" }), files, count, paging), body);
  await load({});
  get("run", { run: key }).then(({ failures: list }) => {
    failures.hidden = !list.length;
    fill(failures, h("option", { value: "" }, "any error"), list.map((each) => h("option", { value: each.type, selected: asked.error === each.type }, `${each.type} (${number(each.count)})`)));
  });
  let known = data ? data.index.rows : 0;
  onNews((news) => { if (news.index.rows !== known) { known = news.index.rows; if (!document.hidden) load({}); } });
  return { keys: Object.assign(keys, {
    "/": () => search.focus(),
    n: () => data && asked.offset + PAGE < data.total && load({ offset: asked.offset + PAGE }),
    p: () => asked.offset && load({ offset: Math.max(0, asked.offset - PAGE) }),
  }) };
}

// A pipeline has no rows of its own: show its stages instead.
async function stages(key, page) {
  const { run, counts } = await get("run", { run: key });
  if (!run.stages.length) return false;
  const lines = run.stages.map((name) => h("li", null, link(address("run", `${key}/${name}`, "rows"), text(name))));
  fill(page, panel("Rows", `${number(counts.rows)} in all stages`, h("p", { class: "quiet" }, "Each stage has its own rows:"), h("ul", { class: "list" }, lines)));
  return true;
}

function fields(list, part) {
  const names = new Set();
  for (const row of list) {
    const value = row[part];
    if (value !== null && typeof value === "object") Object.keys(value).forEach((name) => names.add(name));
    else if (value !== null && value !== undefined) names.add("");
  }
  return [...names];
}

function field(row, part, name, first) {
  if (part === "output" && !row.ok) return h("td", { class: "bad clip" }, first ? text(row.message || "", 120) : "");
  const value = row[part], found = name === "" ? (value !== null && typeof value === "object" ? null : value) : value && typeof value === "object" ? value[name] : null;
  return h("td", { class: `clip ${typeof found === "number" ? "r" : ""}` }, found === null || found === undefined ? "" : text(typeof found === "string" ? found.replace(/\s+/g, " ") : String(found), 160));
}

function cell(name, row, key) {
  switch (name) {
    case "index": return h("td", { class: "r" }, link(address("run", key, "row", String(row.index)), String(row.index)));
    case "id": return h("td", { class: "clip id" }, text(row.job_id, 60));
    case "state": return h("td", null, row.ok ? h("span", { class: "good" }, row.repaired ? "ok, repaired" : "ok") : h("span", { class: "bad", title: row.message || "" }, text(row.error, 40)));
    case "seconds": return h("td", { class: "r" }, seconds(row.seconds));
    case "tokens": return h("td", { class: "r" }, short(row.prompt + row.completion));
    case "cost": return h("td", { class: "r" }, dollars(row.cost));
    case "right": return h("td", null, row.right ? Object.entries(row.right).map(([each, good]) => h("span", { class: good ? "good" : "bad", title: `${each}: gold ${JSON.stringify(row.gold[each])}` }, good ? "✓" : "✗")) : "");
    case "doubt": return h("td", { class: "r" }, doubted(row.doubt));
    default: return h("td", { class: "r" }, number(row[name]));
  }
}

// The cell of a confusion matrix, as words.
function cellWords(cell) {
  try {
    const [name, gold, answer] = JSON.parse(cell);
    return text(`${name}: gold ${gold}${answer ? `, answer ${answer}` : ""}`, 80);
  } catch { return text(cell, 80); }
}

function remembered(key) {
  try { return JSON.parse(localStorage.getItem(`batch-agent-columns-${key}`) || "[]"); } catch { return []; }
}

function remember(key, names) {
  try { localStorage.setItem(`batch-agent-columns-${key}`, JSON.stringify(names)); } catch { /* not kept */ }
}
