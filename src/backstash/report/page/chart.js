"use strict";

// What was held over time: memory above the line, what went down below it, and a cursor.

const HEIGHT = 320, LEFT = 76, RIGHT = 12, TOP = 26, BOTTOM = 28;

// The time of a recording: from what was held first to the last change.
function wholeOf(curve) {
  const begin = curve.seconds[0];
  return [begin, Math.max(curve.seconds.at(-1), begin + 1e-6)];
}

// A time on the axis, in the unit of its neighbours.
function tickLabel(time, tick) {
  const [scale, unit] = tick < 1e-4 ? [1e6, "µs"] : tick < 0.1 ? [1e3, "ms"] : [1, "s"];
  const places = Math.max(0, -Math.floor(Math.log10(tick * scale) + 1e-9));
  return `${(Math.round(time / tick) * tick * scale).toFixed(places)} ${unit}`;
}

class Chart {
  constructor(curve, lives) {
    this.curve = curve;
    this.lives = lives;
    this.range = wholeOf(curve);
    this.at = 0;
    this.path = null;
    this.svg = drawn("svg", { class: "chart", height: HEIGHT, tabindex: 0, role: "slider" });
    this.svg.setAttribute("aria-label", "Cursor over the time of the recording");
    this.readout = element("div", { class: "readout" });
    this.box = element("div", { class: "plot" }, this.svg);
    this.svg.addEventListener("keydown", (event) => this.key(event));
    for (const kind of ["pointermove", "pointerdown"]) {
      this.svg.addEventListener(kind, (event) => this.point(event));
    }
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.filter(null);
    this.at = this.peak();
  }

  // The places that are drawn: all, or those of one module, which has two, and those where its bytes were let go.
  filter(path) {
    this.path = path;
    this.tiers = path === null ? this.curve.tiers : this.tiersOf(path);
    this.sums = [false, true].map((below) => this.curve.seconds.map((_, at) =>
      this.tiers.reduce((sum, tier) => sum + (Boolean(tier.below) === below ? tier.bytes[at] : 0), 0)));
    this.draw();
  }

  tiersOf(path) {
    const { paths, path: owners, point, memory, down, packed, recomputed } = this.lives;
    const sides = [memory, down, packed, recomputed];
    const wanted = paths.map((each) => each === path || each.startsWith(`${path}.`));
    const totals = sides.map(() => 0), steps = sides.map(() => new Map());
    owners.forEach((owner, at) => {
      if (!wanted[owner]) return;
      sides.forEach((changes, side) =>
        steps[side].set(point[at], (steps[side].get(point[at]) || 0) + changes[at]));
    });
    const held = steps.map((changes, side) => this.curve.seconds.map((_, at) => {
      totals[side] += changes.get(at) || 0;
      return Math.max(0, totals[side]);
    }));
    return [
      { key: "keep", name: "in memory", below: false, bytes: held[0] },
      { key: "disk", name: "went down", below: true, bytes: held[1] },
      { key: "packed", name: "freed by packing", below: true, bytes: held[2] },
      { key: "recomputed", name: PLACES.recomputed, below: true, bytes: held[3] },
    ].filter((tier, at) => at < 2 || tier.bytes.some((value) => value > 0));
  }

  // Whether the module, or a part of it, has a curve of its own.
  knows(path) {
    return Boolean(this.lives) &&
      this.lives.paths.some((each) => each === path || each.startsWith(`${path}.`));
  }

  zoom(range) { this.range = range; this.at = this.peak(); this.draw(); }

  // The first and last point that are in view.
  view() {
    const times = this.curve.seconds;
    let first = times.findIndex((time) => time >= this.range[0]);
    if (first < 0) first = times.length - 1;
    let last = times.findLastIndex((time) => time <= this.range[1]);
    if (last < first) last = first;
    return [first, last];
  }

  peak() {
    const [first, last] = this.view();
    let best = first;
    for (let at = first; at <= last; at += 1) if (this.sums[0][at] > this.sums[0][best]) best = at;
    return best;
  }

  move(at) {
    const [first, last] = this.view();
    this.at = Math.min(last, Math.max(first, at));
    this.drawCursor();
  }

  key(event) {
    const [first, last] = this.view();
    const far = event.shiftKey ? Math.max(1, Math.round((last - first) / 20)) : 1;
    const to = {
      ArrowRight: this.at + far, ArrowUp: this.at + far, ArrowLeft: this.at - far, ArrowDown: this.at - far,
      Home: first, End: last, p: this.peak(), P: this.peak(),
    }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.move(to);
  }

  point(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const time = this.range[0] + (x - LEFT) / (this.width - LEFT - RIGHT) * (this.range[1] - this.range[0]);
    const at = this.curve.seconds.findLastIndex((each) => each <= time);
    this.move(Math.max(0, at));
  }

  x(time) {
    return LEFT + (time - this.range[0]) / (this.range[1] - this.range[0]) * (this.width - LEFT - RIGHT);
  }

  y(value) { return TOP + (this.most - value) / (this.most - this.least) * (HEIGHT - TOP - BOTTOM); }

