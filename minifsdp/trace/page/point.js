// Reading figures under the pointer or from event to event, and moving about in time.

const hide = () => { cross.hidden = mark.hidden = reading.hidden = true; };
const tell = (lines, colour, x, y) => {  // x from the left of the time axis, y from the plot's top
  reading.replaceChildren(...lines.map((text, index) => {
    const line = document.createElement(index ? "span" : "b");
    line.textContent = text;
    return line;
  }));
  reading.style.setProperty("--ink", colour);
  reading.hidden = cross.hidden = false;
  const left = body.offsetLeft + x, wide = plot.clientWidth, box = reading.getBoundingClientRect();
  cross.style.left = left + "px";
  const beside = left + 16 + box.width <= wide ? left + 16
    : left - 16 - box.width >= 0 ? left - 16 - box.width : Math.max(0, wide - box.width);
  const above = y - box.height - 14, over = beside < left && beside + box.width > left;
  reading.style.left = beside + "px";
  reading.style.top = (over ? (above >= 0 ? above : y + 18)
    : Math.max(0, Math.min(y - box.height / 2, plot.clientHeight - box.height))) + "px";
};
const heldLines = point => point ? [
  "held: " + bytes(point.total),
  ...point.values.map((value, i) => `\u2003${bytes(value)} ${data.held[i][1]}`),
] : [];
const labelOf = Object.fromEntries(data.kinds);
const about = e => {
  const lines = [`${data.names[shown.rows[e.row]]}: ${labelOf[e.kind]}`];
  const total = e.end - e.start;
  lines.push(e.own < total ? `${ms(e.own)} own of ${ms(total)}` : ms(total));
  lines.push(`from ${ms(e.start)} to ${ms(e.end)}`);
  if (e.bytes) lines.push(`message of ${bytes(e.bytes)}${e.deferred ? ", through shared memory" : ""}`);
  if (e.thread) lines.push(`on thread ${e.thread}, behind the training`);
  const [first, ...rest] = heldLines(shown.curve[e.held]);
  return first ? [...lines, first.replace("held", "held at its end"), ...rest] : lines;
};
const point = (e, x) => {  // at an event
  const wide = body.clientWidth, y = body.offsetTop + e.row * high;
  const from = Math.max(0, place(e.start, wide)), to = Math.min(wide, place(e.end, wide));
  tell(about(e), ink[e.kind], x ?? Math.max(0, Math.min(wide, (from + to) / 2)), y + high / 2);
  mark.hidden = false;
  Object.assign(mark.style, { left: body.offsetLeft + from - 3 + "px", top: y + "px",
    width: Math.max(2, to - from) + 6 + "px", height: high + "px" });
  chosen = e.index;
};
const under = (row, x) => {  // the event at a place of a row, or the message under way there
  const wide = body.clientWidth, size = (view.to - view.from) / wide, time = view.from + x * size;
  let found = null;
  for (const e of shown.list) {
    if (e.row !== row) continue;
    const away = Math.max(e.start - time, time - e.end, 0) / size, long = (e.end - e.start) / size;
    if (away > (long < 3 ? 2 : 0)) continue;
    if (!found || e.end - e.start < found.end - found.start) found = e;
  }
  return found || shown.flights.find(f => f.row === row && f.start <= time && f.end >= time);
};
const follow = event => {
  const canvas = event.target;
  if (![top, body, memory].includes(canvas)) return hide();
  const box = canvas.getBoundingClientRect(), frame = plot.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top, at = event.clientY - frame.top;
  const time = view.from + x / box.width * (view.to - view.from);
  mark.hidden = true;
  if (canvas === memory) {
    const now = shown.curve.findLast(each => each.start <= time);
    return tell([`at ${ms(time)}`, ...heldLines(now)], "none", x, at);
  }
  if (canvas === top) {
    const now = shown.main.find(each => each.start <= time && each.end >= time);
    const which = now ? now.event.part : 4, [name, label] = data.parts[which];
    const lines = now ? about(now.event) : [`at ${ms(time)}`];
    return tell([`Training thread: ${label}`, ...lines], ink["at-" + name], x, at);
  }
  const found = under(Math.floor(y / high), x);
  if (!found) { hide(); cross.hidden = false; cross.style.left = body.offsetLeft + x + "px"; return; }
  if (!found.event) return point(found, x);
  const { event: e, start, end, row } = found, what = e.kind === "reduce" ? "reduction" : "gather";
  tell([`${data.names[shown.rows[row]]}: ${what} ${e.deferred ? "asked for, not begun" : "under way"}`,
    `${ms(end - start)} before it is waited for`, `message of ${bytes(e.bytes)}`],
  ink[e.kind === "reduce" ? "reduce" : "unshard"], x, at);
};

