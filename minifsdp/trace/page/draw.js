// The picture of a rank: its strip, a row for each unit, what it holds; and every rank's strip.

const colours = () => {
  const style = getComputedStyle(document.documentElement);
  ink = new Proxy({}, { get: (_, name) => style.getPropertyValue("--" + name).trim() });
  const known = {};
  const names = [...data.kinds.map(([name]) => name), ...parts.map(name => "at-" + name),
    ...data.held.map(([name]) => "held-" + name), "text", "soft", "rule", "grid", "card"];
  for (const name of names) known[name] = ink[name];
  ink = known;
};
const fit = (canvas, height) => {
  const dense = devicePixelRatio || 1, wide = canvas.clientWidth;
  canvas.width = Math.max(1, Math.round(wide * dense));
  canvas.height = Math.round(height * dense);
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(canvas.width / Math.max(1, wide), 0, 0, dense, 0, 0);
  return [pen, wide];
};
const place = (time, wide) => (time - view.from) / (view.to - view.from) * wide;
const seen = each => each.end >= view.from && each.start <= view.to;
const font = (pen, size) => { pen.font = size + "px " + getComputedStyle(document.body).fontFamily; };

const strip = (pen, shares, wide, y, height) => {  // four shares for each column
  pen.fillStyle = ink["at-outside"];
  pen.fillRect(0, y, wide, height);
  const order = [0, 3, 2, 1], count = shares.length / 4;  // what is exposed on top
  const dense = pen.canvas.width / wide, edge = x => Math.round(x / count * wide * dense) / dense;
  for (let x = 0; x < count; x++) {
    let from = y + height;
    for (const which of order) {
      const share = Math.min(1, shares[4 * x + which]) * height;
      if (share > 0) {
        pen.fillStyle = ink["at-" + parts[which]];
        pen.fillRect(edge(x), from -= share, edge(x + 1) - edge(x), share);
      }
    }
  }
};
const columns = (stretches, count) => {
  const shares = new Float32Array(4 * count), size = (view.to - view.from) / count;
  for (const each of stretches) {
    if (!seen(each)) continue;
    const first = Math.max(0, Math.floor((each.start - view.from) / size));
    const last = Math.min(count - 1, Math.floor((each.end - view.from) / size));
    for (let x = first; x <= last; x++) {
      const left = view.from + x * size;
      const inside = Math.min(each.end, left + size) - Math.max(each.start, left);
      shares[4 * x + each.event.part] += Math.max(0, inside) / size;
    }
  }
  return shares;
};

const TOP = 58, STRIP = 20;
const verticals = (pen, wide, from, to) => {
  pen.strokeStyle = ink.soft;
  pen.lineWidth = 1;
  pen.setLineDash([3, 3]);
  for (const at of shown.iterations) {
    const x = Math.round(place(at, wide)) + 0.5;
    if (x < 0 || x > wide) continue;
    pen.beginPath(); pen.moveTo(x, from); pen.lineTo(x, to); pen.stroke();
  }
  pen.setLineDash([]);
};
const drawTop = () => {
  const [pen, wide] = fit(top, TOP);
  font(pen, 12);
  const [unit, name] = view.to - view.from > 1e8 ? [1e7, "s"]
    : view.to - view.from > 1e4 ? [1e4, "ms"] : [10, "\u00b5s"];
  pen.fillStyle = ink.soft;
  for (const tick of steps(view.from / unit, view.to / unit, wide / 85)) {
    const x = place(tick * unit, wide), text = number(tick, 6) + " " + name;
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.max(0, Math.min(x - half, wide - 2 * half)), 29);
    pen.fillRect(Math.round(x), 33, 1, 3);
  }
  let free = 0;
  pen.fillStyle = ink.text;
  shown.iterations.forEach((at, index) => {
    const x = place(at, wide), text = "iteration " + (index + 1), long = pen.measureText(text).width;
    if (x < free || x > wide - 8) return;
    const short = x + long + 4 > wide ? String(index + 1) : text;
    pen.fillText(short, x + 4, 12);
    free = x + long + 12;
  });
  const dense = top.width;
  strip(pen, columns(shown.main, dense), wide, TOP - STRIP - 2, STRIP);
  verticals(pen, wide, 2, 16);
  verticals(pen, wide, 34, TOP);
};

