"use strict";
// The segments as a grid of cells on a canvas, by fill, heat, namespace or state.

class SegmentGrid {
  // `describe(cell)` tells of a cell in words; `paint(cell)` gives its [colour, share of it that is coloured].
  constructor(canvas, said) {
    this.canvas = canvas;
    this.said = said;
    this.cells = 0;
    this.chosen = -1;
    this.hint = said.textContent;
    canvas.addEventListener("pointermove", (event) => this.choose(this.at(event)));
    canvas.addEventListener("pointerdown", (event) => this.choose(this.at(event)));
    canvas.addEventListener("pointerleave", () => this.choose(-1));
    canvas.addEventListener("blur", () => this.choose(-1));
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(cells, paint, describe) {
    this.cells = cells;
    this.paint = paint;
    this.describe = describe;
    this.draw();
    if (this.chosen >= 0) this.choose(this.chosen);
  }

  measure() {
    const width = this.canvas.clientWidth;
    const side = this.cells <= 64 ? 26 : this.cells <= 200 ? 20 : 15;
    const columns = Math.max(1, Math.floor(width / side));
    return { side, columns, rows: Math.max(1, Math.ceil(this.cells / columns)), width };
  }

  draw() {
    const { side, columns, rows, width } = this.measure();
    if (!width || !this.paint) return;
    const scale = window.devicePixelRatio || 1;
    this.canvas.style.height = `${rows * side}px`;
    this.canvas.width = width * scale;
    this.canvas.height = rows * side * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const empty = color("--empty");
    for (let cell = 0; cell < this.cells; cell++) {
      const x = (cell % columns) * side;
      const y = Math.floor(cell / columns) * side;
      const [shade, share] = this.paint(cell);
      pen.fillStyle = empty;
      pen.fillRect(x, y, side - 2, side - 2);
      pen.fillStyle = shade;
      const height = Math.round((side - 2) * share);
      pen.fillRect(x, y + side - 2 - height, side - 2, height);
      if (cell === this.chosen) {
        pen.strokeStyle = color("--text");
        pen.lineWidth = 2;
        pen.strokeRect(x + 1, y + 1, side - 4, side - 4);
      }
    }
  }

  at(event) {
    const { side, columns } = this.measure();
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / side);
    const cell = Math.floor((event.clientY - box.top) / side) * columns + column;
    return column < columns && cell < this.cells ? cell : -1;
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.measure().columns, ArrowUp: -this.measure().columns }[event.key];
    if (step === undefined || !this.cells) return;
    event.preventDefault();
    this.choose(this.chosen < 0 ? 0 : Math.min(this.cells - 1, Math.max(0, this.chosen + step)));
  }

  choose(cell) {
    const before = this.chosen;
    this.chosen = cell < this.cells ? cell : -1;
    const text = this.chosen < 0 ? this.hint : this.describe(this.chosen);
    if (this.said.textContent !== text) this.said.textContent = text;
    if (before !== this.chosen) this.draw();
  }
}

const STATES = { free: "--c8", open: "--c3", sealed: "--c1", lost: "--c5" };
const HEAT = [[60, "--heat1", "last minute"], [3600, "--heat2", "last hour"], [86400, "--heat3", "last day"], [Infinity, "--heat4", "longer ago"]];
const warmth = (age) => HEAT.find(([limit]) => age <= limit)[1];

const PAINT = {
  fill: (cells, at) => [color("--c1"), cells.fill[at]],
  heat: (cells, at) => (cells.age_s[at] === null ? [color("--empty"), 1] : [color(warmth(cells.age_s[at])), 1]),
  namespace: (cells, at) => (cells.namespace[at] < 0 ? [color("--empty"), 1] : [color(PALETTE[cells.namespace[at] % PALETTE.length]), 1]),
  state: (cells, at) => [color(STATES[cells.state[at]]), cells.state[at] === "free" ? 0.25 : 1],
};
const LEGEND = {
  fill: () => [["--c1", "written"], ["--empty", "free"]],
  heat: () => [...HEAT.map(([, name, text]) => [name, text]), ["--empty", "never used"]],
  namespace: (latest) => latest.namespaces.rows.slice(0, PALETTE.length).map((each, at) => [PALETTE[at], each.name]),
  state: (latest) => Object.entries(STATES).map(([state, name]) => [name, `${state}: ${count(latest.segments.states[state])}`]),
};

function showSegments(grid, latest, by) {
  const { cells, count: all, a_cell: each, seen } = latest.segments;
  const rows = latest.namespaces.rows;
  const paint = PAINT[by];
  const parts = [`${count(all)} segments of ${binary(latest.store.segment_bytes)}`];
  if (each > 1) parts.push(`a cell is ${each} of them`);
  if (seen < all) parts.push(`${count(seen)} looked into so far`);
  $("grid-sum").textContent = all ? parts.join(", ") : "no segments yet";
  grid.show(cells.first.length, (at) => paint(cells, at), (at) => {
    const name = each > 1 ? `segments from ${cells.first[at]}` : `segment ${cells.first[at]}`;
    const holds = cells.namespace[at] < 0 ? "" : `, ${rows[cells.namespace[at]].name}`;
    const used = cells.age_s[at] === null ? "never used" : `used ${span(cells.age_s[at])} ago`;
    return `${name}: ${cells.state[at]}, ${percent(cells.fill[at])} written, ${count(cells.pages[at])} pages, ${used}${holds}`;
  });
  $("grid-legend").replaceChildren(...LEGEND[by](latest).map(([name, text]) => {
    const made = node("span");
    made.append(swatch(name), text);
    return made;
  }));
}
