// Draws the frames that /events sends. All text is set as text, so that no name in a table can be markup.
"use strict";

const KEPT = 300; // frames of rates: five minutes
const MAX_HEIGHT = 48; // pixels of the tallest bar of a histogram
const history = new Map(); // table -> [{put, done}]
const at = (id) => document.getElementById(id);

function made(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

const count = (n) => (n === null ? "–" : n.toLocaleString("en"));
const rate = (n) => (n === undefined ? "–" : n < 10 ? n.toFixed(1) : count(Math.round(n)));

function span(s) {
  if (s === null) return "–";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 120) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  return s < 7200 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 3600)} h`;
}

function size(n) {
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (n >= unit) return `${(n / unit).toFixed(1)} ${name}`;
  }
  return `${n} B`;
}

function head(frame) {
  const server = frame.stats.server;
  at("where").textContent =
    `${frame.address} · up ${span(server.uptime_s)} · ${count(frame.stats.sessions)} sessions · ${server.version}`;
  at("arena").value = server.capacity_bytes ? server.used_bytes / server.capacity_bytes : 0;
  at("arena-text").textContent =
    ` ${size(server.used_bytes)} lent of ${size(server.capacity_bytes)}, ${size(server.backed_bytes)} taken from the system`;
}

function doctor(found) {
  const told = [...Object.entries(found.tables), ["", found.elsewhere]];
  at("doctor").replaceChildren(
    ...told.flatMap(([table, findings]) =>
      findings.map((one) => made("li", table ? `${table}: ${one.text}` : one.text, one.stalled ? "bad" : ""))),
  );
}

function facts(table, rates) {
  const parts = [
    `${count(table.rows_live)} of ${count(table.rows_limit)} rows`,
    table.bytes_limit ? `${size(table.bytes)} of ${size(table.bytes_limit)}` : size(table.bytes),
    `${rate(rates?.put_s)} in/s`, `${rate(rates?.done_s)} done/s`, `oldest ${span(table.age_s)}`, `version ${table.version}`,
  ];
  if (table.outstanding_limit !== null) parts.push(`${count(table.outstanding)} of ${count(table.outstanding_limit)} ahead`);
  for (const [reason, rows] of Object.entries(table.dropped)) parts.push(`${count(rows)} dropped (${reason})`);
  if (table.sealed) parts.push("sealed");
  return made("p", parts.join(" · "), "facts");
}

function tasks(table, rates) {
  const names = ["pending", "held", "ready", "leased", "done", "dropped", "failed"];
  const grid = made("table");
  const top = grid.createTHead().insertRow();
  for (const name of ["task", ...names, "given/s", "done/s", "oldest"]) top.append(made("th", name));
  const body = grid.createTBody();
  for (const [name, task] of Object.entries(table.tasks)) {
    const line = body.insertRow();
    const moving = rates?.tasks[name];
    const values = [name, ...names.map((one) => count(task[one])), rate(moving?.given_s), rate(moving?.done_s), span(task.age_s)];
    for (const value of values) line.append(made("td", value));
  }
  const scroll = made("div", "", "scroll");
  scroll.append(grid);
  return scroll;
}

function line(kind, points, most) {
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  drawn.setAttribute("class", kind);
  drawn.setAttribute("points", points.map((y, x) => `${x + KEPT - points.length},${100 - (98 * y) / most}`).join(" "));
  return drawn;
}

function timeline(name, rates) {
  const kept = history.get(name) ?? [];
  if (rates) kept.push({ put: rates.put_s, done: rates.done_s });
  history.set(name, kept.slice(-KEPT));
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  drawn.setAttribute("viewBox", `0 0 ${KEPT} 100`);
  drawn.setAttribute("preserveAspectRatio", "none");
  const most = Math.max(1, ...kept.flatMap((one) => [one.put, one.done]));
  for (const kind of ["put", "done"]) drawn.append(line(kind, kept.map((one) => one[kind]), most));
  const key = made("p", "", "facts");
  key.append(made("span", "put", "put-key"), " and ", made("span", "done", "done-key"), ` per second, five minutes, up to ${rate(most)}`);
  const both = made("div");
  both.append(drawn, key);
  return both;
}

function staleness(table) {
  const lags = Object.entries(table.staleness).map(([lag, rows]) => [Number(lag), rows]).sort((a, b) => a[0] - b[0]);
  const bars = made("div", "", "lags");
  const most = Math.max(1, ...lags.map(([, rows]) => rows));
  for (const [lag, rows] of lags) {
    const bar = made("div", "", table.max_staleness !== null && lag > table.max_staleness ? "over" : "");
    const filled = made("i");
    filled.style.height = `${(MAX_HEIGHT * rows) / most}px`;
    bar.append(filled, made("span", String(lag)));
    bar.title = `${count(rows)} rows were ${lag} versions old when they were handed over`;
    bars.append(bar);
  }
  const shown = made("div");
  if (lags.length) shown.append(made("p", `Staleness at hand-over, in versions (bound: ${table.max_staleness ?? "none"})`, "facts"), bars);
  return shown;
}

function tables(frame) {
  const names = Object.keys(frame.stats.tables);
  for (const name of history.keys()) if (!names.includes(name)) history.delete(name);
  at("tables").replaceChildren(
    ...names.map((name) => {
      const table = frame.stats.tables[name];
      const rates = frame.rates[name];
      const shown = made("article");
      shown.append(made("h2", name), facts(table, rates), tasks(table, rates), timeline(name, rates), staleness(table));
      return shown;
    }),
  );
  const chosen = at("row-table");
  if ([...chosen.options].map((one) => one.value).join("\n") !== names.join("\n")) {
    chosen.replaceChildren(...names.map((name) => made("option", name)));
  }
}

function say(text, bad) {
  at("state").textContent = text;
  at("state").className = bad ? "bad" : "";
}

async function showRow() {
  const answer = await fetch(`/row/${encodeURIComponent(at("row-table").value)}/${Number(at("row-id").value) || 0}`);
  at("row-text").textContent = answer.ok ? JSON.stringify(await answer.json(), null, 2) : await answer.text();
}

at("row-show").addEventListener("click", showRow);
const events = new EventSource("/events");
events.addEventListener("frame", (event) => {
  const told = JSON.parse(event.data);
  head(told.frame);
  doctor(told.doctor);
  tables(told.frame);
  say(told.stalled.length ? `stalled: ${told.stalled.join(", ")}` : "live", told.stalled.length > 0);
});
events.addEventListener("late", (event) => say(JSON.parse(event.data).text, true));
events.addEventListener("gone", (event) => { say(JSON.parse(event.data).text, true); events.close(); });
events.onerror = () => say("the page's server does not answer; trying again", true);
