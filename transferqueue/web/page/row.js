// Shows one row, or the rows of a group beside each other: what they say, token by token, and what happened to them.
"use strict";

const NOT_ENDING = ["leased", "checkpointed", "kept though stale", "requeued as stale", "lost bytes"]; // of a lease
const SURPRISING = -5; // a log-prob that has the full colour
const LEAST_PX = 6; // of a lease in a lane, in units of a drawing
let painted = []; // [spans, content] of what is shown

const short = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(4))));

// ------------------------------------------------------------------ tokens

// The colour of a value in a column; "" for none.
function tint(column, value, known) {
  if (value === null || value === undefined) return "";
  if (column.scale === "version") return `hsl(${(205 + 67 * known.indexOf(value)) % 360} 75% 55% / 35%)`;
  const most = Math.max(...known.map(Math.abs), 1e-9);
  const low = Math.min(...known);
  const part = column.scale === "logprob" ? value / SURPRISING
    : column.scale === "signed" ? Math.abs(value) / most : (value - low) / (Math.max(...known) - low || 1);
  const name = column.scale === "logprob" || (column.scale === "signed" && value < 0) ? "--bad"
    : column.scale === "signed" ? "--good" : "--busy";
  return `color-mix(in srgb, var(${name}) ${Math.round(60 * Math.min(1, Math.max(0, part)))}%, transparent)`;
}

// Colour all tokens that are shown by the chosen column: in one scale, so that rows beside each other compare.
function paint() {
  const chosen = at("colour").value;
  const columns = painted.map(([, content]) => content.colours.find((one) => one.column === chosen));
  const known = [...new Set(columns.flatMap((one) => one?.values ?? []))].filter((one) => one !== null).sort((a, b) => a - b);
  const bounds = columns.some((one) => one?.scale === "version") ? known : [known[0], known.at(-1)];
  painted.forEach(([spans, content], i) => spans.forEach((span, token) => {
    const value = columns[i]?.values[token];
    span.style.backgroundColor = known.length && columns[i] ? tint(columns[i], value, bounds) : "";
    const values = content.colours.map((one) => `${one.column} ${short(one.values[token])}`);
    span.title = visible([`token ${token}`, `id ${content.ids[token]}`, ...values].join(" · "));
  }));
  const first = columns.find((one) => one);
  const legend = !first || !known.length ? "" : {
    logprob: `red: unlikely, ${SURPRISING} or less; plain: certain`,
    signed: `green: up to ${short(Math.max(...known))}; red: down to ${short(Math.min(...known))}`,
    version: `versions ${known.slice(0, 8).map(short).join(", ")}${known.length > 8 ? " …" : ""}, a colour each`,
    number: `from ${short(known[0])} to ${short(known.at(-1))}`,
  }[first.scale];
  for (const one of document.querySelectorAll("#row .legend")) one.textContent = legend;
}

// Tokens from `start` up to `stop`, as spans that `paint` colours.
function tokens(content, spans, start, stop) {
  const drawn = content.pieces.slice(start, stop).map((text) => {
    const span = made("span");
    span.textContent = lined(text, "↵");
    spans.push(span);
    return span;
  });
  return holding("p", "tokens", ...drawn);
}

function said(text) {
  const shown = made("p", "", "tokens");
  shown.textContent = lined(text);
  return shown;
}

function calls(turn) {
  return turn.calls.map((one) => {
    const shown = made("pre", "", "call");
    shown.textContent = lined(`${one.name || "calls"}(${one.arguments})`);
    shown.setAttribute("aria-label", "Tool call");
    return shown;
  });
}

function turn(one, body) {
  const facts = one.reward === null ? one.who : `${one.who} · reward ${short(one.reward)}`;
  return holding("section", `turn ${one.who === "model" || one.who === "assistant" ? "model" : ""}`, made("h4", facts), body, ...calls(one));
}

