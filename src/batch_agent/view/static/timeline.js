// Slots and agents over time. Drag to zoom; Esc or a double click shows the whole run again.
import { h, fill, text, number, seconds, clock, panel, rowAt } from "./dom.js";
import { get } from "./source.js";
import { timeChart, legend } from "./charts.js";

const LANE = 11, GAP = 2, AXIS = 18, MOST_LANES = 400, FONT = "11px system-ui, sans-serif";
const AT = 1, RUNNING = 4, QUEUED = 5, TOOLS = 6, BACKING = 7, SLOTS = 13;

export async function timeline({ key, page, onNews }) {
  let data = await get("timeline", { run: key }), by = "slot", range = null, blocks = [], left = 38, loading = false;
  const canvas = h("canvas", { class: "lanes", tabindex: 0, "aria-label": "timeline" }), tip = h("div", { class: "tip", hidden: true });
  const above = h("div"), notes = h("p", { class: "quiet" }), choice = h("div", { class: "choice" });
  const lanes = h("div", { class: "lanes-box" }, canvas, tip);
  const span = () => range || [data.from, data.to];

  const draw = () => {
    fill(choice, [["slot", "By slot"], ["agent", "By row"]].map(([name, title]) => h("button", { class: by === name ? "on" : null, onclick: () => { by = name; draw(); } }, title)));
    const [from, to] = span();
    const marks = changes(data.changes, data.to);
    const samples = data.samples.filter((sample) => sample[AT] >= from - 60 && sample[AT] <= to + 60);
    blocks = lay(data.spans, by, from, to);
    left = margin(canvas, blocks, lanes.clientWidth || 900);
    fill(above, timeChart([
      { points: samples.map((sample) => [sample[AT], sample[RUNNING]]), kind: "area", class: "c1" },
      { points: samples.map((sample) => [sample[AT], sample[QUEUED]]), kind: "line", class: "c4" },
      { points: samples.map((sample) => [sample[AT], sample[TOOLS]]), kind: "line", class: "c3" },
      { points: samples.map((sample) => [sample[AT], sample[BACKING]]), kind: "line", class: "c5" },
      { points: samples.map((sample) => [sample[AT], sample[SLOTS]]), kind: "step", class: "c-limit" },
    ], { height: 110, left, right: 0, marks, from, to }));
    paint(canvas, blocks, left, from, to, marks);
    const kept = data.cut ? " Of a long run, only the first and the latest turns are stored; the curves above show the whole run." : "";
    fill(notes, data.spans.length ? `${number(data.spans.length)} turns and tool calls.${data.left_out ? ` ${number(data.left_out)} more in this period are not shown: zoom in.` : ""}${kept}` : "No turns are recorded yet.", blocks.hidden ? ` ${number(blocks.hidden)} more lanes are not drawn.` : "");
  };
  const zoom = async (to) => {
    range = to;
    if (data.cut || data.left_out) { const more = await get("timeline", { run: key, from: to && to[0], to: to && to[1] }); data = { ...more, from: data.from, to: Math.max(data.to, more.to) }; }
    draw();
  };

  if (data.from === null) {
    fill(page, panel("Timeline", null, h("p", { class: "quiet empty" }, "This run has no timeline: it has not started, or it was recorded by an older version.")));
    return {};
  }
  fill(page, h("section", { class: "panel" }, h("h2", null, "Timeline", h("small", null, legend({ c1: "model", c3: "tools", c4: "waiting for a slot", c5: "backing off", "c-limit": "limit", "c-bad": "failed, outage" }))),
    h("div", { class: "line" }, choice, h("span", { class: "grow" }), h("button", { class: "plain", onclick: () => zoom(null) }, "show all")), above, lanes, notes));
  draw();

  // Dragging
  let start = null;
  const timeAt = (event) => { const box = canvas.getBoundingClientRect(), [from, to] = span(); return from + Math.max(0, (event.clientX - box.left - left) / (box.width - left)) * (to - from); };
  canvas.addEventListener("pointerdown", (event) => { start = [timeAt(event), event.clientX]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (start) { select(lanes, start[1], event.clientX); return; }
    const found = at(blocks, event, canvas, left);
    tip.hidden = !found;
    if (found) { fill(tip, describe(found)); const box = lanes.getBoundingClientRect(); tip.style.left = `${Math.min(event.clientX - box.left + 12, box.width - 260)}px`; tip.style.top = `${event.clientY - box.top + 14}px`; }
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointerup", (event) => {
    const [since, x] = start || [0, event.clientX], until = timeAt(event);
    start = null;
    select(lanes, null);
    if (Math.abs(event.clientX - x) > 5) zoom([Math.min(since, until), Math.max(since, until)]);
    else { const found = at(blocks, event, canvas, left); if (found) location.hash = rowAt(key, found.span[3]); }
  });
  canvas.addEventListener("dblclick", () => zoom(null));
  const resized = () => draw();
  addEventListener("resize", resized);
  let heard = Date.now();
  onNews(async (news) => {
    if (!news.alive || range || loading || Date.now() - heard < 2500) return;
    loading = true;
    try { data = await get("timeline", { run: key }); draw(); } finally { loading = false; heard = Date.now(); }
  });
  return { keys: { Escape: () => (range ? zoom(null) : history.back()) }, redraw: draw, leave: () => removeEventListener("resize", resized) };
}