  draw() {
    this.width = Math.max(320, this.box.clientWidth || 0);
    const [first, last] = this.view();
    const most = (sums) => sums.slice(Math.max(0, first - 1), last + 1).reduce((a, b) => Math.max(a, b), 0);
    const [above, below] = this.sums.map(most);
    this.most = above * 1.04 || (below ? below * 0.04 : 1);
    this.least = -below * 1.04;
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren();
    this.named = [];
    this.drawSpans();
    this.drawGrid();
    this.drawTiers(Math.max(0, first - 1), last);
    this.svg.append(...this.named);
    this.cursor = drawn("g", { class: "cursor" });
    this.svg.append(this.cursor);
    this.move(this.at);
  }

  drawSpans() {
    const clip = (time) => Math.min(this.width - RIGHT, Math.max(LEFT, this.x(time)));
    const bottom = HEIGHT - BOTTOM;
    for (const phase of this.curve.phases || []) {
      const [begin, end] = [clip(phase.begin), clip(phase.end)];
      if (phase.label !== "backward" || end - begin < 0.5) continue;
      this.svg.append(drawn("rect", { class: "backward", x: begin, y: TOP, width: end - begin, height: bottom - TOP }));
      if (end - begin > 70) this.named.push(drawn("text", { class: "over-shade", x: end - 6, y: TOP + 14, "text-anchor": "end" }, "backward"));
    }
    for (const mark of this.curve.marks || []) {
      const [begin, end] = [clip(mark.begin), clip(mark.end)];
      if (end - begin < 0.5) continue;
      if (this.x(mark.end) <= this.width - RIGHT + 0.5) {
        this.svg.append(drawn("line", { class: "mark", x1: end, x2: end, y1: TOP - 14, y2: bottom }));
      }
      if (end - begin > 56) {
        const label = mark.label.length > 24 ? `${mark.label.slice(0, 23)}…` : mark.label;
        this.svg.append(drawn("text", { x: (begin + end) / 2, y: TOP - 9, "text-anchor": "middle" }, `step ${label}`));
      }
    }
  }

  drawGrid() {
    const room = (this.most - this.least) / 5;
    const step = 2 ** Math.ceil(Math.log2(Math.max(1, room)));
    for (let value = Math.ceil(this.least / step) * step; value <= this.most; value += step) {
      const y = this.y(value);
      this.svg.append(drawn("line", { class: value === 0 ? "zero" : "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      this.svg.append(drawn("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, bytes(Math.abs(value))));
    }
    const span = this.range[1] - this.range[0];
    const rough = span / Math.max(2, this.width / 110), power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
    for (let time = Math.ceil(this.range[0] / tick) * tick; time <= this.range[1] + tick / 1e6; time += tick) {
      this.svg.append(drawn("text", { x: this.x(time), y: HEIGHT - 8, "text-anchor": "middle" }, tickLabel(time, tick)));
    }
  }

  drawTiers(first, last) {
    const clipped = (time) => Math.min(this.range[1], Math.max(this.range[0], time));
    const xs = [];
    for (let at = first; at <= last; at += 1) xs.push(this.x(clipped(this.curve.seconds[at])).toFixed(1));
    const right = this.x(clipped(this.curve.seconds[last + 1] ?? this.range[1])).toFixed(1);
    const bases = { true: new Float64Array(xs.length), false: new Float64Array(xs.length) };
    for (const tier of this.tiers) {
      const base = bases[Boolean(tier.below)], sign = tier.below ? -1 : 1;
      const top = base.map((value, at) => value + sign * tier.bytes[first + at]);
      const edge = (values) => {
        const points = [];
        values.forEach((value, at) => {
          const y = this.y(value).toFixed(1);
          points.push(`${xs[at]} ${y}`, `${xs[at + 1] ?? right} ${y}`);
        });
        return points;
      };
      const outline = [...edge(top), ...edge(base).reverse()];
      this.svg.append(drawn("path", { class: `tier ${tier.key}`, d: `M${outline.join("L")}Z` }));
      bases[Boolean(tier.below)] = top;
    }
    const y = this.y(0);
    this.svg.append(drawn("line", { class: "zero", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
  }

  drawCursor() {
    const time = this.curve.seconds[this.at], x = this.x(Math.max(this.range[0], time));
    this.cursor.replaceChildren(
      drawn("line", { x1: x, x2: x, y1: TOP - 4, y2: HEIGHT - BOTTOM }),
      drawn("circle", { cx: x, cy: this.y(this.sums[0][this.at]), r: 4 }),
    );
    const parts = this.tiers.map((tier) => [tier, bytes(tier.bytes[this.at])]);
    const total = bytes(this.sums[0][this.at]);
    this.readout.replaceChildren(
      element("span", { class: "time" }, `at ${seconds(time)}`),
      ...parts.map(([tier, text]) => element("span", { class: "swatch" },
        element("i", { class: tier.key }), `${tier.name} `, element("b", {}, text))),
      element("span", { class: "total" }, "in memory ", element("b", {}, total)),
    );
    const words = parts.map(([tier, text]) => `${tier.name} ${text}`).join(", ");
    const [first, last] = this.view();
    for (const [key, value] of Object.entries({
      "aria-valuemin": first, "aria-valuemax": last, "aria-valuenow": this.at,
      "aria-valuetext": `at ${seconds(time)}: in memory ${total}; ${words}`,
    })) this.svg.setAttribute(key, value);
  }
}
