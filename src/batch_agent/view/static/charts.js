// Small charts in SVG. Times are seconds since 1970.
import { h, clock, seconds, short } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value !== null && value !== undefined) element.setAttribute(name, value);
  for (const child of children.flat(Infinity)) if (child) element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  return element;
}

// Round numbers that divide a range in about `count` parts.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

// series: [{ points: [[time, value | null], ...], kind: "area" | "line" | "step", class, name }]
export function timeChart(series, { height = 120, width = 640, marks = [], format = short, from, to, floor = 1, left = 38, right = 6, few = false } = {}) {
  const every = series.flatMap((each) => each.points);
  if (every.length < 2) return h("p", { class: "quiet empty" }, "no samples yet");
  const top = 8, bottom = 18;
  const low = from ?? Math.min(...every.map(([at]) => at)), high = to ?? Math.max(...every.map(([at]) => at));
  const most = Math.max(floor, ...every.map(([, value]) => value ?? 0)) * 1.06;
  const x = (at) => left + ((at - low) / (high - low || 1)) * (width - left - right);
  const y = (value) => height - bottom - (value / most) * (height - top - bottom);
  const grid = ticks(0, most, few ? 2 : 3).map((value) => [
    svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid" }),
    svg("text", { x: left - 5, y: y(value) + 3, class: "label end" }, format(value)),
  ]);
  const span = high - low;
  const times = ticks(0, span, few ? 2 : 5).map((value) =>
    svg("text", { x: x(low + value), y: height - 4, class: value ? "label middle" : "label" }, value ? seconds(value) : clock(low)));
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
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img" }, grid, flags, lines, times);
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

// parts: [[class, amount, title], ...]
export function bar(parts, whole) {
  const total = whole || parts.reduce((sum, [, amount]) => sum + amount, 0) || 1;
  return h("div", { class: "bar" }, parts.map(([kind, amount, title]) =>
    amount ? h("span", { class: kind, title, style: { width: `${Math.max(0.4, (100 * amount) / total)}%` } }) : null));
}

// A graph of stages: columns by their distance from the beginning.
export function stageGraph(nodes, onOpen) {
  const depth = {};
  const of = (node) => (depth[node.name] ??= Math.max(-1, ...node.after.map((name) => of(nodes.find((each) => each.name === name) || { name, after: [] }))) + 1);
  nodes.forEach(of);
  const columns = [];
  nodes.forEach((node) => (columns[depth[node.name]] ??= []).push(node));
  const w = 168, gap = 44, rowHeight = 74, most = Math.max(...columns.map((column) => column.length));
  const place = {};
  columns.forEach((column, x) => column.forEach((node, y) => {
    place[node.name] = [4 + x * (w + gap), 4 + (y + (most - column.length) / 2) * rowHeight];
  }));
  const edges = nodes.flatMap((node) => node.after.map((name) => {
    const [x1, y1] = place[name], [x2, y2] = place[node.name], a = x1 + w, b = x2;
    return svg("path", { d: `M${a} ${y1 + 29}C${a + gap / 2} ${y1 + 29} ${b - gap / 2} ${y2 + 29} ${b} ${y2 + 29}`, class: "edge" });
  }));
  const boxes = nodes.map((node) => {
    const [x, y] = place[node.name], rows = node.status && node.status.rows;
    const share = rows && rows.total ? rows.done / rows.total : rows && node.status.state === "complete" ? 1 : 0;
    const box = svg("g", { class: `stage${rows ? " opens" : ""}`, transform: `translate(${x} ${y})`, tabindex: rows ? 0 : null, role: rows ? "link" : null },
      svg("rect", { width: w, height: 58, rx: 6 }),
      rows ? svg("rect", { x: 12, y: 46, width: w - 24, height: 3, rx: 1.5, class: "rail" }) : null,
      rows ? svg("rect", { x: 12, y: 46, width: (w - 24) * share, height: 3, rx: 1.5, class: "done" }) : null,
      svg("text", { x: 12, y: 20, class: "name" }, node.name.slice(0, 20)),
      svg("text", { x: w - 12, y: 20, class: "kind" }, node.kind),
      svg("text", { x: 12, y: 38, class: "count" }, rows ? `${short(rows.done)}${rows.total ? " of " + short(rows.total) : ""} done${rows.failed ? `, ${short(rows.failed)} failed` : ""}` : "a function"));
    if (rows) {
      box.addEventListener("click", () => onOpen(node.name));
      box.addEventListener("keydown", (event) => event.key === "Enter" && onOpen(node.name));
    }
    return box;
  });
  const width = columns.length * (w + gap) - gap + 8;
  return h("div", { class: "scroll" }, svg("svg", { viewBox: `0 0 ${width} ${most * rowHeight}`, width, height: most * rowHeight, class: "stages" }, edges, boxes));
}