// Moving about

const zoom = (from, to) => {
  const least = 50, size = Math.max(least, Math.min(whole, to - from));
  view.from = Math.max(0, Math.min(from, whole - size));
  view.to = view.from + size;
  hide();
  draw();
};
let dragged = null;  // where a drag began, in pixels of the time axis
const across = event => {
  const box = body.getBoundingClientRect();
  return Math.max(0, Math.min(box.width, event.clientX - box.left));
};
const timeAt = x => view.from + x / body.clientWidth * (view.to - view.from);
plot.addEventListener("pointerdown", event => {
  if (event.button === 0 && event.target.tagName === "CANVAS") dragged = across(event);
  if (event.pointerType !== "mouse") follow(event);
});
addEventListener("pointermove", event => {
  if (dragged === null) return plot.contains(event.target) ? follow(event) : undefined;
  const x = across(event), from = Math.min(x, dragged), wide = Math.abs(x - dragged);
  range.hidden = wide < 4;
  if (range.hidden) return follow(event);
  hide();
  Object.assign(range.style, { left: body.offsetLeft + from + "px", width: wide + "px" });
});
addEventListener("pointerup", event => {
  if (dragged === null) return;
  const x = across(event), from = Math.min(x, dragged), to = Math.max(x, dragged);
  dragged = null;
  range.hidden = true;
  if (to - from >= 4) zoom(timeAt(from), timeAt(to));
});
addEventListener("pointercancel", () => { dragged = null; range.hidden = true; });
plot.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") hide(); });
plot.addEventListener("blur", hide);
plot.addEventListener("dblclick", () => zoom(0, whole));
plot.addEventListener("wheel", event => {
  const size = view.to - view.from;
  if (event.ctrlKey || event.metaKey) {
    const at = timeAt(across(event)), factor = Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 100);
    zoom(at - (at - view.from) * factor, at + (view.to - at) * factor);
  } else if (size < whole && (event.deltaX || event.shiftKey)) {
    const by = (event.deltaX || event.deltaY) / body.clientWidth * size;
    zoom(view.from + by, view.to + by);
  } else return;
  event.preventDefault();
}, { passive: false });

const go = e => {
  if (!e) return;
  const size = view.to - view.from;
  if (e.end < view.from || e.start > view.to) zoom(e.start - size / 2, e.start + size / 2);
  point(e);
};
plot.addEventListener("keydown", event => {
  const list = shown.list, now = list[chosen], key = event.key, size = view.to - view.from;
  const first = list.find(e => e.start >= view.from), middle = now ? now.start : (view.from + view.to) / 2;
  const beside = way => {  // the event in a row above or below that is nearest in time
    for (let row = now.row + way; row >= 0 && row < shown.rows.length; row += way) {
      const there = list.filter(e => e.row === row);
      if (there.length) {
        return there.reduce((a, b) => Math.abs(b.start - now.start) < Math.abs(a.start - now.start) ? b : a);
      }
    }
  };
  const keys = {
    ArrowRight: () => go(now ? list[chosen + 1] : first), ArrowLeft: () => go(now ? list[chosen - 1] : first),
    ArrowDown: () => go(now ? beside(1) : first), ArrowUp: () => go(now ? beside(-1) : first),
    Home: () => go(list[0]), End: () => go(list[list.length - 1]),
    "+": () => { zoom(middle - size / 4, middle + size / 4); go(now); },
    "-": () => { zoom(middle - size, middle + size); go(now); },
    0: () => zoom(0, whole), Escape: () => { hide(); chosen = -1; },
  };
  keys["="] = keys["+"];
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[key]) return;
  event.preventDefault();
  keys[key]();
});
