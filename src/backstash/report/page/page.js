"use strict";

// The page, from the data that is in it.

const report = JSON.parse(document.getElementById("report").textContent);
let chart = null, table = null;

function section(id, title, ...children) {
  return element("section", { id, "aria-labelledby": `${id}-title` }, element("h2", { id: `${id}-title` }, title), ...children);
}

function header() {
  return element("header", {},
    element("p", { class: "over" }, "backstash report"),
    element("h1", {}, report.title || "report"),
    report.subtitle ? element("p", { class: "subtitle" }, report.subtitle) : null,
    report.command ? copyable(report.command) : null,
    report.made ? element("p", { class: "faint" }, report.made) : null);
}

function facts() {
  const tiles = report.facts.map((fact) => {
    const known = fact.value !== null && fact.value !== undefined;
    return element("div", { class: `fact${known ? "" : " unknown"}` },
      element("dt", {}, fact.label),
      element("dd", { class: "value" }, known ? shown(fact.value, fact.unit) : "not measured"),
      fact.note ? element("dd", { class: "note" }, fact.note) : null,
      !known && fact.how ? element("dd", {}, element("details", {}, element("summary", {}, "How to measure it"), copyable(fact.how))) : null);
  });
  const list = element("dl", { class: "facts", id: "facts" }, ...tiles);
  list.style.setProperty("--across", tiles.length % 3 ? Math.min(4, tiles.length) : 3);
  return list;
}

function split() {
  return section("split", report.split.label, ...shares(report.split.parts));
}

// Bytes by place: a bar, and its legend.
function shares(parts) {
  const total = parts.reduce((sum, part) => sum + part.bytes, 0);
  const share = (part) => `${(part.bytes / total * 100).toFixed(part.bytes / total < 0.1 ? 1 : 0)} %`;
  const bar = element("div", { class: "split", "aria-hidden": "true" }, ...parts.map((part) => {
    const piece = element("i", { class: part.key });
    piece.style.flexGrow = part.bytes / total;
    return piece;
  }));
  const list = element("ul", { class: "legend" }, ...parts.map((part) => element("li", {},
    element("i", { class: part.key }), element("b", {}, bytes(part.bytes)), ` ${share(part)} `,
    element("span", { class: "faint" }, part.name))));
  return [bar, list];
}

// The plan compared with the measured steps, and the choice for each class of saved tensors.
function plan() {
  const { note, figures, parts, classes } = report.plan;
  return section("plan", "The plan, and what came of it", note ? element("p", {}, note) : null,
    figures && figures.rows.length ? simpleTable("Planned and measured", figures) : null,
    parts && parts.length ? element("h3", {}, "What the plan does with the bytes that a step saves") : null,
    ...(parts && parts.length ? shares(parts) : []),
    classes && classes.rows.length ? element("h3", {}, "Class by class") : null,
    classes && classes.rows.length ? simpleTable("Class by class", classes) : null);
}

// A table whose rows all exist.
function simpleTable(label, { columns, rows }) {
  const kind = (at) => columns[at].unit === "text" ? undefined : "number";
  const head = columns.map((column, at) => element("th", { scope: "col", class: kind(at) }, column.label));
  const body = rows.map((row) => element("tr", {}, ...row.map((value, at) =>
    element("td", { class: kind(at) }, shown(value, columns[at].unit)))));
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)));
}

function ranges() {
  const [begin, end] = wholeOf(report.curve);
  return [{ label: "whole recording", begin, end },
    ...(report.curve.marks || []).map((mark) => ({ ...mark, label: `step ${mark.label}` }))];
}

function curve() {
  chart = new Chart(report.curve, report.modules && report.modules.lives);
  const choice = element("select", { id: "range", "aria-label": "Part of the recording" },
    ...ranges().map((range, at) => element("option", { value: at }, range.label)));
  choice.addEventListener("change", () => {
    const range = ranges()[choice.value];
    chart.zoom([range.begin, range.end]);
  });
  const chip = element("button", { type: "button", class: "chip", id: "filter", hidden: true });
  chip.addEventListener("click", () => { if (table) table.choose(null); table.grid.focus(); });
  return section("curve", "What was held, over time",
    element("div", { class: "bar-of-controls" }, ranges().length > 1 ? choice : null, chip),
    chart.box, chart.readout,
    element("p", { class: "faint keys" }, "Memory is above the line; below it what moved to a lower tier, and what was discarded. With the chart focused: ",
      element("kbd", {}, "←"), " ", element("kbd", {}, "→"), " move the cursor, with ", element("kbd", {}, "Shift"),
      " further, ", element("kbd", {}, "P"), " goes to the peak."));
}

