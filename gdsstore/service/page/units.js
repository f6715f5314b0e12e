"use strict";
// Numbers for people, each with its unit.

function scaled(value, base, units) {
  let at = 0;
  while (Math.abs(value) >= base && at < units.length - 1) {
    value /= base;
    at++;
  }
  return `${value >= 100 || at === 0 ? Math.round(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2)}\u00a0${units[at]}`;
}
const size = (value) => (value === null ? "–" : scaled(value, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]));
const binary = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]).replace(/\.0+(?=\u00a0)/, "");
const speed = (value) => (value === null ? "–" : scaled(value, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]));
const count = (value) => Number(value).toLocaleString("en-US");
const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}\u00a0%`);
const ticks = (value) => (Number.isInteger(value) ? count(value) : value.toFixed(1));

function span(seconds) {
  if (seconds === null) return "never";
  for (const [unit, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= unit) return `${(seconds / unit).toFixed(1)}\u00a0${name}`;
  }
  if (seconds === 0) return "0\u00a0s";
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 1 : 0)}\u00a0s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(1)}\u00a0ms` : `${(seconds * 1e6).toFixed(0)}\u00a0µs`;
}
