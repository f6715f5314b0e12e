"use strict";
// Rates: differences of the counters of two documents. `older` are the documents before `latest`, the oldest first.

const WINDOW_S = 10; // over which hit rates and delays are taken
const SPEED_S = 5; // over which speeds are taken: processes tell what they moved once a second

function since(older, latest, seconds) {
  // The newest document of the same run that is at least so old; or its oldest, where none is. null: there is none.
  const run = older.filter((each) => sameRun(each, latest));
  const fit = run.filter((each) => latest.clock_s - each.clock_s >= seconds);
  return last(fit) ?? run[0] ?? null;
}

const sameRun = (a, b) => a.daemon?.pid === b.daemon?.pid && a.store.uuid === b.store.uuid && a.clock_s < b.clock_s;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const last = (values) => values[values.length - 1];

function moved(doc) {
  // Bytes since the start, by direction and path.
  const found = new Map();
  for (const row of doc.throughput) {
    const label = `${row.direction} ${row.path}`;
    found.set(label, (found.get(label) ?? 0) + row.bytes);
  }
  return found;
}

function speeds(older, latest) {
  // Bytes a second, by direction and path.
  const old = since(older, latest, SPEED_S);
  if (old === null) return new Map();
  const was = moved(old);
  const seconds = latest.clock_s - old.clock_s;
  return new Map([...moved(latest)].map(([label, bytes]) => [label, Math.max(0, bytes - (was.get(label) ?? 0)) / seconds]));
}

function hitRates(older, latest) {
  // By tier; null where nothing was asked for.
  const old = since(older, latest, WINDOW_S);
  const found = new Map(latest.tiers.map((tier) => [tier.tier, null]));
  if (old === null) return found;
  for (const tier of latest.tiers) {
    const was = old.tiers.find((each) => each.tier === tier.tier);
    const hits = tier.hits - (was?.hits ?? 0);
    const misses = sum(Object.values(tier.misses)) - sum(Object.values(was?.misses ?? {}));
    if (hits >= 0 && misses >= 0 && hits + misses > 0) found.set(tier.tier, hits / (hits + misses));
  }
  return found;
}

const WORSE = [[0.5, "median"], [0.99, "p99"]];

function delays(older, latest) {
  // Seconds that a chunk's I/O took, by direction, over all drives: null where there was none.
  const old = since(older, latest, WINDOW_S);
  const found = new Map();
  for (const direction of ["read", "write"]) {
    const counts = old === null ? [] : difference(chunks(latest, direction), chunks(old, direction));
    for (const [share, name] of WORSE) found.set(`${direction} ${name}`, quantile(latest.latencies.bounds_s, counts, share));
  }
  return found;
}

function chunks(doc, direction) {
  const rows = doc.latencies.rows.filter((row) => row.what === "chunk" && row.of === direction);
  return doc.latencies.bounds_s.concat(0).map((_, bucket) => sum(rows.map((row) => row.counts[bucket])));
}

const difference = (now, was) => now.map((value, at) => value - was[at]);

function quantile(bounds, counts, share) {
  // From buckets, as if the values lay evenly in each of them; the last bucket has no upper end.
  const all = sum(counts);
  if (!(all > 0)) return null;
  let below = 0;
  for (const [bucket, inside] of counts.entries()) {
    if (inside > 0 && below + inside >= share * all) {
      if (bucket === bounds.length) return last(bounds);
      const low = bucket ? bounds[bucket - 1] : 0;
      return low + ((share * all - below) / inside) * (bounds[bucket] - low);
    }
    below += inside;
  }
  return null;
}

const waiting = (older, latest) => new Map(latest.queues.map((queue) => [queue.class, queue.waiting]));
