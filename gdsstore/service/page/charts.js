"use strict";
// Lines over time (uPlot). Colours come from the style sheet, so that they follow its scheme.

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const PALETTE = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];

const LEAST_S = 60; // of the time axis

class LineChart {
  // `format` writes a value for people. Series come and go: each is {label, color, dashed, values}.
  constructor(element, format, range) {
    this.element = element;
    this.format = format;
    this.range = range;
    this.plot = null;
    this.shape = "";
    this.nothing = document.createElement("p");
    this.nothing.className = "nothing";
    element.append(this.nothing);
    new ResizeObserver(() => this.resize()).observe(element);
  }

  size() {
    return { width: Math.max(200, this.element.clientWidth), height: 170 };
  }

  resize() {
    if (this.plot && Math.abs(this.plot.width - this.size().width) > 1) this.plot.setSize(this.size());
  }

  restyle() {
    this.shape = "";
  }

  show(times, series) {
    const some = series.some((each) => each.values.some((value) => value !== null));
    this.nothing.textContent = some ? "" : "no data yet";
    if (times.length === 0) return;
    const shape = JSON.stringify(series.map((each) => [each.label, each.color, each.dashed]));
    const data = [times, ...series.map((each) => each.values)];
    if (shape === this.shape) {
      this.plot.setData(data);
      return;
    }
    this.shape = shape;
    if (this.plot) this.plot.destroy();
    const axis = { stroke: color("--quiet"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot(
      {
        ...this.size(),
        series: [{ label: "time", value: (plot, at) => clock(at ?? last(plot.data[0])) }, ...series.map((each) => this.line(each))],
        scales: { x: { range: (_, low, high) => [Math.min(low, high - LEAST_S), high] }, y: { range: this.range } },
        axes: [
          { ...axis, size: 26, space: 90, values: (_, ticks) => ticks.map(clock) },
          { ...axis, size: 62, space: 32, values: (_, ticks) => ticks.map((tick) => this.format(tick)) },
        ],
        cursor: { y: false, drag: { x: false, y: false } },
        legend: { live: true },
      },
      data,
      this.element,
    );
  }

  line(each) {
    return {
      label: each.label,
      stroke: color(each.color),
      width: 2,
      dash: each.dashed ? [6, 4] : undefined,
      points: { show: (plot, index) => this.lonely(plot.data[index]) },
      value: (plot, value, index, at) => {
        const shown = at === null ? last(plot.data[index]) : value;
        return shown === null || shown === undefined ? "–" : this.format(shown);
      },
    };
  }

  lonely(values) {
    // A point between two gaps has no line.
    return values.some((value, at) => value !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null);
  }
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
