// How values are shown, and what is drawn from them. All text is set as text, so that no name in a table can be markup, and made
// visible first, so that no name can turn the order of a line around.
"use strict";

const KEPT_S = 300; // five minutes
const SHOWN_S = 30; // at least, of an axis of time
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

// A grid of text: columns are their headings, lines are lists of texts or of [text, class].
function grid(columns, lines, label) {
  const table = made("table");
  if (label) table.setAttribute("aria-label", label);
  const top = table.createTHead().insertRow();
  for (const name of columns) top.append(made("th", name));
  const body = table.createTBody();
  for (const one of lines) {
    const row = body.insertRow();
    for (const cell of one) row.append(Array.isArray(cell) ? made("td", ...cell) : made("td", cell));
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

// Seconds on the axis of time: all that is known, within bounds.
const axis = (moments) => (moments.length ? Math.min(Math.max(moments.at(-1).at_s - moments[0].at_s, SHOWN_S), KEPT_S) : SHOWN_S);

// Moments of one table or lane as [x, x of its end, value]: each lasts until the next, two seconds at most.
function stretches(moments, value) {
  const shown = axis(moments);
  const x = (at_s) => WIDE * (1 - (moments.at(-1).at_s - at_s) / shown);
  return moments.flatMap((one, i) => {
    const found = value(one);
    const end = Math.min(moments[i + 1]?.at_s ?? one.at_s, one.at_s + 2);
    return found && x(one.at_s) >= 0 ? [[x(one.at_s), x(end), found]] : [];
  });
}

// Lines of rates: put and done per second.
function rates(moments, name) {
  const points = stretches(moments, (one) => one.tables[name]);
  const most = Math.max(1, ...points.flatMap(([, , one]) => [one.put_s, one.done_s]));
  const drawn = drawing("rates", `rows per second of ${name}, up to ${rate(most)}`);
  for (const kind of ["put", "done"]) {
    const line = points.map(([x, , one]) => `${x.toFixed(1)},${(100 - (96 * one[`${kind}_s`]) / most).toFixed(1)}`);
    drawn.append(shape(kind, "polyline", "points", line.join(" ")));
  }
  return [drawn, most];
}

// A lane: at each moment the share of workers that work, from below, and of those that wait, above it.
function lane(moments, label, value) {
  const drawn = drawing("lane", label);
  const paths = { busy: "", idle: "" };
  const sums = { busy: 0, idle: 0 };
  for (const [x, next, one] of stretches(moments, value)) {
    const all = one.busy + one.idle;
    if (!all) continue;
    const edge = (100 * one.idle) / all;
    const wide = `h${(next - x).toFixed(2)}`;
    if (one.idle) paths.idle += `M${x.toFixed(2)},0${wide}V${edge.toFixed(1)}H${x.toFixed(2)}z`;
    if (one.busy) paths.busy += `M${x.toFixed(2)},${edge.toFixed(1)}${wide}V100H${x.toFixed(2)}z`;
    sums.busy += one.busy;
    sums.idle += one.idle;
  }
  for (const kind of ["busy", "idle"]) drawn.append(shape(kind, "path", "d", paths[kind]));
  return [drawn, sums];
}
