"use strict";

// A table of any length: only the rows in view exist. Arrows move, Enter chooses, a column's head sorts.

const ROW = 30, SUMMED = ["bytes", "count", "seconds", "share"];

class Table {
  constructor(columns, rows, onChoose) {
    this.columns = columns;
    this.all = rows;
    this.onChoose = onChoose;
    this.sort = { column: columns.length > 1 ? 1 : 0, down: columns.length > 1 };
    this.depth = 0;
    this.wanted = "";
    this.active = 0;
    this.chosen = null;
    this.head = element("div", { class: "row head", role: "row" });
    this.body = element("div", { class: "rows", role: "presentation" });
    this.grid = element("div", {
      class: "grid", role: "grid", tabindex: 0, "aria-label": "Modules", "aria-colcount": columns.length,
    }, this.head, this.body);
    this.grid.style.setProperty("--columns", `minmax(11rem, 3fr) repeat(${columns.length - 1}, minmax(6.4rem, 1fr))`);
    this.count = element("span", { class: "faint" });
    this.grid.addEventListener("scroll", () => this.draw());
    this.grid.addEventListener("keydown", (event) => this.key(event));
    this.grid.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => this.draw()).observe(this.grid);
    this.update();
  }

  // Rows of one depth: deeper modules are added to the one above them.
  grouped() {
    if (!this.depth) return this.all;
    const groups = new Map();
    for (const row of this.all) {
      const path = row[0].split(".").slice(0, this.depth).join(".");
      const group = groups.get(path);
      if (!group) {
        const own = row[0] === path;
        groups.set(path, this.columns.map((column, at) =>
          at === 0 ? path : own || SUMMED.includes(column.unit) ? row[at] : null));
        continue;
      }
      this.columns.forEach((column, at) => {
        if (at && SUMMED.includes(column.unit) && row[at] !== null) group[at] = (group[at] || 0) + row[at];
        else if (at && !SUMMED.includes(column.unit) && group[at] !== row[at]) group[at] = null;
      });
    }
    return [...groups.values()];
  }

  update() {
    const words = this.wanted.toLowerCase();
    const { column, down } = this.sort;
    const numeric = this.columns[column].unit !== "text";
    this.rows = this.grouped().filter((row) => !words || String(row[0]).toLowerCase().includes(words));
    this.rows.sort((a, b) => {
      const order = numeric
        ? (a[column] ?? -1) - (b[column] ?? -1)
        : String(a[column] ?? "").localeCompare(String(b[column] ?? ""), "en", { numeric: true });
      return down ? -order : order;
    });
    this.most = this.rows.reduce((most, row) => Math.max(most, Number(row[1]) || 0), 0);
    this.active = Math.min(this.active, Math.max(0, this.rows.length - 1));
    this.grid.setAttribute("aria-rowcount", this.rows.length + 1);
    this.count.textContent = `${this.rows.length.toLocaleString("en")} ${this.rows.length === 1 ? "row" : "rows"}`;
    this.body.style.height = `${this.rows.length * ROW}px`;
    this.drawHead();
    this.draw();
  }

  drawHead() {
    this.head.replaceChildren(...this.columns.map((column, at) => {
      const sorted = this.sort.column === at;
      const way = sorted ? (this.sort.down ? "descending" : "ascending") : "none";
      const button = element("button", {
        type: "button", onclick: () => {
          this.sort = { column: at, down: sorted ? !this.sort.down : column.unit !== "text" };
          this.update();
          this.head.children[at].firstChild.focus();
        },
      }, column.label, element("span", { "aria-hidden": "true" }, sorted ? (this.sort.down ? " ↓" : " ↑") : ""));
      return element("div", { role: "columnheader", "aria-sort": way, class: column.unit }, button);
    }));
  }

  draw() {
    const first = Math.max(0, Math.floor(this.grid.scrollTop / ROW) - 5);
    const last = Math.min(this.rows.length, first + Math.ceil((this.grid.clientHeight || 400) / ROW) + 10);
    const made = [];
    for (let at = first; at < last; at += 1) made.push(this.row(at));
    this.body.replaceChildren(...made);
    this.grid.setAttribute("aria-activedescendant", this.rows.length ? `row-${this.active}` : "");
  }

  row(at) {
    const values = this.rows[at];
    const path = values[0], chosen = path === this.chosen;
    const cells = this.columns.map((column, number) => {
      const text = shown(values[number], column.unit);
      const cell = element("div", { role: "gridcell", class: column.unit, title: number === 0 ? text : undefined }, text);
      if (number === 1 && this.most && typeof values[1] === "number") {
        cell.style.setProperty("--share", `${(values[1] / this.most) * 100}%`);
        cell.classList.add("bar");
      }
      return cell;
    });
    const row = element("div", {
      role: "row", id: `row-${at}`, "aria-rowindex": at + 2, "data-at": at, "aria-selected": String(chosen),
      class: `row${at === this.active ? " active" : ""}${chosen ? " chosen" : ""}`,
    }, ...cells);
    row.style.top = `${at * ROW}px`;
    return row;
  }

  key(event) {
    if (event.target !== this.grid || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.grid.clientHeight / ROW) - 2);
    const to = {
      ArrowDown: this.active + 1, ArrowUp: this.active - 1, PageDown: this.active + page,
      PageUp: this.active - page, Home: 0, End: this.rows.length - 1,
    }[event.key];
    if (to !== undefined) {
      this.active = Math.max(0, Math.min(this.rows.length - 1, to));
      const top = this.active * ROW, room = this.grid.clientHeight - ROW * 2;
      if (top < this.grid.scrollTop) this.grid.scrollTop = top;
      if (top > this.grid.scrollTop + room) this.grid.scrollTop = top - room;
      this.draw();
    } else if (event.key === "Enter" || event.key === " ") this.choose(this.active);
    else if (event.key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
  }

  click(event) {
    const row = event.target.closest("[data-at]");
    if (!row) return;
    this.active = Number(row.dataset.at);
    this.choose(this.active);
  }

  // Choosing what is chosen already lets it go.
  choose(at) {
    const path = at === null || !this.rows.length ? null : this.rows[at][0];
    this.chosen = path === this.chosen ? null : path;
    this.draw();
    this.onChoose(this.chosen);
  }
}
