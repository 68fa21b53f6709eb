"""The page of a server: log in with a key, and see the batches that it may see. It reads ``/serve/…`` with the key.

The key stays in the tab, and is sent as a header. So another site cannot use it, and there is no cookie to protect.
"""

from __future__ import annotations

from aiohttp import web

HTML = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Batch Agent</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .6rem; vertical-align: top }
tr + tr { border-top: 1px solid #8884 } progress { width: 8rem } .id { font: 13px monospace } #why { color: #b00 }
</style>
<h1>Batches</h1>
<form id="login"><label>Key <input id="key" type="password" autocomplete="off" size="50"></label>
<button>Show</button></form>
<p id="state"></p><p id="why" role="status"></p>
<table id="batches" hidden><thead><tr><th>Batch<th>Tenant<th>Status<th>Progress<th>Failed<th>Lines/s<th>Tokens
<th>Done at<th></tr></thead><tbody></tbody></table>
<script>
const $ = id => document.getElementById(id);
let key = sessionStorage.getItem("key") || "", timer = 0;
const ask = async (path, method = "GET") => {
  const answer = await fetch(path, { method, headers: { Authorization: "Bearer " + key } });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error ? told.error.message : answer.status);
  return told;
};
const cell = (row, content) => { const td = row.insertCell(); td.append(content ?? ""); return td; };
const show = batch => {
  const row = $("batches").tBodies[0].insertRow(), counts = batch.request_counts;
  const bar = document.createElement("progress");
  cell(row, batch.id).className = "id"; cell(row, batch.tenant); cell(row, batch.status);
  bar.max = counts.total || 1; bar.value = counts.completed + counts.failed;
  const done = cell(row, bar); done.append(` ${counts.completed + counts.failed} of ${counts.total}`);
  cell(row, String(counts.failed)); cell(row, batch.lines_per_second === null ? "" : String(batch.lines_per_second));
  cell(row, String(batch.usage.total_tokens));
  const end = batch.completed_at || batch.x_estimated_completion_at;
  cell(row, end ? new Date(end * 1000).toLocaleString() : "");
  const last = cell(row, "");
  if (["validating", "in_progress"].includes(batch.status)) {
    const button = document.createElement("button");
    button.textContent = "Cancel";
    button.onclick = async () => { await ask(`/serve/batches/${batch.id}/cancel`, "POST"); look(); };
    last.append(button);
  }
};
const look = async () => {
  clearTimeout(timer);
  try {
    const [state, listed] = await Promise.all([ask("/serve/status"), ask("/serve/batches")]);
    $("login").hidden = true; $("batches").hidden = false;
    $("state").textContent = `${state.batches} batches in work, ${state.lines_left} lines left, ` +
      `${state.lines_in_flight} in flight`;
    $("why").textContent = [state.waiting_because, state.target_given_up].filter(Boolean).join("; ");
    $("batches").tBodies[0].replaceChildren();
    listed.data.forEach(show);
    timer = setTimeout(look, 2000);
  } catch (error) { $("login").hidden = false; $("why").textContent = error.message; }
};
$("login").onsubmit = event => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("key", key);
  look();
};
if (key) look();
</script></html>
"""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page_response() -> web.Response:
    return web.Response(text=HTML, content_type="text/html", headers=HEADERS)
