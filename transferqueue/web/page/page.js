// Shows the frames that /events sends.
"use strict";

const BAR_PX = 48; // the tallest bar of a histogram
const WORKERS_SHOWN = 8; // in one stage
const STATES = ["pending", "held", "ready", "leased", "done", "dropped"];
let moments = [];
let troubles = [];
let newest = null;
const shown_s = () => Number(document.querySelector("#window input:checked").value);

function head(frame) {
  const { server, sessions } = frame.stats;
  at("where").textContent = visible(`${frame.address} · up ${span(server.uptime_s)} · ${count(sessions)} sessions · ${server.version}`);
  at("arena").value = server.capacity_bytes ? server.used_bytes / server.capacity_bytes : 0;
  at("arena-text").textContent =
    `${size(server.used_bytes)} lent of ${size(server.capacity_bytes)}, ${size(server.backed_bytes)} taken from the system`;
}

function channels(found) {
  const lines = Object.entries(found).map(([name, one]) => {
    const lags = Object.values(one.applied).map((version) => one.newest - version);
    const behind = lags.length ? `${lags.filter((lag) => lag === 0).length} of ${lags.length}` : "–";
    return [name, count(one.newest), `${one.kept.length}, ${size(one.bytes)}`, span(one.age_s), behind];
  });
  const shown = grid(["weights", "version", "kept", "published ago", "applied by"], lines, "Weight channels");
  at("channels").replaceChildren(...(lines.length ? [shown] : []));
}

function doctor(found) {
  const groups = [...Object.entries(found.tables), ["", found.elsewhere]];
  const lines = groups.flatMap(([table, findings]) =>
    findings.map((one) => made("li", table ? `${table}: ${one.text}` : one.text)));
  at("doctor").replaceChildren(...(lines.length ? lines : [made("li", "no waits")]));
}

// The troubles of the last hour, the newest first; the one that lasts comes before.
function past(found, now_s) {
  const lines = [...found].reverse().sort((a, b) => (a.until_s === null ? 0 : 1) - (b.until_s === null ? 0 : 1)).map((one) => {
    const from = clock(one.from_s, now_s);
    const when = one.until_s === null ? `since ${from}` : `${from} to ${clock(one.until_s, now_s)} (${span(one.until_s - one.from_s)})`;
    return made("li", `${when} · ${one.text}`, one.until_s === null ? "bad" : "");
  });
  at("troubles").hidden = !lines.length;
  at("troubles-title").textContent = `Troubles of the last hour: ${count(lines.length)}`;
  at("troubles-list").replaceChildren(...lines);
}

// The verdict: large at the top, and short in the title of the tab.
function verdict(said) {
  const kind = said.trouble ? "trouble" : said.state;
  at("verdict").className = kind;
  at("verdict-text").replaceChildren(made("span", said.mark, "mark"), made("span", said.text));
  at("verdict-remedy").textContent = visible(said.remedy);
  at("verdict-also").replaceChildren(...said.also.map((one) => made("li", `also: ${one}`)));
  at("verdict-chain").replaceChildren(...said.chain.map((one) => made("li", one)));
  document.title = visible(`${said.mark} ${said.short}`);
}

function worker(one, failing) {
  const kind = failing && one.state !== "silent" ? "failing" : one.state;
  const parts = [];
  if (one.rows) parts.push(`${count(one.rows)} ${one.rows === 1 ? "row" : "rows"}`);
  if (one.state === "silent") parts.push(`silent ${span(one.silent_s)}`);
  else if (one.state === "waits") parts.push(`waits ${span(one.waited_s)}`);
  else if (one.state === "idle") parts.push("idle");
  const shown = holding("li", kind, made("b", one.name), ` ${parts.join(" · ")}`);
  shown.title = visible(one.waits || `last message ${span(one.silent_s)} ago`);
  return shown;
}

function crew(one) {
  const first = one.workers.slice(0, WORKERS_SHOWN).map((each) => worker(each, one.state === "failing"));
  const more = one.workers.length - first.length;
  if (more > 0) first.push(made("li", `and ${count(more)} more`));
  if (!first.length && one.state === "missing") first.push(made("li", "no worker", "none"));
  return holding("ul", "crew", ...first);
}