// A row of the table was chosen, or let go.
function choose(path) {
  if (!chart || !chart.lives) return;
  let owner = path;
  while (owner && !chart.knows(owner) && owner.includes(".")) owner = owner.slice(0, owner.lastIndexOf("."));
  const known = path !== null && chart.knows(owner);
  chart.filter(known ? owner : null);
  const chip = document.getElementById("filter");
  chip.hidden = path === null;
  chip.textContent = known ? `only ${owner} ✕` : `no curve for ${path} ✕`;
  chip.setAttribute("aria-label", known ? `The curve shows only ${owner}. Show all.` : `There is no curve for ${path}. Show all.`);
}

function modules() {
  const { columns, rows, note } = report.modules;
  table = new Table(columns, rows, choose);
  const search = element("input", { type: "search", id: "search", placeholder: "find a module", "aria-label": "Find a module" });
  search.addEventListener("input", () => { table.wanted = search.value; table.update(); });
  const deepest = rows.reduce((most, row) => Math.max(most, String(row[0]).split(".").length), 1);
  const depth = element("select", { id: "depth", "aria-label": "Levels of modules" }, element("option", { value: 0 }, "all levels"),
    ...Array.from({ length: Math.min(9, deepest - 1) }, (_, at) => element("option", { value: at + 1 }, at ? `${at + 1} levels` : "1 level")));
  depth.addEventListener("change", () => { table.depth = Number(depth.value); table.update(); });
  return section("modules", "By module", note ? element("p", { class: "faint" }, note) : null,
    element("div", { class: "bar-of-controls" }, search, deepest > 1 ? depth : null, table.count),
    table.grid,
    chart && chart.lives ? element("p", { class: "faint keys" }, element("kbd", {}, "↑"), " ", element("kbd", {}, "↓"),
      " move, ", element("kbd", {}, "Enter"), " shows a module, and all in it, alone in the curve above; ",
      element("kbd", {}, "Esc"), " shows all. A module's curve leaves out copies that were read back.") : null);
}

function stalls() {
  const most = report.stalls[0].duration;
  const rows = report.stalls.map((stall) => {
    const bar = element("td", { class: "bar seconds" }, seconds(stall.duration));
    bar.style.setProperty("--share", `${(stall.duration / most) * 100}%`);
    const when = chart ? element("button", { type: "button", onclick: () => show(stall.seconds) }, `at ${seconds(stall.seconds)}`) : seconds(stall.seconds);
    return element("tr", {}, bar, element("td", {}, stall.what), element("td", { class: "path" }, stall.module), element("td", { class: "when" }, when));
  });
  const head = ["waited", "in", "for", ""].map((text) => element("th", { scope: "col" }, text));
  return section("stalls", "The longest waits", element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The longest waits" },
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))));
}

function show(time) {
  const choice = document.getElementById("range");
  choice.value = 0;
  const whole = ranges()[0];
  chart.zoom([whole.begin, whole.end]);
  chart.move(Math.max(0, report.curve.seconds.findLastIndex((each) => each <= time)));
  chart.svg.focus();
  chart.svg.scrollIntoView({ block: "center" });
}

function advice() {
  return section("advice", "Advice", ...report.advice.map((each) =>
    element("div", { class: "advice" }, element("p", {}, each.text), each.code ? copyable(each.code) : null)));
}

function graph() {
  const shown = report.graph ? element("img", { src: report.graph, alt: "The autograd graph" }) : element("pre", {}, report.graph_text);
  return section("graph", "The autograd graph", element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The autograd graph" }, shown));
}

function notes() {
  return section("notes", "What to know about these figures", element("ul", {}, ...report.notes.map((note) => element("li", {}, note))));
}

function draw() {
  const parts = [
    header(),
    report.facts && facts(),
    report.split && report.split.parts.some((part) => part.bytes > 0) && split(),
    report.plan && plan(),
    report.curve && report.curve.seconds.length && curve(),
    report.modules && modules(),
    report.stalls && stalls(),
    report.advice && advice(),
    (report.graph || report.graph_text) && graph(),
    report.notes && report.notes.length && notes(),
  ];
  document.getElementById("main").replaceChildren(...parts.filter((part) => part instanceof Node));
  if (chart) chart.draw();
  if (table) table.draw();
}

document.title = `${report.title || "report"} – backstash`;
draw();
