"""How `report.html` looks and moves: its style sheet, and the script that reads a curve aloud.

Both are part of the page, which fetches nothing. Without scripts only the readings under the
pointer are missing.
"""

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --text: #1b2430; --soft: #5c6879; --rule: #e2e6ec; --grid: #e9ecf1;
  --train: #2563eb; --eval: #d9600a; --rate: #0f8a5f; --norm: #7c3aed; --speed: #0e7f9c;
  --use: #b8327a; --mark: #dc2626; --chosen: #eef4ff; }
@media (prefers-color-scheme: dark) { :root {
  --page: #10141a; --card: #181e27; --text: #e4e9f0; --soft: #98a5b8; --rule: #2a323f;
  --grid: #262e3a; --train: #6ea0ff; --eval: #ff9f52; --rate: #43cf97; --norm: #b494ff;
  --speed: #4cc4e4; --use: #f37fb8; --mark: #ff6b6b; --chosen: #1d2839; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
  -webkit-text-size-adjust: 100%; overflow-wrap: anywhere; }
main { max-width: 1120px; margin: 0 auto; padding: 2.2rem 1.4rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; letter-spacing: -.015em; }
h2 { font-size: 1rem; margin: 0; }
section > h2 { font-size: 1.2rem; margin: 2.4rem 0 .8rem; letter-spacing: -.01em; }
h3 { font-size: .95rem; margin: 0 0 .5rem; color: var(--soft); font-weight: 600; }
.state { margin: .3rem 0 1.4rem; color: var(--soft); }
.card, .chart, .tiles div { background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.4rem, 1fr));
  gap: .7rem; margin: 0; }
.tiles div { padding: .7rem .9rem .75rem; }
.tiles dt { font-size: .82rem; color: var(--soft); }
.tiles dd { margin: 0; font-size: 1.42rem; line-height: 1.3; font-weight: 600;
  font-variant-numeric: tabular-nums; letter-spacing: -.01em; }
.tiles small { display: block; font-size: .8rem; font-weight: 400; color: var(--soft);
  letter-spacing: 0; }
.formula { margin: .8rem 0 0; font: .8rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas,
  "Liberation Mono", monospace; color: var(--soft); }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: .9rem; margin-top: 1.6rem; }
.chart { margin: 0; padding: .95rem 1.2rem .6rem; min-width: 0; }
.wide, .chart:last-child:nth-child(even) { grid-column: 1 / -1; }
figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: .1rem .6rem; }
figcaption > span { color: var(--soft); font-size: .85rem; }
figcaption ul { display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0 0 0 auto; padding: 0;
  list-style: none; font-size: .85rem; color: var(--soft); }
figcaption li::before { content: ""; display: inline-block; width: 1.1em; height: 3px;
  border-radius: 2px; margin-right: .45em; vertical-align: .25em; background: var(--ink); }
figcaption li.faint::before { opacity: .35; }
figcaption li.mark::before { width: 2px; height: .8em; vertical-align: -.05em; }
.plot { position: relative; height: 190px; margin: 1rem .5rem 1.45rem 2.7rem;
  touch-action: pan-y; cursor: crosshair; border-radius: 2px; }
.wide .plot { height: 300px; }
.plot:focus-visible { outline: 2px solid var(--train); outline-offset: 6px; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; stroke: var(--ink); stroke-width: 2px; stroke-linejoin: round;
  stroke-linecap: round; vector-effect: non-scaling-stroke; }
.plot .grid { stroke: var(--grid); stroke-width: 1px; stroke-linecap: butt; }
.plot .faint { stroke-width: 1px; opacity: .38; }
.plot .dots { stroke-width: 7px; opacity: 1; }
.plot .faint.dots { stroke-width: 4px; }
.plot .mark { stroke-linecap: butt; }
.rows span, .columns span { position: absolute; font-size: .76rem; line-height: 1;
  color: var(--soft); font-variant-numeric: tabular-nums; white-space: nowrap; }
.rows span { right: 100%; margin-right: .55rem; transform: translateY(-50%); }
.columns span { top: 100%; margin-top: .5rem; transform: translateX(-50%); }
.axis { margin: 0 .5rem; font-size: .76rem; line-height: 1; color: var(--soft);
  text-align: right; }
.cross { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft);
  opacity: .6; pointer-events: none; }
.reading { position: absolute; top: 0; z-index: 2; pointer-events: none; width: max-content;
  max-width: min(16rem, 50% + 10px);
  padding: .45rem .65rem; background: var(--card); color: var(--text);
  border: 1px solid var(--rule); border-radius: 8px; box-shadow: 0 3px 14px #0003;
  font-size: .8rem; line-height: 1.45; font-variant-numeric: tabular-nums; }
