// Formats values and draws them. Sets all text as text, so that no name in a table becomes markup, and escapes invisible
// characters first, so that no name reverses a line.
"use strict";

const KEPT_S = 3600; // an hour, which the page's server keeps too
const SHOWN_S = 30; // at least, of an axis of time
const STEPS_S = [5, 15, 30, 60, 300, 900]; // between two marks of an axis of time
const MARKS = 7; // at most, on an axis of time
const WIDE = 1000; // a drawing, in its own units
const SVG = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);

// Text with each character that does not print (controls, marks of direction, zero-width ones) escaped, as transferqueue/text.py does.
const visible = (text) => text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);

function made(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = visible(String(text));
  if (className) element.className = className;
  return element;
}

function holding(tag, className, ...children) {
  const element = made(tag, "", className);
  element.append(...children);
  return element;
}

// A button that says `text` and does `act`.
function button(text, act) {
  const element = made("button", text);
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}

// Text of several lines: only the ends of lines are not escaped. mark: is shown before each.
const lined = (text, mark = "") => text.split("\n").map(visible).join(`${mark}\n`);

// Have a select offer these values, each a text or [value, text], and keep what is chosen if it is one of them.
function offer(select, values) {
  const pairs = values.map((one) => (Array.isArray(one) ? one : [one, one]));
  if ([...select.options].map((one) => one.value).join("\n") === pairs.map(([value]) => value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...pairs.map(([value, text]) => {
    const option = made("option", text);
    option.value = value;
    return option;
  }));
  if (pairs.some(([value]) => value === chosen)) select.value = chosen;
}

const count = (n) => (n === null ? "–" : n.toLocaleString("en"));
const rate = (n) => (n === undefined ? "–" : n < 10 ? n.toFixed(1) : count(Math.round(n)));
const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

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

// A grid: columns are their headings, lines are lists of texts, of [text, class] or of elements.
function grid(columns, lines, label) {
  const table = made("table");
  if (label) table.setAttribute("aria-label", label);
  const top = table.createTHead().insertRow();
  for (const name of columns) top.append(made("th", name));
  const body = table.createTBody();
  for (const one of lines) {
    const row = body.insertRow();
    for (const cell of one) {
      row.append(cell instanceof Node ? holding("td", "", cell) : Array.isArray(cell) ? made("td", ...cell) : made("td", cell));
    }
  }
  return holding("div", "scroll", table);
}

function drawing(height, label) {
  const drawn = document.createElementNS(SVG, "svg");
  drawn.setAttribute("viewBox", `0 0 ${WIDE} 100`);
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", visible(label));
  drawn.setAttribute("class", height);
  return drawn;
}

function shape(kind, tag, attribute, value) {
  const drawn = document.createElementNS(SVG, tag);
  drawn.setAttribute("class", kind);
  drawn.setAttribute(attribute, value);
  return drawn;
}

// Seconds on the axis of time: the known time, within bounds.
const axis = (moments, most_s) =>
  (moments.length ? Math.min(Math.max(moments.at(-1).at_s - moments[0].at_s, SHOWN_S), most_s) : SHOWN_S);

// The time of day of a moment of the server's clock, of which `now_s` is now.
function clock(at_s, now_s) {
  const day = new Date(Date.now() - 1000 * (now_s - at_s));
  return day.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

// Marks of the axis of time: the time of day at round distances from now.
function marks(moments, most_s) {
  const shown = axis(moments, most_s);
  const step = STEPS_S.find((one) => shown / one < MARKS) ?? STEPS_S.at(-1);
  const drawn = holding("div", "axis");
  if (!moments.length) return drawn;
  const now_s = moments.at(-1).at_s;
  for (let ago_s = step; ago_s < shown; ago_s += step) {
    const mark = made("span", clock(now_s - ago_s, now_s).slice(0, step < 60 ? 8 : 5));
    mark.style.left = `${100 * (1 - ago_s / shown)}%`;
    drawn.append(mark);
  }
  return drawn;
}

// Moments of one table or lane as [x of its beginning, x of its end, value]. Each stands for the seconds before it.
function stretches(moments, value, most_s) {
  const shown = axis(moments, most_s);
  const x = (at_s) => WIDE * (1 - (moments.at(-1).at_s - at_s) / shown);
  return moments.flatMap((one) => {
    const found = value(one);
    return found && x(one.at_s) > 0 ? [[Math.max(0, x(one.at_s - one.lasts_s)), x(one.at_s), found]] : [];
  });
}

// Stretches in runs without a gap; no line crosses a gap.
function runs(found) {
  const apart = [];
  for (const one of found) {
    const last = apart.at(-1);
    if (last && one[0] - last.at(-1)[1] < 0.5) last.push(one);
    else apart.push([one]);
  }
  return apart;
}

// Lines of rates: put and done per second.
function rates(moments, name, most_s) {
  const found = stretches(moments, (one) => one.tables[name], most_s);
  const most = Math.max(1, ...found.flatMap(([, , one]) => [one.put_s, one.done_s]));
  const drawn = drawing("rates", `rows per second of ${name}, up to ${rate(most)}`);
  for (const kind of ["put", "done"]) {
    const y = (one) => (100 - (96 * one[`${kind}_s`]) / most).toFixed(1);
    for (const run of runs(found)) {
      const points = [[run[0][0], run[0][2]], ...run.map(([, end, one]) => [end, one])];
      const line = points.map(([x, one]) => `${x.toFixed(1)},${y(one)}`);
      drawn.append(shape(kind, "polyline", "points", line.join(" ")));
    }
  }
  return [drawn, most];
}

// A lane that is red during troubles.
function troubleLane(moments, troubles, most_s) {
  const shown = axis(moments, most_s);
  const drawn = drawing("lane", "trouble");
  const now_s = moments.at(-1)?.at_s ?? 0;
  for (const one of troubles) {
    const begins = Math.max(0, WIDE * (1 - (now_s - one.from_s) / shown));
    const ends = WIDE * (1 - (now_s - (one.until_s ?? now_s)) / shown);
    if (ends > 0) drawn.append(shape("trouble", "path", "d", `M${begins.toFixed(2)},0H${Math.max(ends, begins + 1).toFixed(2)}V100H${begins.toFixed(2)}z`));
  }
  return drawn;
}

// A lane: at each moment the share of workers that work, from below, of those that wait, above it, and of those that are silent.
function lane(moments, label, value, most_s) {
  const drawn = drawing("lane", label);
  const paths = { busy: "", idle: "", silent: "" };
  const sums = { busy: 0, idle: 0, silent: 0 };
  for (const [x, next, one] of stretches(moments, value, most_s)) {
    const all = one.busy + one.idle + one.silent;
    let bottom = 100;
    for (const kind of Object.keys(paths)) {
      if (!one[kind]) continue;
      const top = bottom - (100 * one[kind]) / all;
      paths[kind] += `M${x.toFixed(2)},${bottom.toFixed(1)}h${(next - x).toFixed(2)}V${top.toFixed(1)}H${x.toFixed(2)}z`;
      sums[kind] += one[kind] * (next - x);
      bottom = top;
    }
  }
  for (const kind of Object.keys(paths)) drawn.append(shape(kind, "path", "d", paths[kind]));
  return [drawn, sums];
}

const number = (n) => (n === null || n === undefined ? "–" : Number(n.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 }));

// A curve of values over steps, from its least to its greatest value; a null is a gap.
function curve(one) {
  const known = one.values.filter((value) => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const [first, last] = [one.at[0], one.at.at(-1)];
  const drawn = drawing("curve", `${one.name}, steps ${first} to ${last}, ${number(low)} to ${number(high)}`);
  const points = one.values.map((value, i) => value === null ? null
    : `${((WIDE * (one.at[i] - first)) / Math.max(1, last - first)).toFixed(1)},${(96 - (92 * (value - low)) / (high - low || 1)).toFixed(1)}`);
  for (const run of points.map((point) => point ?? "|").join(" ").split("|").map((text) => text.trim()).filter(Boolean)) {
    drawn.append(shape("value", "polyline", "points", run.includes(" ") ? run : `${run} ${run}`));
  }
  const unit = one.unit ? ` ${one.unit}` : "";
  const range = made("p", `${number(low)} to ${number(high)}, steps ${first} to ${last}`, "facts");
  return holding("figure", "", made("figcaption", `${one.name} ${number(one.values.at(-1))}${unit}`), drawn, range);
}