const drawRows = () => {
  const count = shown.rows.length, [pen, wide] = fit(body, count * high + 2);
  const gap = high >= 22 ? 4 : high >= 17 ? 3 : 2, thick = high - 2 * gap;
  pen.fillStyle = ink.grid;
  for (let row = 0; row < count; row++) pen.fillRect(0, row * high + high / 2, wide, 1);
  const bar = (each, row, y, tall, least) => {
    const x = place(each.start, wide), end = place(each.end, wide);
    pen.fillRect(x, row * high + y, Math.max(end - x, least), tall);
  };
  // Behind all units, where the thread stands still for a message.
  pen.globalAlpha = 0.09;
  for (const { start, end, event } of shown.main) {
    if (!/^(reduce_)?wait$/.test(event.kind)) continue;
    pen.fillStyle = ink[event.kind];
    const x = place(start, wide), until = place(end, wide);
    pen.fillRect(x, 0, until - x, count * high + 2);
  }
  // Pale where the event is open but the thread is in another unit.
  for (const e of shown.list) {
    if (!seen(e) || e.own >= e.end - e.start) continue;
    pen.fillStyle = ink[e.kind];
    pen.globalAlpha = 0.26;
    bar(e, e.row, gap, thick, 0);
  }
  pen.globalAlpha = 1;
  for (const flight of shown.flights) {
    if (!seen(flight)) continue;
    const y = flight.row * high + high / 2;
    pen.strokeStyle = ink[flight.event.kind === "reduce" ? "reduce" : "unshard"];
    pen.lineWidth = high >= 17 ? 3 : 2;
    if (flight.event.deferred) pen.setLineDash([2, 3]);
    pen.beginPath();
    pen.moveTo(place(flight.start, wide), y);
    pen.lineTo(place(flight.end, wide), y);
    pen.stroke();
    pen.setLineDash([]);
  }
  // What is short is drawn at least a pixel wide where there is room between computations.
  const spans = shown.own.filter(each => each.event.part === 0), all = view.to - view.from;
  const mean = spans.reduce((sum, each) => sum + each.end - each.start, 0) / Math.max(1, spans.length);
  const least = mean / all * wide > 8 ? 1 : 0;
  const layer = kind => /wait/.test(kind) ? 2 : kind === "forward" || kind === "backward" ? 0 : 1;
  for (const level of [0, 1, 2]) {
    for (const each of shown.own) {
      const { kind, row, thread } = each.event;
      if (!seen(each) || layer(kind) !== level) continue;
      pen.fillStyle = ink[kind];
      if (thread) bar(each, row, high / 2, thick / 2, least);
      else bar(each, row, gap, thick, level ? least : 0);
    }
  }
  verticals(pen, wide, 0, count * high + 2);
};

const drawMemory = () => {
  const tall = innerWidth < 620 ? 96 : 128, [pen, wide] = fit(memory, tall);
  const most = Math.max(1, shown.peak.total), full = 1.2 * most;
  const y = value => tall - value / full * tall;
  const names = by("levels");
  names.replaceChildren();
  const unit = most >= 2 ** 30 ? 2 ** 30 : most >= 1e5 ? 2 ** 20 : 2 ** 10;
  const label = unit === 2 ** 30 ? "GiB" : unit === 2 ** 20 ? "MiB" : "KiB";
  for (const level of steps(0, most / unit, 3)) {
    const line = document.createElement("span");
    line.textContent = number(level, 3) + " " + label;
    line.style.top = Math.min(tall - 6, y(level * unit)) + "px";
    names.append(line);
    pen.fillStyle = ink.rule;
    pen.fillRect(0, Math.round(y(level * unit)), wide, 1);
  }
  // In each column of pixels the moment at which most is held.
  const count = memory.width, size = (view.to - view.from) / count, best = new Array(count).fill(null);
  shown.curve.forEach((point, index) => {
    const until = shown.curve[index + 1]?.start ?? whole;
    if (until < view.from || point.start > view.to) return;
    const first = Math.max(0, Math.floor((point.start - view.from) / size));
    const last = Math.min(count - 1, Math.floor((until - view.from) / size));
    for (let x = first; x <= last; x++) {
      if (!best[x] || point.total > best[x].total) best[x] = point;
    }
  });
  best.forEach((point, x) => {
    let from = tall;
    point?.values.forEach((value, which) => {
      const height = value / full * tall;
      pen.fillStyle = ink["held-" + data.held[which][0]];
      pen.fillRect(x * wide / count, from -= height, wide / count + 0.02, height);
    });
  });
  verticals(pen, wide, 0, tall);
  if (shown.mailbox && shown.mailbox <= full) {
    pen.strokeStyle = ink.text;
    pen.setLineDash([6, 4]);
    pen.beginPath(); pen.moveTo(0, y(shown.mailbox)); pen.lineTo(wide, y(shown.mailbox)); pen.stroke();
    pen.setLineDash([]);
  }
  const highest = best.reduce((a, b) => (b?.total ?? 0) > (a?.total ?? 0) ? b : a, null);
  if (highest?.total) {
    font(pen, 12);
    const at = Math.max(0, place(highest.start, wide)), level = y(highest.total);
    const text = "peak " + bytes(highest.total), long = pen.measureText(text).width;
    const left = at + long + 12 > wide ? at - long - 8 : at + 8;
    pen.fillStyle = ink.card;
    pen.fillRect(left - 2, level - 16, long + 4, 15);
    pen.fillStyle = ink.text;
    pen.beginPath(); pen.arc(at, level, 3.5, 0, 7); pen.fill();
    pen.fillText(text, left, level - 4);
  }
};

const draw = () => {
  if (!shown.list || !plot.clientWidth) return;
  drawTop(); drawRows(); drawMemory();
  mark.hidden = true;
  Object.assign(plot.dataset, view);
  for (const button of by("zooms").children) {
    const { from, to } = button.dataset;
    button.setAttribute("aria-pressed", String(+from === view.from && +to === view.to));
  }
};
const drawRanks = () => {
  data.ranks.forEach((rank, index) => {
    const canvas = by("ranks").children[index].querySelector("canvas");
    if (!canvas.clientWidth) return;
    const tall = by("ranks").matches(".many") ? 12 : 18, [pen, wide] = fit(canvas, tall);
    strip(pen, Array.from(rank.strip, digit => parseInt(digit, 36) / 35), wide, 0, tall);
  });
};
