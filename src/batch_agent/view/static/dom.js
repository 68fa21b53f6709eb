// Elements and text. All text from models, tools and inputs goes through `text`: it becomes text nodes only, and
// characters that would move or hide other text are escaped.

export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "value") element.value = value;
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  put(element, children);
  return element;
}

export function put(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return put(element, children);
}

// Control characters, direction marks, and characters without width.
const ODD = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff])/u;

export function text(value, limit) {
  let shown = typeof value === "string" ? value : value === null || value === undefined ? "" : JSON.stringify(value);
  const cut = limit && shown.length > limit;
  if (cut) shown = shown.slice(0, limit);
  const parts = shown.split(ODD).map((part, place) =>
    place % 2 ? h("span", { class: "odd", title: "an invisible character" }, escaped(part)) : part);
  return cut ? [...parts, "…"] : parts;
}

function escaped(character) {
  if (character === "\u001b") return "\\e";
  const code = character.codePointAt(0);
  return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
}

// The address of a row; one of another stage of a pipeline is named STAGE/INDEX.
export function rowAt(key, row) {
  const [stage, index] = String(row).split("/");
  return index === undefined ? address("run", key, "row", stage) : address("run", `${key}/${stage}`, "row", index);
}

export const number = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));

export function short(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["", "k", "M", "G"]) {
    if (value < 999.5 || unit === "G") return unit ? Number(value.toPrecision(3)) + unit : String(Math.round(value));
    value /= 1000;
  }
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.0005) return "<1 ms";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 60) return `${Math.round(value)} s`;
  const whole = Math.round(value), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours} h ${two(minutes % 60)} min` : `${minutes} min ${two(whole % 60)} s`;
}

// The same words as batch_agent.money makes: "$0.000082", "$1,234.50". "atLeast": a part of the price is not known.
export function dollars(value, atLeast) {
  if (value === null || value === undefined) return "–";
  const small = { maximumSignificantDigits: 2, useGrouping: false }, large = { minimumFractionDigits: 2, maximumFractionDigits: 2 };
  return (atLeast ? "at least $" : "$") + value.toLocaleString("en-US", Math.abs(value) >= 1 ? large : small);
}

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

export const pace = (value) =>
  !value ? "–" : value >= 1 ? `${value.toFixed(value < 10 ? 1 : 0)} rows/s` : `${(value * 60).toFixed(1)} rows/min`;

export function when(value) {
  if (value === null || value === undefined) return "";
  const date = new Date(typeof value === "number" ? value * 1000 : value);
  return isNaN(date) ? String(value ?? "") : date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

export function clock(value) {
  return new Date(value * 1000).toLocaleTimeString("en-GB");
}

export function state(name) {
  const kinds = { running: "live", paused: "warn", draining: "warn", complete: "ok", ok: "ok", failed: "bad" };
  return h("span", { class: `state ${kinds[name] || "warn"}` }, name);
}

export function panel(title, aside, ...children) {
  return h("section", { class: "panel" }, h("h2", null, title, aside ? h("small", null, aside) : null), children);
}

// A table that scrolls within its place if it is too wide for it.
export function table(headings, rows, attributes) {
  return h("div", { class: "scroll" }, h("table", attributes,
    h("thead", null, h("tr", null, headings.map((heading) =>
      h("th", { class: typeof heading === "string" ? null : heading[1] }, typeof heading === "string" ? heading : heading[0])))),
    h("tbody", null, rows)));
}

export const link = (hash, ...children) => h("a", { href: "#" + hash }, children);

export const address = (...parts) => "/" + parts.map(encodeURIComponent).join("/");

// Readable JSON: objects as fields, texts unchanged.
export function value(json, depth = 0) {
  if (json === null || json === undefined) return h("span", { class: "quiet" }, "null");
  if (typeof json === "string") {
    const picture = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/.test(json);
    return picture ? h("img", { src: json, alt: "image", class: "picture" }) : h("span", { class: "said" }, text(json));
  }
  if (typeof json !== "object") return h("span", { class: "number" }, String(json));
  const entries = Array.isArray(json) ? json.map((each, place) => [place, each]) : Object.entries(json);
  if (!entries.length) return h("span", { class: "quiet" }, Array.isArray(json) ? "[]" : "{}");
  if (depth > 6) return h("span", { class: "said" }, text(json));
  return h("dl", { class: "fields" }, entries.map(([name, each]) =>
    [h("dt", null, text(String(name))), h("dd", null, value(each, depth + 1))]));
}

// A doubt is a rank from 0 to 1.
export const doubted = (doubt) => doubt === null || doubt === undefined ? "–" : doubt.toFixed(2);

// j and k move through lines; Enter opens the marked line.
export function selectable(lines, onOpen) {
  let at = -1;
  const move = (to) => {
    if (!lines.length) return;
    if (lines[at]) lines[at].classList.remove("at");
    at = Math.max(0, Math.min(lines.length - 1, to));
    lines[at].classList.add("at");
    lines[at].scrollIntoView({ block: "nearest" });
  };
  return { j: () => move(at + 1), k: () => move(at - 1), Enter: () => lines[at] && onOpen(lines[at], at) };
}
