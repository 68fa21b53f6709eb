// Small charts in SVG, drawn at the width of their place, so that their text has one size on every screen. Times are
// seconds since 1970.
import { h, clock, seconds, short } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value !== null && value !== undefined) element.setAttribute(name, value);
  for (const child of children.flat(Infinity)) if (child) element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  return element;
}

// An element that is drawn again when its width changes.
function sized(attributes, draw) {
  const box = h("div", attributes);
  let drawn = 0;
  const at = (width) => { if (width > 0 && width !== drawn) { drawn = width; box.replaceChildren(draw(width)); } };
  at(Math.max(200, document.documentElement.clientWidth - 56)); // until it has a place
  new ResizeObserver(() => at(box.clientWidth)).observe(box);
  return box;
}

// Round numbers that divide a range in at most `count` parts, none smaller than `least`.
function ticks(low, high, count, least = 0) {
  const rough = Math.max(least, (high - low) / count) || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

// Counts over time: [{ points: [[time, count | null], ...], kind: "area" | "line" | "step", class, name }]
export function timeChart(series, { height = 120, marks = [], from, to, left = 38, right = 6 } = {}) {
  const every = series.flatMap((each) => each.points);
  if (every.length < 2) return h("p", { class: "quiet empty" }, "no samples yet");
  return sized({ class: "chart", style: { height: `${height}px` } }, (width) => drawn(series, every, { width, height, marks, from, to, left, right }));
}

function drawn(series, every, { width, height, marks, from, to, left, right }) {
  const top = 8, bottom = 18;
  const low = from ?? Math.min(...every.map(([at]) => at)), high = to ?? Math.max(...every.map(([at]) => at));
  const most = Math.max(1, ...every.map(([, value]) => value ?? 0)) * 1.06;
  const x = (at) => left + ((at - low) / (high - low || 1)) * (width - left - right);
  const y = (value) => height - bottom - (value / most) * (height - top - bottom);
  const grid = ticks(0, most, height < 100 ? 2 : 3, 1).map((value) => [
    svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid" }),
    svg("text", { x: left - 5, y: y(value) + 3, class: "label end" }, short(value)),
  ]);
  const span = high - low;
  const times = ticks(0, span, Math.max(1, Math.floor((width - left - right) / 90))).map((value) =>
    svg("text", { x: x(low + value), y: height - 4, class: !value ? "label" : width - x(low + value) < 40 ? "label end" : "label middle" }, value ? seconds(value) : clock(low)));
  const lines = series.map((each) => {
    const drawn = each.points.filter(([, value]) => value !== null && value !== undefined);
    if (!drawn.length) return null;
    let path = "";
    drawn.forEach(([at, value], place) => {
      if (place && each.kind === "step") path += `H${x(at).toFixed(1)}V${y(value).toFixed(1)}`;
      else path += `${place ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    const ends = [drawn[0][0], drawn[drawn.length - 1][0]];
    const area = each.kind === "area" ? svg("path", { d: `${path}L${x(ends[1])} ${y(0)}L${x(ends[0])} ${y(0)}Z`, class: `fill ${each.class}` }) : null;
    return [area, svg("path", { d: path, class: `line ${each.class}` })];
  });
  const flags = marks.filter((mark) => mark.to >= low && mark.at <= high).map((mark) =>
    svg("rect", { x: x(Math.max(low, mark.at)), y: top, width: Math.max(1.5, x(Math.min(high, mark.to)) - x(Math.max(low, mark.at))), height: height - top - bottom, class: `mark ${mark.class}` },
      svg("title", null, mark.title)));
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" }, grid, flags, lines, times);
}

export function spark(points, { width = 120, height = 26, class: kind = "c1" } = {}) {
  const drawn = points.filter((value) => value !== null && value !== undefined);
  if (drawn.length < 2) return null;
  const most = Math.max(...drawn, 1e-9);
  const path = drawn.map((value, place) =>
    `${place ? "L" : "M"}${((place / (drawn.length - 1)) * width).toFixed(1)} ${(height - 2 - (value / most) * (height - 4)).toFixed(1)}`).join("");
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { d: `${path}L${width} ${height}L0 ${height}Z`, class: `fill ${kind}` }), svg("path", { d: path, class: `line ${kind}` }));
}

export const legend = (lines) => h("span", { class: "legend" }, Object.entries(lines).map(([kind, name]) => h("span", null, h("i", { class: kind }), name)));

// parts: [[class, amount, title], ...]
export function bar(parts, whole) {
  const total = whole || parts.reduce((sum, [, amount]) => sum + amount, 0) || 1;
  return h("div", { class: "bar" }, parts.map(([kind, amount, title]) =>
    amount ? h("span", { class: kind, title, style: { width: `${Math.max(0.4, (100 * amount) / total)}%` } }) : null));
}

// A graph of stages by their distance from the beginning: from left to right, or from top to bottom if that is too wide.
export function stageGraph(nodes, onOpen) {
  const depth = {};
  const of = (node) => (depth[node.name] ??= Math.max(-1, ...node.after.map((name) => of(nodes.find((each) => each.name === name) || { name, after: [] }))) + 1);
  nodes.forEach(of);
  const steps = [];
  nodes.forEach((node) => (steps[depth[node.name]] ??= []).push(node));
  const most = Math.max(...steps.map((step) => step.length)), gap = 44, high = 58;
  return h("div", { class: "scroll" }, sized({ class: "stages" }, (wide) => {
    const down = steps.length * (168 + gap) - gap + 8 > wide;
    const w = down ? Math.max(150, Math.min(360, Math.floor((wide - 8 + 12) / most) - 12)) : 168;
    const across = (place, count) => place + (most - count) / 2; // siblings stand in the middle
    const place = {};
    steps.forEach((step, along) => step.forEach((node, beside) => {
      const side = across(beside, step.length);
      place[node.name] = down ? [4 + side * (w + 12), 4 + along * (high + 26)] : [4 + along * (w + gap), 4 + side * (high + 16)];
    }));
    const edges = nodes.flatMap((node) => node.after.map((name) => {
      const [x1, y1] = place[name], [x2, y2] = place[node.name];
      const d = down
        ? `M${x1 + w / 2} ${y1 + high}C${x1 + w / 2} ${y1 + high + 13} ${x2 + w / 2} ${y2 - 13} ${x2 + w / 2} ${y2}`
        : `M${x1 + w} ${y1 + 29}C${x1 + w + gap / 2} ${y1 + 29} ${x2 - gap / 2} ${y2 + 29} ${x2} ${y2 + 29}`;
      return svg("path", { d, class: "edge" });
    }));
    const boxes = nodes.map((node) => stage(node, place[node.name], w, high, onOpen));
    const [width, height] = down ? [most * (w + 12) - 12 + 8, steps.length * (high + 26) - 26 + 8] : [steps.length * (w + gap) - gap + 8, most * (high + 16) - 16 + 8];
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height }, edges, boxes);
  }));
}

function stage(node, [x, y], w, high, onOpen) {
  const rows = node.status && node.status.rows, letters = Math.floor((w - 70) / 6);
  const share = rows && rows.total ? rows.done / rows.total : rows && node.status.state === "complete" ? 1 : 0;
  const box = svg("g", { class: `stage${rows ? " opens" : ""}`, transform: `translate(${x} ${y})`, tabindex: rows ? 0 : null, role: rows ? "link" : null },
    svg("title", null, node.name),
    svg("rect", { width: w, height: high, rx: 6 }),
    rows ? svg("rect", { x: 12, y: 46, width: w - 24, height: 3, rx: 1.5, class: "rail" }) : null,
    rows ? svg("rect", { x: 12, y: 46, width: (w - 24) * share, height: 3, rx: 1.5, class: "done" }) : null,
    svg("text", { x: 12, y: 20, class: "name" }, node.name.length > letters ? `${node.name.slice(0, letters - 1)}…` : node.name),
    svg("text", { x: w - 12, y: 20, class: "kind" }, node.kind),
    svg("text", { x: 12, y: 38, class: "count" }, rows ? `${short(rows.done)}${rows.total ? " of " + short(rows.total) : ""} done${rows.failed ? `, ${short(rows.failed)} failed` : ""}` : "a function"));
  if (rows) {
    box.addEventListener("click", () => onOpen(node.name));
    box.addEventListener("keydown", (event) => event.key === "Enter" && onOpen(node.name));
  }
  return box;
}