function changes(list, until) {
  const marks = [], down = {};
  for (const [kind, at, name, what, reason] of list) {
    if (kind === "limit" && reason !== "start") marks.push({ at, to: at, class: "m-limit", title: `limit ${what ?? "none"}${name ? " at " + name : ""}: ${reason}` });
    if (kind === "health" && what === "down" && !(name in down)) down[name] = [at, reason];
    if (kind === "health" && what === "healthy" && name in down) { marks.push({ at: down[name][0], to: at, class: "m-bad", title: `${name || "server"} down: ${down[name][1]}` }); delete down[name]; }
  }
  for (const [name, [at, reason]] of Object.entries(down)) marks.push({ at, to: until, class: "m-bad", title: `${name || "server"} down: ${reason}` });
  return marks;
}

// Blocks with their lanes. A slot is a lane in which turns of an endpoint do not overlap; above the slots of an endpoint
// a lane has its name. Each row has its own lane, with its name at the left.
function lay(spans, by, from, to) {
  const inside = spans.filter((span) => span[2] >= from && span[1] - waited(span) <= to && span[0] !== "rejected").sort((a, b) => a[1] - b[1]);
  const found = [], lanes = [], names = [];
  if (by === "slot") {
    const endpoints = [...new Set(inside.filter((span) => span[0] === "turn").map((span) => span[5]))].sort();
    for (const endpoint of endpoints) {
      const ends = [], first = names.length + 1;
      for (const span of inside) {
        if (span[0] !== "turn" || span[5] !== endpoint) continue;
        let lane = ends.findIndex((end) => end <= span[1] + 1e-4);
        if (lane < 0) lane = ends.length;
        ends[lane] = span[2];
        found.push({ kind: span[8] ? "bad" : "model", start: span[1], end: span[2], lane: first + lane, span });
      }
      names.push(endpoint || "server", ...ends.map(() => ""));
    }
  } else {
    const of = new Map();
    for (const span of inside) {
      if (!of.has(span[3])) { of.set(span[3], names.length); names.push(`row ${span[3]}`); }
      const lane = of.get(span[3]);
      if (span[0] === "tool") { found.push({ kind: span[6] ? "tools" : "bad", start: span[1], end: span[2], lane, span }); continue; }
      const queued = span[1] - span[6], backing = queued - span[7];
      if (span[7] > 0) found.push({ kind: "backing", start: backing, end: queued, lane, span });
      if (span[6] > 0) found.push({ kind: "queue", start: queued, end: span[1], lane, span });
      found.push({ kind: span[8] ? "bad" : "model", start: span[1], end: span[2], lane, span });
    }
  }
  const drawn = found.filter((block) => block.lane < MOST_LANES);
  return Object.assign(drawn, { names: names.slice(0, MOST_LANES), above: by === "slot", hidden: Math.max(0, names.length - MOST_LANES), from, to });
}

const waited = (span) => (span[0] === "turn" ? span[6] + span[7] : 0);

