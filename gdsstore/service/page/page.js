"use strict";
// Asks the daemon for its status every two seconds and shows it. All text goes in by textContent: nothing is ever parsed as HTML.

const POLL_MS = 2000;
const PATIENCE_MS = 8000;
const KEPT_S = 600; // of the charts
const OLD_S = 15; // data older than this is stale although somebody answers; of huge stores there is news less often
const OLDEST_S = 120;
const TOKEN = "gdsstore-token";

const $ = (id) => document.getElementById(id);
const times = [];
const kept = new Map(); // chart -> label -> values, as long as `times`
let latest = null; // the last document, and when it came (performance.now)
let latestAt = 0;
let older = []; // documents before it, of the last seconds

// --- small pieces of the page ---

function node(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function tile(name, value, note) {
  const made = node("div");
  made.append(node("dt", name), node("dd", value));
  if (note) made.append(node("dd", note, "small"));
  return made;
}

function bar(share, label) {
  const made = node("progress", undefined, "bar");
  made.max = 1;
  made.value = share;
  made.setAttribute("aria-label", label);
  return made;
}

function swatch(name) {
  const made = node("i", undefined, "swatch");
  made.style.backgroundColor = color(name);
  return made;
}

// --- charts ---

const atLeast = (least) => (plot, low, high) => [0, Math.max(least, high * 1.1)];
const charts = {
  throughput: { chart: new LineChart($("throughput"), speed, atLeast(1e6)), values: speeds },
  hits: { chart: new LineChart($("hits"), percent, () => [0, 1.02]), values: hitRates },
  latency: { chart: new LineChart($("latency"), span, atLeast(1e-4)), values: delays },
  queue: { chart: new LineChart($("queue"), ticks, atLeast(4)), values: waiting },
};
const FIXED = { direct: "--c1", compat: "--c2", bounce: "--c3", host: "--c4", drive: "--c1", load: "--c1", prefetch: "--c3", offload: "--c2", maintenance: "--c8" };

function look(label, number) {
  const word = label.split(" ");
  const name = FIXED[last(word)] ?? FIXED[word[0]] ?? PALETTE[number % PALETTE.length];
  return { label, color: name, dashed: word[0] === "write" };
}

function remember(values) {
  // One column more in all series; what has no value now has a gap.
  times.push(Date.now() / 1000);
  for (const [name, now] of Object.entries(values)) {
    if (!kept.has(name)) kept.set(name, new Map());
    const series = kept.get(name);
    for (const label of now.keys()) if (!series.has(label)) series.set(label, new Array(times.length - 1).fill(null));
    for (const [label, list] of series) list.push(now.get(label) ?? null);
  }
  while (times.length && times[0] < last(times) - KEPT_S) {
    times.shift();
    for (const series of kept.values()) for (const list of series.values()) list.shift();
  }
}

function drawCharts() {
  for (const [name, { chart }] of Object.entries(charts)) {
    const series = [...(kept.get(name) ?? new Map())].sort(([a], [b]) => (a < b ? -1 : 1));
    chart.show(times, series.map(([label, values], number) => ({ ...look(label, number), values })));
  }
}

// --- the rest of the document ---

function showTiles(now) {
  const { store, host_cache: cache, daemon } = latest;
  const total = (direction) => sum([...now.throughput].filter(([label]) => label.startsWith(direction)).map(([, value]) => value));
  const rate = (tier) => now.hits.get(tier) ?? null;
  const disk = tile("disk", size(store.physical_bytes), `of ${size(store.capacity_bytes)}`);
  disk.append(bar(store.physical_bytes / store.capacity_bytes, "disk used"));
  const tiles = [
    tile("read", speed(total("read")), `${size(sum(latest.throughput.filter((row) => row.direction === "read").map((row) => row.bytes)))} since start`),
    tile("written", speed(total("write")), `${size(sum(latest.throughput.filter((row) => row.direction === "write").map((row) => row.bytes)))} since start`),
    tile("pages stored", count(store.pages), `${count(store.pages_reclaimed)} reclaimed`),
    disk,
  ];
  if (cache) {
    const filled = tile("host cache", size(cache.resident_bytes), `of ${size(cache.size_bytes)}, hit rate ${percent(rate("shared") ?? rate("host"))}`);
    filled.append(bar(cache.resident_bytes / cache.size_bytes, "host cache filled"));
    tiles.push(filled);
  }
  if (daemon) tiles.push(tile("clients", count(daemon.clients ?? 0), `${count(daemon.leases ?? 0)} leases`));
  $("tiles").replaceChildren(...tiles);
}

function driveCard(drive) {
  const made = node("div", undefined, "drive");
  made.dataset.health = drive.health;
  made.append(node("h3", drive.path));
  const line = node("p");
  line.append(node("span", drive.health, "health"), node("span", ` · ${size(drive.free_bytes)} free of ${size(drive.total_bytes)}`, "quiet"));
  made.append(line);
  if (drive.total_bytes) made.append(bar(1 - drive.free_bytes / drive.total_bytes, "space used"));
  const table = node("table");
  const head = node("tr");
  for (const name of ["", "breaker", "for 1 MiB", "errors"]) head.append(node("th", name, name && name !== "breaker" ? "number" : ""));
  const body = node("tbody");
  for (const name of ["read", "write"]) {
    const each = drive[name];
    const row = node("tr");
    const breaker = each.breaker.replace("_", " ") + (each.retry_in_s > 0 ? `, again in ${span(each.retry_in_s)}` : "");
    row.append(node("th", name), node("td", breaker), node("td", each.seconds_a_mib === null ? "–" : span(each.seconds_a_mib), "number"));
    row.append(node("td", `${count(each.errors)} of ${count(each.transfers)}`, "number"));
    body.append(row);
  }
  const top = node("thead");
  top.append(head);
  table.append(top, body);
  made.append(table);
  return made;
}

function showProcesses() {
  const { daemon, clients } = latest;
  const all = daemon ? [{ ...daemon, name: "the daemon", connected_s: daemon.uptime_s ?? null, leases: null }, ...clients] : clients;
  const shown = all.map((each) => {
    const row = node("tr");
    const name = node("td", each.name, "wide");
    name.append(node("span", ` ${each.pid}`, "quiet"));
    row.append(name);
    for (const value of [size(each.read_bytes), size(each.written_bytes), each.leases === null ? "" : count(each.leases), span(each.connected_s)]) row.append(node("td", value, "number"));
    return row;
  });
  $("processes").replaceChildren(...shown);
}

function showNamespaces() {
  const { rows, count: all } = latest.namespaces;
  const shown = rows.map((each, number) => {
    const row = node("tr");
    const name = node("td", undefined, "wide");
    name.append(swatch(PALETTE[number % PALETTE.length]), each.name);
    row.append(name, node("td", count(each.pages), "number"), node("td", size(each.bytes), "number"), node("td", each.namespace.slice(0, 12), "digest"));
    return row;
  });
  if (all > rows.length) shown.push(wideRow(`and ${count(all - rows.length)} smaller ones`));
  if (!all) shown.push(wideRow("no namespaces yet"));
  $("namespaces").replaceChildren(...shown);
}

function wideRow(text) {
  const row = node("tr");
  const cell = node("td", text, "quiet");
  cell.colSpan = 4;
  row.append(cell);
  return row;
}

function showErrors() {
  const shown = latest.errors.map((each) => {
    const row = node("li");
    const when = node("time", new Date(each.time_s * 1000).toLocaleString([], { hour12: false }));
    when.dateTime = new Date(each.time_s * 1000).toISOString();
    const text = node("p");
    text.append(node("strong", each.level, each.level), ` ${each.message}`, node("span", each.count > 1 ? ` (${count(each.count)} times)` : "", "quiet"));
    row.append(when, text);
    return row;
  });
  $("errors").replaceChildren(...(shown.length ? shown : [node("li", "none", "quiet")]));
}

function drawGrid() {
  showSegments(grid, latest, document.querySelector("#grid-by input:checked").value);
}

function showAll() {
  $("content").hidden = false; // before the charts look how wide they are
  const now = Object.fromEntries(Object.entries(charts).map(([name, { values }]) => [name, values(older, latest)]));
  remember(now);
  drawCharts();
  showTiles(now);
  $("drives").replaceChildren(...latest.drives.map(driveCard));
  drawGrid();
  showProcesses();
  showNamespaces();
  showErrors();
  const oldest = Math.max(...latest.queues.map((queue) => queue.oldest_s));
  $("queue-note").textContent = `requests that wait${oldest > 0 ? `, the oldest for ${span(oldest)}` : ""}`;
  $("where").textContent = latest.store.path;
  const { daemon } = latest;
  $("about").textContent = daemon ? `gdsstore ${daemon.version ?? ""}, process ${daemon.pid}, up for ${span(daemon.uptime_s ?? 0)}, engine ${latest.store.engine}.` : "";
}

// --- asking ---

function sayState(state, text) {
  $("state").dataset.state = state;
  $("state").textContent = text;
  $("content").classList.toggle("stale", state === "lost" || state === "stale");
}

function judge(problem) {
  // What the reader must know of the data's age before believing it.
  const age = latest ? (performance.now() - latestAt) / 1000 : null;
  const pause = older.length ? latest.clock_s - last(older).clock_s : 0;
  const has = latest ? `; what is shown is ${span(Math.round(age))} old` : "";
  if (problem) sayState("lost", `${problem}${has}`);
  else if (age > Math.min(OLDEST_S, Math.max(OLD_S, 3 * pause))) sayState("stale", `the daemon answers, with data that is ${span(Math.round(age))} old`);
  else if (latest.daemon?.draining) sayState("draining", "draining");
  else sayState("live", "live");
}

async function ask() {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch("api/status", { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  $("login").hidden = answer.status !== 401;
  if (answer.status === 401) {
    if (token) $("login-said").textContent = "That token was not taken.";
    sessionStorage.removeItem(TOKEN);
    return "token needed";
  }
  if (!answer.ok) return `the daemon cannot say: ${(await answer.text()).trim()}`;
  const found = await answer.json();
  if (found.version !== 1) return `this page does not know version ${found.version} of the status; reload it`;
  if (latest && found.clock_s === latest.clock_s && found.store.uuid === latest.store.uuid) return "";
  if (latest) older = [...older.filter((each) => latest.clock_s - each.clock_s < 2 * WINDOW_S), latest];
  latest = found;
  latestAt = performance.now();
  showAll();
  return "";
}

async function turn() {
  let problem;
  try {
    problem = await ask();
  } catch {
    problem = "daemon lost";
  }
  if (problem && latest) {
    remember(Object.fromEntries(Object.keys(charts).map((name) => [name, new Map()])));
    drawCharts();
  }
  judge(problem);
}

let timer = 0;
async function poll() {
  clearTimeout(timer);
  if (!document.hidden) await turn();
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

const grid = new SegmentGrid($("grid"), $("grid-cell"));
$("grid-by").addEventListener("change", () => latest && drawGrid());
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, $("token").value.trim());
  $("token").value = "";
  poll();
});
document.addEventListener("visibilitychange", () => document.hidden || poll());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const { chart } of Object.values(charts)) chart.restyle();
  if (latest) {
    drawCharts();
    showNamespaces();
    drawGrid();
  }
});
poll();