// The response: the turns of an episode, or one text.
function completion(content) {
  const spans = [];
  const parts = content.turns.length
    ? content.turns.map((one) => turn(one, tokens(content, spans, one.start, one.stop)))
    : [content.pieces.length ? tokens(content, spans, 0, content.pieces.length) : said(content.text)];
  if (content.omitted) parts.push(made("p", `${count(content.omitted)} more tokens are not shown`, "facts"));
  painted.push([spans, content]);
  return holding("div", "completion", ...parts);
}

function rewards(content) {
  const terms = Object.entries(content.terms);
  const parts = content.reward === null ? [] : [`reward ${short(content.reward)}`];
  if (content.tokens) parts.push(`${count(content.tokens)} tokens`);
  const facts = made("p", parts.join(" · "), "facts");
  return terms.length ? [facts, grid(["reward term", "score"], terms.map(([name, value]) => [name, short(value)]), "Reward terms")] : [facts];
}

// The choice of the column that colours tokens: of the columns that the shown rows have.
function offerColours() {
  const names = [...new Set(painted.flatMap(([, content]) => content.colours.map((one) => one.column)))];
  at("colour-label").hidden = !names.length;
  offer(at("colour"), [...names, "no colour"]);
  paint();
}

// ------------------------------------------------------------------ what happened

// The row's life as lanes: the producer's, and one of each task with its leases.
function lanes({ life, put_by, done_by }) {
  const events = life.events.map((one, i) => ({ ...one, by: done_by[i] }));
  if (!events.length) return [];
  const begun = Math.max(life.age_s ?? 0, events[0].ago_s);
  const last = life.state === "live" ? 0 : Math.min(0, events.at(-1).ago_s);
  const x = (ago_s) => (WIDE * (begun - ago_s)) / Math.max(begun - last, 1e-6);
  const leases = new Map();
  const open = new Map();
  const end = (task, to, what) => {
    const { from, by } = open.get(task);
    leases.set(task, [...(leases.get(task) ?? []), { from, to, by, what }]);
    open.delete(task);
  };
  for (const one of events) {
    if (one.what === "leased") open.set(one.task, { from: one.ago_s, by: one.by });
    else if (open.has(one.task) && !NOT_ENDING.includes(one.what)) end(one.task, one.ago_s, one.what);
  }
  for (const task of [...open.keys()]) end(task, last, life.state === "live" ? "holds it" : "ended");
  const box = (kind, from, to) => {
    const [left, right] = [x(from), Math.max(x(to), x(from) + LEAST_PX)];
    return shape(kind, "path", "d", `M${left.toFixed(1)},0H${right.toFixed(1)}V100H${left.toFixed(1)}z`);
  };
  const line = (name, boxes, facts) => {
    const drawn = drawing("lane", `${name}: ${facts}`);
    drawn.append(...boxes);
    return holding("div", "strip life", made("span", name), drawn, made("span", facts, "facts"));
  };
  const put = events.filter((one) => ["put", "updated", "restored"].includes(one.what));
  const rows = [line("producer", put.map((one) => box("busy", one.ago_s, one.ago_s)), `put by ${put_by || "–"}`)];
  for (const [task, of] of leases) {
    const kind = (one) => (one.what.startsWith("acked") ? "busy" : ["released", "holds it", "ended"].includes(one.what) ? "idle" : "trouble");
    rows.push(line(task, of.map((one) => box(kind(one), one.from, one.to)),
      of.map((one) => `${one.by || "–"} ${span(one.from - one.to)} ${one.what}`).join(", ")));
  }
  const fate = life.state === "live" ? "now" : life.reason ? `${life.state} (${life.reason})` : life.state;
  return [made("h3", "Its life"), ...rows, made("p", `from its put to ${fate}: ${span(begun - last)}`, "facts")];
}