function stage(one, put_s, done_s) {
  const parts = one.task
    ? [`${count(one.ready)} ready`, `${count(one.leased)} leased`, `${count(one.done)} done`]
    : [`${count(one.done)} rows put`];
  if (one.task && one.incomplete) parts.unshift(`${count(one.incomplete)} incomplete`);
  if (one.retrying) parts.push(`${count(one.retrying)} to retry`);
  if (one.dropped) parts.push(`${count(one.dropped)} dropped`);
  const per_s = one.task ? done_s : put_s;
  if (per_s) parts.push(`${rate(per_s)}/s`);
  const shown = holding("li", `stage ${one.state}`, made("h3", one.task || "producers"), crew(one), made("p", parts.join(" · "), "facts"));
  const latest = one.errors[0];
  if (latest) shown.append(made("p", `${latest.type} ${latest.text} · ${count(latest.count)} times`, "bad"));
  return shown;
}

// The stages of each table in the order in which rows pass them, each with its workers.
function stages(found, frame) {
  const rows = Object.entries(found).map(([table, order]) => {
    const moving = frame.rates[table];
    const cards = order.filter((one) => one.task || one.workers.length || one.done)
      .map((one) => stage(one, moving?.put_s, moving?.tasks[one.task]?.done_s));
    return holding("section", "line", made("h2", table), holding("ol", "stages", ...cards));
  });
  at("stages").replaceChildren(...rows);
}

function pipeline(tables) {
  const lanes = Object.entries(tables).flatMap(([table, shown]) => [
    [`${table}: producers`, (one) => one.tables[table]?.producers],
    ...Object.keys(shown.tasks).map((task) => [`${table}: ${task}`, (one) => one.tables[table]?.tasks[task]]),
  ]);
  const lines = lanes.map(([label, value]) => {
    const [drawn, sums] = lane(moments, label, value, shown_s());
    const idle = made("span", `idle ${share(sums.idle, sums.busy + sums.idle + sums.silent)}`, "share");
    return holding("div", "strip", made("span", label), drawn, idle);
  });
  const red = troubles.length ? [holding("div", "strip", made("span", "trouble"), troubleLane(moments, troubles, shown_s()), made("span"))] : [];
  const below = holding("div", "strip", made("span"), marks(moments, shown_s()), made("span"));
  at("pipeline-title").textContent = `Pipeline, the last ${span(axis(moments, shown_s()))}`;
  at("pipeline").replaceChildren(...(lines.length ? [...red, ...lines, below] : [made("p", "no tables yet", "facts")]));
}

function facts(table, moving) {
  const parts = [
    `${count(table.rows_live)} of ${count(table.rows_limit)} rows`,
    table.bytes_limit ? `${size(table.bytes)} of ${size(table.bytes_limit)}` : size(table.bytes),
    `${rate(moving?.put_s)} in/s`, `${rate(moving?.done_s)} done/s`, `oldest ${span(table.age_s)}`, `version ${table.version}`,
  ];
  if (table.outstanding_limit !== null) parts.push(`${count(table.outstanding)} of ${count(table.outstanding_limit)} ahead`);
  const ended = table.rows_done + table.rows_dropped;
  for (const [reason, rows] of Object.entries(table.dropped)) {
    if (rows) parts.push(`${count(rows)} dropped (${reason}, ${((100 * rows) / ended).toFixed(1)} % of ended rows)`);
  }
  if (table.rows_one_copy) parts.push(`${count(table.rows_one_copy)} with one copy`);
  if (table.sealed) parts.push("sealed");
  return made("p", parts.join(" · "), "facts");
}

function tasks(table, moving) {
  const lines = Object.entries(table.tasks).map(([name, task]) => [
    name, ...STATES.map((one) => count(task[one])), count(task.failed),
    rate(moving?.tasks[name]?.given_s), rate(moving?.tasks[name]?.done_s), span(task.age_s),
  ]);
  return grid(["task", ...STATES, "failed", "given/s", "done/s", "oldest"], lines);
}

