// Control of a running run.
import { h, fill, panel, table, text, number, seconds, link, address, state } from "./dom.js";
import { get, steer } from "./source.js";

export async function control({ key, page, onNews }) {
  const { run } = await get("run", { run: key });
  const asked = (await get("link", { run: key })).link;
  const invite = panel("Link for reviewers", null, h("p", null, "It reaches the review of this run alone, until the page is stopped."), h("p", { class: "command" }, location.origin + asked));
  const said = h("span", { class: "said-now quiet" }), list = h("div"), now = h("div");
  const inflight = h("input", { type: "number", min: 1, class: "count", "aria-label": "requests in flight" });
  let alive = null, edited = false;
  inflight.addEventListener("input", () => { edited = true; });

  const act = async (request, words) => {
    try { await steer(key, request); fill(said, words); }
    catch (error) { fill(said, h("span", { class: "bad" }, text(error.message))); }
  };
  const button = (word, request, words, kind) => h("button", { class: kind, onclick: () => act(request, words) }, word);
  // Cancelling cannot be undone, so it needs a second click.
  const cancel = h("button", { class: "danger", onclick: () => {
    if (cancel.dataset.sure) { delete cancel.dataset.sure; fill(cancel, "Cancel"); act({ do: "cancel" }, "cancelled"); }
    else { cancel.dataset.sure = 1; fill(cancel, "Really cancel?"); setTimeout(() => { delete cancel.dataset.sure; fill(cancel, "Cancel"); }, 4000); }
  } });
  fill(cancel, "Cancel");
  const buttons = h("div", { class: "line controls" },
    button("Pause", { do: "pause" }, "paused: requests in flight finish"), button("Resume", { do: "resume" }, "resumed"),
    button("Drain", { do: "drain" }, "draining: running rows finish, no other row starts"), cancel,
    h("span", { class: "grow" }), h("label", null, "in flight ", inflight), button("Resize", null, ""), said);
  const resize = buttons.querySelectorAll("button")[4];
  resize.replaceWith(h("button", { onclick: () => { edited = false; act({ do: "resize", inflight: Number(inflight.value) || 0 }, `at most ${inflight.value} in flight`); } }, "Resize"));

  const draw = (news) => {
    if (!news || !news.alive) {
      if (alive !== false) fill(page, panel("Control", null, h("p", { class: "empty" }, "No process works on this run, so it cannot be controlled."), h("p", { class: "quiet" }, "Continue an interrupted run with ", h("code", null, "batch-agent resume ", text(run.command)))), invite);
      alive = false;
      return;
    }
    if (!alive) fill(page, panel("Control", h("span", null, "also: batch-agent control ", text(run.command), " pause"), buttons, now), panel("Running rows", null, list), invite);
    alive = true;
    const { status, rows } = news;
    if (!edited && document.activeElement !== inflight) inflight.value = status.max_inflight ?? "";
    fill(now, h("p", { class: "quiet" }, state(status.state), ` ${number(status.rows.done)}${status.rows.total ? " of " + number(status.rows.total) : ""} rows done, ${number(status.agents.running)} requests in flight, ${number(status.agents.queued)} queued, ${number(status.agents.tools)} at tools`),
      status.workers ? h("p", { class: "quiet" }, "workers: ", text(status.workers.map((each) => `process ${each.pid} on ${each.host}`).join(", "), 600)) : null);
    const lines = (rows || []).map((each) => {
      const name = each.stage ? `${each.stage}/${each.index}` : String(each.index);
      return h("tr", null,
        h("td", null, link(address("run", each.stage ? `${key}/${each.stage}` : key, "row", String(each.index)), text(name))), h("td", { class: "id clip" }, text(each.job_id, 60)),
        h("td", null, h("span", { class: `does ${each.state.split(" ")[0]}` }, each.state)), h("td", { class: "r" }, number(Math.max(1, each.turn))), h("td", { class: "r" }, seconds(status.at - each.began)),
        h("td", { class: "r" }, h("button", { class: "plain", onclick: () => act({ do: "retry-row", row: name }, `row ${name} starts again`) }, "restart"), h("button", { class: "plain bad", onclick: () => act({ do: "cancel-row", row: name }, `row ${name} was cancelled`) }, "cancel")));
    });
    fill(list, table(["row", "id", "state", ["turn", "r"], ["time", "r"], ""], lines), lines.length ? null : h("p", { class: "quiet empty" }, "none"));
  };
  fill(page, h("p", { class: "quiet" }, "…"));
  onNews(draw);
  return {};
}
