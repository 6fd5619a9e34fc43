// Which rank is shown, and the parts of the page that follow from it.

const show = index => {
  shown = unpacked(data.ranks[index]);
  chosen = -1;
  [...by("ranks").children].forEach((button, i) => {
    button.setAttribute("aria-checked", String(i === index));
    button.tabIndex = i === index ? 0 : -1;
  });
  const picked = by("ranks").children[index], list = by("ranks");
  list.scrollTop = Math.max(picked.offsetTop + picked.offsetHeight - list.clientHeight,
    Math.min(picked.offsetTop, list.scrollTop));
  for (const each of document.querySelectorAll("article.rank")) {
    each.hidden = +each.dataset.rank !== shown.rank;
  }
  by("who").textContent = "Rank " + shown.rank;
  by("absent").hidden = !!shown.list;
  by("present").hidden = !shown.list;
  hide();
  if (!shown.list) return;
  const rows = shown.rows.length;
  plot.classList.toggle("tall", rows > 24);
  high = rows <= 10 ? 30 : rows <= 24 ? 22 : rows <= 48 ? 17 : 14;
  by("names").replaceChildren(...shown.rows.map((name, row) => {
    const line = document.createElement("span"), text = document.createElement("bdi");
    line.title = data.names[name];
    text.textContent = shown.labels[row];
    line.style.cssText = `height:${high}px;line-height:${high}px;font-size:${high < 17 ? 11 : 12.5}px`;
    line.append(text);
    return line;
  }));
  legend();
  draw();
};
const legend = () => {
  const item = (text, colour, look = "") => {
    const line = document.createElement("li");
    line.textContent = text;
    line.className = look;
    line.style.setProperty("--ink", `var(--${colour})`);
    return line;
  };
  const there = new Set(shown.list.map(e => e.kind)), lines = [];
  for (const [kind, label] of data.kinds) if (there.has(kind)) lines.push(item(label, kind));
  const flies = (late, reduces) => shown.flights.some(
    each => each.event.deferred === late && (each.event.kind === "reduce") === reduces);
  if (flies(false, false)) lines.push(item("gather under way", "unshard", "flight"));
  if (flies(true, false)) lines.push(item("asked for, not begun", "unshard", "asked"));
  if (flies(false, true)) lines.push(item("reduction under way", "reduce", "flight"));
  if (flies(true, true)) lines.push(item("reduction not begun", "reduce", "asked"));
  by("phases").replaceChildren(...lines);
  const held = data.held.map(([name, label]) => item(label, "held-" + name));
  if (shown.mailbox) held.push(item(`mailboxes: ${bytes(shown.mailbox)} all the time`, "text", "level"));
  by("bytes").replaceChildren(...held);
};

const button = (parent, text, act) => {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", act);
  parent.append(made);
  return made;
};
data.ranks.forEach((rank, index) => {
  const made = button(by("ranks"), "", () => show(index));
  made.setAttribute("role", "radio");
  const name = document.createElement("span"), exposed = document.createElement("span");
  name.textContent = "rank " + rank.rank;
  exposed.textContent = number(rank.exposed / 10, 1) + "%";
  made.append(name, document.createElement("canvas"), exposed);
});
by("ranks").classList.toggle("many", data.ranks.length > 10);
by("ranks").addEventListener("keydown", event => {
  const way = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  if (!way) return;
  event.preventDefault();
  const to = Math.max(0, Math.min(data.ranks.length - 1, data.ranks.indexOf(shown) + way));
  show(to);
  by("ranks").children[to].focus();
});
const starts = data.ranks[0].iterations, edge = (whole - (starts[0] ?? 0)) / 50 / starts.length;
const stretches = starts.map((at, i) => {
  const from = Math.max(0, Math.round(at - edge));  // with a little of what comes before
  return [from, Math.max(from + 50, starts[i + 1] ?? whole), `iteration ${i + 1}`];
});
if (starts.length > 1) {
  const few = starts.length <= 8 ? stretches : [stretches[0], stretches[starts.length - 1]];
  for (const [from, to, text] of [[0, whole, "all"], ...few]) {
    const made = button(by("zooms"), text, () => zoom(from, to));
    Object.assign(made.dataset, { from, to });
  }
}

colours();
for (const each of document.querySelectorAll(".script")) each.hidden = false;
by("compare").hidden = data.ranks.length < 2;
const start = Math.max(0, data.ranks.findIndex(rank => rank.events));
if (starts.length > 1 && data.ranks[start].rows.length * starts.length > 60) {
  [view.from, view.to] = stretches[starts.length - 1];  // of so much, the last iteration first
}
show(start);
drawRanks();
new ResizeObserver(() => { draw(); drawRanks(); }).observe(plot);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours(); draw(); drawRanks();
});
