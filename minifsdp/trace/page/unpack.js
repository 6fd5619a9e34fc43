// What is known: figures as people read them, and the packed data as events.

const data = JSON.parse(document.getElementById("data").textContent);
const by = id => document.getElementById(id);
const plot = by("plot"), top = by("top"), body = by("body"), memory = by("memory");
const cross = by("cross"), range = by("range"), mark = by("mark"), reading = by("reading");
const parts = data.parts.map(([name]) => name), whole = Math.max(1, data.whole);
const part = { forward: 0, backward: 0, reshard: 2, accumulate: 2, optimizer: 3, optimizer_wait: 3 };
const view = { from: 0, to: whole };  // tenths of a microsecond, as all times here
let shown = null;  // the rank that is
let high = 20, chosen = -1, ink = {};

// Figures

const number = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits });
const ms = time => number(time / 1e4, 3) + " ms";
const bytes = count => {
  const [size, name] = count >= 2 ** 30 ? [2 ** 30, "GiB"]
    : count >= 1e5 ? [2 ** 20, "MiB"] : count >= 1e3 ? [2 ** 10, "KiB"] : [1, "bytes"];
  return number(count / size, count / size < 10 ? 2 : 1) + " " + name;
};
const steps = (from, to, count) => {  // round values between, about `count` of them
  const raw = Math.max((to - from) / count, 1e-9), ten = 10 ** Math.floor(Math.log10(raw));
  const step = ten * [1, 2, 5, 10].find(m => m * ten >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to * (1 + 1e-12); k++) {
    found.push(k * step || 0);  // not -0
  }
  return found;
};

// Unpacking

const sums = list => { let sum = 0; return list.map(each => sum += each); };
const innermost = (events, thread) => {  // stretches of the thread that belong to one event each
  const edges = [], running = [], found = [];
  events.forEach((e, index) => {
    if (e.thread === thread && e.end > e.start) edges.push([e.start, 1, index], [e.end, 0, index]);
  });
  edges.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  let since = 0;
  for (const [at, begins, index] of edges) {
    if (running.length && at > since) {
      found.push({ start: since, end: at, event: events[Math.max(...running)] });
    }
    since = at;
    if (begins) running.push(index); else running.splice(running.indexOf(index), 1);
  }
  return found;
};
const flights = events => {  // of messages, from when they are asked for until they are waited for
  const asked = new Map(), found = [];
  for (const e of events) {
    const gathers = /^(unshard|prefetch|wait)$/.test(e.kind), key = e.row + "/" + gathers;
    if (/^(unshard|prefetch|reduce)$/.test(e.kind)) asked.set(key, e);
    else if (/wait$/.test(e.kind) && asked.has(key)) {
      const before = asked.get(key);
      asked.delete(key);
      if (e.start > before.end) {
        found.push({ start: before.end, end: e.start, event: before, row: e.row });
      }
    }
  }
  return found;
};
const unpacked = rank => {
  if (!rank.events || rank.list) return rank;
  const { kind, row, start, lasted, inside, size, held, thread, deferred } = rank.events;
  const starts = sums(start), points = sums(held), late = new Set(deferred);
  rank.list = starts.map((at, i) => ({
    index: i, kind: data.kinds[parseInt(kind[i], 36)][0], row: row[i], start: at,
    end: at + lasted[i], own: lasted[i] - inside[i], bytes: data.sizes[size[i]],
    held: points[i], thread: thread[i] || 0, deferred: late.has(i),
  }));
  for (const e of rank.list) e.part = part[e.kind] ?? 1;
  const threads = [...new Set(rank.list.map(e => e.thread))].sort();
  rank.own = threads.flatMap(each => innermost(rank.list, each));
  rank.main = rank.own.filter(each => each.event.thread === 0);
  rank.flights = flights(rank.list);
  const [times, ...columns] = rank.held.map(sums);
  rank.curve = times.map((at, i) => ({ start: at, values: columns.map(column => column[i]) }));
  for (const point of rank.curve) point.total = point.values.reduce((a, b) => a + b, 0);
  rank.peak = rank.curve.reduce((a, b) => b.total > a.total ? b : a, { total: 0, start: 0 });
  return rank;
};
