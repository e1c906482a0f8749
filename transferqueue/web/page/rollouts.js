// Asks for rows: lists of recorded rows and groups by filters, and one row from the record or from the queue.
"use strict";

let recorded = []; // tables of the record
let live = false; // there is a queue
let about = null; // the chosen table
let pageNumber = 0; // of the page of the list
const questions = () => at("questions").elements;

// The answer of a path, or null, which is told in `place`.
async function ask(path, words, place) {
  const given = Object.entries(words).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  try {
    const answer = await fetch(query ? `${path}?${query}` : path);
    if (answer.ok) return await answer.json();
    place.replaceChildren(made("p", await answer.text(), "bad"));
  } catch {
    place.replaceChildren(made("p", "the page's server does not answer", "bad"));
  }
  return null;
}

// What the record could not read.
function damaged(found) {
  at("damaged").replaceChildren(...found.map((one) => made("li", `left out: ${one}`, "bad")));
}

// ------------------------------------------------------------------ lists

function rowLine(table, one) {
  const open = button(String(one.row), () => askRow(table, one.row, one.life));
  const group = one.group ? button(one.group, () => askGroup(table, one.group, one.life)) : "";
  const fate = one.reason ? `${one.fate} (${one.reason})` : one.fate;
  return [open, one.step ?? "–", one.version < 0 ? "–" : one.version, group, short(one.reward), count(one.tokens), one.finish, fate, one.workers.join(", "), [one.preview, "preview"]];
}

function groupLine(table, one) {
  const open = button(one.group, () => askGroup(table, one.group, one.life));
  return [open, one.step ?? "–", count(one.count), short(one.least), short(one.mean), short(one.greatest)];
}

function showList(table, found) {
  damaged(found.damaged);
  const lists = [
    [found.rows, ["row", "step", "version", "group", "reward", "tokens", "finish", "fate", "workers", "response"], rowLine, "Rows"],
    [found.groups, ["group", "step", "rows", "least reward", "mean", "greatest"], groupLine, "Groups"]];
  const shown = lists.filter(([lines]) => lines.length).map(([lines, columns, line, label]) =>
    grid(columns, lines.map((one) => line(table, one)), label));
  const none = "no such rows; dropped rows have no step, so leave the step out to see them";
  at("list").replaceChildren(...(shown.length ? shown : [made("p", none, "facts")]));
  at("back").hidden = pageNumber === 0;
  at("more").hidden = !found.more;
}

async function askList(page) {
  const { show, ...words } = Object.fromEntries(new FormData(at("questions")));
  if (!words.table) return;
  pageNumber = page;
  at("list").classList.add("asked");
  const path = show === "rows" ? "/rollouts/rows" : "/rollouts/groups";
  const found = await ask(path, { ...words, equal: show === "equal" ? "true" : "", page: page || "" }, at("list"));
  at("list").classList.remove("asked");
  if (found) showList(words.table, found);
}

// Set these filters and none else, and ask.
function askFor(filters) {
  const { table, reward } = questions();
  const kept = [table.value, reward.value];
  at("questions").reset();
  [table.value, reward.value] = kept;
  for (const [name, value] of Object.entries(filters)) questions()[name].value = value;
  askList(0);
}

// What is known of the chosen table becomes what its filters offer.
async function choose() {
  const table = questions().table.value;
  about = await ask("/rollouts/about", { table }, at("list"));
  if (!about) return;
  const some = (values) => [["", "any"], ...values];
  offer(questions().reward, about.rewards);
  offer(questions().finish, some(about.finishes));
  offer(questions().reason, some(about.reasons));
  at("workers").replaceChildren(...about.workers.map((name) => made("option", name)));
  const steps = about.last === null ? "" : ` · steps ${about.first} to ${about.last}`;
  at("record-facts").textContent = visible(`${count(about.rows)} rows${steps}${about.why_not ? ` · ${about.why_not}` : ""}`);
  damaged(about.damaged);
  askFor({ step: about.last ?? "" });
}

// ------------------------------------------------------------------ one row

async function askRow(table, row, life) {
  at("row-table").value = table;
  at("row-id").value = row;
  const reward = questions().table.value === table ? questions().reward.value : "";
  // Ids begin again in each life of a table: one without a life is the queue's, if it lives there.
  const queued = live && !life ? await ask(`/row/${encodeURIComponent(table)}/${row}`, {}, at("row")) : null;
  const ended = queued?.life.state !== "live" && recorded.includes(table);
  const shown = (ended && await ask("/rollouts/row", { table, row, life, reward }, at("row"))) || queued;
  if (shown) showRow(shown);
  at("row").scrollIntoView({ block: "nearest" });
}

async function askGroup(table, group, life) {
  const reward = questions().table.value === table ? questions().reward.value : "";
  const shown = await ask("/rollouts/group", { table, group, life, reward }, at("row"));
  if (shown) showGroup(table, group, shown);
  at("row").scrollIntoView({ block: "nearest" });
}

// ------------------------------------------------------------------ begin

async function begin() {
  const found = await ask("/rollouts", {}, at("row"));
  if (!found || found.live) watch();
  if (!found) return;
  recorded = found.tables;
  live = found.live;
  offer(at("row-table"), recorded);
  offer(questions().table, recorded);
  at("record").hidden = !found.path;
  if (!live) {
    say(found.why_not_live || "not running", false);
    at("where").textContent = visible(found.path);
    document.title = visible(`Rollouts of ${found.path}`);
  }
  damaged(found.damaged);
  if (recorded.length) choose();
  else if (found.path) {
    at("questions").hidden = true;
    at("list").replaceChildren(made("p", "this run has recorded no rows; a job records them with queue.record = \"on\"", "facts"));
  }
}

at("row-form").addEventListener("submit", (event) => {
  event.preventDefault();
  askRow(at("row-table").value, Number(at("row-id").value) || 0);
});
at("questions").addEventListener("submit", (event) => {
  event.preventDefault();
  askList(0);
});
questions().table.addEventListener("change", choose);
at("worst").addEventListener("click", () => askFor({ order: "worst", step: questions().step.value || (about?.last ?? ""), until: questions().until.value }));
at("equal").addEventListener("click", () => askFor({ show: "equal" }));
at("back").addEventListener("click", () => askList(pageNumber - 1));
at("more").addEventListener("click", () => askList(pageNumber + 1));