function rowFacts({ life, put_by, step, record }) {
  const parts = [life.reason ? `${life.state} (${life.reason})` : life.state];
  if (record) parts.push(`life ${record}`);
  if (step !== undefined && step !== null) parts.push(`step ${step}`);
  if (life.age_s !== null && step === undefined) parts.push(`put ${span(life.age_s)} ago${put_by ? ` by ${put_by}` : ""}`);
  else if (put_by) parts.push(`put by ${put_by}`);
  if (life.key) parts.push(`key ${life.key}`);
  if (life.group_id >= 0) parts.push(`group ${life.group_id} of ${life.group_size}`);
  if (life.policy_version >= 0) parts.push(`policy version ${life.policy_version}`);
  if (life.tokens > 0 && step === undefined) parts.push(`${count(life.tokens)} tokens`);
  for (const [name, value] of Object.entries(life.tags)) parts.push(`${name}=${value}`);
  return made("p", parts.join(" · "), "facts");
}

function fieldLine([name, field]) {
  if (!field.set) return [name, ["missing", "idle-key"]];
  const place = `${field.bytes === null ? "" : `${size(field.bytes)} `}in block ${field.block}, slot ${field.slot}`;
  return [name, field.inline ? String(field.value) : place];
}

function standing(task, by) {
  if (task.lease === null) return task.lacks.length ? `lacks ${task.lacks.join(", ")}` : "";
  return `by ${by}${task.left_s === null ? "" : `, ${span(task.left_s)} left`}`;
}

// What a row says: prompt, response, rewards; the other columns are below.
function says(content) {
  if (content.why_not) return [made("p", content.why_not, "bad")];
  const prompt = content.prompt.map((one) => turn({ ...one, reward: null }, said(one.text)));
  return [...rewards(content), made("p", "", "facts legend"), holding("div", "prompt", ...prompt), made("h3", "Response"), completion(content)];
}

function showRow(shown) {
  const { life, held_by, done_by, content } = shown;
  const when = (ago_s) => (shown.step === undefined ? `${span(ago_s)} ago` : `after ${span(Math.max(0, life.age_s - ago_s))}`);
  const tasks = Object.entries(life.tasks).map(([name, task]) => [name, task.state, count(task.attempts), standing(task, held_by[name])]);
  const happened = life.events.map((one, i) => [when(one.ago_s), one.what, one.task, done_by[i], one.detail]);
  const parts = [["Columns", ["column", "value"], content?.columns ?? []],
    ["Fields", ["field", "value"], Object.entries(life.fields).map(fieldLine)],
    ["Tasks", ["task", "state", "attempts", ""], tasks], ["Events", ["when", "what", "task", "by", ""], happened]];
  painted = [];
  at("row").replaceChildren(
    made("h3", `Row ${life.row} of ${life.table}`), rowFacts(shown), ...(content ? says(content) : []), ...lanes(shown),
    ...parts.filter(([, , lines]) => lines.length).map(([label, columns, lines]) => grid(columns, lines, label)));
  if (!life.events_complete) at("row").append(made("p", "earlier events are no longer kept", "facts"));
  if (shown.record && life.group_id >= 0) at("row").append(button("Its group", () => askGroup(life.table, life.group_id, shown.record)));
  offerColours();
}

// The rows of a group beside each other, with their prompt above them.
function showGroup(table, number, { rows, more }) {
  painted = [];
  const prompt = rows[0].content.prompt.map((one) => turn({ ...one, reward: null }, said(one.text)));
  const members = rows.map((one) => {
    const open = button(`Row ${one.life.row}`, () => askRow(table, one.life.row, one.record));
    const facts = rowFacts(one);
    if (one.content.why_not) return holding("article", "", open, facts, ...says(one.content));
    return holding("article", "", open, facts, ...rewards(one.content), completion(one.content));
  });
  at("row").replaceChildren(
    made("h3", `Group ${number} of ${table}`), made("p", "", "facts legend"), holding("div", "prompt", ...prompt),
    holding("div", "members", ...members));
  if (more) at("row").append(made("p", `the first ${count(rows.length)} rows of the group`, "facts"));
  offerColours();
}

at("colour").addEventListener("change", paint);