.reading b { display: block; }
.reading span { display: block; color: var(--soft); }
.reading span::before { content: ""; display: inline-block; width: .55em; height: .55em;
  border-radius: 50%; margin-right: .5em; background: var(--ink, transparent); }
.reading span:not([class])::before { display: none; }
.train { --ink: var(--train); } .eval { --ink: var(--eval); } .rate { --ink: var(--rate); }
.norm { --ink: var(--norm); } .speed { --ink: var(--speed); } .use { --ink: var(--use); }
.mark { --ink: var(--mark); }
.card { padding: .95rem 1.2rem; margin-bottom: .9rem; }
.text { white-space: pre-wrap; margin: 0; }
.prompt { font-weight: 600; }
.answers { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .45rem 1rem;
  margin: .7rem 0 0; padding-top: .7rem; border-top: 1px solid var(--rule); }
.answers dt { color: var(--soft); font-size: .85rem; line-height: 1.75;
  font-variant-numeric: tabular-nums; }
.answers dd { margin: 0; }
.answers dd:not(:last-child) { color: var(--soft); }
.tables { display: grid; grid-template-columns: 1.6fr 1fr; gap: .9rem; align-items: start; }
table { width: 100%; border-collapse: collapse; font-size: .875rem; }
th { text-align: left; white-space: nowrap; font-weight: 600; color: var(--soft); }
th, td { padding: .28rem .5rem; vertical-align: top; border-top: 1px solid var(--rule); }
tr:first-child > * { border-top: 0; }
td:first-child { white-space: nowrap; }
td { font-variant-numeric: tabular-nums; }
.chosen { background: var(--chosen); } .chosen td:nth-child(2) { font-weight: 600; }
.none, .note { color: var(--soft); }
.flag { white-space: nowrap; }
.note { margin: .8rem 0 0; font-size: .875rem; }
@media (max-width: 760px) {
  main { padding: 1.3rem .8rem 2rem; }
  .charts, .tables { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: 1fr 1fr; gap: .5rem; }
  .tiles dd { font-size: 1.2rem; }
  .chart { padding: .8rem .8rem .5rem; }
  .wide .plot { height: 230px; }
  figcaption ul { margin-left: 0; flex-basis: 100%; }
  .answers { grid-template-columns: minmax(0, 1fr); gap: .1rem; }
  .answers dd { margin-bottom: .5rem; }
  td:first-child { white-space: normal; } }
@media print { body { background: none; } .chart, .card { break-inside: avoid; } }
"""

SCRIPT = """
"use strict";
for (const chart of document.querySelectorAll(".chart")) {
  const data = JSON.parse(chart.querySelector("script").textContent);
  const plot = chart.querySelector(".plot");
  const cross = chart.querySelector(".cross"), reading = chart.querySelector(".reading");
  const skipped = Object.keys(data.marks).map(Number);
  let shown = data.low;

  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle; else high = middle;
    }
    return step - steps[low] <= steps[high] - step ? low : high;
  };
  const line = (tag, text, look) => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (look) element.className = look;
    reading.append(element);
  };
  const show = step => {
    const found = data.curves.map(curve => nearest(curve.x, step));
    const first = data.curves[0];
    shown = first.x[found[0]];
    const place = (shown - data.low) / (data.high - data.low);
    cross.style.left = 100 * place + "%";
    reading.style.left = place < 0.5 ? `calc(${100 * place}% + 12px)` : "auto";
    reading.style.right = place < 0.5 ? "auto" : `calc(${100 - 100 * place}% + 12px)`;
    reading.replaceChildren();
    line("b", "step " + shown.toLocaleString("en"));
    if (first.tokens[found[0]]) {
      line("span", first.tokens[found[0]].toLocaleString("en") + " tokens so far");
    }
    data.curves.forEach((curve, index) => {
      const at = found[index], other = curve.x[at] === shown ? "" : ` (step ${curve.x[at]})`;
      line("span", `${curve.name} ${curve.y[at]}${other}`, curve.look);
    });
    if (skipped.length) {
      const mark = skipped[nearest(skipped, step)];
      if (Math.abs(mark - step) <= (data.high - data.low) / 200) {
        line("span", `step ${mark} skipped: ${data.marks[mark]}`, "mark");
      }
    }
    cross.hidden = reading.hidden = false;
  };
  const hide = () => { cross.hidden = reading.hidden = true; };

  const follow = event => {
    const box = plot.getBoundingClientRect();
    show(data.low + (event.clientX - box.left) / box.width * (data.high - data.low));
  };
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", event => {
    const steps = data.curves[0].x, at = nearest(steps, shown);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    event.preventDefault();
    show(steps[Math.max(0, Math.min(to, steps.length - 1))]);
  });
}
"""