// The width at the left that the names of rows need. Names of endpoints have lanes of their own.
function margin(canvas, blocks, width) {
  if (blocks.above) return 38;
  const pen = canvas.getContext("2d");
  pen.font = FONT;
  return Math.max(38, Math.min(0.4 * width, 10 + Math.max(0, ...blocks.names.map((name) => pen.measureText(name).width))));
}

// A name in at most so many pixels: its middle is left out, because names of servers and rows differ at their ends.
function fitted(pen, name, width) {
  for (let cut = name.length; cut > 3; cut--) {
    const shown = cut === name.length ? name : `${name.slice(0, cut >> 1)}…${name.slice(name.length - ((cut - 1) >> 1))}`;
    if (pen.measureText(shown).width <= width) return shown;
  }
  return "…";
}

function paint(canvas, blocks, left, from, to, marks) {
  const width = canvas.parentElement.clientWidth || 900, height = blocks.names.length * (LANE + GAP) + AXIS + 4, scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const x = (time) => left + ((time - from) / (to - from || 1)) * (width - left);
  pen.scale(scale, scale);
  pen.font = FONT;
  pen.fillStyle = colour("--ink-quiet");
  const step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400].find((each) => (to - from) / each <= Math.max(1, (width - left) / 90)) || 86400;
  for (let time = 0; time <= to - from; time += step) {
    pen.fillStyle = colour("--ink-quiet");
    const shown = time ? `+${seconds(time)}` : clock(from), place = x(from + time) + 2;
    if (place + pen.measureText(shown).width <= width) pen.fillText(shown, place, 10);
    pen.fillStyle = colour("--rule");
    pen.fillRect(x(from + time), 0, 1, height);
  }
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, width - left, height);
  pen.clip();
  for (const mark of marks) {
    pen.fillStyle = mark.class === "m-bad" ? colour("--bad-soft") : colour("--limit");
    pen.fillRect(x(mark.at), AXIS, Math.max(1, x(mark.to) - x(mark.at)), height);
  }
  const colours = { model: colour("--c1"), tools: colour("--c3"), queue: colour("--c4"), backing: colour("--c5"), bad: colour("--bad") };
  for (const block of blocks) {
    pen.fillStyle = colours[block.kind];
    pen.fillRect(x(block.start), AXIS + block.lane * (LANE + GAP), Math.max(1, x(block.end) - x(block.start) - 0.5), LANE);
  }
  pen.restore();
  pen.textAlign = blocks.above ? "left" : "right";
  pen.fillStyle = colour("--ink-quiet");
  const [place, room] = blocks.above ? [0, width] : [left - 6, left - 6];
  blocks.names.forEach((name, lane) => name && pen.fillText(fitted(pen, name, room), place, AXIS + lane * (LANE + GAP) + 9));
}

function at(blocks, event, canvas, left) {
  const box = canvas.getBoundingClientRect(), lane = Math.floor((event.clientY - box.top - AXIS) / (LANE + GAP));
  const per = (blocks.to - blocks.from) / (box.width - left), time = blocks.from + (event.clientX - box.left - left) * per;
  return blocks.findLast((block) => block.lane === lane && block.start - 2 * per <= time && block.end + 2 * per >= time);
}

function describe({ span, kind }) {
  const lines = [[`row ${span[3]}, turn ${span[4]}`]];
  if (span[0] === "tool") lines.push(["tool ", text(span[5]), ` ${seconds(span[2] - span[1])}`], [span[6] ? "ok" : "failed", span[7] === "run" ? "" : `, ${span[7]}`]);
  else lines.push([`model ${seconds(span[2] - span[1])}`], [`waited ${seconds(span[6])}${span[7] ? `, backed off ${seconds(span[7])}` : ""}`], [text(span[5])], span[8] ? [text(`${span[8]}: ${span[9]}`, 200)] : [`${number(span[10])} in, ${number(span[12])} out`]);
  return lines.map((line) => h("div", { class: line === lines[0] ? "first" : null }, line));
}

function select(box, from, to) {
  let mark = box.querySelector(".selected");
  if (from === null) { if (mark) mark.remove(); return; }
  if (!mark) { mark = h("div", { class: "selected" }); box.append(mark); }
  const left = box.getBoundingClientRect().left;
  mark.style.left = `${Math.min(from, to) - left}px`;
  mark.style.width = `${Math.abs(to - from)}px`;
}