function flow(name) {
  const [drawn, most] = rates(moments, name, shown_s());
  const key = holding("p", "facts", made("span", "put", "put-key"), " and ", made("span", "done", "done-key"),
    ` per second, the last ${span(axis(moments, shown_s()))}, up to ${rate(most)}`);
  return holding("div", "", drawn, marks(moments, shown_s()), key);
}

function staleness(table) {
  const lags = Object.entries(table.staleness).map(([lag, rows]) => [Number(lag), rows]).sort((a, b) => a[0] - b[0]);
  if (!lags.length) return made("div");
  const most = Math.max(...lags.map(([, rows]) => rows), 1);
  const bars = lags.map(([lag, rows]) => {
    const filled = made("i");
    filled.style.height = `${(BAR_PX * rows) / most}px`;
    const over = table.max_staleness !== null && lag > table.max_staleness;
    const bar = holding("div", over ? "over" : "", made("b", count(rows)), filled, made("span", String(lag)));
    bar.title = `${count(rows)} rows were ${lag} versions old when they were leased`;
    return bar;
  });
  const text = `Staleness at lease: rows by versions (limit: ${table.max_staleness ?? "none"})`;
  return holding("div", "", holding("div", "lags", ...bars), made("p", text, "facts"));
}

function tables(frame) {
  const names = Object.keys(frame.stats.tables);
  at("tables").replaceChildren(...names.map((name) => {
    const table = frame.stats.tables[name];
    const moving = frame.rates[name];
    const below = holding("div", "pair", flow(name), staleness(table));
    const shown = holding("section", "", made("h2", name), facts(table, moving), tasks(table, moving), below);
    shown.setAttribute("aria-label", `Table ${name}`);
    return shown;
  }));
  offer(at("row-table"), [...new Set([...names, ...recorded])]);
}

function figures(found) {
  const open = new Set([...document.querySelectorAll("#figures details[open]")].map((one) => one.id));
  at("figures").replaceChildren(...Object.entries(found).map(([name, one]) => {
    const shown = holding("section", "", made("h2", one.title));
    if (one.warnings?.length) shown.append(holding("ul", "warnings", ...one.warnings.map((text) => made("li", text, "bad"))));
    const table = grid(one.columns, one.lines, one.title);
    if (one.curves?.length) {
      const meanings = holding("details", "", made("summary", "What each figure means"), table);
      meanings.id = `meanings-${name}`;
      meanings.open = open.has(meanings.id);
      shown.append(holding("div", "curves", ...one.curves.map(curve)), meanings);
    } else shown.append(table);
    shown.setAttribute("aria-label", `Figures ${name}`);
    return shown;
  }));
}

// ------------------------------------------------------------------ events

function show(update) {
  troubles = update.troubles;
  head(update.frame);
  verdict(update.report.verdict);
  stages(update.report.stages, update.frame);
  past(troubles, update.moment.at_s);
  channels(update.frame.stats.channels);
  doctor(update.report.symptoms);
  pipeline(update.frame.stats.tables);
  tables(update.frame);
  figures(update.figures);
  say("live", false);
}

// The state of the connection; old greys out figures that are not of this moment.
function say(text, old) {
  at("state").textContent = visible(text);
  document.body.classList.toggle("old", old);
}

// The server is gone: the page keeps its last frame.
function gone(update) {
  verdict(update.verdict);
  say(`the server is gone; last seen ${clock(0, update.ago_s)}`, true);
}

// Follow the queue.
function watch() {
  at("queue").hidden = false;
  at("window").addEventListener("change", () => newest && show(newest));
  const events = new EventSource("/events");
  events.addEventListener("past", (event) => { moments = JSON.parse(event.data); });
  events.addEventListener("frame", (event) => {
    newest = JSON.parse(event.data);
    const { moment } = newest;
    moments = [...moments.filter((one) => one.at_s > moment.at_s - KEPT_S && one.at_s < moment.at_s), moment];
    show(newest);
  });
  events.addEventListener("late", (event) => say(JSON.parse(event.data).text, true));
  events.addEventListener("gone", (event) => {
    gone(JSON.parse(event.data));
    events.close();
  });
  events.onerror = () => say("the page's server does not answer; trying again", true);
}

begin();
